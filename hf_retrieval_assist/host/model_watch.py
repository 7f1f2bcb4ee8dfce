"""Whether code of the caller's, asked at each token of a call, has changed the model.

Calls in which none runs between forwards do without: whoever changes their model does so from
another thread, and plain decoding does not say what then comes out either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..structures.lookups import Lookups, Snapshot
from ..system import changes
from ..system.modules import modules_of
from .lookups import configurations_of
from .model_state import torch_settings
from .plain_step import why_exchanged


class ModelWatch:
    """Notices that a model is changed between one of its forwards and the next.

    What modules, their parameters, buffers, hooks and attributes are, what lists and dictionaries
    among these hold, the configuration, where tensors lie and writes that PyTorch counts, what the
    forward looks up, what operators take from PyTorch, and what the loop asks of the model.

    Args:
        model: to look at.
        lookups: of its forward.
    """

    def __init__(self, model: nn.Module, lookups: Lookups) -> None:
        self._model, self._lookups = model, lookups
        modules = [*modules_of(model)]
        dicts: list[dict[str, Any]] = [vars(config) for config in configurations_of(model)]
        lists: list[list[Any]] = []
        tensors: list[torch.Tensor] = []
        for module in modules:
            for value in vars(module).values():
                _gather(value, dicts, lists, tensors)
        each = {id(x): x for x in tensors}
        self._snapshot = Snapshot(modules, dicts, lists, [*each.values()])
        self._said, self._settings = changes.said(), torch_settings()

    def look(self) -> None:
        """Take the model as it is now for what the last forward has left."""
        self._snapshot.take()
        self._said, self._settings = changes.said(), torch_settings()

    @property
    def changed(self) -> bool:
        """Whether it is another one than when it was last looked at."""
        return (
            self._said != changes.said()
            or not self._snapshot.is_same()
            or self._settings != torch_settings()
            or self._lookups.changed() is not None
            or why_exchanged(self._model) is not None
        )


def _gather(value: Any, dicts: list[Any], lists: list[Any], tensors: list[Any]) -> None:
    """An attribute's own containers, and the tensors in them."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, dict):
        dicts.append(value)
        tensors += [held for held in value.values() if isinstance(held, torch.Tensor)]
    elif type(value) is list:
        lists.append(value)
        tensors += [held for held in value if isinstance(held, torch.Tensor)]
