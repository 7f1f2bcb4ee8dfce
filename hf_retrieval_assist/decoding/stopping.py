"""When rows of a batch have ended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..types.row_text import RowText, shown
from .selection import known_kinds

# A criterion that is answered from the host, or others that are asked together.
_Part: TypeAlias = StoppingCriteria | StoppingCriteriaList


class Stopping:
    """Decides which rows are finished.

    The criteria of every call (length, end-of-sequence ids) are answered from the host; all others
    are asked after every token, as plain decoding asks them. All are read anew each time and in
    their order, since one may move what the next one says.

    Attributes:
        max_length: tokens that no row gets beyond, as the criteria said behind the last token; None
            without a limit.
        has_eos: whether rows that have ended are padded.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        known = known_kinds(criteria) & {MaxLengthCriteria, EosTokenCriteria}
        self._parts = [*_parts_of(criteria, known)]
        # Whether rows that have got unequally far are asked one by one.
        self._alone = any(isinstance(part, StoppingCriteriaList) for part in self._parts)
        self._limits = [c for c in criteria if type(c) is MaxLengthCriteria and type(c) in known]
        self.max_length = self._limit
        # Plain decoding asks this once, too.
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._ends: dict[int, tuple[Any, tuple[int, int], frozenset[int]]] = {}

    @property
    def _limit(self) -> int | None:
        if len(self._limits) == 1 and type(first := self._limits[0].max_length) is int:
            return first
        # A float or a tensor, where the caller said so; no text gets to infinity or NaN.
        lengths = [float(criterion.max_length) for criterion in self._limits]
        return min(map(math.ceil, filter(math.isfinite, lengths)), default=None)

    @property
    def bounds(self) -> tuple[int | None, frozenset[int]] | None:
        """How long rows get, None: without a limit, and the ids that end them; None where others
        have a say."""
        if self._alone:
            return None
        ends = [self._end_ids(part) for part in self._parts if type(part) is EosTokenCriteria]
        return self._limit, frozenset().union(*ends)

    def finish(
        self,
        walking: Sequence[RowText],
        rows: Sequence[RowText],
        scores: Any,
    ) -> None:
        """Find out after a token of each walking row which rows are finished.

        Rows go on until the last one has met its criteria where there is no end-of-sequence
        criterion, by which plain decoding pads those that have ended.

        Args:
            walking: each with its newest token.
            rows: of the call.
            scores: the call's scores so far, as criteria are shown them; None unless recorded.
        """
        growing = [row for row in walking if row.met is None]
        asked = [[row] for row in growing] if self._alone else [growing]
        for together in asked:
            for row, met in zip(together, self._met(together, scores), strict=True):
                if row.met is None and met:
                    row.met = len(row.generated)
        limit = self.max_length = self._limit
        if self.has_eos:
            for row in walking:
                row.finished = row.met is not None
        elif any(row.met is None for row in rows):
            for row in walking:
                row.finished = row.met is not None and limit is not None and len(row) >= limit
        else:
            end = self.end(rows)
            for row in rows:
                row.finished = len(row.generated) >= end

    def _met(self, rows: Sequence[RowText], scores: Any) -> list[bool]:
        """Whether a criterion is met by each of the rows, which are equally long where others than
        those of every call are asked."""
        met = [False] * len(rows)
        for part in self._parts:
            kind = type(part)
            if kind is MaxLengthCriteria:
                for i, row in enumerate(rows):
                    met[i] |= bool(len(row) >= part.max_length)
            elif kind is EosTokenCriteria:
                ends = self._end_ids(part)
                for i, row in enumerate(rows):
                    met[i] |= row.generated[-1] in ends
            else:
                with shown(rows) as ids:
                    now = part(ids, scores).reshape(len(rows), -1).all(dim=-1).tolist()
                met = [one or other for one, other in zip(met, now, strict=True)]
        return met

    def _end_ids(self, criterion: EosTokenCriteria) -> frozenset[int]:
        """A criterion's, brought from the device when its tensor is another or was written to."""
        ids = criterion.eos_token_id
        if isinstance(ids, torch.Tensor) and not ids.is_inference():
            known = self._ends.get(id(criterion))
            mark = ids._version, ids.data_ptr()
            if known is None or known[0] is not ids or known[1] != mark:
                known = self._ends[id(criterion)] = ids, mark, _listed(ids)
            return known[2]
        return _listed(ids)

    @staticmethod
    def end(rows: Sequence[RowText]) -> int:
        """Tokens that the longest row generates."""
        return max(row.met or 0 for row in rows)

    def deepest(self, row: RowText) -> int | None:
        """How deep a draft of the row may be of use; None without a limit."""
        # The last token that may be generated needs no node: the walk chooses it at its parent.
        return None if self.max_length is None else max(0, self.max_length - len(row) - 1)


def _parts_of(criteria: StoppingCriteriaList, known: set[type]) -> Iterator[_Part]:
    """The criteria in their order, those that are asked behind one another together."""
    for answered, group in groupby(criteria, lambda criterion: type(criterion) in known):
        if answered:
            yield from group
        else:
            yield StoppingCriteriaList(group)


def _listed(ids: Any) -> frozenset[int]:
    return frozenset(torch.as_tensor(ids, device="cpu").flatten().tolist())
