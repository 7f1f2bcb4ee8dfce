"""Texts that one model drafts for together: each is a row of that model's caches.

Rows are gathered when they are drafted for, so a batch takes one forward a level whatever started
when. A text that is drafted for alone is a batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicLayer

from ..cache.blocks import View, Views
from ..cache.kv_cache import SLOT_LAYERS, SlotCache
from ..cache.slot_layers import NO_VIEWS, SlotLayer
from ..drafters.base import DraftSession
from ..types.token_tree import Forest, TokenTree
from ..verification.tree_attention import LayerMask, Rules, TreeAttention, TreeLayout, table_of


def fed_texts(fills: Tensor, width: int) -> TreeLayout:
    """How texts go on, in lines of which the first `fills` columns hold nothing new.

    What fills a line up lies behind the text's own, so that nobody has to look at it.

    Args:
        fills: int64 [rows or 1, 1].
        width: of a line.
    """
    column = torch.arange(width, device=fills.device)
    offsets = (column - fills) % width
    return TreeLayout(offsets, column[None], column <= offsets[..., None], offsets)


class DraftCache(SlotCache):
    """Keys and values of several texts, and behind each text those of the nodes being drafted.

    Args:
        config: of the layers.
        rules: how far back each kind of layer sees.
        dtype: of the masks.
        rows: texts.

    Attributes:
        first: position of the first token that is cached, of one text.
        last: [rows, hidden_size], what the layers said of the last cached token of each text; None
            where nobody keeps it.
        held: the memory that layers of one kind stay in, and how many slots of it each text has,
            int64 [rows, 1], on the device; None: they grow.
    """

    first = 0
    last: Tensor | None = None
    held: tuple[Any, Tensor] | None = None

    def __init__(self, config: Any, rules: Rules, dtype: torch.dtype, rows: int = 1) -> None:
        # A text may be shortened by more than a window would still hold.
        super().__init__(config, forgets=False)
        self.rules = rules
        self._made_of = config, rules, dtype
        self._attention = TreeAttention(rules, None, dtype)
        self.begin(rows)

    @property
    def joins(self) -> bool:
        """Whether the cache holds one entry per token and nothing else, so that rows of several
        caches can be put together."""
        return all(type(layer) in (SlotLayer, *SLOT_LAYERS) for layer in self.layers)

    @contextmanager
    def feeding(self, fed: TreeLayout) -> Iterator[Any]:
        """Scope of a forward over tokens; gives the mask of those that ask: of a line the last
        ones, of which depths and what they see are told."""
        sees = fed.sees.expand(len(self.slots.lengths), -1, -1)
        if self.held is not None:
            (workspace, kept), rule = self.held, cast(LayerMask, self.rules)
            views: Views = (View(places=(workspace.rows, kept + fed.offsets)),) * 2
            sees, unseen = rule.limited(sees, kept, fed.depths, fed.columns)
            mask: Any = workspace.masks.mask(table_of(sees), unseen, 1 - kept)
        else:
            mask, views = self._attention.masks(fed._replace(sees=sees), self.slots)
        try:
            self.slots.views = views
            yield mask
        finally:
            self.slots.views = NO_VIEWS

    def shorten(self, lengths: Sequence[int]) -> None:
        """Keep at most so many tokens of each row."""
        kept = [min(pair) for pair in zip(self.slots.lengths, lengths, strict=True)]
        self.slots.set_lengths(kept)
        self.keep([[]] * len(kept))

    @classmethod
    def joined(cls, sources: Sequence[tuple[DraftCache, int]]) -> DraftCache:
        """A cache of rows of other ones, in this order; nothing may have been fed behind them."""
        cache = cls(*sources[0][0]._made_of, rows=len(sources))
        cache.slots.set_lengths([source.slots.lengths[row] for source, row in sources])
        for number, layer in enumerate(cache.layers):
            parts = [(source.layers[number], row) for source, row in sources]
            own = [part for part, _ in parts if isinstance(part, SlotLayer)]
            ready = [part for part in own if not part.store.is_empty]
            if ready:
                layer.adopt(_stacked(parts, ready[0], cache.slots.lengths))
        last = [None if source.last is None else source.last[row] for source, row in sources]
        if (like := next((state for state in last if state is not None), None)) is not None:
            blank = torch.zeros_like(like)
            cache.last = torch.stack([blank if state is None else state for state in last])
        return cache

    # Layers that count positions themselves ask for the first one; caches of such are not joined.

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return super().get_query_offset(layer_idx) + self.first

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length, offset + self.first


def _stacked(parts: Sequence[tuple[Any, int]], like: Any, lengths: Sequence[int]) -> DynamicLayer:
    """A layer with the given rows of others."""
    stacked = DynamicLayer()
    stacked.lazy_initialization(like.keys, like.values)
    for name in ("keys", "values"):
        none = getattr(like, name)[0, :, :0]
        states = [
            getattr(layer, name)[row, :, :length] if length else none
            for (layer, row), length in zip(parts, lengths, strict=True)
        ]
        lines = pad_sequence([state.transpose(0, 1) for state in states], batch_first=True)
        setattr(stacked, name, lines.transpose(1, 2).contiguous())
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
        static_drafts: what drafts in the `memory` that the caches stay in, where forwards may be
            recorded; None: they grow.
    """

    static_drafts: Any = None

    def __init__(self, rows: Sequence[RowSession], caches: Sequence[DraftCache]) -> None:
        self.rows: list[Any] = list(rows)
        self.caches = list(caches)
        for index, row in enumerate(rows):
            row.group, row.index = self, index

    def leave(self, index: int) -> None:
        """Go on without a text."""
        self.rows[index] = None
        if not any(self.rows) and self.static_drafts is not None:
            self.static_drafts.memory.release()

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Forget what was fed behind the texts, except the given slots of each row."""
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
        lasts = None not in group.rows or group.static_drafts is not None
        if lasts and all(row.group is group for row in asked):
            return group
        for one in {id(row.group): row.group for row in asked}.values():
            one.settle()
            if one.static_drafts is not None:
                one.static_drafts.memory.show()
        caches = [
            DraftCache.joined([(row.group.caches[number], row.index) for row in asked])
            for number in range(len(group.caches))
        ]
        for row in asked:
            row.group.leave(row.index)
        return cls(asked, caches)


def groups(asked: Sequence[Row]) -> Iterator[tuple[Group, Sequence[Row]]]:
    """Each group, settled, and its texts; one group, unless caches cannot be joined."""
    if not asked:
        return
    caches = cast(Group, asked[0].group).caches
    joins = all(cache.joins for cache in caches)
    for rows in [asked] if joins else [[row] for row in asked]:
        group = Group.of(rows)
        group.settle()
        yield group, rows


def fills_of(fills: Sequence[int], device: torch.device | None = None) -> Tensor:
    """int64 [rows or 1, 1]: how many columns only fill a line up; lines without any are alike."""
    return torch.tensor(fills if max(fills) else [0], device=device)[:, None]


def parts(counts: Sequence[int], longest: int) -> Iterator[list[range]]:
    """What each forward feeds of so many new tokens of every row.

    Each takes at most `longest`, and the last one the newest of every row.
    """
    most = max(counts, default=0)
    for left in range((most - 1) // longest * longest, -1, -longest):
        yield [range(max(0, n - left - longest), max(0, n - left)) for n in counts]


def proposed(drafts: Sequence[TokenTree], budgets: Sequence[int]) -> Forest:
    """The most probable nodes of each draft that have a probability, as its budget allows."""
    return Forest.of([draft.without_nan() for draft in drafts]).prune(budgets)
