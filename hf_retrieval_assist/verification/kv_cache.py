"""A key-value cache in which rows grow by different amounts and rejected drafts cost nothing.

Every layer keeps one buffer `[batch, heads, capacity, head_dim]`. Slot s of a row holds the row's
s-th cached token, whatever the other rows have accepted, so ragged progress wastes no slots: a
cache of rows with lengths l_i takes max(l_i) slots, and a verification of n tokens n more. The
nodes of a token tree are written behind each row's length; `keep` moves the accepted path to the
front of them, which costs O(accepted).

Layers with a window may forget what lies beyond it, as plain decoding's do: their buffers then hold
the slots from a first one on, which are the window and what one forward feeds.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedConfig, StaticCache, cache_utils
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..host.transformers_private import CACHE

# A buffer grows by half its size, so that copying it costs O(1) per token, never in small steps.
_MIN_GROWTH = 256

# Slots more than a window's that its buffer has at least, so that it is seldom moved to the front.
_MIN_SPARE = 64

# Layers that share another one's entries have a class of their own in later versions only.
_SHARING = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))

SLOT_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, *_SHARING)
"""Layers whose content is one entry per token, so that any path of a tree can be kept."""

HYBRID_LAYERS = (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""Layers with one entry per token and a convolution or another recurrent state besides."""


class RowSlots:
    """Where the next tokens of every row are written; shared by all layers of one cache.

    Attributes:
        lengths: kept slots per row.
        longest: the most of any row.
        uniform: whether all rows have equally many.
        view_from: first slot shown to layers with a sliding window, while a tree is verified.
        places: rows [batch, 1] and slots [batch, width] that the next tokens are written to, where
            tensors on the device say so: layers then show whole buffers, so that a forward depends
            on no number of the host. None: behind each row's length.
        extent: slots that layers show besides, where `places` holds the places of packed rows,
            [1, tokens] each. None: whole buffers.
        near: the slots [batch, width] in the buffers of layers that forget, where `places` are of
            whole ones.
        drops: whether layers with a window forget what lies beyond it.
        provisional: whether what is fed may be taken back, as a verifier's tokens may.
    """

    def __init__(self, lengths: Sequence[int], drops: bool = False):
        self.drops = drops
        self.provisional = False
        self.near: torch.Tensor | None = None
        self.view_from: int | None = None
        self.places: tuple[torch.Tensor, torch.Tensor] | None = None
        self.extent: int | None = None
        self._index: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        self.set_lengths(lengths)

    def index(self, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
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

    def set_lengths(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.longest = max(self.lengths, default=0)
        self.uniform = min(self.lengths, default=0) == self.longest
        self._index.clear()


class SlotLayer(DynamicLayer):
    """A cache layer that writes in place into a preallocated buffer.

    `keys` and `values` are views `[batch, heads, slots, head_dim]` of the buffer, so that whatever
    reads or crops a :class:`DynamicLayer` goes on working.
    """

    def __init__(self, slots: RowSlots, window: int | None = None, capacity: int = 0):
        super().__init__()
        self.slots = slots
        self.window = window
        self.capacity = capacity
        self.first = 0  # the slot with which the buffers begin
        self.absent = 0  # first slots that hold nothing, because a window had dropped their tokens
        self.homes: Sequence[torch.Tensor] = ()  # buffers to grow into, where there is room in them
        self._buffers: list[torch.Tensor] = []
        # The views that this layer made last; whoever crops or reorders it puts others there.
        self._views: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it has been written to; an interrupt may leave it initialised without buffers."""
        return bool(self.is_initialized and self._buffers)

    def adopt(self, layer: DynamicLayer | StaticLayer) -> None:
        """Take over another layer's content; tokens that a window dropped become empty slots."""
        length = int(layer.get_seq_length())
        if length:
            self.lazy_initialization(layer.keys, layer.values)
            held = min(length, layer.keys.shape[-2])
            shown = (states[:, :, :held] for states in (layer.keys, layer.values))
            self.absent = length - held
            self.first = self.absent if self.drops else 0
            empty = self.absent - self.first
            self._show(*(F.pad(states, (0, 0, empty, 0)) for states in shown))

    @property
    def drops(self) -> bool:
        """Whether it forgets what lies beyond its window."""
        return self.window is not None and self.slots.drops

    @property
    def is_sliding(self) -> bool:
        return self.drops

    def get_seq_length(self) -> int:
        return self.first + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self.get_seq_length()
        first = self._seen_from(length)
        return length - first + query_length, first

    def _seen_from(self, length: int) -> int:
        """The first slot that tokens behind so many kept ones may see."""
        if self.window is None or not self.slots.drops:
            return 0
        return max(self.first, length - self.window + 1)

    def reaches(self, length: int) -> bool:
        """Whether it could go on behind so many tokens, if it forgot those behind them."""
        return self.window is None or max(0, length - self.window + 1) >= self.absent

    def forget_before(self, first: int) -> None:
        """Begin with a later slot."""
        behind = first - self.first
        if behind > 0:
            self.first = self.absent = first
            self._show(self.keys[:, :, behind:], self.values[:, :, behind:])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Raises:
            RuntimeError: what the layer then would have to show has been dropped by its window, as
                plain decoding's layers say.
        """
        left = max(0, self.get_seq_length() + min(0, tokens_to_remove))
        if self.window and not self.reaches(left):
            raise RuntimeError(
                f"crop: expected at most {self.get_seq_length() - self.window + 1 - self.absent} "
                f"tokens to remove, got {-tokens_to_remove}: a window of {self.window} tokens has "
                "dropped what it would show then"
            )
        super().crop(tokens_to_remove)

    def hold_absent(self) -> None:
        """Hold all slots or none that a window has dropped, as layers do from now on."""
        if self.drops:
            self.forget_before(self.absent)
        elif self.first:
            shown = [F.pad(states, (0, 0, self.first, 0)) for states in (self.keys, self.values)]
            self.first = 0
            self._show(*shown)

    def reset(self) -> None:
        super().reset()
        self.first = self.absent = 0

    def hand_back(self, layer: StaticLayer, room: int | None) -> None:
        """Leave this layer's content, as far as there is room, in the one that it came from."""
        layer.reset()
        if self.is_initialized and self.get_seq_length():
            whole = (F.pad(states, (0, 0, self.first, 0)) for states in (self.keys, self.values))
            layer.update(*(states[:, :, :room] for states in whole))

    def _show(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._buffers = [keys, values]
        self._view(self.first + keys.shape[-2])

    def _view(self, length: int) -> None:
        keys, values = self._buffers
        held = max(0, length - self.first)
        self._views = keys[:, :, :held], values[:, :, :held]
        self.keys, self.values = self._views

    def is_in(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer for keys is this layer's."""
        return self._buffers[0].data_ptr() == buffer.data_ptr()

    def move_in(self, buffers: Sequence[torch.Tensor]) -> None:
        """Go on in other buffers `[batch, heads, capacity, head_dim]`, for keys and values."""
        length = self.get_seq_length()
        for buffer, shown in zip(buffers, (self.keys, self.values), strict=True):
            buffer[:, :, : shown.shape[2]] = shown
        self._buffers = list(buffers)
        self.show(length)

    def move_out(self) -> None:
        """Go on in memory of its own that holds what is shown."""
        self._show(self.keys.clone(), self.values.clone())

    def _reserve(self, total: int, first: int) -> None:
        """Make the buffers hold slots up to `total`, keeping what `keys` and `values` show of the
        slots from `first` on."""
        shown, buffer = (self.keys, self.values), self._buffers[0]
        in_place = self._views is not None and all(map(operator.is_, self._views, shown))
        in_place = in_place and _may_change(buffer)
        if in_place and buffer.shape[-2] >= total - self.first:
            return
        kept = [states[:, :, first - self.first :] for states in shown]
        held, needed = kept[0].shape[2], total - first
        if in_place and first > self.first and buffer.shape[-2] >= needed:
            grown = self._buffers
            kept = [states.clone() for states in kept]  # of which the new place may be a part
        elif self.homes and _like(self.homes[0], kept[0]) and self.homes[0].shape[-2] >= needed:
            grown = list(self.homes)
        else:
            capacity = max(self.capacity, needed + max(_MIN_GROWTH, held // 2))
            if self.drops:  # which never holds the whole text
                capacity = needed + max(_MIN_SPARE, (self.window or 0) // 4)
            grown = [x.new_zeros((*x.shape[:2], capacity, x.shape[3])) for x in kept]
        for states, room in zip(kept, grown, strict=True):
            room[:, :, :held] = states
        self._buffers = grown
        self.first, self.absent = first, max(first, self.absent)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states `[batch, heads, n, head_dim]` behind each row; show all slots in use."""
        states, slots = (key_states, value_states), self.slots
        if slots.places is not None and slots.extent is None:
            rows, places = slots.places
            self._write(
                rows, places if slots.near is None or not self.drops else slots.near, states
            )
            return self._buffers[0], self._buffers[1]
        width = key_states.shape[-2]
        if not self.is_ready:
            self.lazy_initialization(key_states, value_states)
            self._show(key_states[..., :0, :], value_states[..., :0, :])
        uniform = slots.uniform and slots.places is None
        start = self.get_seq_length() if uniform else slots.longest
        extent = slots.extent or start + width
        # What is fed and not kept yet is no text.
        first = self._seen_from(min(slots.lengths) if slots.provisional else start)
        if self.drops and not slots.provisional and width >= (self.window or 0):
            return self._pass(states, first, extent)
        self._reserve(extent, first)
        if uniform:
            begin = start - self.first
            for buffer, new in zip(self._buffers, states, strict=True):
                buffer[:, :, begin : begin + width] = new
        else:
            rows, places = slots.places or slots.index(width, key_states.device)
            self._write(rows, places - self.first if self.first else places, states)
        self._view(extent)
        if self.window is not None and slots.view_from is not None:
            first = slots.view_from
        behind = first - self.first
        return self.keys[:, :, behind:], self.values[:, :, behind:]

    def _pass(
        self, states: Sequence[torch.Tensor], first: int, extent: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a prompt's tokens see, none of which are taken back: its last ones are kept."""
        keys, values = (
            torch.cat([held[:, :, first - self.first :], new], dim=2) if held.shape[2] else new
            for held, new in zip((self.keys, self.values), states, strict=True)
        )
        left = (self.window or 0) - 1
        self._show(*(new[:, :, :0] for new in states))
        self.first = self.absent = extent - left
        self._reserve(extent, self.first)
        for buffer, new in zip(self._buffers, states, strict=True):
            buffer[:, :, :left] = new[:, :, new.shape[2] - left :]
        self._view(extent)
        return keys, values

    def _write(
        self, rows: torch.Tensor, slots: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> None:
        for buffer, new in zip(self._buffers, states, strict=True):
            buffer[rows, :, slots] = new.transpose(1, 2)

    def move(self, source: torch.Tensor, destination: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy slots within rows; all index tensors broadcast to [batch, moved]."""
        if self.first:
            source, destination = source - self.first, destination - self.first
        for buffer in self._buffers:
            if len(rows) == 1:  # less than half the time
                buffer.index_copy_(2, destination[0], buffer.index_select(2, source[0]))
            else:
                buffer[rows, :, destination] = buffer[rows, :, source]

    def show(self, length: int) -> None:
        """Show the slots in front of `length`."""
        if not length:
            self.first = self.absent = 0
        self._view(length)

    def wipe(self, lengths: Sequence[int]) -> None:
        """Fill the slots behind each row's length with zeros."""
        for buffer in self._buffers:
            for row, length in zip(buffer, lengths, strict=True):
                row[:, max(0, length - self.first) :] = 0


def _like(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether buffers differ in their slots at most."""
    alike = (one.dtype, one.device) == (other.dtype, other.device)
    return alike and one.shape[:2] == other.shape[:2] and one.shape[3] == other.shape[3]


def _may_change(buffer: torch.Tensor) -> bool:
    """Whether a buffer may be written to; one from an earlier turn under `torch.inference_mode` may
    not be outside of it. Compilers cannot ask."""
    if torch.compiler.is_compiling():
        return True
    return not buffer.is_inference() or torch.is_inference_mode_enabled()


class IndexedSlotLayer(SlotLayer, DynamicIndexedLayer):
    """A slot layer of a sparse-attention model, whose indexer keys follow the same slots."""

    def __init__(self, slots: RowSlots, window: int | None = None, capacity: int = 0):
        DynamicIndexedLayer.__init__(self)
        SlotLayer.__init__(self, slots, window, capacity)
        self.indexer_keys = None
        self.indexer_position_ids = None
        self.is_indexer_initialized = False

    def adopt(self, layer: DynamicLayer) -> None:
        super().adopt(layer)
        self.indexer_keys = layer.indexer_keys
        self.indexer_position_ids = layer.indexer_position_ids
        self.is_indexer_initialized = layer.is_indexer_initialized

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the keys `[batch, n, dim]` behind each row, as `update` does; show all of them."""
        keys = super().update_indexer(indexer_key_states)
        if not self.slots.uniform:
            places = self.slots.index(indexer_key_states.shape[1], keys.device)
            keys[places] = indexer_key_states
        return keys

    def move(self, source: torch.Tensor, destination: torch.Tensor, rows: torch.Tensor) -> None:
        super().move(source, destination, rows)
        if self.indexer_keys is not None:
            self.indexer_keys[rows, destination] = self.indexer_keys[rows, source]
        if self.indexer_position_ids is not None:
            self.indexer_position_ids[:, rows, destination] = self.indexer_position_ids[
                :, rows, source
            ]

    def wipe(self, lengths: Sequence[int]) -> None:
        super().wipe(lengths)
        if self.indexer_keys is not None:
            for row, length in zip(self.indexer_keys, lengths, strict=True):
                row[length:] = 0

    def show(self, length: int) -> None:
        super().show(length)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, :length]
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :length]


class HybridSlotLayer(SlotLayer, LinearAttentionAndFullAttentionLayer):
    """A slot layer of a block that also has a convolution or another recurrent state."""

    def __init__(self, slots: RowSlots, window: int | None, capacity: int, number_of_states: int):
        super().__init__(slots, window, capacity)
        LinearAttentionLayer.__init__(self, number_of_states)


class SlotCache(DynamicCache):
    """A `DynamicCache` of slot layers; a next `generate`, assisted or not, can continue from it.

    Args:
        config: the model's configuration; decides the kind of each layer.
        capacity: slots to reserve at the first write.
        drops: whether layers with a window forget what lies beyond it.

    Attributes:
        slots: the rows' lengths, shared by the layers.
        lender: the static cache that this one stands for until `hand_back`.
        room: tokens per row that the lender has room for; None without limit.
        reserved: the memory that stays in place in which its layers were filled.
    """

    reserved: Any = None
    lender: StaticCache | None = None
    room: int | None = None

    def __init__(self, config: PreTrainedConfig, capacity: int = 0, drops: bool = False):
        super().__init__(config=config.get_text_config(decoder=True))
        self.slots = RowSlots([], drops)
        self.layers: list[Any] = [_slot_layer(layer, self.slots, capacity) for layer in self.layers]

    @classmethod
    def around(
        cls, cache: DynamicCache | StaticCache, config: PreTrainedConfig, drops: bool = False
    ) -> SlotCache:
        """Take over the content of a caller's cache.

        A dynamic one shares the layers from then on. A static one, whose tensors compiled code
        knows by their addresses, stays as it is until `hand_back`.
        """
        if isinstance(cache, SlotCache):
            cache.slots.drops = drops
            for layer in cache.slot_layers:
                layer.hold_absent()
            cache.begin(cache.batch_size)
            return cache
        wrapper = cls(config, drops=drops)
        known = len(cache.layers)
        own, missing = wrapper.layers[:known], wrapper.layers[known:]
        # What was made layer by layer lacks the last ones where these share others' entries.
        if known > len(own) or (known and not all(type(layer) in _SHARING for layer in missing)):
            raise ValueError(
                f"{CACHE}: expected a cache of {len(wrapper.layers)} layers as the model "
                f"has, got {known}"
            )
        pairs = zip(cache.layers, own, strict=True)
        wrapper.layers = [*(_adopted(layer, empty) for layer, empty in pairs), *missing]
        if isinstance(cache, StaticCache):
            wrapper.lender, wrapper.room = cache, _room(cache)
        else:
            cache.layers = wrapper.layers
            cache.layer_class_to_replicate = None
        wrapper.begin(wrapper.batch_size)
        return wrapper

    @property
    def batch_size(self) -> int:
        """Rows in the cache; 0 while it is empty."""
        return max((len(layer.keys) for layer in self.slot_layers), default=0)

    @property
    def is_even(self) -> bool:
        """Whether all layers keep equally many slots."""
        return len({layer.get_seq_length() for layer in self.slot_layers}) <= 1

    @property
    def slot_layers(self) -> list[SlotLayer]:
        return [layer for layer in self.layers if isinstance(layer, SlotLayer) and layer.is_ready]

    @property
    def state_layers(self) -> list[LinearAttentionLayer]:
        """Layers with a convolution or another recurrent state."""
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]

    def require_room(self, length: int) -> None:
        """Refuse rows of so many tokens where a lender has no room for them.

        Raises:
            IndexError: as plain decoding would at the first such token.
        """
        if self.room is not None and length > self.room:
            raise IndexError(
                f"{CACHE}: expected room for {length} tokens, got a StaticCache of "
                f"max_cache_len={self.room}"
            )

    def hand_back(self) -> None:
        """Leave the lender, if there is one, with what this cache holds."""
        if self.lender is None:
            return
        for layer, own in zip(self.lender.layers, self.layers, strict=True):
            if isinstance(own, SlotLayer):
                own.hand_back(layer, self.room)

    def begin(self, batch_size: int) -> None:
        """Take over after a prefill, which appended to all rows alike."""
        length = max((layer.get_seq_length() for layer in self.slot_layers), default=0)
        self.slots.set_lengths([length] * batch_size)

    def align(self) -> None:
        """Make all rows as long as the longest one, for whoever continues from this cache.

        Slots that a row did not fill hold no text; they stand where plain decoding keeps padding.
        """
        self.slots.set_lengths([self.slots.longest] * len(self.slots.lengths))
        self.slots.view_from = None
        self.slots.provisional = False
        # A forward that was interrupted may have moved some layers on.
        first = max((layer.first for layer in self.slot_layers), default=0)
        for layer in self.slot_layers:
            if layer.drops:
                layer.forget_before(first)

    def reaches(self, length: int) -> bool:
        """Whether all layers could go on behind so many tokens."""
        return all(layer.reaches(length) for layer in self.slot_layers)

    def abandon(self) -> None:
        """Leave the cache as it was before a prefill that did not end."""
        if self.state_layers or not self.reaches(self.slots.longest):
            # A state may have gone half a step, and cannot go back.
            self.forget()
            return
        for layer in self.slot_layers:
            layer.show(min(layer.get_seq_length(), self.slots.longest))

    def forget(self) -> None:
        """Empty the cache, so that whoever continues from it feeds the whole text."""
        self.reset()
        # Before 5.23 a reset fills layers with zeros and leaves their lengths.
        self.truncate(0)
        self.slots.view_from = None

    def truncate(self, length: int) -> None:
        """Forget the tokens behind a length in every row."""
        self.slots.set_lengths([min(kept, length) for kept in self.slots.lengths])
        for layer in self.slot_layers:
            layer.show(self.slots.longest)

    def wipe(self) -> None:
        """Leave no number behind the kept slots: a mask that hides them multiplies by 0, which
        makes NaN of what is not finite."""
        for layer in self.slot_layers:
            layer.wipe(self.slots.lengths)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, of the tokens that the last forward wrote, those at the given indices of each row.

        Args:
            paths: for each row, ascending indices into the tokens that were fed.
        """
        lengths = self.slots.lengths
        sources = moved_from(paths)
        if sources:
            self._move(sources)
        self.slots.set_lengths(
            [length + len(path) for length, path in zip(lengths, paths, strict=True)]
        )
        longest = self.slots.longest
        for layer in self.slot_layers:
            layer.show(longest)

    def _move(self, sources: Sequence[Sequence[int]]) -> None:
        for device in {layer.keys.device for layer in self.slot_layers}:
            rows, destination = self.slots.index(len(sources[0]), device)
            base = destination[:, :1]
            moves = base + torch.tensor(sources, device=device)
            for layer in self.slot_layers:
                if layer.keys.device == device:
                    layer.move(moves, destination, rows)


def moved_from(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each row, the index of the fed token that comes to stand at each of the first places.

    Rows with shorter paths copy slots onto themselves, so that one indexing serves all rows. Empty
    where nothing moves.
    """
    moved = max((len(path) for path in paths if list(path) != list(range(len(path)))), default=0)
    if not moved:
        return []
    return [[*path[:moved], *range(len(path), moved)] for path in paths]


def _slot_layer(layer: Any, slots: RowSlots, capacity: int) -> Any:
    """The slot layer that takes an empty layer's place; others are kept as they are."""
    if type(layer) is DynamicIndexedLayer:
        return IndexedSlotLayer(slots, None, capacity)
    window = getattr(layer, "sliding_window", None)
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return SlotLayer(slots, window, capacity)
    if type(layer) in HYBRID_LAYERS:
        return HybridSlotLayer(slots, window, capacity, layer.number_of_states)
    return layer


def _adopted(layer: Any, empty: Any) -> Any:
    """The slot layer `empty` with a layer's content; a layer of another kind as it is."""
    if isinstance(layer, SlotLayer):
        layer.slots = empty.slots
        layer.hold_absent()
        return layer
    if isinstance(empty, SlotLayer):
        empty.adopt(layer)
        return empty
    return layer


def has_slots(cache: Any) -> bool:
    """Whether every layer of a cache holds one entry per token and nothing else."""
    return (
        isinstance(cache, DynamicCache)
        and not cache.offloading
        and all(
            type(layer) in SLOT_LAYERS or isinstance(layer, SlotLayer) for layer in cache.layers
        )
    )


def go_back(cache: Any, config: PreTrainedConfig, length: int) -> None:
    """Leave a caller's cache as it was before a forward of plain decoding that was interrupted, or
    empty where its layers cannot go back.

    Args:
        cache: that of the decoder, or with one for the encoder beside it.
        config: the model's.
        length: tokens per row before the forward.
    """
    own = getattr(cache, "self_attention_cache", cache)
    forgetful = any(type(layer) is DynamicSlidingWindowLayer for layer in own.layers)
    if isinstance(own, SlotCache) or (length and has_slots(own) and not forgetful):
        slots = SlotCache.around(own, config)
        if slots.state_layers or not slots.reaches(length):
            slots.forget()
        slots.truncate(length)
    elif isinstance(own, DynamicCache):
        own.layers = DynamicCache(config=config).layers
    else:
        own.reset()


def has_static_slots(cache: StaticCache, config: PreTrainedConfig) -> bool:
    """Whether a model's static cache keeps every token as far as its layers see, and nothing else.

    Where only windows are kept, and shorter ones than the model's, tokens would be forgotten early.
    """
    known = (StaticLayer, StaticSlidingWindowLayer, *_SHARING)
    if cache.offloading or any(type(layer) not in known for layer in cache.layers):
        return False
    windows = (getattr(layer, "window", None) or 0 for layer in SlotCache(config).layers)
    return _room(cache) is not None or all(
        layer.get_max_length() >= window
        for layer, window in zip(cache.layers, windows, strict=False)
        if isinstance(layer, StaticLayer)
    )


def _room(cache: StaticCache) -> int | None:
    """Tokens per row that the layers hold which forget none; None where all have windows."""
    whole = [layer.get_max_length() for layer in cache.layers if type(layer) is StaticLayer]
    return min(whole, default=None)
