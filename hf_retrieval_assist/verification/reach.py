"""How far the forwards of a model may reach: what it makes of a position may depend on others.

RoPE that follows the length of the text (dynamic, longrope) takes one set of frequencies for all
tokens of a forward, by its furthest position. Plain decoding feeds one token after another, so each
has the frequencies of its own length. Drafts are cut at such a border, and where every position has
frequencies of its own nothing is drafted. A table of learned positions ends the drafts as well.
Some models drop their cache at a length and process the whole text once more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin

from ..host.positions import named_lengths, position_limit
from ..host.transformers_private import input_device


@dataclass(frozen=True)
class Reach:
    """Where tokens of one forward are not processed as one by one.

    Attributes:
        borders: positions, ascending, that no forward may have on both sides: the first one behind
            the border is named.
        apart_from: the position from which on no two may be in one forward; None: there is none.
        end: the first position that a table does not hold; None: there is no table.
        restart: a length of the text at which the model drops its cache; None: it never does.
    """

    borders: tuple[int, ...] = ()
    apart_from: int | None = None
    end: int | None = None
    restart: int | None = None

    def room(self, position: int) -> int | None:
        """How far behind a position a forward may reach; None without limit."""
        if self.apart_from is not None and position >= self.apart_from:
            return 0
        stops = (*self.borders, self.apart_from, self.end)
        ahead = [stop for stop in stops if stop is not None and stop > position]
        return min(ahead) - 1 - position if ahead else None

    def meets(self, start: int, stop: int) -> bool:
        """Whether positions from `start` to before `stop` are not all processed alike."""
        apart = self.apart_from is not None and stop > self.apart_from
        return apart or any(start < border < stop for border in self.borders)


UNLIMITED = Reach()


def find_reach(model: Any, cache_name: str) -> Reach:
    """The reach of a model, by its kinds of RoPE, its tables and how it prepares its inputs."""
    ropes = {rope for module in model.modules() for rope in _ropes(module)}
    end = position_limit(model)
    return Reach(
        tuple(sorted(length for kind, length in ropes if kind == "longrope")),
        min((length for kind, length in ropes if "dynamic" in kind), default=None),
        None if end == sys.maxsize else end,
        _restart(model, cache_name),
    )


def _ropes(module: nn.Module) -> Iterator[tuple[str, int]]:
    """The kinds of RoPE that a module computes, and the length at which each changes."""
    kinds, config = getattr(module, "rope_type", None), getattr(module, "config", None)
    if kinds is None or config is None:
        return
    for layer, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
        parameters: Any = getattr(config, "rope_parameters", None) or {}
        parameters = parameters if layer is None else parameters.get(layer) or {}
        longest: int = getattr(config, "max_position_embeddings", 0)
        if kind == "longrope":
            longest = parameters.get("original_max_position_embeddings") or longest
        yield str(kind), longest


def _restart(model: Any, cache_name: str) -> int | None:
    """The first length, of those that the configuration names, at which a model drops its cache
    while it prepares its inputs."""
    own: Any = type(model).prepare_inputs_for_generation
    if own is GenerationMixin.prepare_inputs_for_generation or model.config.is_encoder_decoder:
        return None
    if _starts_anew(model, 3, cache_name):
        return None  # It makes something else of its inputs, whatever the length.
    named = named_lengths(model.config.get_text_config(decoder=True))
    near = sorted({length + offset for length in named for offset in range(3)})
    return next((length for length in near if _starts_anew(model, length, cache_name)), None)


def _starts_anew(model: Any, length: int, cache_name: str) -> bool:
    """Whether a text of this length, of which the cache holds all but the last token, is fed from
    its start."""
    ids = torch.ones((1, length), dtype=torch.long, device=input_device(model))
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.get_seq_length = lambda *_: length - 1
    given = {cache_name: cache, "attention_mask": torch.ones_like(ids), "use_cache": True}
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **given)
    return inputs.get(cache_name) is not cache
