"""What one forward over the token trees of a batch is fed: tokens, positions and masks.

Fed tokens are laid out per row as root, then the tree's nodes, then filler up to the widest row.
Query q of a row may attend to the row's kept slots, as far as its layer's window reaches, and to
the fed tokens that are q or its ancestors. Distances are measured along the text (a node lies at
its row's length plus its depth), never in slots, since siblings share a position.

What a query sees behind the kept slots stands in a table. A slot's entry is looked up by its
distance from the row's length, so the same few kernels serve any trees at any lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from ..cache.blocks import View, Views
from ..cache.slot_layers import RowSlots
from ..structures import draft_tree
from ..system.lazy import cached_property
from ..types.token_tree import Forest

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

Places = TypeVar("Places", int, Int64Array, torch.Tensor)
"""Places in a row's text, counted from its first token: one, or an array of them."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class LayerMask:
    """How far back the layers of one type see: a sliding window, a chunk, or everything.

    `explicit` layers look into their mask themselves, and so need one where nothing is masked.
    """

    window: int | None = None
    chunk: int | None = None
    explicit: bool = False

    @cached_property
    def reach(self) -> int | None:
        """Tokens a query can see at most, itself included."""
        return self.window or self.chunk

    def last_unseen(self, queries: Places) -> Places:
        """The last place in front of what queries reach, −1 where they reach all."""
        if self.window is not None:
            return queries - self.window
        if self.chunk is not None:
            return queries // self.chunk * self.chunk - 1
        return queries * 0 - 1

    def limited(
        self, sees: Any, kept: Any, depths: Any, columns: Any, start: Any = None
    ) -> tuple[Any, Any]:
        """What queries see within their reach, and the last slot in front of it.

        Args:
            sees: bool [lines, width, columns], whether they see the columns at all.
            kept: int64 [lines, 1], slots that each line has kept, or a number of all.
            depths, columns: int64 [lines or 1, width] and [lines or 1, columns], how far behind the
                root queries and columns lie.
            start: int64 [lines, 1], slots of padding in front of each text; None: there are none.
                All of these are NumPy arrays, or tensors.

        Returns:
            The same as `sees`, and int64 [lines, width, 1]; None: queries reach everything.
        """
        if self.reach is None:
            return sees, None
        if start is None:
            unseen = self.last_unseen(kept + depths)[..., None]
        else:
            unseen = (self.last_unseen(kept - start + depths) + start)[..., None]
        return sees & ((kept + columns)[:, None] > unseen), unseen


Rules = dict[str, LayerMask] | LayerMask
"""One rule per layer type, or a single rule for all layers."""


def every_rule(rules: Rules) -> list[LayerMask]:
    return [rules] if isinstance(rules, LayerMask) else [*rules.values()]


def by_kind(rules: Rules, make: Callable[[LayerMask], Made]) -> dict[str, Made] | Made:
    """What is made of the rule of each layer type, or of the single one."""
    if isinstance(rules, LayerMask):
        return make(rules)
    return {kind: make(rule) for kind, rule in rules.items()}


def layer_masks(config: PreTrainedConfig) -> dict[str, LayerMask]:
    """The mask rule of every layer type that a decoder configuration names."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    rules = {
        "sliding_attention": LayerMask(window=window),
        "chunked_attention": LayerMask(chunk=chunk),
        "indexed_attention": LayerMask(explicit=True),
        # Its names before transformers 5.20.
        "deepseek_sparse_attention": LayerMask(explicit=True),
        "qwen_sparse_attention": LayerMask(explicit=True),
    }
    return {
        kind: rules.get(kind, LayerMask())
        for kind in dict.fromkeys(getattr(config, "layer_types", None) or ())
    }


def single_mask(config: PreTrainedConfig) -> LayerMask:
    """The mask rule of a model whose layers are all alike."""
    if getattr(config, "use_sliding_window", True) is False:
        return LayerMask()
    return LayerMask(
        window=getattr(config, "sliding_window", None),
        chunk=getattr(config, "attention_chunk_size", None),
    )


class TreeLayout(NamedTuple):
    """Where the tokens of a forward lie and what they see, all counted from what is kept of a row.

    A line is a row of the batch, or one token where the tokens of all rows are packed. Where lines
    are alike, one stands for all. All are NumPy arrays, or tensors.

    Attributes:
        depths: int64 [lines or 1, width], of the tokens; the root has depth 0.
        columns: int64 [lines or 1, columns], depths of what lies in the slots behind the kept ones:
            tokens of this forward, and of earlier ones of which none are kept yet.
        sees: bool [lines, width, columns], self or ancestor.
        offsets: int64 [lines or 1, width], in which of these slots the tokens are written; None: in
            the last ones.
        rows: int64 [lines], the rows of packed tokens; None: they are not packed.
    """

    depths: Any
    columns: Any
    sees: Any
    offsets: Any = None
    rows: Int64Array | None = None

    def to(self, device: torch.device) -> TreeLayout:
        """The same on a device, for rows that are not packed."""
        return TreeLayout(*(part.to(device) for part in self[:4]))


class TreeTokens(NamedTuple):
    """A line of tokens for every row that is fed: its root, its tree's nodes, and filler.

    Attributes:
        rows: int64 [n], their numbers in the cache, ascending.
        counts: int64 [n], tokens of each line without filler.
        lengths: int64 [n], slots that each row has kept.
        token_ids: int64 [n, width]; filler repeats the root's.
        depths: int64 [n, width]; the root has depth 0.
        sees: bool [n, width, width], queries and keys: a token itself and those that it descends
            from. Nobody sees filler.
    """

    rows: Int64Array
    counts: Int64Array
    lengths: Int64Array
    token_ids: Int64Array
    depths: Int64Array
    sees: BoolArray

    @classmethod
    def of(
        cls,
        roots: Sequence[int],
        trees: Forest,
        lengths: Sequence[int],
        rows: Sequence[int] | None = None,
        width: int | None = None,
    ) -> TreeTokens:
        """The tokens of trees below their roots.

        Args:
            roots, trees, lengths: of every row in the cache.
            rows: that are fed; None: all. Others have no nodes.
            width: of a line; None: the widest row's.
        """
        nodes = trees.offsets, trees.token_ids, trees.parents
        return cls(*draft_tree.arrange(roots, lengths, *nodes, rows, width or 0))

    @property
    def begins(self) -> Int64Array:
        """int64 [n]: where each row's root stands among the tokens of all, filler left out."""
        return np.cumsum(self.counts) - self.counts

    def lines(self, device: torch.device) -> tuple[torch.Tensor, TreeLayout]:
        """Row by row on a device: int64 [n, width], the tokens, and where they lie."""
        arrays = self.token_ids, self.depths, self.sees
        ids, depths, sees = map(torch.from_numpy, arrays)
        if device.type != "cpu":
            ids, depths, sees = ids.to(device), depths.to(device), sees.to(device)
        return ids, TreeLayout(depths, depths, sees)

    def packed(self, device: torch.device) -> tuple[torch.Tensor, TreeLayout]:
        """A line for every token on a device, whose columns are the tokens of its row."""
        row, column = np.nonzero(np.arange(self.token_ids.shape[1]) < self.counts[:, None])
        own = [a[row, column][:, None] for a in (self.token_ids, self.depths, self.sees)]
        arrays = *own, self.depths[row], column[:, None]
        ids, depths, sees, columns, offsets = (torch.from_numpy(a).to(device) for a in arrays)
        return ids, TreeLayout(depths, columns, sees, offsets, self.rows[row])


def table_of(sees: torch.Tensor) -> torch.Tensor:
    """What `seen_slots` looks up, of queries that see all kept slots within their reach."""
    return F.pad(F.pad(sees, (1, 0), value=True), (0, 1))


def seen_slots(
    table: torch.Tensor, places: torch.Tensor, unseen: torch.Tensor | None, slots: torch.Tensor
) -> torch.Tensor:
    """Which slots each query sees: bool [lines, width, slots].

    Args:
        table: bool [lines, width, columns + 2], whether it sees the kept slots, each of those
            behind them, and those beyond.
        places: int64 [lines, 1, slots], where slots stand in the table.
        unseen: int64 [lines, width, 1], the last slot that its reach leaves out; None: it reaches
            all.
        slots: int64 [lines or 1, slots], their numbers.
    """
    lines, width, entries = table.shape
    if unseen is None:
        places = places.expand(lines, width, -1)
    else:
        places = torch.where(slots[:, None] > unseen, places, entries - 1)
    return table.gather(2, places)


def views_of(fed: TreeLayout, slots: RowSlots, first: int) -> Views:
    """Where tokens are written, and which slots layers show; of those that have a window, from the
    first one on."""
    (width, columns), offsets = fed.sees.shape[1:], fed.offsets
    extent, alike = slots.longest + columns, offsets is None or len(offsets) == 1
    if alike and slots.is_even and fed.rows is None:
        start = extent - (width if offsets is None else offsets.shape[1])
        return View(start, None, extent), View(start, None, extent, first)
    rows, kept = slots.index(fed.depths.device)
    if offsets is None:
        offsets = torch.arange(columns - width, columns, device=kept.device)
    if fed.rows is None:
        places = rows, kept + offsets
    else:
        places = rows[fed.rows].T, (kept[fed.rows] + offsets).T
    return View(None, places, extent), View(None, places, extent, first)


class _Kept(NamedTuple):
    """The slots that the lines of a forward have kept.

    Attributes:
        shortest, longest: the fewest and the most of any line.
        slots: int64 [lines, 1], of each; a number where all have as many.
        tail: int64 [1, slots], those behind the shortest, and where they stand in a table; None
            where all have as many.
    """

    shortest: int
    longest: int
    slots: Any
    tail: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True, eq=False)
class TreeAttention:
    """Builds the additive masks of one call to `generate`.

    Attributes:
        rules: one rule per layer type, or a single rule for all layers.
        prompt_mask: bool [batch, prompt slots], False at padding; None without padding.
        dtype: of the masks, the model's.
    """

    rules: Rules
    prompt_mask: torch.Tensor | None
    dtype: torch.dtype

    def masks(
        self, fed: TreeLayout, slots: RowSlots
    ) -> tuple[dict[str, torch.Tensor | None] | torch.Tensor | None, Views]:
        """The masks of one forward, and what layers are to show.

        Masks are [batch, 1, width, slots shown], of packed tokens [1, 1, tokens, slots shown]; None
        where everything shown is allowed.
        """
        kept, first = _Kept(slots.longest, slots.longest, slots.longest), 0
        if not slots.is_even:
            kept = self._kept(fed, slots)
        one = isinstance(self.rules, LayerMask)
        # Layers that have a window show all where one mask serves all kinds and nothing forgets.
        if self._reach and not (one and (slots.window is None or not slots.forgets)):
            # The query itself takes one place of its reach.
            first = max(0, kept.shortest - self._reach + 1)
        if isinstance(self.rules, LayerMask):
            # A model without a mask may take packed rows for one text.
            mask = self._mask(self.rules, fed, kept, first, fed.rows is not None)
            return mask, views_of(fed, slots, first)
        masks = {}
        for kind, rule in self.rules.items():
            begin = first if rule.reach else 0
            masks[kind] = self._mask(rule, fed, kept, begin, rule.explicit)
        return masks, views_of(fed, slots, first)

    def _kept(self, fed: TreeLayout, slots: RowSlots) -> _Kept:
        rows, columns = fed.rows, fed.sees.shape[2]
        lengths = slots.lengths if rows is None else [slots.lengths[row] for row in rows]
        shortest, longest = min(lengths), max(lengths)
        if shortest == longest:
            return _Kept(shortest, longest, longest)
        device = fed.depths.device
        kept = slots.index(device)[1]
        kept = kept if rows is None else kept[rows]
        tail = torch.arange(shortest, longest + columns, device=device)[None]
        places = (tail + (1 - kept)).clamp(0, columns + 1)[:, None]
        return _Kept(shortest, longest, kept, (tail, places))

    def _mask(
        self, rule: LayerMask, fed: TreeLayout, kept: _Kept, first: int, needed: bool
    ) -> torch.Tensor | None:
        """The mask of the slots from the first one on; None, unless it is needed anyway, where it
        would hide nothing."""
        columns, device = fed.sees.shape[2], fed.depths.device
        padded = self.prompt_mask is not None
        # Whether all slots shown are within the reach of all queries, none of which lies deeper
        # than there are columns.
        near = rule.reach is None or (
            not padded and rule.last_unseen(kept.longest + columns - 1) < first
        )
        if columns == 1 and near and kept.tail is None and not (padded or needed):
            return None
        common, (shown, hidden, bits) = kept.shortest - first, self._values
        if near and kept.tail is None and not padded and device.type == "cpu":
            # Each operator of torch takes ten times as long where others' code was just run.
            made = draft_tree.hiding(fed.sees.numpy().view(np.uint8), common, bits)
            if self.dtype == torch.float32:
                mask = torch.from_numpy(made.view(np.float32))
            else:
                mask = torch.from_numpy(made).view(self.dtype)
            return mask if fed.rows is None else mask.transpose(0, 2)
        seen, unseen, start = fed.sees, None, None
        if padded:
            padding, start = self._padding
            if fed.rows is not None:
                padding, start = padding[fed.rows], start[fed.rows]
        if not near:
            seen, unseen = rule.limited(seen, kept.slots, fed.depths, fed.columns, start)
        if kept.tail is not None:
            slots, places = kept.tail
            seen = seen_slots(table_of(seen), places, unseen, slots)
        # All rows have kept the first ones of the slots shown.
        mask = F.pad(torch.where(seen[:, None], shown, hidden), (common, 0))
        if padded:
            padding = padding[:, None, None, first : kept.shortest]
            mask[..., : padding.shape[-1]].masked_fill_(padding, hidden)
        if unseen is not None:
            index = torch.arange(first, kept.shortest, device=device)
            mask[..., :common].masked_fill_((index <= unseen)[:, None], hidden)
        return mask if fed.rows is None else mask.transpose(0, 2)

    @cached_property
    def _reach(self) -> int:
        """The furthest of any layer of limited reach; 0: there is none."""
        return max((rule.reach or 0 for rule in every_rule(self.rules)), default=0)

    @cached_property
    def _values(self) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.uint8]]:
        """What masks have where queries see, and where they do not; and the bytes of that."""
        hidden = torch.full((1,), torch.finfo(self.dtype).min, dtype=self.dtype, device="cpu")
        return hidden.new_zeros(()), hidden[0], hidden.view(torch.uint8).numpy()

    @cached_property
    def _padding(self) -> tuple[torch.Tensor, torch.Tensor]:
        """bool [batch, prompt slots], and the slot of each row's first token, int64 [batch, 1]."""
        assert self.prompt_mask is not None
        return ~self.prompt_mask, self.prompt_mask.int().argmax(dim=1, keepdim=True)
