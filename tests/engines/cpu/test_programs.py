"""Recorded forwards as programs: what is compiled of them, with the bits of their operators."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_retrieval_assist import Assistant, QuantizedSelf, SamAssistant, reroute
from hf_retrieval_assist.engines.cpu import recording, weight_copies
from hf_retrieval_assist.engines.cpu.quantized import QuantizedWeight
from hf_retrieval_assist.engines.cpu.repeated_forward import PROGRAMS
from hf_retrieval_assist.engines.cpu.reroute import overriding
from hf_retrieval_assist.engines.cpu.skinny import (
    PATHS,
    CompiledOperators,
    RepeatedElements,
    RepeatedRows,
)

pytestmark = pytest.mark.skipif(not PATHS, reason="no kernels for this CPU")

PROMPT = torch.arange(40)[None] % 7 + 20


@pytest.fixture
def plans(monkeypatch):
    """The plans that programs make, each with how many weights are in eight bits."""
    made, planned = [], recording.Program._planned

    def watched(program, overridden, packed, placed):
        plan = planned(program, overridden, packed, placed)
        made.append((plan, len(packed)))
        return plan

    monkeypatch.setattr(recording.Program, "_planned", watched)
    return made


def llama(dtype=torch.bfloat16):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 5}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def generate(model, assistant=None, prompt=PROMPT):
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, assistant=assistant, **options)


def plainly(model, prompt=PROMPT):
    with reroute():
        return generate(model, prompt=prompt)


def repeated(model, assistant, expected, prompt=PROMPT):
    """The statistics of a call whose forwards were recorded by others, all of the same text."""
    for _ in range(4):
        assert torch.equal(generate(model, assistant, prompt), expected)
    assert assistant.stats.last.repeated
    return assistant.stats.last


def compiled_in(plan):
    return [one for one in plan.operators if isinstance(one, CompiledOperators)]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_layers_are_one_call(plans, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = llama()
        repeated(model, SamAssistant(budget=3), plainly(model))
    finally:
        torch.set_num_threads(before)
    # Positions are turned into angles by a few operators of PyTorch, whatever the layers.
    assert plans
    assert all(len(plan.operators) <= 12 and len(compiled_in(plan)) <= 2 for plan, _ in plans)


def test_rows_that_grow_by_different_amounts_are_written_to_by_their_layers(plans):
    model, prompt = llama(), torch.cat([PROMPT, PROMPT + 3, PROMPT.flip(1)])
    assistant = SamAssistant(budget=3)
    expected = plainly(model, prompt)
    for _ in range(6):
        assert torch.equal(generate(model, assistant, prompt), expected)
    assert any(len(plan.operators) > 12 for plan, _ in plans)


def test_weights_in_eight_bits_are_the_same_program(plans, monkeypatch):
    monkeypatch.setattr(weight_copies, "LEAST_ELEMENTS", 1000)
    model = llama()
    repeated(model, Assistant([QuantizedSelf()], budget=4), plainly(model))
    in_eight_bits = [plan for plan, packed in plans if packed]
    assert in_eight_bits
    assert all(len(plan.operators) <= 12 and plan.last is not None for plan in in_eight_bits)


def test_weights_that_are_packed_anew_are_another_plan():
    model = llama()
    repeated(model, SamAssistant(budget=3), plainly(model))
    kinds = [kind for kept in PROGRAMS.report(model).idle for kind in kept.kinds.values()]
    program = next(kind.content[0] for kind in kinds if kind.content)
    program._placed = None  # without a cache
    weight = model.model.layers[0].mlp.down_proj.weight
    first, second = (QuantizedWeight.pack(weight.detach() * factor) for factor in (1, 2))
    packed = SimpleNamespace(values=first.values, scales=first.scales)
    with overriding({id(weight): packed}):
        plan = program._plan((), ())
        assert program._plan((), ()) is plan
        packed.values, packed.scales = second.values, second.scales
        assert program._plan((), ()) is not plan


def test_drafts_in_eight_bits_have_the_bits_of_their_operators(monkeypatch):
    monkeypatch.setattr(weight_copies, "LEAST_ELEMENTS", 1000)

    def drafted():
        model, assistant = llama(), Assistant([QuantizedSelf()], budget=4)
        calls = []
        for _ in range(6):
            generate(model, assistant)
            calls.append((assistant.stats.last.drafted, assistant.stats.last.accepted))
        return calls

    expected = drafted()
    monkeypatch.setattr(recording, "can_compile", lambda operator: False)
    assert drafted() == expected


def test_activations_of_two_bytes_are_looked_up():
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out, silu = torch.empty(16, 1 << 12, dtype=x.dtype), torch.nn.functional.silu
    table = silu(x)
    # A function without a pattern, so that a wrong place shows.
    rows = x.view(16, -1).flip(1)
    RepeatedElements("table", [rows.contiguous()], out, table)()
    assert torch.equal(out.view(torch.int16), silu(rows).view(torch.int16))
    with pytest.raises(ValueError, match="table"):
        RepeatedElements("table", [x], x.clone(), table[:-1])


def test_rows_that_there_are_not_are_no_ids():
    matrix, ids, out = torch.randn(5, 8), torch.tensor([[4, 0]]), torch.empty(1, 2, 8)
    again = RepeatedRows(matrix, ids, out)
    again()
    assert torch.equal(out[0], matrix[ids[0]])
    for wrong in (5, -1):
        ids[0, 1] = wrong
        with pytest.raises(IndexError, match=f"got {wrong}"):
            again()


def test_a_cache_of_another_shape_is_not_written_to():
    """A program would write beside its slots."""
    model = llama()
    assistant = SamAssistant(budget=3)
    repeated(model, assistant, plainly(model))
    two = torch.cat([PROMPT, PROMPT])
    assert torch.equal(generate(model, assistant, two), plainly(model, two))
