"""Attention whose projections, norms of heads and rotation are one operation.

A module is of this kind if it hands the cache, the attention function and its last projection what
:class:`_Attention` hands them, and returns the same, whatever these make of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .fusions import Fused, plain_forward
from .linear import linear, linears
from .norm import norm_arguments
from .scopes import attending, is_exchangeable
from .skinny import are_unobserved, can_turn, turn_heads
from .trials import Call, Trial, has_parts

__all__ = ["self_attention_of"]

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_LINEARS = (*_PROJECTIONS, "o_proj")
_NORMS = ("q_norm", "k_norm")
_INPUTS = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values")


@dataclass(frozen=True)
class _Attention:
    """How a module's own forward is repeated.

    Attributes:
        attention_of: the name of the attention implementation that a configuration asks for.
        options: what its attention function is told: attributes of these names of the module, or
            of its configuration.
    """

    attention_of: Callable[[Any], str]
    options: tuple[tuple[str, bool], ...]

    def __call__(
        self,
        module: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, Any] | None:
        name = self.attention_of(module.config)
        if module.training or name not in ALL_ATTENTION_FUNCTIONS or position_embeddings is None:
            return None
        heads = _heads(module, hidden_states, *position_embeddings)
        if heads is None:
            return None
        query, key, value = heads
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, module.layer_idx)
        own = {
            option: getattr(module.config if configured else module, option)
            for option, configured in self.options
        }
        output, weights = ALL_ATTENTION_FUNCTIONS[name](
            module, query, key, value, attention_mask, dropout=0.0, **own, **options
        )
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return linears(output, module._modules["o_proj"])[0], weights


def _heads(
    module: Any, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> list[torch.Tensor] | None:
    """Queries, keys and values; None where the module itself has to compute them."""
    parts = module._modules
    layers, depth = [parts[name] for name in _PROJECTIONS], module.head_dim
    norms: list[Any] = [norm_arguments(parts[name]) if name in parts else () for name in _NORMS]
    if (
        {type(layer) for layer in layers} != {nn.Linear}
        or F.linear is not linear
        or not are_unobserved(layers)
        or None in norms
        or not can_turn(x, cosines, sines, depth, norms)
    ):
        return None
    return turn_heads(linears(x, *layers), cosines, sines, depth, norms)


class _Cache:
    """Sees what it is given, and returns something else."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def update(self, keys: torch.Tensor, values: torch.Tensor, *inputs: Any, **options: Any) -> Any:
        self._trial.see("cache", keys, values, inputs, options)
        return keys + 1, values - 1


class _Watched:
    """Sees what an attention function is given, and returns something else.

    Attributes:
        options: what it was told last.
    """

    def __init__(self, trial: Trial, depth: int) -> None:
        self.options: dict[str, Any] = {}
        self._trial = trial
        self._result = trial.rows("o_proj").unflatten(-1, (-1, depth))

    def __call__(self, plain: Any, module: Any, *inputs: Any, **options: Any) -> tuple[Any, Any]:
        self.options = options
        self._trial.see("attention", inputs, sorted(options.items()))
        return self._result.clone(), "weights"


def self_attention_of(module: Any, attention_of: Callable[[Any], str]) -> Fused | None:
    """How a module of attention, as it is now, is computed; None of others."""
    if not has_parts(module, _LINEARS, _NORMS) or not _is_called_so(module):
        return None
    name, depth = attention_of(module.config), module.head_dim
    trial = Trial(module, _LINEARS)
    rows = trial.rows("q_proj")
    if not is_exchangeable(name) or trial.rows("o_proj").shape[-1] % depth:
        return None
    watched = _Watched(trial, depth)
    tables = [trial.numbers(depth) for _ in range(2)]
    calls: tuple[Call, ...] = (
        ((rows, tables, "mask", _Cache(trial)), {"told": "to all"}),
        ((rows, tables, None), {}),
    )
    with attending(name, {module}, watched):
        trial.gives_same(plain_forward(module), *calls)  # which shows its options
        ours = _Attention(attention_of, _own_options(module, watched.options))
        return ours if trial.gives_same(ours, *calls) else None


def _is_called_so(module: Any) -> bool:
    """Whether a module's forward has the arguments of ours, and the attributes that it reads."""
    parameters = inspect.signature(plain_forward(module)).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    others = [p.kind for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD]
    return (
        names[1:] == [*_INPUTS]
        and others in ([], [inspect.Parameter.VAR_KEYWORD])
        and all(hasattr(module, name) for name in ("config", "layer_idx"))
        and isinstance(getattr(module, "head_dim", None), int)
    )


def _own_options(module: Any, options: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
    """Which of the options of its attention function are attributes of that name, each of the
    module or of its configuration.
    """
    known = [name for name in options if hasattr(module, name) or hasattr(module.config, name)]
    return tuple((name, not hasattr(module, name)) for name in known)
