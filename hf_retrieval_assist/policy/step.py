"""One step of drafting: whom it asked, what that took, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..structures import draft_tree
from ..system.lazy import cached_property
from ..types.token_tree import Forest, TokenTree
from .account import Account, Use
from .cost_model import CostModel, Float64Array

_LEAD = 2.0  # tokens by which a text is ahead of another, where its next ones count e times less


@dataclass
class DraftedStep:
    """What a step asked of drafters, and what they proposed.

    Attributes:
        price: t(n) for one row; None where only tokens are counted.
        account: says who drafts; None: everybody does.
        sessions: the texts that are drafted for.
        uses: by the number of the drafter that was asked.
        proposals: of each drafter, calibrated: a tree of each text.
        trees: of each text what is to be verified.
        apart: see `Ask`.
    """

    price: CostModel | None
    account: Account | None = None
    sessions: Sequence[Any] = ()
    uses: dict[int, Use] = field(default_factory=dict)
    proposals: list[Forest] = field(default_factory=list)
    trees: Forest = field(default_factory=partial(Forest.empty, 0))
    apart: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the account has asked nobody."""
        return self.account is not None and not self.uses

    def asks(self, number: int, missed: float = 1.0) -> bool:
        """Whether to ask a drafter, where those before it leave open a share `missed` of the next
        tokens; to be called once for each that could draft."""
        entry = None
        if self.account is not None:
            entry = self.account.asked(number, missed)
            if entry is None:
                return False
        self.uses[number] = Use(entry)
        return True

    def reached(self, place: int, accepted: Sequence[int]) -> list[int]:
        """How many of a text's accepted tokens each drafter had proposed."""
        if not accepted:
            return [0] * len(self.proposals)
        found: list[int] = draft_tree.reached(self.proposals, place, accepted)
        return found

    def promise(self, place: int, tree: TokenTree, token_ids: Sequence[int]) -> tuple[float, int]:
        """Tokens that a verified tree was expected to bring, and those that came of it; where
        nothing was verified, the same of the proposals' best guess at the next token, which the
        text judges."""
        if len(tree):
            return tree.expected_tokens, len(token_ids) - 1
        prob, token = max((proposal.first(place) for proposal in self.proposals), default=(0.0, -1))
        return prob, int(token == token_ids[0])

    @cached_property
    def _parts(self) -> tuple[float, float, Float64Array]:
        """Parts of a step that each text saves by ending earlier, and that those which are furthest
        behind save by coming further; and how far each is one of these, float64 [texts]."""
        count, came = len(self.sessions), np.array([session.came for session in self.sessions])
        if self.apart or self.price is None or count == 1:
            return 1 / count, 0.0, came
        behind, each = np.exp((came.min() - came) / _LEAD), self.price.part_of_each(count)
        return each, 1 - count * each, behind / behind.sum()

    @property
    def weights(self) -> Float64Array:
        """float64 [texts]: parts of a step that the next token of each saves, 1 together; to be
        asked before the step's tokens come, as `saved`.

        Texts of a call share forwards until the last of them ends. Which one that is changes from
        step to step, so those that are little further count nearly as much.
        """
        each, last, behind = self._parts
        return each + last * behind

    def saved(self, further: Float64Array) -> Float64Array:
        """Steps that are saved where texts come so many tokens further, float64 [..., texts]: what
        their smooth minimum comes further, so that a call's steps save what the call saves."""
        each, last, behind = self._parts
        saved: Float64Array = each * further.sum(-1)
        if last:
            saved -= last * _LEAD * np.log((behind * np.exp(-further / _LEAD)).sum(-1))
        return saved

    def end(self, width: int, accepted: Sequence[float]) -> None:
        """Enter the step in the account.

        Args:
            width: tokens per row that were verified.
            accepted: by drafter, steps that its tokens save which none before it had drafted.
        """
        if self.account is not None and self.price is not None:
            seconds = self.price.curve(width)
            plain = float(seconds[0])
            self.account.learn(self.uses, accepted, plain, float(seconds[-1]) - plain)

    def count_host(self, seconds: float) -> None:
        """Count what the host has done in a step besides its forward and walk, drafters' own time
        included."""
        if self.account is not None:
            own = sum(use.seconds + use.owed + use.uncharged for use in self.uses.values())
            self.account.count_host(seconds - own, self.is_plain)
