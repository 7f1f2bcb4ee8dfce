import numpy as np
from numpy.typing import NDArray

def draft(
    successors: NDArray[np.int32],
    kinds: NDArray[np.uint8],
    roots: NDArray[np.int32],
    befores: NDArray[np.int32],
    budgets: NDArray[np.int64],
    parents: NDArray[np.int32],
    ranks: NDArray[np.int32],
    rates: NDArray[np.float32],
    kind_count: int,
    text_kind: int,
    first_kind: int,
    known_kinds: int,
    own_rows: NDArray[np.int32],
    own_successors: NDArray[np.int32],
    own_kinds: NDArray[np.uint8],
) -> tuple[
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.float32],
    NDArray[np.int32],
    NDArray[np.int64],
]: ...
def rows_to_learn(
    tokens: NDArray[np.int32],
    accepted: NDArray[np.int64],
    vocab_size: int,
    max_rejected: int,
    starts: NDArray[np.int64],
) -> NDArray[np.int64]: ...
def write(
    successors: NDArray[np.int32],
    classes: NDArray[np.uint8],
    tokens: NDArray[np.int32],
    new: NDArray[np.int32],
    logits: NDArray[np.float32],
    edges: NDArray[np.float32],
    kind_count: int,
) -> None: ...
def learn_text(
    successors: NDArray[np.int32],
    classes: NDArray[np.uint8],
    tokens: NDArray[np.int32],
    rows: NDArray[np.int32],
    order: NDArray[np.int64],
    kinds: NDArray[np.uint8],
    kind_count: int,
) -> None: ...
