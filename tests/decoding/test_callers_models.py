"""A model that a caller changes between two tokens of a call."""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    GPT2LMHeadModel,
    LlamaForCausalLM,
    StoppingCriteria,
)
from transformers.models.llama import modeling_llama

from hf_retrieval_assist.host.model_state import ModelWatch
from tests.support.callers import ASKED, START, TEXT, Each, agree
from tests.support.lossless import INPUTS, build, knowing, run
from tests.support.op_recorder import serve_in_place


def scale(model, on):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 4.0 if on else 0.25


def write(model, on):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(3.0 if on else 1 / 3.0)


def point_elsewhere(model, on):
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data * (3.0 if on else 1 / 3.0)


class Mirrored(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states).flip(-1)


def change_class(model, on):
    model.model.norm.__class__ = Mirrored if on else modeling_llama.LlamaRMSNorm


def change_dtype(model, on):
    torch.set_autocast_enabled("cpu", on)


def leave_out(model, on):
    model.model.layers[1].mlp.down_proj = model.model.layers[0].mlp.down_proj if on else model.kept


def exchange_layer(model, on):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def hook(model, on):
    if on:
        model.handle = model.model.layers[0].mlp.register_forward_hook(lambda m, a, out: out * 2)
    else:
        model.handle.remove()


def own_forward(model, on):
    mlp = model.model.layers[0].mlp
    if on:
        kind = type(mlp)
        mlp.forward = lambda x: kind.forward(mlp, x) * 0.3
    else:
        del mlp.forward


def rope_of_all(model, on):
    if on:
        model.rope = rope = modeling_llama.apply_rotary_pos_emb
        modeling_llama.apply_rotary_pos_emb = lambda q, k, *more, **o: rope(q * 4, k, *more, **o)
    else:
        modeling_llama.apply_rotary_pos_emb = model.rope


def prepare(model, on):
    if on:
        make = model.prepare_inputs_for_generation

        def control(input_ids, attention_mask=None, **options):
            made = make(input_ids, attention_mask=attention_mask, **options)
            made["input_ids"] = torch.full_like(made["input_ids"], 7)
            return made

        model.prepare_inputs_for_generation = control
    else:
        del model.prepare_inputs_for_generation


CHANGES = (
    scale,
    write,
    point_elsewhere,
    change_class,
    change_dtype,
    leave_out,
    exchange_layer,
    hook,
    own_forward,
    rope_of_all,
    prepare,
)


def test_a_method_of_an_instance_that_the_loop_asks():
    model = build(LlamaForCausalLM)
    prepare(model, True)
    last = agree(model, dict)
    assert "nobody knows what its prepare_inputs_for_generation" in last.reason
    prepare(model, False)
    assert agree(model, dict).tier == "tree"


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("model_class", [LlamaForCausalLM, GPT2LMHeadModel])
def test_an_instances_forward_that_takes_anything(model_class, inputs):
    """`generate` hands it no positions, so it computes its own."""
    model = build(model_class)
    own = model.forward
    model.forward = lambda *args, **options: own(*args, **options)
    last = agree(model, dict, inputs=inputs)
    assert last.tier == "chain"
    assert last.accepted > 0


@pytest.mark.parametrize("way", ASKED)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_a_model_that_is_changed_within_a_call(change, inputs, way):
    model = build(LlamaForCausalLM)
    object.__setattr__(model, "kept", model.model.layers[1].mlp.down_proj)

    def options():
        def act(length):
            if length in (START + 8, START + 17):
                change(model, length == START + 8)

        return ASKED[way](act)

    known = knowing(*(model.generate(**INPUTS[inputs], **TEXT, **options())).split(1))
    for assistant in (None, known, known, known):  # trees, then forwards that are repeated
        last = agree(model, options, inputs=inputs, assistant=assistant)
        assert last.tier == "tree"
        assert last.accepted > 0 or inputs == "padded"
        assert "changed the model" in last.reason


def test_a_model_that_is_changed_where_memory_stays_in_place(monkeypatch):
    serve_in_place(monkeypatch)
    model = build(LlamaForCausalLM)
    for _ in range(3):
        last = agree(
            model,
            lambda: {
                "stopping_criteria": [
                    Each(lambda length: length == START + 8 and scale(model, True)),
                    Each(lambda length: length == START + 17 and scale(model, False)),
                ]
            },
        )
    assert "changed the model" in last.reason


def test_what_nothing_counts_can_be_said():
    model = build(LlamaForCausalLM)
    weight = model.model.layers[0].mlp.down_proj.weight
    assistant = knowing(run(model, **TEXT), budget=6)

    def options():
        def act(length):
            if length in (START + 8, START + 17):
                weight.data.mul_(3.0 if length == START + 8 else 1 / 3.0)
                assistant.model_changed()

        return {"stopping_criteria": [Each(act)]}

    for _ in range(3):
        last = agree(model, options, assistant=assistant)
    assert "changed the model" in last.reason


def test_a_call_without_code_of_the_callers_is_not_compared(llama, monkeypatch):
    monkeypatch.setattr(ModelWatch, "__init__", lambda *_: pytest.fail("compared"))
    assert agree(llama, dict, do_sample=True, temperature=0.7).accepted > 0


def test_ids_that_a_callers_code_writes_into_are_the_text_from_there_on(llama):
    def options():
        def process(ids, scores):
            if ids.shape[1] == START + 6:
                ids[:, 2] = 11
            return scores + F.one_hot((ids[:, 2] + ids[:, -1]) % 67, 67) * 0.5

        class Rewrites(StoppingCriteria):
            def __call__(self, ids, scores, **options):
                if ids.shape[1] == START + 10:
                    ids[:, -1] = 12
                return torch.zeros(len(ids), dtype=torch.bool)

        return {"logits_processor": [process], "stopping_criteria": [Rewrites()]}

    for inputs in INPUTS:
        for sampled in (False, True):
            agree(llama, options, inputs=inputs, do_sample=sampled, top_k=0)
