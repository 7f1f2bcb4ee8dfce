"""Modules that compute in one operation, within scopes, what their class does in many.

Like the linears (see :mod:`.reroute`) they are exchanged where they are looked up, the `forward` of
their classes, while any thread is in a scope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..system.locks import Lock
from .skinny import in_route

__all__ = [
    "Fused",
    "fuse",
    "fused_of",
    "has_own_forward",
    "is_exchanged",
    "plain_forward",
    "put",
    "take_back",
]

Fused = Callable[..., Any]
"""(module, *arguments, **options) -> what its `forward` returns; None where that is to be asked."""

_fused: WeakKeyDictionary[nn.Module, Fused] = WeakKeyDictionary()
_classes: dict[type[nn.Module], tuple[Callable[..., Any], Callable[..., Any]]] = {}
_lock = Lock()


def fuse(module: nn.Module, fused: Fused | None) -> None:
    """Let scopes of all threads compute a module so; None: by its own `forward`."""
    kind = type(module)
    with _lock:
        if fused is None:
            _fused.pop(module, None)
            return
        _fused[module] = fused
        if kind not in _classes:
            _classes[kind] = (kind.forward, _method(kind))


def fused_of(module: nn.Module) -> Fused | None:
    """How scopes compute a module."""
    return _fused.get(module)


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The `forward` of a module's class."""
    kind = type(module)
    return _classes.get(kind, (kind.forward,))[0]


def is_exchanged(module: nn.Module) -> bool:
    """Whether the `forward` of a module's class is ours, and nobody else's, at present."""
    kind = type(module)
    return kind in _classes and kind.forward is _classes[kind][1]


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's class, and neither another class nor the module, defines its `forward`."""
    return "forward" in vars(type(module)) and "forward" not in vars(module)


def put() -> None:
    """Exchange the `forward` of classes that are known; one that somebody has replaced stays."""
    for kind, (plain, ours) in tuple(_classes.items()):
        if kind.forward is plain:
            kind.forward = ours


def take_back() -> None:
    """Undo `put`."""
    for kind, (plain, ours) in tuple(_classes.items()):
        if kind.forward is ours:
            kind.forward = plain


def _method(kind: type[nn.Module]) -> Callable[..., Any]:
    """A method for a class's own `forward` that takes one operation where that is right."""
    plain = kind.forward

    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        # The method of a subclass may end up here, and what is known of that one is another's.
        if torch.compiler.is_compiling() or not in_route() or type(self) is not kind:
            return plain(self, *arguments, **options)
        fused = _fused.get(self)
        result = None if fused is None else fused(self, *arguments, **options)
        return plain(self, *arguments, **options) if result is None else result

    return forward
