"""Who is told what the steps of a call did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from ..policy.stats import CallStats
from ..types.row_text import Path
from ..types.token_tree import Int32Array, TokenTree


class Observer(Protocol):
    """Is told a call's steps while it goes on, from the thread that generates."""

    def begin(self, paths: Sequence[Path]) -> None:
        """The prefill brought the first tokens of each row."""

    def step(
        self,
        rows: Sequence[int],
        drafts: Mapping[int, Sequence[TokenTree]],
        trees: Sequence[TokenTree],
        paths: Sequence[Path],
    ) -> None:
        """A forward verified a tree of each of `rows`; `trees` and `paths` are for all rows.

        `drafts` are by row, one of every drafter; rows that nobody drafted for have none.
        """

    def plain(self, generated: Sequence[Sequence[int]]) -> None:
        """transformers' own loop wrote these tokens of each row."""

    def end(self, end: int) -> None:
        """What rows wrote beyond `end` tokens is not part of the result."""


Observe: TypeAlias = Callable[[Sequence[Int32Array], CallStats], Observer | None]
"""What is told the steps of a call of these prompts and figures; None: nothing is."""
