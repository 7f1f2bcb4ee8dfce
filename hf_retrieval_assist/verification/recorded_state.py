"""What a recorded forward has taken for granted, as values that can be compared.

Everything that a forward can reach from the model is looked at: modules with their attributes and
hooks, what hooks are bound to or close over, where tensors lie. What cannot be looked into is equal
to itself only, and what cannot be told from another equals nothing. Nothing is kept alive.
"""

from __future__ import annotations

import builtins
import weakref
from collections import deque
from collections.abc import Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from ..host.model_state import INTERNAL, modules_of
from ..host.transformers_private import compiled_of, hooks_of

_PLAIN = frozenset((type(None), bool, int, str))
_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_COMMON = frozenset((dict, list))  # of most values, which are no atoms
_CONTAINERS = (Mapping, tuple, list, set, frozenset, deque)
_FIXED = (type, ModuleType, BuiltinFunctionType, torch._C._TensorMeta)
# Whose objects are taken for what they are, where a function names them.
_LIBRARIES = frozenset(("torch", "transformers", "accelerate", "peft", "logging", "numpy"))


class _Unknown:
    """Equal to nothing."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class _Same:
    """Equal to another one of the same object while that lives."""

    __slots__ = ("_thing",)

    def __init__(self, thing: Any):
        self._thing = weakref.ref(thing)

    def __eq__(self, other: object) -> bool:
        thing = self._thing()
        return thing is not None and isinstance(other, _Same) and thing is other._thing()

    __hash__ = None  # type: ignore[assignment]


def _same(thing: Any) -> Any:
    try:
        return _Same(thing)
    except TypeError:
        # Something as plain as a namespace is all that it holds.
        plain = hasattr(thing, "__dict__") or any("__slots__" in vars(t) for t in type(thing).mro())
        return None if plain else _Unknown()


def _slots(thing: Any) -> dict[str, Any]:
    """What an object holds beside its dictionary."""
    found: dict[str, Any] = {}
    for kind in type(thing).mro():
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name.startswith("__") and not name.endswith("__"):  # as Python renames them
                name = f"_{kind.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                found[name] = getattr(thing, name)
    return found


class _Reader:
    """Reads an object and what it refers to, each once.

    Args:
        most: objects to look into; a hook may refer to a whole training run.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: dict[int, int] = {}
        # Until all is read, so that no other object gets the address of one.
        self._kept: list[Any] = []

    def read(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value if value != -2 else repr(value)
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        if kind not in _COMMON and isinstance(value, _ATOMS):
            return value if kind is not float else repr(value)
        self._seen[id(value)] = len(self._kept)
        self._kept.append(value)
        if len(self._seen) > self._most:
            return _Unknown()
        if kind is dict and len(value) <= self._most:
            return self._mapping(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, _CONTAINERS) and len(value) > self._most:
            return _Unknown()
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, _CONTAINERS):
            return _short([self.read(held) for held in value])
        if isinstance(value, weakref.ref):
            return self.read(value())
        if callable(value) and not isinstance(value, _FIXED):
            return self._callable(value)
        if isinstance(value, (*_FIXED, GenerationConfig)):
            return _same(value)
        return self._object(value)

    def _mapping(self, values: Mapping[Any, Any]) -> Any:
        return _short([self.read(part) for item in values.items() for part in item])

    def _tensor(self, tensor: torch.Tensor) -> Any:
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        # Its value went with the launch.
        value = repr(tensor.item()) if not tensor.shape and tensor.is_cpu else ""
        return place, value, self._attributes(tensor)

    def _module(self, module: nn.Module) -> Any:
        """Attributes and parts; hooks whatever they were numbered."""
        own = vars(module)
        hooks = hooks_of(module)
        tensors = [
            (name, self._tensor(tensor))
            for kind in ("_parameters", "_buffers")
            for name, tensor in own[kind].items()
            if tensor is not None
        ]
        plain = _short(sorted([(n, self.read(own[n])) for n in own.keys() - INTERNAL], key=_first))
        parts = _short([(name, self.read(part)) for name, part in own["_modules"].items()])
        return _short([type(module), _short(tensors), plain, self.read(hooks), parts])

    def _callable(self, function: Any) -> Any:
        if isinstance(function, partial):
            return "partial", *map(self.read, (function.func, function.args, function.keywords))
        if isinstance(function, MethodType):
            return "method", self.read(function.__func__), self.read(function.__self__)
        if (original := compiled_of(function)) is not None:
            # What torch keeps of it beside goes on changing.
            return _same(function), self.read(original)
        if isinstance(function, FunctionType):
            cells = [_content(cell) for cell in function.__closure__ or ()]
            given = function.__defaults__, function.__kwdefaults__, cells, self._named(function)
            return _same(function), *map(self.read, given)
        return self._object(function)

    def _named(self, function: FunctionType) -> list[Any]:
        """What a function's code may look up in its module."""
        if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
            return []
        found = [function.__globals__.get(name) for name in function.__code__.co_names]
        return [
            value
            for value in found
            if not isinstance(value, _FIXED)
            and (type(value).__module__ == builtins.__name__ or not _is_of_library(value))
            and (not isinstance(value, FunctionType) or value.__globals__ is function.__globals__)
        ]

    def _object(self, thing: Any) -> Any:
        held = self._mapping(_slots(thing))
        return type(thing), _same(thing), held, self._attributes(thing)

    def _attributes(self, thing: Any) -> Any:
        attributes = getattr(thing, "__dict__", None)
        return self.read(attributes) if attributes else ()


def _short(values: list[Any]) -> Any:
    """One number where values hold nothing but what is equal by value: few of those that are kept
    would make Python look for garbage among all objects."""
    try:
        return hash(tuple(values))
    except TypeError:
        return values


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put into it yet
        return None


def _is_of_library(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _LIBRARIES


def recorded_state(model: nn.Module, arguments: Mapping[str, Any], device: torch.device) -> Any:
    """Equal as long as what was recorded of a model's forwards is what they compute.

    Args:
        arguments: keyword arguments of the call. Tensors that reach a forward are not recorded at
            all, and caches are the verifier's.
        device: of the model.
    """
    reader = _Reader(64 * len(modules_of(model)) + 4096)
    passed = {n: v for n, v in arguments.items() if not isinstance(v, (torch.Tensor, Cache))}
    return reader.read(model), reader.read(passed), _settings(device)


def _settings(device: torch.device) -> Any:
    """What PyTorch takes from the running thread and the process."""
    backends = torch.backends.cuda
    return (
        (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_default_dtype()),
        (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic),
        (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled()),
        (backends.math_sdp_enabled(), backends.cudnn_sdp_enabled()),
    )


def is_autocast(device: torch.device) -> bool:
    """Whether operators choose dtypes by themselves: copies of weights that they keep for the
    scope's time would be gone when a recording is repeated."""
    known = torch.amp.is_autocast_available(device.type)
    return known and torch.is_autocast_enabled(device.type)
