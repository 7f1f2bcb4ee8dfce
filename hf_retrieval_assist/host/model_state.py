"""What of a model decides how its forwards compute, beside inputs: a key that is cheap to ask.

Hooks, adapters and settings come and go between calls. What was found out about a model's forwards
holds while its key is the same. Attributes that forwards themselves change, such as counters, are
found by :func:`restored` and left out of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..system.modules import modules_of
from .callers_hooks import PACKAGE, only_looks
from .transformers_private import GRADIENT_HOOKS, attention_of, numbered_hooks

# What every module keeps of itself.
INTERNAL = frozenset(vars(nn.Module())) - {"training"} | GRADIENT_HOOKS

_SCALARS = (bool, int, float, str, type(None))
_PLAIN = (*_SCALARS, tuple, list, dict)

Place = tuple[int, str]
"""The identity of a module, and the name of an attribute."""


def model_settings(model: nn.Module, moving: Set[Place] = frozenset()) -> Hashable:
    """Every plain attribute of its modules but `moving` ones, their hooks but those that only look,
    how attention is computed, and the modes of PyTorch that change operators."""
    config = getattr(model, "config", None)
    return (
        hash(tuple([_settings(module, moving) for module in modules_of(model)])),
        None if config is None else attention_of(config),
        autocast_dtypes(),
        torch.get_default_device(),
    )


def autocast_dtypes() -> tuple[torch.dtype, ...]:
    """In what operators compute where autocast changes that."""
    enabled = filter(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps"))
    return tuple(map(torch.get_autocast_dtype, enabled))


def _settings(module: nn.Module, moving: Set[Place]) -> Hashable:
    """A module's plain attributes, its hooks and what stands for its forward."""
    plain = [
        (name, _told(value))
        for name, value in _attributes(module)
        if not (moving and (id(module), name) in moving)
    ]
    hooks = tuple([_hook(number, hook) for number, hook in _changing_hooks(module)])
    return type(module), id(vars(module).get("forward")), hooks, tuple(plain)


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """The plain ones, by name."""
    return [
        (name, value)
        for name, value in vars(module).items()
        if name not in INTERNAL and isinstance(value, _PLAIN)
    ]


def _changing_hooks(module: nn.Module) -> list[tuple[int, Any]]:
    """The hooks that may change a forward; the package's own look at that of some thread."""
    return [
        (number, hook)
        for number, hook in numbered_hooks(module)
        if not only_looks(number, hook)
        and getattr(hook, "__module__", "").partition(".")[0] != PACKAGE
    ]


def has_changing_hooks(model: nn.Module) -> bool:
    """Whether hooks may change what the model's forwards compute."""
    return any(map(_changing_hooks, modules_of(model)))


def _told(value: Any) -> Hashable:
    """A plain value; −1 and −2 have the same hash."""
    told: Hashable = value if type(value) in _SCALARS and value != -2 else repr(value)
    return told


def _hook(number: int, hook: Any) -> Hashable:
    """A hook's number, which no other one ever has; hooks that are registered anew for every call
    are told by what they call and with what, where that is plain."""
    if isinstance(hook, partial):
        values = (*hook.args, *hook.keywords.values())
        if all(isinstance(value, _PLAIN) for value in values):
            return id(hook.func), repr(hook.args), repr(hook.keywords)
    return number


@contextmanager
def restored(model: nn.Module, moving: set[Place]) -> Iterator[None]:
    """Scope of forwards that plain decoding would not run: what they change in modules is put back,
    and the places of plain attributes among it are added to `moving`."""
    kept = [_Kept(module) for module in modules_of(model)]
    try:
        yield
    finally:
        for one in kept:
            moving |= {(id(one.module), name) for name in one.put_back()}


class _Kept:
    """The plain attributes of a module; and where it computes without parameters or parts, as
    positions are computed, its tensors too."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._plain = {name: (_told(value), _copied(value)) for name, value in _attributes(module)}
        self._tensors: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        own = vars(module)
        if not (own["_modules"] or own["_parameters"]):
            self._tensors = {n: v for n, v in own.items() if isinstance(v, torch.Tensor)}
            held = {name: b for name, b in own["_buffers"].items() if b is not None}
            self._buffers = {name: (buffer, buffer.clone()) for name, buffer in held.items()}

    def put_back(self) -> list[str]:
        """Returns the names of the plain attributes that had changed."""
        own = vars(self.module)
        changed = [
            name
            for name, value in _attributes(self.module)
            if name not in self._plain or _told(value) != self._plain[name][0]
        ]
        own.update({n: self._plain[n][1] for n in changed if n in self._plain} | self._tensors)
        for name, (buffer, value) in self._buffers.items():
            own["_buffers"][name] = buffer.copy_(value)
        return changed


def _copied(value: Any) -> Any:
    """A plain value; a container with a copy of each container in it."""
    if isinstance(value, dict):
        return {name: _copied(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
    return value
