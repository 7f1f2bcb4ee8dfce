"""Functions that this package computes in the place of others, within scopes of one thread.

transformers looks attention functions up by name in a registry. While any thread is in a scope that
concerns one of them, one function stands there instead, and no other ever does: it asks the scope
that its own thread is in. Inside :class:`attending` a model's attention goes to the function of the
scope. Everything else, such as a model that a hook of this model calls, reaches the function that
stood there, or what an engine has in its place (`OUTSIDE`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..system.locks import Lock

Attention = Callable[..., tuple[torch.Tensor, Any]]
"""(module, query, key, value, mask, **options) -> [batch, queries, heads, width], and weights."""

OUTSIDE: dict[Attention, Attention] = {}
"""What an engine computes in a function's place outside of :class:`attending`."""

ROUTES: list[Callable[[str], bool]] = []
"""Each engine's answer whether the running thread is in a scope of its own that concerns a name."""


class Exchange:
    """Whether something stands in another's place; the last thread that wanted it takes it back.

    An exception may come between any two lines (Python raises KeyboardInterrupt where it likes).
    So nothing is counted: the next `want` of any thread settles what was left half done.

    Args:
        put, restore: what to do, unless it has been done already.

    Attributes:
        threads: that want it, by their identifiers.
    """

    def __init__(self, put: Callable[[], None], restore: Callable[[], None]):
        self._put = put
        self._restorer = restore
        self._lock = Lock()
        self.threads: set[int] = set()

    def want(self, wanted: bool) -> None:
        """Say whether the running thread wants it from now on."""
        with self._lock:
            change = self.threads.add if wanted else self.threads.discard
            change(threading.get_ident())
            exchange = self._put if self.threads else self._restorer
            exchange()


class attending:  # noqa: N801, a context manager reads as a verb
    """Scope in which this thread's attention of one model is computed by `attend`.

    Args:
        name: of the attention implementation that the model was loaded with, and looks up.
        modules: the model's.
        attend: called with the function that would compute, and its arguments.
    """

    def __init__(self, name: str, modules: Container[nn.Module], attend: Attention):
        if not is_exchangeable(name):
            raise ValueError(f"attn_implementation: expected one that models look up, got {name!r}")
        self.name = name
        self.modules = modules
        self.compute = attend
        self.outer: attending | None = None

    def __enter__(self) -> attending:
        self.outer = _thread.scope
        _thread.scope = self
        _registered(self.name).want(True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leave_to(self.outer)


@contextmanager
def scopes_left() -> Iterator[None]:
    """Scope at whose end the running thread is in the scopes that it was in before.

    Python may raise KeyboardInterrupt before the first line of a scope's `__exit__`. Such a scope
    would go on for ever, and later forwards of the thread would be taken for those inside of it.
    """
    outer = innermost()
    try:
        yield
    finally:
        leave_to(outer)


class _Thread(threading.local):
    scope: attending | None = None


_thread = _Thread()


def innermost() -> attending | None:
    """The scope that the running thread is in."""
    return _thread.scope


def leave_to(outer: attending | None) -> None:
    """Leave the running thread's scopes inside of `outer`; None: all of them."""
    while (scope := _thread.scope) is not None and scope is not outer:
        # No generator, which an interrupt would leave half run.
        routed = [is_routed(scope.name) for is_routed in ROUTES]
        register(scope.name, scope.outer, any(routed))
        _thread.scope = scope.outer


def register(name: str, scope: attending | None, routed: bool) -> None:
    """Register our function under a name, or not, as a thread wants it that is in these scopes.

    Args:
        scope: the innermost of :class:`attending`.
        routed: whether it is in a scope of an engine that concerns the name.
    """
    while scope is not None and scope.name != name:
        scope = scope.outer
    _registered(name).want(scope is not None or routed)


def is_exchangeable(name: str) -> bool:
    """Whether models reach an attention implementation through transformers' registry."""
    return name in ALL_ATTENTION_FUNCTIONS


def asks_for_more(options: dict[str, Any], unknown: tuple[str, ...] = ()) -> bool:
    """Whether options of an attention function ask for more than attention, by these names too."""
    if options.get("dropout") or options.get("output_attentions"):
        return True
    # Every layer of every forward asks, and a generator takes longer than all the rest.
    for name in ("position_bias", "cache", *unknown):  # noqa: SIM110
        if options.get(name) is not None:
            return True
    return False


class _Routed:
    """The function that is registered: it asks the thread's scopes who computes.

    Attributes:
        stands_for: the function that was registered before.
    """

    def __init__(self, plain: Attention):
        self.stands_for = plain
        self._outside: Attention = OUTSIDE.get(plain, plain)

    def __call__(self, module: Any, *arguments: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        if torch.compiler.is_compiling():  # which sees no scopes
            return self.stands_for(module, *arguments, **options)
        scope = _thread.scope
        if scope is None or module not in scope.modules:
            return self._outside(module, *arguments, **options)
        return scope.compute(self._outside, module, *arguments, **options)


class _Registered(Exchange):
    """The exchange of one name in the registry.

    One function stands for another as long as that is the same: compiled code is made anew for a
    function that it has not met.
    """

    def __init__(self, name: str):
        super().__init__(self._register, self._restore)
        self._name = name
        self._routed: _Routed | None = None

    def _register(self) -> None:
        plain = ALL_ATTENTION_FUNCTIONS[self._name]
        if isinstance(plain, _Routed):
            return
        if self._routed is None or self._routed.stands_for is not plain:
            self._routed = _Routed(plain)
        ALL_ATTENTION_FUNCTIONS[self._name] = self._routed

    def _restore(self) -> None:
        routed = ALL_ATTENTION_FUNCTIONS.get(self._name)
        if isinstance(routed, _Routed):
            del ALL_ATTENTION_FUNCTIONS[self._name]
            if ALL_ATTENTION_FUNCTIONS.get(self._name) is not routed.stands_for:
                ALL_ATTENTION_FUNCTIONS[self._name] = routed.stands_for


_names: dict[str, _Registered] = {}


def _registered(name: str) -> _Registered:
    return _names.get(name) or _names.setdefault(name, _Registered(name))
