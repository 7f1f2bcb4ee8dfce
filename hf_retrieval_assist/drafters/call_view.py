"""What drafters that run a model, or read a grammar, may look at of the call they draft in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    # It takes transformers with it, which other engines draft without.
    from ..verification.own_forwards import TargetForwards


class Among:
    """Tokens of a vocabulary that columns of logits stand for: the first ones, and some others.

    Args:
        token_ids: int64 [columns] on the CPU, different.
        vocab_size: of all.
        first: so many columns are of the tokens from 0 on.
    """

    def __init__(self, token_ids: torch.Tensor, vocab_size: int, first: int) -> None:
        self.token_ids, self.vocab_size = token_ids, vocab_size
        self._first, self._rest = first, token_ids[first:]
        self._scores: torch.Tensor | None = None

    def spread(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores float32 [1, columns] as [1, vocab_size], −∞ of others, until the next call."""
        if self._scores is None:
            self._scores = scores.new_full((1, self.vocab_size), -torch.inf)
        self._scores[:, : self._first] = scores[:, : self._first]
        self._scores[:, self._rest] = scores[:, self._first :]
        return self._scores


class Law(NamedTuple):
    """What becomes of probabilities before a token is drawn of them, in this order.

    Attributes:
        temperature: 0: the likeliest token is taken.
        top_k, top_p, min_p: as transformers has them.
    """

    temperature: float = 0.0
    top_k: int = 2**31 - 1
    top_p: float = 1.0
    min_p: float = 0.0


class Preview(Protocol):
    """What the target would choose in one text of a call, were given logits its own."""

    @property
    def law(self) -> Law:
        """What decides between tokens, as far as it is known."""

    def ahead(self, vocab_size: int, levels: int) -> list[Any]:
        """The random numbers of the text's next draws, of so many at most: uint32 [2 vocab_size] or
        more each, see `structures.draws.Numbers`. None where they are not known at once."""

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn; otherwise the greatest is taken."""

    @property
    def greedy(self) -> bool:
        """Whether the greatest logit is chosen, untouched."""

    def knows(self, vocab_size: int) -> bool:
        """Whether nothing is left to chance: the choice is greedy, or its draws are known."""

    def best(
        self,
        logits: torch.Tensor,
        paths: Sequence[Sequence[int]],
        count: int,
        among: Among | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first choices behind nodes of a draft.

        Args:
            logits: [nodes, vocab_size] of a model that drafts, or [1, columns] of some tokens.
            paths: for each node the drafted tokens from the text's last token, without that, to
                the node, with it.
            count: choices of each node.
            among: the tokens that logits are given of; None: all.

        Returns:
            float32 [nodes, count], descending: processed logits, or logarithms of what their
            probabilities come to when they are divided by the draw's numbers, up to a constant of
            each node; −∞ where there is no choice; and int64 [nodes, count], the tokens.
        """


@dataclass(frozen=True)
class CallView:
    """One row of a call of `generate`; the defaults where there is no call, as in a simulation.

    Attributes:
        preview: what the row would choose of a drafter's logits, its random draws included.
        own: the target's forwards behind the rows.
        processors: the logits processors, which a drafter may read and must not call.
        row: the text's place in the batch.
        graphs: whether forwards on an accelerator may be repeated from recordings.
        extra_memory: bytes that copies of weights may take; None: as the machine has them.
        counts_costs: whether drafters are left alone that do not earn their time.
    """

    preview: Preview | None = None
    own: TargetForwards | None = None
    processors: tuple[Any, ...] = ()
    row: int = 0
    graphs: bool = True
    extra_memory: int | None = None
    counts_costs: bool = False
