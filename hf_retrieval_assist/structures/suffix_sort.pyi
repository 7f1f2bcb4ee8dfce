import numpy as np
from numpy.typing import NDArray

def rank_codes(
    codes: NDArray[np.uint8], width: int, vocab_size: int
) -> tuple[NDArray[np.uint8], int]: ...
def align_suffixes(
    byte_suffixes: NDArray[np.int32], width: int, separators: int, out: NDArray[np.uint32]
) -> None: ...
def bucket_starts(
    codes: NDArray[np.uint8], width: int, shift: int, out: NDArray[np.uint32]
) -> None: ...
