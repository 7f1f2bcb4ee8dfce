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
def rates(
    classes: NDArray[np.int32],
    shared: NDArray[np.float64],
    own: NDArray[np.float64],
    odds_factor: float,
    strength: float,
) -> NDArray[np.float64]: ...
def calibrated(
    parents: NDArray[np.int32],
    probs: NDArray[np.float32],
    classes: NDArray[np.int32],
    known: NDArray[np.float32] | None,
    shared: NDArray[np.float64],
    own: NDArray[np.float64],
    odds_factor: float,
    strength: float,
) -> tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.int32]]: ...
def judge(
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    classes: NDArray[np.int32],
    rates: NDArray[np.float64],
    tokens: NDArray[np.int32],
    known: int,
    bins: NDArray[np.float64],
    shared: NDArray[np.float64],
    priors: NDArray[np.float64],
    shared_memory: float,
    own: NDArray[np.float64],
    own_memory: float,
    trend: NDArray[np.float64],
    trend_memory: float,
) -> bool: ...
