"""The walk: plain decoding along a token tree whose logits are already there.

Every token is chosen exactly as transformers' own sampling loop chooses it: the logits processors
see the true prefix and one row of logits, then argmax or one draw of `torch.multinomial` decides.
The tree only saves forwards: when the chosen token is a child of the current node, its logits are
at hand and the walk goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..token_tree import TokenTree

# Processors of transformers that look up their own state by the row's number in the batch.
_ROW_BOUND = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)


class RowText:
    """The tokens of one row, as the processors and criteria are to see them.

    Attributes:
        index: the row's number in the batch.
        generated: ids generated so far.
        met: tokens that it had generated when its stopping criteria were met; None before.
        finished: whether it generates no more.
    """

    def __init__(self, index: int, prompt_ids: torch.Tensor, capacity: int):
        self.index = index
        self.generated: list[int] = []
        self.met: int | None = None
        self.finished = False
        self._prompt_length = len(prompt_ids)
        self._ids = prompt_ids.new_empty((1, self._prompt_length + capacity))
        self._ids[0, : self._prompt_length] = prompt_ids
        self._written = 0

    def __len__(self) -> int:
        """Tokens of the row, its prompt and padding included."""
        return self._prompt_length + len(self.generated)

    @property
    def last(self) -> int:
        """The last token, which the model has not processed yet."""
        return self.generated[-1]

    @property
    def ids(self) -> torch.Tensor:
        """int64 [1, len(self)]: the prefix that plain decoding would have at this point."""
        length = len(self)
        if length > self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.empty_like(self._ids)], dim=1)
        if self._written < len(self.generated):
            tail = self._ids.new_tensor(self.generated[self._written :])
            self._ids[0, self._prompt_length + self._written : length] = tail
            self._written = len(self.generated)
        return self._ids[:, :length]


class TokenSelector:
    """Chooses the next token from one row of logits.

    Args:
        processors: as `generate` prepared them.
        do_sample: draw from the processed distribution instead of taking its maximum.
        batch_size: rows of the call; see :meth:`process`.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, batch_size: int):
        self.processors = processors
        self.do_sample = do_sample
        self.batch_size = batch_size
        self.greedy = not do_sample and not len(processors)

    def process(self, row: RowText, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores [1, vocab_size] of one row.

        A processor that keeps something for each row of the batch is shown the row at its place,
        repeated to the batch's size, because rows of one batch reach different lengths here.
        """
        ids, scores = row.ids, logits
        for processor in self.processors:
            if self.batch_size > 1 and _needs_batch(processor):
                scores = processor(
                    ids.expand(self.batch_size, -1), scores.repeat(self.batch_size, 1)
                )[row.index : row.index + 1]
            else:
                scores = processor(ids, scores)
        return scores

    def choose(self, scores: torch.Tensor) -> int:
        if self.do_sample:
            probs = torch.nn.functional.softmax(scores, dim=-1)
            return int(torch.multinomial(probs, num_samples=1))
        return int(torch.argmax(scores, dim=-1))


def _needs_batch(processor: LogitsProcessor) -> bool:
    known = type(processor).__module__.startswith("transformers.")
    return not known or isinstance(processor, _ROW_BOUND)


class Stopping:
    """Decides for one row at a time whether it is finished.

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
                limits = {criterion.max_length, self.max_length} - {None}
                self.max_length = min(limits)
            elif type(criterion) is EosTokenCriteria:
                ids = torch.as_tensor(criterion.eos_token_id).flatten().tolist()
                self.eos_ids = self.eos_ids | frozenset(ids)
            else:
                self.others.append(criterion)

    def __call__(self, row: RowText, scores: Any) -> bool:
        done = row.last in self.eos_ids or (
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
        if row.met is None and self(row, scores):
            row.met = len(row.generated)
        if self.has_eos:
            row.finished = row.met is not None
            return
        if any(other.met is None for other in rows):
            row.finished = self.remaining(row) == 0
            return
        end = self.end(rows)
        for other in rows:
            other.finished = len(other.generated) >= end

    @staticmethod
    def end(rows: Sequence[RowText]) -> int:
        """Tokens that the longest row generates."""
        return max(row.met or 0 for row in rows)

    def remaining(self, row: RowText) -> int | None:
        """Tokens the row may still grow by; None without a limit."""
        return None if self.max_length is None else self.max_length - len(row)


def walk(row: RowText, tree: TokenTree, choose: Any, stopped: Any) -> tuple[list[int], list[int]]:
    """Generate tokens along a verified tree until it has no logits for the next one.

    Args:
        row: grows by the generated tokens.
        tree: the nodes that were verified.
        choose: (row, k) -> token, from the logits of the k-th fed token (0: the root).
        stopped: row -> whether the row is finished now.

    Returns:
        The generated tokens, and the indices of the accepted fed tokens (the root's 0 first): those
        that the cache must keep.
    """
    tokens: list[int] = []
    accepted = [0]
    while True:
        token = choose(row, accepted[-1])
        row.generated.append(token)
        tokens.append(token)
        if stopped(row):
            return tokens, accepted
        node = tree.child(accepted[-1] - 1, token) if len(tree) else -1
        if node < 0:
            return tokens, accepted
        accepted.append(node + 1)


def strip_padding(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> Sequence[torch.Tensor]:
    """The prompts of a batch (int64 [batch, length]) without their padding."""
    if attention_mask is None or attention_mask.shape != input_ids.shape:
        return list(input_ids)
    return [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
