"""Prompts that are fed in parts: the same text, with others' calls in between."""

import time
from functools import partial
from itertools import pairwise

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
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


# The test of how a model is served ends in front of their border, and the prompt behind it.
ROPES = ["dynamic", "longrope"]


@pytest.mark.parametrize(
    "make",
    [partial(rope_model, kind, 20) for kind in ROPES] + [moshi, partial(build, "DoryForCausalLM")],
)
def test_prompts_that_are_others_in_parts_are_fed_whole(make):
    """Their frequencies follow the length of the text, or their forwards see what their caches'
    windows have passed, or append layers."""
    found, looked = in_parts(make(), assistant=SamAssistant(budget=6))
    assert torch.equal(found, run(make()))
    assert looked == 0


@pytest.mark.parametrize(
    ("kind", "in_place"), cases(crossed(KINDS, [False, True]), [(LlamaForCausalLM, False)])
)
def test_others_generate_in_between(kind, in_place, monkeypatch):
    """With the same model and assistant, whole prompts and random numbers of their own; what parts
    were fed into moves into static buffers, if calls are served there."""
    if in_place:
        serve_in_place(monkeypatch)
    model, assistant = build(kind), SamAssistant(budget=6)
    plain, plain_other = run(model, do_sample=True), run(model, ids=OTHER, seed=9, do_sample=True)

    def between():
        with torch.random.fork_rng():
            text = run(model, ids=OTHER, seed=9, do_sample=True, assistant=assistant)
        assert torch.equal(text, plain_other)

    for _ in range(4 if in_place else 1):
        found, looked = in_parts(model, between, do_sample=True, assistant=assistant)
        assert torch.equal(found, plain)
        assert (looked, assistant.stats.last.tier) == (LOOKS, "tree")
    assert assistant.stats.last.repeated > 0 or not in_place
    short = PROMPT[:, : PART + 1]
    found, looked = in_parts(model, ids=short, assistant=assistant)
    assert (looked, found.tolist()) == (1, run(model, ids=short).tolist())


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
