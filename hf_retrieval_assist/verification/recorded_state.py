"""What a recorded forward has taken for granted, as a value that can be compared.

That is: where tensors lie, what modules keep beside them, and what PyTorch takes from the running
thread and the process. Nothing can be known of what others' hooks do next, so a model that has some
is not recorded. Nothing is kept alive.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Mapping
from enum import Enum
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..host.callers_hooks import is_callers
from ..host.hook_state import LIBRARIES, PACKAGE, written_in
from ..host.model_state import own_names, torch_settings
from ..host.told import reference_to
from ..host.transformers_private import global_hooks, hooks_of, own_calls
from ..system.modules import modules_of

# What pickle writes down by itself, and what is told by its name, which is PyTorch's own.
_PLAIN = (type(None), bool, int, float, str, bytes, type(...))
_WRITTEN = frozenset((*_PLAIN, list, tuple, dict, set, frozenset))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)

# Objects that are read of a module, or of what a call was given; more are too many to look into
# before every call.
_MOST = 1 << 15

# Where modules keep the numbers of hooks that are called with keywords, or after failures too.
_WAYS = [f"_forward_{which}" for which in ("hooks_with_kwargs", "pre_hooks_with_kwargs")]
_WAYS += ["_forward_hooks_always_called"]


def why_unrecorded(model: nn.Module, device: torch.device) -> str | None:
    """Why forwards of a model are not recorded as it is now; None: they may be."""
    # Copies of weights that operators keep for the scope's time would be gone later.
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return "autocast is on"
    modules = modules_of(model)
    hooks = [hook.called for hook in (*global_hooks(), *hooks_of(*modules))]
    strange = [hook for hook in hooks if is_callers(hook)]
    forwards = [own_calls(module)[0] for module in modules]
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
    reader, modules = _Reader(), modules_of(model)
    try:
        for part in (*modules, {*map(type, modules)}, passed, torch_settings()):
            reader.read(part)
    except Exception:  # whatever an object raises that is looked into, or what nests too deeply:
        return None  # nobody can tell whether it stays as it is
    # A number, since many objects that are kept would make Python look for garbage among all; and
    # the references, of which an object has one while it lives, and an ended one equals no other.
    return hash(reader.written.getvalue()), *reader.objects


class _Reader(pickle.Pickler):
    """Writes objects down, each once: pickle goes through collections, and asks for all others.

    Attributes:
        written: so far.
        objects: whose identities were written down.
    """

    def __init__(self) -> None:
        self.written = io.BytesIO()
        super().__init__(self.written)
        self.objects: list[weakref.ref[Any]] = []
        self._seen: dict[int, int] = {}
        # Until all is read, so that no other object gets the address of one.
        self._kept: list[Any] = []

    def read(self, value: Any) -> None:
        self._left = _MOST
        self.dump(value)

    def persistent_id(self, value: Any) -> Any:
        """What is written in a value's place; None: itself."""
        self._left -= 1
        if not self._left:
            raise pickle.PicklingError
        if type(value) in _WRITTEN:
            return None
        if issubclass(type(value), _NAMED):
            return str(value)
        if issubclass(type(value), np.generic):
            return value.dtype.str, value.tobytes()
        if type(value) in (range, slice):
            return type(value).__name__, value.start, value.stop, value.step
        if type(value) is complex:
            return value.real, value.imag
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = len(self._kept)
        self._kept.append(value)
        if issubclass(type(value), (torch.Tensor, type, Enum)):
            self.objects.append(reference_to(value))
            return id(value), _tensor(value) if isinstance(value, torch.Tensor) else None
        if isinstance(value, nn.Module):
            return _module(value)
        if isinstance(value, weakref.ref):
            return [value()]
        if isinstance(value, partial):
            return value.func, value.args, value.keywords
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
        if isinstance(value, Mapping):
            return [*value.items()]
        if isinstance(value, list | tuple | set | frozenset):
            return [*value]
        return self._object(value)

    def _object(self, thing: Any) -> Any:
        """Which one it is, and its attributes where they may be changed from outside."""
        held, library = getattr(thing, "__dict__", None), written_in(thing) in LIBRARIES
        try:
            self.objects.append(reference_to(thing))
        except TypeError:
            if held is None and not library:
                raise pickle.PicklingError from None
        looked_into = not library or isinstance(thing, PreTrainedConfig)
        return id(thing), held if looked_into else None


def _module(module: nn.Module) -> Any:
    own = vars(module)
    names = own_names(tuple(own))
    # The package's own look at a thread's forwards and change nothing.
    hooks = [
        (hook.called, [hook.number in own[way] for way in _WAYS])
        for hook in hooks_of(module)
        if written_in(hook.called) != PACKAGE
    ]
    # Numbers for what has no parts: each object takes as long as ten of them.
    told = hash((type(module), names, *own["_modules"]))
    return told, own["_parameters"], own["_buffers"], hooks, [own[name] for name in names]


def _tensor(tensor: torch.Tensor) -> Any:
    """Where it lies, as far as its kind says: those that are sparse, or not there yet, do not."""
    try:
        # The value of one without dimensions went with the launch.
        value = repr(tensor.item()) if not tensor.shape and tensor.is_cpu else None
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    except Exception:  # whatever its kind raises
        return None, vars(tensor) or None
    # Quantised ones have others inside.
    return hash((value, *place)), vars(tensor) or None
