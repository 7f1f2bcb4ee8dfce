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
    """Decides for one row at a time whether it is finished.

    The criteria of every call (length, end-of-sequence ids) are answered from the host; all others
    are asked after every token, as plain decoding asks them.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.max_length: int | None = None
        self.eos_ids: frozenset[int] = frozenset()
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.criteria = criteria
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

    def is_met(self, row: RowText, scores: Any) -> bool:
        """Whether a criterion is met by the row as it stands.

        Args:
            row: with its newest token.
            scores: the call's scores so far, as criteria are shown them; None unless recorded.
        """
        done = row.generated[-1] in self.eos_ids or (
            self.max_length is not None and len(row) >= self.max_length
        )
        if len(self.others):
            done = bool(self.others(row.ids, scores).all()) or done
        return done

    def finish(self, row: RowText, rows: Sequence[RowText], scores: Any) -> None:
        """Find out after a token of a row which rows are finished.

        Without an end-of-sequence criterion plain decoding pads nothing: rows go on until the last
        one has met its criteria.
        """
        if row.met is None:
            if not self.is_met(row, scores):
                return
            row.met = len(row.generated)
        if self.has_eos:
            row.finished = True
            return
        if any(other.met is None for other in rows):
            row.finished = self.remaining(row) == 0
            return
        end = self.end(rows)
        for other in rows:
            other.finished = len(other.generated) >= end

    def finish_all(self, rows: Sequence[RowText], ids: torch.Tensor, scores: Any) -> None:
        """Find out after a token of every row which of them have ended; all go on until all have.

        Args:
            rows: of the call, in step.
            ids: int64 [batch, length], their texts.
            scores: the call's so far, [batch, vocab_size] each, as criteria are shown them.
        """
        for row, met in zip(rows, self.criteria(ids, scores).tolist(), strict=True):
            if row.met is None and met:
                row.met = len(row.generated)
        done = all(row.met is not None for row in rows)
        for row in rows:
            row.finished = done

    @staticmethod
    def end(rows: Sequence[RowText]) -> int:
        """Tokens that the longest row generates."""
        return max(row.met or 0 for row in rows)

    def deepest(self, row: RowText) -> int | None:
        """How deep a draft of the row may be of use; None without a limit."""
        # The last token that may be generated needs no node: the walk chooses it at its parent.
        return None if self.max_length is None else max(0, self.max_length - len(row) - 1)

    def remaining(self, row: RowText) -> int | None:
        """Tokens the row may still grow by; None without a limit."""
        return None if self.max_length is None else self.max_length - len(row)
