"""What the steps of a call cost: under which key t(n) is kept, and what of it one row sees."""

from __future__ import annotations

from dataclasses import replace

from ..policy.account import Drafting
from ..policy.cost_model import CostModel
from ..policy.cost_store import size_bucket
from ..policy.cost_views import PackedCost, stepped
from ..policy.policy import DraftingPolicy
from ..verification.verified import Verified
from ..verification.verifiers import Verifier
from .call import Call

# Steps without drafts are all alike: one in so many is timed.
_TIMING_PERIOD = 8


class Pricing:
    """The prices of a call's steps, and the account of what drafting for them brings.

    Args:
        call: whose steps.
        assistant: that learns what they take.
        in_step: whether all rows are fed equally many tokens.
        alone: whether this process decides; accounts of time differ between ranks, which have to
            ask together.
    """

    def __init__(self, call: Call, assistant: DraftingPolicy, in_step: bool, alone: bool):
        self._assistant, self._in_step = assistant, in_step
        self._key = call.kind
        self._account = assistant.account(self._key) if alone else None
        self._cost: CostModel | None = None
        self._unasked = 0  # steps since drafters were asked

    def begin(self, verifier: Verifier, rows: int, variant: str) -> Drafting:
        """A step in which so many rows are running."""
        return self._assistant.begin(self.price(verifier, rows, variant), self._account)

    def price(self, verifier: Verifier, rows: int, variant: str) -> CostModel:
        """t(n) of the next forward as the tokens of one running row see it, the other rows being
        fed beside it; `variant`: how it runs."""
        key, bucket = self._key, size_bucket(verifier.cache.slots.longest)
        like = bucket, verifier.packed, variant
        if like != (key.cache_length, key.packed, key.manner):
            self._key = replace(key, cache_length=bucket, packed=verifier.packed, manner=variant)
        self._cost = self._assistant.costs.get(self._key)
        if not verifier.packed:
            return stepped(self._cost, verifier.widths)
        return PackedCost(self._cost, rows, alike=self._in_step)

    def end(self, drafting: Drafting, verified: Verified, seconds: float) -> None:
        """Learn how long the step took that was priced last."""
        assert self._cost is not None
        self._unasked = self._unasked + 1 if drafting.is_plain else 0
        if self._unasked % _TIMING_PERIOD == 0 and verified.typical:
            self._cost.observe(verified.width, seconds)
