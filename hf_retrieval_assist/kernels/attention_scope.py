"""A scope in which somebody else computes a model's attention.

transformers looks attention functions up by name in a registry. Inside :class:`attending` those of
the running thread that belong to the scope's model go to the function of the scope, whatever
attention the model was loaded with; all others, models that a hook of this one calls among them,
go through the function that stands in the registry, which is exchanged while any thread is in a
scope.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .exchange import Exchange

Attention = Callable[..., tuple[torch.Tensor, Any]]
"""(module, query, key, value, mask, **options) -> [batch, queries, heads, width], and weights."""


class attending:  # noqa: N801, a context manager reads as a verb
    """Scope in which this thread's attention of one model is computed by `attend`.

    Args:
        name: of the attention implementation that the model was loaded with.
        modules: the model's.
        attend: called with the function that would compute, and its arguments.
    """

    def __init__(
        self,
        name: str,
        modules: Container[nn.Module],
        attend: Callable[..., tuple[torch.Tensor, Any]],
    ):
        self.name = name
        self.modules = modules
        self.compute = attend
        self.outer: attending | None = None

    def __enter__(self) -> attending:
        self.outer = _served.scope
        _served.scope = self
        _exchange_of(self.name).want(True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leave_to(self.outer)


class _Served(threading.local):
    scope: attending | None = None


_served = _Served()


def innermost() -> attending | None:
    """The scope that the running thread is in."""
    return _served.scope


def leave_to(outer: attending | None) -> None:
    """Leave the scopes of the running thread inside of `outer`; all where that is None."""
    while (scope := _served.scope) is not None and scope is not outer:
        _exchange_of(scope.name).want(_is_wanted(scope.name, scope.outer))
        _served.scope = scope.outer


def _is_wanted(name: str, scope: attending | None) -> bool:
    while scope is not None and scope.name != name:
        scope = scope.outer
    return scope is not None


class _Routed:
    """An attention function of transformers that asks the thread's scope first."""

    def __init__(self, plain: Attention):
        self.plain = plain

    def __call__(self, module: Any, *arguments: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        scope = _served.scope
        if scope is None or module not in scope.modules:
            return self.plain(module, *arguments, **options)
        return scope.compute(self.plain, module, *arguments, **options)


def _put(name: str) -> None:
    plain = ALL_ATTENTION_FUNCTIONS[name]
    if not isinstance(plain, _Routed):
        ALL_ATTENTION_FUNCTIONS[name] = _Routed(plain)


def _take_back(name: str) -> None:
    routed = ALL_ATTENTION_FUNCTIONS.get(name)
    if isinstance(routed, _Routed):
        del ALL_ATTENTION_FUNCTIONS[name]
        if ALL_ATTENTION_FUNCTIONS.get(name) is not routed.plain:
            ALL_ATTENTION_FUNCTIONS[name] = routed.plain


_exchanges: dict[str, Exchange] = {}


def _exchange_of(name: str) -> Exchange:
    if name not in _exchanges:
        _exchanges.setdefault(name, Exchange(partial(_put, name), partial(_take_back, name)))
    return _exchanges[name]


def is_exchangeable(name: str) -> bool:
    """Whether models reach an attention implementation through transformers' registry."""
    return name in ALL_ATTENTION_FUNCTIONS
