"""Batches with prompts and outputs of different lengths equal plain batched generation."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BartForCausalLM,
    Gemma3ForCausalLM,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import LinearAttentionLayer

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.decoding import selection
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.verification.kv_cache import SlotCache
from tests.support.oracle_drafter import agreeing, both, oracle_assistant, sequences_of
from tests.support.tiny_models import tiny_config, tiny_model
from tests.support.watching import Fed

CLASSES = {
    "tree": LlamaForCausalLM,
    "windows": Gemma3ForCausalLM,
    "chain": BartForCausalLM,
    "convolution": Lfm2ForCausalLM,
}


@pytest.fixture(scope="module", params=CLASSES)
def model(request):
    model_class = CLASSES[request.param]
    overrides = {"is_encoder_decoder": False} if model_class is BartForCausalLM else {}
    return tiny_model(model_class, tiny_config(model_class.config_class, **overrides))


def padded(batch_size, length=18, seed=0):
    """Prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (batch_size, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch_size):
        mask[row, : (5 * row) % 14] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def late_token(text, earliest):
    """A token that a text has not used before a position; 66 where it repeats itself."""
    new = [token for token in text[earliest:].tolist() if token not in text[:earliest]]
    return new[0] if new else 66


def equal(model, inputs, **kwargs):
    plain, assisted, assistant = agreeing(model, inputs, **kwargs)
    on_chains = isinstance(model, (BartForCausalLM, Lfm2ForCausalLM))
    assert assistant.stats.tier == ("chain" if on_chains else "tree")
    assert assistant.stats.last.accepted > 0
    return plain, assisted, assistant


@pytest.mark.parametrize("batch_size", [1, 2, 5, 8])
def test_rows_that_stop_at_different_lengths(model, batch_size):
    inputs = padded(batch_size)
    free = model.generate(**inputs, do_sample=False, max_new_tokens=24)[:, 18:]
    # Tokens that end some rows early and others late or never.
    eos = [late_token(free[0], 7), late_token(free[-1], 13)]
    plain, _, _ = equal(model, inputs, do_sample=False, max_new_tokens=24, eos_token_id=eos)
    assert sequences_of(plain).shape[1] > 18 + 1


def test_padding_behind_finished_rows(model):
    inputs = padded(3)
    free = model.generate(**inputs, do_sample=False, max_new_tokens=20)[:, 18:]
    eos = int(free[1, 2])
    _, assisted, _ = equal(
        model, inputs, do_sample=False, max_new_tokens=20, eos_token_id=eos, pad_token_id=61
    )
    assert (assisted[1, 18:] == 61).any()


def test_several_sequences_per_prompt(model):
    inputs = padded(2)
    inputs = {name: tensor.repeat_interleave(3, dim=0) for name, tensor in inputs.items()}
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=9)
    assistant = oracle_assistant(plain, inputs["attention_mask"])
    original = {name: tensor[::3] for name, tensor in inputs.items()}
    torch.manual_seed(0)
    drawn = model.generate(
        **original,
        do_sample=True,
        top_k=1,
        num_return_sequences=3,
        max_new_tokens=9,
        assistant=assistant,
    )
    assert torch.equal(plain, drawn)
    assert assistant.stats.last.accepted > 0


def test_slots_in_use_are_bounded_by_the_tokens_kept(model, monkeypatch):
    slots = []
    keep = SlotCache.keep

    def recording(cache, paths):
        keep(cache, paths)
        shown = {layer.get_seq_length() for layer in cache.slot_layers}
        slots.append((shown, cache.slots.lengths))

    monkeypatch.setattr(SlotCache, "keep", recording)
    equal(model, padded(5), do_sample=False, max_new_tokens=24)
    assert slots
    for shown, lengths in slots:
        assert shown == {max(lengths)}
        assert max(lengths) <= 18 + 24


class RowBias(LogitsProcessor):
    """Favours another token in every row, by the row's number in the batch."""

    def __call__(self, input_ids, scores):
        rows = torch.arange(len(scores))
        scores = scores.clone()
        scores[rows, (7 * rows + input_ids.shape[1]) % scores.shape[1]] += 4.0
        return scores


def allowed(row, ids):
    return [(int(ids[-1]) * 5 + row + step) % 60 + 1 for step in range(9)]


@pytest.mark.parametrize("processor", [RowBias(), PrefixConstrainedLogitsProcessor(allowed, 1)])
def test_processors_that_know_their_row(model, processor):
    equal(model, padded(4), do_sample=False, max_new_tokens=16, logits_processor=[processor])


class StopsRowWise(StoppingCriteria):
    """Meets a row once a token of a residue class has come; knows of no end-of-sequence id."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, 18:] % 5 == 3).any(dim=1)


@pytest.fixture
def at_their_own_pace(monkeypatch):
    """It is taken for one of transformers' own, so that rows need not go in step."""
    monkeypatch.setattr(selection, "_ROWWISE", (*selection._ROWWISE, StopsRowWise))


@pytest.mark.usefixtures("at_their_own_pace")
def test_rows_go_on_where_no_end_of_sequence_token_pads_them(model):
    plain, _, _ = equal(
        model, padded(4), do_sample=False, max_new_tokens=40, stopping_criteria=[StopsRowWise()]
    )
    lengths = ((sequences_of(plain)[:, 18:] % 5 == 3).int().argmax(dim=1) + 1).tolist()
    assert len(set(lengths)) > 1


@pytest.mark.usefixtures("at_their_own_pace")
def test_convolution_states_after_rows_that_ran_ahead():
    model = tiny_model(Lfm2ForCausalLM, tiny_config(Lfm2ForCausalLM.config_class))
    plain, assisted, _ = equal(
        model,
        padded(4),
        do_sample=False,
        max_new_tokens=40,
        stopping_criteria=[StopsRowWise()],
        return_dict_in_generate=True,
    )
    pairs = zip(plain[CACHE].layers, assisted[CACHE].layers, strict=True)
    states = [pair for pair in pairs if isinstance(pair[0], LinearAttentionLayer)]
    assert states
    for expected, actual in states:
        assert not actual.record_past
        torch.testing.assert_close(actual.conv_states, expected.conv_states)


def test_one_token(model):
    plain, assisted, _ = both(model, padded(3), do_sample=False, max_new_tokens=1)
    assert torch.equal(plain, assisted)


def test_prompts_of_one_token(model):
    ids = torch.tensor([[5], [9], [33]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    equal(model, inputs, do_sample=False, max_new_tokens=16)


def test_scores_of_rows(model):
    outputs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain, assisted, _ = equal(model, padded(3), do_sample=False, max_new_tokens=12, **outputs)
    for name in ("scores", "logits"):
        for expected, actual in zip(plain[name], assisted[name], strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


def test_encoder_decoder_batch():
    model = tiny_model(
        T5ForConditionalGeneration, tiny_config(T5ForConditionalGeneration.config_class)
    )
    ids = torch.randint(3, 60, (4, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[2, 6:] = 0
    torch.manual_seed(0)
    plain = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
    assistant = oracle_assistant(plain)
    assisted = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=20, assistant=assistant
    )
    assert torch.equal(plain, assisted)
    assert assistant.stats.last.accepted > 0


def forwards_of(model, **arguments):
    """What `generate` returns, and how many forwards it took."""
    with Fed(model) as shapes:
        return model.generate(**arguments), len(shapes)


def test_eight_copying_rows_need_fewer_forwards_than_plain_decoding(model):
    arguments = padded(8) | {"do_sample": False, "max_new_tokens": 32}
    plain, plain_forwards = forwards_of(model, **arguments)
    assistant = SamAssistant(corpus=plain.tolist(), fallback=None, budget=64, reroute=False)
    model.generate(**arguments | {"max_new_tokens": 1}, assistant=assistant)
    assisted, forwards = forwards_of(model, **arguments, assistant=assistant)
    assert torch.equal(plain, assisted)
    assert plain_forwards == 32
    assert forwards <= plain_forwards / 2
