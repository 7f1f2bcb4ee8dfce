"""Recorded forwards as programs: what is compiled of them, with the bits of their operators."""

import gc

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_retrieval_assist import Assistant, QuantizedSelf, SamAssistant, reroute
from hf_retrieval_assist.engines.cpu import program
from hf_retrieval_assist.engines.cpu.few_bits import FewBits
from hf_retrieval_assist.engines.cpu.repeated_forward import PROGRAMS
from hf_retrieval_assist.engines.cpu.skinny import (
    PATHS,
    CompiledOperators,
    RepeatedElements,
)
from hf_retrieval_assist.engines.cpu.tree_verifier import CpuTreeVerifier
from tests.support.few_bits import pack_small
from tests.support.quick import cases
from tests.support.threads import computing_by
from tests.support.watching import results_of

pytestmark = pytest.mark.skipif(not PATHS, reason="no kernels for this CPU")

PROMPT = torch.arange(40)[None] % 7 + 20


@pytest.fixture
def compiled(monkeypatch):
    """The operators of programs, neighbours being one."""
    return results_of(monkeypatch, program.Program, "_compiled")


@pytest.fixture
def few(monkeypatch):
    pack_small(monkeypatch)


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


def calls_in(operators):
    return [one for one in operators if isinstance(one, CompiledOperators)]


@pytest.mark.parametrize(("rows", "threads"), cases([(1, 1), (3, 1), (1, 2), (1, 5)], 2))
def test_layers_are_one_call(compiled, rows, threads):
    """Whatever the rows grow by."""
    model, prompt = llama(), torch.cat([PROMPT, PROMPT + 3, PROMPT.flip(1)])[:rows]
    with computing_by(threads):
        repeated(model, SamAssistant(budget=3), plainly(model, prompt), prompt)
    # Positions are turned into angles by a few operators of PyTorch, whatever the layers.
    assert compiled
    for operators in compiled:
        assert len(operators) <= 12
        assert len(calls_in(operators)) <= 2


def drafting():
    return Assistant([QuantizedSelf()], budget=4)


def programs_of(model):
    """Those that are kept, by the tokens that they are fed."""
    kinds = [kind for kept in PROGRAMS.report(model).idle for kind in kept.kinds.items()]
    return {
        dict(shapes)["input_ids"].numel(): kind.content[0]
        for (shapes, *_), kind in kinds
        if kind.content
    }


@pytest.mark.usefixtures("few")
def test_a_level_of_a_draft_is_one_call(monkeypatch):
    """It ends before the output layer."""
    levels = results_of(monkeypatch, CpuTreeVerifier, "draft_level", lambda x, *_: x.shape)
    made = results_of(monkeypatch, program.Program, "_with")
    model = llama()
    repeated(model, drafting(), plainly(model))
    assert all(operators is made[0] for operators in made)
    assert len(made[0]) <= 12
    assert len(calls_in(made[0])) <= 2
    assert len(levels) > 20
    assert {*levels} == {(1, 64)}


@pytest.mark.usefixtures("few")
def test_what_a_packed_model_is_read_by_goes_with_it():
    model = llama()
    repeated(model, drafting(), plainly(model))
    alone, one, other = programs_of(model)[1], FewBits(model), FewBits(model)
    assert alone._with(one) is alone._with(one) is not alone._with(other)
    known = len(alone._packed)
    del one
    gc.collect()
    assert len(alone._packed) == known - 1


@pytest.mark.parametrize("dtype", cases([torch.bfloat16, torch.float32, torch.float16]))
@pytest.mark.usefixtures("few")
def test_drafts_have_the_bits_of_their_operators(monkeypatch, dtype):
    """Computed one after another."""
    levels = results_of(monkeypatch, CpuTreeVerifier, "draft_level", lambda x, *_: x.clone())

    def drafted():
        model, assistant = llama(dtype), drafting()
        for _ in range(3):
            generate(model, assistant)
        found = levels.copy()
        levels.clear()
        return found

    expected = drafted()
    assert len(expected) > 20
    monkeypatch.setattr(program, "groupby", lambda whole, key: [(key(x), [x]) for x in whole])
    found = drafted()
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_activations_of_two_bytes_are_looked_up():
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out, silu = torch.empty(16, 1 << 12, dtype=x.dtype), torch.nn.functional.silu
    # A function without a pattern, so that a wrong place shows.
    rows = x.view(16, -1).flip(1)
    RepeatedElements("table", [rows.contiguous()], out, silu(x))()
    assert torch.equal(out.view(torch.int16), silu(rows).view(torch.int16))


def test_a_cache_of_another_shape_is_not_written_to():
    """A program would write beside its slots."""
    model = llama()
    assistant = SamAssistant(budget=3)
    repeated(model, assistant, plainly(model))
    two = torch.cat([PROMPT, PROMPT])
    assert torch.equal(generate(model, assistant, two), plainly(model, two))
