"""Drafts of the target itself with its weights in eight bits."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from ...draft_models.draft_model import tree_service
from ...draft_models.growth import BestFirst, Chosen, GrowthLimits, Level, paths_to
from ...draft_models.rows import proposed
from ...drafters.base import BatchSession, Drafter, Feedback, Float64Array, Target
from ...host.ranks import require_whole
from ...host.transformers_private import input_device
from ...policy.acceptance import Calibrator
from ...policy.cost_model import CostModel
from ...structures.draft_tree import flattened
from ...structures.evidence import OpenDrafts
from ...system.arguments import require_at_least
from ...system.locks import Lock
from ...types.evidence import EvidenceClasses
from ...types.token_tree import Float32Array, Forest, Int32Array, TokenTree
from ...verification.own_forwards import TargetForwards
from .quantized import QuantizedWeight, quantized_model
from .reroute import overriding, reroute

# Evidence: the place among the model's choices, and how far the first one's score lies above the
# second's (its own certainty) or, of others, above theirs. Where a choice is left to chance, the
# probability of the token.
GAP_EDGES = np.array([0.05, 0.15, 0.35, 0.7, 1.4, 2.8], np.float32)
PROB_EDGES = np.array([0.03, 0.1, 0.25, 0.5, 0.75, 0.95], np.float32)
BUCKETS = len(GAP_EDGES) + 1
CHOICES = 3

_FIRST = [0.55, 0.7, 0.83, 0.92, 0.97, 0.99, 0.998]
_SECOND = [0.42, 0.27, 0.14, 0.06, 0.02, 0.006, 0.001]
_THIRD = [0.2, 0.12, 0.06, 0.025, 0.01, 0.003, 0.001]
_CHANCE = [0.015, 0.06, 0.17, 0.37, 0.62, 0.86, 0.98]

EVIDENCE = EvidenceClasses([*_FIRST, *_SECOND, *_THIRD, *_CHANCE])
"""Priors measured on Gemma-3-270M, then the model's own probabilities."""

# Nodes that are less likely than this are neither drafted nor expanded.
_LEAST_DRAFTED = 0.02
_LEAST_EXPANDED = 0.08

# More than any number of nodes.
_ALL = 1 << 30

_MEMORY = 0.1  # share of a new draft in how likely a first choice is taken to be

# A draft has to promise this much more tokens per second than a step without, since neither time
# nor certainty is known exactly. Where it does not, one level is tried in so many steps: forwards
# take longer behind longer texts, and levels were perhaps timed while the machine was busy.
_MARGIN = 1.05
_TRIAL_PERIOD = 64

# What a level takes, by the nodes that it feeds; of models by their fingerprints.
_prices: dict[str, CostModel] = {}


Weights = Mapping[int, QuantizedWeight]
"""Linear layers' weights in eight bits, by the identity of the parameter."""


class QuantizedSelf(Drafter):
    """The target drafts for itself, by its own modules with weights in eight bits.

    So it reads a quarter of the bytes (half of bfloat16), and nearly always chooses the same token.
    It reads the cache that the target keeps of the text anyway: there is no second prefill, and no
    second cache. Every level of the tree is one forward for all rows of a batch. A draft grows
    while its certainty, calibrated on what was accepted so far, pays for the time a level takes,
    and forks where its choices lie close together. Sampled texts are drafted with the call's own
    warpers and the random numbers that their tokens will be drawn with.

    Args:
        bits: of a weight; 8.
        max_levels: forwards for one draft at most.
        width: nodes that a level expands at most.

    Raises:
        ValueError: an argument is out of range; from `start`, the model is not whole and on a CPU,
            or cannot be fed token trees.
    """

    name = "quantized self"
    costly = True

    def __init__(self, bits: int = 8, *, max_levels: int = 8, width: int = 3) -> None:
        if bits != 8:
            raise ValueError(f"bits: expected 8, got {bits}")
        require_at_least(1, max_levels=max_levels, width=width)
        self.bits, self.max_levels, self.width = bits, max_levels, width
        self.calibrator = Calibrator(EVIDENCE)
        self.certainty = 0.9  # a first choice's, lately
        self.refusals = 0
        self._weights: weakref.WeakKeyDictionary[TargetForwards, Weights] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = Lock()

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> QuantizedSession:
        model = target.require_model("QuantizedSelf")
        require_whole(model, "QuantizedSelf")
        device = input_device(model)
        if device.type != "cpu":
            raise ValueError(f"QuantizedSelf: expected a model on a CPU, got one on {device}")
        tree_service(model, "QuantizedSelf")
        if target.own is None:
            return QuantizedSession(self, target, {})
        with self._lock:
            # All rows of a call use the same.
            if target.own not in self._weights:
                self._weights[target.own] = quantized_model(model)
            return QuantizedSession(self, target, self._weights[target.own])

    @torch.no_grad()
    def propose_rows(self, sessions: Sequence[QuantizedSession], budgets: Sequence[int]) -> Forest:
        own = sessions[0].target.own
        if own is None:
            raise ValueError("QuantizedSelf: expected a call of generate to draft for, got none")
        drafts = [TokenTree.empty()] * len(sessions)
        asked = [i for i, session in enumerate(sessions) if budgets[i] > 0 and session.room]
        if own.ready and asked and not torch.is_autocast_enabled("cpu"):
            growth = _Growth(own, [sessions[i] for i in asked], [budgets[i] for i in asked])
            if growth.goes_on():
                with own.drafting(), reroute(), overriding(sessions[0].weights):
                    growth.grow(growth.run)
                self.certainty += _MEMORY * (mean(growth.certainties) - self.certainty)
                trees = growth.grown().trees(lambda classes, *_: classes.astype(np.int32))
                for i, tree in zip(asked, trees, strict=True):
                    drafts[i] = tree
        texts = [session.calibration for session in sessions]
        calibrated = self.calibrator.calibrate(texts, proposed(drafts, budgets))
        return replace(calibrated, classes=np.full_like(calibrated.classes, -1))


@dataclass(eq=False)
class QuantizedSession(BatchSession):
    """One text of a call.

    Attributes:
        drafter: the text's.
        target: the model, as this text sees it.
        weights: its own in eight bits; none in a call that nothing is drafted for.
        curve: seconds of a step by the tokens that it feeds; None while nobody has told.
    """

    drafter: QuantizedSelf
    target: Target
    weights: Weights
    curve: Callable[[int], Float64Array] | None = None
    calibration: OpenDrafts = field(default_factory=OpenDrafts)

    @property
    def room(self) -> int:
        """Forwards that may be run for a draft."""
        assert self.target.own is not None
        deepest = self.target.own.deepest(self.target.row) if self.target.own.ready else 0
        most = self.drafter.max_levels
        return most if deepest is None else min(most, deepest)

    @property
    def ready(self) -> bool:  # type: ignore[override]
        return self.target.own is None or self.target.own.ready

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        self.drafter.calibrator.judge([self.calibration], *flattened([token_ids]))

    def see_cost(self, curve: Callable[[int], Float64Array]) -> None:
        self.curve = curve


class _Growth(BestFirst):
    """Drafts of some rows, which grow until they hold what they may or another level does not pay.

    Attributes:
        certainties: how likely the first choice behind each fed node is.
    """

    def __init__(
        self, own: TargetForwards, sessions: Sequence[QuantizedSession], budgets: Sequence[int]
    ) -> None:
        drafter = sessions[0].drafter
        limits = GrowthLimits(CHOICES, drafter.width, drafter.max_levels - 1, 2, _LEAST_EXPANDED)
        super().__init__(limits, _ALL, choose=self._choices)
        self._own, self._drafter, self._sessions = own, drafter, sessions
        self._rows = [session.target.row for session in sessions]
        self._rooms = torch.tensor([session.room for session in sessions])
        self._budgets = torch.tensor(budgets)
        self._scores = torch.zeros((len(sessions), 1))
        self.certainties: list[float] = []
        self._price = _prices.setdefault(sessions[0].target.fingerprint, CostModel())
        self._spent = self._started = 0.0

    @property
    def _waiting(self) -> torch.Tensor:
        """bool [rows, w], which nodes are to be fed next."""
        return self._scores > -torch.inf

    def run(self, level: Level | None) -> torch.Tensor:
        """Logits behind a level, by a forward of the target's own; a `Run`."""
        self._started = time.perf_counter()
        if level is None:
            nothing = torch.empty((0, 1), dtype=torch.int64)
            return self._own.feed([], nothing, 0, nothing[..., None].bool())[self._rows]
        rows = self._waiting.any(1).nonzero().flatten().tolist()
        # The text's last token is in front of the nodes.
        sees = F.pad(level.visible[rows], (1, 0), value=True)
        numbers = [self._rows[row] for row in rows]
        logits = self._own.feed(numbers, level.token_ids[rows], level.depth, sees)
        return logits[self._rows]

    def _choices(self, logits: torch.Tensor, count: int, levels: Sequence[Level]) -> Chosen:
        """What the target would choose behind each node, and how often such choices were right."""
        ids = torch.zeros((*logits.shape[:2], count), dtype=torch.int64)
        log_probs, classes = torch.full((2, *ids.shape), -torch.inf)
        for row, session in enumerate(self._sessions):
            nodes = self._waiting[row].nonzero().flatten()
            preview = session.target.preview
            assert preview is not None
            if len(nodes):
                paths = paths_to(levels, row)
                scores, ids[row, nodes] = preview.best(
                    logits[row, nodes], [paths[node] for node in nodes], count
                )
                known = preview.knows(logits.shape[-1])
                found = evidence_classes(scores.numpy(), known)
                rates = torch.from_numpy(self._drafter.calibrator.rates(found))
                self.certainties += rates[:, 0].tolist()
                probs = rates.where(scores.isfinite(), 0.0)
                reached = self._scores[row, nodes, None].double().exp()
                likely = reached * probs.double() >= _LEAST_DRAFTED
                log_probs[row, nodes] = probs.log().where(likely, -torch.inf)
                classes[row, nodes] = torch.from_numpy(found).float()
        return Chosen(ids, log_probs, classes)

    def _next_level(self) -> Level | None:
        seconds = time.perf_counter() - self._started
        self._price.observe(int(self._waiting.sum()), seconds)
        self._spent += seconds
        level = super()._next_level()
        return level if level is not None and self.goes_on() else None

    def _floor(self, scores: torch.Tensor) -> torch.Tensor:
        nodes = torch.cat(self._reached, dim=1)
        full = (nodes > -torch.inf).sum(1) >= self._budgets
        ends = full | (self._rooms <= len(self._reached))
        return torch.where(ends, torch.inf, self._least)[:, None]

    def goes_on(self) -> bool:
        """Whether another level is worth its time; while nobody knows that, one tells."""
        first, timed, drafter = not self._reached, self._price.timed, self._drafter
        if timed and self._pays():
            return True
        if first and timed:
            drafter.refusals += 1
        return first and (not timed or drafter.refusals % _TRIAL_PERIOD == 0)

    def _pays(self) -> bool:
        """Whether any number of further levels brings more tokens per second than none."""
        curve, rows = self._sessions[0].curve, len(self._sessions)
        if curve is None:
            return True
        scores = [scores.ravel() for scores in self._reached]
        drafted = torch.cat([torch.empty(0), *scores]).double().exp().numpy()
        drafted = drafted[drafted > 0]
        best = self._scores.amax(1).double().exp().numpy()
        further = int((self._rooms[self._waiting.any(1)] - len(self._reached)).max())
        seconds = curve(1 + len(drafted) + rows * further) + self._spent
        level = self._price.seconds(int(self._waiting.sum()))

        def rate(levels: int) -> float:
            """The most tokens per second that so many further levels may bring."""
            steps = np.outer(self._drafter.certainty ** np.arange(1, levels + 1), best).ravel()
            probs = np.sort(np.concatenate([drafted, steps]))[::-1]
            tokens = np.concatenate([[rows], probs]).cumsum()
            return float((tokens / (seconds[: len(tokens)] + levels * level)).max())

        now = rate(0)
        return any(rate(levels) > _MARGIN * now for levels in range(1, further + 1))


def evidence_classes(scores: Float32Array, known: bool) -> Int32Array:
    """int32 [nodes, choices]: the class of each choice behind a node.

    Args:
        scores: float32 [nodes, choices], descending, as `Preview.best` gives them.
        known: whether nothing is left to chance; otherwise they are logarithms of probabilities.
    """
    if not known:
        chances = np.searchsorted(PROB_EDGES, np.exp(scores), side="right")
        return (CHOICES * BUCKETS + chances).astype(np.int32)
    gaps = scores[:, :1] - scores
    # The first one lies above the second by as much as that below the first.
    gaps[:, 0] = gaps[:, 1] if gaps.shape[1] > 1 else np.inf
    places = np.arange(scores.shape[1])
    return (places * BUCKETS + np.searchsorted(GAP_EDGES, gaps, side="right")).astype(np.int32)
