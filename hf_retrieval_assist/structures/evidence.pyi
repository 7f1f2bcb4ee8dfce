import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

def share_classes(
    parents: Ints, shares: Floats, counts: Ints, matched: int, rows: Ints, columns: Ints
) -> Ints: ...
def calibrated(
    parents: Ints, probs: Floats, classes: Ints, known: Floats | None, counts: Doubles
) -> tuple[Doubles, Floats, Ints]: ...
def judge(
    token_ids: Ints,
    parents: Ints,
    classes: Ints,
    rates: Doubles,
    tokens: Ints,
    known: int,
    bins: Doubles,
    counts: Doubles,
    priors: Doubles,
    memory: float,
) -> bool: ...
