import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]

def share_classes(
    parents: Ints, shares: Floats, counts: Ints, matched: int, rows: Ints, columns: Ints
) -> Ints: ...

class OpenDrafts:
    def __len__(self) -> int: ...

def calibrated(
    texts: list[OpenDrafts],
    token_ids: Ints,
    parents: Ints,
    probs: Floats,
    classes: Ints,
    offsets: Longs,
    known: Floats | None,
    counts: Doubles,
) -> Floats: ...
def judge(
    texts: list[OpenDrafts],
    tokens: Ints,
    offsets: Longs,
    bins: Doubles,
    counts: Doubles,
    priors: Doubles,
    memory: float,
) -> None: ...
