"""A model's weights in four bits, from which it drafts for itself."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from ...drafters.call_view import Among
from ...policy.acceptance import Calibrator
from ...structures.modules import modules_of
from ...system.locks import Lock
from ...system.log import get_logger
from ...types.evidence import EvidenceClasses
from ...verification.largest import host_scores
from .quantized import IN_FOUR_BITS, WEIGHTS, QuantizedWeight
from .reroute import overriding, reroute
from .skinny import Matrix, RepeatedLinears, int8, routed_linear
from .weight_copies import Kept, Mark, WeightCopies, mark_of, output_weight, packable

logger = get_logger(__name__)

# Smaller layers stay as they are. Those for keys and values of a model of 135M parameters have more
# elements: where they stayed, the layer of the queries would no longer be computed beside them.
LEAST_ELEMENTS = 3 << 15

# What a draft reads of the output layer: such a share of what it reads of all others, of so many
# rows at least; and of so many tokens more that were seen.
OUTPUT_SHARE = 1 / 6
LEAST_ROWS = 8192
MOST_SEEN = 8192

# Tokens, in which all columns are alike, that are added to those that were read.
_ALIKE = 2.0

# Evidence: the place among the model's choices, and how far the first one's score lies above the
# second's (its own certainty) or, of others, above theirs. Where a choice is left to chance, the
# probability of the token.
GAP_EDGES = [0.05, 0.15, 0.35, 0.7, 1.4, 2.8]
PROB_EDGES = [0.03, 0.1, 0.25, 0.5, 0.75, 0.95]
BUCKETS = len(GAP_EDGES) + 1
CHOICES = 3

_FIRST = [0.42, 0.46, 0.49, 0.6, 0.76, 0.91, 0.984]
_SECOND = [0.3, 0.31, 0.26, 0.2, 0.1, 0.04, 0.01]
_THIRD = [0.19, 0.19, 0.17, 0.12, 0.05, 0.02, 0.005]
_CHANCE = [0.015, 0.06, 0.17, 0.37, 0.62, 0.86, 0.98]

EVIDENCE = EvidenceClasses([*_FIRST, *_SECOND, *_THIRD, *_CHANCE])
"""Priors measured on SmolLM2-135M and Gemma-3-270M in four bits, then the model's probabilities."""

_FIRST_CERTAINTY = 0.85
_MEMORY = 0.05  # share of a level in how likely a first choice is taken to be

# Calls behind which weights are looked at, and not only at what PyTorch counts of writes to them;
# drafts of others than the model's are as right, and rarer.
_LOOK_PERIOD = 16


class FewBits:
    """The weights of a model's linear layers in four bits.

    A weight that layers share is packed once. Layers that are no linears stay as they are, and so
    do small ones: adapters keep their precision. The output layer has eight bits, and where it is
    large only the rows of tokens that may come.

    Args:
        model: whose; its output layer is one that is packed.
        read: runs the model over text of the kind that it will be drafted with.

    Attributes:
        by_id: what stands for each weight, by the identity of the parameter.
        output: what stands for the output layer.
        calibrator: what drafts' evidence was worth.
        certainty: how likely a first choice was to be right, lately.
    """

    def __init__(self, model: Any, read: Callable[[], object] = lambda: None) -> None:
        started, self._looks = time.perf_counter(), 0
        self.calibrator, self.certainty = Calibrator(EVIDENCE), _FIRST_CERTAINTY
        copied, counts = _copied(model), _column_weights(model, read)
        self._kept: list[Kept[Any]] = [
            copies.of(weight, *([counts[id(weight)]] if copies is IN_FOUR_BITS else []))
            for weight, copies in copied
        ]
        pairs = zip(copied, self._kept, strict=True)
        self.by_id: Mapping[int, Any] = {id(weight): kept.copy for (weight, _), kept in pairs}
        last, layer = output_weight(model), model.get_output_embeddings()
        whole: QuantizedWeight = self.by_id[id(last)]
        others = self.nbytes - whole.nbytes
        rows = max(LEAST_ROWS, int(OUTPUT_SHARE * others / whole.values.shape[1]))
        self.output = ShortOutput(whole, min(rows, len(last)), layer.bias)
        logger.info(
            "%s: %d linear layers in four bits, %.0f MB, %.1f s",
            *(type(model).__name__, len(copied), self.nbytes / 1e6),
            time.perf_counter() - started,
        )

    @classmethod
    def known_of(cls, model: nn.Module) -> FewBits | None:
        """Those that were packed of a model, if its weights are what they were."""
        known = _known.get(model)
        if known is not None and not known._stands_for(model):
            del _known[model]
            return None
        return known

    @staticmethod
    def release(model: nn.Module) -> None:
        """Drop those that were packed of a model."""
        _known.pop(model, None)

    @classmethod
    def of(cls, model: nn.Module, read: Callable[[], object] = lambda: None) -> FewBits:
        """Those of a model, packed if need be, which all share."""
        found = cls.known_of(model)
        if found is None:
            found = _known[model] = cls(model, read)
        return found

    @property
    def nbytes(self) -> int:
        """What they take; the output layer's may be the target's own."""
        return sum(kept.copy.nbytes for kept in self._kept)

    def _stands_for(self, model: nn.Module) -> bool:
        """Whether the model's weights are what was packed."""
        self._looks += 1
        copied = _copied(model)
        if [id(weight) for weight, _ in copied] != [*self.by_id]:
            return False
        if self._looks % _LOOK_PERIOD == 0:
            return [copies.find(weight) for weight, copies in copied] == self._kept
        return all(kept.stands_for(x) for (x, _), kept in zip(copied, self._kept, strict=True))

    def observe_certainties(self, rates: Iterable[float]) -> None:
        """Learn how likely first choices were to be right."""
        for rate in rates:
            self.certainty += _MEMORY * (rate - self.certainty)


class _Observed:
    """Stands for a weight while the model reads: it sums the squares of what each column of it is
    multiplied by.

    What is left out of a column counts in a product by that, so that a hundredth of the columns of
    which a model's outliers are may count more than all others (llama.cpp's importance matrix, and
    AWQ, arXiv 2306.00978, section 3.1).
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight, self._squares = weight, torch.zeros(weight.shape[1])
        self._rows = 0

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self._squares += rows.square().sum(0)
        self._rows += len(rows)
        return routed_linear(x, self._weight, bias)

    @property
    def column_weights(self) -> torch.Tensor | None:
        """float32 [columns], their mean 1; None where that is not known."""
        mean = self._squares.mean()
        if not (mean > 0 and mean.isfinite()):
            return None
        return (self._squares / mean * self._rows + _ALIKE) / (self._rows + _ALIKE)


def _column_weights(model: nn.Module, read: Callable[[], object]) -> dict[int, torch.Tensor | None]:
    """How much the columns of weights in four bits count for what the model reads."""
    seen = {id(x): _Observed(x) for x, copies in _copied(model) if copies is IN_FOUR_BITS}
    with reroute(), overriding(seen):
        read()
    return {i: observed.column_weights for i, observed in seen.items()}


_known: WeakKeyDictionary[nn.Module, FewBits] = WeakKeyDictionary()


def _copied(model: nn.Module) -> list[tuple[torch.Tensor, WeightCopies[Any]]]:
    """The weights that are packed, each with the copies of its kind."""
    weights = [packable(layer, LEAST_ELEMENTS) for layer in modules_of(model)]
    found: dict[int, tuple[torch.Tensor, WeightCopies[Any]]] = {
        id(weight): (weight, IN_FOUR_BITS) for weight in weights
    }
    found.pop(id(None), None)
    if (last := output_weight(model)) is not None:
        found[id(last)] = last, WEIGHTS
    return [*found.values()]


def marks_of(model: nn.Module) -> list[Mark]:
    """What the weights that would be packed are like, as far as PyTorch counts."""
    return [mark_of(weight) for weight, _ in _copied(model)]


def bytes_of(model: nn.Module) -> tuple[int, int]:
    """The memory that a model's weights in four bits will take besides what there is of them, and
    what that takes."""
    sizes = [0, 0]
    for weight, copies in _copied(model):
        sizes[copies.find(weight) is not None] += copies.size_of(weight)
    return sizes[0], sizes[1]


class ShortOutput:
    """The rows of an output layer in eight bits that drafts read: those of tokens that may come.

    Vocabularies of byte pairs are ordered by how often the pairs were met in the texts that they
    were learnt from, so that the first rows are those of frequent tokens. Behind them stand those
    of tokens that texts had, or that the target found likely: at most `MOST_SEEN`, of which the
    newest take the place of the oldest. Safe to use from several threads.

    Args:
        whole: the layer's weight.
        first: rows that are read in any case.
        bias: the layer's; None: it has none.

    Attributes:
        added: how often a token's row was added.
    """

    def __init__(
        self, whole: QuantizedWeight, first: int, bias: torch.Tensor | None = None
    ) -> None:
        self.whole, self.first = whole, first
        self._bias = None if bias is None else bias.detach().float()
        room = min(MOST_SEEN, len(whole.scales) - first)
        self._values = whole.values.new_empty((room, whole.values.shape[1]))
        self._scales = whole.scales.new_empty(room)
        self._token_ids = torch.arange(first + room)
        self._places: dict[int, int] = {}
        self.added = 0
        self._lock = Lock()

    @property
    def seen(self) -> int:
        """Tokens whose rows stand behind the first ones."""
        return min(self.added, len(self._scales))

    def add(self, token_ids: Iterable[int]) -> None:
        """Read the rows of these tokens, too."""
        room, first = len(self._scales), self.first
        rare = {token for token in token_ids if token >= first}
        if not rare or not room:
            return
        with self._lock:
            for token in sorted(rare - self._places.keys())[:room]:
                place = self.added % room
                if self.added >= room:
                    del self._places[int(self._token_ids[first + place])]
                self._values[place] = self.whole.values[token]
                self._scales[place] = self.whole.scales[token]
                self._token_ids[first + place] = token
                self._places[token] = place
                self.added += 1

    def parts(self) -> tuple[list[tuple[Matrix, torch.Tensor | None]], Among]:
        """The first rows, and those behind them, with the float32 bias of each; and the tokens that
        they are of."""
        first, whole, seen = self.first, self.whole, self.seen
        # Others may write to what is shared.
        token_ids = self._token_ids[: first + seen].clone()
        biases = [None, None] if self._bias is None else self._bias[token_ids].split([first, seen])
        parts = [int8(whole.values[:first], whole.scales[:first], whole.depth)]
        if seen:
            parts.append(int8(self._values[:seen], self._scales[:seen], whole.depth))
        return [*zip(parts, biases, strict=False)], Among(token_ids, len(whole.scales), first)


class OutputReader:
    """What drafts of one call read of an output layer."""

    def __init__(self, output: ShortOutput) -> None:
        self._output = output
        self._laid_out = -1, 0  # rows that had been added, and rows of x

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, Among]:
        """float32 [rows, columns] logits of x, [rows, depth], which hold until the next call, and
        the tokens that they are of."""
        wanted = self._output.added, len(x)
        if wanted != self._laid_out:
            self._lay_out(x.shape)
            self._laid_out = wanted
        self._x.copy_(x)
        self._products()
        return self._logits, self._among

    def best(self, x: torch.Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The tokens of the greatest logits of each row, and these, descending."""
        _, among = self(x)
        scores = host_scores(self._logits)
        assert scores is not None
        columns, logits = scores.top_k(np.arange(len(x)), count, scores.columns)
        return among.token_ids.numpy()[columns].tolist(), logits.tolist()

    def _lay_out(self, shape: Sequence[int]) -> None:
        """Settle where x and its logits lie, and the products of x with the parts of the layer."""
        parts, self._among = self._output.parts()
        sizes = [matrix.outputs for matrix, _ in parts]
        self._x, self._logits = torch.empty(shape), torch.empty((shape[0], sum(sizes)))
        pairs = zip(parts, self._logits.split(sizes, 1), strict=True)
        first, *others = [(self._x, *part, out) for part, out in pairs]
        self._products = RepeatedLinears(*first)
        for other in others:
            self._products.add(*other)


def evidence_classes(scores: Sequence[float], known: bool) -> list[int]:
    """The class of each choice behind a token.

    Args:
        scores: descending, as `Preview.best` gives them.
        known: whether nothing is left to chance; otherwise they are logarithms of probabilities.
    """
    if not known:
        return [CHOICES * BUCKETS + bisect_right(PROB_EDGES, math.exp(score)) for score in scores]
    first = scores[0]
    # The first one lies above the second by as much as that below the first.
    gaps = [first - scores[1] if len(scores) > 1 else math.inf, *[first - x for x in scores[1:]]]
    return [i * BUCKETS + bisect_right(GAP_EDGES, gap) for i, gap in enumerate(gaps)]
