"""Prompts that are fed in parts: the same text, with others' calls in between."""

import time
from functools import partial
from itertools import pairwise

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaForCausalLM,
    Qwen2ForCausalLM,
    set_seed,
)

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.decoding import prompt_parts
from hf_retrieval_assist.decoding.prompt_parts import _spans, prompts_in_parts
from tests.support.lossless import build, rope_model
from tests.support.op_recorder import serve_in_place
from tests.support.quick import cases, crossed

PART = 5
PROMPT = torch.tensor([[5, 9, 33, 21, 60, 7, 44] * 3 + [5, 9]])
OTHER = PROMPT[:, 4:18]
LOOKS = len([*_spans(0, PART, PROMPT.shape[1])])
moshi = partial(build, "MoshiForCausalLM")
KINDS = [LlamaForCausalLM, Gemma3ForCausalLM, GPT2LMHeadModel, Qwen2ForCausalLM]


def run(model, ids=PROMPT, seed=3, **options):
    set_seed(seed)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | options
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **options)


def in_parts(model, between=lambda: None, **options):
    """The text, and how often somebody looked about."""
    looked = []

    def look():
        looked.append(True)
        between()

    with prompts_in_parts(PART, look):
        text = run(model, **options)
    return text, len(looked)


@pytest.mark.parametrize(
    ("kind", "sample", "budget"), cases(crossed(KINDS, [True, False], [6, 0]), 2)
)
def test_texts_are_those_of_whole_prompts(kind, sample, budget):
    model = build(kind)
    assistant = SamAssistant(budget=budget)
    for options in ({}, {"attention_mask": None}, {"ids": PROMPT[:, : PART + 1]}):
        options = {"do_sample": sample, **options}
        plain = run(model, **options)
        for _ in range(2):
            found, looked = in_parts(model, assistant=assistant, **options)
            assert torch.equal(found, plain)
            assert looked == (1 if "ids" in options else LOOKS)
            assert assistant.stats.last.tier == "tree"
    total = assistant.stats.total
    assert total.calls == 6
    assert total.seconds["prefill"] < total.seconds["total"]


ROPES = ["dynamic", "longrope"]


@pytest.mark.parametrize("make", [partial(rope_model, kind, 12) for kind in ROPES] + [moshi])
def test_prompts_that_are_others_in_parts_are_fed_whole(make):
    """Their frequencies follow the length of the text, or their forwards see what their caches'
    windows have passed."""
    found, looked = in_parts(make(), assistant=SamAssistant(budget=6))
    assert torch.equal(found, run(make()))
    assert looked == 0


@pytest.mark.parametrize("kind", cases(KINDS))
def test_others_generate_in_between(kind):
    """With the same model and assistant, whole prompts and random numbers of their own."""
    model, assistant = build(kind), SamAssistant(budget=6)
    plain, plain_other = run(model, do_sample=True), run(model, ids=OTHER, seed=9, do_sample=True)
    seen = []

    def between():
        with torch.random.fork_rng():
            seen.append(run(model, ids=OTHER, seed=9, do_sample=True, assistant=assistant))

    found, looked = in_parts(model, between, do_sample=True, assistant=assistant)
    assert torch.equal(found, plain)
    assert looked == len(seen) == LOOKS
    assert all(torch.equal(text, plain_other) for text in seen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_parts_were_fed_into_moves_into_static_buffers(kind, monkeypatch):
    serve_in_place(monkeypatch)
    model, assistant = build(kind), SamAssistant(budget=6)
    plain, plain_other = run(model), run(model, ids=OTHER)

    def between():
        assert torch.equal(run(model, ids=OTHER, assistant=assistant), plain_other)

    for _ in range(4):
        found, looked = in_parts(model, between, assistant=assistant)
        assert torch.equal(found, plain)
        assert (looked, assistant.stats.last.tier) == (LOOKS, "tree")
    assert assistant.stats.last.repeated > 0


def test_a_prefill_of_the_callers_is_asked_as_often_as_by_plain_decoding():
    model, asked = build(), []

    def prefill(*arguments, **options):
        asked.append(True)
        return type(model)._prefill(model, *arguments, **options)

    model._prefill = prefill
    found, looked = in_parts(model, assistant=SamAssistant(budget=6))
    assert torch.equal(found, run(build()))
    assert (looked, len(asked)) == (0, 1)


class LeftError(Exception):
    pass


def test_a_call_that_is_left_leaves_nothing_behind():
    model, assistant = build(), SamAssistant(budget=6)
    plain, looks = run(model), iter([False, False, True])

    def between():
        if next(looks):
            raise LeftError

    with pytest.raises(LeftError):
        in_parts(model, between, assistant=assistant)
    assert torch.equal(run(model, assistant=assistant), plain)
    assert torch.equal(in_parts(model, assistant=assistant)[0], plain)


def test_time_of_others_is_not_the_calls(monkeypatch):
    """They take a day each time."""
    model, assistant, days = build(), SamAssistant(), []
    run(model, assistant=assistant)  # is tested
    own = time.perf_counter
    for module in (time, prompt_parts):
        monkeypatch.setattr(module, "perf_counter", lambda: own() + 86_400 * len(days))
    with prompts_in_parts(PART, lambda: days.append(1)):
        run(model, assistant=assistant)
    assert len(days) == LOOKS
    assert assistant.stats.last.seconds["total"] < 86_400


def test_parts_get_shorter():
    for tokens, length in ((PART, 23), (1024, 30_000), (1024, 1025), (1, 9)):
        spans = [*_spans(0, tokens, length)]
        assert spans[0] == (0, tokens)
        assert all(one[1] == other[0] for one, other in pairwise(spans))
        sizes = [end - start for start, end in spans]
        assert sizes == sorted(sizes, reverse=True)
        assert max(1, tokens // 16) <= sizes[-1] < length - spans[-1][0]
        assert length - spans[-1][1] <= sizes[-1]


UNUSUAL = {
    "a short prompt": lambda model: {"ids": PROMPT[:, :PART]},
    "a batch": lambda model: {"ids": PROMPT.repeat(2, 1)},
    "a cache of the caller's": lambda model: {"past_key_values": DynamicCache(config=model.config)},
    "a static cache": lambda model: {"cache_implementation": "static"},
    "parts of transformers'": lambda model: {"prefill_chunk_size": 7},
    "embeddings": lambda model: {
        "ids": None,
        "inputs_embeds": model.get_input_embeddings()(PROMPT),
        "attention_mask": torch.ones_like(PROMPT),
    },
}


@pytest.mark.parametrize("case", cases(UNUSUAL, 3))
def test_unusual_prompts_are_fed_whole(case):
    model = build()

    def call(**options):
        given = {**options, **UNUSUAL[case](model)}
        if given.get("ids", PROMPT) is None:
            del given["ids"]
            set_seed(3)
            return model.generate(max_new_tokens=16, do_sample=False, pad_token_id=0, **given)
        return run(model, **given)

    plain, looked = call(), []
    with prompts_in_parts(PART, lambda: looked.append(True)):
        assert torch.equal(call(assistant=SamAssistant(budget=6)), plain)
    assert not looked


def test_models_without_slots_and_with_hooks_are_fed_whole():
    for model in (build(MambaForCausalLM), build()):
        shown = []
        handle = model.register_forward_hook(lambda *args, shown=shown: shown.append(args))
        found, looked = in_parts(model, assistant=SamAssistant(budget=6))
        assert looked == 0
        assert shown
        handle.remove()
        assert torch.equal(found, run(model))
