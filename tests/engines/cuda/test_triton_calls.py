"""Calls whose attention Triton's kernels compute, in its interpreter: `make test-triton`."""

import os

import pytest
import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_retrieval_assist.engines.cuda import engine as cuda_engine
from hf_retrieval_assist.engines.cuda import fixed_verifier, replay
from tests.support.lossless import PROMPT, build
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import agreeing
from tests.support.watching import calls_of

triton = pytest.importorskip("triton", reason="needs Triton: make test-triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: make test-triton", allow_module_level=True)

from hf_retrieval_assist.engines.cuda import triton_attention  # noqa: E402

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
    """What the kernels were given, the queries first."""
    serve_in_place(monkeypatch)
    # What is recorded here are PyTorch's operators.
    monkeypatch.setattr(replay, "recorder", lambda *_: None)
    monkeypatch.setattr(cuda_engine, "has_triton", lambda device: True)
    # Interpreted, a program takes milliseconds: narrow forwards over few slots.
    monkeypatch.setattr(fixed_verifier, "WIDTHS", (1, 4, 8))
    return calls_of(monkeypatch, triton_attention, "tree_attention")


@pytest.mark.parametrize(
    ("model_class", "inputs"),
    [
        (transformers.LlamaForCausalLM, "one row"),
        (transformers.LlamaForCausalLM, "padded"),
        (transformers.LlamaForCausalLM, "holes"),
        (transformers.Gemma3ForCausalLM, "padded"),
        (transformers.Gemma3ForCausalLM, "holes"),
        (transformers.Llama4ForCausalLM, "one row"),
    ],
)
def test_tokens_are_those_of_plain_decoding(model_class, inputs, attended):
    """Models see everything, windows, or chunks."""
    model = build(model_class)
    _, _, assistant = agreeing(model, CALLS[inputs], tier="tree", oracle=ORACLE, **OPTIONS)
    # Every layer of every forward.
    layers = model.config.num_hidden_layers
    assert len(attended) % layers == 0
    assert len(attended) >= layers * assistant.stats.last.forwards


def bounded(
    module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, **options
):
    """Attention as it is defined, with bounded scores or sinks."""
    sharing = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(sharing, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + attention_mask[..., : scores.shape[3]]
    if s_aux is not None:
        sinks = s_aux[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], 3)
    return (scores.softmax(3)[..., : key.shape[2]] @ value).transpose(1, 2), None


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (transformers.Gemma2ForCausalLM, {"attn_logit_softcapping": 0.5}),
        (transformers.GptOssForCausalLM, {}),
    ],
)
def test_bounded_scores_and_sinks(model_class, config, attended):
    transformers.AttentionInterface.register("bounded", bounded)
    transformers.AttentionMaskInterface.register("bounded", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model = build(model_class, **config)
    model.set_attn_implementation("bounded")
    agreeing(model, CALLS["padded"], tier="tree", oracle=ORACLE, **OPTIONS)
    assert attended


def test_layers_that_read_their_mask_are_served_with_one(attended):
    """Masks that tell kinds of layers apart hold no numbers: the model's test finds who reads."""
    model = build(transformers.LlamaForCausalLM)
    layer = model.model.layers[0]
    forward = layer.forward

    def reads(hidden, attention_mask=None, **options):
        if attention_mask is not None:
            hidden = hidden + 0 * attention_mask[..., :1].mean().clamp(max=0)
        return forward(hidden, attention_mask=attention_mask, **options)

    layer.forward = reads
    for _ in range(2):
        attended.clear()
        agreeing(model, CALLS["one row"], tier="tree", oracle=ORACLE, **OPTIONS)
    assert not attended
