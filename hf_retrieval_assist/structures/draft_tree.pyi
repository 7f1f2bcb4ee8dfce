from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def flattened(
    texts: Sequence[Sequence[int] | NDArray[np.int32]],
) -> tuple[NDArray[np.int32], NDArray[np.int64]]: ...
def depths(parents: NDArray[np.int32]) -> NDArray[np.int32]: ...
def ancestor_mask(parents: NDArray[np.int32]) -> NDArray[np.bool_]: ...
def arrange(
    roots: NDArray[np.int64],
    counts: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    width: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]: ...
def fault(
    token_ids: object,
    parents: object,
    probs: object,
    classes: object,
    offsets: NDArray[np.int64] | None,
    vocab_size: int,
    n_classes: int,
) -> str | None: ...
def path_products(
    parents: NDArray[np.int32], rates: NDArray[np.float32]
) -> NDArray[np.float32]: ...
def follow(
    token_ids: NDArray[np.int32], parents: NDArray[np.int32], tokens: NDArray[np.int32]
) -> NDArray[np.int32]: ...
def child_with(
    token_ids: NDArray[np.int32], parents: NDArray[np.int32], parent: int, token: int
) -> int: ...
def known_probs(
    tokens_a: NDArray[np.int32],
    parents_a: NDArray[np.int32],
    probs_a: NDArray[np.float32],
    offsets_a: NDArray[np.int64],
    tokens_b: NDArray[np.int32],
    parents_b: NDArray[np.int32],
    offsets_b: NDArray[np.int64],
) -> NDArray[np.float32]: ...
def merge(
    tokens_a: NDArray[np.int32],
    parents_a: NDArray[np.int32],
    probs_a: NDArray[np.float32],
    classes_a: NDArray[np.int32],
    offsets_a: NDArray[np.int64],
    tokens_b: NDArray[np.int32],
    parents_b: NDArray[np.int32],
    probs_b: NDArray[np.float32],
    classes_b: NDArray[np.int32],
    offsets_b: NDArray[np.int64],
) -> tuple[
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.float32],
    NDArray[np.int32],
    NDArray[np.int64],
]: ...
def prune(
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    probs: NDArray[np.float32],
    classes: NDArray[np.int32],
    budget: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]: ...
def rank(
    probs: NDArray[np.float32], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.float64]]: ...
def most_probable_paths(
    parents: NDArray[np.int32], probs: NDArray[np.float32], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]: ...
