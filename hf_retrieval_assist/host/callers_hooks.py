"""Hooks that a model's caller has registered, and whether they change what forwards compute.

A hook that changes something is part of the model, and a tier is tested with it. One that only
looks has no business with the test's random tokens, and says nothing about the model's forwards.
Which kind a hook is shows in the call's own forwards: it returned something, or wrote into what it
was shown. Hooks of libraries (sharding, offloading, adapters) always count as the model's.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..system.locks import Lock
from ..system.modules import modules_of
from .transformers_private import Hook, global_hooks, hooks_of

PACKAGE = __name__.partition(".")[0]
LIBRARIES = frozenset(
    ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", PACKAGE)
)

# By the number of a hook, of which PyTorch gives none twice: whether it changes something.
_changes: dict[int, bool] = {}
_MOST_KNOWN = 1 << 14
_lock = Lock()


def written_in(function: Any) -> str:
    """The package that a function was written in, whatever name what wraps it has taken over."""
    while isinstance(function, partial):
        function = function.func
    written = getattr(getattr(function, "__func__", function), "__globals__", {})
    name: str = written.get("__name__", type(function).__module__)
    return name.partition(".")[0]


def is_callers(hook: Any) -> bool:
    """Whether neither a library nor this package has made a hook."""
    return isinstance(hook, _Watched) or written_in(hook) not in LIBRARIES


def only_looks(hook: Hook) -> bool:
    """Whether a hook is the caller's and none that is known to change something."""
    return is_callers(hook.called) and not _changes.get(hook.number, False)


def has_callers_hooks(model: nn.Module) -> bool:
    """Whether a hook of the caller sees this thread's forwards of a model, that of all modules
    included."""
    hooks = [hook.called for hook in hooks_of(*modules_of(model))]
    return any(is_callers(hook) and not _is_muted(hook) for hook in (*global_hooks(), *hooks))


def _is_muted(hook: Any) -> bool:
    watch = hook.watches.get(threading.get_ident()) if isinstance(hook, _Watched) else None
    return watch is not None and watch.muted


class _Watched:
    """Stands for a hook while some thread watches or mutes it.

    Attributes:
        hook: the caller's.
        watches: by thread.
    """

    def __init__(self, hook: Any):
        self.hook = hook
        self.watches: dict[int, HookWatch] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        watch = self.watches.get(threading.get_ident())
        if watch is None:
            return self.hook(*arguments, **options)
        if watch.muted:
            return None
        before = _marks((arguments, options))
        result = self.hook(*arguments, **options)
        if result is not None or not _are_same(before, _marks((arguments, options))):
            watch.changing.add(self)
        return result


class HookWatch:
    """Scope of a thread's forwards in which the caller's hooks are watched, or not called.

    Args:
        model: whose hooks; those that are known to change something are left alone.
        muted: do not call them.

    Attributes:
        changing: those that have changed something.
        unsure: whether some are met for the first time.
    """

    def __init__(self, model: nn.Module, muted: bool = False):
        self.muted = muted
        self.changing: set[_Watched] = set()
        self._found = [hook for hook in hooks_of(*modules_of(model)) if only_looks(hook)]
        self.unsure = any(hook.number not in _changes for hook in self._found)

    def __enter__(self) -> HookWatch:
        with _lock:
            for hooks, number, _ in self._found:
                hook = hooks.get(number)
                if hook is not None:
                    watched = hook if isinstance(hook, _Watched) else _Watched(hook)
                    watched.watches[threading.get_ident()] = self
                    hooks[number] = watched
        return self

    def __exit__(self, *error: Any) -> None:
        with _lock:
            for hooks, number, _ in self._found:
                watched = hooks.get(number)
                if not isinstance(watched, _Watched):
                    continue  # the caller has removed it
                watched.watches.pop(threading.get_ident(), None)
                if not watched.watches:
                    hooks[number] = watched.hook

    def learn(self) -> bool:
        """Remember what the forwards so far have shown of the hooks; whether none changed anything.

        They have to be a forward over several tokens and one over a single token: hooks that steer
        often look at how many there are.
        """
        for hooks, number, _ in self._found:
            _changes[number] = _changes.get(number, False) or hooks.get(number) in self.changing
        while len(_changes) > _MOST_KNOWN:
            del _changes[next(iter(_changes))]
        self.unsure = False
        return not self.changing


def _marks(values: Any) -> list[tuple[Any, Any]]:
    """What tells tensors, and whether something is written into them."""
    return [
        (value, value.clone() if value.is_inference() else value._version)
        for value in tree_leaves(values)
        if isinstance(value, torch.Tensor)
    ]


def _are_same(before: list[tuple[Any, Any]], after: list[tuple[Any, Any]]) -> bool:
    return len(before) == len(after) and all(
        one is other and (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
        for (one, a), (other, b) in zip(before, after, strict=True)
    )
