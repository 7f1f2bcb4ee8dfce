"""Verification of token trees on a CPU: rows are packed, and forwards repeated from recordings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...host.lookups import ForwardLookups
from ...types.row_text import RowText
from ...types.token_tree import Forest
from ...verification.tree_attention import TreeTokens
from ...verification.verified import Verified
from ...verification.verifiers import TreeVerifier
from .packed_attention import PackedAttention, spans_of
from .repeated_forward import RepeatedForward, can_repeat


class CpuTreeVerifier(TreeVerifier):
    """Verifies one token tree per row; see the module's docstring.

    Packed, the model is shown one row of tokens, [1, tokens], with the positions that they have in
    their texts: every row adds what it feeds and no filler, and rows that have ended are not there.
    Only attention has to know of rows; it is exchanged for the forward and looks every token up in
    its own row's slots.

    Args:
        packed: whether rows that would need filler are packed.
        repeats: what the model's forward looks up, where forwards may be repeated from what was
            recorded of earlier ones; None: they may not.
    """

    def __init__(
        self,
        *args: Any,
        packed: bool = False,
        repeats: ForwardLookups | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.packed, self._repeats = packed, repeats
        self._repeated: RepeatedForward | None = None

    def prepare(self) -> None:
        super().prepare()
        repeats, self._repeats = self._repeats, None
        if repeats is not None and can_repeat(self.model, self.cache, repeats):
            self.call = self._repeated = RepeatedForward(
                self.compute, self.cache, self.kwargs, repeats
            )
            self.cost_variant = "repeated" if self._repeated.repeats else ""
            if len(self.prompt_ids) == 1 and not self.packed:
                self.widths = self._repeated.widths

    def narrow(self) -> None:
        super().narrow()
        self.packed = False

    def _feed(self, roots: Sequence[int], trees: Forest, rows: Sequence[RowText]) -> Verified:
        feed = self._feed_packed if self.packed else super()._feed
        verified = feed(roots, trees, rows)
        if self._repeated is not None:
            verified.typical = self._repeated.typical
        return verified

    def _feed_packed(
        self, roots: Sequence[int], trees: Forest, rows: Sequence[RowText]
    ) -> Verified:
        """Feed rows behind one another, or side by side where that takes no filler."""
        # Other processes may wait for a forward in which no row has anything to feed.
        members = [row.index for row in rows] or [0]
        width = self._bucket(1 + max(trees.sizes))
        fed = TreeTokens.of(roots, trees, self.cache.slots.lengths, members, width)
        if len(fed.rows) == len(trees) and fed.counts.min() == width:
            lined = self._feed_lines(fed)
            return Verified(lined.outputs.logits.flatten(0, 1)[None], lined.roots, lined.outputs)
        ids, lines = fed.packed(self.device)
        arguments, views = self._tree_arguments(lines)
        arguments["position_ids"] = arguments["position_ids"].transpose(-1, -2)
        for name, types in self._token_types.items():
            arguments[name] = types[lines.rows].T
        in_use = fed.lengths + fed.counts
        spans = spans_of(fed.rows.tolist(), fed.counts.tolist(), in_use.tolist())
        extent = self.cache.slots.longest + width
        with self._attending(PackedAttention(spans, extent)):
            # A repeated one would not know of the rows.
            outputs = self._run(ids.T, len(ids), arguments, views, self.compute)
        begins = np.zeros(len(trees), np.int64)
        begins[fed.rows] = fed.begins
        return Verified(outputs.logits, begins.tolist(), outputs)

    def end(self, tokens: int) -> None:
        self._give_back_recordings()
        super().end(tokens)

    def abandon(self) -> None:
        self._give_back_recordings()
        super().abandon()

    def _give_back_recordings(self) -> None:
        """Leave what was recorded to the model's next calls."""
        if self._repeated is not None:
            self.repeated, self.recordings = self._repeated.repeated, self._repeated.recordings
            self._repeated.give_back()
