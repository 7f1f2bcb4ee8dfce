from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Longs = NDArray[np.int64]

MAX_DEPTH: int
CELL_SHAPE: tuple[int, int, int, int, int]
COPY_SHAPE: tuple[int, int, int]
WEIGHT_SHAPE: tuple[int, int]

class Speculation(NamedTuple):
    token_ids: Ints
    parents: Ints
    probs: Floats
    match_length: int
    score: float

class SuffixTree:
    def __init__(self, max_depth: int = 64, *, max_bytes: int | None = None) -> None: ...
    @property
    def max_depth(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def gap_bytes(self) -> int: ...
    @property
    def max_bytes(self) -> int | None: ...
    @max_bytes.setter
    def max_bytes(self, limit: int | None) -> None: ...
    @property
    def token_count(self) -> int: ...
    def __len__(self) -> int: ...
    def add_sequence(self) -> int | None: ...
    def append(self, sequence: int | None, token: int) -> bool: ...
    def extend(self, sequence: int | None, token_ids: Ints) -> int: ...
    def extend_all(self, sequences: list[int | None], token_ids: Ints, offsets: Longs) -> int: ...
    def remove(self, sequence: int | None) -> None: ...
    def tokens(self, sequence: int | None) -> Ints: ...
    def last_tokens(self, sequence: int | None, count: int) -> Ints: ...
    def count(self, token_ids: Ints) -> int: ...
    def children(self, token_ids: Ints) -> list[tuple[int, int]]: ...
    def after_gap(self, first: int, second: int) -> list[tuple[int, int]]: ...
    def speculate(
        self,
        context: Ints,
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
        sequence: int | None,
        max_nodes: int,
        *,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        tree: bool = True,
        convention: str = "arctic",
    ) -> Speculation: ...
    def check_invariants(self) -> None: ...

class Text:
    tree: SuffixTree | None
    sequence: int
    def __init__(
        self, tree: SuffixTree | None, sequence: int | None, context: Ints, vocab_size: int
    ) -> None: ...

def extend_texts(texts: list[Text], token_ids: Ints, offsets: Longs) -> None: ...

class Mixer:
    def __init__(
        self, cells: Floats, copy_cells: Floats, weights: Floats, rate: float = 0.002
    ) -> None: ...
    @property
    def cells(self) -> Floats: ...
    @property
    def copy_cells(self) -> Floats: ...
    @property
    def weights(self) -> Floats: ...
    def draft(
        self,
        texts: list[Text],
        memories: list[SuffixTree | None],
        running: list[int | None],
        corpus: SuffixTree | None,
        budgets: list[int],
        *,
        alpha: float = ...,
        min_prob: float = 0,
        path: bool = False,
    ) -> tuple[Ints, Ints, Floats, Ints, Longs]: ...
    def learn(
        self,
        texts: list[Text],
        memories: list[SuffixTree | None],
        running: list[int | None],
        corpus: SuffixTree | None,
        token_ids: Ints,
        offsets: Longs,
    ) -> None: ...
