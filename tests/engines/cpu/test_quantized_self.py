"""Drafts of the target itself in eight bits."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import DynamicCache

from hf_retrieval_assist import Assistant, QuantizedSelf
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.engines.cpu import quantized, tree_verifier, weight_copies
from hf_retrieval_assist.engines.cpu import quantized_self as module
from hf_retrieval_assist.engines.cpu.recording import overrides
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.verification.own_forwards import TargetForwards
from tests.support.lossless import PROMPT, build, padded, run, same
from tests.support.oracle_drafter import agreeing
from tests.support.rounding import OF_MODEL, near, within
from tests.support.threads import in_threads
from tests.support.tiny_models import VOCAB
from tests.support.watching import Interrupt, calls_of, fed_shapes, interrupted_forward

# Windows of six tokens, soft caps, chunks, experts in one tensor, several position ids, no linears.
FAMILIES = [
    "LlamaForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma2ForCausalLM",
    "Llama4ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "GPT2LMHeadModel",
]
SAMPLINGS = {
    "greedy": {},
    "hot": {"do_sample": True, "temperature": 1.5},
    "top": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "processed": {"do_sample": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}
NEW = 30


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    """The tiny models' linears are packed; adapters on them stay small."""
    monkeypatch.setattr(weight_copies, "LEAST_ELEMENTS", 1000)


def assistant(**options):
    return Assistant([QuantizedSelf(**options)], budget=16)


@pytest.mark.parametrize(
    ("name", "sampling", "rows"),
    [
        *((FAMILIES[0], sampling, rows) for sampling in SAMPLINGS for rows in (1, 4)),
        *((name, "top", 1) for name in FAMILIES[1:]),
        *((FAMILIES[1], sampling, 4) for sampling in SAMPLINGS),
    ],
)
def test_output_is_plain(name, sampling, rows):
    """Tokens and random state; most drafts are accepted. Several rows have padding, get on
    unequally and end early."""
    model, drafting = build(getattr(transformers, name)), assistant()
    options = {"do_sample": False, "max_new_tokens": NEW} | SAMPLINGS[sampling]
    inputs = {"input_ids": PROMPT}
    if rows > 1:
        inputs = padded(rows)
        torch.manual_seed(3)
        free = model.generate(**inputs, **options)
        options["eos_token_id"] = [int(free[0, 18 + 7]), int(free[2, 18 + 15])]
    agreeing(model, inputs, seed=3, make=lambda plain: drafting, **options)
    stats = drafting.stats.last
    assert stats.tier == "tree"
    assert stats.keeps_seed
    assert stats.accepted > stats.steps
    for dtype in (torch.bfloat16, torch.float16) if (sampling, rows) == ("greedy", 1) else ():
        run(model.to(dtype), **options, assistant=drafting)
        assert drafting.stats.last.steps < NEW / 2


def test_drafts_are_in_eight_bits_without_other_kernels(monkeypatch):
    model, products = build(), calls_of(monkeypatch, quantized.QuantizedWeight, "__call__")
    same(model, assistant=Assistant([QuantizedSelf()], budget=8, reroute=False))
    assert products


def test_a_level_is_one_forward_for_all_rows(llama, monkeypatch):
    """None is drafted that no token is left for."""
    # Forwards that are repeated are seen by nobody.
    monkeypatch.setattr(tree_verifier, "can_repeat", lambda *_: False)
    llama.generate(**padded(3), max_new_tokens=2, assistant=assistant())  # tests the model
    with fed_shapes(llama) as shapes:
        drafting = assistant(max_levels=3)
        llama.generate(**padded(3), do_sample=False, max_new_tokens=NEW, assistant=drafting)
    drafted = [shape for shape in shapes[1:] if shape[0] == 3 and shape[1] <= 3]
    steps = drafting.stats.last.forwards
    # A prefill, and for each verification at most three levels, the first of which feeds the roots.
    assert len(shapes) <= 1 + 4 * steps
    assert drafted.count((3, 1)) >= steps - 1
    with fed_shapes(llama) as shapes:
        run(llama, max_new_tokens=5, assistant=assistant())
    # The prefill brings one of five tokens, and the last one needs no node.
    assert [shape[1] for shape in shapes[1:4]] == [1, *[s[1] for s in shapes[2:4]]]
    assert len(shapes) == 1 + 3 + 1


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("forwards", [2, 3, 8])
def test_an_interrupted_draft_leaves_a_cache_to_go_on_from(name, forwards):
    model = build(getattr(transformers, name))
    plain = run(model, max_new_tokens=NEW)
    drafting = assistant()
    cache = DynamicCache(config=model.config)
    with pytest.raises(Interrupt), interrupted_forward(model, forwards):
        run(model, max_new_tokens=NEW, **{CACHE: cache}, assistant=drafting)
    assert F.linear is torch._C._nn.linear
    assert not overrides.by_id
    held = plain[:, : max(PROMPT.shape[1], cache.get_seq_length() + 1)]
    rest = NEW - (held.shape[1] - PROMPT.shape[1])
    again = run(model, held, max_new_tokens=rest, **{CACHE: cache}, assistant=drafting)
    assert torch.equal(again, plain)


def test_weights_are_packed_once_and_anew_when_they_change():
    model = build(transformers.LlamaForCausalLM, tie_word_embeddings=True)
    packed = quantized.quantized_model(model)
    run(model, assistant=assistant())
    assert {id(copy) for copy in packed.values()} == {
        id(copy) for copy in quantized.quantized_model(model).values()
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.roll(1, 0))
    drafting = assistant()
    assert torch.equal(run(model, assistant=drafting), run(model))
    assert drafting.stats.last.steps < 10
    anew = quantized.quantized_model(model)
    assert not any(anew[key] is copy for key, copy in packed.items())


def test_other_threads_and_models_compute_as_always(llama):
    """A forward of another thread, and one of another model inside of a hook."""
    expected = llama(PROMPT).logits
    other = build(transformers.Qwen3ForCausalLM)
    results = []
    expected_other = other(PROMPT).logits

    def look(*_):
        if not overrides.by_id:
            return
        results.extend(in_threads(lambda ids: llama.model(ids)[0], [PROMPT]))
        handle.remove()
        found = other(PROMPT).logits
        torch.testing.assert_close(found, expected_other, **within(expected_other, OF_MODEL))

    handle = llama.model.layers[1].mlp.register_forward_pre_hook(look)
    run(llama, assistant=assistant())
    assert torch.equal(llama.lm_head(results[0]), expected)


def test_adapters_stay_as_they_are():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, lora_alpha=32)
    model = peft.get_peft_model(build(transformers.LlamaForCausalLM), config)
    model.add_adapter("other", config)
    drafting, texts = assistant(), []
    for name in ("default", "other"):
        model.set_adapter(name)
        texts += same(model, assistant=drafting, max_new_tokens=NEW)[:1]
        assert drafting.stats.last.steps < NEW / 2
    assert not torch.equal(*texts)
    with model.disable_adapter():
        same(model, assistant=drafting, max_new_tokens=NEW)
    small = {id(p) for n, p in model.named_parameters() if "lora" in n}
    assert not small & quantized.quantized_model(model).keys()


def test_what_it_cannot_do_is_one_error(llama):
    """Nor is a compiled call drafted for, whose forwards are the compiled ones."""
    ids, elsewhere = np.array([1, 2], np.int32), build(transformers.LlamaForCausalLM).to("meta")
    for model, message in (
        (None, "expected the target model, got none"),
        (elsewhere, "on a CPU, got one on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantizedSelf().start(ids, Target(VOCAB, model=model))
    session = QuantizedSelf().start(ids, Target(VOCAB, model=llama))
    with pytest.raises(ValueError, match="expected a call of generate"):
        session.propose(4)
    forwards = TargetForwards()
    forwards.begin(object(), [], lambda row: None)
    assert not forwards.ready


@pytest.fixture
def price(monkeypatch):
    """What a level takes, for the drafter."""
    found = SimpleNamespace(timed=True, level=0.0, observe=lambda nodes, seconds: None)
    found.seconds = lambda nodes: found.level
    monkeypatch.setattr(module, "CostModel", lambda: found)
    monkeypatch.setattr(module, "_prices", {})
    return found


@pytest.fixture
def depths(monkeypatch):
    """Each step's draft's, where a verification of any width takes 10 ms."""
    found = []
    original = QuantizedSelf.propose_rows

    def propose(drafter, sessions, budgets):
        for session in sessions:
            session.see_cost(lambda n: np.full(n, 0.01))
        drafts = original(drafter, sessions, budgets)
        found.append(int(drafts[0].depths.max(initial=0)))
        return drafts

    monkeypatch.setattr(QuantizedSelf, "propose_rows", propose)
    return found


def test_a_draft_grows_while_a_level_pays_which_is_tried_now_and_then(
    llama, price, depths, monkeypatch
):
    """Where it was dear, one level in so many steps; where nobody knows, one."""
    monkeypatch.setattr(module, "_TRIAL_PERIOD", 4)
    for price.level, price.timed, found in (
        (1e-4, True, None),
        (1.0, True, [0, 0, 0, 1, 0, 0, 0, 1]),
        (1.0, False, [1, 1, 1, 1]),
    ):
        depths.clear()
        run(llama, assistant=assistant(), max_new_tokens=NEW)
        assert 4 <= max(depths) <= 8 if found is None else depths[: len(found)] == found


def test_close_choices_fork_and_clear_ones_do_not():
    close = np.log(np.array([[0.4, 0.39, 0.2]], np.float32))
    clear = np.log(np.array([[0.9, 0.05, 0.04]], np.float32))
    priors, classes_of = module.EVIDENCE.priors, module.evidence_classes
    first, second = (priors[classes_of(scores, known=True)][0] for scores in (close, clear))
    assert first[1] > 0.25 > second[1]
    assert second[0] > 0.9 > first[0]
    chances = priors[classes_of(close, known=False)][0]
    assert chances == near([0.37, 0.37, 0.17])
