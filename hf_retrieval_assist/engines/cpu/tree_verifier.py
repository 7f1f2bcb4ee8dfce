"""Verification of token trees on a CPU: by kernels, from copies of weights, rows being packed and
forwards repeated from recordings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from ...cache.slot_layers import NO_VIEWS
from ...types.row_text import RowText
from ...types.token_tree import Forest
from ...verification.options import CallOptions
from ...verification.tree_attention import TreeTokens
from ...verification.tree_verifier import TreeVerifier
from ...verification.verified import Verified
from ...verification.verifier import ForwardScope
from .copies import Copies
from .packed_attention import PackedAttention
from .program import PackedModel, Program
from .repeated_forward import PATIENCE, RepeatedForward, can_repeat
from .reroute import reroute
from .screened import ScreenedVerified
from .skinny import FEW_ROWS, MAX_ROWS

# Forwards of one token by which one is recorded, and then compared.
MOST_RECORDING = PATIENCE + 3


def are_few(texts: int) -> bool:
    """Whether the kernels verify drafts of so many texts whole: plain decoding of more is
    PyTorch's, and rounds as that."""
    return 0 < texts <= FEW_ROWS


class KernelScope(ForwardScope):
    """The kernels, which compute the forwards of one call.

    Args:
        model: whose.
        options: what the call wants.
    """

    def __init__(self, model: Any, options: CallOptions) -> None:
        self._few = are_few(options.batch)
        # More tokens would not be rounded in half precision as plain decoding rounds them.
        if model.dtype.itemsize < 4 and self._few:
            self.most_tokens = MAX_ROWS

    def prefilling(self) -> AbstractContextManager[Any]:
        return reroute()

    def computing(self) -> AbstractContextManager[Any]:
        return reroute(verifying=self._few)


class CpuTreeVerifier(TreeVerifier):
    """Verifies one token tree per row; see the module's docstring.

    Packed, the model is shown one row of tokens, [1, tokens], with the positions that they have in
    their texts: every row adds what it feeds, and rows that have ended are not there. Some add
    filler where forwards are repeated, so that there are few numbers of tokens. Only attention has
    to know of rows; it is exchanged for the forward and looks every token up in its own row's
    slots.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.packed, options = self.service.packed, self.options
        by_kernels = isinstance(self.scope, KernelScope)
        watched = options.taps is not None and bool(options.taps.layers)
        self._repeats = options.recorded and by_kernels and not watched
        self._repeated: RepeatedForward | None = None
        self._copies: Copies | None = None

    def ready(self) -> None:
        super().ready()
        repeats, self._repeats, options = self._repeats, False, self.options
        if repeats and can_repeat(self.model, self.cache):
            if not options.several:  # whose processes need not have memory for the same ones
                select = None if options.all_logits else options.select
                self._copies = Copies.of(self.model, select, options.extra_memory)
            given = self.model, self.compute, self.cache, self.kwargs
            self._repeated = RepeatedForward(*given, self._copies)
            rows, widths = len(self.prompt_ids), self._repeated.widths
            if widths and (rows == 1 or self.packed):
                # A step in which no row drafts has no filler.
                self.widths = tuple(sorted({rows, *widths}))

    def prepare(self) -> None:
        super().prepare()
        if self._copies is not None:
            self._copies.pack_due()

    @property
    def cost_variant(self) -> str:
        names = "" if self._copies is None else self._copies.names
        repeats = self._repeated is not None and self._repeated.repeats
        return " ".join(filter(None, (names, "repeated" if repeats else "")))

    def call(self, **given: Any) -> Any:
        return (self._repeated or self.compute)(**given)

    @property
    def _single(self) -> Program | None:
        """What repeats a forward of one token, if the model is as it was."""
        repeated = self._repeated
        return repeated.single if repeated is not None and repeated.is_current() else None

    def record_alone(self, feed: Callable[[], object], room: int | None) -> bool:
        """Let forwards of one token without a mask be recorded, if they can be; whether one drafts
        by `draft_alone`.

        Args:
            feed: feeds one token more.
            room: so many at most; None without limit.
        """
        self.ready()
        repeated = self._repeated
        if repeated is None or not repeated.may_record((1, 1)) or self._views_alone() is None:
            return False
        few = room is not None and room <= MOST_RECORDING
        for _ in range(0 if few else MOST_RECORDING):
            if self._single is not None:
                break
            feed()
        single = self._single
        return single is not None and single.output is not None

    def _views_alone(self) -> Any:
        """The views of a forward of one token; None: it has a mask, as those of padded rows
        have."""
        masks, views = self.attention.masks(self._one, self.cache.slots)
        given = masks.values() if isinstance(masks, dict) else [masks]
        return views if all(mask is None for mask in given) else None

    def draft_alone(self, token_id: int, weights: PackedModel) -> torch.Tensor | None:
        """What the output layer would read, [1, 1, depth], behind one token more of the only row,
        which is not kept, with weights in few bits; None: there is no compiled forward of that."""
        slots, single = self.cache.slots, self._single
        if single is None or self._next is None or (views := self._views_alone()) is None:
            return None
        inputs = single.alone(token_id, self._next + slots.longest - self.begun)
        self.feeding, slots.views = True, views
        try:
            x = single.run(inputs, self.cache.layers, (), weights)
        finally:
            slots.views = NO_VIEWS
        if x is not None:
            slots.set_lengths([slots.longest + 1])
            # What is not finite makes NaN of all that the last norm gives.
            self._unsound = self._unsound or math.isnan(float(x[0, 0, 0]))
        return x

    def narrow(self) -> None:
        super().narrow()
        self.packed = False

    def _feed(self, roots: Sequence[int], trees: Forest, rows: Sequence[RowText]) -> Verified:
        feed = self._feed_packed if self.packed else super()._feed
        verified = feed(roots, trees, rows)
        if self._repeated is not None:
            verified.typical = self._repeated.typical
        screened = None if self._copies is None else self._copies.screened
        return verified if screened is None else ScreenedVerified(verified, screened)

    def _feed_packed(
        self, roots: Sequence[int], trees: Forest, rows: Sequence[RowText]
    ) -> Verified:
        """Feed rows behind one another, or side by side where that takes no filler: of those that
        can be repeated behind one another only as many tokens as rows, at one length."""
        # Other processes may wait for a forward in which no row has anything to feed.
        fed = self._filled(roots, trees, [row.index for row in rows] or [0])
        width = fed.token_ids.shape[1]
        beside = len(fed.rows) == len(trees) and fed.counts.min() == width
        if self._repeated is not None and self._repeated.packs:
            beside = beside and width == 1 and self.cache.slots.is_even
        if beside:
            lined = self._feed_lines(fed)
            return Verified(lined.outputs.logits.flatten(0, 1)[None], lined.roots, lined.outputs)
        ids, lines = fed.packed(self.device)
        arguments, views = self._tree_arguments(lines)
        arguments["position_ids"] = arguments["position_ids"].transpose(-1, -2)
        for name, types in self._token_types.items():
            arguments[name] = types[lines.rows].T
        numbers = fed.rows.tolist(), fed.counts.tolist(), (fed.lengths + fed.counts).tolist()
        extent = self.cache.slots.longest + width
        with self._attending(PackedAttention(*numbers, extent)):
            outputs = self._run(ids.T, len(ids), arguments, views)
        begins = np.zeros(len(trees), np.int64)
        begins[fed.rows] = fed.begins
        return Verified(outputs.logits, begins.tolist(), outputs)

    def _filled(self, roots: Sequence[int], trees: Forest, members: Sequence[int]) -> TreeTokens:
        """The tokens of some rows, together as many as one of `widths`, if that is possible: filler
        counts as theirs, and is written where their next tokens are."""
        widest, tokens = 1 + max(trees.sizes), len(members) + len(trees.token_ids)
        wanted = next((width for width in self.widths if width >= tokens), tokens)
        width = max(widest, math.ceil(wanted / len(members)))
        if width > self.most_fed:
            width, wanted = widest, tokens
        fed = TreeTokens.of(roots, trees, self.cache.slots.lengths, members, width)
        room = width - fed.counts
        before = room.cumsum() - room
        return fed._replace(counts=fed.counts + (wanted - tokens - before).clip(0, room))

    def end(self, tokens: int) -> None:
        self._give_back_recordings()
        super().end(tokens)

    def abandon(self) -> None:
        self._give_back_recordings()
        super().abandon()

    def _give_back_recordings(self) -> None:
        """Leave what was recorded to the model's next calls."""
        repeated, self._repeated = self._repeated, None  # each would keep the other, and the cache
        if repeated is not None:
            self.repeated, self.recordings = repeated.repeated, repeated.recordings
            repeated.give_back()
