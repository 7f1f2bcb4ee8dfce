"""What a recorded forward has taken for granted, as a value that can be compared.

That is: where tensors lie, what modules keep beside them, and what PyTorch takes from the running
thread and the process. Nothing can be known of what others' hooks do next, so a model that has some
is not recorded. Nothing is kept alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from ..host.callers_hooks import is_callers
from ..host.hook_state import LIBRARIES, PACKAGE, DeepTeller, written_in
from ..host.model_state import torch_settings
from ..host.told import Told
from ..host.transformers_private import global_hooks, hooks_of, own_forwards
from ..structures.modules import modules_of
from ..system import changes

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
    strange += [own for own in own_forwards(modules) if written_in(own) not in LIBRARIES]
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
        told = [reader.tell(part) for part in (model, passed, torch_settings())]
        state = Told(reader, told)
    except Exception:  # whatever an object raises that is looked into:
        return None  # nobody can tell whether it stays as it is
    return None if reader.untold else (changes.said(), state)


class _Reader(DeepTeller):
    """Tells modules by what they hold, and tensors by where they lie."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.whole = True

    def hooks(self, module: nn.Module) -> list[Any]:
        always = vars(module)["_forward_hooks_always_called"]
        # The package's own look at a thread's forwards and change nothing.
        return [
            part
            for hook in hooks_of(module)
            if written_in(hook.called) != PACKAGE
            for part in (hook.called, hook.keywords, hook.number in always)
        ]
