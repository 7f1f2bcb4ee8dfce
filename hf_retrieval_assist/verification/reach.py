"""How far forwards of a model may reach: what it makes of a position may depend on others.

RoPE that follows the length of the text (dynamic, longrope) takes one set of frequencies for all
tokens of a forward, by its furthest position. Plain decoding feeds one token after another, so each
has the frequencies of its own length. Where drafts would reach over such a border they are cut, and
where every position has frequencies of its own nothing is drafted. Other models start anew at some
length: they drop their cache and process the whole text once more.

Neither is known by name. The modules that are given positions are found while the model is tested,
and asked alone, round every length that the configuration or they themselves name; so is how the
model prepares its inputs.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin

from ..host.transformers_private import input_device

# Tokens of the forwards that modules are asked with.
_ASKED = 8


@dataclass(frozen=True)
class Reach:
    """Where tokens of one forward are not processed as one by one.

    Attributes:
        borders: positions, ascending, that no forward may have on both sides: the first one behind
            the border is named.
        apart_from: the position from which on no two may be in one forward; None: there is none.
        restarts: lengths of the text, ascending, at which the model drops its cache.
    """

    borders: tuple[int, ...] = ()
    apart_from: int | None = None
    restarts: tuple[int, ...] = ()

    def room(self, position: int) -> int | None:
        """How far behind a position a forward may reach; None without limit."""
        if self.apart_from is not None and position >= self.apart_from:
            return 0
        ahead = [border for border in self._borders if border > position]
        return min(ahead) - 1 - position if ahead else None

    def meets(self, start: int, stop: int) -> bool:
        """Whether positions from `start` to before `stop` are not all processed alike."""
        apart = self.apart_from is not None and stop > self.apart_from
        return apart or any(start < border < stop for border in self.borders)

    def restarts_before(self, stop: int) -> bool:
        """Whether the model drops its cache of a text that may get to before this length: in the
        prefill where the prompt is longer."""
        return any(length < stop for length in self.restarts)

    @property
    def _borders(self) -> tuple[int, ...]:
        return self.borders if self.apart_from is None else (*self.borders, self.apart_from)


UNLIMITED = Reach()


def find_reach(model: Any, modules: PositionModules, cache_name: str) -> Reach:
    """The reach of a model whose modules were watched during a forward."""
    named = named_lengths(model.config.get_text_config(decoder=True).to_dict())
    lengths = sorted({*named, *modules.named_lengths()})
    found = [modules.borders(lengths)] if lengths else []
    borders = sorted({border for some, _ in found for border in some})
    apart = [start for _, start in found if start is not None]
    return Reach(
        tuple(borders), min(apart, default=None), tuple(_restarts(model, named, cache_name))
    )


def named_lengths(settings: dict[str, Any]) -> set[int]:
    """Numbers of positions that settings name, those of settings within them included."""
    found: set[int] = set()
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= named_lengths(value)
        elif type(value) is int and value >= _ASKED and any(w in str(name) for w in _LENGTHS):
            found.add(value)
    return found


_LENGTHS = ("position", "length", "seq_len", "context")


@dataclass
class _Asked:
    """A module as a forward first called it.

    Attributes:
        place: the argument that holds positions, by number or by name.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | str

    @property
    def positions(self) -> torch.Tensor:
        held: Any = self.args if isinstance(self.place, int) else self.kwargs
        return held[self.place]


class PositionModules:
    """Scope of forwards in which modules are noted that are given positions and hold no parameters.

    What forwards change in them is put back at its end, since plain decoding would not have
    changed it.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._handles: list[Any] = []
        self._asked: dict[tuple[int, str], _Asked] = {}
        self._before: list[tuple[nn.Module, dict[str, Any], dict[str, torch.Tensor]]] = []

    def __enter__(self) -> PositionModules:
        self._thread = threading.get_ident()
        for module in self._model.modules():
            if next(module.children(), None) is None and next(module.parameters(), None) is None:
                handle = module.register_forward_pre_hook(self._note, with_kwargs=True)
                self._handles.append(handle)
        return self

    def __exit__(self, *error: Any) -> None:
        while self._handles:
            self._handles.pop().remove()
        for module, settings, buffers in self._before:
            held = settings["_buffers"]
            vars(module).update(settings | {"_buffers": vars(module)["_buffers"]})
            for name, value in buffers.items():
                held[name].copy_(value)
            vars(module)["_buffers"].update(held)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        place = next((name for name, value in given if _is_positions(value)), None)
        plain = repr([value for _, value in given if not isinstance(value, torch.Tensor)])
        if place is None or (id(module), plain) in self._asked:
            return
        if not any(known is module for known, *_ in self._before):
            buffers = dict(vars(module)["_buffers"])
            copies = {name: b.clone() for name, b in buffers.items() if b is not None}
            self._before.append((module, vars(module) | {"_buffers": buffers}, copies))
        asked = _Asked(module, _on_cpu(args), _on_cpu(kwargs), place)
        self._asked[id(module), plain] = asked

    def named_lengths(self) -> set[int]:
        """Numbers of positions that the noted modules name themselves."""
        return {n for asked in self._asked.values() for n in named_lengths(vars(asked.module))}

    def borders(self, lengths: Iterable[int]) -> tuple[list[int], int | None]:
        """The borders next to any of these lengths, and the position from which on every one is
        processed apart from others; None: there is none."""
        found: list[int] = []
        for asked in self._asked.values():
            for length in lengths:
                crossed = [n for n in range(length - 1, length + 2) if _affects(asked, n - 1, n)]
                found += crossed
                # Far from any border that this length draws.
                if crossed and _affects(asked, 2 * length, 2 * length + 1):
                    return sorted({*found}), min(found)
        return sorted({*found}), None


def _is_positions(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and value.dtype is not torch.bool
        and value.ndim > 0
        and value.shape[-1] >= _ASKED
    )


def _affects(asked: _Asked, position: int, further: int) -> bool:
    """Whether a token at one position is processed otherwise where another one is further."""
    tokens = asked.positions.shape[-1]
    alone = torch.full_like(asked.positions, position)
    beside = alone.clone()
    beside[..., -1] = further
    try:
        pairs = [*zip(_ask(asked, alone), _ask(asked, beside), strict=True)]
    except (IndexError, RuntimeError, ValueError):
        return False  # Plain decoding cannot get to such a position either.
    differing = sum(int((one != other).sum()) for one, other in pairs)
    # More than what the last token alone brings.
    return differing * tokens > sum(one.numel() for one, _ in pairs)


def _ask(asked: _Asked, positions: torch.Tensor) -> list[torch.Tensor]:
    """What a copy of the module, as it is at the start of a text, makes of positions."""
    module = copy.copy(asked.module)
    vars(module).update(_on_cpu(vars(module)))
    vars(module)["_buffers"] = {
        name: None if buffer is None else buffer.detach().cpu().clone()
        for name, buffer in asked.module.named_buffers(recurse=False)
    }
    result: Any = None
    for given in (torch.zeros_like(positions), positions):
        args, kwargs = list(asked.args), dict(asked.kwargs)
        held: Any = args if isinstance(asked.place, int) else kwargs
        held[asked.place] = given
        result = type(module).forward(module, *args, **kwargs)
    return [part for part in _flat(result) if isinstance(part, torch.Tensor)]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return [value]
    return [part for member in value for part in _flat(member)]


def _on_cpu(values: Any) -> Any:
    """The same arguments or attributes, tensors among them being copies on the CPU."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().clone()
    if isinstance(values, dict):
        return {n: _on_cpu(v) if isinstance(v, torch.Tensor) else v for n, v in values.items()}
    if isinstance(values, tuple):
        return tuple(_on_cpu(v) if isinstance(v, torch.Tensor) else v for v in values)
    return values


class _Filled(DynamicCache):
    """A cache that says it holds so many tokens."""

    def __init__(self, config: Any, length: int):
        super().__init__(config=config)
        self._length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length


def _restarts(model: Any, lengths: Iterable[int], cache_name: str) -> list[int]:
    """Lengths of the text at which a model drops its cache while it prepares its inputs."""
    own = type(model).prepare_inputs_for_generation
    if own is GenerationMixin.prepare_inputs_for_generation or model.config.is_encoder_decoder:
        return []
    if _starts_anew(model, 3, cache_name):
        return []  # It makes something else of its inputs, whatever the length.
    near = {length + offset for length in lengths for offset in range(3)}
    return [length for length in sorted(near) if _starts_anew(model, length, cache_name)]


def _starts_anew(model: Any, length: int, cache_name: str) -> bool:
    """Whether a text of this length, of which the cache holds all but the last token, is fed from
    its start."""
    ids = torch.ones((1, length), dtype=torch.long, device=input_device(model))
    cache = _Filled(model.config.get_text_config(decoder=True), length - 1)
    given = {cache_name: cache, "attention_mask": torch.ones_like(ids), "use_cache": True}
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **given)
    return inputs.get(cache_name) is not cache
