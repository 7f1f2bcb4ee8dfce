"""Choosing one token from one row of logits, as transformers' own sampling loop does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process, stopping_criteria

from ..draft_models.residual import ChildDraw, verify_node
from ..drafters.call_view import Among, Law, Preview
from ..host.written import is_librarys
from ..structures.scores import Scores
from ..types.row_text import RowText, shown
from ..verification.largest import argmax_rows, host_scores, largest
from .draws import KnownDraws
from .quotients import drawn

BLIND = frozenset(
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
"""Processors of transformers that look at nothing but the scores."""

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


TOUCHING: dict[type, Callable[[Any, RowText], torch.Tensor]] = {
    logits_process.MinLengthLogitsProcessor: _listed("eos_token_id"),
    logits_process.MinNewTokensLengthLogitsProcessor: _listed("eos_token_id"),
    logits_process.NoBadWordsLogitsProcessor: _last_of_sequences,
    logits_process.NoRepeatNGramLogitsProcessor: _of_text,
    logits_process.RepetitionPenaltyLogitsProcessor: _of_text,
    logits_process.SequenceBiasLogitsProcessor: _last_of_sequences,
    logits_process.SuppressTokensAtBeginLogitsProcessor: _listed("begin_suppress_tokens"),
    logits_process.SuppressTokensLogitsProcessor: _listed("suppress_tokens"),
}
"""Processors of transformers that change the logits of known tokens only, whatever others are, and
keep nothing of what they are shown; given one and a row, the tokens."""

_FORBIDDING: dict[type, tuple[str, Callable[[Any, int], bool]]] = {
    logits_process.MinLengthLogitsProcessor: ("eos_token_id", lambda one, n: n < one.min_length),
    logits_process.MinNewTokensLengthLogitsProcessor: (
        "eos_token_id",
        lambda one, n: n - one.prompt_length_to_skip < one.min_new_tokens,
    ),
    logits_process.SuppressTokensAtBeginLogitsProcessor: (
        "begin_suppress_tokens",
        lambda one, n: n == one.begin_index,
    ),
    logits_process.SuppressTokensLogitsProcessor: ("suppress_tokens", lambda one, n: True),
}
"""Processors of transformers that do nothing but forbid listed tokens: which list, and whether to,
by the length of the text. They look for the list in all tokens, which takes a quarter of a step of
a small model with many tokens."""

ROWWISE = frozenset(
    (
        *BLIND,
        *TOUCHING,
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


def known_kinds(members: Iterable[Any]) -> set[type]:
    """The classes of processors or criteria of which that holds, as transformers wrote them."""
    kinds = {type(member) for member in members} & ROWWISE
    return {kind for kind in kinds if is_librarys(kind.__call__)}


_LAW = {
    logits_process.TemperatureLogitsWarper: "temperature",
    logits_process.TopKLogitsWarper: "top_k",
    logits_process.TopPLogitsWarper: "top_p",
    logits_process.MinPLogitsWarper: "min_p",
}
"""Processors that tokens are drawn by, in transformers' order, and what they set of a `Law`."""

# A top-k that leaves more takes no less time than all; so many more are looked at for equals of the
# last one.
_FEW, _MORE = 256, 32


class TokenSelector:
    """The logits processors on the true prefix, then argmax or one random draw.

    What follows from processors is read of them at each token, since their owners may move their
    settings at any time.

    Args:
        processors: as `generate` prepared them.
        do_sample: draw from the processed distribution instead of taking its maximum.
        rows: of the call.

    Attributes:
        draws: the call's random draws.
        known: the classes of processors whose rule is known.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, rows: Sequence[RowText]):
        self.processors, self.do_sample, self.rows = processors, do_sample, rows
        self.known = known_kinds(processors)
        self.draws = KnownDraws(rows)
        self._blind = BLIND & self.known
        self._device = rows[0].device

    @property
    def kinds(self) -> list[type | None]:
        """The class of each processor, None of one whose rule is not known."""
        return [type(one) if type(one) in self.known else None for one in self.processors]

    @property
    def blind(self) -> bool:
        """Whether processors look at nothing but the scores."""
        return self._blind.issuperset(map(type, self.processors))

    @property
    def greedy(self) -> bool:
        """Whether a token is nothing but the maximum of its logits."""
        return not self.do_sample and not len(self.processors)

    @property
    def law(self) -> Law | None:
        """What tokens are drawn by; None where something else decides, or greedily."""
        kinds: Any = self.kinds
        if not self.do_sample or kinds != [kind for kind in _LAW if kind in kinds]:
            return None
        for one in self.processors:
            removed = getattr(one, "filter_value", -math.inf)
            if removed != -math.inf or getattr(one, "min_tokens_to_keep", 1) != 1:
                return None
        return self.known_law

    @property
    def known_law(self) -> Law:
        """What tokens are drawn by besides processors that are not known."""
        if not self.do_sample:
            return Law()
        kinds: Any = zip(self.kinds, self.processors, strict=True)
        known = {_LAW[kind]: one for kind, one in kinds if kind in _LAW}
        return Law(1.0)._replace(**{name: getattr(one, name) for name, one in known.items()})

    def settings(self) -> list[Any]:
        """What the processors are set to, to be compared with what they are set to later."""
        return [
            (id(one), name, _mark_of(x) if isinstance(x, torch.Tensor) else x)
            for one in self.processors
            for name, x in vars(one).items()
        ]

    def choose(self, rows: Sequence[RowText], logits: torch.Tensor) -> list[int]:
        """The next tokens of rows from their logits [rows, vocab_size]."""
        if not len(self.processors):  # nobody writes to them
            return self.pick(rows, logits.to(dtype=torch.float32, device=self._device))
        if self.do_sample and (table := host_scores(logits)) is not None:
            tokens = self.draw_of_few(rows, table.columns, partial(_greatest, table))
            if tokens is not None:
                return tokens
        return self.pick(rows, self.process(rows, self.copied(logits)))

    def draw_of_few(
        self, rows: Sequence[RowText], vocab_size: int, greatest: Callable[[int], Any]
    ) -> list[int] | None:
        """The next tokens of rows, of which a top-k leaves few; None where all logits are needed.

        Args:
            greatest: given how many, for each row int32 ids of the greatest logits and these,
                float32, descending; None: they are not known.
        """
        law = self.law
        if law is None or law.top_k > _FEW or not self.draws.reaches(rows, vocab_size):
            return None
        if not self.draws.tells_single:
            return None
        found = greatest(min(law.top_k + _MORE, vocab_size))
        if found is None:
            return None
        tokens = []
        for row, (ids, logits) in zip(rows, found, strict=True):
            token = self.draws.token_among(row, ids, logits, law)
            if token is None:
                return None
            tokens.append(token)
        self.draws.go_on(rows)
        return tokens

    def copied(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy in float32 on the prompt's device, as plain decoding makes one."""
        return logits.to(copy=True, dtype=torch.float32, device=self._device)

    def process(self, rows: Sequence[RowText], logits: torch.Tensor) -> torch.Tensor:
        """Processed scores [rows, vocab_size] of rows that may have got unequally far.

        They are processed together where they stand as plain decoding would show them, or where no
        processor looks at the text, and one by one otherwise. A processor that keeps something for
        each row of the batch is then shown the row at its place, repeated to the batch's size.
        """
        if self.blind:
            return process_blindly(self.processors, logits)
        whole = len(rows) == len(self.rows)
        if whole and (len(rows) == 1 or len({len(row) for row in rows}) == 1):
            with shown(rows) as ids:
                if not self._forbids:
                    return self.processors(ids, logits)
                for processor in self.processors:
                    logits = self._applied(processor, ids, logits)
                return logits
        parts = zip(rows, logits.split(1), strict=True)
        return torch.cat([self._process(self.processors, row, row.ids, one) for row, one in parts])

    def pick(self, rows: Sequence[RowText], scores: torch.Tensor) -> list[int]:
        """The next tokens of rows from their processed scores [rows, vocab_size]."""
        if self.do_sample:
            return self.draws.draw(torch.nn.functional.softmax(scores, dim=-1), rows)
        return argmax_rows(scores).tolist()

    @staticmethod
    def verify(scores: torch.Tensor, below: ChildDraw | None) -> int:
        """The token of processed scores [vocab_size] by residual sampling.

        Args:
            scores: of one row.
            below: the children that were drawn below this place; None: none were.
        """
        law = torch.nn.functional.softmax(scores, dim=-1)
        if below is None:
            return drawn(law[None])[0]
        return verify_node(law, below.draft.to(law.device), below.children.to(law.device))[1]

    def preview(
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
        scores, kinds = self.copied(logits), zip(self.kinds, self.processors, strict=True)
        known = LogitsProcessorList(one for kind, one in kinds if kind in BLIND or kind in TOUCHING)
        if BLIND.issuperset(map(type, known)):
            return process_blindly(known, scores)
        texts = [torch.cat([row.ids, row.ids.new_tensor([path])], 1) for path in paths]
        parts = zip(texts, scores.split(1), strict=True)
        return torch.cat([self._process(known, row, text, one) for text, one in parts])

    def _process(
        self, processors: LogitsProcessorList, row: RowText, ids: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        """Processed scores [1, vocab_size] of a row, behind the text int64 [1, length]."""
        batch_size = len(self.rows)
        for processor in processors:
            if batch_size > 1 and isinstance(processor, _ROW_BOUND):
                repeated = processor(ids.expand(batch_size, -1), scores.repeat(batch_size, 1))
                scores = repeated[row.index : row.index + 1]
            else:
                scores = self._applied(processor, ids, scores)
        return scores

    @property
    def _forbids(self) -> bool:
        """Whether all processors are known, and some do nothing but forbid listed tokens."""
        kinds = {*map(type, self.processors)}
        usual = type(self.processors) is LogitsProcessorList and kinds <= self.known
        return usual and not kinds.isdisjoint(_FORBIDDING)

    def _applied(self, processor: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [n, vocab_size] behind texts int64 [n, length], processed by one."""
        kind = type(processor)
        if kind not in _FORBIDDING or kind not in self.known or not scores.is_cpu:
            return processor(ids, scores)
        name, forbids = _FORBIDDING[kind]
        if not forbids(processor, ids.shape[1]):
            return scores
        listed = torch.as_tensor(getattr(processor, name), device="cpu").flatten().long()
        inside = (listed >= 0) & (listed < scores.shape[1])
        return scores.index_fill(1, listed[inside], -math.inf)


def _mark_of(tensor: torch.Tensor) -> tuple[int, int, int | None]:
    """Which a tensor is, where it lies, and how often it was written to, if that is counted."""
    return id(tensor), tensor.data_ptr(), None if tensor.is_inference() else tensor._version


def _greatest(table: Scores, count: int) -> Any:
    """See :meth:`TokenSelector.draw_of_few`; None where a number is none."""
    ids, logits = table.top_k(np.arange(table.rows), count, table.columns)
    if any(table.argmax(row) != first for row, first in enumerate(ids[:, 0].tolist())):
        return None
    return zip(ids, logits, strict=True)


def process_blindly(processors: LogitsProcessorList, scores: torch.Tensor) -> torch.Tensor:
    """Processed scores [n, vocab_size] of whatever texts, which each new token would first have to
    be brought to the device for. For processors that look at nothing but the scores."""
    return processors(scores.new_empty((len(scores), 0), dtype=torch.long), scores)


@dataclass(eq=False)
class RowPreview(Preview):
    """What one row of a call would choose.

    Attributes:
        select: how the call chooses.
        row: the text.
    """

    select: TokenSelector
    row: RowText

    @property
    def draws(self) -> bool:
        return self.select.do_sample

    @property
    def greedy(self) -> bool:
        return self.select.greedy

    def knows(self, vocab_size: int) -> bool:
        return not self.draws or self.select.draws.works(vocab_size)

    @property
    def law(self) -> Law:
        return self.select.known_law

    def ahead(self, vocab_size: int, levels: int) -> list[Any]:
        draws = self.select.draws
        # Logits may be wider; asking for another size than theirs would begin the draws anew.
        known = self.draws and draws.vocab_size >= vocab_size
        if known and draws.reaches([self.row], draws.vocab_size):
            return draws.ahead(self.row, levels)
        return []

    def best(
        self,
        logits: torch.Tensor,
        paths: Sequence[Sequence[int]],
        count: int,
        among: Among | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if among is not None and not self.select.blind:
            # Processors look tokens up by their numbers.
            logits, among = among.spread(logits), None
        scores, draws = self.select.preview(self.row, logits, paths), self.select.draws
        if self.draws:
            vocab_size = scores.shape[1] if among is None else among.vocab_size
            if draws.reaches([self.row], vocab_size):
                if among is not None:
                    scores = among.spread(scores)
                if scores.is_cpu:
                    return self._drawn(scores, paths, count)
                places = [(len(self.row.generated) + len(path), self.row.index) for path in paths]
                scores = scores - torch.stack([draws.noise(*place) for place in places]).log()
            else:
                scores = scores.log_softmax(dim=-1)
        best, ids = largest(scores, count)
        return best, ids if among is None else among.token_ids[ids]

    def _drawn(
        self, scores: torch.Tensor, paths: Sequence[Sequence[int]], count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that draws on the host would give behind each path, the first ones first."""
        known, count = len(self.row.generated), min(count, scores.shape[1])
        best, found = np.full((len(paths), count), -np.inf, np.float32), []
        for path, one, values in zip(paths, scores.numpy(), best, strict=True):
            place = known + len(path), self.row.index
            ids, gains = self.select.draws.reaching(*place, one, one, count)
            sums = one[ids] + gains
            order = (-sums).argsort(kind="stable")[:count]
            values[: len(order)] = sums[order]
            chosen = ids[order]
            if len(chosen) < count:  # others, which have no probability, fill it up
                rest = np.setdiff1d(np.arange(min(2 * count, len(one))), chosen)
                chosen = np.concatenate([chosen, rest])[:count]
            found.append(chosen)
        return torch.from_numpy(best), torch.from_numpy(np.stack(found))
