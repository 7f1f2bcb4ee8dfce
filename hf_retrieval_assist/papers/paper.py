"""What the systems of papers share: a rule chooses each draft, which is verified whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..drafters.base import Drafter, DraftSession
from ..policy.planner import Planner
from ..policy.policy import DraftingPolicy
from ..presets import Preset
from ..types.token_tree import TokenTree

_ANY_NODES = 4096  # more than a drafter proposes of its own accord; what they have buffers for


class WholeDrafts(Planner):
    """Leaves drafts as their drafters sized them."""

    def __init__(self) -> None:
        super().__init__(_ANY_NODES)

    def most_nodes(self, few: bool) -> int:
        return Planner().most_nodes(few)


class Paper(Preset):
    """An assistant that drafts as a paper says: nothing is calibrated beside other drafters,
    measured or drafted from grammars."""

    def choose(self, sessions: Sequence[DraftSession], drafts: Sequence[TokenTree]) -> TokenTree:
        """The draft to verify of those of the drafters, one of each session."""
        raise NotImplementedError

    def _policy(self, drafters: Sequence[Drafter], **options: Any) -> DraftingPolicy:
        policy = DraftingPolicy(drafters, **options)
        policy.planner, policy.choose = WholeDrafts(), self.choose
        return policy
