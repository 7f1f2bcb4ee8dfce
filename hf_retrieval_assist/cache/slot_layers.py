"""Layers of a key-value cache in which rows grow by different amounts.

Slot s of a row holds the row's s-th cached token, whatever the other rows have accepted, so ragged
progress wastes no slots: a cache of rows with lengths l_i takes max(l_i) slots, and a verification
of n tokens n more. The nodes of a token tree are written behind each row's length; `keep` moves the
accepted path to the front of them, which costs O(accepted).

Layers whose heads are alike share one tensor, a :class:`Block`, so that where a forward writes and
what it shows is found once for all of them. Until a prefill has ended a layer keeps what it is
given, as transformers' own layers do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
)

from ..engines.cpu.recording import thread
from .blocks import SLACK, Block, Home, Kind

Places = tuple[torch.Tensor, torch.Tensor]
"""Rows [batch, 1] and slots [batch, width]."""


class RowSlots:
    """Where the next tokens of every row are written; shared by all layers of one cache.

    Attributes:
        lengths: kept slots per row.
        longest, shortest: the most and the fewest of any row.
        uniform: whether all rows have equally many.
        window: the largest of any layer; None: there is none.
        view_from: first slot shown to layers with a sliding window, while a tree is verified.
        places: rows and slots that the next tokens are written to, where tensors on the device say
            so: layers then show whole buffers, so that a forward depends on no number of the host.
            None: behind each row's length.
        extent: slots that layers show besides, where `places` holds the places of packed rows,
            [1, tokens] each. None: whole buffers.
        forgets: whether layers with a window drop what it has passed.
        near: the slots [batch, width] in the buffers of layers that forget, where `places` are of
            whole ones.
    """

    def __init__(self, lengths: Sequence[int], forgets: bool = True):
        self.window: int | None = None
        self.forgets = forgets
        self.near: torch.Tensor | None = None
        self.view_from: int | None = None
        self.places: Places | None = None
        self.extent: int | None = None
        self._index: dict[tuple[int, torch.device], Places] = {}
        self.set_lengths(lengths)

    def index(self, width: int, device: torch.device) -> Places:
        """Row and slot indices, [batch, 1] and [batch, width], of the next `width` tokens."""
        key = (width, device)
        if key not in self._index:
            if width == 1:  # the lengths, which are sent once
                rows = torch.arange(len(self.lengths), device=device)[:, None]
                slots = torch.tensor(self.lengths, device=device)[:, None]
            else:
                rows, slots = self.index(1, device)
                slots = slots + torch.arange(width, device=device)
            self._index[key] = rows, slots
        return self._index[key]

    def place(self, offsets: torch.Tensor, columns: int) -> None:
        """Let the next tokens be written in the given ones, int64 [batch or 1, width], of so many
        slots behind each row's length."""
        if not self.uniform or len(offsets) > 1:
            rows, lengths = self.index(1, offsets.device)
            self.places, self.extent = (rows, lengths + offsets), self.longest + columns

    def free(self) -> None:
        """Let them be written behind each row's length again."""
        self.places = self.extent = None

    def set_lengths(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.longest = max(self.lengths, default=0)
        self.shortest = min(self.lengths, default=0)
        self.uniform = self.shortest == self.longest
        self._index.clear()


def empty(layer: Any) -> None:
    """Leave a dynamic layer of transformers without entries, as a new one is."""
    layer.keys = layer.values = None
    layer.is_initialized = False
    if layer.is_sliding:
        layer.cumulative_length = 0
    if isinstance(layer, DynamicIndexedLayer):
        layer.__dict__.update(vars(DynamicIndexedLayer()))


class SlotLayer(DynamicLayer):
    """A cache layer that writes in place.

    `keys` and `values` are what it holds, `[batch, heads, slots, head_dim]`.

    Attributes:
        homes: where its keys and values lie in blocks; None: in tensors of its own.
        dropped: slots before those that it holds.
    """

    def __init__(self, slots: RowSlots, window: int | None = None):
        self._own: list[Any] = [None, None]
        self.homes: tuple[Home, Home] | None = None
        self._length = self._dropped = 0
        super().__init__()
        self.slots = slots
        self.window = window
        self.is_sliding = window is not None

    @property
    def is_ready(self) -> bool:
        """Whether it has been written to; an interrupt may leave it initialised without states."""
        return self.homes is not None or (self._own[0] is not None and self._own[0].ndim == 4)

    @property
    def dropped(self) -> int:
        return self._dropped if self.homes is None else self.homes[0][0].base

    @property
    def keys(self) -> Any:
        return self._states(0)

    @keys.setter
    def keys(self, states: Any) -> None:
        self._leave(0, states)

    @property
    def values(self) -> Any:
        return self._states(1)

    @values.setter
    def values(self, states: Any) -> None:
        self._leave(1, states)

    @property
    def forgets(self) -> bool:
        """Whether it drops what its window has passed."""
        return self.window is not None and self.slots.forgets

    def _states(self, number: int) -> Any:
        if self.homes is None:
            return self._own[number]
        block, buffer = self.homes[number]
        return block.states[buffer, :, :, : self._length - block.base]

    def _leave(self, number: int, states: Any) -> None:
        """Hold other states than those in the blocks."""
        if self.homes is not None:
            self._own, self._dropped, self.homes = [self.keys, self.values], self.dropped, None
        self._own[number] = states

    def get_seq_length(self) -> int:
        if self.homes is not None:
            return self._length
        return self._dropped + self._own[0].shape[-2] if self.is_ready else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # A model that makes a window's mask itself makes it of what `update` shows.
        first = self.dropped
        if self.window is not None and self.slots.view_from is not None:
            first = self.slots.view_from
        return self.get_seq_length() - first + query_length, first

    def adopt(self, layer: DynamicLayer | StaticLayer) -> None:
        """Take over another layer's content."""
        if length := int(layer.get_seq_length()):
            self.lazy_initialization(layer.keys, layer.values)
            held = min(length, layer.keys.shape[-2])
            self._own = [layer.keys[:, :, :held], layer.values[:, :, :held]]
            self._dropped = length - held

    def reset(self) -> None:
        super().reset()
        self._dropped = 0

    def reaches(self, length: int) -> bool:
        """Whether it could go on behind so many tokens, if it forgot those behind them."""
        return self.window is None or max(0, length - self.window + 1) >= self.dropped

    def hand_back(self, layer: Any, room: int | None) -> None:
        """Leave in a layer of transformers what it would hold had it been fed this one's tokens, a
        static one as far as there is room."""
        length = self.get_seq_length()
        if isinstance(layer, StaticLayer):
            layer.reset()
            if length:
                whole = (F.pad(x, (0, 0, self.dropped, 0)) for x in (self.keys, self.values))
                layer.update(*(states[:, :, :room] for states in whole))
            return
        empty(layer)
        if not length:
            return
        first = max(0, length - layer.sliding_window + 1) if layer.is_sliding else 0
        if self.homes is not None or first > self.dropped:
            self.move_out(first)
        layer.lazy_initialization(self.keys, self.values)
        layer.keys, layer.values = self.keys, self.values
        if layer.is_sliding:
            layer.cumulative_length = length

    def move_in(self, *homes: Home) -> None:
        """Go on in blocks, whose buffers get what this layer holds."""
        length, dropped = self.get_seq_length(), self.dropped
        for (block, buffer), shown in zip(homes, (self.keys, self.values), strict=True):
            held = max(0, block.base - dropped)
            first = max(block.base, dropped) - block.base
            block.states[buffer, :, :, first : length - block.base] = shown[:, :, held:]
        self._own = [None, None]
        self.homes, self._length = (homes[0], homes[1]), length

    def begin_in(self, *homes: Home) -> None:
        """Write to blocks from the first token on."""
        self.lazy_initialization(homes[0][0].states, homes[1][0].states)
        self._own = [None, None]
        self.homes, self._length, self._dropped = (homes[0], homes[1]), 0, 0

    def is_in(self, home: Home) -> bool:
        """Whether its keys lie in this very memory."""
        if self.homes is None:
            return False
        (block, buffer), (theirs, number) = self.homes[0], home
        return block.states.data_ptr() == theirs.states.data_ptr() and buffer == number

    def move_out(self, first: int = 0) -> None:
        """Go on in memory of its own, which holds what is shown from a slot on."""
        left, shown = max(0, first - self.dropped), (self.keys, self.values)
        own = [x[:, :, left:].clone(memory_format=torch.contiguous_format) for x in shown]
        self._own, self._dropped, self.homes = own, self.dropped + left, None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[batch, heads, n, head_dim]` behind each row; show all slots in use."""
        if (recording := thread.recorder) is not None:
            return recording.update(self, key_states, value_states)
        if self.homes is None:
            return self._append(key_states, value_states)
        (keys, k), (values, v) = self.homes
        slots, places = self.slots, self.slots.places
        first = slots.view_from if self.window is not None else None
        if places is None and slots.uniform:
            start, extent = self._length, self._length + key_states.shape[2]
        else:
            start = extent = slots.extent or slots.longest + key_states.shape[2]
            if places is not None and slots.extent is None:
                rows, held = places
                if self.forgets and slots.near is not None:
                    held = slots.near
                self._write(rows, held, key_states, value_states)
                return keys.states[k], values.states[v]
        new, shown = more, besides = keys.views(start, extent, first, key_states.dtype)
        if values is not keys:
            more, besides = values.views(start, extent, first, value_states.dtype)
        if start < extent:
            new[k].copy_(key_states)
            more[v].copy_(value_states)
        else:
            rows, held = places or slots.index(key_states.shape[2], key_states.device)
            held = held - keys.base if keys.base else held
            self._write(rows, held, key_states, value_states)
        self._length = extent
        return shown[k], besides[v]

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_ready:
            self.lazy_initialization(key_states, value_states)
            whole = [key_states, value_states]
            if self.slots.places is not None:
                # The first tokens may be told to lie in another order than they were fed in.
                rows, order = self.slots.places
                for number, states in enumerate(whole):
                    whole[number] = torch.empty_like(states)
                    whole[number][rows, :, order] = states.transpose(1, 2)
        else:
            pairs = zip(self._own, (key_states, value_states), strict=True)
            whole = [torch.cat(pair, dim=-2) for pair in pairs]
        self._own = whole
        if self.forgets and (passed := whole[0].shape[2] - (self.window or 0) + 1) > SLACK:
            self._own = [states[:, :, passed:].clone() for states in whole]
            self._dropped += passed
        return whole[0], whole[1]

    def _write(self, rows: torch.Tensor, held: torch.Tensor, *states: torch.Tensor) -> None:
        assert self.homes is not None
        for (block, buffer), new in zip(self.homes, states, strict=True):
            block.states[buffer][rows, :, held] = new.transpose(1, 2).to(block.states.dtype)

    def set_length(self, length: int) -> None:
        """Hold the first `length` slots."""
        if self.homes is not None:
            self._length = length
        elif self.get_seq_length() > length:
            self._own = [states[:, :, : length - self._dropped] for states in self._own]


def kinds_of(
    layers: Sequence[SlotLayer],
    most_bytes: int,
    apart: Callable[[SlotLayer], int | None],
    slots: Callable[[Kind], int],
) -> dict[Kind, list[int]]:
    """By kind the numbers of buffers, of layer i 2i for its keys and 2i + 1 for its values.

    Args:
        most_bytes: from which on layers share another block.
        apart: see `Kind`.
        slots: of a row in blocks of a kind.
    """
    members: defaultdict[Kind, list[int]] = defaultdict(list)
    taken = 0
    for i, layer in enumerate(layers):
        # Of keys and values together, so that the layer can leave its memory.
        own = apart(layer), taken // most_bytes
        for number, states in enumerate((layer.keys, layer.values), start=2 * i):
            batch, heads, _, depth = states.shape
            kind = Kind(batch, heads, depth, states.dtype, states.device, *own)
            members[kind].append(number)
            taken += batch * heads * slots(kind) * depth * states.element_size()
    return dict(members)


def move_in_turn(
    layers: Sequence[SlotLayer], groups: Iterable[tuple[Sequence[int], Block]]
) -> None:
    """Move layers into blocks that are made one after another, so that a layer has left its own
    memory before the next block is made.

    Args:
        groups: for each block the numbers of its buffers, see `kinds_of`.
    """
    homes: dict[int, Home] = {}
    for numbers, block in groups:
        for buffer, number in enumerate(numbers):
            homes[number] = block, buffer
            both, layer = number // 2 * 2, layers[number // 2]
            if both in homes and both + 1 in homes and not layer.is_in(homes[both]):
                layer.move_in(homes[both], homes[both + 1])


class IndexedSlotLayer(SlotLayer, DynamicIndexedLayer):
    """A slot layer of a sparse-attention model, whose indexer keys follow the same slots."""

    def __init__(self, slots: RowSlots):
        SlotLayer.__init__(self, slots)
        self.indexer_keys = None
        self.indexer_position_ids = None
        self.is_indexer_initialized = False

    def adopt(self, layer: DynamicLayer) -> None:
        super().adopt(layer)
        self.indexer_keys = layer.indexer_keys
        # Of later releases.
        self.indexer_position_ids = getattr(layer, "indexer_position_ids", None)
        self.is_indexer_initialized = layer.is_indexer_initialized

    def hand_back(self, layer: Any, room: int | None) -> None:
        super().hand_back(layer, room)
        if self.indexer_keys is None:
            return
        if isinstance(layer, StaticLayer):
            layer.update_indexer(self.indexer_keys)
            return
        layer.lazy_initialization_indexer(self.indexer_keys)
        layer.indexer_keys = self.indexer_keys.clone(memory_format=torch.contiguous_format)
        if self.indexer_position_ids is not None:
            layer.indexer_position_ids = self.indexer_position_ids.clone()

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the keys `[batch, n, dim]` behind each row, as `update` does; show all of them."""
        keys = super().update_indexer(indexer_key_states)
        if not self.slots.uniform:
            places = self.slots.index(indexer_key_states.shape[1], keys.device)
            keys[places] = indexer_key_states
        return keys

    def move(self, source: torch.Tensor, destination: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the indexer's slots within rows, as a block copies those of keys and values."""
        if self.indexer_keys is not None:
            self.indexer_keys[rows, destination] = self.indexer_keys[rows, source]
        if self.indexer_position_ids is not None:
            self.indexer_position_ids[:, rows, destination] = self.indexer_position_ids[
                :, rows, source
            ]

    def wipe(self, lengths: Sequence[int]) -> None:
        if self.indexer_keys is not None:
            for row, length in zip(self.indexer_keys, lengths, strict=True):
                row[length:] = 0

    def set_length(self, length: int) -> None:
        super().set_length(length)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, :length]
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :length]


class HybridSlotLayer(SlotLayer, LinearAttentionAndFullAttentionLayer):
    """A slot layer of a block that also has a convolution or another recurrent state."""

    def __init__(self, slots: RowSlots, window: int | None, number_of_states: int):
        super().__init__(slots, window)
        LinearAttentionLayer.__init__(self, number_of_states)

    def adopt(self, layer: Any) -> None:
        super().adopt(layer)
        self.__dict__.update(state_beside_slots(layer))

    def hand_back(self, layer: Any, room: int | None) -> None:
        # A static layer is reset, which may share its states with this one already.
        layer.__dict__.update(vars(LinearAttentionLayer(self.number_of_states)))
        super().hand_back(layer, room)
        layer.__dict__.update(state_beside_slots(self))


def state_beside_slots(layer: LinearAttentionLayer) -> dict[str, Any]:
    """What a layer with a convolution or another recurrent state knows of it."""
    return {name: layer.__dict__[name] for name in vars(LinearAttentionLayer())}
