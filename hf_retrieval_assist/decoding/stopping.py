"""When rows of a batch have ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..row_text import RowText


class Stopping:
    """Decides which rows are finished.

    The criteria of every call (length, end-of-sequence ids) are answered from the host; all others
    are asked after every token, as plain decoding asks them.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.max_length: int | None = None
        self.eos_ids: frozenset[int] = frozenset()
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                # A float or a tensor, where the caller said so; no text gets to infinity or NaN.
                if math.isfinite(limit := float(criterion.max_length)):
                    limits: set[Any] = {math.ceil(limit), self.max_length}
                    self.max_length = min(limits - {None})
            elif type(criterion) is EosTokenCriteria:
                ids = torch.as_tensor(criterion.eos_token_id, device="cpu").flatten().tolist()
                self.eos_ids = self.eos_ids | frozenset(ids)
            else:
                self.others.append(criterion)

    def finish(
        self,
        walking: Sequence[RowText],
        rows: Sequence[RowText],
        scores: Any,
        in_step: bool = False,
    ) -> None:
        """Find out after a token of each walking row which rows are finished.

        In step, and without an end-of-sequence criterion, by which plain decoding pads nothing,
        rows go on until the last one has met its criteria.

        Args:
            walking: each with its newest token.
            rows: of the call.
            scores: the call's scores so far, as criteria are shown them; None unless recorded.
            in_step: whether criteria see all rows at once, which then are those that walk.
        """
        asked = [walking] if in_step else [[row] for row in walking if row.met is None]
        for together in asked:
            for row, met in zip(together, self._met(together, scores), strict=True):
                if row.met is None and met:
                    row.met = len(row.generated)
        if self.has_eos and not in_step:
            for row in walking:
                row.finished = row.met is not None
        elif any(row.met is None for row in rows):
            for row in walking:
                row.finished = row.met is not None and self.remaining(row) == 0
        else:
            end = self.end(rows)
            for row in rows:
                row.finished = len(row.generated) >= end

    def _met(self, rows: Sequence[RowText], scores: Any) -> list[bool]:
        """Whether a criterion is met by each of the rows, which are equally long."""
        met = [
            row.generated[-1] in self.eos_ids
            or (self.max_length is not None and len(row) >= self.max_length)
            for row in rows
        ]
        if len(self.others):
            ids = rows[0].ids if len(rows) == 1 else torch.cat([row.ids for row in rows])
            also = self.others(ids, scores).reshape(len(rows), -1).all(dim=-1).tolist()
            met = [one or other for one, other in zip(met, also, strict=True)]
        return met

    @staticmethod
    def end(rows: Sequence[RowText]) -> int:
        """Tokens that the longest row generates."""
        return max(row.met or 0 for row in rows)

    def deepest(self, row: RowText) -> int | None:
        """How deep a draft of the row may be of use; None without a limit."""
        left = self.remaining(row)
        # The last token that may be generated needs no node: the walk chooses it at its parent.
        return None if left is None else max(0, left - 1)

    def remaining(self, row: RowText) -> int | None:
        """Tokens the row may still grow by; None without a limit."""
        return None if self.max_length is None else self.max_length - len(row)
