"""Smaller copies of a model's weights, which repeated forwards of a call read in their place.

Half of a small model's weights, and more, are those of its output layer. Where a call needs of its
logits no more than which token they choose, they are computed from eight bits, and those that may
matter exactly; see :mod:`~.screen`. Float32 layers whose values are bfloat16's are read as
such; see :mod:`~.compact`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...decoding.selection import TokenSelector
from ...system.memory import may_take
from .compact import COMPACT, MOST_ROWS, CompactModel, compactable
from .program import OutputLayer
from .quantized import WEIGHTS
from .screen import Screen, Screened
from .screened import shortlist_of
from .skinny import ANY_ROWS
from .weight_copies import WeightCopies, output_weight

# Forwards that cost as much by being computed in full as packing costs, on whatever machine: both
# go with the weight's bytes.
PATIENCE = 24

# Bytes that a copy has to save where tokens are drawn: the thousand logits that may be of the first
# ones.
LEAST_SAVED = 64 << 20
# Rows of which eight bits take less time; half as many where a CPU has instructions for the type.
MOST_SCREENED = 8


@dataclass
class _Part:
    """Weights of a model that are read by copies of one kind, now or once that has paid.

    Attributes:
        kept: the copy of each; None: it has none yet.
        serves: whether they are read in this call.
        missed: whether the last forward would have read them.
    """

    copies: WeightCopies[Any]
    weights: list[torch.Tensor] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    serves: bool = False
    missed: bool = False

    def look(self, limit: int | None, other_bytes: int = 0) -> None:
        """Look for copies of the weights, which are read as they are if there is no memory for
        them."""
        self.kept = [self.copies.find(weight) for weight in self.weights]
        pairs = zip(self.weights, self.kept, strict=True)
        missing = sum(self.copies.size_of(weight) for weight, kept in pairs if kept is None)
        if not may_take(missing, limit, other_bytes):
            self.drop()

    def drop(self) -> None:
        """Read the weights themselves for the rest of the call."""
        self.weights, self.kept, self.serves = [], [], False

    def pack(self) -> None:
        pairs = zip(self.weights, self.kept, strict=True)
        self.kept = [kept or self.copies.of(weight) for weight, kept in pairs]
        self.serves = True

    def is_due(self) -> bool:
        """Count a forward that would have read them; true once packing would have paid for
        itself. A model whose forwards read none is not packed."""
        missed, self.missed = self.missed and not self.serves, False
        return missed and self.copies.count_use(self.weights[0]) >= PATIENCE


class Copies:
    """What stands for a model's weights in the repeated forwards of a call.

    Attributes:
        screened: what is known of the logits of the last of them, where those that it has returned
            are approximations.
    """

    def __init__(self, model: nn.Module, limit: int | None) -> None:
        self._output, self._compact = _Part(WEIGHTS), _Part(COMPACT)
        self._model, self._limit = model, limit
        self._begins = True  # nobody has looked for copies yet
        self._screen: Screen | None = None
        self._products: CompactModel | None = None
        self.screened: Screened | None = None

    @classmethod
    def of(
        cls, model: Any, select: TokenSelector | None, extra_memory: int | None
    ) -> Copies | None:
        """Those of a call; None where there are none.

        Args:
            model: whose layers.
            select: how tokens are chosen; None: the call needs more of its logits than these.
            extra_memory: bytes that copies may take; None: as the machine has them.
        """
        copies = cls(model, extra_memory)
        if select is not None and shortlist_of(select):
            output = output_weight(model)
            unbiased = output is not None and model.get_output_embeddings().bias is None
            if unbiased and _pays(output, select):
                copies._output.weights = [output]
        copies._compact.weights = compactable(model)
        any_weights = any(part.weights for part in copies._parts)
        return copies if any_weights and extra_memory != 0 else None

    def pack_due(self) -> None:
        """Read the copies that there are, and make those that have become worth it; to be called
        once for each forward behind the prompt's."""
        if self._begins:
            self._begins = False
            self._output.look(self._limit)
            other_bytes = sum(map(WEIGHTS.size_of, self._output.weights))
            self._compact.look(self._limit, other_bytes)
            self._pack([part for part in self._parts if part.weights and all(part.kept)])
        self._pack([part for part in self._parts if part.is_due()])

    @property
    def _parts(self) -> tuple[_Part, _Part]:
        return self._output, self._compact

    @property
    def names(self) -> str:
        """What is read in forwards to come, which then have a time of their own."""
        names = zip(("screened", "compact"), self._parts, strict=True)
        return " ".join(name for name, part in names if part.serves)

    def _pack(self, parts: list[_Part]) -> None:
        for part in parts:
            part.pack()
        if self._output in parts:
            self._screen = Screen(self._output.weights[0], self._output.kept[0].copy)
        if self._compact in parts:
            self._products = _compact_of(self._model, self._compact)
            if not self._products.by_id:  # the values of all weights need float32
                self._products = None
                self._compact.drop()

    def weights(self, tokens: int) -> CompactModel | None:
        """What a forward over so many tokens reads in its weights' place; None: nothing."""
        if tokens > MOST_ROWS:
            return None
        self._compact.missed, products = bool(self._compact.weights), self._products
        return products if products is not None and products.stand() else None

    def look(self, output: OutputLayer | None, x: torch.Tensor) -> torch.Tensor | None:
        """Approximate logits, float32 [..., tokens], of what an output layer reads, [..., depth],
        of which `screened` then tells those that matter; None: they are to be computed."""
        rows = x.numel() // x.shape[-1]
        weights = self._output.weights
        most = MOST_SCREENED if x.dtype in {torch.float32, *ANY_ROWS} else MOST_SCREENED // 2
        if output is None or not weights or output.weight is not weights[0] or rows > most:
            return None
        self._output.missed = True
        if self._screen is None or not self._output.kept[0].stands_for(output.weight):
            return None
        self.screened = Screened(self._screen, x.reshape(rows, -1))
        return self.screened.near.view(*x.shape[:-1], -1)


def release_compact(model: nn.Module) -> None:
    """Drop what calls share of a model besides the copies themselves."""
    _compact_models.pop(model, None)


_compact_models: WeakKeyDictionary[nn.Module, CompactModel] = WeakKeyDictionary()


def _compact_of(model: nn.Module, part: _Part) -> CompactModel:
    """The same for all calls, so that programs know it."""
    known = _compact_models.get(model)
    if known is None or known.kept != part.kept:
        known = _compact_models[model] = CompactModel(part.weights, part.kept)
    return known


def _pays(weight: torch.Tensor, select: TokenSelector) -> bool:
    """Whether choosing from what a copy tells takes less time than it saves."""
    return not select.do_sample or weight.numel() * (weight.element_size() - 1) >= LEAST_SAVED
