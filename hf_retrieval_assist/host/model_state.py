"""What of a model decides how its forwards compute, beside inputs: a key that is cheap to ask.

Hooks, adapters and settings come and go between calls. What was found out about a model's forwards
holds while its key is the same. Attributes that forwards themselves change, such as counters, are
found by :func:`restored` and left out of it.
"""

from __future__ import annotations

import marshal
from collections.abc import Hashable, Iterator, Set
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from ..system.modules import modules_of
from .callers_hooks import all_hooks, is_callers, may_change, told
from .transformers_private import GRADIENT_HOOKS, Hook, attention_of, own_calls

# What every module keeps of itself.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | GRADIENT_HOOKS

_PLAIN = (bool, int, float, str, type(None), tuple, list, dict)

Place = tuple[int, str]
"""The identity of a module, and the name of an attribute."""


def model_settings(model: nn.Module, moving: Set[Place] = frozenset()) -> Hashable:
    """What stands for its modules' forwards, their plain attributes but `moving` ones, the kinds of
    their weights, their hooks but those that only look, how attention is computed, and modes that
    change operators."""
    config, modules = getattr(model, "config", None), modules_of(model)
    found = [
        (
            *(id(type(module)), *map(id, own_calls(module)), _plain(module, moving)),
            *[id(type(weight)) for weight in module._parameters.values()],
        )
        for module in modules
    ]
    return (
        _hash_of(found),
        tuple([_told(hook) for hook in all_hooks(model) if may_change(hook)]),
        None if config is None else attention_of(config),
        autocast_dtypes(),
        torch.get_default_device(),
    )


def _hash_of(told: Any) -> int:
    try:
        return hash(marshal.dumps(told, 2))  # which tells no identities, as later versions do
    except ValueError:  # other objects are in containers
        return hash(repr(told))


def autocast_dtypes() -> tuple[torch.dtype, ...]:
    """In what operators compute where autocast changes that."""
    enabled = filter(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps"))
    return tuple(map(torch.get_autocast_dtype, enabled))


def _plain(module: nn.Module, moving: Set[Place] = frozenset()) -> list[tuple[str, Any]]:
    """The plain attributes of a module, by name."""
    own = vars(module)
    return [
        (name, value)
        for name in own_names(tuple(own))
        # Of a configuration `isinstance` would ask, which takes longer than all the rest.
        if issubclass(type(value := own[name]), _PLAIN)
        if not (moving and (id(module), name) in moving)
    ]


@lru_cache(1 << 12)
def own_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Of a module's attributes those that not every module has; modules of a kind have the same."""
    return tuple([name for name in names if name not in _INTERNAL])


def has_changing_hooks(model: nn.Module) -> bool:
    """Whether hooks may change what the model's forwards compute."""
    return any(map(may_change, all_hooks(model)))


def _told(hook: Hook) -> Hashable:
    """A hook's number; the caller's, and those that are registered anew for every call with what is
    bound to them, are told by what they call and keep."""
    bound = isinstance(hook.called, partial)
    return told(hook) if bound or is_callers(hook.called) else hook.number


@contextmanager
def restored(model: nn.Module, moving: set[Place]) -> Iterator[None]:
    """Scope of forwards that plain decoding would not run: what they change in modules is put back,
    and the places of plain attributes among it are added to `moving`.

    What is put back are plain attributes, and the tensors of modules that compute without
    parameters or parts, as positions are computed.
    """
    modules = modules_of(model)
    plain = {
        (id(module), name): (repr(value), _copied(value))
        for module in modules
        for name, value in _plain(module)
    }
    tensors = [
        (own, {name: value for name, value in own.items() if isinstance(value, torch.Tensor)})
        for own in (vars(module) for module in modules)
        if not (own["_modules"] or own["_parameters"])
    ]
    buffers = [
        (held, name, buffer, buffer.clone())
        for own, _ in tensors
        for held in [own["_buffers"]]
        for name, buffer in held.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module in modules:
            for name, value in _plain(module):
                told, before = plain.get((id(module), name), (None, None))
                if repr(value) != told:
                    moving.add((id(module), name))
                    if told is not None:
                        vars(module)[name] = before
        for own, kept in tensors:
            own.update(kept)
        for held, name, buffer, value in buffers:
            held[name] = buffer.copy_(value)


def _copied(value: Any) -> Any:
    """A plain value; a container with a copy of each container in it."""
    if isinstance(value, dict):
        return {name: _copied(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
    return value
