import numpy as np
from numpy.typing import NDArray

def tried(
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    classes: NDArray[np.int32],
    rates: NDArray[np.float64],
    tokens: NDArray[np.int32],
    known: int = 0,
) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.bool_], bool]: ...
def share_classes(
    parents: NDArray[np.int32],
    shares: NDArray[np.float32],
    counts: NDArray[np.int32],
    matched: int,
    rows: NDArray[np.int32],
    columns: NDArray[np.int32],
) -> NDArray[np.int32]: ...
def count(
    classes: NDArray[np.int32],
    hits: NDArray[np.uint8],
    counts: NDArray[np.float64],
    prior_counts: NDArray[np.float64],
    memory: float,
) -> None: ...
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
    shared: NDArray[np.float64],
    own: NDArray[np.float64],
    odds_factor: float,
    strength: float,
) -> tuple[NDArray[np.float64], NDArray[np.float32], bool]: ...
def follow_trend(
    classes: NDArray[np.int32],
    hits: NDArray[np.uint8],
    shared: NDArray[np.float64],
    sums: NDArray[np.float64],
    memory: float,
) -> None: ...
def score(
    predicted: NDArray[np.float64], hits: NDArray[np.uint8], bins: NDArray[np.float64]
) -> None: ...
