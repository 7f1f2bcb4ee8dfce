"""Hooks that a model's caller has registered, and whether they change what forwards compute.

A hook that changes something in every forward is part of the model, and a tier is tested with it.
One that only looks has no business with the test's random tokens, and says nothing about the
model's forwards. Which kind a hook is shows in the call's own forwards: it returned something, or
wrote into what it was shown. Of others it cannot be foreseen what they do in forwards that plain
decoding would not run: they make calls plain. Hooks of libraries (sharding, offloading, adapters)
always count as the model's.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from transformers import Cache, PreTrainedModel

from ..structures.modules import modules_of
from ..system.locks import Lock
from . import transformers_private as private
from .hook_state import (
    PACKAGE,
    DeepTeller,
    State,
    counts,
    may_act,
    own_parts,
    reads_more_than_its_module,
    state_of,
    written_in,
)
from .told import Told
from .transformers_private import Hook, global_hooks, hooks_of


class HookEffect(StrEnum):
    """What is known of a hook; of those that make calls plain, why."""

    LOOKS = "it changes nothing"
    CHANGES = "it changes something in every forward"
    AT_TIMES = (
        "a hook of the caller's may change something in some forwards only, or keeps something "
        "that changes from one to the next; let it do the same in all of them"
    )
    SHOWN = (
        "a hook of the caller's is shown the cache; register it without keywords, and on a part of "
        "the model that does not return the cache"
    )


# Keys: a hook's number, of which PyTorch gives none twice; what tells them of others too.
_kinds: dict[Hashable, HookEffect] = {}
_MOST_KNOWN = 1 << 14
_lock = Lock()


def unwatched(called: Any) -> Any:
    """What the caller has registered, whether some thread watches it or not."""
    return called.hook if isinstance(called, _Watched) else called


def is_callers(called: Any) -> bool:
    """Whether neither a library nor this package has made a hook."""
    return bool(own_parts(unwatched(called)))


def all_hooks(model: nn.Module) -> list[Hook]:
    """The hooks round the forwards of a model's modules, with the caller's of all modules."""
    return [*callers_global_hooks(), *hooks_of(*modules_of(model))]


def callers_global_hooks() -> list[Hook]:
    """The caller's hooks round the forwards of all modules of the process."""
    return [hook for hook in global_hooks() if is_callers(hook.called)]


def _callers_hooks(model: nn.Module) -> list[Hook]:
    return [hook for hook in all_hooks(model) if is_callers(hook.called)]


def told(hook: Hook) -> Hashable:
    """What tells a hook that is registered anew for every call from others: where it stands, what
    it calls and what that keeps."""
    teller = DeepTeller()
    teller.refer(hook.table)
    return Told(teller, hook.keywords, teller.tell(unwatched(hook.called)))


def _kind(hook: Hook) -> HookEffect | None:
    """None: it is met for the first time."""
    return _kinds.get(hook.number) or _kinds.get(told(hook))


def only_looks(hook: Hook) -> bool:
    """Whether a hook is the caller's and none that is known to change something."""
    return is_callers(hook.called) and _kind(hook) in (None, HookEffect.LOOKS)


def may_change(hook: Hook) -> bool:
    """Whether it may change a forward; the package's own look at that of some thread."""
    return written_in(unwatched(hook.called)) != PACKAGE and not only_looks(hook)


def has_callers_hooks(model: nn.Module) -> bool:
    """Whether a hook of the caller sees this thread's forwards of a model, that of all modules
    included."""
    return any(not _is_muted(hook.called) for hook in _callers_hooks(model))


def _is_muted(called: Any) -> bool:
    watch = called.watches.get(threading.get_ident()) if isinstance(called, _Watched) else None
    return watch is not None and watch.muted


def why_plain_with_hooks(model: nn.Module, model_kwargs: dict[str, Any]) -> str | None:
    """Why hooks of the caller's let no forward be run that plain decoding would not; None: they do.

    Args:
        model_kwargs: `generate`'s, with the cache that it made or was given.
    """
    hooks = _callers_hooks(model)
    held = [*model_kwargs.values()]
    held += [getattr(value, "self_attention_cache", None) for value in held]
    if hooks and any(map(private.is_callers, held)):
        return (
            "a hook of the caller's may hold the cache that the call was given, which drafts use "
            "otherwise than plain decoding; leave out either"
        )
    kinds = [HookEffect.SHOWN if _is_shown_cache(hook) else _kind(hook) for hook in hooks]
    return next(
        (kind.value for kind in (HookEffect.SHOWN, HookEffect.AT_TIMES) if kind in kinds), None
    )


def _is_shown_cache(hook: Hook) -> bool:
    """Whether a hook is shown a model's cache, as far as that can be foreseen: among keywords, or
    in what a model returns. Hooks of all modules are shown that too."""
    if hook.module is None:
        shown = hook.keywords or not hook.before
    else:
        returned = not hook.before and isinstance(hook.module, PreTrainedModel)
        shown = (hook.keywords or returned) and private.may_be_handed_cache(hook.module)
    return shown and reads_more_than_its_module(unwatched(hook.called))


class CacheShownError(Exception):
    """A forward was about to show a hook of the caller's a cache of the package's own."""


class _Watched:
    """Stands for a hook while some thread watches or mutes it.

    Attributes:
        hook: the caller's.
        number, before: see `Hook`.
        reads: whether it can write into what it is shown.
        watches: by thread.
    """

    def __init__(self, hook: Any, number: int, before: bool):
        self.hook, self.number, self.before = hook, number, before
        self.reads = reads_more_than_its_module(hook)
        self.watches: dict[int, HookWatch] = {}

    def __call__(self, *arguments: Any) -> Any:
        watch = self.watches.get(threading.get_ident())
        return self.hook(*arguments) if watch is None else watch.call(self, arguments)


@dataclass
class _Seen:
    """What was seen of a hook that is met for the first time.

    Attributes:
        always, ever: whether it changed something in all and in any of its calls.
        moves, counts: whether what it keeps has changed between them, and a number among that.
        draws: whether it has drawn random numbers.
    """

    always: bool = True
    ever: bool = False
    moves: bool = False
    counts: bool = False
    draws: bool = False

    def note(self, acted: bool, before: State, after: State, draws: bool) -> None:
        self.always, self.ever = self.always and acted, self.ever or acted
        self.moves = self.moves or before[0] != after[0]
        self.counts = self.counts or counts(before, after)
        self.draws = self.draws or draws

    def kind(self, called: Any) -> HookEffect:
        if self.draws:
            return HookEffect.AT_TIMES
        if self.ever:
            return HookEffect.CHANGES if self.always and not self.moves else HookEffect.AT_TIMES
        acts, decides = may_act(called)
        return HookEffect.AT_TIMES if acts and (decides or self.counts) else HookEffect.LOOKS


class HookWatch:
    """Scope of a thread's forwards in which the caller's hooks are watched, or not called.

    Args:
        model: whose hooks; those that are known to change something are left alone.
        muted: do not call them.
        guards: raise CacheShownError before a hook that may read it is shown a cache.

    Attributes:
        guards: may be set within the scope.
        changing: the numbers of those that have changed something.
        unsure: whether some are met for the first time.
    """

    def __init__(self, model: nn.Module, muted: bool = False, guards: bool = True):
        self.muted, self.guards = muted, guards
        self.changing: set[int] = set()
        self._found = [hook for hook in all_hooks(model) if only_looks(hook)]
        self._new = {hook.number: _Seen() for hook in self._found if _kind(hook) is None}
        self.unsure = bool(self._new)

    def __enter__(self) -> HookWatch:
        with _lock:
            for table, number, *_, before, _ in self._found:
                hook = table.get(number)
                if hook is not None:
                    watched = hook if isinstance(hook, _Watched) else _Watched(hook, number, before)
                    watched.watches[threading.get_ident()] = self
                    table[number] = watched
        return self

    def __exit__(self, *error: Any) -> None:
        with _lock:
            for table, number, *_ in self._found:
                watched = table.get(number)
                if not isinstance(watched, _Watched):
                    continue  # the caller has removed it
                watched.watches.pop(threading.get_ident(), None)
                if not watched.watches:
                    table[number] = watched.hook

    def call(self, watched: _Watched, arguments: tuple[Any, ...]) -> Any:
        """Call a hook with what it is shown, of which the module is the first."""
        called, number = watched.hook, watched.number
        shown = arguments[1:] if watched.reads else ()
        values, arranged = _flat(shown)
        if any(isinstance(x, Cache) for x in values):
            if self.guards:
                _kinds[number] = HookEffect.SHOWN
                raise CacheShownError(HookEffect.SHOWN.value)
            self.changing.add(number)
        if self.muted:
            return None
        kept, seen = _copies(values), self._new.get(number)
        state, drawn = seen and state_of(called), torch.get_rng_state()
        result = called(*arguments)
        now, arranged_now = _flat(shown)
        acted = (
            arranged != arranged_now
            or not all(map(operator.is_, values, now))
            or not all(map(_equal, kept, now))
            or not _hands_on(result, _replaced(watched.before, arguments))
        )
        if seen and state:
            draws = not torch.equal(drawn, torch.get_rng_state())
            seen.note(acted, state, state_of(called), draws)
        if acted:
            self.changing.add(number)
        return result

    def learn(self) -> bool:
        """Remember what the forwards so far have shown of the hooks; whether they only look.

        They have to be a forward over several tokens and one over a single token: hooks that steer
        often look at how many there are.
        """
        kinds = []
        for hook in self._found:
            seen = self._new.get(hook.number)
            if seen is not None:
                kinds.append(_remember(hook, seen.kind(unwatched(hook.called))))
            elif hook.number in self.changing and _kinds.get(hook.number) is HookEffect.LOOKS:
                kinds.append(_remember(hook, HookEffect.AT_TIMES))
        self._new, self.unsure = {}, False
        return all(kind is HookEffect.LOOKS for kind in kinds)

    def belong(self) -> None:
        """Count them as the model's, which does not do without them."""
        for hook in self._found:
            if _kinds.get(hook.number) is HookEffect.LOOKS:
                _remember(hook, HookEffect.CHANGES)


def _remember(hook: Hook, kind: HookEffect) -> HookEffect:
    _kinds[hook.number] = kind
    if kind is not HookEffect.LOOKS:
        _kinds[told(hook)] = kind
    while len(_kinds) > _MOST_KNOWN:
        del _kinds[next(iter(_kinds))]
    return kind


@contextmanager
def left_out(model: nn.Module) -> Iterator[None]:
    """Scope of a plain call of a model that failed its test without the hooks that were not known
    to change anything: it shows which do; where none does, all of them may be needed."""
    with HookWatch(model, guards=False) as watch:
        yield
        if watch.learn():
            watch.belong()


def _flat(values: Any) -> tuple[list[Any], Any]:
    """What is in collections, and how it is arranged there."""
    return tree_flatten(values, is_leaf=lambda value: isinstance(value, Cache))


def _copies(values: list[Any]) -> list[Any]:
    """Copies of tensors: what is written through `.data` or NumPy leaves no other trace."""
    return [value.clone() if isinstance(value, torch.Tensor) else None for value in values]


def _equal(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    """Whether a tensor is still what it was copied from, with NaN where that had it; None: it is no
    tensor."""
    if a is None:
        return True
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))


def _replaced(before: bool, arguments: tuple[Any, ...]) -> Any:
    """What a hook returns something in the place of, among what it is called with."""
    return arguments[1:] if before and len(arguments) == 3 else arguments[-1]


def _hands_on(result: Any, given: Any) -> bool:
    """Whether a hook returned nothing, or no other than what it was given in that place."""
    (leaves, spec), (others, other) = _flat(result), _flat(given)
    return result is None or (spec == other and all(map(operator.is_, leaves, others)))
