"""Verification of token trees of unequal sizes: the rows of a batch behind one another.

A forward over padded rows costs their number times the widest tree. Here the model is shown one row
of tokens, [1, tokens], with the positions they have in their texts: every row adds what it feeds
and no filler, and rows that have ended are not there. Only attention has to know of rows; it is
exchanged for the forward and looks every token up in its own row's slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ..decoding.row_text import RowText
from ..kernels.attention_scope import attending
from ..kernels.packed_attention import PackedAttention, spans_of
from ..token_tree import TokenTree
from .host import attention_of
from .kv_cache import RowSlots
from .tree_attention import FedTrees, TreeAttention, arrange
from .verified import Verified
from .verifiers import TreeVerifier


class PackedVerifier(TreeVerifier):
    """Verifies one token tree per row that has not ended; see the module's docstring."""

    packed = True

    def _feed(
        self, roots: Sequence[int], trees: Sequence[TokenTree], rows: Sequence[RowText]
    ) -> Verified:
        # Other processes may wait for a forward in which no row has anything to feed.
        members = [row.index for row in rows] or [0]
        counts = [1 + len(trees[row]) for row in members]
        if len(members) == len(trees) and min(counts) == max(counts):
            return self._feed_alike(roots, trees, rows)
        places = np.repeat(members, counts)
        fed = self._lay_out(
            [roots[row] for row in members], [trees[row] for row in members], counts
        )
        arguments = {
            "attention_mask": self._masks(fed, places),
            "position_ids": self._positions(places, fed),
            **{name: types[places].T for name, types in self._token_types(1).items()},
        }
        starts = np.cumsum([0, *counts[:-1]])
        with self._slots_of(members, counts, np.arange(len(places)) - np.repeat(starts, counts)):
            outputs = self._run(fed.token_ids.T, len(places), arguments)
        first = dict(zip(members, starts.tolist(), strict=True))
        return Verified(outputs.logits, [first.get(row, 0) for row in range(len(trees))], outputs)

    def _feed_alike(
        self, roots: Sequence[int], trees: Sequence[TokenTree], rows: Sequence[RowText]
    ) -> Verified:
        """All rows, as many tokens of each: rows that need no filler cost less side by side."""
        verified = super()._feed(roots, trees, rows)
        logits = verified.outputs.logits
        return Verified(logits.flatten(0, 1)[None], verified.roots, verified.outputs)

    @contextmanager
    def _slots_of(
        self, members: Sequence[int], counts: Sequence[int], numbers: np.ndarray
    ) -> Iterator[None]:
        """Scope of a forward whose tokens are kept and attended to in their own rows' slots.

        Args:
            members, counts: the rows that are fed, and tokens of each.
            numbers: [tokens], counting every row's.
        """
        slots = self.cache.slots
        lengths = np.asarray(slots.lengths)[list(members)]
        extent = slots.longest + max(counts)
        spans = spans_of(members, counts, (lengths + counts).tolist())
        places = (
            self._on_device(np.repeat(members, counts)),
            self._on_device(np.repeat(lengths, counts) + numbers),
        )
        attend = PackedAttention(spans, extent)
        try:
            slots.places, slots.extent = places, extent
            with attending(attention_of(self.model.config), self._modules, attend):
                yield
        finally:
            slots.places = slots.extent = None

    def abandon(self) -> None:
        # The scope may have been interrupted before its end.
        self.cache.slots.places = self.cache.slots.extent = None
        super().abandon()

    def _lay_out(
        self, roots: Sequence[int], trees: Sequence[TokenTree], counts: Sequence[int]
    ) -> FedTrees:
        """The trees as rows of one token each, whose columns are the tokens of the same tree."""
        token_ids, depths, attends = arrange(roots, trees)
        fed = np.arange(token_ids.shape[1]) < np.asarray(counts)[:, None]
        columns = np.repeat(depths, counts, axis=0)
        return FedTrees(
            torch.from_numpy(token_ids[fed][:, None]).to(self.device),
            torch.from_numpy(depths[fed][:, None]).to(self.device),
            torch.from_numpy(attends[fed][:, None]).to(self.device),
            int(depths.max()),
            torch.from_numpy(columns).to(self.device),
        )

    def _masks(
        self, fed: FedTrees, places: np.ndarray
    ) -> dict[str, torch.Tensor | None] | torch.Tensor:
        """Additive masks [1, 1, tokens, slots shown]; `places` are the tokens' rows."""
        attention = self.attention
        prompts = attention.prompt_mask
        prompts = None if prompts is None else prompts[places]
        slots = RowSlots([self.cache.slots.lengths[row] for row in places])
        masks = TreeAttention(attention.rules, prompts, attention.dtype).masks(fed, slots)
        self.cache.slots.view_from = slots.view_from
        if isinstance(masks, dict):
            return {kind: None if m is None else m.transpose(0, 2) for kind, m in masks.items()}
        if masks is None:
            # Without a mask a model would take the rows for one text.
            shape = 1, 1, len(places), slots.longest + fed.columns.shape[1]
            return torch.zeros(shape, dtype=attention.dtype, device=self.device)
        return masks.transpose(0, 2)

    def _positions(self, places: np.ndarray, fed: FedTrees) -> torch.Tensor:
        """[1, tokens], or with a leading axis where the model's position ids have one."""
        first = self._first_positions()[..., places, :]
        return (first + fed.depths).transpose(-1, -2)

    def _on_device(self, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(indices[None]).to(self.device)
