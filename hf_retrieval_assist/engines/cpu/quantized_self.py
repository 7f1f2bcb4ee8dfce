"""Drafts of the target itself with its weights in four bits."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Sequence
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
from ...host.ranks import require_whole
from ...host.transformers_private import input_device
from ...policy.acceptance import Calibrator
from ...policy.cost_model import CostModel
from ...structures.draft_tree import flattened
from ...structures.evidence import OpenDrafts
from ...system.arguments import require_at_least
from ...system.locks import Lock
from ...system.log import get_logger
from ...system.memory import may_take
from ...types.token_tree import Forest, TokenTree
from ...verification.own_forwards import TargetForwards
from . import skinny
from .few_bits import (
    CHOICES,
    FewBits,
    OutputReader,
    bytes_of,
    evidence_classes,
    marks_of,
)
from .reroute import reroute
from .tree_verifier import CpuTreeVerifier
from .weight_copies import Mark, output_weight

logger = get_logger(__name__)

CHOICES_SEEN = 8  # tokens that the target found likely behind each accepted one

# Choices that are less likely than this are not drafted; behind such, none is looked for.
_LEAST_DRAFTED = 0.02
_LEAST_FOLLOWED = 0.08

# A draft has to promise this much more tokens per second than a step without, since neither time
# nor certainty is known exactly. Where it does not, none is asked for in so many forwards. Forwards
# take longer behind longer texts, and levels were perhaps timed while the machine was busy: so one
# level is tried now and then, all of which take such a share of the time.
_MARGIN = 1.05
_PAUSE = 8
_TRIALS = 1 / 192

# Steps of a model, of whatever assistant, that would have asked for a draft before its weights are
# packed for it, which takes as long as so many forwards, and more; and where they often change.
PATIENCE, MOST_PATIENCE = 32, 2048

# Tokens of the texts that are read once more to see which columns of weights count most.
_READ = 64


class _Levels(CostModel):
    """What levels take by the texts that they are of.

    Attributes:
        refused: seconds of forwards for which no draft was made because of it, of all assistants.
    """

    refused = 0.0


@dataclass(eq=False)
class _Patience:
    """What a model's weights have to wait for before they are packed.

    Attributes:
        marks: what the weights were like when it began.
        needed: asks.
        asked: how many there were.
    """

    marks: list[Mark]
    needed: int
    asked: int = 0

    @property
    def over(self) -> bool:
        return self.asked > self.needed


_patience: weakref.WeakKeyDictionary[nn.Module, _Patience] = weakref.WeakKeyDictionary()


def _begin_waiting(model: nn.Module) -> None:
    """Go on waiting, or begin anew, for twice as many asks where weights have changed for which
    that was over: in a training loop each packing would serve one call."""
    marks, known = marks_of(model), _patience.get(model)
    if known is None:
        _patience[model] = _Patience(marks, PATIENCE)
    elif known.marks != marks:
        _patience[model] = _Patience(marks, min(known.needed << known.over, MOST_PATIENCE))


_levels: weakref.WeakKeyDictionary[FewBits, _Levels] = weakref.WeakKeyDictionary()


class QuantizedSelf(Drafter):
    """The target drafts for itself, by its own forward with weights in four bits.

    So it reads a quarter of the bytes of bfloat16, and mostly chooses the same token. It reads the
    cache that the target keeps of the text anyway: there is no second prefill, and no second cache.
    A draft is a chain of first choices, with others beside them; each of its levels is one compiled
    call for the texts of a call together, made of the recording of a forward of one token of each.
    It grows while its certainty, calibrated on what was accepted so far, pays for the time a level
    takes. Sampled texts are drafted with the call's own warpers and the random numbers that their
    tokens will be drawn with.

    It drafts in calls of a few texts, of models whose forwards can be recorded; in other calls it
    does nothing.

    Args:
        max_levels: forwards for one draft at most.
        optional: whether it says nothing where it cannot draft, does nothing where nobody counts
            what drafts cost (`budget` is a number), or where copies would take memory that the
            machine or the assistant's `extra_memory` does not have; it then packs weights only once
            it has been asked so often that this may pay.

    Raises:
        ValueError: an argument is out of range; from `start`, unless optional, the model is not
            whole and on a CPU, or cannot be fed token trees.
    """

    name = "quantized self"
    needs = FeedbackNeeds(top_k=CHOICES_SEEN)
    costly = True

    def __init__(self, *, max_levels: int = 8, optional: bool = False) -> None:
        require_at_least(1, max_levels=max_levels)
        self.max_levels, self.optional = max_levels, optional
        # What calls draft with; None: nothing.
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
        """Record the model's forward of one token, and pack its weights where they are not yet."""
        for session in sessions:
            session.curve = curve
        target = sessions[0].target
        own = target.call.own
        if own is None or not own.ready or own in self._calls:
            return
        with self._lock:
            serves = isinstance(own.verifier, CpuTreeVerifier) and own.verifier.drafts_levels
            if serves and not self._is_due(target, own):
                return
            self._calls[own] = self._given(sessions, own) if serves else None
            if self._calls[own] is None and not self.optional:
                name = type(target.model).__name__
                logger.warning_once(
                    f"{name}: QuantizedSelf drafts nothing; a forward of one token is not repeated"
                )

    def _is_due(self, target: Target, own: TargetForwards) -> bool:
        """Whether the model's weights are packed, or were asked for often enough to be."""
        model = target.model
        if own not in self._sizes:
            if FewBits.known_of(model) is not None:
                return True
            self._sizes[own] = bytes_of(model)
            _begin_waiting(model)
        patience = _patience[model]
        patience.asked += 1
        return not (self.optional and self._sizes[own][0]) or patience.over

    def _given(self, sessions: Sequence[QuantizedSession], own: TargetForwards) -> _OfCall | None:
        """What a call drafts with; None: nothing."""
        target, verifier = sessions[0].target, own.verifier
        model = target.model
        missing, held = self._sizes.get(own, (0, 0))
        if self.optional and not may_take(missing, target.call.extra_memory, held):
            return None
        if output_weight(model) is None:
            return None
        assert isinstance(verifier, CpuTreeVerifier)
        rows = [session.target.call.row for session in sessions]
        first = [own.last(row) for row in rows]
        with own.drafting(), reroute():
            if not verifier.record_level(rows, first, min(session.room for session in sessions)):
                return None

        def read() -> None:
            with own.drafting():
                own.feed_again(_READ, target.vocab_size)

        weights = FewBits.of(model, read)
        return _OfCall(weights, verifier, OutputReader(weights.output))

    def drafts_for(self, own: TargetForwards) -> bool:
        """Whether a call may be drafted for now, as far as is known."""
        if not own.ready or own not in self._calls:
            return own.ready
        given = self._calls[own]
        return given is not None and given.verifier.forwards >= given.resumes

    @torch.no_grad()
    def propose(self, sessions: Sequence[QuantizedSession], budgets: Sequence[int]) -> Forest:
        own = sessions[0].target.call.own
        if own is None:
            raise ValueError("QuantizedSelf: expected a call of generate to draft for, got none")
        given, nothing = self._calls.get(own), Forest.empty(len(sessions))
        if given is None or torch.is_autocast_enabled("cpu"):
            return nothing
        draft = _Draft(sessions, budgets, given)
        if not draft.goes_on():
            given.resumes = given.verifier.forwards + _PAUSE
            return nothing
        with own.drafting(), reroute():
            draft.grow()
        weights, drafts = given.weights, proposed([one.tree() for one in draft.chains], budgets)
        calibrations = [session.calibration for session in sessions]
        for session, chain in zip(sessions, draft.chains, strict=True):
            weights.observe_certainties(chain.certainties)
            session.calibrator = weights.calibrator
        calibrated = weights.calibrator.calibrate(calibrations, drafts)
        return replace(calibrated, classes=np.full_like(calibrated.classes, -1))

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


def automatic() -> QuantizedSelf:
    """The drafter that `fallback="auto"` has besides others."""
    return QuantizedSelf(optional=True)


@dataclass(eq=False)
class _OfCall:
    """What one call drafts with.

    Attributes:
        weights: the model's.
        verifier: computes a level.
        output: reads the output layer behind it.
        resumes: forwards of the call behind which a draft may pay again.
    """

    weights: FewBits
    verifier: CpuTreeVerifier
    output: OutputReader
    resumes: int = 0


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
        own = self.target.call.own
        assert own is not None
        deepest = own.deepest(self.target.call.row) if own.ready else 0
        most = self.drafter.max_levels
        return most if deepest is None else min(most, deepest)

    @property
    def ready(self) -> bool:  # type: ignore[override]
        own = self.target.call.own
        return own is None or self.drafter.drafts_for(own)


class _Chain:
    """What is drafted for one text: first choices behind one another, with others beside them.

    Attributes:
        row: the text's place in the batch.
        preview: what it would choose.
        path: the first choices, behind the text's last token.
        nodes: parent, token, probability and class of each.
        reached: how likely the last of `path` is to be accepted.
        ended: whether nothing follows.
        certainties: how likely the first choice behind each fed token is.
    """

    def __init__(self, session: QuantizedSession, budget: int, calibrator: Calibrator) -> None:
        preview, own = session.target.call.preview, session.target.call.own
        assert preview is not None
        assert own is not None
        self.row, self.preview = session.target.call.row, preview
        self.path = [own.last(self.row)]
        self.nodes: list[tuple[int, int, float, int]] = []
        self.certainties: list[float] = []
        self._parent, self.reached = -1, 1.0
        self.room, self._budget, self._calibrator = session.room, budget, calibrator
        self.ended = not (budget and self.room)

    def tree(self) -> TokenTree:
        parents, token_ids, probs, classes = (
            zip(*self.nodes, strict=True) if self.nodes else [()] * 4
        )
        return TokenTree.build(token_ids, parents, probs, classes)

    def add(self, token_ids: Sequence[int], best: Sequence[float], known: bool = True) -> None:
        """Add the likeliest tokens behind the last one, of which the first goes on; see
        `evidence_classes`."""
        scores = [score for score in best if math.isfinite(score)]
        if not scores:
            self.ended = True
            return
        classes = evidence_classes(scores, known)
        rates = self._calibrator.rates(np.array(classes)).tolist()
        self.certainties.append(rates[0])
        first, before, reached = len(self.nodes), self._parent, self.reached
        for token, rate, kind in zip(token_ids, rates, classes, strict=False):
            if reached * rate >= _LEAST_DRAFTED:
                self.nodes.append((before, token, reached * rate, kind))
        self.ended = reached * rates[0] < _LEAST_DRAFTED
        if not self.ended:
            self._parent, self.reached = first, reached * rates[0]
            self.path.append(token_ids[0])
        self.ended |= self.reached < _LEAST_FOLLOWED or len(self.nodes) >= self._budget
        self.ended |= len(self.path) > self.room


class _Draft:
    """Chains of some texts, which grow together until none may or another level does not pay.

    Attributes:
        chains: of each text.
    """

    def __init__(
        self, sessions: Sequence[QuantizedSession], budgets: Sequence[int], given: _OfCall
    ) -> None:
        weights, self._given = given.weights, given
        pairs = zip(sessions, budgets, strict=True)
        self.chains = [_Chain(*pair, weights.calibrator) for pair in pairs]
        for session in sessions:
            weights.output.add(session.unread)
            session.unread = []
        self._levels, self._spent = 0, 0.0
        # Seconds of a step by the tokens that it feeds besides a root of each, and of a level.
        curve, rooms = sessions[0].curve, sum(chain.room for chain in self.chains)
        self._seconds = None if curve is None else curve(1 + CHOICES * rooms).tolist()
        most = given.verifier.most_tokens
        self._room = math.inf if most is None else most - len(sessions)
        self._costs = _levels.setdefault(weights, _Levels())
        self._level_seconds = self._costs.timed(len(sessions))

    def grow(self) -> None:
        """Add all levels, the first of which is worth its time."""
        begun, given = time.perf_counter(), self._given
        more = True
        while more:
            growing = self._growing
            rows, fed = [chain.row for chain in growing], [chain.path[-1] for chain in growing]
            x = given.verifier.draft_level(rows, fed, given.weights)
            if x is None:  # the cache, or the model, is no longer what it was
                break
            self._choose(growing, x)
            self._levels += 1
            self._spent = time.perf_counter() - begun
            more = self.goes_on()
        if self._levels:
            self._costs.observe(len(self.chains), self._spent / self._levels)

    @property
    def _growing(self) -> list[_Chain]:
        return [chain for chain in self.chains if not chain.ended]

    @property
    def _nodes(self) -> int:
        return sum(len(chain.nodes) for chain in self.chains)

    def _choose(self, growing: Sequence[_Chain], x: torch.Tensor) -> None:
        """Add what the target would choose, were these what its output layer read."""
        if growing[0].preview.greedy:
            found = zip(growing, *self._given.output.best(x, CHOICES), strict=True)
            for chain, token_ids, scores in found:
                chain.add(token_ids, scores)
            return
        logits, among = self._given.output(x)
        for chain, own in zip(growing, logits.split(1), strict=True):
            best, ids = chain.preview.best(own, [chain.path[1:]], CHOICES, among)
            known = chain.preview.knows(among.vocab_size)
            chain.add(ids[0].tolist(), best[0].tolist(), known)

    def goes_on(self) -> bool:
        """Whether another level is worth its time; while nobody knows that, one tells."""
        growing = self._growing
        if not growing or self._nodes >= self._room:
            return False
        first, level_seconds = not self._levels, self._level_seconds
        if level_seconds is None:
            return first
        if self._pays(growing, level_seconds, _MARGIN if first else 1.0):
            return True
        return first and self._is_trial(level_seconds)

    def _is_trial(self, level_seconds: float) -> bool:
        """Whether a level is tried that seems not to pay."""
        assert self._seconds is not None
        self._costs.refused += _PAUSE * self._seconds[0]
        if self._costs.refused * _TRIALS < level_seconds:
            return False
        self._costs.refused = 0.0
        return True

    def _pays(self, growing: Sequence[_Chain], level_seconds: float, margin: float) -> bool:
        """Whether any number of further levels brings so many times the tokens per second."""
        if self._seconds is None:
            return True
        nodes = self._nodes
        tokens = sum(1 + sum(prob for _, _, prob, _ in chain.nodes) for chain in self.chains)
        seconds, certainty = self._seconds, self._given.weights.certainty
        now = tokens / (seconds[nodes] + self._spent)
        for levels in range(1, max(chain.room for chain in growing) - self._levels + 1):
            further = [one.reached for one in growing if one.room >= self._levels + levels]
            nodes += len(further)
            tokens += certainty**levels * sum(further)
            spent = self._spent + levels * level_seconds
            if tokens / (seconds[nodes] + spent) > margin * now:
                return True
        return False
