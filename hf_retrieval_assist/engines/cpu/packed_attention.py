"""Attention of rows that stand behind one another in one row of tokens, each over its own slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from ...host.scopes import Attention
from ...system.lazy import cached_property
from ...system.tensors import thread
from .attention import attention, kernel_result
from .program import UnrecordableError


@dataclass(frozen=True)
class PackedSpan:
    """Where some neighbouring rows lie in a packed forward.

    Attributes:
        row: the first of them in the cache.
        widths: tokens of each.
        begin: the first of their tokens among all that are fed.
        slots: that the longest of them has in use, these tokens included.
    """

    row: int
    widths: Sequence[int]
    begin: int
    slots: int

    @cached_property
    def tokens(self) -> int:
        return sum(self.widths)

    @cached_property
    def filled(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """int64 [rows * width]: the tokens of every row, the last one again where it has fewer than
        the widest; and int64 [tokens]: where they stand among these; None: no row has fewer."""
        widths = torch.tensor(self.widths)
        real = (torch.arange(max(self.widths)) < widths[:, None]).flatten()
        return None if real.all() else (real.cumsum(0) - 1, real.nonzero()[:, 0])

    def rows(self, packed: torch.Tensor) -> torch.Tensor:
        """[rows, heads, width, ...] of these rows' tokens in [1, heads, tokens, ...]."""
        own = packed[0, :, self.begin : self.begin + self.tokens]
        if self.filled is not None:
            own = own[:, self.filled[0].to(own.device)]
        return own.unflatten(1, (len(self.widths), -1)).transpose(0, 1)

    def behind_one_another(self, out: torch.Tensor) -> torch.Tensor:
        """[1, tokens, ...] of [rows, width, ...]."""
        flat = out.flatten(0, 1)
        return (flat if self.filled is None else flat[self.filled[1].to(flat.device)])[None]


def spans_of(rows: Sequence[int], widths: Sequence[int], slots: Sequence[int]) -> list[PackedSpan]:
    """The spans of rows of the cache, ascending, that are fed so many tokens and then have so many
    slots in use.

    A row joins the span of its neighbour where there is no more filler than tokens then: its keys
    are read once for any number of its tokens, and every call takes time too.
    """
    starts, tokens, widest = [0], widths[0], widths[0]
    for i in range(1, len(rows)):
        tokens, widest = tokens + widths[i], max(widest, widths[i])
        neighbours = rows[i] == rows[i - 1] + 1
        if not neighbours or (i + 1 - starts[-1]) * widest > 2 * tokens:
            starts.append(i)
            tokens = widest = widths[i]
    begins = [0, *accumulate(widths)]
    return [
        PackedSpan(rows[first], widths[first:stop], begins[first], max(slots[first:stop]))
        for first, stop in pairwise([*starts, len(rows)])
    ]


class PackedAttention:
    """What computes attention in a packed forward: span by span, by the function in whose place it
    stands, so that a row costs what it feeds and what it has kept. A forward that is recorded notes
    it as a whole: a program is told of the rows by where their tokens are written.

    Args:
        rows, widths, slots: see `spans_of`.
        extent: slots that layers show which show all; others leave out some of the first.
    """

    def __init__(
        self, rows: Sequence[int], widths: Sequence[int], slots: Sequence[int], extent: int
    ):
        self._fed = rows, widths, slots
        self.extent = extent

    @cached_property
    def spans(self) -> list[PackedSpan]:
        return spans_of(*self._fed)

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
        given = query, key, value, attention_mask
        if (recorder := thread.recorder) is None:
            return self._in_spans(lambda *own: plain(module, *own, **options)[0], *given), None
        if plain is not attention:
            raise UnrecordableError("packed rows whose attention is somebody else's")
        compute = partial(self._in_spans, partial(kernel_result, module, options))
        return recorder.attend(compute, *given, options.get("scaling")), None

    def _in_spans(
        self,
        attend: Callable[..., torch.Tensor | None],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> Any:
        """What `attend` gives of each span, behind one another; None where it gives nothing."""
        first, parts = self.extent - key.shape[2], []
        for span in self.spans:
            slots = span.slots - first
            own = slice(span.row, span.row + len(span.widths)), slice(None), slice(slots)
            seen = None if mask is None else span.rows(mask[..., :slots])
            out = attend(span.rows(query), key[own], value[own], seen)
            if out is None:
                return None
            parts.append(span.behind_one_another(out))
        return torch.cat(parts, dim=1)
