"""A forward of a few rows on a CPU as the list of what it computed, to be computed again.

Half of the time that a small model's forward takes is Python's: modules that call modules, and new
tensors and views for every operator. A :class:`Program` is what remains when they are left out, up
to what the model's output layer reads. It holds the operators of one forward in their order, each
with tensors as it read and wrote then, so that views and shapes need no second look; where these
lie says :mod:`.results`. What changes from forward to forward is given anew: token ids, positions,
masks, and the cache. Operators that have kernels are one compiled call, from one that has none to
the next: linears, attention, norms, copies, sums and products, and functions of one number of two
bytes, which are looked up. Others stay PyTorch's, in a Llama those that turn positions into angles.

The compiled call knows where the cache lies, and which slots each row is written to, rows packed
behind one another or not. Weights in other forms may stand for the model's own: so one recording is
a forward of the model, a level of the draft that it makes for itself in four bits, and a read of
smaller copies.

A program computes what Python decided while it was recorded. So nothing is recorded that decides by
numbers in tensors, draws random numbers, or reads a tensor that is neither the model's own nor
given; and who repeats a program compares it first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch

from .skinny import (
    CompiledOperators,
    GivenLayers,
    Matrix,
    RepeatedLinears,
    RepeatedUpdate,
    can_compile,
    can_multiply,
    dense,
    product,
    route_depth,
    set_route_depth,
    set_verifies,
    verifies,
)

Operator = Callable[[], Any]


class UnrecordableError(Exception):
    """Why a forward cannot be computed again from what was recorded of it."""


class PackedWeight(Protocol):
    """A weight in another form."""

    @property
    def matrix(self) -> Matrix:
        """What products read of it."""


class PackedModel(Protocol):
    """A model's weights in another form."""

    @property
    def by_id(self) -> Mapping[int, PackedWeight]:
        """What stands for each, by the identity of the parameter."""


class OutputLayer(NamedTuple):
    """The linear layer whose result is a model's logits.

    Attributes:
        weight, bias: the layer's.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None


class Program:
    """A forward that was recorded.

    Args:
        inputs: tensors that it reads, by name.
        operators: in their order.
        x: what the output layer reads when they have run; without one, the logits.
        nbytes: that its tensors take.
        verifying: whether kernels computed all its rows, however many.

    Attributes:
        output: the output layer; None: what comes behind it is among the operators.

    Raises:
        UnrecordableError: a layer of the cache is written to twice.
    """

    def __init__(
        self,
        inputs: Mapping[str, torch.Tensor],
        operators: Sequence[Any],
        x: torch.Tensor,
        output: OutputLayer | None,
        nbytes: int,
        verifying: bool,
    ) -> None:
        self._inputs, self._operators, self._x, self.output = inputs, operators, x, output
        updates = [one for one in operators if isinstance(one, RepeatedUpdate)]
        numbers = [update.layer for update in updates]
        if len({*numbers}) < len(numbers):  # which has moved on in between
            raise UnrecordableError("a layer of the cache that is written to twice")
        dtype, paged = (updates[0].dtype, updates[0].paged) if updates else (None, False)
        self._layers = GivenLayers(numbers, dtype, paged)
        self._tokens: int = updates[0].tokens if updates else 0
        self._verifying, self.nbytes = verifying, nbytes
        self._own = self._compiled({})
        self._packed: WeakKeyDictionary[PackedModel, list[Operator]] = WeakKeyDictionary()

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        layers: Sequence[Any],
        masks: Sequence[torch.Tensor],
        weights: PackedModel | None = None,
    ) -> torch.Tensor | None:
        """What the output layer reads behind a forward, [..., depth], or the logits where it is not
        known, until the next call; None, and nothing was written: each row is not to be written to
        in one stretch of slots.

        Args:
            inputs: like those that it was recorded with.
            layers: of the cache.
            masks: of attention, in the order in which they were given when it was recorded.
            weights: what stands for the model's; None: they do.
        """
        operators = self._own if weights is None else self._with(weights)
        if not self._layers.open(layers, masks, self._tokens):
            return None
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        depth, verified = route_depth(), verifies()
        # What is not a kernel's of these is routed, too; nothing has to be exchanged for that.
        set_route_depth(depth + 1)
        set_verifies(verified or self._verifying)
        try:
            for operator in operators:
                operator()
            return self._x
        finally:
            set_route_depth(depth)
            set_verifies(verified)
            self._layers.close()

    def logits(self, x: torch.Tensor, weights: PackedModel | None = None) -> torch.Tensor:
        """[..., tokens], in new memory, of what `run` has given."""
        if self.output is None:
            return x.clone()
        other = None if weights is None else weights.by_id.get(id(self.output.weight))
        matrix = dense(self.output.weight) if other is None else other.matrix
        logits: torch.Tensor = product(x, matrix, self.output.bias)
        return logits

    def _with(self, weights: PackedModel) -> list[Operator]:
        if weights not in self._packed:
            self._packed[weights] = self._compiled(weights.by_id)
        return self._packed[weights]

    def _compiled(self, packed: Mapping[int, PackedWeight]) -> list[Operator]:
        """The operators with others for some weights; neighbours that can be are one."""
        whole = [
            one
            for operator in self._operators
            for one in (
                operator.reading(packed) if isinstance(operator, RepeatedLayers) else [operator]
            )
        ]
        found: list[Operator] = []
        for compiles, group in groupby(whole, can_compile):
            neighbours = list(group)
            found += [CompiledOperators(neighbours, self._layers)] if compiles else neighbours
        return found


Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
"""x, weight, bias, result."""


class RepeatedLayers:
    """Linear layers of the same x, which kernels compute anew where their results lie.

    Args:
        layers: of each x, weight, bias and result.
    """

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers

    def add(self, layer: Layer) -> bool:
        """Compute one more; False: it is none of those that can be computed together."""
        if len(_kernels_of([*self.layers, layer], {})) > 1:
            return False
        self.layers.append(layer)
        return True

    def reading(self, packed: Mapping[int, PackedWeight]) -> Sequence[Operator]:
        """What computes them where others stand for some of the weights, by their identities."""
        return _kernels_of(self.layers, packed)


def takes_kernel(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> bool:
    """Whether the kernel computes a linear layer where all of it stays: it would read copies of
    rows of x that lie at unequal distances, and of a bias that does not lie in a row."""
    if not can_multiply(x, weight, bias) or not (bias is None or bias.is_contiguous()):
        return False
    with suppress(ValueError):
        RepeatedLinears(x, dense(weight), bias, out)
        return True
    return False


def _kernels_of(
    layers: Sequence[Layer], packed: Mapping[int, PackedWeight]
) -> list[RepeatedLinears]:
    """What computes layers of the same x, as many together as can be."""
    found: list[RepeatedLinears] = []
    for x, weight, bias, out in layers:
        other = packed.get(id(weight))
        layer = x, dense(weight) if other is None else other.matrix, bias, out
        if not (found and found[-1].add(*layer)):
            found.append(RepeatedLinears(*layer))
    return found
