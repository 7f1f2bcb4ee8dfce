import numpy as np
from numpy.typing import NDArray

def share_classes(
    parents: NDArray[np.int32],
    shares: NDArray[np.float32],
    counts: NDArray[np.int32],
    matched: int,
    rows: NDArray[np.int32],
    columns: NDArray[np.int32],
) -> NDArray[np.int32]: ...

class OpenDrafts:
    def __len__(self) -> int: ...

def calibrated(
    texts: list[OpenDrafts],
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    probs: NDArray[np.float32],
    classes: NDArray[np.int32],
    offsets: NDArray[np.int64],
    known: NDArray[np.float32] | None,
    counts: NDArray[np.float64],
) -> NDArray[np.float32]: ...
def judge(
    texts: list[OpenDrafts],
    tokens: NDArray[np.int32],
    offsets: NDArray[np.int64],
    bins: NDArray[np.float64],
    counts: NDArray[np.float64],
    priors: NDArray[np.float64],
    memory: float,
) -> None: ...
