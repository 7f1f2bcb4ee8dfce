"""Attention of rows that stand behind one another in one row of tokens, each over its own slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .attention_scope import Attention


@dataclass(frozen=True)
class PackedSpan:
    """Where some neighbouring rows that are fed equally much lie in a packed forward.

    Attributes:
        row: the first of them in the cache.
        rows: how many they are.
        begin: the first of their tokens among all that are fed.
        width: tokens of each.
        slots: that the longest of them has in use, these tokens included.
    """

    row: int
    rows: int
    begin: int
    width: int
    slots: int


def spans_of(rows: Sequence[int], widths: Sequence[int], slots: Sequence[int]) -> list[PackedSpan]:
    """The spans of rows of the cache, ascending, that are fed so many tokens and then have so many
    slots in use."""
    spans: list[PackedSpan] = []
    begin = 0
    for row, width, used in zip(rows, widths, slots, strict=True):
        last = spans[-1] if spans else None
        if last and last.width == width and last.row + last.rows == row:
            longest = max(last.slots, used)
            spans[-1] = PackedSpan(last.row, last.rows + 1, last.begin, width, longest)
        else:
            spans.append(PackedSpan(row, 1, begin, width, used))
        begin += width
    return spans


class PackedAttention:
    """What computes attention in a packed forward: span by span, by the function in whose place it
    stands, so that a row costs what it feeds and what it has kept.

    Args:
        spans: of all rows that are fed.
        extent: slots that layers show which show all; others leave out some of the first.
    """

    def __init__(self, spans: Sequence[PackedSpan], extent: int):
        self.spans = spans
        self.extent = extent

    def __call__(
        self,
        plain: Attention,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """[1, tokens, heads, width] for queries [1, heads, tokens, depth], keys and values
        [batch, shared heads, slots, depth] and a mask [1, 1, tokens, slots]."""
        first = self.extent - key.shape[2]
        parts = []
        for span in self.spans:
            slots = span.slots - first
            own = slice(span.row, span.row + span.rows), slice(None), slice(slots)
            mask = attention_mask
            if mask is not None:
                mask = _rows(mask[..., :slots], span)
            fed = _rows(query, span)
            out, _ = plain(module, fed, key[own], value[own], mask, **options)
            parts.append(out.flatten(0, 1)[None])
        return torch.cat(parts, dim=1), None


def _rows(packed: torch.Tensor, span: PackedSpan) -> torch.Tensor:
    """[rows, heads, width, ...] of a span's tokens in [1, heads, tokens, ...]."""
    own = packed[0, :, span.begin : span.begin + span.rows * span.width]
    return own.unflatten(1, (span.rows, span.width)).transpose(0, 1)
