"""Choosing one token from one row of logits, as transformers' own sampling loop does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ..drafters.base import ChildDraw
from ..drafters.residual import verify_node
from .row_text import RowText

# Processors of transformers whose state follows all rows of a batch from step to step.
_STATEFUL = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)

# Processors of transformers that look at nothing but the scores.
_BLIND = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

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
        self.blind = all(type(processor) in _BLIND for processor in processors)

    @property
    def greedy(self) -> bool:
        """Whether a token is nothing but the maximum of its logits."""
        return not self.do_sample and not len(self.processors)

    def process(self, rows: Sequence[RowText], logits: torch.Tensor) -> torch.Tensor:
        """Processed scores [rows, vocab_size] of rows that may have got unequally far.

        They are processed together where they stand as plain decoding would show them, or where no
        processor looks at the text, and one by one otherwise. A processor that keeps something for
        each row of the batch is then shown the row at its place, repeated to the batch's size.
        """
        if self.blind:
            # The texts, which each new token would first have to be brought to the device for.
            unseen = logits.new_empty((len(rows), 0), dtype=torch.long)
            return self.processors(unseen, logits)
        if len(rows) == self.batch_size and len({len(row) for row in rows}) == 1:
            return self.processors(torch.cat([row.ids for row in rows]), logits)
        return torch.cat(
            [self._process(row, one) for row, one in zip(rows, logits.split(1), strict=True)]
        )

    def _process(self, row: RowText, scores: torch.Tensor) -> torch.Tensor:
        for processor in self.processors:
            if self.batch_size > 1 and isinstance(processor, _ROW_BOUND):
                texts = row.ids.expand(self.batch_size, -1)
                repeated = processor(texts, scores.repeat(self.batch_size, 1))
                scores = repeated[row.index : row.index + 1]
            else:
                scores = processor(row.ids, scores)
        return scores

    def choose(self, scores: torch.Tensor, places: Sequence[int] | None = None) -> list[int]:
        """The tokens of processed scores [rows, vocab_size], by one draw.

        Args:
            scores: of some rows of the batch.
            places: the rows' numbers, to draw for the whole batch as plain decoding does, which
                takes as many random numbers; None: for these rows alone.
        """
        if not self.do_sample:
            return torch.argmax(scores, dim=-1).tolist()
        probs = torch.nn.functional.softmax(scores, dim=-1)
        if places is None or len(places) == self.batch_size:
            return torch.multinomial(probs, num_samples=1)[:, 0].tolist()
        everywhere = probs.new_ones((self.batch_size, probs.shape[1]))
        everywhere[places] = probs
        return torch.multinomial(everywhere, num_samples=1)[places, 0].tolist()

    @staticmethod
    def verify(scores: torch.Tensor, drawn: ChildDraw) -> int:
        """The token of processed scores [vocab_size] by residual sampling.

        Args:
            scores: of one row.
            drawn: the children that were drawn below this place.
        """
        law = torch.nn.functional.softmax(scores, dim=-1)
        return verify_node(law, drawn.draft.to(law.device), drawn.children.to(law.device))[1]


def follows_rows(member: LogitsProcessor | StoppingCriteria) -> bool:
    """Whether a processor or criterion may keep something of the whole batch from call to call.

    Those of transformers do not, but for two; what others do nobody knows.
    """
    known = type(member).__module__.startswith("transformers.")
    return not known or isinstance(member, _STATEFUL)
