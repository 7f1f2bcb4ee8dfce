"""Which copies of a model's weights a call reads, and that they are what the weights are."""

import gc

import pytest
import torch
import transformers
from torch import nn
from transformers.generation.streamers import BaseStreamer

from hf_retrieval_assist import SamAssistant, release_memory
from hf_retrieval_assist.engines.cpu import compact, copies
from hf_retrieval_assist.engines.cpu.compact import COMPACT
from hf_retrieval_assist.engines.cpu.quantized import WEIGHTS
from hf_retrieval_assist.engines.cpu.repeated_forward import PROGRAMS
from tests.support.copied_models import (
    HIDDEN,
    TOKENS,
    compact_forwards,
    model_of,
    read_at_once,
    watch_screens,
)
from tests.support.lossless import run

LOGITS = {"output_logits": True, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    read_at_once(monkeypatch)
    gc.collect()  # copies of other tests' models


@pytest.fixture
def products():
    """Tokens of each forward that read copies in bfloat16."""
    with compact_forwards() as tokens:
        yield tokens


def rounded(kind=transformers.LlamaForCausalLM, **options):
    """A float32 model whose weights are bfloat16's."""
    model = model_of(kind, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_logits_have_the_same_bits(kind, products):
    model = rounded(getattr(transformers, kind), tie_word_embeddings=kind[0] == "Q")
    expected = run(model, assistant=SamAssistant(budget=4, extra_memory=0), **LOGITS)
    assert not products
    for _ in range(3):
        found = run(model, assistant=SamAssistant(budget=4), **LOGITS)
    assert 0 < max(products) <= compact.MOST_ROWS
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("limit", "read"),
    [
        (0, set()),
        (HIDDEN * TOKENS, set()),  # the scales are left out
        (2 * HIDDEN * TOKENS, {"screened"}),
        (4 * HIDDEN * TOKENS, {"screened", "compact"}),
    ],
)
def test_memory_is_the_users_to_give(limit, read):
    model, known = rounded(), WEIGHTS.nbytes() + COMPACT.nbytes()
    for options in ({}, LOGITS):
        with watch_screens() as watch, compact_forwards() as products:
            for _ in range(3):
                run(model, assistant=SamAssistant(extra_memory=limit), **options)
        assert bool(watch.screened) == ("screened" in read and not options)
        room = limit >= 2 * HIDDEN * TOKENS
        assert bool(products) == ("compact" in read or (room and bool(options)))
    taken = WEIGHTS.nbytes() + COMPACT.nbytes() - known
    assert taken <= (limit if "compact" in read else 2 * limit)


@pytest.mark.parametrize("where", ["between two calls", "within one"])
def test_copies_and_recordings_are_given_back(where):
    model, known = rounded(), WEIGHTS.nbytes() + COMPACT.nbytes()
    assistant, plain = SamAssistant(budget=2), run(model, max_new_tokens=40)

    class Releasing(BaseStreamer):
        def put(self, value):
            release_memory(nn.Sequential(model))

        def end(self):
            gc.collect()

    def text(**options):
        return run(model, assistant=assistant, max_new_tokens=40, **options)

    for _ in range(2):
        for options in ({}, {"output_logits": True}):
            text(**options)
    assert assistant.stats.last.repeated > 0
    assert WEIGHTS.nbytes() + COMPACT.nbytes() > known
    if where == "within one":
        assert torch.equal(text(streamer=Releasing()), plain)
    release_memory(model)
    gc.collect()
    assert not PROGRAMS.report(model).idle
    assert WEIGHTS.nbytes() + COMPACT.nbytes() == known
    assert torch.equal(text(), plain)
    assert torch.equal(text(), plain)
    assert PROGRAMS.report(model).made > 0


def test_memory_is_a_modules():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got str"):
        release_memory("gpt2")


@pytest.mark.parametrize("draws", [False, True])
def test_a_small_output_layer_has_no_copy_for_draws(draws, monkeypatch):
    monkeypatch.setattr(copies, "LEAST_SAVED", 3 * TOKENS * HIDDEN + 1)
    model = model_of(transformers.LlamaForCausalLM)
    with watch_screens() as watch:
        for _ in range(3):
            run(model, do_sample=draws, assistant=SamAssistant())
    assert bool(watch.screened) != draws


def test_a_layer_that_is_not_the_last_operator_is_not_packed():
    """The model makes something else of what it gives, which no screen could tell."""
    model, known = model_of(transformers.GraniteForCausalLM, logits_scaling=2.0), WEIGHTS.nbytes()
    for _ in range(3):
        assistant = SamAssistant(budget=0)
        run(model, assistant=assistant)
    assert assistant.stats.last.repeated > 0
    assert WEIGHTS.nbytes() == known


def test_copies_are_packed_once_they_have_paid(monkeypatch):
    monkeypatch.setattr(copies, "PATIENCE", 10)
    model = model_of()
    known = WEIGHTS.nbytes()
    run(model, assistant=SamAssistant(budget=0), max_new_tokens=9)
    assert WEIGHTS.nbytes() == known
    assistant = SamAssistant(budget=0)
    run(model, assistant=assistant, max_new_tokens=9)
    assert WEIGHTS.nbytes() > known
    assert assistant.stats.last.seconds["pack"] > 0
    with watch_screens() as watch:
        run(model, assistant=SamAssistant(), max_new_tokens=4)
    assert watch.screened > 0
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.0)
    with watch_screens() as watch:  # computed in full until it has paid again
        run(model, assistant=SamAssistant(), max_new_tokens=9)
        assert watch.screened == 0
        run(model, assistant=SamAssistant())
        assert watch.screened > 0
