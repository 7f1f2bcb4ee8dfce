"""Whether to ask a drafter whose drafts take noticeable time, such as a draft model."""

from __future__ import annotations

import numpy as np

from ..token_tree import TokenTree
from .clipped_mean import ClippedMean
from .cost_model import CostModel, Float64Array
from .planner import token_rate

# Steps after which a drafter that did not seem worth it is asked again: its time then is a small
# share of the steps between.
_ASK_AGAIN = 64
_MEMORY = 0.1  # share of a new draft in what drafts are expected to bring


class Consultation:
    """What a drafter's drafts have promised and taken so far, against what is at hand."""

    def __init__(self) -> None:
        self._promised: Float64Array = np.empty(0)  # by node, the most probable first
        self._seconds = ClippedMean(0.2)
        self._passed_over = 0

    def worthwhile(self, tree: TokenTree, cost: CostModel) -> bool:
        """Whether a draft like those so far would pay for its time, beside `tree` or instead of it.

        Asked again after a while in any case, because what drafts bring changes with the text.

        Args:
            tree: what is at hand, with calibrated probabilities.
            cost: t(n).
        """
        seconds = self._seconds.value
        if not seconds:
            return True
        # Another draft helps where the text takes none of the first tokens at hand.
        missed = max(0.0, 1 - float(tree.probs[tree.parents < 0].sum()))
        both = np.concatenate([tree.probs, missed * self._promised])
        rate = max(token_rate(probs, cost, seconds) for probs in (self._promised, both))
        asked = rate > token_rate(tree.probs, cost) or self._passed_over + 1 >= _ASK_AGAIN
        self._passed_over = 0 if asked else self._passed_over + 1
        return asked

    def observe(self, draft: TokenTree, seconds: float) -> None:
        """Remember what was drafted, and how long it took."""
        probs = np.sort(draft.probs)[::-1]
        if len(probs) > len(self._promised):
            self._promised = np.pad(self._promised, (0, len(probs) - len(self._promised)))
        share = _MEMORY if self._seconds.value else 1.0
        self._promised *= 1 - share
        self._promised[: len(probs)] += share * probs
        self._seconds.observe(seconds)
