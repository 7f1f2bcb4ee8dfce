"""Smaller copies of a model's weights within a call.

Half of a small model's weights, and more, are those of its output layer. Where a call needs of its
logits no more than which token they choose, they are computed from eight bits, and those that may
matter exactly; see :mod:`~.screen`. Float32 layers whose values are bfloat16's are read as
such; see :mod:`~.compact`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ...decoding.selection import TokenSelector
from ...host.transformers_private import global_hooks, hooks_of
from ...system.memory import may_take
from ...verification.verified import Verified
from .compact import COMPACT, CompactProduct, compactable
from .linear import Override
from .quantized import WEIGHTS
from .recording import overrides
from .reroute import overriding
from .screen import Screen, Screened
from .screened import ScreenedVerified, shortlist_of
from .skinny import routed_linear
from .weight_copies import WeightCopies, packable

# Forwards that cost as much by being computed in full as packing costs, on whatever machine: both
# go with the weight's bytes.
PATIENCE = 24

# Bytes that a copy has to save where tokens are drawn: the thousand logits that may be of the first
# ones.
LEAST_SAVED = 64 << 20
# Rows of which eight bits are read in less time than all; their candidates take time of their own.
MOST_SCREENED = 8


@dataclass
class _Part:
    """Weights of a model that are read by copies of one kind, now or once that has paid.

    Attributes:
        kept: the copy of each; None: it has none yet.
        serves: whether they are read in this call.
    """

    copies: WeightCopies[Any]
    weights: list[torch.Tensor] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    serves: bool = False

    @property
    def missing_bytes(self) -> int:
        pairs = zip(self.weights, self.kept, strict=True)
        return sum(self.copies.size_of(weight) for weight, kept in pairs if kept is None)

    def look(self, limit: int | None, other_bytes: int = 0) -> None:
        """Look for copies of the weights, which are read as they are if there is no memory for
        them."""
        self.kept = [self.copies.find(weight) for weight in self.weights]
        if not may_take(self.missing_bytes, limit, other_bytes):
            self.drop()

    def drop(self) -> None:
        """Read the weights themselves for the rest of the call."""
        self.weights, self.kept, self.serves = [], [], False

    def pack(self) -> None:
        pairs = zip(self.weights, self.kept, strict=True)
        self.kept = [kept or self.copies.of(weight) for weight, kept in pairs]
        self.serves = True

    def is_due(self) -> bool:
        """Count an unscreened forward; true once packing would have paid for itself."""
        if self.serves or not self.weights:
            return False
        return self.copies.count_use(self.weights[0]) >= PATIENCE


class Copies:
    """What stands for a model's layers in forwards of a call.

    A model may do more with what its output layer returns. So the prompt's forward is watched: only
    where its logits are the layer's own, untouched, are later forwards screened; and each of them
    is looked at again.
    """

    def __init__(self, limit: int | None) -> None:
        self._output, self._compact = _Part(WEIGHTS), _Part(COMPACT)
        self._limit = limit
        self._begins = True  # nobody has looked for copies yet
        self._screen: Screen | None = None
        self._products: dict[int, Override] = {}
        # What the last forward's rows looked like, and what the output layer returned.
        self._screened: Screened | None = None
        self._returned: torch.Tensor | None = None
        self._state: Any = None

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
        copies = cls(extra_memory)
        if select is not None and shortlist_of(select):
            output = _output_weight(model)
            if output is not None and _pays(output, select):
                copies._output.weights = [output]
        copies._compact.weights = compactable(model)
        any_weights = any(part.weights for part in copies._parts)
        return copies if any_weights and extra_memory != 0 else None

    def watching(self) -> AbstractContextManager[Any]:
        """Scope of a forward in which copies are read, and the output layer is watched."""
        self._screened = self._returned = None
        others = dict(self._products)
        if self._output.weights and not torch.is_autocast_enabled("cpu"):
            others[id(self._output.weights[0])] = self._logits
        return overriding(others) if others else nullcontext()

    def begin(self, logits: torch.Tensor) -> None:
        """Read no copy in forwards to come that the prompt's forward has shown something
        against."""
        if not self._are_own(logits):
            self._output.drop()

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

    def read(self, verified: Verified) -> Verified | None:
        """What a forward in which copies were read has shown; None: nothing that is of use, and
        the next one reads the output layer itself."""
        if not self._output.weights:
            return verified
        screened = self._screened
        if self._are_own(verified.outputs.logits):
            return verified if screened is None else ScreenedVerified(verified, screened)
        # The model makes something else of its logits, this time.
        self._output.drop()
        return verified if screened is None else None

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
            self._products = {
                id(weight): CompactProduct(weight, kept)
                for weight, kept in zip(self._compact.weights, self._compact.kept, strict=True)
                if kept.copy.values is not None
            }
            if not self._products:  # the values of all weights need float32
                self._compact.drop()

    def _logits(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Stands for the output layer."""
        weight = self._output.weights[0]
        rows = x.numel() // x.shape[-1]
        if (
            self._screen is None
            or rows > MOST_SCREENED
            or x.dtype != weight.dtype
            or not self._output.kept[0].stands_for(weight)
        ):
            returned = routed_linear(x, weight, bias)
        else:
            self._screened = self._screen.look(x.reshape(rows, -1))
            near, shape = self._screened.near, (*x.shape[:-1], len(weight))
            # The screen goes on from what the model does not see.
            if overrides.unseen:
                returned = x.new_empty(shape)
            else:
                returned = near.to(x.dtype, copy=True).view(shape)
        self._returned = returned
        if not returned.is_inference():
            self._state = returned._version
        else:  # whose writes are not counted; the prompt's forward shows them
            self._state = returned.clone() if self._screen is None else None
        return returned

    def _are_own(self, logits: torch.Tensor) -> bool:
        """Whether the logits of a forward are what the output layer has returned, untouched."""
        own, self._returned = self._returned, None
        if own is None or own.data_ptr() != logits.data_ptr() or own.shape != logits.shape:
            return False
        if own.is_inference():
            return self._state is None or torch.equal(own, self._state)
        return bool(own._version == self._state)


def _pays(weight: torch.Tensor, select: TokenSelector) -> bool:
    """Whether choosing from what a copy tells takes less time than it saves."""
    return not select.do_sample or weight.numel() * (weight.element_size() - 1) >= LEAST_SAVED


def _output_weight(model: Any) -> torch.Tensor | None:
    """That of a model's output layer; None where its products are not known, or hooks see them
    before a token is chosen."""
    layer = model.get_output_embeddings()
    weight: torch.Tensor | None = None if layer is None else packable(layer)
    if weight is None or layer.bias is not None or "forward" in vars(model):
        return None
    if hooks_of(layer) or hooks_of(model) or global_hooks():
        return None
    return weight
