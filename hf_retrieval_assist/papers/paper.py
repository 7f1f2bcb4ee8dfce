"""What the systems of papers share: a rule of their own drafts, and its draft is verified whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, Literal, TypeAlias

from ..draft_models.fallbacks import Fallback, fallback_drafters
from ..drafters.base import Drafter
from ..memory.output_memory import OutputMemory
from ..policy.policy import DraftingPolicy
from ..policy.step import DraftedStep
from ..types.token_tree import Forest
from .token_recycling import TokenRecycling

MOST_NODES = 255  # a draft's; wider forwards are not made

PapersFallback: TypeAlias = Fallback | Literal["token_recycling"] | Sequence[Any]


class PaperPolicy(DraftingPolicy):
    """Drafts as a paper says: `propose` is its algorithm.

    Nothing is measured, calibrated beside other drafters or drafted from grammars.

    Args:
        drafters: those of the paper, then the fallback's.
        own: how many are the paper's.
        **options: of `DraftingPolicy`.
    """

    joins = False

    def __init__(self, drafters: Sequence[Drafter], own: int = 1, **options: Any) -> None:
        super().__init__(drafters, **options)
        self._fallback = range(own, len(self.drafters))

    def ask(
        self, number: int, step: DraftedStep, budget: int, places: Sequence[int] | None = None
    ) -> Forest:
        """What one drafter drafts for the texts at some ascending places of the step, for all by
        default; trees without nodes at the others."""
        every = range(len(step.sessions))
        places = every if places is None else places
        while len(step.proposals) <= number:
            step.proposals.append(Forest.empty(len(every)))
        sessions = [step.sessions[place] for place in places]
        if sessions and budget and self.can_draft(number, sessions) and step.asks(number):
            drafts = self.ask_drafter(number, step, sessions, budget)
            step.proposals[number] = drafts.spread(places, len(every))
        return step.proposals[number]

    def ask_fallback(self, step: DraftedStep, budget: int, places: Sequence[int]) -> Forest:
        """One tree of all that the fallback's drafters draft for the texts at some places."""
        drafts = [self.ask(number, step, budget, places) for number in self._fallback]
        return reduce(Forest.merge, drafts, Forest.empty(len(step.sessions)))


def papers_fallback(fallback: PapersFallback, memory: OutputMemory | None = None) -> list[Drafter]:
    """The drafters of a `fallback=` that may also name "token_recycling"."""
    named: list[Any] = [*fallback] if isinstance(fallback, (list, tuple)) else [fallback]
    recycling = [TokenRecycling(memory) for one in named if one == "token_recycling"]
    others: Fallback = [one for one in named if one not in (None, "token_recycling")]
    return [*recycling, *fallback_drafters(others, memory)]
