"""transformers' paged cache as forwards of a step see it that an engine may repeat."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ...cache.slot_layers import RowSlots
from ...host.transformers_private import CACHE
from ...system.lazy import cached_property
from ...system.tensors import thread

# What a model is given of a step besides its cache.
_GIVEN = {"input_ids", "position_ids", "attention_mask", "logits_to_keep"}


class Pages(NamedTuple):
    """Which slots a forward of some texts sees of layers that lie in pages, and writes to.

    All are int64, those of slots behind a row, 0, in each of their rows.

    Attributes:
        slots: that are seen, those of each text behind one another.
        sources: [slots, 2]: where they lie; empty: all are new. New ones may lie anywhere.
        seen, written: [tokens, 2]: where new ones stand among these, and are to lie.
        runs: [texts, 6]: 0, the first of a text's tokens, how many it has, 0, the first of its
            slots among those that are seen, and the one behind its last.
    """

    slots: int
    sources: torch.Tensor
    seen: torch.Tensor
    written: torch.Tensor
    runs: torch.Tensor


class PagedStep:
    """Stands for a model's cache in the forward of a step, and for the model that is called.

    Args:
        cache: transformers' own.
        undo: writes back what the step has overwritten of windows.

    Attributes:
        forward: computes or repeats what the model is to compute.
        slots: knows how long the longest text is.
        given: to the model by transformers.
        pages: of layers of a kind.
    """

    forward: Any
    given: dict[str, Any]

    def __init__(self, cache: Any, undo: Callable[[], None]) -> None:
        self.cache, self.undo, self.forward = cache, undo, None
        self.pages: dict[str, Pages] = {}
        self.slots = RowSlots([0])

    @cached_property
    def layers(self) -> list[_PagedLayer]:
        """Those that are written to; their memory is of no use where nothing is repeated."""
        found, room = [], self.cache.max_tokens_read + self.cache.max_batch_tokens
        for kind, allocator in self.cache.cache_allocators.items():
            views = allocator._kv_token_views
            like = next(iter(views.values()))
            shown = [states.new_empty(room, *states.shape[1:]) for states in like]
            found += [_PagedLayer(self, n, pools, kind, shown) for n, pools in views.items()]
        return found

    def __call__(self, **given: Any) -> Any:
        """The outputs of the model."""
        self.given = given
        for kind, allocator in self.cache.cache_allocators.items():
            read, written = (given[name][allocator.index] for name in ("read_index", "write_index"))
            ends = given["cu_seq_lens_q"], given["cu_seq_lens_k"][allocator.layer_type]
            self.pages[kind] = _pages(*ends, given["input_ids"].shape[1], read, written)
        self.slots.set_lengths([int(given["position_ids"].max())])
        fed = {name: given[name] for name in _GIVEN & given.keys()}
        return self.forward(**fed, **{CACHE: self})

    def update(self, key: torch.Tensor, value: torch.Tensor, number: int, **_: Any) -> Any:
        """What a layer shows behind keys and values [1, heads, tokens, depth] of the step."""
        layer = next(layer for layer in self.layers if layer.number == number)
        update = layer.update if thread.recorder is None else partial(thread.recorder.update, layer)
        return update(key, value)


def _pages(
    fed: torch.Tensor, seen: torch.Tensor, tokens: int, read: torch.Tensor, written: torch.Tensor
) -> Pages:
    """Those of texts, of which it is told where their tokens end and the slots that they see, int32
    [1 + texts] from 0 on; `tokens`: with filler, which counts as the last text's."""
    own, none = fed.diff(), torch.zeros_like(seen[1:])
    pairs = zip(own.tolist(), seen[1:].tolist(), strict=True)
    new = torch.cat([torch.arange(end - count, end) for count, end in pairs])
    own[-1] += tokens - fed[-1]
    runs = torch.stack([none, fed[:-1], own, none, seen[:-1], seen[1:]], 1).long()
    return Pages(int(seen[-1]), _in_rows(read), _in_rows(new), _in_rows(written), runs)


def _in_rows(slots: torch.Tensor) -> torch.Tensor:
    """[slots, 2]: a row, the only one, and the slot."""
    return torch.stack([torch.zeros_like(slots), slots], 1)


class _PagedLayer:
    """One layer's part of a step, see :meth:`~...verification.engine.Engine.repeated`."""

    def __init__(self, step: PagedStep, number: int, pools: Any, kind: str, shown: Any) -> None:
        self._step, self.number, self._kind = step, number, kind
        self.pools, self.shown = pools, shown

    @property
    def pages(self) -> Pages:
        return self._step.pages[self._kind]

    def update(self, *new: torch.Tensor) -> Any:
        own = [states[:, :, : len(self.pages.written)] for states in new]  # filler is not written
        return self._step.cache.update(*own, self.number, dict(self._step.given))

    def get_seq_length(self) -> int:
        return 0

    def set_length(self, length: int) -> None:
        """Let what was written count for nothing."""
        if self is self._step.layers[0]:
            self._step.undo()
