"""Root mean square norms of few rows on a CPU in one operation.

transformers' modules compute them by seven or eight of PyTorch's operators, of which one row takes
as long as a small linear layer. :func:`fused_norm` repeats their roundings one by one, so that it
gives the same bits; :func:`learn_norms` finds out whether it does, for each module of a model by
what the module itself returns. Others are left as they are.

Like the linears (see :mod:`.reroute`) norms are exchanged where they are looked up, the `forward`
of their classes, while any thread is in a scope.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..system.locks import Lock
from .skinny import NORM_LANES, fused_norm, in_route

__all__ = ["learn_norms", "put_norms", "take_norms_back"]

# Names under which transformers' norms keep what is added to the mean.
_EPSILONS = ("variance_epsilon", "eps")
# Rows of each trial: one, some, and those of several heads.
_TRIALS = ((1, 1), (1, 5), (3, 4))


class _Form(NamedTuple):
    """How a module's own forward is repeated."""

    dtype: torch.dtype
    epsilon: str
    shifted: bool
    rounded: bool


_forms: WeakKeyDictionary[nn.Module, _Form] = WeakKeyDictionary()
_classes: dict[type[nn.Module], tuple[Callable[..., Any], Callable[..., Any]]] = {}
_lock = Lock()


def learn_norms(model: nn.Module) -> None:
    """Let the scopes of all threads serve the norms of a model, as it is now, that can be."""
    for module in model.modules():
        form = next(_right_forms(module), None) if _may_be_norm(module) else None
        with _lock:
            if form is None:
                _forms.pop(module, None)
            else:
                _forms[module] = form
                kind = type(module)
                if kind not in _classes:
                    _classes[kind] = (kind.forward, _fused(kind.forward))


def put_norms() -> None:
    """Exchange the `forward` of classes that are known; one that somebody has replaced stays."""
    for kind, (plain, fused) in tuple(_classes.items()):
        if kind.forward is plain:
            kind.forward = fused


def take_norms_back() -> None:
    """Undo `put_norms`."""
    for kind, (plain, fused) in tuple(_classes.items()):
        if kind.forward is fused:
            kind.forward = plain


def _fused(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method for `plain` that takes one operation where that is right."""

    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not in_route() or len(arguments) != 1 or options:
            return plain(self, *arguments, **options)
        form = _forms.get(self)
        normed = None if form is None else _norm(self, form, arguments[0])
        return plain(self, *arguments) if normed is None else normed

    return forward


def _norm(module: nn.Module, form: _Form, x: torch.Tensor) -> torch.Tensor | None:
    weight: torch.Tensor | None = module.weight  # type: ignore[assignment]
    if weight is None or weight.dtype is not form.dtype:
        return None
    epsilon = getattr(module, form.epsilon)
    return fused_norm(x, weight, epsilon, form.shifted, form.rounded, _lanes())


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
        and "forward" in vars(type(module))
        and "forward" not in vars(module)
        and any(isinstance(vars(module).get(name), float) for name in _EPSILONS)
    )


def _right_forms(module: nn.Module) -> Iterator[_Form]:
    """What gives a module's own bits, whatever its weights."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    trials = _trials(weight.shape[0], weight.dtype)
    plain = _classes.get(type(module), (type(module).forward,))[0]
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
        if all(_same(_norm(twin, form, x), y) for x, y in zip(trials, expected, strict=True)):
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
