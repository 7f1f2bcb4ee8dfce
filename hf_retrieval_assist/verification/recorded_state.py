"""What a recorded forward has taken for granted, as a value that can be compared.

That is: where tensors lie, what modules keep beside them, and what PyTorch takes from the running
thread and the process. Nothing can be known of what others' hooks do next, so a model that has some
is not recorded. Nothing is kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from enum import Enum
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..host.callers_hooks import LIBRARIES, PACKAGE, is_callers
from ..host.model_state import INTERNAL
from ..host.transformers_private import global_hooks, hooks_of, numbered_hooks
from ..system.modules import modules_of

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), Enum, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic),
)
_COLLECTIONS = (list, tuple, set, frozenset)

# Of what is held by what is held; and of the largest collection. What is deeper or larger is too
# much to look into before every call.
_DEEPEST, _MOST = 8, 4096

_SETTINGS = (
    *("is_inference_mode_enabled", "is_grad_enabled", "get_default_dtype"),
    *("are_deterministic_algorithms_enabled", "get_float32_matmul_precision"),
    *(f"backends.{name}" for name in ("fp32_precision", "cudnn.allow_tf32", "cudnn.deterministic")),
    *(f"backends.cudnn.{name}.fp32_precision" for name in ("conv", "rnn")),
    *(f"backends.cuda.{name}_sdp_enabled" for name in ("flash", "mem_efficient", "math", "cudnn")),
    *(
        f"backends.cuda.matmul.{name}"
        for name in (
            *("fp32_precision", "allow_tf32", "allow_fp16_accumulation"),
            *(f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")),
        )
    ),
)


class _UnreadableError(Exception):
    """Nobody can tell whether something stays as it is."""


def why_unrecorded(model: nn.Module, device: torch.device) -> str | None:
    """Why forwards of a model are not recorded as it is now; None: they may be."""
    # Copies of weights that operators keep for the scope's time would be gone later.
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return "autocast is on"
    hooks = [hook for module in modules_of(model) for _, hook in numbered_hooks(module)]
    strange = [hook for hook in (*global_hooks(), *hooks) if is_callers(hook)]
    forwards = [vars(module).get("forward") for module in modules_of(model)]
    strange += [own for own in forwards if own is not None and written_in(own) not in LIBRARIES]
    return f"nobody knows what {strange[0]!r} will do" if strange else None


def recorded_state(model: nn.Module, arguments: Mapping[str, Any], device: torch.device) -> Any:
    """Equal as long as what was recorded of a model's forwards is what they compute; None where
    nothing may be recorded.

    Args:
        arguments: keyword arguments of the call. Tensors that reach a forward are not recorded at
            all, and caches are the verifier's.
        device: of the model.
    """
    if why_unrecorded(model, device) is not None:
        return None
    passed = {n: v for n, v in arguments.items() if not isinstance(v, (torch.Tensor, Cache))}
    reader = _Reader()
    try:
        for part in (*modules_of(model), passed, *map(_setting, _SETTINGS)):
            reader.read(part)
    except _UnreadableError:
        return None
    return _State(reader.values, reader.objects)


def _setting(name: str) -> Any:
    """Of PyTorch; some raise where others have set the same thing by another name."""
    try:
        found = attrgetter(name)(torch)
        return found() if callable(found) else found
    except (AttributeError, RuntimeError) as error:
        return type(error)


def written_in(function: Any) -> str:
    """The package that a function was written in, whatever name what wraps it has taken over."""
    while isinstance(function, partial):
        function = function.func
    written = getattr(getattr(function, "__func__", function), "__globals__", None)
    name: str = written["__name__"] if written else type(function).__module__
    return name.partition(".")[0]


class _State:
    """What was read, equal to what is read later while it is the same and of the same objects.

    Args:
        values: all that is plain, and the addresses of what is not.
        objects: at these addresses.
    """

    def __init__(self, values: list[Any], objects: list[weakref.ref[Any]]) -> None:
        # One number: many objects that are kept would make Python look for garbage among all.
        self._values = hash(tuple(values))
        self._objects = objects

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _State) and self._values == other._values
        return same and all(thing() is not None for thing in self._objects)

    __hash__ = None  # type: ignore[assignment]


class _Reader:
    """Reads objects, each once.

    Attributes:
        values, objects: see :class:`_State`.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.objects: list[weakref.ref[Any]] = []
        self._seen: dict[int, int] = {}
        # Until all is read, so that no other object gets the address of one.
        self._kept: list[Any] = []

    def read(self, value: Any, depth: int = 0) -> None:
        """Note its value, or which object it is."""
        if isinstance(value, _ATOMS):
            self.values.append(repr(value))
        elif id(value) in self._seen:
            self.values.append(self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._kept)
            self._kept.append(value)
            self._look_into(value, depth)

    def _look_into(self, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, weakref.ref):
            self.read(value(), depth)
        elif isinstance(value, partial):
            self._collection((value.func, value.args, value.keywords), depth)
        elif isinstance(value, MethodType):
            self._collection((value.__func__, value.__self__), depth)
        elif isinstance(value, Mapping):
            self._collection([part for item in value.items() for part in item], depth)
        elif isinstance(value, _COLLECTIONS):
            self._collection(value, depth)
        else:
            self._object(value, depth)

    def _collection(self, values: Collection[Any], depth: int) -> None:
        if len(values) > _MOST or depth == _DEEPEST:
            raise _UnreadableError
        self.values.append(len(values))
        for value in values:
            self.read(value, depth + 1)

    def _object(self, thing: Any, depth: int) -> None:
        """Which one it is, and its attributes where they may be changed from outside."""
        held, library = getattr(thing, "__dict__", None), written_in(thing) in LIBRARIES
        self.values.append(id(thing))
        try:
            self.objects.append(weakref.ref(thing))
        except TypeError:
            if held is None and not library:
                raise _UnreadableError from None
        if held and depth < _DEEPEST and (not library or isinstance(thing, PreTrainedConfig)):
            self.read(held, depth + 1)

    def _module(self, module: nn.Module) -> None:
        own = vars(module)
        self.values += [type(module), *own["_modules"]]
        for kind in ("_parameters", "_buffers"):
            for name, tensor in own[kind].items():
                self.values.append(name)
                self.read(tensor)
        # The package's own look at a thread's forwards and change nothing.
        self.read([hook for hook in hooks_of(module) if written_in(hook[0]) != PACKAGE])
        for name in sorted(own.keys() - INTERNAL):
            self.values.append(name)
            self.read(own[name])

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.values += [tensor.data_ptr(), tensor.shape, tensor.stride()]
        self.values += [tensor.dtype, tensor.device]
        if not tensor.shape and tensor.is_cpu:  # its value went with the launch
            self.values.append(repr(tensor.item()))
        # Quantised tensors have others inside.
        self.read(vars(tensor))
