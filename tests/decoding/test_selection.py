"""Every processor and criterion of transformers: rows one by one, or plain decoding's batches."""

import inspect

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from hf_retrieval_assist.decoding.selection import TokenSelector, known_kinds
from hf_retrieval_assist.decoding.stopping import Stopping
from hf_retrieval_assist.types.row_text import Path, RowText

ROWS, LENGTH, VOCAB = 3, 9, 67
IDS = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)) % 9 + 3

# How those that are asked row by row are made.
MAKERS = {
    "MinLengthLogitsProcessor": lambda c: c(20, 2),
    "MinNewTokensLengthLogitsProcessor": lambda c: c(4, 9, 2),
    "TemperatureLogitsWarper": lambda c: c(0.7),
    "RepetitionPenaltyLogitsProcessor": lambda c: c(1.5),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda c: c(1.5, IDS),
    "TopPLogitsWarper": lambda c: c(0.6),
    "TopKLogitsWarper": lambda c: c(5),
    "MinPLogitsWarper": lambda c: c(0.1),
    "TypicalLogitsWarper": lambda c: c(0.6),
    "EpsilonLogitsWarper": lambda c: c(0.02),
    "EtaLogitsWarper": lambda c: c(0.02),
    "NoRepeatNGramLogitsProcessor": lambda c: c(2),
    "EncoderNoRepeatNGramLogitsProcessor": lambda c: c(2, IDS),
    "SequenceBiasLogitsProcessor": lambda c: c([[[5], 3.0], [[int(IDS[0, -1]), 8], 4.0]]),
    "NoBadWordsLogitsProcessor": lambda c: c([[5], [int(IDS[0, -1]), 8]], 2),
    "ForcedBOSTokenLogitsProcessor": lambda c: c(1),
    "ForcedEOSTokenLogitsProcessor": lambda c: c(LENGTH + 1, 2),
    "InfNanRemoveLogitsProcessor": lambda c: c(),
    "ExponentialDecayLengthPenalty": lambda c: c((2, 1.5), 2, 3),
    "LogitNormalization": lambda c: c(),
    "SuppressTokensAtBeginLogitsProcessor": lambda c: c([5, 6], LENGTH),
    "SuppressTokensLogitsProcessor": lambda c: c([5, 6]),
    "BarkEosPrioritizerLogitsProcessor": lambda c: c(2, 0.01),
    "WatermarkLogitsProcessor": lambda c: c(VOCAB, "cpu"),
    "MaxLengthCriteria": lambda c: c(LENGTH),
    "MaxTimeCriteria": lambda c: c(1e9),
    "EosTokenCriteria": lambda c: c([int(IDS[1, -1])]),
}

# These keep something of all rows, look at one row for all, or call what they were given; or they
# are of models whose rows are not texts.
TOGETHER = {
    *("TopHLogitsWarper", "PrefixConstrainedLogitsProcessor", "WhisperTimeStampLogitsProcessor"),
    *("WhisperNoSpeechDetection", "ClassifierFreeGuidanceLogitsProcessor"),
    *("AlternatingCodebooksLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    *("SynthIDTextWatermarkLogitsProcessor", "DiaClassifierFreeGuidanceLogitsProcessor"),
    *("DiaEOSChannelFilterLogitsProcessor", "DiaEOSDelayPatternLogitsProcessor"),
    *("ConfidenceCriteria",),
}

# Strings need a tokenizer; test_generate_contract.py has them.
ELSEWHERE = {"StopStringCriteria"}


def classes():
    kinds = {
        logits_process: logits_process.LogitsProcessor,
        stopping_criteria: stopping_criteria.StoppingCriteria,
    }
    return {
        name: found
        for module, base in kinds.items()
        for name, found in vars(module).items()
        if inspect.isclass(found) and issubclass(found, base) and found is not base
    }


def follows_rows(member):
    return not known_kinds([member])


def bare(found):
    return found.__new__(found)


def test_each_class_is_asked_in_a_way_that_is_known():
    known = classes()
    together = {name for name, found in known.items() if follows_rows(bare(found))}
    assert together == TOGETHER & known.keys()
    assert known.keys() - together - ELSEWHERE == MAKERS.keys() & known.keys()


@pytest.mark.parametrize("name", [n for n in MAKERS if n in classes()])
def test_rows_one_by_one_are_the_batches_rows(name):
    made = MAKERS[name](classes()[name])
    scores = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    if isinstance(made, stopping_criteria.StoppingCriteria):
        single = [made(IDS[i : i + 1], None) for i in (2, 0, 0, 1)]
        assert torch.equal(made(IDS, None), torch.cat([single[2], single[3], single[0]]))
        return
    rows = [RowText(i, ids, 4) for i, ids in enumerate(IDS)]
    select = TokenSelector(LogitsProcessorList([made]), do_sample=False, rows=rows)
    # The order is not the batch's, and one row comes twice.
    single = {i: select.process([rows[i]], scores[i : i + 1].clone()) for i in (2, 0, 0, 1)}
    expected = made(IDS, scores.clone())
    assert torch.equal(expected, torch.cat([single[i] for i in range(ROWS)]))


FORBIDDING = [
    logits_process.MinLengthLogitsProcessor(LENGTH + 1, [2, 500]),
    logits_process.MinLengthLogitsProcessor(LENGTH, 2),
    logits_process.MinNewTokensLengthLogitsProcessor(4, LENGTH - 3, [2, 500]),
    logits_process.MinNewTokensLengthLogitsProcessor(4, LENGTH - 4, 2),
    logits_process.SuppressTokensAtBeginLogitsProcessor([5, 6, 500], LENGTH),
    logits_process.SuppressTokensAtBeginLogitsProcessor([5], LENGTH + 1),
    logits_process.SuppressTokensLogitsProcessor([5, -1, 500]),
]


@pytest.mark.parametrize("made", FORBIDDING, ids=range(len(FORBIDDING)))
@pytest.mark.parametrize("single", [False, True])
def test_forbidden_tokens_are_those_that_processors_forbid(made, single):
    """They look for them in all tokens; here they are told by their list."""
    processors = LogitsProcessorList([logits_process.NoRepeatNGramLogitsProcessor(2), made])
    scores = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    raw = scores.clone()
    rows = [RowText(i, ids, 4) for i, ids in enumerate(IDS)]
    select = TokenSelector(processors, do_sample=False, rows=rows)
    chosen = slice(1, 2) if single else slice(None)
    found = select.process(rows[chosen], raw[chosen])
    assert torch.equal(found, processors(IDS, scores)[chosen])
    assert torch.equal(raw, scores)


def one_row(length):
    row = RowText(0, torch.tensor([9, 9, 9]), 2, 0)
    row.generated += [1] * length
    return row


def stopping(limits):
    longest = map(stopping_criteria.MaxLengthCriteria, limits)
    return Stopping(StoppingCriteriaList([*longest, stopping_criteria.EosTokenCriteria(50)]))


@pytest.mark.parametrize("tokens", [3, 4, 5])
@pytest.mark.parametrize(
    "limits", [(12, 7), (6.5, 9.0), (7.0, 9.0), (torch.tensor(7), 9.0), (torch.tensor(6.5), 9.0)]
)
def test_longest_text(limits, tokens):
    """A limit of any kind is met where plain decoding meets it."""
    stop, row = stopping(limits), one_row(tokens)
    assert (stop.max_length, type(stop.max_length)) == (7, int)
    assert stop.deepest(row) == max(0, 3 - tokens)
    stop.finish([row], [row], None)
    assert row.finished == (tokens >= 4)


@pytest.mark.parametrize("limits", [(), (float("inf"),), (float("nan"),)])
def test_no_limit(limits):
    stop = stopping(limits)
    assert stop.max_length is None
    assert stop.deepest(one_row(1)) is None


def test_behind_the_token_that_ends_a_text_nothing_was_chosen():
    """Its node is kept in the cache, and no token of the text stands behind it."""
    assert Path(3, tokens=[5, 2], accepted=[0, 1, 4]).chosen == [0, 1]
    assert Path(3, tokens=[5, 2, 8], accepted=[0, 1, 4]).chosen == [0, 1, 4]
