"""Values that are a caller's, told so that they can be compared later.

Plain values are told by what they are, containers by their members, and all other objects by which
they are. Nobody is asked for a repr, an equality, a hash or a length of his own, nothing is kept
alive, and containers may hold themselves.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig

from ..structures.modules import INTERNAL, ObjectWalk, Told
from .transformers_private import GRADIENT_HOOKS

PLAIN = frozenset((bool, int, float, str, bytes, complex, type(None)))
"""Types whose values are told by what they are."""

NAMES_OF_ALL = INTERNAL | GRADIENT_HOOKS
"""Attributes that modules have whatever they compute."""

# What subclasses of plain types have of these.
_BASES = ((str, str.__str__), (int, int.__int__), (float, float.__float__))

# PyTorch's own, of which a call may make new ones that are equal.
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def told(value: Any) -> Told:
    """A single value."""
    teller = Teller()
    return Told(teller, teller.tell(value))


class Teller(ObjectWalk):
    """Says what there is to say of objects.

    Args:
        moving: attributes of configurations that are left out.
        most: see :class:`ObjectWalk`.
    """

    def __init__(self, moving: Moving | None = None, most: int = sys.maxsize) -> None:
        super().__init__(NAMES_OF_ALL, most)
        self._moving = moving or Moving()

    def parts(self, value: Any) -> tuple[Sequence[Any], bool]:
        """What an object is told by: parts of it, and whether also by which one it is."""
        kind = type(value)
        if issubclass(kind, type):
            return (), True
        members = members_of(value)
        if members is not None:
            return members, False
        if issubclass(kind, torch.Tensor):
            return [version_of(value), place_of(value)], True
        if kind is MethodType:
            return (value.__func__, value.__self__), False
        if issubclass(kind, partial):
            return (value.func, value.args, value.keywords), False
        if issubclass(kind, PreTrainedConfig):
            names = self._moving.of(value)
            return flat({n: x for n, x in vars(value).items() if n not in names}), False
        if issubclass(kind, _NAMED):
            return [str(value)], False
        if issubclass(kind, np.generic):
            return (value.dtype.str, value.tobytes()), False
        for base, own in _BASES:
            if issubclass(kind, base):
                return [own(value)], False
        # A generation's settings are no model's.
        return (), not issubclass(kind, GenerationConfig)


def attributes_of(value: Any) -> dict[str, Any]:
    """What stands on an object itself, without asking it."""
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def flat(table: dict[Any, Any]) -> list[Any]:
    """Names and values in turns."""
    return [part for pair in dict.items(table) for part in pair]


def members_of(value: Any) -> list[Any] | None:
    """What is in a container; None: it is none whose members count."""
    kind = type(value)
    if issubclass(kind, dict):
        return flat(value)
    for base in (list, tuple, set, frozenset):
        if issubclass(kind, base):
            return [*base.__iter__(value)]
    return None


def configurations_in(*values: Any) -> list[PreTrainedConfig]:
    """The configurations among values, and those within them, each once."""
    teller = Teller()
    for value in values:
        teller.tell(value)
    teller.rest()
    return [x for x in teller.values if issubclass(type(x), PreTrainedConfig)]


def place_of(tensor: torch.Tensor) -> int | None:
    """What tells a tensor from others of its memory; None where its kind has none."""
    try:
        return hash((tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype))
    except Exception:  # whatever its kind raises
        return None


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written to; None where nobody counts."""
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode
        return None


class Moving:
    """Attributes that a model's forwards change, by which it is not told.

    Owners are modules and configurations.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[Any], set[str]]] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    @property
    def by_address(self) -> dict[int, set[str]]:
        """The names of all that live."""
        owners = ((own(), names) for own, names in self._names.values())
        return {id(owner): names for owner, names in owners if owner is not None}

    def add(self, owner: Any, names: Iterable[str]) -> None:
        self._names[id(owner)] = weakref.ref(owner), {*self.of(owner), *names}

    def of(self, owner: Any) -> set[str]:
        """The names of an object's."""
        own, names = self._names.get(id(owner), (None, set[str]()))
        return names if own is not None and own() is owner else set()
