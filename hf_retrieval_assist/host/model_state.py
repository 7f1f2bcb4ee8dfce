"""What of a model decides how its forwards compute, beside inputs: a key that is cheap to ask.

Hooks, adapters and settings come and go between calls. What was found out about a model's forwards
holds while its key is the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

from torch import nn

from .transformers_private import GRADIENT_HOOKS, attention_of, numbered_hooks

# What every module keeps of itself.
INTERNAL = frozenset(vars(nn.Module())) - {"training"} | GRADIENT_HOOKS

_PACKAGE = __name__.partition(".")[0]

_SCALARS = (bool, int, float, str, type(None))
_PLAIN = (*_SCALARS, tuple, list, dict)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """A model and its parts, each once, in a tenth of the time of `model.modules()`."""
    found, waiting = {id(model): model}, [model]
    while waiting:
        for part in waiting.pop()._modules.values():
            if part is not None and id(part) not in found:
                found[id(part)] = part
                waiting.append(part)
    return list(found.values())


def model_settings(model: nn.Module) -> Hashable:
    """Every plain attribute of its modules, their hooks, and how attention is computed.

    What a recording takes for granted is more, and dearer to ask: see
    :mod:`~hf_retrieval_assist.verification.recorded_state`.
    """
    config = getattr(model, "config", None)
    return (
        hash(tuple(map(_settings, modules_of(model)))),
        None if config is None else attention_of(config),
    )


def _settings(module: nn.Module) -> Hashable:
    """A module's plain attributes, its hooks and what stands for its forward."""
    own = vars(module)
    plain = tuple(
        [
            # −1 and −2 have the same hash.
            (name, value if type(value) in _SCALARS and value != -2 else repr(value))
            for name, value in own.items()
            if name not in INTERNAL and isinstance(value, _PLAIN)
        ]
    )
    # The package's own look at a forward of some thread, and change nothing.
    hooks = tuple(
        [
            _hook(number, hook)
            for number, hook in numbered_hooks(module)
            if getattr(hook, "__module__", "").partition(".")[0] != _PACKAGE
        ]
    )
    return type(module), id(own.get("forward")), hooks, plain


def _hook(number: int, hook: Any) -> Hashable:
    """A hook's number, which no other one ever has; hooks that are registered anew for every call
    are told by what they call and with what, where that is plain."""
    if isinstance(hook, partial):
        values = (*hook.args, *hook.keywords.values())
        if all(isinstance(value, _PLAIN) for value in values):
            return id(hook.func), repr(hook.args), repr(hook.keywords)
    return number
