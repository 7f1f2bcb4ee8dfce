from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]

def classes_by_count(
    counts: Longs,
    parent_counts: Longs,
    contexts: Ints,
    context_edges: Doubles,
    share_edges: Doubles,
    count_edges: Doubles,
) -> Ints: ...

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
    ) -> tuple[Ints, Ints, Longs, Longs, Ints]: ...
    def check_invariants(self) -> None: ...
