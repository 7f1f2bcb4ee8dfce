from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]
Masks = NDArray[np.bool_]

def flattened(texts: Sequence[Sequence[int] | Ints]) -> tuple[Ints, Longs]: ...
def depths(parents: Ints) -> Ints: ...
def ancestor_mask(parents: Ints) -> Masks: ...
def arrange(
    roots: Longs, counts: Longs, token_ids: Ints, parents: Ints, width: int
) -> tuple[Longs, Longs, Masks]: ...
def fault(
    token_ids: object,
    parents: object,
    probs: object,
    classes: object,
    offsets: Longs | None,
    vocab_size: int,
    n_classes: int,
) -> str | None: ...
def path_products(parents: Ints, rates: Floats) -> Floats: ...
def follow(token_ids: Ints, parents: Ints, tokens: Ints) -> Ints: ...
def child_with(token_ids: Ints, parents: Ints, parent: int, token: int) -> int: ...
def known_probs(
    tokens_a: Ints,
    parents_a: Ints,
    probs_a: Floats,
    offsets_a: Longs,
    tokens_b: Ints,
    parents_b: Ints,
    offsets_b: Longs,
) -> Floats: ...
def merge(
    tokens_a: Ints,
    parents_a: Ints,
    probs_a: Floats,
    classes_a: Ints,
    offsets_a: Longs,
    tokens_b: Ints,
    parents_b: Ints,
    probs_b: Floats,
    classes_b: Ints,
    offsets_b: Longs,
) -> tuple[Ints, Ints, Floats, Ints, Longs]: ...
def prune(
    token_ids: Ints, parents: Ints, probs: Floats, classes: Ints, offsets: Longs, budgets: Longs
) -> tuple[Ints, Ints, Floats, Ints, Longs]: ...
def by_width(probs: Floats, offsets: Longs) -> Doubles: ...
def rank(probs: Floats, offsets: Longs) -> tuple[Ints, Doubles]: ...
def most_probable_paths(parents: Ints, probs: Floats, offsets: Longs) -> tuple[Ints, Longs]: ...
