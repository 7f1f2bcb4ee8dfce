"""Texts that one model drafts for together: each is a row of that model's caches.

Rows are gathered when they are drafted for, so a batch takes one forward a level whatever started
when. A text that is drafted for alone is a batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..drafters.base import DraftSession
from ..verification.kv_cache import SLOT_LAYERS, SlotCache
from ..verification.slot_layers import SlotLayer
from ..verification.tree_attention import FedTrees, LayerMask, TreeAttention

Int64Array = NDArray[np.int64]
Rules = dict[str, LayerMask] | LayerMask


class DraftCache(SlotCache):
    """Keys and values of several texts, and behind each text those of the nodes being drafted.

    Args:
        config: of the layers.
        rules: how far back each kind of layer sees.
        dtype: of the masks.
        rows: texts.

    Attributes:
        firsts: position of the first token that is cached of each text.
        rules: how far back each kind of layer sees.
    """

    def __init__(self, config: Any, rules: Rules, dtype: torch.dtype, rows: int = 1) -> None:
        super().__init__(config)
        self.rules = rules
        self._made_of = config, rules, dtype
        self._attention = TreeAttention(rules, None, dtype)
        self._depths: Int64Array = np.empty((rows, 0), np.int64)
        self.firsts = [0] * rows
        self.begin(rows)

    @property
    def joins(self) -> bool:
        """Whether the cache holds one entry per token and nothing else, so that rows of several
        caches can be put together."""
        return all(type(layer) in (SlotLayer, *SLOT_LAYERS) for layer in self.layers)

    @property
    def drafted(self) -> int:
        """Tokens fed to each row since the last `keep`."""
        return self._depths.shape[1]

    def feed(self, depths: Int64Array, attends: Tensor) -> Any:
        """Make room behind what was fed since the last `keep`; returns the forward's mask.

        Args:
            depths: [rows, w] of the tokens to be fed, counted from the end of each cached text.
            attends: bool [rows, queries, drafted + w], which of the tokens fed behind the text each
                query sees. The queries are the last of the w tokens.
        """
        before, device = self.drafted, attends.device
        self._depths = np.concatenate([self._depths, depths], axis=1)
        if not self.slots.uniform:
            rows, places = self.slots.index(self.drafted, device)
            self.slots.places = rows, places[:, before:]
            self.slots.extent = self.slots.longest + self.drafted
        asking = attends.shape[1]
        columns = torch.from_numpy(self._depths).to(device)
        queries = columns[:, columns.shape[1] - asking :]
        deepest = int(self._depths[:, columns.shape[1] - asking :].max(initial=0))
        fed = FedTrees(queries, queries, attends, deepest, columns)
        return self._attention.masks(fed, self.slots)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Forget what was fed since the last `keep`, except the given tokens of each row."""
        self.slots.places = self.slots.extent = None
        super().keep(paths)
        self._depths = self._depths[:, :0]

    def shorten(self, lengths: Sequence[int]) -> None:
        """Keep at most so many tokens of each row."""
        kept = [min(pair) for pair in zip(self.slots.lengths, lengths, strict=True)]
        self.slots.set_lengths(kept)
        self.keep([[]] * len(kept))

    @classmethod
    def joined(cls, sources: Sequence[tuple[DraftCache, int]]) -> DraftCache:
        """A cache of rows of other ones, in this order; nothing may have been fed behind them."""
        cache = cls(*sources[0][0]._made_of, rows=len(sources))
        cache.firsts = [source.firsts[row] for source, row in sources]
        cache.slots.set_lengths([source.slots.lengths[row] for source, row in sources])
        for number, layer in enumerate(cache.layers):
            parts = [(source.layers[number], row) for source, row in sources]
            ready = [part for part, _ in parts if isinstance(part, SlotLayer) and part.is_ready]
            if ready:
                layer.adopt(_stacked(parts, ready[0], cache.slots.lengths))
        return cache

    # Layers that count positions themselves ask for the first one; such caches have one row.

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return super().get_query_offset(layer_idx) + self.firsts[0]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length, offset + self.firsts[0]


def _stacked(parts: Sequence[tuple[Any, int]], like: Any, lengths: Sequence[int]) -> DynamicLayer:
    """A layer with the given rows of others."""
    stacked = DynamicLayer()
    stacked.lazy_initialization(like.keys, like.values)
    for name in ("keys", "values"):
        _, heads, _, width = getattr(like, name).shape
        shape = (len(parts), heads, max(lengths), width)
        states = getattr(like, name).new_zeros(shape)
        for place, ((layer, row), length) in enumerate(zip(parts, lengths, strict=True)):
            if length:
                states[place, :, :length] = getattr(layer, name)[row, :, :length]
        setattr(stacked, name, states)
    return stacked


class RowSession(DraftSession):
    """A text that is a row of a group's caches.

    Attributes:
        group, index: which group's, and which row.
        accepted: numbers of the tokens that were fed behind the text and that it went on with.
    """

    def __init__(self, caches: Sequence[DraftCache]) -> None:
        self.accepted: list[int] = []
        self.group: Group
        self.index = 0
        Group([self], caches)

    def close(self) -> None:
        self.group.leave(self.index)
        del self.group


Row = TypeVar("Row", bound=RowSession)


class Recorded(Protocol):
    """Forwards over the caches of a group in memory that stays in place."""

    def keep_fed(self, paths: Sequence[Sequence[int]]) -> None:
        """Forget what was fed since the last time, except the given tokens of each row."""

    def show(self) -> None:
        """Make the layers of the caches, and the texts, show what is kept."""

    def release(self) -> None:
        """Give the memory back, for the model's next drafts."""


class Group:
    """Texts that are drafted for together.

    Attributes:
        rows: the texts; None for one that has left.
        caches: with a row for each.
        recorded: the forwards over the caches, where these stay in place; None: any.
    """

    recorded: Recorded | None = None

    def __init__(self, rows: Sequence[RowSession], caches: Sequence[DraftCache]) -> None:
        self.rows: list[Any] = list(rows)
        self.caches = list(caches)
        for index, row in enumerate(rows):
            row.group, row.index = self, index

    @property
    def joins(self) -> bool:
        return all(cache.joins for cache in self.caches)

    def leave(self, index: int) -> None:
        """Go on without a text."""
        self.rows[index] = None
        if not any(self.rows) and self.recorded is not None:
            self.recorded.release()

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, of what was fed behind each text, the tokens of these numbers."""
        if self.recorded is not None:
            self.recorded.keep_fed(paths)
            return
        for cache in self.caches:
            cache.keep(paths)

    def move_out(self) -> None:
        """Go on in memory of the caches' own."""
        if self.recorded is None:
            return
        self.recorded.show()
        for cache in self.caches:
            for layer in cache.slot_layers:
                layer.move_out()
        self.recorded.release()
        self.recorded = None

    def settle(self) -> None:
        """Forget the nodes fed behind each text, except those that the text went on with."""
        self.keep([[] if row is None else row.accepted for row in self.rows])
        for row in self.rows:
            if row is not None:
                row.accepted = []

    @classmethod
    def of(cls, asked: Sequence[RowSession]) -> Group:
        """The group of these texts, made of their groups where they have several.

        Others of their group come along while it lasts: they cost less than a copy of the caches.
        Where caches stay in place, so do the rows of those that left: a recording has its rows.
        """
        group = asked[0].group
        lasts = None not in group.rows or group.recorded is not None
        if lasts and all(row.group is group for row in asked):
            return group
        for one in {id(row.group): row.group for row in asked}.values():
            one.settle()
            if one.recorded is not None:
                one.recorded.show()
        caches = [
            DraftCache.joined([(row.group.caches[number], row.index) for row in asked])
            for number in range(len(group.caches))
        ]
        for row in asked:
            row.group.leave(row.index)
        return cls(asked, caches)


def groups(asked: Sequence[Row]) -> Iterator[tuple[Group, Sequence[Row]]]:
    """Each group, settled, and its texts; one group, unless caches cannot be joined."""
    several = [asked] if asked[0].group.joins else [[row] for row in asked]
    for rows in several:
        group = Group.of(rows)
        group.settle()
        yield group, rows


def parts(counts: Sequence[int], longest: int) -> Iterator[list[range]]:
    """What each forward feeds of so many new tokens of every row.

    Each takes at most `longest`, and the last one the newest of every row.
    """
    most = max(counts, default=0)
    for left in range((most - 1) // longest * longest, -1, -longest):
        yield [range(max(0, n - left - longest), max(0, n - left)) for n in counts]


def chain(counts: Sequence[int], device: torch.device) -> tuple[Int64Array, Tensor]:
    """Depths [rows, w] and who sees whom [rows, w, w] of so many tokens of each text.

    They stand at the end of w columns; what fills up the others is seen by nobody else.
    """
    width = max(counts)
    column = np.arange(width)
    fill = width - np.array(counts)[:, None]
    depths = np.maximum(column - fill, 0)
    attends = (column <= column[:, None]) & (column >= fill[:, None])
    attends |= np.eye(width, dtype=np.bool_)
    return depths, torch.from_numpy(attends).to(device)


def last_columns(counts: Sequence[int]) -> list[range]:
    """For `keep`: which columns of `chain` are tokens of each text."""
    width = max(counts)
    return [range(width - count, width) for count in counts]
