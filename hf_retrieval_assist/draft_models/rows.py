"""Texts that one model drafts for together: each is a row of that model's caches.

Rows are gathered when they are drafted for, so a batch takes one forward a level whatever started
when. A text that is drafted for alone is a batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..drafters.base import DraftSession
from ..token_tree import Forest, TokenTree
from ..verification.fixed_memory import FixedMemory
from ..verification.kv_cache import SLOT_LAYERS, SlotCache
from ..verification.slot_layers import SlotLayer
from ..verification.tree_attention import FedTrees, Rules, TreeAttention, table_of

Int64Array = NDArray[np.int64]


class DraftCache(SlotCache):
    """Keys and values of several texts, and behind each text those of the nodes being drafted.

    Args:
        config: of the layers.
        rules: how far back each kind of layer sees.
        dtype: of the masks.
        rows: texts.

    Attributes:
        rules: as given.
        firsts: position of the first token that is cached of each text.
        last: [rows, hidden_size], what the layers said of the last cached token of each text; None
            where nobody keeps it.
        memory: that the layers stay in; None: they grow.
    """

    memory: FixedMemory | None = None
    last: Tensor | None = None

    def __init__(self, config: Any, rules: Rules, dtype: torch.dtype, rows: int = 1) -> None:
        # A text may be shortened by more than a window would still hold.
        super().__init__(config, forgets=False)
        self.rules = rules
        self._made_of = config, rules, dtype
        self._attention = TreeAttention(rules, None, dtype)
        self.firsts = [0] * rows
        self.begin(rows)

    @property
    def joins(self) -> bool:
        """Whether the cache holds one entry per token and nothing else, so that rows of several
        caches can be put together."""
        return all(type(layer) in (SlotLayer, *SLOT_LAYERS) for layer in self.layers)

    def feed(
        self,
        offsets: Tensor | Int64Array,
        depths: Tensor | Int64Array,
        columns: Tensor | Int64Array,
        sees: Tensor,
        deepest: int = 0,
        kept: Tensor | None = None,
    ) -> Any:
        """Say where the next tokens are written; returns the mask of those that ask.

        Arrays are sent to the device of `sees`.

        Args:
            offsets: int64 [rows or 1, w], the slots of the tokens, counted from the end of each
                cached text.
            depths: int64 [rows or 1, q], of the last q tokens, which ask. Depths, too, are counted
                from the end of each cached text.
            columns: int64 [rows or 1, n], depths of what lies in the n slots behind each text.
            sees: bool [rows, q, n], which of these slots each token sees.
            deepest: the largest of `depths`; only for layers that grow.
            kept: int64 [rows, 1], slots that each text has; only for layers that stay in place.
        """
        offsets, depths, columns = (
            x if isinstance(x, Tensor) else torch.tensor(x, device=sees.device)
            for x in (offsets, depths, columns)
        )
        if kept is not None:
            return self._feed_in_place(offsets, depths, columns, sees, kept)
        rows, count = len(self.slots.lengths), columns.shape[1]
        if not self.slots.uniform or len(offsets) > 1:
            every, lengths = self.slots.index(1, sees.device)
            self.slots.places = every, lengths + offsets
            self.slots.extent = self.slots.longest + count
        queries = depths.expand(rows, -1)
        fed = FedTrees(queries, queries, sees, columns.expand(rows, -1), deepest)
        masks, self.slots.view_from = self._attention.masks(fed, self.slots)
        return masks

    def _feed_in_place(
        self, offsets: Tensor, depths: Tensor, columns: Tensor, sees: Tensor, kept: Tensor
    ) -> Tensor:
        """The same of one kind of layer, from numbers on the device alone."""
        rule: Any = self.rules
        assert self.memory is not None
        workspace = self.memory.workspace
        self.slots.places = workspace.rows, kept + offsets
        sees, unseen = rule.limited(sees, kept, depths, columns)
        mask: Tensor = workspace.masks.mask(table_of(sees), unseen, 1 - kept)
        return mask

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Forget what was fed behind the texts, except the given slots of each row."""
        self.slots.places = self.slots.extent = None
        super().keep(paths)

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
        last = [None if source.last is None else source.last[row] for source, row in sources]
        if (like := next((state for state in last if state is not None), None)) is not None:
            blank = torch.zeros_like(like)
            cache.last = torch.stack([blank if state is None else state for state in last])
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
        group, index: which group's, and which row; no group once the text has left it.
        accepted: slots behind the text, of tokens that were fed there and that it went on with.
    """

    group: Group | None

    def __init__(self, caches: Sequence[DraftCache]) -> None:
        self.accepted: list[int] = []
        self.index = 0
        Group([self], caches)

    def close(self) -> None:
        """Leave the group; nothing is drafted for the text any more."""
        if self.group is not None:
            self.group.leave(self.index)
        self.group = None


Row = TypeVar("Row", bound=RowSession)


class Group:
    """Texts that are drafted for together.

    Attributes:
        rows: the texts; None for one that has left.
        caches: with a row for each.
        in_place: the caches in memory that stays in place, where forwards may be recorded; None:
            they grow. It can `keep_fed` slots, as `keep` does, make the caches `show` what is kept,
            and `release` the memory.
    """

    in_place: Any = None

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
        if not any(self.rows) and self.in_place is not None:
            self.in_place.release()

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Forget what was fed behind the texts, except the given slots of each row."""
        if self.in_place is not None:
            self.in_place.keep_fed(paths)
            return
        for cache in self.caches:
            cache.keep(paths)

    def settle(self) -> None:
        """Forget the nodes fed behind each text, except those that the text went on with."""
        self.keep([[] if row is None else row.accepted for row in self.rows])
        for row in self.rows:
            if row is not None:
                row.accepted = []

    @classmethod
    def of(cls, asked: Sequence[Any]) -> Group:
        """The group of these texts, made of their groups where they have several.

        Others of their group come along while it lasts: they cost less than a copy of the caches.
        Where caches stay in place, so do the rows of those that left: a recording has its rows.
        """
        group: Group = asked[0].group
        lasts = None not in group.rows or group.in_place is not None
        if lasts and all(row.group is group for row in asked):
            return group
        for one in {id(row.group): row.group for row in asked}.values():
            one.settle()
            if one.in_place is not None:
                one.in_place.show()
        caches = [
            DraftCache.joined([(row.group.caches[number], row.index) for row in asked])
            for number in range(len(group.caches))
        ]
        for row in asked:
            row.group.leave(row.index)
        return cls(asked, caches)


def groups(asked: Sequence[Row]) -> Iterator[tuple[Group, Sequence[Row]]]:
    """Each group, settled, and its texts; one group, unless caches cannot be joined."""
    joins = asked[0].group is not None and asked[0].group.joins
    for rows in [asked] if joins else [[row] for row in asked]:
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


def offsets_of(counts: Sequence[int], width: int) -> Int64Array:
    """int64 [rows, width], the slots behind each text of a line that ends with `counts` of its new
    tokens; what fills the line up lies behind them, so that nobody has to look at it."""
    return (np.arange(width) - (width - np.array(counts))[:, None]) % width


def proposed(drafts: Sequence[TokenTree], budgets: Sequence[int]) -> Forest:
    """The most probable nodes of each draft that have a probability, as its budget allows."""
    return Forest.of([draft.without_nan() for draft in drafts]).prune(budgets)
