import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Longs = NDArray[np.int64]

def depths(parents: Ints) -> Ints: ...
def ancestor_mask(parents: Ints) -> NDArray[np.bool_]: ...
def arrange(
    roots: Longs, counts: Longs, token_ids: Ints, parents: Ints, width: int
) -> tuple[Longs, Longs, NDArray[np.bool_]]: ...
def fault(
    token_ids: object,
    parents: object,
    probs: object,
    classes: object,
    vocab_size: int,
    n_classes: int,
) -> str | None: ...
def path_products(parents: Ints, rates: Floats) -> Floats: ...
def follow(token_ids: Ints, parents: Ints, tokens: Ints) -> Ints: ...
def child_with(token_ids: Ints, parents: Ints, parent: int, token: int) -> int: ...
def known_probs(
    tokens_a: Ints, parents_a: Ints, probs_a: Floats, tokens_b: Ints, parents_b: Ints
) -> Floats: ...
def merge(
    tokens_a: Ints,
    parents_a: Ints,
    probs_a: Floats,
    classes_a: Ints,
    tokens_b: Ints,
    parents_b: Ints,
    probs_b: Floats,
    classes_b: Ints,
) -> tuple[Ints, Ints, Floats, Ints]: ...
def prune(
    token_ids: Ints, parents: Ints, probs: Floats, classes: Ints, budget: int
) -> tuple[Ints, Ints, Floats, Ints]: ...
def rank(probs: list[Floats]) -> tuple[Ints, NDArray[np.float64]]: ...
def most_probable_path(parents: Ints, probs: Floats) -> Ints: ...
