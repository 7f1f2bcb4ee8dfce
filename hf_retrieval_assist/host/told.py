"""Values that are a caller's, told so that they can be compared later.

Plain values are told by what they are, containers by their members, and all other objects by which
they are. Nobody is asked for a repr, an equality, a hash or a length of his own, nothing is kept
alive, and containers may hold themselves.
"""

from __future__ import annotations

import gc
import marshal
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from operator import is_
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig

PLAIN = frozenset((bool, int, float, str, bytes, complex, type(None)))
"""Types whose values `marshal` writes down."""

# What subclasses of plain types have of these.
_BASES = ((str, str.__str__), (int, int.__int__), (float, float.__float__))

# PyTorch's own, of which a call may make new ones that are equal.
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class Told:
    """What was told of values: equal as long as plain ones are equal and the others the same."""

    __slots__ = ("_number", "_objects")

    def __init__(self, teller: Teller, *values: Any) -> None:
        self._number = hash(marshal.dumps((values, teller.rest()), 2))
        self._objects = teller.objects

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        # A reference is the only one to its object, also once that has ended.
        return (
            isinstance(other, Told)
            and self._number == other._number
            and len(self._objects) == len(other._objects)
            and all(map(is_, self._objects, other._objects))
        )


def told(value: Any) -> Told:
    """A single value."""
    teller = Teller()
    return Told(teller, teller.tell(value))


class Teller:
    """Goes through objects that refer to one another, each once, and not into any depth.

    Args:
        moving: attributes of configurations that are left out.

    Attributes:
        values: that were met and are no plain ones; they keep their addresses until all is told.
        numbers: what stands for these, by their addresses: no plain value, nor a container of some.
        objects: references to those that are told by which they are, or these themselves where they
            have none and refer to nothing.
    """

    # Containers that are told at once where all in them is plain.
    _at_once = frozenset((tuple, list))

    def __init__(self, moving: Moving | None = None) -> None:
        self.values: list[Any] = []
        self.objects: list[Any] = []
        self.numbers: dict[int, tuple[Any, int]] = {}
        self._said: list[tuple[Any, list[Any]]] = []
        self._moving = moving or Moving()

    def tell(self, value: Any) -> Any:
        """What `marshal` writes down in a value's place."""
        if (found := self.numbers.get(id(value))) is not None:
            return found
        kind = type(value)
        if kind in PLAIN or (kind in self._at_once and PLAIN.issuperset(map(type, value))):
            return value
        found = self.numbers[id(value)] = (..., len(self.values))
        self.values.append(value)
        return found

    def rest(self) -> list[tuple[Any, list[Any]]]:
        """What there is to say of each object so far, and of those that they refer to: its type and
        its parts."""
        while len(self._said) < len(self.values):
            value = self.values[len(self._said)]
            parts, which = self.parts(value)
            if which and not self.refer(value):
                parts = gc.get_referents(value)
            self._said.append((self.tell(type(value)), [*map(self.tell, parts)]))
        return self._said

    def refer(self, value: Any) -> bool:
        """Tell an object by which it is; whether that can be."""
        try:
            self.objects.append(reference_to(value))
        except TypeError:
            if gc.is_tracked(value):
                return False
            self.objects.append(value)
        return True

    def parts(self, value: Any) -> tuple[Sequence[Any], bool]:
        """What an object is told by: parts of it, and whether also by which one it is."""
        kind = type(value)
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


def reference_to(value: Any) -> weakref.ref[Any]:
    """A weak reference, of a tensor that to its memory.

    PyTorch refuses to exchange what tensors stand for, as `module.to` does with quantised ones,
    while anything refers to them weakly.

    Raises:
        TypeError: nothing can refer to it weakly.
    """
    if issubclass(type(value), torch.Tensor):
        try:
            return weakref.ref(value.untyped_storage())
        except Exception:  # whatever its kind raises, as sparse ones do
            pass
    return weakref.ref(value)


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

    def add(self, owner: Any, names: Iterable[str]) -> None:
        self._names[id(owner)] = weakref.ref(owner), {*self.of(owner), *names}

    def of(self, owner: Any) -> set[str]:
        """The names of an object's."""
        own, names = self._names.get(id(owner), (None, set[str]()))
        return names if own is not None and own() is owner else set()
