"""Verification of one token tree per row, under a mask that shows every node its path alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..cache.blocks import Views
from ..host.scopes import Attention, attending
from ..host.transformers_private import attention_of, input_device
from ..system.lazy import cached_property
from ..types.row_text import RowText
from ..types.token_tree import Forest, TokenTree
from .tiers import has_padding
from .tree_attention import TreeAttention, TreeLayout, TreeTokens
from .verified import Verified
from .verifier import Verifier


class TreeVerifier(Verifier):
    """Verifies one token tree per row; rows advance independently.

    A forward over padded rows costs their number times the widest tree.

    Attributes:
        attention: builds the masks of the trees behind the prompts.
        lends_cache: whether a drafter that runs the model itself may write behind the texts.
    """

    lends_cache = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        mask = None
        if has_padding(self.kwargs):
            mask = self.kwargs["attention_mask"].bool().to(input_device(self.model))
        self.attention = TreeAttention(self.service.rules, mask, self.model.dtype)
        self._unsound = False  # whether drafts since the last `clear_draft` had NaN for logits

    def _bucket(self, width: int) -> int:
        fitting = (bucket for bucket in self.widths if width <= bucket <= self.most_fed)
        return next(fitting, width)

    @cached_property
    def _modules(self) -> frozenset[nn.Module]:
        """Whose attention belongs to these forwards; hooks may call other models."""
        return frozenset(self.model.modules())

    def _attending(self, attend: Attention) -> attending:
        """Scope of a forward whose attention is computed otherwise."""
        return attending(attention_of(self.model.config), self._modules, attend)

    def forward(self, rows: Sequence[RowText], trees: Forest) -> Verified:
        return self._feed(
            [row.last for row in rows], trees, [row for row in rows if not row.finished]
        )

    def _feed(self, roots: Sequence[int], trees: Forest, rows: Sequence[RowText]) -> Verified:
        """Feed roots and trees, one of each per row of the batch, for the sake of some rows."""
        width = self._bucket(1 + max(trees.sizes))
        fed = TreeTokens.of(roots, trees, self.cache.slots.lengths, None, width)
        outputs = self._feed_lines(fed)
        return Verified(outputs.logits, [0] * len(roots), outputs)

    def _feed_lines(self, fed: TreeTokens, call: Any = None) -> Any:
        """What a forward gives, or `call` in its place, that is fed rows side by side, each filled
        up to the widest."""
        ids, lines = fed.lines(self.device)
        return self._run(ids, ids.shape[1], *self._tree_arguments(lines), call)

    @cached_property
    def _next(self) -> int | None:
        """The position behind every row's prompt; None where rows have several."""
        found = self.next_position
        alike = found.ndim == 2 and bool((found == found[0]).all())
        return int(found[0, 0]) if alike else None

    def _tree_arguments(self, fed: TreeLayout) -> tuple[dict[str, Any], Views]:
        """Masks and positions of each line, and where layers are written to."""
        slots, positions = self.cache.slots, self.next_position
        masks, views = self.attention.masks(fed, slots)
        # Each row's root's: [batch, 1], or with a leading axis where ids have one.
        if self._next is not None and slots.is_even and fed.depths.shape[0] == positions.shape[0]:
            begin = self._next + slots.longest - self.begun
            if fed.depths.is_cpu:
                ids = torch.from_numpy(fed.depths.numpy() + begin)
            else:
                ids = fed.depths + begin
            return {"attention_mask": masks, "position_ids": ids}, views
        if fed.rows is None and slots.is_even:
            positions = positions + (slots.longest - self.begun)
        else:
            positions = positions + (slots.index(self.device)[1] - self.begun)
        if fed.rows is not None:
            positions = positions[..., fed.rows, :]
        return {"attention_mask": masks, "position_ids": positions + fed.depths}, views

    def feed_again(self, texts: Sequence[Sequence[int]]) -> None:
        """Feed texts, as many tokens of each row, which are not kept, to whoever sees the model's
        layers."""
        trees = Forest.of([TokenTree.chain(ids[1:], [1.0] * len(ids[1:])) for ids in texts])
        roots = [ids[0] for ids in texts]
        fed = TreeTokens.of(roots, trees, self.cache.slots.lengths, None, len(texts[0]))
        self._unsound = True  # unless somebody looked at the logits
        self._feed_lines(fed, self.compute)

    def clear_draft(self) -> None:
        """Drop what was fed and is not kept."""
        self.cache.truncate(self.cache.slots.longest)
        self.feeding = False
        if self._unsound:
            self.cache.zero_unused()
            self._unsound = False

    def undo(self) -> None:
        self._unsound = True
        self.clear_draft()

    def keep(
        self, rows: Sequence[RowText], verified: Verified, accepted: Sequence[Sequence[int]]
    ) -> None:
        self.cache.keep(accepted)
        self.feeding = False

    def catch_up(self, rows: Sequence[RowText], tokens: int) -> None:
        stops = [min(tokens - 1, done + self._most_lacking) for done in self.processed]
        fed = [row.fed(*span) for row, *span in zip(rows, self.processed, stops, strict=True)]
        roots = [ids[0] if ids else row.last for row, ids in zip(rows, fed, strict=True)]
        trees = Forest.of([TokenTree.chain(ids[1:], [1.0] * len(ids[1:])) for ids in fed])
        lacking = [row for row, ids in zip(rows, fed, strict=True) if ids]
        self.keep(rows, self._feed(roots, trees, lacking), [range(len(ids)) for ids in fed])
