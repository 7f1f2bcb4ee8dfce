"""A scope in which somebody else computes a model's attention.

transformers looks attention functions up by name in a registry. Inside :class:`attending` the
running thread's go to the function of the scope, whatever attention the model was loaded with;
everybody else's go through the function that stands in the registry, which is exchanged while any
thread is in a scope.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..system.locks import Lock

Attention = Callable[..., tuple[torch.Tensor, Any]]
"""(module, query, key, value, mask, **options) -> [batch, queries, heads, width], and weights."""


class attending:  # noqa: N801, a context manager reads as a verb
    """Scope in which this thread's attention is computed by `attend`.

    Args:
        name: of the attention implementation that the model was loaded with.
        attend: called with the function that would compute, and its arguments.
    """

    def __init__(self, name: str, attend: Callable[..., tuple[torch.Tensor, Any]]):
        self._name = name
        self.compute = attend

    def __enter__(self) -> attending:
        _registry.enter(self._name)
        self._outer, _served.scope = _served.scope, self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _served.scope = self._outer
        _registry.leave(self._name)


class _Served(threading.local):
    scope: attending | None = None


_served = _Served()


class _Registry:
    """transformers' attention functions, some of them exchanged."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._plain: dict[str, Attention] = {}
        self._scopes: dict[str, int] = {}

    def enter(self, name: str) -> None:
        with self._lock:
            self._scopes[name] = self._scopes.get(name, 0) + 1
            if self._scopes[name] == 1:
                self._plain[name] = plain = ALL_ATTENTION_FUNCTIONS[name]
                ALL_ATTENTION_FUNCTIONS[name] = _Routed(plain)

    def leave(self, name: str) -> None:
        with self._lock:
            self._scopes[name] -= 1
            if not self._scopes[name]:
                plain = self._plain.pop(name)
                del ALL_ATTENTION_FUNCTIONS[name]
                if ALL_ATTENTION_FUNCTIONS.get(name) is not plain:
                    ALL_ATTENTION_FUNCTIONS[name] = plain


_registry = _Registry()


class _Routed:
    """An attention function of transformers that asks the thread's scope first."""

    def __init__(self, plain: Attention):
        self._plain = plain

    def __call__(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        scope = _served.scope
        if scope is None:
            return self._plain(*arguments, **options)
        return scope.compute(self._plain, *arguments, **options)


def is_exchangeable(name: str) -> bool:
    """Whether models reach an attention implementation through transformers' registry."""
    return name in ALL_ATTENTION_FUNCTIONS
