"""Hidden states of chosen depths of a transformers decoder, captured as it runs.

`output_hidden_states=True` keeps every layer's; a tap keeps what is asked for, of any model that
stacks its blocks in one `nn.ModuleList`, wrapped (PEFT), quantised or offloaded (accelerate).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

HiddenLayers: TypeAlias = tuple[int, ...] | Callable[[int], tuple[int, ...]]
"""Boundaries of a residual stream, or what gives them for a number of blocks."""


class FeatureTaps:
    """Captures boundaries of the residual stream during the forwards inside `with taps:`.

    Only forwards of the thread that entered are captured, so that several threads may tap one
    model. Taps are used by one thread at a time, and may be entered again and again; outside,
    nothing is left on the model.

    Args:
        model: a decoder-only transformers model, or a wrapper around one.
        layers: sets of boundaries k in [0, blocks): the input of block k, which transformers calls
            `hidden_states[k]`; −1 and the number of blocks: what the decoder returns, after its
            final norm. Or what gives them, told that number. Without any set, entering does
            nothing.

    Raises:
        ValueError: a boundary does not exist, or the blocks cannot be found.
    """

    def __init__(self, model: Any, layers: Sequence[HiddenLayers]) -> None:
        self.layers = tuple(layers)
        self._boundaries_of: dict[HiddenLayers, tuple[int, ...]] = {}
        if layers:
            self._decoder, self._blocks = find_blocks(model)
            total = len(self._blocks)
            for asked in layers:
                named = asked(total) if callable(asked) else asked
                self._boundaries_of[asked] = tuple(-1 if k == total else k for k in named)
        self._boundaries = {k for named in self._boundaries_of.values() for k in named}
        for boundary in self._boundaries:
            if not -1 <= boundary < len(self._blocks):
                raise ValueError(
                    f"boundaries: expected -1 or 0 to {len(self._blocks) - 1} for a model of "
                    f"{len(self._blocks)} blocks, got {boundary}"
                )
        self._captured: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._thread = 0

    @property
    def features(self) -> dict[HiddenLayers, Tensor]:
        """Each set of layers' [batch, n, widths of its boundaries] of the last forward, on one
        device.

        Raises:
            RuntimeError: no forward has passed through the hooks.
        """
        missing = sorted(self._boundaries - self._captured.keys())
        if missing:
            raise RuntimeError(
                f"no hidden states at boundaries {missing}: either no forward has run inside the "
                "tap, or it bypassed the hooks of the model's blocks (as a model does that was "
                "compiled before the tap was entered: run it uncompiled, or compile it later)"
            )
        found = {}
        for asked, boundaries in self._boundaries_of.items():
            parts = [self._captured[k] for k in boundaries]
            device = parts[-1].device
            found[asked] = torch.cat([part.to(device) for part in parts], dim=-1)
        return found

    def of_rows(self, places: Sequence[Sequence[int]]) -> list[dict[HiddenLayers, Tensor]]:
        """The same of some rows' tokens, [tokens, width] each, one gather for all rows.

        Args:
            places: of each row's tokens among all tokens of the last forward.
        """
        counts, of_all = [len(row) for row in places], [place for row in places for place in row]
        found = {
            boundaries: features.flatten(0, 1)[of_all].split(counts)
            for boundaries, features in self.features.items()
        }
        return [{name: rows[i] for name, rows in found.items()} for i in range(len(places))]

    def shown(self) -> dict[int, Tensor]:
        """What the last forward showed, by boundary."""
        return dict(self._captured)

    def show(self, shown: dict[int, Tensor]) -> None:
        """Stand in for the hooks of a forward that ran without the model's modules."""
        self._captured = dict(shown)

    def __enter__(self) -> FeatureTaps:
        self._captured.clear()
        self._thread = threading.get_ident()
        if self._boundaries:
            begin = self._decoder.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
            self._handles = [begin, *map(self._hook, self._boundaries)]
        return self

    def __exit__(self, *error: Any) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, boundary: int) -> RemovableHandle:
        if boundary < 0:
            return self._decoder.register_forward_hook(self._tap_output)

        def tap_input(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._tap(boundary, args[0] if args else kwargs.get("hidden_states"))

        return self._blocks[boundary].register_forward_pre_hook(tap_input, with_kwargs=True)

    def _tap_output(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._tap(-1, output if isinstance(output, Tensor) else output[0])

    def _tap(self, boundary: int, hidden: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            found = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise RuntimeError(f"expected hidden states [batch, n, width], found {found}")
        self._captured[boundary] = hidden.detach()

    def _begin_forward(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A forward that fails to reach a hook must not show the one before it, and one that may
        skip positions in its last blocks must not."""
        if threading.get_ident() != self._thread:
            return None
        self._captured.clear()
        return (args, {**kwargs, "logits_to_keep": 0}) if "logits_to_keep" in kwargs else None


def find_blocks(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """The text decoder of a model and the list of its blocks.

    The list is the one with as many members as the config counts layers; among several (a model
    may keep small per-layer parts in lists too) the one with the most parameters. The decoder is
    the module that holds it.

    Raises:
        ValueError: the model has no config that counts its layers, or no such list.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ValueError(f"model: expected a transformers model, got {type(model).__name__}")
    count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    for root in (decoder, model):
        lists = [] if root is None else _lists_of(root, count)
        if lists:
            return max(lists, key=lambda found: sum(p.numel() for p in found[1].parameters()))
    raise ValueError(
        f"model: expected an nn.ModuleList of num_hidden_layers = {count} blocks in "
        f"{type(model).__name__}, found none"
    )


def _lists_of(root: nn.Module, count: int | None) -> list[tuple[nn.Module, nn.ModuleList]]:
    """Every list of `count` modules below `root`, with the module that holds it."""
    return [
        (parent, child)
        for parent in root.modules()
        for child in parent.children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
