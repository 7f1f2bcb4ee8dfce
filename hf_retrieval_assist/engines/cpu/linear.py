"""Linear layers of few rows on a CPU, computed by the kernel, which reads the weights once for all.

Within a scope of :class:`~.reroute.reroute` products of up to `FEW_ROWS` rows are the kernel's, and
where drafts are verified those of up to `MAX_ROWS`, a token and 64 drafts. Its bits do not depend
on rows, so that a token's logits do not depend on how many draft tokens are verified beside it.
Others are PyTorch's, as those of longer prompts, for which it takes less time, and which plain
decoding feeds at once as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import nn

from ...system.tensors import thread
from .library_weights import library_linear
from .recording import PackedWeight, overrides
from .skinny import (
    MAX_ROWS,
    RepeatedLinears,
    can_multiply,
    dense,
    in_route,
    routed_linear,
)

__all__ = ["MAX_ROWS", "linear", "plain_linear"]

plain_linear = torch._C._nn.linear

# The types of weights whose values are what lies in memory.
_DENSE = (nn.Parameter, torch.Tensor)


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What stands for `torch.nn.functional.linear`: plain Python, so that `torch.compile` can trace
    it, which then puts PyTorch's own into the graph.
    """
    if torch.compiler.is_compiling():
        return plain_linear(input, weight, bias)
    if (recording := thread.recorder) is not None:
        return recording.linear(linear, RepeatedLayers, input, weight, bias)
    override = overrides.by_id.get(id(weight))
    if override is not None and in_route():
        return override(input, bias)
    if type(weight) in _DENSE:
        return routed_linear(input, weight, bias)
    return library_linear(input, weight, bias)


linear.stands_for = plain_linear  # type: ignore[attr-defined]


Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
"""x, weight, bias, result."""


class RepeatedLayers:
    """Linear layers of the same x, computed anew by every call where their results lie.

    Attributes:
        weights: the identities of theirs.
        layers: of each x, weight, bias and result.
    """

    def __init__(self) -> None:
        self.weights: set[int] = set()
        self.layers: list[Layer] = []
        self._kernels: RepeatedLinears | None = None

    def add(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> bool:
        """Compute one more; False: it is none of those that can be computed together."""
        layer = x, weight, bias, out
        # The kernel reads a copy of a bias that does not lie in a row.
        kernel = can_multiply(x, weight, bias) and (bias is None or bias.is_contiguous())
        if not self.layers:
            with suppress(ValueError):
                self._kernels = RepeatedLinears(x, dense(weight), bias, out) if kernel else None
        elif not (
            kernel and self._kernels is not None and self._kernels.add(x, dense(weight), bias, out)
        ):
            return False
        self.layers.append(layer)
        self.weights.add(id(weight))
        return True

    @property
    def x(self) -> torch.Tensor:
        """What they read."""
        return self.layers[0][0]

    @property
    def out(self) -> torch.Tensor:
        """What the first one gives."""
        return self.layers[0][3]

    def moved(self, layers: list[Layer]) -> RepeatedLayers:
        """The same of tensors that lie elsewhere."""
        found = RepeatedLayers()
        found.weights, found.layers, found._kernels = self.weights, layers, self._kernels
        [found._kernels] = found.packed({}) or [None]
        return found

    @property
    def direct(self) -> Callable[[], None]:
        """The same where nothing stands for a weight."""
        return self if self._kernels is None else self._kernels

    def packed(self, packed: Mapping[int, PackedWeight]) -> list[RepeatedLinears] | None:
        """The same where others, in few bits, stand for some of the weights, by their identities;
        None where the kernel does not compute it."""
        if self._kernels is None:
            return None
        found: list[RepeatedLinears] = []
        for x, weight, bias, out in self.layers:
            other = packed.get(id(weight))
            layer = x, dense(weight) if other is None else other.matrix, bias, out
            if not (found and found[-1].add(*layer)):
                found.append(RepeatedLinears(*layer))
        return found

    def __call__(self) -> None:
        if self._kernels is not None and self.weights.isdisjoint(overrides.by_id):
            self._kernels()
            return
        for x, weight, bias, out in self.layers:
            out.copy_(linear(x, weight, bias))


Override = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x, bias) -> `x @ weight.T + bias`, of the weight that it stands for, or nearly so."""
