"""What tells one model from another, for everything that is learnt about it."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

# Settings of a run, what saving a model adds, and where its files lie: the model is the same.
_PASSING = (
    *("architectures", "dtype", "name_or_path", "return_dict", "transformers_version"),
    "use_cache",
)
_SAMPLED = 8  # elements of each parameter

# Each model's fingerprints by the adapters in use.
_fingerprints: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


def fingerprint(model: Any) -> str:
    """Equal for models that write alike: what is learnt from outputs is kept under it.

    It depends on the configuration, on the adapters in use (of PEFT and of transformers) and on a
    sample of the weights, those of other adapters left out. Neither the folder that the model was
    loaded from, nor an update of transformers, nor settings of a run matter, such as the dtype.
    Weights are read once: a model keeps its fingerprint while it is trained. A runtime that is no
    module shows none.
    """
    if not isinstance(model, nn.Module):
        return config_fingerprint(model.config)
    in_use = {name for layer in _adapted_layers(model) for name in _in_use(layer)}
    adapters = json.dumps(sorted(in_use))
    known = _fingerprints.setdefault(model, {})
    if adapters not in known:
        facts = config_fingerprint(model.config) + adapters + _weights_digest(model)
        known[adapters] = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return known[adapters]


def config_fingerprint(config: Any) -> str:
    """Equal for configurations of one architecture, its vocabulary and sizes among them."""
    try:
        settings = _lasting(config.to_diff_dict())
        text = json.dumps(settings, sort_keys=True, default=_named)
    except Exception:  # something in it nests too deeply, or is no setting and raises
        plain = (bool, int, float, str)
        settings = {name: x for name, x in vars(config).items() if type(x) in plain}
        text = json.dumps(_lasting(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _named(value: Any) -> str:
    """What stands for an object that JSON does not know."""
    known = isinstance(value, torch.dtype | torch.device | set | frozenset)
    return str(value) if known else type(value).__qualname__


def _lasting(settings: Any) -> Any:
    """The settings, those of nested configurations among them, without passing ones."""
    if not isinstance(settings, dict):
        return settings
    return {
        str(name): _lasting(value)
        for name, value in settings.items()
        if str(name).removeprefix("_") not in _PASSING
        and not str(name).startswith(("output_", "_attn"))
    }


def _adapted_layers(model: nn.Module) -> list[Any]:
    """Modules with adapters, which PEFT puts in the places of the model's own."""
    from ..structures.modules import modules_of  # here, since it imports transformers

    layers = modules_of(model)
    kinds = {kind for kind in set(map(type, layers)) if hasattr(kind, "adapter_layer_names")}
    return [layer for layer in layers if type(layer) in kinds] if kinds else []


def _in_use(layer: Any) -> list[str]:
    """Names of the adapters that change what a layer computes."""
    if layer.disable_adapters:
        return list(layer.merged_adapters)
    return [*layer.active_adapters, *layer.merged_adapters]


def _weights_digest(model: nn.Module) -> str:
    """Hash of a few elements of every parameter of the model and of its adapters in use."""
    digest = hashlib.sha256()
    unused = {id(parameter) for layer in _adapted_layers(model) for parameter in _unused(layer)}
    for name, parameter in sorted(model.named_parameters(), key=itemgetter(0)):
        if id(parameter) not in unused:
            digest.update(name.replace(".base_layer.", ".").encode())
            digest.update(_facts(parameter))
    return digest.hexdigest()


def _facts(parameter: Tensor) -> bytes:
    """A parameter's shape and a few of its elements, as far as its kind has some: those that are
    sparse, packed or not there yet have not."""
    try:
        return f" {tuple(parameter.shape)}".encode() + _sample(parameter.detach())
    except Exception:  # whatever its kind raises
        return b""


def _unused(layer: Any) -> Iterator[Tensor]:
    """Parameters of adapters that are not in use."""
    used = _in_use(layer)
    for part in layer.adapter_layer_names:
        try:
            held = attrgetter(part)(layer)  # parts of parts are named with dots
        except AttributeError:  # this one has no such part
            continue
        if isinstance(held, (nn.ModuleDict, nn.ParameterDict)):
            for name, adapter in held.items():
                if name not in used:
                    yield from adapter.parameters() if isinstance(adapter, nn.Module) else [adapter]


def _sample(parameter: Tensor) -> bytes:
    """Elements at equal distances, in the coarsest dtype that models are loaded in.

    None where the values are elsewhere: on the meta device (offloaded) or with other processes.
    """
    if parameter.is_meta or not parameter.numel() or type(parameter) is not Tensor:
        return b""
    flat = parameter.reshape(-1)
    # Double precision: single knows no places above 2**24.
    count = min(_SAMPLED, len(flat))
    places = torch.linspace(0, len(flat) - 1, count, dtype=torch.float64, device="cpu")
    values = flat[places.long().to(flat.device)]
    return values.to(torch.bfloat16).float().cpu().numpy().tobytes()
