"""Choosing one token from one row of logits, as transformers' own sampling loop does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process, stopping_criteria

from ..draft_models.residual import verify_node
from ..drafters.base import ChildDraw
from ..engines.cpu.screen import Sampling
from ..host.plain_step import Rules, choosers_exchanged
from ..structures.lookups import Snapshot
from ..types.row_text import RowText, shown
from ..verification.largest import greatest

Draw = Callable[[torch.Tensor], list[int]]

# Processors of transformers that look at nothing but the scores.
_BLIND = frozenset(
    (
        logits_process.EpsilonLogitsWarper,
        logits_process.EtaLogitsWarper,
        logits_process.InfNanRemoveLogitsProcessor,
        logits_process.LogitNormalization,
        logits_process.MinPLogitsWarper,
        logits_process.SuppressTokensLogitsProcessor,
        logits_process.TemperatureLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
        logits_process.TypicalLogitsWarper,
    )
)

# Processors of transformers that look up their own state by the row's number in the batch.
_ROW_BOUND = (
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
)


def _of_text(processor: Any, row: RowText) -> torch.Tensor:
    return row.ids[0]


def _listed(name: str) -> Callable[[Any, RowText], torch.Tensor]:
    return lambda processor, row: (
        torch.as_tensor(getattr(processor, name), device="cpu").flatten().long()
    )


def _last_of_sequences(processor: Any, row: RowText) -> torch.Tensor:
    return torch.tensor(
        [ids[-1] for ids in processor.sequence_bias], dtype=torch.long, device="cpu"
    )


# Processors of transformers that change the logits of known tokens only, whatever others are, and
# keep nothing of what they are shown.
_TOUCHING: dict[type, Callable[[Any, RowText], torch.Tensor]] = {
    logits_process.MinLengthLogitsProcessor: _listed("eos_token_id"),
    logits_process.MinNewTokensLengthLogitsProcessor: _listed("eos_token_id"),
    logits_process.NoBadWordsLogitsProcessor: _last_of_sequences,
    logits_process.NoRepeatNGramLogitsProcessor: _of_text,
    logits_process.RepetitionPenaltyLogitsProcessor: _of_text,
    logits_process.SequenceBiasLogitsProcessor: _last_of_sequences,
    logits_process.SuppressTokensAtBeginLogitsProcessor: _listed("begin_suppress_tokens"),
    logits_process.SuppressTokensLogitsProcessor: _listed("suppress_tokens"),
}

ROWWISE = frozenset(
    (
        *_BLIND,
        *_TOUCHING,
        *_ROW_BOUND,
        logits_process.BarkEosPrioritizerLogitsProcessor,
        stopping_criteria.EosTokenCriteria,
        logits_process.ExponentialDecayLengthPenalty,
        logits_process.ForcedBOSTokenLogitsProcessor,
        logits_process.ForcedEOSTokenLogitsProcessor,
        stopping_criteria.MaxLengthCriteria,
        stopping_criteria.MaxTimeCriteria,
        stopping_criteria.StopStringCriteria,
        logits_process.WatermarkLogitsProcessor,
    )
)
"""Classes of processors and criteria that say of a row what its own text and scores say. All others
keep something of the batch, look at one row for all, or call what a caller gave them; what
subclasses do nobody knows."""

# Processors by which tokens are drawn, in transformers' order, and the names of their parameters.
_SAMPLING = {
    logits_process.TemperatureLogitsWarper: "temperature",
    logits_process.TopPLogitsWarper: "top_p",
    logits_process.MinPLogitsWarper: "min_p",
}


class TokenSelector:
    """The logits processors on the true prefix, then argmax or one random draw.

    What follows from processors is read of them at each token, since their owners may move their
    settings, or exchange what chooses, at any time.

    Args:
        processors: as `generate` prepared them.
        do_sample: draw from the processed distribution instead of taking its maximum.
        batch_size: rows of the call; see :meth:`process`.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, batch_size: int):
        self.processors = processors
        self.do_sample = do_sample
        self.batch_size = batch_size
        self.rules = Rules(processors, ROWWISE)

    @property
    def kinds(self) -> list[type | None] | None:
        """The class of each processor, None of one whose rule is not known; None where tokens are
        chosen by functions that are not known."""
        if not self.rules.hold:
            return None
        return [self.rules.kind(processor) for processor in self.processors]

    @property
    def blind(self) -> bool:
        """Whether processors look at nothing but the scores."""
        kinds = self.kinds
        return kinds is not None and all(kind in _BLIND for kind in kinds)

    @property
    def shortlist(self) -> int:
        """How many of a row's greatest logits its token is chosen from, where only they and those
        of `touched` matter; 0 where all do, or processors are not known.

        What follows on a top-k warper sees nothing else. So does whoever takes the greatest.
        """
        kinds = self.kinds
        if kinds is None:
            return 0
        count = 0 if self.do_sample else 1
        for processor, kind in zip(self.processors, kinds, strict=True):
            if count and kind in _BLIND and self.do_sample:
                continue  # behind top-k
            if kind is logits_process.TopKLogitsWarper:
                count = processor.top_k
            elif kind is not logits_process.TemperatureLogitsWarper and kind not in _TOUCHING:
                return 0
        return count

    @property
    def sampling(self) -> Sampling | None:
        """By what tokens are drawn from all others; None where something else decides."""
        kinds: Any = self.kinds if self.do_sample else None
        if kinds is None or kinds != [kind for kind in _SAMPLING if kind in kinds]:
            return None
        for one in self.processors:
            removed = getattr(one, "filter_value", -math.inf)
            if removed != -math.inf or getattr(one, "min_tokens_to_keep", 1) != 1:
                return None
        names = map(_SAMPLING.__getitem__, kinds)
        values = zip(names, self.processors, strict=True)
        return Sampling(**{name: float(getattr(one, name)) for name, one in values})

    def touched(self, row: RowText, vocab_size: int) -> torch.Tensor | None:
        """int64 [n], different: the tokens whose logits processors may change; None: none."""
        found = [
            _TOUCHING[type(one)](one, row) for one in self.processors if type(one) in _TOUCHING
        ]
        if not found:
            return None
        ids = torch.cat(found).unique()
        return ids[(ids >= 0) & (ids < vocab_size)]

    @property
    def greedy(self) -> bool:
        """Whether a token is nothing but the maximum of its logits."""
        return not self.do_sample and not len(self.processors) and self.rules.hold

    def settings(self) -> Snapshot:
        """What the processors are set to, to be compared with what they are set to later."""
        held = [vars(processor) for processor in self.processors]
        tensors = [x for one in held for x in one.values() if isinstance(x, torch.Tensor)]
        return Snapshot([*self.processors], [], [self.processors], tensors)

    def process(self, rows: Sequence[RowText], logits: torch.Tensor) -> torch.Tensor:
        """Processed scores [rows, vocab_size] of rows that may have got unequally far.

        They are processed together where they stand as plain decoding would show them, or where no
        processor looks at the text, and one by one otherwise. A processor that keeps something for
        each row of the batch is then shown the row at its place, repeated to the batch's size.
        """
        if self.blind:
            return process_blindly(self.processors, logits)
        if len(rows) == self.batch_size and len({len(row) for row in rows}) == 1:
            with shown(rows) as ids:
                return self.processors(ids, logits)
        return torch.cat(
            [
                self._process(self.processors, row.index, row.ids, one)
                for row, one in zip(rows, logits.split(1), strict=True)
            ]
        )

    def foresee(
        self, row: RowText, logits: torch.Tensor, paths: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Processed scores float32 [nodes, vocab_size] of logits behind drafted tokens.

        Processors that are not known to keep nothing of what they see are left out: they must see
        the text that there will be, and nothing else.

        Args:
            row: the text.
            logits: [nodes, vocab_size].
            paths: for each node, the drafted tokens that lead to it.
        """
        scores = logits.to(copy=True, dtype=torch.float32, device=row.device)
        known = LogitsProcessorList(
            one
            for one in self.processors
            if (kind := self.rules.kind(one)) in _BLIND or kind in _TOUCHING
        )
        if all(type(processor) in _BLIND for processor in known):
            return process_blindly(known, scores)
        return torch.cat(
            [
                self._process(
                    known, row.index, torch.cat([row.ids, row.ids.new_tensor([path])], 1), one
                )
                for path, one in zip(paths, scores.split(1), strict=True)
            ]
        )

    def _process(
        self, processors: LogitsProcessorList, row: int, ids: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        """Of the row of this number, whose text is int64 [1, length]."""
        for processor in processors:
            if self.batch_size > 1 and isinstance(processor, _ROW_BOUND):
                texts = ids.expand(self.batch_size, -1)
                repeated = processor(texts, scores.repeat(self.batch_size, 1))
                scores = repeated[row : row + 1]
            else:
                scores = processor(ids, scores)
        return scores

    def choose(self, scores: torch.Tensor, draw: Draw) -> list[int]:
        """The tokens of processed scores [rows, vocab_size]; `draw` draws from probabilities."""
        if self.do_sample:
            return draw(torch.nn.functional.softmax(scores, dim=-1))
        return (torch.argmax(scores, dim=-1) if choosers_exchanged() else greatest(scores)).tolist()

    @staticmethod
    def verify(scores: torch.Tensor, drawn: ChildDraw) -> int:
        """The token of processed scores [vocab_size] by residual sampling.

        Args:
            scores: of one row.
            drawn: the children that were drawn below this place.
        """
        law = torch.nn.functional.softmax(scores, dim=-1)
        return verify_node(law, drawn.draft.to(law.device), drawn.children.to(law.device))[1]


def process_blindly(processors: LogitsProcessorList, scores: torch.Tensor) -> torch.Tensor:
    """Processed scores [n, vocab_size] of whatever texts, which each new token would first have to
    be brought to the device for. For processors that look at nothing but the scores."""
    return processors(scores.new_empty((len(scores), 0), dtype=torch.long), scores)
