"""Drafts of the target itself with its weights in eight bits."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..drafters.base import Drafter, DraftSession, Feedback, Float64Array, Target
from ..host.ranks import require_whole
from ..host.transformers_private import input_device
from ..kernels.quantized import QuantizedWeight
from ..kernels.quantized_model import quantized_model
from ..kernels.reroute import standing_in
from ..planning.acceptance import Calibrator
from ..planning.cost_model import CostModel
from ..system.arguments import require_at_least
from ..system.locks import Lock
from ..token_tree import Float32Array, Int32Array, TokenTree
from ..verification.own_forwards import Level, OwnForwards
from .draft_model import mask_rules

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

PRIORS: Float32Array = np.array([*_FIRST, *_SECOND, *_THIRD, *_CHANCE], np.float32)
"""Of the evidence classes: measured on Gemma-3-270M, then the model's own probabilities."""

# Nodes that are less likely than this are neither drafted nor expanded.
_LEAST_DRAFTED = 0.02
_LEAST_EXPANDED = 0.08

_MEMORY = 0.1  # share of a new draft in how likely a first choice is taken to be

# A draft has to promise this much more tokens per second than a step without, since neither time
# nor certainty is known exactly. Where it does not, one level is tried in so many steps: forwards
# take longer behind longer texts, and levels were perhaps timed while the machine was busy.
_MARGIN = 1.05
_TRIAL_PERIOD = 64

# What a level takes, by the nodes that it feeds; of models by their fingerprints.
_prices: dict[str, CostModel] = {}


Weights = Mapping[int, QuantizedWeight]
"""Of linear layers in eight bits, by the identity of the parameter."""


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
        self._calibrator = Calibrator(PRIORS)
        self._refusals = 0
        self._weights: weakref.WeakKeyDictionary[OwnForwards, Weights] = weakref.WeakKeyDictionary()
        self._lock = Lock()
        self._certainty = 0.9  # of a first choice, lately

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> DraftSession:
        model = target.require_model("QuantizedSelf")
        require_whole(model, "QuantizedSelf")
        device = input_device(model)
        if device.type != "cpu":
            raise ValueError(f"QuantizedSelf: expected a model on a CPU, got one on {device}")
        mask_rules(model, "QuantizedSelf")
        session = QuantizedSession(self, target, self._calibrator)
        if target.own is not None:
            session.weights = self._weights_of(target.own, model)
        return session

    def _weights_of(self, forwards: OwnForwards, model: Any) -> Weights:
        """As they are in this call, the same for all of its rows."""
        with self._lock:
            if forwards not in self._weights:
                self._weights[forwards] = quantized_model(model)
            return self._weights[forwards]

    def propose_rows(self, sessions: Sequence[Any], budgets: Sequence[int]) -> list[TokenTree]:
        own = sessions[0].target.own
        if own is None:
            raise ValueError("QuantizedSelf: expected a call of generate to draft for, got none")
        growths = [
            _Growth(session, budget, self.width)
            for session, budget in zip(sessions, budgets, strict=True)
        ]
        if own.ready and not torch.is_autocast_enabled("cpu"):
            with own.drafting(), standing_in(sessions[0].weights):
                self._grow(own, growths)
        return [growth.tree() for growth in growths]

    @torch.no_grad()
    def _grow(self, forwards: OwnForwards, growths: Sequence[_Growth]) -> None:
        """Level by level, as long as another one pays."""
        price = self._price(growths[0].session.target.fingerprint)
        spent = 0.0
        for depth in range(self.max_levels):
            open_rows = [growth for growth in growths if growth.left(depth, self.max_levels)]
            left = max((growth.left(depth, self.max_levels) for growth in open_rows), default=0)
            if not left or not self._goes_on(growths, price, spent, left):
                break
            started = time.perf_counter()
            first = forwards.columns
            levels = {growth.row: growth.level(first) for growth in open_rows}
            logits = forwards.feed(levels)
            for growth in open_rows:
                growth.grow(logits[growth.row, : len(growth.frontier)])
            seconds = time.perf_counter() - started
            price.observe(sum(len(level.token_ids) for level in levels.values()), seconds)
            spent += seconds
        for growth in growths:
            if growth.certainty:
                share = _MEMORY * (float(np.mean(growth.certainty)) - self._certainty)
                self._certainty += share

    def _price(self, fingerprint: str) -> CostModel:
        """What a level takes, by the nodes that it feeds."""
        with self._lock:
            return _prices.setdefault(fingerprint, CostModel())

    def _goes_on(
        self, growths: Sequence[_Growth], price: CostModel, spent: float, further: int
    ) -> bool:
        """Whether another level is worth its time; while nobody knows that, one tells."""
        if spent == 0.0 and not price.timed:
            return True
        if price.timed and self._pays(growths, price, spent, further):
            return True
        self._refusals += spent == 0.0
        return spent == 0.0 and self._refusals % _TRIAL_PERIOD == 0

    def _pays(
        self, growths: Sequence[_Growth], price: CostModel, spent: float, further: int
    ) -> bool:
        """Whether any of up to `further` levels brings more tokens per second than none."""
        curve = growths[0].session.curve
        if curve is None:
            return True
        drafted = np.sort(np.concatenate([growth.probs for growth in growths]))[::-1]
        best = np.array([growth.best for growth in growths])
        rows = len(growths)
        seconds = curve(1 + len(drafted) + rows * further) + spent
        level = price.seconds(max(1, sum(len(growth.frontier) for growth in growths)))
        tokens = np.concatenate([[rows], drafted]).cumsum()
        now = float((tokens / seconds[: len(tokens)]).max())
        for more in range(1, further + 1):
            steps = np.outer(self._certainty ** np.arange(1, more + 1), best).ravel()
            probs = np.sort(np.concatenate([drafted, steps]))[::-1]
            tokens = np.concatenate([[rows], probs]).cumsum()
            if float((tokens / (seconds[: len(tokens)] + more * level)).max()) > _MARGIN * now:
                return True
        return False


class QuantizedSession(DraftSession):
    """One text of a call.

    Attributes:
        target: the model, as this text sees it.
        weights: its own in eight bits; none in a call that nothing is drafted for.
        curve: seconds of a step by the tokens that it feeds; None while nobody has told.
    """

    def __init__(self, drafter: QuantizedSelf, target: Target, calibrator: Calibrator) -> None:
        self._drafter = drafter
        self.target = target
        self.weights: Weights = {}
        self.curve: Callable[[int], Float64Array] | None = None
        self.calibrator = calibrator
        self.calibration = calibrator.session()

    def propose(self, budget: int) -> TokenTree:
        return self._drafter.propose_rows([self], [budget])[0]

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        self.calibration.commit(token_ids)

    def see_cost(self, curve: Callable[[int], Float64Array]) -> None:
        self.curve = curve


@dataclass
class _Growth:
    """A draft of one row while it grows.

    Attributes:
        frontier: nodes to be fed next; −1 is the text's last token.
        certainty: rate of the first choice behind each node that was fed.
    """

    session: QuantizedSession
    budget: int
    width: int
    frontier: list[int] = field(default_factory=lambda: [-1])
    certainty: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.classes: list[int] = []
        self.probs: list[float] = []
        self._columns: dict[int, int] = {}

    @property
    def row(self) -> int:
        return self.session.target.row

    def left(self, depth: int, most: int) -> int:
        """How many levels may follow those of this depth; 0 where nothing is left to be fed."""
        own = self.session.target.own
        assert own is not None
        deepest = own.deepest(self.row)
        full = not self.frontier or len(self.tokens) >= self.budget
        return 0 if full else max(0, (most if deepest is None else min(most, deepest)) - depth)

    @property
    def best(self) -> float:
        """How likely the best node to be fed next is reached."""
        return max((self._reached(node) for node in self.frontier), default=0.0)

    def _reached(self, node: int) -> float:
        return 1.0 if node < 0 else self.probs[node]

    def path(self, node: int) -> list[int]:
        """The nodes from the first level to this one."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def level(self, first: int) -> Level:
        """What is to be fed, its columns beginning at `first`."""
        paths = [self.path(node) for node in self.frontier]
        for place, node in enumerate(self.frontier):
            self._columns[node] = first + place
        return Level(
            [self.tokens[path[-1]] if path else -1 for path in paths],
            [len(path) for path in paths],
            [[self._columns[node] for node in [-1, *path][:-1]] for path in paths],
        )

    def grow(self, logits: torch.Tensor) -> None:
        """Add what the model chooses behind the frontier, logits [frontier, vocab_size]."""
        foresight = self.session.target.foresight
        assert foresight is not None
        paths = [[self.tokens[node] for node in self.path(node)] for node in self.frontier]
        scores, ids = foresight.best(logits, paths, CHOICES)
        classes = evidence_classes(scores.numpy(), foresight.knows(logits.shape[-1]))
        rates = self.session.calibrator.rates(classes)
        added: list[int] = []
        for place, parent in enumerate(self.frontier):
            reached = self._reached(parent)
            self.certainty.append(float(rates[place, 0]))
            for choice in range(ids.shape[1]):
                prob = reached * float(rates[place, choice])
                if prob < _LEAST_DRAFTED or not np.isfinite(float(scores[place, choice])):
                    continue
                added.append(len(self.tokens))
                self.tokens.append(int(ids[place, choice]))
                self.parents.append(parent)
                self.classes.append(int(classes[place, choice]))
                self.probs.append(prob)
        added.sort(key=lambda node: -self.probs[node])
        self.frontier = [node for node in added[: self.width] if self.probs[node] > _LEAST_EXPANDED]

    def tree(self) -> TokenTree:
        """The best of what has grown, its probabilities calibrated."""
        if not self.tokens:
            return TokenTree.empty()
        bare = TokenTree.build(self.tokens, self.parents, self.probs, self.classes)
        tree = self.session.calibration.calibrate(bare.prune(self.budget))
        return TokenTree.build(tree.token_ids, tree.parents, tree.probs)


def evidence_classes(scores: Float32Array, known: bool) -> Int32Array:
    """int32 [nodes, choices]: the class of each choice behind a node.

    Args:
        scores: float32 [nodes, choices], descending, as `Foresight.best` gives them.
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
