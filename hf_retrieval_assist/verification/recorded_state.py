"""What a recorded forward has taken for granted, as a value that can be compared.

That is: where tensors lie, what modules keep beside them, and what PyTorch takes from the running
thread and the process. Nothing can be known of what others' hooks do next, so a model that has some
is not recorded. Nothing is kept alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from ..host.callers_hooks import is_callers
from ..host.hook_state import LIBRARIES, PACKAGE, DeepTeller, written_in
from ..host.model_state import own_attributes, torch_settings
from ..host.told import Told, flat, place_of
from ..host.transformers_private import global_hooks, hooks_of, own_calls
from ..system import changes
from ..system.modules import modules_of

# Objects that are read of a module, or of what a call was given; more are too many to look into
# before every call.
_MOST = 1 << 15


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
    modules = modules_of(model)
    passed = {n: v for n, v in arguments.items() if not isinstance(v, (torch.Tensor, Cache))}
    reader = _Reader(_MOST + (len(modules) << 6))
    try:
        told = [reader.tell(part) for part in (*modules, passed, torch_settings())]
        state = Told(reader, told)
    except Exception:  # whatever an object raises that is looked into:
        return None  # nobody can tell whether it stays as it is
    return None if reader.untold else (changes.said(), state)


class _Reader(DeepTeller):
    """Tells modules by what they hold, and tensors by where they lie."""

    def parts(self, value: Any) -> tuple[Sequence[Any], bool]:
        if issubclass(type(value), torch.Tensor):
            # Quantised ones have others inside.
            return [id(value), *_place(value), *flat(vars(value))], True
        if not issubclass(type(value), nn.Module):
            return super().parts(value)
        own, always = vars(value), vars(value)["_forward_hooks_always_called"]
        held = own["_modules"], own["_parameters"], own["_buffers"], own_attributes(value)
        # The package's own look at a thread's forwards and change nothing.
        hooks = [
            part
            for hook in hooks_of(value)
            if written_in(hook.called) != PACKAGE
            for part in (hook.called, hook.keywords, hook.number in always)
        ]
        return [*hooks, *(part for table in held for part in flat(table))], False


def _place(tensor: torch.Tensor) -> Any:
    """Where it lies, as far as its kind says: those that are sparse, or not there yet, do not."""
    try:
        # The value of one without dimensions went with the launch.
        value = repr(tensor.item()) if not tensor.shape and tensor.is_cpu else None
        return tensor.data_ptr(), place_of(tensor), str(tensor.device), value
    except Exception:  # whatever its kind raises
        return ()
