"""Whether two ways to compute a module do the same with its parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .fusions import has_own_forward, plain_forward
from .reroute import standing_in
from .skinny import are_unobserved

__all__ = ["Call", "Trial", "has_parts"]

Call = tuple[Sequence[Any], Mapping[str, Any]]
"""The arguments of a forward."""


def has_parts(module: nn.Module, linears: Collection[str], others: Collection[str]) -> bool:
    """Whether a module has children of these names, and nothing else, that nobody observes, its
    linears on a CPU, and a `forward` of its own class.
    """
    parts = dict(module.named_children())
    if not set(linears) <= set(parts) or not set(parts) <= {*linears, *others}:
        return False
    if not has_own_forward(module) or not are_unobserved(parts.values()):
        return False
    layers = [parts[name] for name in linears]
    return (
        not dict(module.named_parameters(recurse=False))
        and all(type(layer) is nn.Linear and layer.weight.is_cpu for layer in layers)
        and len({layer.weight.dtype for layer in layers}) == 1
    )


class Trial:
    """A module whose linears give random numbers, whatever their weights.

    Args:
        module: as :func:`has_parts` describes it.
        linears: the names of these children.
    """

    def __init__(self, module: nn.Module, linears: Collection[str]) -> None:
        self.module = module
        self._layers: dict[str, Any] = {name: getattr(module, name) for name in linears}
        self._random = torch.Generator().manual_seed(0)
        self.dtype = next(iter(self._layers.values())).weight.dtype
        outputs = {name: layer.out_features for name, layer in self._layers.items()}
        self._outputs = {name: self.numbers(n) for name, n in outputs.items()}
        self._seen: list[tuple[str, Any]] = []

    def numbers(self, *shape: int) -> torch.Tensor:
        """Random [2, 3, *shape]."""
        return torch.randn(2, 3, *shape, generator=self._random).to(self.dtype)

    def rows(self, name: str) -> torch.Tensor:
        """Random rows for a linear, [2, 3, depth]."""
        return self.numbers(self._layers[name].in_features)

    def see(self, name: str, *what: Any) -> None:
        """Let `what` be compared as well."""
        self._seen.append((name, what))

    def _probe(self, name: str) -> Callable[[torch.Tensor, Any], torch.Tensor]:
        def product(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            self.see(name, x, bias)
            return self._outputs[name].clone()

        return product

    def _record(self, forward: Callable[..., Any], calls: Sequence[Call]) -> list[Any] | None:
        """What is seen of a forward; None where it does not take such calls."""
        probes = {id(layer.weight): self._probe(name) for name, layer in self._layers.items()}
        self._seen = []
        try:
            with torch.no_grad(), standing_in(probes):
                for inputs, options in calls:
                    self.see("", forward(self.module, *inputs, **options))
        except Exception:  # of a module that takes something else; it may be of any kind
            return None
        if not self._layers.keys() <= {name for name, _ in self._seen}:
            return None
        return tree_leaves(sorted(self._seen, key=lambda entry: entry[0]))

    def gives_same(self, ours: Callable[..., Any], *calls: Call) -> bool:
        """Whether we give to the module's linears, and return, the bits that its `forward` does."""
        expected = self._record(plain_forward(self.module), calls)
        found = None if expected is None else self._record(ours, calls)
        if expected is None or found is None:
            return False
        return len(found) == len(expected) and all(map(_equal, found, expected))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.dtype is other.dtype
            and torch.equal(one, other)
            and _strides(one) == _strides(other)
        )
    return one is other or (type(one) is type(other) and bool(one == other))


def _strides(x: torch.Tensor) -> list[int]:
    """Of the dimensions that have more than one place."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
