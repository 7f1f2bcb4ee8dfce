"""Verification of token trees on a CPU: by kernels, from copies of weights, rows being packed and
forwards repeated from recordings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch

from ...system.lazy import cached_property
from ...types.row_text import RowText
from ...types.token_tree import Forest
from ...verification.options import CallOptions
from ...verification.tree_attention import TreeLayout, TreeTokens
from ...verification.tree_verifier import TreeVerifier
from ...verification.verified import Verified
from ...verification.verifier import ForwardScope
from .copies import Copies
from .packed_attention import PackedAttention
from .program import PackedModel
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
    def drafts_levels(self) -> bool:
        """Whether `draft_level` may come to give something, as far as is known."""
        repeats = self._repeats or self._repeated is not None
        return repeats and (self.packed or len(self.prompt_ids) == 1)

    def record_level(self, rows: Sequence[int], token_ids: Sequence[int], room: int | None) -> bool:
        """Let forwards that `draft_level` needs be recorded, if they can be; whether one is.

        Args:
            rows, token_ids: what it will be given first.
            room: so many tokens more at most of each row; None without limit.
        """
        self.ready()
        repeated, prospect = self._repeated, None
        most = MOST_RECORDING if room is None else min(room, MOST_RECORDING)
        while repeated is not None and prospect is None:
            prospect, _ = self._fed_level(rows, token_ids, repeated.prospect)
            if prospect is not None or not most:
                break
            self._fed_level(rows, token_ids, self.call)
            self._unsound = True  # nobody has looked at the logits
            self._grow(rows)
            most -= 1
        return bool(prospect)

    def draft_level(
        self, rows: Sequence[int], token_ids: Sequence[int], weights: PackedModel
    ) -> torch.Tensor | None:
        """What the output layer would read, [rows, depth] until the next call, behind a token more
        of some rows, which is not kept, with other weights; None: no program computes it by now.

        Args:
            rows: their numbers in the batch, ascending.
            token_ids: of each.
        """
        assert self._repeated is not None
        x, begins = self._fed_level(rows, token_ids, partial(self._repeated.draft, weights))
        if x is None:
            self._unsound = True
            return None
        self._grow(rows)
        x = x.view(-1, x.shape[-1])
        x = x if len(begins) == len(x) else x[begins]
        # What is not finite makes NaN of all that the last norm gives.
        self._unsound = self._unsound or math.isnan(float(x[:, 0].sum()))
        return x

    def _fed_level(
        self, rows: Sequence[int], token_ids: Sequence[int], call: Callable[..., Any]
    ) -> tuple[Any, list[int]]:
        """What `call` makes of a forward of one token of each of some rows, and where these are
        among all that it is given."""
        if len(self.prompt_ids) == 1:
            arguments, views = self._tree_arguments(self._one)
            return self._run(torch.tensor([token_ids]), 1, arguments, views, call), [0]
        tokens = dict(zip(rows, token_ids, strict=True))
        roots = [tokens.get(row, 0) for row in range(len(self.prompt_ids))]
        fed = self._filled(roots, Forest.empty(len(roots)), rows)
        return self._feed_behind(fed, call), fed.begins.tolist()

    @cached_property
    def _one(self) -> TreeLayout:
        """A token behind the only row."""
        nothing = torch.zeros((1, 1), dtype=torch.int64)
        return TreeLayout(nothing, nothing, torch.ones((1, 1, 1), dtype=torch.bool))

    def _grow(self, rows: Sequence[int]) -> None:
        """Count the tokens that were just fed to rows, until the draft is forgotten."""
        slots = self.cache.slots
        slots.set_lengths([n + (row in rows) for row, n in enumerate(slots.lengths)])

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
        outputs = self._feed_lines(fed) if beside else self._feed_behind(fed)
        begins = np.zeros(len(trees), np.int64)
        begins[fed.rows] = fed.begins
        return Verified(outputs.logits.flatten(0, 1)[None], begins.tolist(), outputs)

    def _feed_behind(self, fed: TreeTokens, call: Any = None) -> Any:
        """What a forward gives, or `call` in its place, that is fed rows behind one another."""
        ids, lines = fed.packed(self.device)
        arguments, views = self._tree_arguments(lines)
        arguments["position_ids"] = arguments["position_ids"].transpose(-1, -2)
        for name, types in self._token_types.items():
            arguments[name] = types[lines.rows].T
        numbers = fed.rows.tolist(), fed.counts.tolist(), (fed.lengths + fed.counts).tolist()
        extent = self.cache.slots.longest + fed.token_ids.shape[1]
        with self._attending(PackedAttention(*numbers, extent)):
            return self._run(ids.T, len(ids), arguments, views, call)

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
