from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

def classes_by_count(
    counts: NDArray[np.int64],
    parent_counts: NDArray[np.int64],
    contexts: NDArray[np.int32],
    context_edges: NDArray[np.float64],
    share_edges: NDArray[np.float64],
    count_edges: NDArray[np.float64],
) -> NDArray[np.int32]: ...

class SuffixArray:
    shard_count: int
    vocab_size: int
    def __init__(
        self,
        shards: list[tuple[NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32], int]],
        width: int,
        vocab_size: int,
    ) -> None: ...
    def count(self, token_ids: Sequence[int] | NDArray[np.integer]) -> int: ...

class SuffixMatcher:
    index: SuffixArray
    max_match: int
    max_nodes: int
    match_length: int
    def __init__(self, index: SuffixArray, max_match: int, max_nodes: int = 1) -> None: ...
    def extend(self, token_ids: Iterable[int]) -> None: ...
    def counts(self) -> list[int]: ...
    def select(
        self, budget: int, depth: int, sources: int = 1
    ) -> tuple[
        NDArray[np.int32],
        NDArray[np.int32],
        NDArray[np.int64],
        NDArray[np.int64],
        NDArray[np.int32],
    ]: ...
    def check_invariants(self) -> None: ...
