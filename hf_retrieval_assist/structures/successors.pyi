import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Longs = NDArray[np.int64]
Octets = NDArray[np.uint8]

def draft(
    successors: Ints,
    kinds: Octets,
    roots: Ints,
    befores: Ints,
    budgets: Longs,
    parents: Ints,
    ranks: Ints,
    rates: Floats,
    kind_count: int,
    text_kind: int,
    first_kind: int,
    known_kinds: int,
    own_rows: Ints,
    own_successors: Ints,
    own_kinds: Octets,
) -> tuple[Ints, Ints, Floats, Ints, Longs]: ...
def rows_to_learn(
    tokens: Ints, accepted: Longs, vocab_size: int, max_rejected: int, starts: Longs
) -> Longs: ...
def write(
    successors: Ints,
    classes: Octets,
    tokens: Ints,
    new: Ints,
    logits: Floats,
    edges: Floats,
    kind_count: int,
) -> None: ...
def learn_text(
    successors: Ints,
    classes: Octets,
    tokens: Ints,
    rows: Ints,
    order: Longs,
    kinds: Octets,
    kind_count: int,
) -> None: ...
def top_k(logits: Floats, rows: Longs, k: int) -> tuple[Ints, Floats]: ...
