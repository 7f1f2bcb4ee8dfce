"""What of a model decides how its forwards compute, beside inputs: a key, read as a call begins.

Hooks, adapters, functions and settings come and go between calls. What was found out about a
model's forwards holds while the key's structure is the same, and what was recorded of them while
the whole key is. Attributes that forwards themselves change are left out of the structure, see
:func:`note_moves`. Changes deep within objects that a module holds are not seen, nor writes that
PyTorch does not count; `model_changed()` says them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
    cache_utils,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..structures.modules import (
    INTERNAL,
    memory_of,
    modules_of,
    names_of,
    own_attributes,
    setting_of,
    told,
    told_of,
)
from ..system import changes
from .transformers_private import (
    OWN_NAMES,
    Hook,
    active_modes,
    attention_of,
    global_hooks,
    hooks_of,
)
from .written import PACKAGE, is_librarys, written_in

_LEFT_OUT = INTERNAL | OWN_NAMES

# PyTorch's settings by which operators compute.
_SETTINGS = (
    *("is_inference_mode_enabled", "is_grad_enabled", "get_default_dtype"),
    *("are_deterministic_algorithms_enabled", "get_float32_matmul_precision"),
    *(f"backends.{name}" for name in ("fp32_precision", "cudnn.allow_tf32", "cudnn.deterministic")),
    *(f"backends.mkldnn.{name}" for name in ("enabled", "deterministic")),
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

# Where forwards look names up beside the modules that their classes were written in.
_SPACES = (
    *("torch", "torch.nn.functional", "torch.nn.modules.module", "accelerate.hooks"),
    *(
        f"transformers.{name}"
        for name in (
            *("activations", "cache_utils", "generation.utils", "masking_utils", "modeling_layers"),
            *("modeling_flash_attention_utils", "modeling_rope_utils", "pytorch_utils"),
            *(f"integrations.{name}_attention" for name in ("sdpa", "flash", "flex", "eager")),
            "integrations.moe",
        )
    ),
)

ASIDE = frozenset((*PreTrainedModel.__mro__, *torch.Tensor.__mro__, *LogitsProcessorList.__mro__))
"""Classes in whose modules forwards look nothing up."""

# Classes whose methods the loop and forwards call.
_KINDS = (
    *(kind for kind in vars(cache_utils).values() if isinstance(kind, type)),
    *(LogitsProcessorList, StoppingCriteriaList, torch.Tensor),
)

Moving = dict[int, set[str]]
"""Names of attributes, by the addresses of modules and configurations, that forwards change."""


class ModelKey(NamedTuple):
    """Both parts are compared, and keep nothing alive.

    Attributes:
        structure: a verdict holds while this is equal.
        memory: a recording holds while both are.
    """

    structure: Any
    memory: Any


def structure_of(model: nn.Module, moving: Moving | None = None) -> Any:
    """What stands for its modules' forwards, attributes and configurations but moving ones, the
    kinds of their weights, hooks, the functions that they name, and how PyTorch computes."""
    return _read(model, moving or {})[0]


def key_of(model: nn.Module, arguments: Mapping[str, Any] | None = None) -> ModelKey:
    """The structure, nothing left out, and where tensors lie.

    Args:
        arguments: of a call, told beside; tensors among them are forwards' inputs.
    """
    structure, modules = _read(model, {})
    bound = [told(hook.called) for hook in _hooks(modules)]
    given = [(name, told(value)) for name, value in (arguments or {}).items()]
    return ModelKey(structure, (memory_of(modules, _LEFT_OUT), bound, given))


def recording_key(
    model: nn.Module, arguments: Mapping[str, Any], device: torch.device
) -> ModelKey | None:
    """The key of what is recorded on a device; None where nothing may be.

    Args:
        arguments: keyword arguments of the call. Tensors that reach a forward are not recorded at
            all, and caches are the verifier's.
        device: of the model.
    """
    if is_autocast(device):
        return None
    held = (torch.Tensor, cache_utils.Cache)
    return key_of(model, {n: x for n, x in arguments.items() if not isinstance(x, held)})


def is_autocast(device: torch.device) -> bool:
    """Whether copies of weights are kept on a device that are gone once a scope ends."""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _read(model: nn.Module, moving: Moving) -> tuple[Any, list[nn.Module]]:
    modules = modules_of(model)
    attributes, configs = told_of(modules, moving, _LEFT_OUT)
    for config in _with_inner(configs):
        names = moving.get(id(config), ())
        attributes += [
            told(x) for pair in vars(config).items() if pair[0] not in names for x in pair
        ]
        attributes += map(id, attention_functions(config))
    kinds = {type(module): None for module in modules}
    names = names_of([*kinds, *_KINDS], ASIDE, [space for _, space in spaces()])
    # Libraries register hooks anew for every call, with what is bound to them.
    hooks = [
        (id(getattr(hook.called, "func", hook.called)), hook.keywords) for hook in _hooks(modules)
    ]
    return (changes.said(), attributes, names, hooks, torch_settings()), modules


def spaces() -> list[tuple[str, dict[str, Any]]]:
    """The modules that forwards look names up in beside those of their classes, as far as they are
    loaded: their names, and what they hold."""
    loaded = [(name, sys.modules.get(name)) for name in _SPACES]
    return [(name, vars(module)) for name, module in loaded if module is not None]


def _hooks(modules: list[nn.Module]) -> list[Hook]:
    """Those that may change a forward. The package's own look at that of some thread, and so do
    libraries' hooks of all modules."""
    found = [hook for hook in hooks_of(*modules) if not written_in(hook.called).startswith(PACKAGE)]
    return [*(hook for hook in global_hooks() if not is_librarys(hook.called)), *found]


def torch_settings() -> tuple[Any, ...]:
    """What operators take from the running thread and the process."""
    device = str(torch.get_default_device())
    return *map(torch_setting, _SETTINGS), autocast_dtypes(), device, *map(type, active_modes())


def torch_setting(name: str) -> Any:
    """PyTorch's; some raise where others have set the same thing by another name."""
    try:
        found = attrgetter(name)(torch)
        return found() if callable(found) else found
    except (AttributeError, RuntimeError) as error:
        return type(error)


def autocast_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes that operators compute in where autocast changes that."""
    enabled = filter(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps"))
    return tuple(map(torch.get_autocast_dtype, enabled))


def attention_functions(config: PreTrainedConfig) -> Iterator[Any]:
    """What computes a configuration's attention and its masks, as it was registered."""
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        if (function := registry.get(attention_of(config))) is not None:
            yield getattr(function, "stands_for", function)


def configurations_of(modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    """The configurations of modules, and those within them, each once."""
    held = {id(x): x for module in modules if (x := vars(module).get("config")) is not None}
    return _with_inner(x for x in held.values() if issubclass(type(x), PreTrainedConfig))


def _with_inner(configs: Iterable[PreTrainedConfig]) -> list[PreTrainedConfig]:
    found = [*configs]
    for config in found:  # which become more
        inner = (x for x in vars(config).values() if issubclass(type(x), PreTrainedConfig))
        found += [one for one in inner if all(one is not other for other in found)]
    return found


def attributes_of(model: nn.Module) -> dict[tuple[int, str], Any]:
    """What is told of each attribute of modules and configurations, by address and name."""
    modules = modules_of(model)
    found = {
        (id(owner), name): told(value)
        for owner in configurations_of(modules)
        for name, value in vars(owner).items()
    }
    for module in modules:
        for name, value in own_attributes(module, _LEFT_OUT).items():
            found[id(module), name] = told(value)
        for name, buffer in module._buffers.items():
            found[id(module), name] = setting_of(buffer)
    return found


def note_moves(moving: Moving, before: dict[tuple[int, str], Any], model: nn.Module) -> bool:
    """Add the attributes that are others than before, though no caller was asked: forwards change
    them. Whether there are some."""
    now = attributes_of(model)
    moved = [at for at in before.keys() | now.keys() if before.get(at, ...) != now.get(at, ...)]
    for owner, name in moved:
        moving.setdefault(owner, set()).add(name)
    return bool(moved)
