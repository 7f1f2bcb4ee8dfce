"""Drafts of the target itself with its weights in few bits."""

from __future__ import annotations

import math
import time
import weakref
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ...draft_models.draft_model import tree_service
from ...draft_models.rows import proposed
from ...drafters.base import (
    Curve,
    Drafter,
    DraftSession,
    FeedbackNeeds,
    Feedbacks,
    Target,
    Tokens,
)
from ...drafters.call_view import Among
from ...host.ranks import require_whole
from ...host.transformers_private import input_device
from ...policy.acceptance import Calibrator
from ...structures.draft_tree import flattened
from ...structures.evidence import OpenDrafts
from ...system.arguments import require_at_least
from ...system.locks import Lock
from ...system.memory import may_take
from ...system.running_mean import toward
from ...types.token_tree import Forest, TokenTree
from ...verification.own_forwards import TargetForwards
from . import skinny
from .few_bits import CHOICES, FewBits, OutputReader, bytes_of, evidence_classes, marks_of
from .reroute import overriding, reroute
from .tree_verifier import MOST_RECORDING, CpuTreeVerifier
from .weight_copies import Mark

CHOICES_SEEN = 8  # tokens that the target found likely behind each accepted one

# Choices that are less likely than this are not drafted; behind such, none is looked for.
_LEAST_DRAFTED = 0.02
_LEAST_FOLLOWED = 0.08

# A draft has to promise this much more tokens per second than a step without, since neither time
# nor certainty is known exactly. Where it does not, one level is tried in so many steps: forwards
# take longer behind longer texts, and levels were perhaps timed while the machine was busy.
_MARGIN = 1.05
_TRIAL_PERIOD = 64

# Steps of a model, of whatever assistant, that would have asked for a draft before its weights are
# packed for it, which takes as long as so many forwards, and more; and where they often change.
PATIENCE, MOST_PATIENCE = 32, 2048

# Tokens of the texts that are read once more to see which columns of weights count most.
_READ = 64

# Calls in a row whose forwards of one token could not be recorded, after which none is tried.
_MOST_UNRECORDED = 2

# How much of a longer time of a level is believed, and of a shorter one; and how much longer the
# former may be. Machines are slower for a while, never faster than they are.
_SLOWER, _FASTER, _MOST_SLOWER = 0.1, 0.5, 1.5


class _Price:
    """What a level takes.

    Attributes:
        seconds: of it; infinite while none was timed.
        refusals: drafts that were not made because of it, of all assistants.
    """

    seconds = math.inf
    refusals = 0

    def observe(self, seconds: float) -> None:
        if seconds < self.seconds:
            share = 1.0 if self.seconds == math.inf else _FASTER
        else:
            seconds, share = min(seconds, _MOST_SLOWER * self.seconds), _SLOWER
        known = seconds if self.seconds == math.inf else self.seconds
        self.seconds = toward(known, seconds, share)


@dataclass(eq=False)
class _Patience:
    """What a model's weights have to wait for before they are packed.

    Attributes:
        marks: what the weights were like when it began.
        needed: asks.
        asked: how many there were.
        over: whether they were packed.
    """

    marks: list[Mark]
    needed: int
    asked: int = 0
    over: bool = False


_patience: weakref.WeakKeyDictionary[nn.Module, _Patience] = weakref.WeakKeyDictionary()


def _begin_waiting(model: nn.Module) -> None:
    """Go on waiting, or begin anew, for twice as many asks where weights have changed that were
    packed: in a training loop each packing would serve one call."""
    marks, known = marks_of(model), _patience.get(model)
    if known is None:
        _patience[model] = _Patience(marks, PATIENCE)
    elif known.marks != marks:
        _patience[model] = _Patience(marks, min(known.needed << known.over, MOST_PATIENCE))


# Keys: a model's fingerprint, bits, rows, and whether levels are compiled calls.
_prices: defaultdict[Hashable, _Price] = defaultdict(_Price)


class QuantizedSelf(Drafter):
    """The target drafts for itself, by its own modules with weights in few bits.

    So it reads a quarter of the bytes of bfloat16 in four bits, and half in eight, and mostly
    chooses the same token. It reads the cache that the target keeps of the text anyway: there is no
    second prefill, and no second cache. A draft is a chain of first choices, with others beside
    them; each of its levels is one forward for all rows of a batch. It grows while its certainty,
    calibrated on what was accepted so far, pays for the time a level takes. Sampled texts are
    drafted with the call's own warpers and the random numbers that their tokens will be drawn with.

    Args:
        bits: of a weight, 4 or 8; of the output layer's always 8.
        max_levels: forwards for one draft at most.
        optional: whether it does nothing where it cannot draft, where nobody counts what drafts
            cost (`budget` is a number), or where copies would take memory that the machine or the
            assistant's `extra_memory` does not have, instead of raising; it then packs weights only
            once it has been asked so often that this may pay.

    Raises:
        ValueError: an argument is out of range; from `start`, unless optional, the model is not
            whole and on a CPU, or cannot be fed token trees.
    """

    name = "quantized self"
    needs = FeedbackNeeds(top_k=CHOICES_SEEN)
    costly = True

    def __init__(self, bits: int = 4, *, max_levels: int = 8, optional: bool = False) -> None:
        if bits not in (4, 8):
            raise ValueError(f"bits: expected 4 or 8, got {bits}")
        require_at_least(1, max_levels=max_levels)
        self.bits, self.max_levels, self.optional = bits, max_levels, optional
        # What calls draft with; None: nothing, as there is no memory for it.
        self._calls: weakref.WeakKeyDictionary[TargetForwards, _OfCall | None] = (
            weakref.WeakKeyDictionary()
        )
        # Bytes to be packed for a call, of which its first ask is told, and those that there are.
        self._sizes: weakref.WeakKeyDictionary[TargetForwards, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = Lock()

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> QuantizedSession:
        session = QuantizedSession(self, target, prompt_ids.tolist())
        try:
            model = target.require_model("QuantizedSelf")
            require_whole(model, "QuantizedSelf")
            device = input_device(model)
            if device.type != "cpu":
                raise ValueError(f"QuantizedSelf: expected a model on a CPU, got one on {device}")
            if not skinny.PATHS:
                raise ValueError("QuantizedSelf: expected a CPU with AVX2 or NEON, got another one")
            if not self.optional:  # which tests it
                tree_service(model, "QuantizedSelf")
        except ValueError:
            if not self.optional:
                raise
            session.idle = True
        call = target.call
        useless = call.own is None or call.extra_memory == 0 or not call.counts_costs
        session.idle |= self.optional and useless
        return session

    @torch.no_grad()
    def prepare(self, sessions: Sequence[QuantizedSession], curve: Curve | None) -> None:
        """Pack the model's weights where they are not yet, and record its forward of one token."""
        for session in sessions:
            session.curve = curve
        own = sessions[0].target.call.own
        if own is None or not own.ready or own in self._calls:
            return
        with self._lock:
            weights = self._weights(sessions[0].target, own)
            if weights is not None:
                self._calls[own] = _OfCall(weights, own)

    def _weights(self, target: Target, own: TargetForwards) -> FewBits | None:
        """The model's in few bits; None: they are not to be packed yet, or not in this call."""
        model = target.model
        if own not in self._sizes:
            known = FewBits.known_of(model, self.bits)
            if known is not None:
                return known
            self._sizes[own] = bytes_of(model, self.bits)
            _begin_waiting(model)
        patience, (missing, held) = _patience[model], self._sizes[own]
        patience.asked += 1
        if self.optional and missing and patience.asked <= patience.needed:
            return None
        if self.optional and not may_take(missing, target.call.extra_memory, held):
            self._calls[own] = None
            return None

        def read() -> None:
            if isinstance(own.verifier, CpuTreeVerifier) and own.verifier.is_unwatched:
                with own.drafting():
                    own.feed_again(_READ, target.vocab_size)

        patience.over = True
        return FewBits.of(model, self.bits, read)

    def drafts_for(self, own: TargetForwards) -> bool:
        """Whether a call may be drafted for, as far as is known."""
        return own.ready and (own not in self._calls or self._calls[own] is not None)

    @torch.no_grad()
    def propose(self, sessions: Sequence[QuantizedSession], budgets: Sequence[int]) -> Forest:
        own = sessions[0].target.call.own
        if own is None:
            raise ValueError("QuantizedSelf: expected a call of generate to draft for, got none")
        drafts = [TokenTree.empty()] * len(sessions)
        asked = [i for i, session in enumerate(sessions) if budgets[i] > 0 and session.room]
        if own.ready and asked and not torch.is_autocast_enabled("cpu"):
            given = self._calls.get(own)
            if given is not None:
                some = [sessions[i] for i in asked]
                chains = _Chains(own, some, [budgets[i] for i in asked], given)
                if chains.goes_on():
                    with own.drafting(), reroute(), overriding(given.weights.by_id):
                        chains.grow()
                    given.weights.observe_certainties(chains.certainties)
                    for i, chain in zip(asked, chains.chains, strict=True):
                        drafts[i] = chain.tree()
                    return self._calibrated(sessions, proposed(drafts, budgets), given)
        return Forest.of(drafts)

    def commit(
        self, sessions: Sequence[QuantizedSession], tokens: Tokens, feedbacks: Feedbacks
    ) -> None:
        for session, token_ids, feedback in zip(sessions, tokens, feedbacks, strict=True):
            if session.calibrator is not None:
                session.calibrator.judge([session.calibration], *flattened([token_ids]))
            session.unread += token_ids
            if feedback is not None and feedback.top is not None:
                nodes = feedback.accepted.astype(np.int64)
                vocab_size = session.target.vocab_size
                likely, _ = feedback.top.of(nodes, min(CHOICES_SEEN, vocab_size), vocab_size)
                session.unread += likely.ravel().tolist()

    def _calibrated(
        self, sessions: Sequence[QuantizedSession], drafts: Forest, given: _OfCall
    ) -> Forest:
        """Drafts with the rates of their evidence, which their texts will judge."""
        texts = [session.calibration for session in sessions]
        for session in sessions:
            session.calibrator = given.weights.calibrator
        calibrated = given.weights.calibrator.calibrate(texts, drafts)
        return replace(calibrated, classes=np.full_like(calibrated.classes, -1))


def automatic() -> QuantizedSelf:
    """The drafter that `fallback="auto"` has besides others."""
    return QuantizedSelf(optional=True)


class _OfCall:
    """What the rows of one call draft with.

    Attributes:
        weights: the model's.
        single: computes levels of the only row in one compiled call each; None: every level is a
            forward of all rows.
        output: what such levels read of the output layer.
    """

    def __init__(self, weights: FewBits, own: TargetForwards) -> None:
        self.weights, self.single = weights, None
        if weights.output is not None:
            self.output = OutputReader(weights.output)
            verifier, room, token = own.verifier, own.deepest(0), own.last(0)
            if (
                isinstance(verifier, CpuTreeVerifier)
                and own.rows == 1
                and (room is None or room > MOST_RECORDING)
                and weights.unrecorded < _MOST_UNRECORDED
                and verifier.may_record
            ):
                weights.unrecorded += 1
                with own.drafting(), reroute():
                    recorded = verifier.record_alone(lambda: own.feed([token]))
                    # Compiles the call.
                    if recorded and verifier.draft_alone(token, weights) is not None:
                        self.single, weights.unrecorded = verifier, 0


@dataclass(eq=False)
class QuantizedSession(DraftSession):
    """One text of a call.

    Attributes:
        drafter: the text's.
        target: the model, as this text sees it.
        unread: tokens that nobody has told the output layer of.
        curve: seconds of a step by the tokens that it feeds; None while nobody has told.
        calibrator: that has judged its last draft; None: there was none.
    """

    drafter: QuantizedSelf
    target: Target
    unread: list[int]
    calibrator: Calibrator | None = None
    curve: Curve | None = None
    calibration: OpenDrafts = field(default_factory=OpenDrafts)

    @property
    def room(self) -> int:
        """Forwards that may be run for a draft."""
        own, row = self.target.call.own, self.target.call.row
        assert own is not None
        deepest = own.deepest(row) if own.ready else 0
        most = self.drafter.max_levels
        return most if deepest is None else min(most, deepest)

    @property
    def ready(self) -> bool:  # type: ignore[override]
        own = self.target.call.own
        return own is None or self.drafter.drafts_for(own)


class _Chain:
    """The draft of one row while it grows.

    Attributes:
        session: the row's.
        preview: what its call would choose.
        room: levels that it may have.
        path: tokens of the chain.
        reached: how likely the chain's last one is to be accepted.
        ended: whether nothing comes behind it.
    """

    def __init__(self, session: QuantizedSession, budget: int) -> None:
        preview = session.target.call.preview
        assert preview is not None
        self.session, self.preview = session, preview
        self.room, self._budget = session.room, budget
        self.path: list[int] = []
        self.reached, self.ended = 1.0, False
        self._parent = -1
        self._nodes: list[tuple[int, int, float, int]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def promised(self) -> float:
        """Tokens that it is expected to bring."""
        return sum(prob for _, _, prob, _ in self._nodes)

    def add(self, token_ids: Sequence[int], rates: Sequence[float], classes: Sequence[int]) -> None:
        """Add the choices behind its last token, of which the first goes on."""
        first, before, reached = len(self._nodes), self._parent, self.reached
        for token, rate, kind in zip(token_ids, rates, classes, strict=True):
            if reached * rate >= _LEAST_DRAFTED:
                self._nodes.append((before, token, reached * rate, kind))
        if len(self._nodes) > first and reached * rates[0] >= _LEAST_DRAFTED:
            self._parent, self.reached = first, reached * rates[0]
            self.path.append(token_ids[0])
        else:
            self.ended = True
        self.ended |= self.reached < _LEAST_FOLLOWED or len(self._nodes) >= self._budget
        self.ended |= len(self.path) >= self.room

    def tree(self) -> TokenTree:
        parents, token_ids, probs, classes = (
            zip(*self._nodes, strict=True) if self._nodes else [()] * 4
        )
        return TokenTree.build(token_ids, parents, probs, classes)


class _Chains:
    """Drafts of some rows, which grow until they hold what they may or another level does not pay.

    Attributes:
        certainties: how likely the first choice behind each fed token is.
    """

    def __init__(
        self,
        own: TargetForwards,
        sessions: Sequence[QuantizedSession],
        budgets: Sequence[int],
        given: _OfCall,
    ) -> None:
        self.chains = [_Chain(one, budget) for one, budget in zip(sessions, budgets, strict=True)]
        self.certainties: list[float] = []
        self._own, self._given = own, given
        self._known = sessions[0].target.fingerprint, given.weights.bits, len(sessions)
        self._rows: dict[int, _Chain] = {one.session.target.call.row: one for one in self.chains}
        self._levels, self._spent = 0, 0.0
        most = sum(CHOICES * chain.room for chain in self.chains)
        curve = sessions[0].curve
        # Seconds of a step by the tokens that it feeds, and of a level.
        self._seconds = None if curve is None else curve(1 + most).tolist()
        self._known_price = self._price(given.single is not None)
        self._level_seconds = self._known_price.seconds
        if given.weights.output is not None:
            for session in sessions:
                given.weights.output.add(session.unread)
                session.unread = []

    def _price(self, single: bool) -> _Price:
        """What a level takes, as a compiled call of one row or not."""
        return _prices[(*self._known, single)]

    def grow(self) -> None:
        """All levels of a draft."""
        begun, alone = time.perf_counter(), True
        while True:
            alone &= self._grow_level()
            self._levels += 1
            self._spent = time.perf_counter() - begun
            if not self.goes_on():
                break
        self._price(alone).observe(self._spent / self._levels)

    def _grow_level(self) -> bool:
        """Add a level; whether one compiled call has computed it."""
        last = {row: (chain.path or [self._own.last(row)])[-1] for row, chain in self._live.items()}
        if (single := self._given.single) is not None:
            [(row, token)] = last.items()
            x = single.draft_alone(token, self._given.weights)
            if x is not None:
                if self._rows[row].preview.greedy:
                    self._go_on(row, *self._given.output.best(x, CHOICES))
                else:
                    self._choose(row, *self._given.output(x))
                return True
        logits = self._own.feed([last.get(row) for row in range(self._own.rows)])
        for row in last:
            self._choose(row, logits[row][None])
        return False

    def _choose(self, row: int, logits: torch.Tensor, among: Among | None = None) -> None:
        """Let a row's chain go on by what the target would choose of these logits, [1, columns]."""
        chain = self._rows[row]
        best, ids = chain.preview.best(logits, [chain.path], CHOICES, among)
        known = chain.preview.knows(logits.shape[1] if among is None else among.vocab_size)
        self._go_on(row, ids[0].tolist(), best[0].tolist(), known)

    def _go_on(
        self, row: int, token_ids: Sequence[int], best: Sequence[float], known: bool = True
    ) -> None:
        """Let a row's chain go on by the likeliest tokens; see `evidence_classes`."""
        scores = [score for score in best if math.isfinite(score)]
        if not scores:
            self._rows[row].ended = True
            return
        classes = evidence_classes(scores, known)
        rates = self._given.weights.calibrator.rates(np.array(classes)).tolist()
        self.certainties.append(rates[0])
        self._rows[row].add(token_ids[: len(scores)], rates, classes)

    @property
    def _live(self) -> dict[int, _Chain]:
        return {row: chain for row, chain in self._rows.items() if not chain.ended}

    def goes_on(self) -> bool:
        """Whether another level is worth its time; while nobody knows that, one tells."""
        if not (live := self._live):
            return False
        first, timed = not self._levels, self._level_seconds < math.inf
        price = self._known_price
        if timed and self._pays([*live.values()], _MARGIN if first else 1.0):
            return True
        if first and timed:
            price.refusals += 1
        return first and (not timed or price.refusals % _TRIAL_PERIOD == 0)

    def _pays(self, live: Sequence[_Chain], margin: float) -> bool:
        """Whether any number of further levels brings so many times the tokens per second."""
        if self._seconds is None:
            return True
        further = max(chain.room for chain in live) - self._levels
        nodes = max(map(len, self.chains))
        tokens = len(self.chains) + sum(chain.promised for chain in self.chains)
        seconds, certainty = self._seconds, self._given.weights.certainty
        now = tokens / (seconds[nodes] + self._spent)
        reached = sum(chain.reached for chain in live)
        for levels in range(1, further + 1):
            reached *= certainty
            tokens += reached
            spent = self._spent + levels * self._level_seconds
            if tokens / (seconds[nodes + levels] + spent) > margin * now:
                return True
        return False
