"""A key-value cache of slot layers, in which rejected drafts cost nothing.

A cache of rows with lengths l_i takes max(l_i) slots, and a verification of n tokens n more. The
nodes of a token tree are written behind each row's length; `keep` moves the accepted path to the
front of them, which costs O(accepted). See :mod:`.slot_layers`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import torch
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
from .blocks import MIN_GROWTH, SLACK, Block, BlockShape
from .slot_layers import (
    HybridSlotLayer,
    IndexedSlotLayer,
    RowSlots,
    SlotLayer,
    attach_in_turn,
    clear_layer,
    kinds_of,
)

# Bytes from which on layers share another block, so that growing one takes little memory.
_MOST_BYTES = 1 << 28

_REFS = attrgetter("store.block_refs")

SHARING = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
"""Layers that share another one's entries, which have a class of their own in later versions."""

SLOT_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, *SHARING)
"""Layers whose content is one entry per token, so that any path of a tree can be kept."""

HYBRID_LAYERS = (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""Layers with one entry per token and a convolution or another recurrent state besides."""

# Configurations of models whose forwards have appended layers to their cache.
_APPENDING: set[type[PreTrainedConfig]] = set()


class SlotCache(DynamicCache):
    """A `DynamicCache` of slot layers, which stands for another cache while a call runs.

    Args:
        config: the model's configuration; decides the kind of each layer.
        capacity: slots to reserve.
        forgets: whether layers with a window drop what it has passed.
        layers: empty ones, made as the configuration says; none: they are made now.
        lender: the cache that this one stands for from `take` until `give_back`; None: for none.
        static_buffers: whether its layers are to write to such memory.

    Attributes:
        slots: the rows' lengths, shared by the layers.
        taken: whether it has begun to take over what the lender held.
        room: tokens per row that a lender of the caller's has room for; None without limit.
        reserved: the static buffers in which its layers begin; None: there is none yet.
        memory: the one that they write to; None: they hold what they show.
    """

    taken = False
    room: int | None = None
    reserved: Any = None
    memory: Any = None

    def __init__(
        self,
        config: PreTrainedConfig,
        capacity: int = 0,
        forgets: bool = True,
        layers: Any = (),
        lender: Any = None,
        static_buffers: bool = False,
    ):
        super().__init__(config=None if layers else config.get_text_config(decoder=True))
        self.layer_class_to_replicate = None
        self.slots = RowSlots([], forgets)
        self.capacity = capacity
        self.lender, self.static_buffers = lender, static_buffers
        made = layers or self.layers
        self.layers: list[Any] = [_slot_layer(layer, self.slots) for layer in made]
        self._made = type(config.get_text_config(decoder=True)), len(self.layers)
        windows = [layer.window for layer in self.layers if getattr(layer, "window", None)]
        self.slots.window = max(windows, default=None)

    @classmethod
    def wrapping(
        cls, cache: Any, config: PreTrainedConfig, capacity: int = 0, forgets: bool = True
    ) -> SlotCache:
        """One that stands for a caller's cache, see `stands_for`."""
        wrapper = cls(config, capacity, forgets, lender=cache)
        known = len(cache.layers)
        own, missing = wrapper.layers[:known], wrapper.layers[known:]
        # What was made layer by layer lacks the last ones where these share others' entries.
        if known > len(own) or (known and not all(type(layer) in SHARING for layer in missing)):
            raise ValueError(
                f"{CACHE}: expected a cache of {len(wrapper.layers)} layers as the model "
                f"has, got {known}"
            )
        pairs = [*zip_longest(cache.layers, wrapper.layers)]
        wrapper.layers = [
            layer if isinstance(layer, LinearAttentionLayer) and type(own) is type(layer) else own
            for layer, own in pairs
        ]
        if any(
            getattr(own, "window", None) and not getattr(layer, "is_sliding", False)
            for layer, own in pairs
        ):
            # The caller's layers keep what the model's windows pass.
            wrapper.slots.forgets = False
        if isinstance(cache, StaticCache):
            wrapper.room = _room(cache)
        return wrapper

    def take(self) -> None:
        """Take over what the lender holds. A dynamic one is empty from then on, so that nothing is
        held twice; a static one, whose tensors compiled code knows by their addresses, stays as it
        is."""
        self.taken = True
        for layer, own in zip(self.lender.layers, self.layers, strict=False):
            if isinstance(own, SlotLayer):
                own.adopt(layer)
                if not isinstance(layer, StaticLayer):
                    clear_layer(layer)
        if not self.static_buffers:
            self.begin(self.batch_size)
            self._drop_passed(self.pack_layers())

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
        return [x for x in self.layers if isinstance(x, SlotLayer) and not x.store.is_empty]

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

    def give_back(self) -> None:
        """Leave the lender with what it would hold had it been fed what this cache was."""
        layers = self.lender.layers
        for i, own in enumerate(self.layers):
            if isinstance(own, SlotLayer):
                while not own.store.is_empty and len(layers) <= i:
                    layers.append(self._layer_of_lender(own))
                if i < len(layers):
                    own.give_back(layers[i], self.room)
            elif isinstance(own, LinearAttentionLayer):
                layers[i] = own

    def _layer_of_lender(self, own: SlotLayer) -> Any:
        """One that plain decoding's forwards would have added: layer by layer, or a copy of another
        for each round over some of the model's layers."""
        if (lazy := self.lender.layer_class_to_replicate) is not None:
            return lazy()
        if isinstance(self.lender, StaticCache):
            for layer in self.lender.layers:
                if layer.is_sliding == own.is_sliding:
                    return copy.deepcopy(layer)
        return _plain_layer(own)

    def begin(self, batch_size: int) -> None:
        """Take over after a prefill, which appended to all rows alike; its layers are packed for
        the first forward behind it."""
        kind, made = self._made
        if len(self.layers) > made:
            _APPENDING.add(kind)
        length = max((layer.get_seq_length() for layer in self.slot_layers), default=0)
        self.slots.set_lengths([length] * batch_size)
        self.memory = None

    def pack_layers(self) -> list[SlotLayer]:
        """Move the layers that hold tensors of their own into blocks; returns all that hold any."""
        layers = self.slot_layers
        if all(map(_REFS, layers)):
            return layers
        length = max(layer.get_seq_length() for layer in layers)
        kinds = kinds_of(layers, _MOST_BYTES, lambda layer: layer.window, lambda kind: length)

        def block(kind: BlockShape, numbers: Sequence[int]) -> Block:
            known = max(self.capacity, length) + SLACK
            room, base = known if self.capacity else length + MIN_GROWTH, 0
            if kind.apart is not None and self.slots.forgets:
                # So that a step that is interrupted can be taken back.
                base = max(self._needed - SLACK, *(layers[n // 2].store.dropped for n in numbers))
                room = min(room - base, length - base + SLACK)
            return Block(kind.zeros(len(numbers), room), base)

        attach_in_turn(layers, ((numbers, block(kind, numbers)) for kind, numbers in kinds.items()))
        return layers

    @property
    def _needed(self) -> int:
        """The first slot that some row's window still shows."""
        return max(0, self.slots.shortest - (self.slots.window or 0) + 1)

    def align(self) -> None:
        """Make all rows as long as the longest one, for whoever continues from this cache.

        Slots that a row did not fill hold no text; they stand where plain decoding keeps padding.
        """
        self.slots.set_lengths([self.slots.longest] * len(self.slots.lengths))

    def reaches(self, length: int) -> bool:
        """Whether all layers could go on behind so many tokens."""
        return all(layer.reaches(length) for layer in self.slot_layers)

    def abandon(self) -> None:
        """Leave the cache as it was before a prefill that did not end."""
        if self.state_layers or not self.reaches(self.slots.longest):
            # A state may have gone half a step, and cannot go back.
            self.clear()
            return
        for layer in self.slot_layers:
            layer.set_length(min(layer.get_seq_length(), self.slots.longest))

    def clear(self) -> None:
        """Empty the cache, so that whoever continues from it feeds the whole text."""
        self.reset()
        # A reset before 5.23 fills layers with zeros and leaves their lengths.
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Forget the tokens behind a length in every row."""
        self.slots.set_lengths([min(kept, length) for kept in self.slots.lengths])
        for layer in self.slot_layers:
            layer.set_length(self.slots.longest)

    def zero_unused(self) -> None:
        """Leave no number behind the kept slots: a mask that hides them multiplies by 0, which
        makes NaN of what is not finite."""
        for part in _parts(self.slot_layers):
            part.zero_unused(self.slots.lengths)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, of the tokens that the last forward wrote, those at the given indices of each row.

        Args:
            paths: for each row, ascending indices into the tokens that were fed.
        """
        sources, slots = moved_from(paths), self.slots
        layers = self.pack_layers() if self.memory is None else []
        if sources and self.memory is not None:
            self.memory.move_later(slots.lengths, sources)
        elif sources:
            self._move(layers, sources)
        slots.set_lengths([n + len(path) for n, path in zip(slots.lengths, paths, strict=True)])
        length = slots.longest
        for layer in layers:
            layer.store.length = length
            if type(layer) is IndexedSlotLayer:
                layer.cut(length)
        if slots.window is not None:
            self._drop_passed(layers)

    def _move(self, layers: Sequence[SlotLayer], sources: Sequence[Sequence[int]]) -> None:
        for part in _parts(layers):
            if len(sources) == 1 and isinstance(part, Block):
                part.move_row(self.slots.longest, sources[0])
                continue
            rows, kept = self.slots.index(part.device)
            moved = torch.tensor(sources, device=part.device)
            part.move(kept + moved, kept + torch.arange(len(sources[0]), device=part.device), rows)

    def _drop_passed(self, layers: Sequence[SlotLayer]) -> None:
        """Drop what all windows have passed, many tokens at once."""
        needed = self._needed
        for layer in layers:
            for block, _ in layer.store.block_refs if layer.forgets else ():
                if needed - block.base >= SLACK:
                    block.drop(needed, self.slots.longest)


def _parts(layers: Sequence[SlotLayer]) -> list[Any]:
    """What holds the slots of layers: blocks, and layers that have indexers."""
    blocks = {id(block): block for layer in layers for block, _ in layer.store.block_refs}
    return [*blocks.values(), *(x for x in layers if isinstance(x, IndexedSlotLayer))]


def moved_from(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each row's indices of the fed tokens that come to stand at the first places.

    Rows with shorter paths copy slots onto themselves, so that one indexing serves all rows. Empty
    where nothing moves.
    """
    moved = max((len(path) for path in paths if list(path) != list(range(len(path)))), default=0)
    if not moved:
        return []
    return [[*path[:moved], *range(len(path), moved)] for path in paths]


def _slot_layer(layer: Any, slots: RowSlots) -> Any:
    """The slot layer that takes an empty layer's place; others are kept as they are."""
    if type(layer) is DynamicIndexedLayer:
        return IndexedSlotLayer(slots)
    window = getattr(layer, "sliding_window", None)
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return SlotLayer(slots, window)
    if type(layer) in HYBRID_LAYERS:
        return HybridSlotLayer(slots, window, layer.number_of_states)
    return layer


def _plain_layer(layer: Any) -> Any:
    """The empty layer of transformers whose place a slot layer takes; None: it keeps more."""
    if type(layer) in SHARING:
        return type(layer)()
    if type(layer) is not SlotLayer:
        return None
    return DynamicLayer() if layer.window is None else DynamicSlidingWindowLayer(layer.window)


def has_slots(cache: Any) -> bool:
    """Whether every layer of a cache holds one entry per token and nothing else."""
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and all(type(layer) in SLOT_LAYERS for layer in cache.layers)
    )


def stands_for(cache: Any, model: Any, rows: int) -> bool:
    """Whether a slot cache of so many rows can stand for a caller's: its layers hold what those
    would hold that `generate` makes, or more of it."""
    config = model.config.get_text_config(decoder=True)
    held = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    if _has_appended_layers(cache, config):
        return False
    if {len(layer.keys) for layer in held if layer.keys.ndim == 4} - {rows}:
        return False
    if len({int(layer.get_seq_length()) for layer in held}) > 1:
        return False
    if isinstance(cache, StaticCache):
        return has_static_slots(cache, config, model.dtype)
    if type(cache) is not DynamicCache or cache.offloading:
        return False
    slots = RowSlots([])
    lazy = cache.layer_class_to_replicate or DynamicLayer
    pairs = zip_longest(cache.layers, SlotCache(config).layers)
    return lazy is DynamicLayer and all(
        _fits(lazy() if layer is None else layer, own, slots) for layer, own in pairs
    )


def _has_appended_layers(cache: Any, config: PreTrainedConfig) -> bool:
    """Whether a cache has layers that no configuration tells of, of a model that appends some."""
    return appends_layers(config) and len(cache.layers) > len(SlotCache(config).layers)


def appends_layers(config: PreTrainedConfig) -> bool:
    """Whether forwards of such a model have appended layers to a cache."""
    return type(config.get_text_config(decoder=True)) in _APPENDING


def _fits(layer: Any, own: Any, slots: RowSlots) -> bool:
    """Whether the model's own layer can stand for another one."""
    if own is None or type(own) in SHARING:
        return True
    like = _slot_layer(layer, slots)
    return (
        type(like) is type(own)
        and not getattr(layer, "record_past", False)
        and getattr(like, "window", None) in (None, getattr(own, "window", None))
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
    if length and has_slots(own) and not (forgetful or _has_appended_layers(own, config)):
        slots = SlotCache.wrapping(own, config)
        slots.take()
        slots.truncate(length)
        slots.give_back()
    elif isinstance(own, DynamicCache):
        own.layers = DynamicCache(config=config).layers
    else:
        own.reset()


def has_static_slots(cache: StaticCache, config: PreTrainedConfig, dtype: torch.dtype) -> bool:
    """Whether a model's static cache keeps every token as far as its layers see, and nothing else,
    in the type that the model computes in.

    Where only windows are kept, and shorter ones than the model's, tokens would be forgotten early.
    """
    known = (StaticLayer, StaticSlidingWindowLayer, *SHARING)
    if cache.offloading or any(type(layer) not in known for layer in cache.layers):
        return False
    states = (states for layer in cache.layers for states in (layer.keys, layer.values))
    if any(x is not None and x.dtype != dtype for x in states):
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
