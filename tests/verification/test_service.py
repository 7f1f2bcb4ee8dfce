"""Models whose forward depends on how many tokens it is fed, and verdicts that follow the model."""

from functools import partial, wraps

import pytest
import torch

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host.feature_taps import FeatureTaps
from hf_retrieval_assist.host.model_key import key_of
from hf_retrieval_assist.verification.self_test import _Probe
from hf_retrieval_assist.verification.service import ServiceDemand, choose_service
from hf_retrieval_assist.verification.tiers import Tier
from tests.support.int8_weight import in_eight_bits
from tests.support.lossless import build, knowing, run, same
from tests.support.quick import cases, crossed
from tests.support.watching import results_of
from tests.support.wrapped_models import ROUNDINGS, rounding_activations, with_lora

CAPACITIES = [(8, 16, 40), (64, 16, 40), (64, 128, 110)]


@pytest.mark.parametrize(("capacity", "budget", "new"), cases(CAPACITIES))
def test_experts_that_drop_tokens_above_their_capacity(capacity, budget, new):
    model = build(
        "SwitchTransformersForConditionalGeneration", expert_capacity=capacity, num_experts=2
    )
    for seed in range(2):
        ids = torch.randint(3, 67, (1, 9), generator=torch.Generator().manual_seed(seed))
        make = partial(knowing, budget=budget)
        _, _, assistant = same(model, ids, make, tier="chain", max_new_tokens=new)
        assert assistant.stats.last.accepted > 0


@pytest.mark.parametrize(
    ("prompt", "tier", "width"),
    [
        ([5, 9, 33, 21, 60, 40, 41], "plain", None),
        ([5, 40, 41, 33, 21, 60, 7, 9], "tree", 4),
        ([40, 41, *range(3, 21)], "tree", 17),
    ],
)
def test_an_adapter_that_counts_tokens_from_the_end(prompt, tier, width, tests):
    base = build()
    run(base, assistant=SamAssistant())
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj", "o_proj"]}
    model = with_lora(base, r=4, alora_invocation_tokens=[40, 41], **settings)
    tests.clear()
    same(model, torch.tensor([prompt]), calls=2, tier=tier, max_new_tokens=40)
    if width is not None:
        # Its hooks are others in every call, and say the same.
        assert [found.width for found in tests] == [width]


ROUNDED = ["", "1.mlp.up_proj", "0.self_attn.q_proj", "lm_head"]


@pytest.mark.parametrize(("kind", "name"), cases(crossed(ROUNDINGS, ROUNDED), 3))
def test_activations_of_fewer_bits_leave_float32_to_plain_decoding(kind, name, told):
    model = rounding_activations(build(), ROUNDINGS[kind], (name,))
    same(model, tier="plain")
    assert any("its logits move in steps" in text for text in told.messages)


@pytest.mark.parametrize(
    ("dtype", "error", "rounding", "tier"),
    [
        (torch.bfloat16, 0.3, 0.05, "plain"),
        (torch.bfloat16, 0.3, 0.16, "tree"),
        (torch.bfloat16, 0.5, 5.0, "plain"),
        (torch.float32, 0.3, 5.0, "plain"),
    ],
)
def test_errors_are_rounding_as_far_as_the_models_own_forwards_are_apart(
    dtype, error, rounding, tier, monkeypatch
):
    """Twice that, and no more than twice what is allowed in any case."""
    monkeypatch.setattr(_Probe, "narrow_error", lambda *_: error)
    monkeypatch.setattr(_Probe, "rounding", lambda *_: rounding)
    assert choose_service(build().to(dtype), {}).tier.value == tier


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_one_forward_over_texts_is_off_plain_decoding_by_rounding(dtype, most, monkeypatch):
    monkeypatch.setattr(_Probe, "narrow_error", _Probe.rounding)
    found = results_of(monkeypatch, _Probe, "narrow_error", lambda error, *_: error)
    choose_service(build().to(dtype), {}, 3)  # of which one is padded
    assert max(found) < most


@pytest.mark.parametrize(
    ("change", "tier"),
    [
        (lambda model: in_eight_bits(model, rounds_rows=True), "plain"),
        (in_eight_bits, "tree"),
        (lambda model: model.bfloat16(), "tree"),
        (lambda model: in_eight_bits(model.bfloat16(), rounds_rows=True), "tree"),
    ],
)
def test_a_model_that_is_quantised_in_place_is_tested_anew(change, tier):
    model = build()
    same(model)
    assistant = SamAssistant(trust_forward=True)
    run(change(model), assistant=assistant)
    assert assistant.stats.last.tier == tier


def test_settings_that_are_new_in_every_call_are_not_tested_in_every_call(tests):
    model = build()
    for number in range(20):
        model.setting = number
        found = choose_service(model, {})
    assert len(tests) < 10
    assert found.tier is Tier.PLAIN
    assert "in every call" in found.reason
    # They stay now.
    assert choose_service(model, {}).tier is Tier.TREE


def test_hooks_of_trainers_and_of_our_own_taps_mean_nothing():
    model = build()

    def known():
        return key_of(model)

    before = known()
    for _ in range(12):
        # A trainer that turns gradient checkpointing off while it generates does so.
        model.enable_input_require_grads()
        same(model, tier="tree")
    assert len(model.model.embed_tokens._forward_hooks) == 12
    assert known() == before
    # Another thread's, or in the middle of a forward in which memory grows.
    with FeatureTaps(model, [(0, 1, -1)]):
        assert known() == before


def test_wider_forwards_are_tested_when_they_are_wanted():
    model = build()
    narrow = choose_service(model, {}, demand=ServiceDemand(width=9))
    assert narrow.width == 9
    assert choose_service(model, {}, demand=ServiceDemand(width=5)) is narrow
    assert choose_service(model, {}, demand=ServiceDemand(width=129)).width == 129


def test_mixed_precision_that_a_wrapper_of_the_forward_enters():
    """Accelerate prepares a model so: the wrapper returns logits in float32."""
    model = build()
    forward = model.forward

    @wraps(forward)
    def wrapped(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = wrapped
    trusted = ServiceDemand(trusts=True)
    assert choose_service(model, {}, demand=trusted).tier is Tier.TREE


def test_a_text_that_is_not_finite_says_nothing_of_the_model():
    model = build()
    used = torch.randint(1, 67, (1, 18), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.get_input_embeddings().weight[used[0, 3]] = torch.nan
    assert choose_service(model, {}).tier is Tier.TREE


MASKS = {
    "a window": ("LlamaForCausalLM", "sliding_window", None, 4),
    "no window": ("MistralForCausalLM", "sliding_window", 6, None),
    "chunks": ("Llama4ForCausalLM", "attention_chunk_size", 6, 12),
    "both ways": ("BloomForCausalLM", "is_causal", True, False),
    "a part's window": ("LlavaForConditionalGeneration", "sliding_window", None, 4),
    "eager": ("LlamaForCausalLM", "_attn_implementation", "sdpa", "eager"),
}


@pytest.mark.parametrize("kind", cases(MASKS, ["a window", "eager"]))
def test_masks_follow_the_configuration_from_call_to_call(kind):
    model_class, name, before, after = MASKS[kind]
    model = build(model_class)
    config = model.config.get_text_config(decoder=True)
    for value in (before, after, before, after):
        setattr(config, name, value)
        same(model, assistant=SamAssistant(), calls=2)
        same(model)
