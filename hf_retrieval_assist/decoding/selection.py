"""Choosing one token from one row of logits, as transformers' own sampling loop does."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from ..drafters.base import ChildDraw
from ..drafters.residual import verify_node
from .row_text import RowText

# Processors of transformers that look up their own state by the row's number in the batch.
_ROW_BOUND = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)


class TokenSelector:
    """The logits processors on the true prefix, then argmax or one draw of `torch.multinomial`.

    Args:
        processors: as `generate` prepared them.
        do_sample: draw from the processed distribution instead of taking its maximum.
        batch_size: rows of the call; see :meth:`process`.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, batch_size: int):
        self.processors = processors
        self.do_sample = do_sample
        self.batch_size = batch_size

    @property
    def greedy(self) -> bool:
        """Whether a token is nothing but the maximum of its logits."""
        return not self.do_sample and not len(self.processors)

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

    def choose(self, scores: torch.Tensor, drawn: ChildDraw | None = None) -> int:
        """The token of processed scores [1, vocab_size].

        Args:
            scores: of one row.
            drawn: children that were drawn below this place, which are then verified by residual
                sampling.
        """
        if not self.do_sample:
            return int(torch.argmax(scores, dim=-1))
        probs = torch.nn.functional.softmax(scores, dim=-1)
        if drawn is None:
            return int(torch.multinomial(probs, num_samples=1))
        law = probs[0]
        return verify_node(law, drawn.draft.to(law.device), drawn.children.to(law.device))[1]


def _needs_batch(processor: LogitsProcessor) -> bool:
    known = type(processor).__module__.startswith("transformers.")
    return not known or isinstance(processor, _ROW_BOUND)
