"""Batches with prompts and outputs of different lengths equal plain batched generation."""

import functools

import pytest
import torch
import transformers
from transformers.cache_utils import LinearAttentionLayer

from hf_retrieval_assist.decoding import selection
from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.lossless import build, late_token, padded
from tests.support.oracle_drafter import agreeing, oracle_assistant, sequences_of
from tests.support.quick import cases
from tests.support.rounding import OF_MODEL, within
from tests.support.watching import a_librarys

# Full attention, windows, no trees, and convolutions.
TIERS = {
    "LlamaForCausalLM": "tree",
    "Gemma3ForCausalLM": "tree",
    "BartForCausalLM": "chain",
    "Lfm2ForCausalLM": "chain",
}


@pytest.fixture(scope="module", params=cases(TIERS, ["Gemma3ForCausalLM", "BartForCausalLM"]))
def model(request):
    return build(request.param)


def tier_of(model, rows, followed=True):
    """Rows of a batch that something follows together are decoded plainly."""
    return "plain" if followed and rows > 1 else TIERS[type(model).__name__]


def equal(model, inputs, followed=False, **kwargs):
    rows = len(inputs["input_ids"])
    return agreeing(model, inputs, tier=tier_of(model, rows, followed), **kwargs)


def test_several_sequences_per_prompt(model):
    inputs = padded(2)
    mask = inputs["attention_mask"].repeat_interleave(3, dim=0)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 9}
    make = functools.partial(oracle_assistant, attention_mask=mask)
    _, _, assistant = equal(model, inputs, make=make, **options)
    assert assistant.stats.last.keeps_seed


class StopsRowWise(transformers.StoppingCriteria):
    """Meets a row once a token of a residue class has come; knows of no end-of-sequence id."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, 18:] % 5 == 3).any(dim=1)


def test_rows_go_on_where_no_end_of_sequence_token_pads_them(model, monkeypatch):
    # It is taken for one of transformers' own, which follows no row into the next call.
    monkeypatch.setattr(StopsRowWise, "__call__", a_librarys(StopsRowWise.__call__))
    monkeypatch.setattr(selection, "ROWWISE", selection.ROWWISE | {StopsRowWise})
    options = {"do_sample": False, "max_new_tokens": 40, "return_dict_in_generate": True}
    criteria = {"stopping_criteria": [StopsRowWise()]}
    plain, assisted, assistant = equal(model, padded(4), **criteria, **options)
    new = plain.sequences[:, 18:]
    lengths = (new % 5 == 3).int().argmax(dim=1) + 1
    assert len(set(lengths.tolist())) > 1
    assert assistant.stats.last.tokens == new.numel()
    pairs = zip(plain[CACHE].layers, assisted[CACHE].layers, strict=True)
    states = [pair for pair in pairs if isinstance(pair[0], LinearAttentionLayer)]
    assert bool(states) == (type(model).__name__ == "Lfm2ForCausalLM")
    for expected, actual in states:
        assert not actual.record_past
        bound = within(expected.conv_states, OF_MODEL)
        torch.testing.assert_close(actual.conv_states, expected.conv_states, **bound)


# What follows the rows from step to step is shown the batches of plain decoding.


class Witness(transformers.LogitsProcessor):
    """Remembers what it is shown, and lets it decide what comes next: each row favours a token
    that depends on all rows and on the number of calls."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        scores = scores.clone()
        favourite = (input_ids[:, -3:].sum() + len(self.seen)) % scores.shape[1]
        scores[:, favourite] += 2.0
        return scores


class Tracker(transformers.StoppingCriteria):
    """Stops the batch once every row has shown a token of a residue class; one flag per row."""

    def __init__(self, rows):
        self.done = [False] * rows
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), scores is None or len(scores)))
        for row, done in enumerate(self.done):
            self.done[row] = done or int(input_ids[row, -1]) % 13 == 3
        return all(self.done)


def compare(model, inputs, make, **options):
    """Both kinds of decoding, each with followers of its own, the plain ones first."""
    plain_followers, followers = make(), make()
    torch.manual_seed(3)
    plain = model.generate(**inputs, **plain_followers, **options)
    assistant = oracle_assistant(sequences_of(plain), inputs.get("attention_mask"))
    torch.manual_seed(3)
    assisted = model.generate(**inputs, **followers, **options, assistant=assistant)
    assert torch.equal(sequences_of(plain), sequences_of(assisted))
    for name in plain_followers:
        for expected, actual in zip(plain_followers[name], followers[name], strict=True):
            assert actual.seen == expected.seen
    return plain, assisted, assistant


@pytest.mark.parametrize(("rows", "sample"), cases([(4, True), (1, True), (4, False)]))
def test_what_follows_all_rows_is_shown_what_plain_decoding_shows(model, rows, sample):
    inputs = padded(rows)
    free = model.generate(**inputs, do_sample=False, max_new_tokens=24)[:, 18:]
    eos = [late_token(free[0], 7), late_token(free[-1], 13), late_token(free[rows // 2], 4)]

    def make():
        return {"logits_processor": [Witness()], "stopping_criteria": [Tracker(rows)]}

    options = {"do_sample": sample, "max_new_tokens": 40, "eos_token_id": eos, "pad_token_id": 61}
    options |= dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
    plain, assisted, assistant = compare(model, inputs, make, **options)
    for name in ("scores", "logits"):
        torch.testing.assert_close(assisted[name], plain[name], atol=2e-3, rtol=2e-3)
    ends = torch.isin(sequences_of(plain)[:, 18:], torch.tensor(eos)).int()
    last = assistant.stats.last
    assert last.tokens == int((ends.cumsum(dim=1) - ends == 0).sum())
    assert (last.tier, last.keeps_seed) == (tier_of(model, rows), True)


def test_guidance_follows_the_batch(model):
    negative = torch.tensor([[4, 9], [7, 7], [5, 3]])
    options = {"guidance_scale": 1.7, "negative_prompt_ids": negative, "max_new_tokens": 16}
    equal(model, padded(3), followed=True, do_sample=False, **options)
