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
from hf_retrieval_assist.engines.cpu.recording import overrides
from hf_retrieval_assist.engines.cpu.repeated_forward import PROGRAMS
from tests.support.copied_models import HIDDEN, TOKENS, compact_products, model_of, watch_screens
from tests.support.lossless import PROMPT, build, run, same
from tests.support.rounding import OF_MODEL, within
from tests.support.threads import in_threads

LOGITS = {"output_logits": True, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(copies, "PATIENCE", 1)
    monkeypatch.setattr(copies, "LEAST_SAVED", 0)
    gc.collect()  # copies of other tests' models


@pytest.fixture
def products():
    """Rows of each product with a copy in bfloat16."""
    with compact_products() as rows:
        yield rows


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
        with watch_screens() as watch, compact_products() as products:
            run(model, assistant=SamAssistant(extra_memory=limit), **options)
        assert bool(watch.screened) == ("screened" in read and not options)
        assert bool(products) == (limit >= 2 * HIDDEN * TOKENS and bool(options))
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


@pytest.mark.parametrize(("tier", "screened"), [("tree", True), ("chain", False)])
def test_what_verifies_decides_what_is_read(tier, screened, products):
    """Only trees are screened; an instance's own forward is verified by chains."""
    model = rounded()
    if tier == "chain":
        own = model.forward
        model.forward = lambda *args, **options: own(*args, **options)
    assistant = SamAssistant(budget=4, trust_forward=True)
    with watch_screens() as watch:
        same(model, assistant=assistant, calls=3, tier=tier)
    assert bool(watch.screened) == screened
    assert bool(products) != screened
    variants = {key.cost_variant for key in assistant.costs.timed()}
    assert min(variants) == ("screened compact" if screened else "compact")


@pytest.mark.parametrize("draws", [False, True])
def test_a_small_output_layer_has_no_copy_for_draws(draws, monkeypatch):
    monkeypatch.setattr(copies, "LEAST_SAVED", 3 * TOKENS * HIDDEN + 1)
    model = model_of(transformers.LlamaForCausalLM)
    run(model, do_sample=draws, assistant=SamAssistant())
    with watch_screens() as watch:
        run(model, do_sample=draws, assistant=SamAssistant())
    assert bool(watch.screened) != draws


def test_copies_are_packed_once_they_have_paid(monkeypatch):
    monkeypatch.setattr(copies, "PATIENCE", 10)
    model = model_of()
    known = WEIGHTS.nbytes()
    run(model, assistant=SamAssistant(), max_new_tokens=9)
    assert WEIGHTS.nbytes() == known
    assistant = SamAssistant()
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


def test_other_threads_and_models_compute_as_always():
    """A forward of another thread, and one of another model inside of a hook."""
    model, other = model_of(), build(transformers.Qwen3ForCausalLM)
    expected = model(PROMPT).logits
    results = []
    expected_other = other(PROMPT).logits

    def look(*_):
        if not overrides.by_id:
            return
        results.extend(in_threads(lambda ids: model.model(ids)[0], [PROMPT]))
        handle.remove()
        found = other(PROMPT).logits
        torch.testing.assert_close(found, expected_other, **within(expected_other, OF_MODEL))

    handle = model.model.layers[1].mlp.register_forward_pre_hook(look)
    run(model, assistant=SamAssistant(trust_forward=True))
    assert torch.equal(model.lm_head(results[0]), expected)
