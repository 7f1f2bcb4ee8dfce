"""Root mean square norms of few rows on a CPU in one operation.

transformers' modules compute them by seven or eight of PyTorch's operators, of which one row takes
as long as a small linear layer. :func:`fused_norm` repeats their roundings one by one, so that it
gives the same bits; :func:`norm_of` finds out whether it does, for each module by what the module
itself returns. Others are left as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .fusions import Fused, fused_of, has_own_forward, is_exchanged, plain_forward
from .skinny import NORM_LANES, are_unobserved, fused_norm

if TYPE_CHECKING:
    from .skinny import Norm

__all__ = ["norm_arguments", "norm_of"]

# Names under which transformers' norms keep what is added to the mean.
_EPSILONS = ("variance_epsilon", "eps")
# Rows of each trial: one, some, and those of several heads.
_TRIALS = ((1, 1), (1, 5), (3, 4))


@dataclass(frozen=True)
class _Form:
    """How a module's own forward is repeated."""

    dtype: torch.dtype
    epsilon: str
    shifted: bool
    rounded: bool

    def arguments(self, module: nn.Module) -> Norm | None:
        weight = getattr(module, "weight", None)
        if weight is None or weight.dtype is not self.dtype:
            return None
        return weight, getattr(module, self.epsilon), self.shifted, self.rounded, _lanes()

    def __call__(self, module: nn.Module, *inputs: Any, **options: Any) -> torch.Tensor | None:
        arguments = self.arguments(module) if len(inputs) == 1 and not options else None
        return None if arguments is None else fused_norm(inputs[0], *arguments)


def norm_of(module: nn.Module) -> Fused | None:
    """How a module that is a norm, as it is now, is computed; None of others."""
    return next(_right_forms(module), None) if _may_be_norm(module) else None


def norm_arguments(module: nn.Module) -> Norm | None:
    """What :func:`fused_norm` of a module takes behind the rows; None of one that it is not."""
    form = fused_of(module)
    if not isinstance(form, _Form) or not is_exchanged(module) or not are_unobserved((module,)):
        return None
    return form.arguments(module)


def _may_be_norm(module: nn.Module) -> bool:
    """Whether a module has a norm's parts, in memory, and a `forward` of its own class."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.pop("weight", None)
    return (
        weight is not None
        and weight.dim() == 1
        and weight.is_cpu
        and not parameters
        and next(module.buffers(), None) is None
        and next(module.children(), None) is None
        and has_own_forward(module)
        and any(isinstance(vars(module).get(name), float) for name in _EPSILONS)
    )


def _right_forms(module: nn.Module) -> Iterator[_Form]:
    """What gives a module's own bits, whatever its weights."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    trials = _trials(weight.shape[0], weight.dtype)
    plain = plain_forward(module)
    try:
        twin = deepcopy(module)
        twin.weight = nn.Parameter(trials[0][0, 0], requires_grad=False)
        with torch.no_grad():
            expected = [plain(twin, x) for x in trials]
    except Exception:  # of a module that takes more than rows; it may be of any kind
        return
    names = [name for name in _EPSILONS if isinstance(vars(module).get(name), float)]
    kinds = itertools.product((weight.dtype,), names, (False, True), (False, True))
    for form in itertools.starmap(_Form, kinds):
        if all(_same(form(twin, x), y) for x, y in zip(trials, expected, strict=True)):
            yield form


@lru_cache(maxsize=1)
def _lanes() -> int:
    """Of PyTorch's vectors here. Where none is right, no module's bits are repeated."""
    x = torch.randn(8, 1 << 10, generator=torch.Generator().manual_seed(0))
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
    ones = torch.ones(x.shape[1])
    for lanes in NORM_LANES:
        if _same(fused_norm(x, ones, 0.0, False, False, lanes), expected):
            return lanes
    return NORM_LANES[-1]


@lru_cache(maxsize=8)
def _trials(depth: int, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    trials = [
        (torch.randn(*rows, depth, generator=random) * scale).to(dtype)
        for rows in _TRIALS
        for scale in (1.0, 1e-2, 1e2)
    ]
    return [*trials, trials[-1].transpose(0, 1)]


def _same(found: torch.Tensor | None, expected: Any) -> bool:
    return (
        found is not None
        and isinstance(expected, torch.Tensor)
        and found.dtype is expected.dtype
        and found.stride() == expected.stride()
        and torch.equal(found, expected)
    )
