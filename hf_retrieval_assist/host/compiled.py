"""What a call's forwards are compiled to, and how they can be recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig

from . import transformers_private as private


@dataclass(frozen=True)
class Compiled:
    """What is called in a model's place after the prompt.

    Attributes:
        call: what plain decoding calls.
        recordable: the same kernels without CUDA graphs of their own; None: there is no such thing.
        widens: whether few graphs serve all widths, their sizes being variables.
    """

    call: Callable[..., Any]
    recordable: Callable[..., Any] | None = None
    widens: bool = False


def compiled_forward(
    model: Any, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Compiled | None:
    """What the model's caller has compiled, in place or for `generate`; None: nothing.

    Args:
        model_kwargs: `generate`'s, with the cache that it made or was given.
    """
    if parts := private.compiled_parts(model):
        alone = any(map(private.makes_graphs, parts))
        return Compiled(model.__call__, None if alone else model.__call__)
    call = private.compiled_call(model, config, model_kwargs)
    if call is None:
        return None
    options = (config.compile_config or CompileConfig()).to_dict()
    widens = options["dynamic"] is not False and private.sizes_become_variables()
    recordable = _without_graphs(model, options) if private.makes_graphs(call) else call
    return Compiled(call, recordable, widens)


def _without_graphs(model: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """The model compiled by the same options, but for graphs of its own.

    torch knows code again that was compiled by equal options, so it is not kept here.
    """
    mode, given = options["mode"], options["options"] or {}
    of_mode = private.options_of_mode(mode) if mode else {}
    given = of_mode | given | {"triton.cudagraphs": False}
    compiled: Callable[..., Any] = torch.compile(
        model.__call__, **(options | {"mode": None, "options": given})
    )
    return compiled
