"""Layers of a key-value cache in which rows grow by different amounts.

Slot s of a row holds the row's s-th cached token, whatever the other rows have accepted, so ragged
progress wastes no slots: a cache of rows with lengths l_i takes max(l_i) slots, and a verification
of n tokens n more. The nodes of a token tree are written behind each row's length; `keep` moves the
accepted path to the front of them, which costs O(accepted).

Layers whose heads are alike share one tensor, a :class:`~.blocks.Block`, so that where a forward
writes and what it shows, a :class:`~.blocks.View`, is looked up once for all of them. Until a
prefill has ended a layer keeps what it is given, as transformers' own layers do.
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

from ..system.tensors import thread
from .blocks import Block, BlockRef, BlockShape, Both, InBlocks, OwnTensors, Places, Views

NO_VIEWS: Views = (None, None)


class RowSlots:
    """How far every row has got, and where its next tokens are written; shared by all layers of one
    cache.

    Attributes:
        lengths: kept slots per row.
        longest, shortest: the most and the fewest of any row.
        is_even: whether all rows have equally many.
        window: the largest of any layer; None: there is none.
        forgets: whether layers with a window drop what it has passed.
        views: of the forward that runs.
    """

    def __init__(self, lengths: Sequence[int], forgets: bool = True):
        self.window: int | None = None
        self.forgets = forgets
        self._index: dict[torch.device, Places] = {}
        self.set_lengths(lengths)

    def __deepcopy__(self, memo: Any) -> RowSlots:
        # Models that go over layers again append copies of them, whose forwards nobody views.
        copied = RowSlots(self.lengths, self.forgets)
        copied.window = self.window
        return copied

    def index(self, device: torch.device) -> Places:
        """Rows and their lengths, int64 [batch, 1] each, which are sent to a device once."""
        if device not in self._index:
            rows = torch.arange(len(self.lengths), device=device)[:, None]
            self._index[device] = rows, torch.tensor(self.lengths, device=device)[:, None]
        return self._index[device]

    def set_lengths(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.longest = max(self.lengths, default=0)
        self.shortest = min(self.lengths, default=0)
        self.is_even = self.shortest == self.longest
        self._index.clear()
        # A forward that is interrupted may leave its scope before the end of that.
        self.views = NO_VIEWS


def clear_layer(layer: Any) -> None:
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
        store: where they lie.
    """

    store: OwnTensors | InBlocks

    def __init__(self, slots: RowSlots, window: int | None = None):
        self.store = OwnTensors()
        super().__init__()
        self.slots = slots
        self.window = window
        self.is_sliding = window is not None

    @property
    def keys(self) -> Any:
        return self.store.keys

    @keys.setter
    def keys(self, states: Any) -> None:
        self.store = OwnTensors(states, self.values, self.store.dropped)

    @property
    def values(self) -> Any:
        return self.store.values

    @values.setter
    def values(self, states: Any) -> None:
        self.store = OwnTensors(self.keys, states, self.store.dropped)

    @property
    def forgets(self) -> bool:
        """Whether it drops what its window has passed."""
        return self.window is not None and self.slots.forgets

    def get_seq_length(self) -> int:
        return self.store.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # A model that makes a window's mask itself makes it of what `update` shows.
        view, first = self.slots.views[self.is_sliding], self.store.dropped
        if view is not None and view.first is not None:
            first = view.first
        return self.store.length - first + query_length, first

    def adopt(self, layer: DynamicLayer | StaticLayer) -> None:
        """Take over another layer's content."""
        if length := int(layer.get_seq_length()):
            self.lazy_initialization(layer.keys, layer.values)
            held = min(length, layer.keys.shape[-2])
            keys, values = layer.keys[:, :, :held], layer.values[:, :, :held]
            self.store = OwnTensors(keys, values, length - held)

    def reset(self) -> None:
        super().reset()
        self.store = OwnTensors()

    def reaches(self, length: int) -> bool:
        """Whether it could go on behind so many tokens, if it forgot those behind them."""
        return self.window is None or max(0, length - self.window + 1) >= self.store.dropped

    def give_back(self, layer: Any, room: int | None) -> None:
        """Leave in a layer of transformers what it would hold had it been fed this one's tokens, a
        static one as far as there is room."""
        length = self.get_seq_length()
        if isinstance(layer, StaticLayer):
            layer.reset()
            if length:
                missing = 0, 0, self.store.dropped, 0
                whole = (F.pad(states, missing) for states in (self.keys, self.values))
                layer.update(*(states[:, :, :room] for states in whole))
            return
        clear_layer(layer)
        if not length:
            return
        # What a prompt's forward gave it lies in whatever order the model made it.
        self.detach(max(0, length - layer.sliding_window + 1) if layer.is_sliding else 0)
        layer.lazy_initialization(self.keys, self.values)
        layer.keys, layer.values = self.keys, self.values
        if layer.is_sliding:
            layer.cumulative_length = length

    def attach(self, *refs: BlockRef) -> None:
        """Go on in blocks, whose buffers get what this layer holds."""
        length, dropped = self.store.length, self.store.dropped
        if self.store.is_empty:
            self.lazy_initialization(*(ref.block.states for ref in refs))
        for (block, buffer), states in zip(refs, (self.keys, self.values), strict=True):
            if length:
                first, passed = max(0, dropped - block.base), max(0, block.base - dropped)
                block.states[buffer, :, :, first : length - block.base] = states[:, :, passed:]
        self.store = InBlocks((refs[0], refs[1]), length)

    def detach(self, first: int = 0) -> None:
        """Go on in memory of its own, which holds what is shown from a slot on."""
        dropped, shown = max(first, self.store.dropped), (self.keys, self.values)
        left = (states[:, :, dropped - self.store.dropped :] for states in shown)
        keys, values = (x.clone(memory_format=torch.contiguous_format) for x in left)
        self.store = OwnTensors(keys, values, dropped)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Both:
        """Write the states `[batch, heads, n, head_dim]` where the forward's view says, behind each
        row otherwise; returns the slots that it shows."""
        if (recording := thread.recorder) is not None:
            return recording.update(self, key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window if self.slots.forgets else None
        return self.store.put(self.slots.views[self.is_sliding], window, key_states, value_states)

    def set_length(self, length: int) -> None:
        """Hold the first `length` slots."""
        self.store.length = length


def kinds_of(
    layers: Sequence[SlotLayer],
    most_bytes: int,
    apart: Callable[[SlotLayer], int | None],
    slots: Callable[[BlockShape], int],
) -> dict[BlockShape, list[int]]:
    """Numbers of buffers by kind, 2i for the keys of layer i and 2i + 1 for its values.

    Args:
        most_bytes: from which on layers share another block.
        apart: see `BlockShape`.
        slots: of a row in blocks of a kind.
    """
    members: defaultdict[BlockShape, list[int]] = defaultdict(list)
    taken = 0
    for i, layer in enumerate(layers):
        # Keys and values share it, so that the layer can leave its memory.
        own = apart(layer), taken // most_bytes
        for number, states in enumerate((layer.keys, layer.values), start=2 * i):
            batch, heads, _, depth = states.shape
            kind = BlockShape(batch, heads, depth, states.dtype, states.device, *own)
            members[kind].append(number)
            taken += batch * heads * slots(kind) * depth * states.element_size()
    return dict(members)


def attach_in_turn(
    layers: Sequence[SlotLayer], groups: Iterable[tuple[Sequence[int], Block]]
) -> None:
    """Move layers into blocks that are made one after another, so that a layer has left its own
    memory before the next block is made.

    Args:
        groups: for each block the numbers of its buffers, see `kinds_of`.
    """
    refs: dict[int, BlockRef] = {}
    for numbers, block in groups:
        for buffer, number in enumerate(numbers):
            refs[number] = BlockRef(block, buffer)
            both, layer = number // 2 * 2, layers[number // 2]
            if both in refs and both + 1 in refs and refs[both] not in layer.store.block_refs:
                layer.attach(refs[both], refs[both + 1])


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
        # Later releases have it.
        self.indexer_position_ids = getattr(layer, "indexer_position_ids", None)
        self.is_indexer_initialized = layer.is_indexer_initialized

    def give_back(self, layer: Any, room: int | None) -> None:
        super().give_back(layer, room)
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
        """Write the keys `[batch, n, dim]` where `update` writes states; show all of them."""
        keys, view = super().update_indexer(indexer_key_states), self.slots.views[False]
        if view is not None and view.places is not None:
            rows, slots = (indices.to(keys.device) for indices in view.places)
            keys[rows, slots] = indexer_key_states
        return keys

    def move(self, source: torch.Tensor, destination: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the indexer's slots within rows, as a block copies those of keys and values."""
        if self.indexer_keys is not None:
            self.indexer_keys[rows, destination] = self.indexer_keys[rows, source]
        if self.indexer_position_ids is not None:
            self.indexer_position_ids[:, rows, destination] = self.indexer_position_ids[
                :, rows, source
            ]

    def zero_unused(self, lengths: Sequence[int]) -> None:
        if self.indexer_keys is not None:
            for row, length in zip(self.indexer_keys, lengths, strict=True):
                row[length:] = 0

    def set_length(self, length: int) -> None:
        super().set_length(length)
        self.cut(length)

    def cut(self, length: int) -> None:
        """Hold the first `length` slots of the indexer."""
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

    def give_back(self, layer: Any, room: int | None) -> None:
        # A static layer is reset, which may share its states with this one already.
        layer.__dict__.update(vars(LinearAttentionLayer(self.number_of_states)))
        super().give_back(layer, room)
        layer.__dict__.update(state_beside_slots(self))


def state_beside_slots(layer: LinearAttentionLayer) -> dict[str, Any]:
    """What a layer with a convolution or another recurrent state knows of it."""
    return {name: layer.__dict__[name] for name in vars(LinearAttentionLayer())}
