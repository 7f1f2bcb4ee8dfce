from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

class Speculation(NamedTuple):
    token_ids: NDArray[np.int32]
    parents: NDArray[np.int32]
    probs: NDArray[np.float32]
    match_length: int
    score: float

class SuffixTree:
    def __init__(self, max_depth: int = 64, *, max_bytes: int | None = None) -> None: ...
    @property
    def max_depth(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def token_count(self) -> int: ...
    def __len__(self) -> int: ...
    def add_sequence(self) -> int: ...
    def append(self, sequence: int, token: int) -> bool: ...
    def extend(self, sequence: int, token_ids: NDArray[np.int32]) -> int: ...
    def remove(self, sequence: int) -> None: ...
    def tokens(self, sequence: int) -> NDArray[np.int32]: ...
    def count(self, token_ids: NDArray[np.int32]) -> int: ...
    def children(self, token_ids: NDArray[np.int32]) -> list[tuple[int, int]]: ...
    def speculate(
        self,
        context: NDArray[np.int32],
        max_nodes: int,
        *,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        tree: bool = True,
        convention: str = "arctic",
    ) -> Speculation: ...
    def speculate_after(
        self,
        sequence: int,
        max_nodes: int,
        *,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        tree: bool = True,
        convention: str = "arctic",
    ) -> Speculation: ...
    def check_invariants(self) -> None: ...
