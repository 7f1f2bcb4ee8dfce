"""Root mean square norms of few rows on a CPU, each in one operation.

transformers' modules compute them by seven or eight of PyTorch's operators, of which one row takes
as long as a small linear layer. :func:`.skinny.fused_norm` repeats their roundings one by one, so
that it gives the same bits. Whether it does is found out for each module by what the module itself
returns; all others are left as they are. Like the linears (see :mod:`.reroute`) norms are exchanged
where they are looked up, the `forward` of their classes, while any thread is in a scope.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...system.locks import Lock
from ...system.tensors import thread
from .skinny import NORM_LANES, RepeatedNorm, fused_norm, in_route

# Names under which transformers' norms keep what is added to the mean.
_EPSILONS = ("variance_epsilon", "eps")
# Rows of each trial: one, some, and those of several heads; and how large their numbers are, so
# that a module which clamps what it is given, or what it returns, is told apart.
_TRIAL_ROWS = ((1, 1), (1, 5), (3, 4))
_TRIAL_SCALES = (1.0, 1e-3, 1e4)
_TRIAL_WEIGHTS = (1.0, 1e3)


@dataclass(frozen=True)
class _Form:
    """How a module's own forward is repeated."""

    dtype: torch.dtype
    epsilon: str
    shifted: bool
    rounded: bool

    def __call__(self, module: nn.Module, *inputs: Any, **options: Any) -> torch.Tensor | None:
        """None where the module's own forward has to compute."""
        weight: Any = getattr(module, "weight", None)
        if weight is None or weight.dtype is not self.dtype or len(inputs) != 1 or options:
            return None
        epsilon = getattr(module, self.epsilon)
        return fused_norm(inputs[0], weight, epsilon, self.shifted, self.rounded, _lanes())

    def again(self, module: nn.Module, x: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        """What computes a norm anew where its result lies."""
        weight, epsilon = module._parameters["weight"], getattr(module, self.epsilon)
        return RepeatedNorm(x, weight, epsilon, self.shifted, self.rounded, _lanes(), out)


_lock = Lock()
_forms: WeakKeyDictionary[nn.Module, _Form] = WeakKeyDictionary()
_forwards: dict[
    type[nn.Module], tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]
] = {}
"""Each class that a known norm has: its own `forward`, the one that takes its place, and what
names in its own led to when it was learned."""


def learn_norms(model: nn.Module) -> None:
    """Let scopes of all threads compute the norms of a model, as it is now, in one operation."""
    for module in model.modules():
        form = next(_right_forms(module), None) if _may_be_norm(module) else None
        with _lock:
            if form is None:
                _forms.pop(module, None)
                continue
            _forms[module] = form
            kind = type(module)
            if kind not in _forwards:
                _forwards[kind] = kind.forward, _fused_forward(kind), _looked_up(kind.forward)


def put() -> None:
    """Exchange the `forward` of known classes; one that somebody else has replaced stays, and one
    whose operators somebody has."""
    for kind, (plain, fused, found) in tuple(_forwards.items()):
        if kind.forward is plain and found == _looked_up(plain):
            kind.forward = fused


def restore() -> None:
    """Restore what `put` has exchanged."""
    for kind, (plain, fused, _) in tuple(_forwards.items()):
        if kind.forward is fused:
            kind.forward = plain


def _fused_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    plain = kind.forward

    def forward(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        # A subclass whose method calls this one does something else with the result.
        if torch.compiler.is_compiling() or type(self) is not kind:
            return plain(self, *inputs, **options)
        form, recording = _forms.get(self), thread.recorder
        if form is None:
            return plain(self, *inputs, **options)
        with nullcontext() if recording is None else recording.aside():
            result = form(self, *inputs, **options) if in_route() else None
            if recording is not None and result is not None:
                if inputs[0].stride() == result.stride():
                    recording.norm(self, inputs[0], result, partial(form.again, self))
                else:
                    result = None
        return plain(self, *inputs, **options) if result is None else result

    forward.stands_for = plain  # type: ignore[attr-defined]
    return forward


def _looked_up(forward: Callable[..., Any]) -> tuple[Any, ...]:
    """What a forward's names lead to: globals of its module, functions of PyTorch, methods of
    tensors."""
    code = getattr(forward, "__code__", None)
    if code is None:
        return ()
    spaces = forward.__globals__, vars(torch), vars(torch.Tensor)
    return tuple([space.get(name) for space in spaces for name in code.co_names])


def _may_be_norm(module: nn.Module) -> bool:
    """Whether a module has a norm's parts, in memory, and a `forward` of its own class."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.pop("weight", None)
    return (
        type(weight) is nn.Parameter
        and weight.dim() == 1
        and weight.is_cpu
        and not parameters
        and next(module.buffers(), None) is None
        and next(module.children(), None) is None
        and "forward" in vars(type(module))
        and "forward" not in vars(module)
        and any(isinstance(vars(module).get(name), float) for name in _EPSILONS)
    )


def _right_forms(module: nn.Module) -> Iterator[_Form]:
    """What gives a module's own bits, whatever its weights."""
    kind = type(module)
    plain = _forwards.get(kind, (kind.forward,))[0]
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    trials = _trials(weight.shape[0], weight.dtype)
    expected = []
    try:
        for scale in _TRIAL_WEIGHTS:
            twin = deepcopy(module)
            twin.weight = nn.Parameter(trials[0][0, 0] * scale, requires_grad=False)
            with torch.no_grad():
                expected += [(twin, x, plain(twin, x)) for x in trials]
    except Exception:  # a module that takes more than rows raises, anything
        return
    names = [name for name in _EPSILONS if isinstance(vars(module).get(name), float)]
    kinds = itertools.product((weight.dtype,), names, (False, True), (False, True))
    for form in itertools.starmap(_Form, kinds):
        if all(_same(form(twin, x), y) for twin, x, y in expected):
            yield form


@lru_cache(maxsize=1)
def _lanes() -> int:
    """The lanes of PyTorch's vectors here. Where none is right, no module's bits are repeated."""
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
        for rows in _TRIAL_ROWS
        for scale in _TRIAL_SCALES
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
