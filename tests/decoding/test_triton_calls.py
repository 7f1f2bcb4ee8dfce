"""Calls whose attention Triton's kernels compute, in its interpreter: `make test-triton`."""

import os

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma3ForCausalLM,
    Llama4ForCausalLM,
    LlamaForCausalLM,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.verification import fixed_verifier, replay, service, tiers
from tests.support.dense_attention import flash_like
from tests.support.lossless import PROMPT, build, knowing
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import both

triton = pytest.importorskip("triton", reason="needs Triton: make test-triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: make test-triton", allow_module_level=True)

from hf_retrieval_assist.kernels import triton_attention  # noqa: E402

OPTIONS = {"do_sample": False, "max_new_tokens": 8}
ORACLE = {"budget": 6}

BATCH = torch.cat([PROMPT, PROMPT.flip(1)])
MASK = torch.ones_like(BATCH)
MASK[1, :5] = 0
HOLES = MASK.clone()
HOLES[1, 7] = HOLES[0, 9:11] = 0
CALLS = {
    "one row": {"input_ids": PROMPT},
    "padded": {"input_ids": BATCH * MASK, "attention_mask": MASK},
    "holes": {"input_ids": BATCH * MASK, "attention_mask": HOLES},
}


@pytest.fixture(autouse=True)
def attended(monkeypatch):
    """The shapes of the queries that the kernels were given."""
    serve_in_place(monkeypatch)
    # What is recorded here are PyTorch's operators.
    monkeypatch.setattr(replay, "recorder", lambda device: None)
    monkeypatch.setattr(service, "has_triton", lambda device: True)
    # Interpreted, a program takes milliseconds: narrow forwards over few slots.
    monkeypatch.setattr(fixed_verifier, "WIDTHS", (1, 4, 8))
    shapes = []
    attend = triton_attention.tree_attention

    def noted(query, *arguments):
        shapes.append(query.shape)
        return attend(query, *arguments)

    monkeypatch.setattr(triton_attention, "tree_attention", noted)
    return shapes


@pytest.mark.parametrize(
    ("model_class", "inputs"),
    [
        (LlamaForCausalLM, "one row"),
        (LlamaForCausalLM, "padded"),
        (LlamaForCausalLM, "holes"),
        (Gemma3ForCausalLM, "padded"),
        (Gemma3ForCausalLM, "holes"),
        (Llama4ForCausalLM, "one row"),
    ],
)
def test_tokens_are_those_of_plain_decoding(model_class, inputs, attended):
    """Of models that see everything, windows, or chunks."""
    model = build(model_class)
    plain, assisted, assistant = both(model, CALLS[inputs], oracle=ORACLE, **OPTIONS)
    assert torch.equal(plain, assisted)
    assert assistant.stats.tier == "tree"
    assert assistant.stats.last.accepted > 0
    # Every layer of every forward.
    layers = model.config.num_hidden_layers
    assert len(attended) % layers == 0
    assert len(attended) >= layers * assistant.stats.last.forwards


def test_attention_that_takes_no_masks(attended, monkeypatch):
    AttentionInterface.register("unmasked", flash_like)
    for module in (service, tiers):
        monkeypatch.setattr(module, "why_no_mask", lambda config: "no masks")
    model = build(LlamaForCausalLM)
    model.set_attn_implementation("unmasked")
    plain, assisted, assistant = both(model, CALLS["one row"], oracle=ORACLE, **OPTIONS)
    assert torch.equal(plain, assisted)
    assert assistant.stats.tier == "tree"
    assert attended


def eager_like(module, query, key, value, attention_mask, scaling, softcap, s_aux, **options):
    """Bounded scores and sinks as they are defined."""
    sharing = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(sharing, 1) for x in (key, value))
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scaling / softcap)
    scores = scores + attention_mask[..., : scores.shape[3]]
    sinks = s_aux[None, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sinks], 3).softmax(3)[..., :-1]
    return (weights @ value).transpose(1, 2), None


def test_bounded_scores_and_sinks(attended):
    model = build(LlamaForCausalLM)
    sinks = torch.linspace(-1, 3, model.config.num_attention_heads)

    AttentionInterface.register("bounded", eager_like)
    AttentionMaskInterface.register("bounded", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.set_attn_implementation("bounded")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, arguments, options: (
                arguments,
                options | {"softcap": 2.0, "s_aux": sinks},
            ),
            with_kwargs=True,
        )
    plain, assisted, assistant = both(model, CALLS["padded"], oracle=ORACLE, **OPTIONS)
    assert torch.equal(plain, assisted)
    assert assistant.stats.tier == "tree"
    assert attended


def test_layers_that_read_their_mask_are_served_with_one(attended):
    """Masks that tell kinds of layers apart hold no numbers: the model's test finds who reads."""
    model = build(LlamaForCausalLM)
    layer = model.model.layers[0]

    def reads(module, arguments, options):
        if options.get("attention_mask") is not None:
            seen = options["attention_mask"][..., :1].mean()
            return (arguments[0] + 0 * seen.clamp(max=0), *arguments[1:]), options
        return None

    layer.register_forward_pre_hook(reads, with_kwargs=True)
    plain, assisted, assistant = both(model, CALLS["one row"], oracle=ORACLE, **OPTIONS)
    assert torch.equal(plain, assisted)
    assert assistant.stats.tier == "tree"
    before = len(attended)
    both(model, CALLS["one row"], oracle=ORACLE, **OPTIONS)
    assert len(attended) == before


def test_at_one_width_no_bit_depends_on_drafts(attended):
    model, inputs = build(LlamaForCausalLM), CALLS["one row"]
    names = dict.fromkeys(("return_dict_in_generate", "output_logits"), True)
    undrafted = Assistant([], fixed_width=8, reroute=False)
    expected = model.generate(**inputs, **OPTIONS, **names, assistant=undrafted)
    attended.clear()
    assistant = knowing(expected, fixed_width=8, reroute=False)
    actual = model.generate(**inputs, **OPTIONS, **names, assistant=assistant)
    assert assistant.stats.last.accepted > 0
    assert {shape[2] for shape in attended} == {8}
    for one, other in zip(actual.logits, expected.logits, strict=True):
        assert torch.equal(one, other)
