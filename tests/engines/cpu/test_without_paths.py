"""A CPU without the kernels' instruction sets: PyTorch computes what they would have."""

import pytest
import torch
from transformers import Gemma3ForCausalLM

from hf_retrieval_assist import QuantizedSelf, SamAssistant, reroute
from hf_retrieval_assist.engines.cpu import copies, norms, skinny
from hf_retrieval_assist.engines.cpu.compact import COMPACT
from hf_retrieval_assist.engines.cpu.quantized import WEIGHTS, QuantizedWeight
from hf_retrieval_assist.engines.cpu.skinny import kernel_attention, routed_linear
from tests.support.int8_weight import in_eight_bits
from tests.support.lossless import PROMPT, build, run
from tests.support.products import same_within_a_scope


@pytest.fixture(autouse=True)
def no_paths(monkeypatch):
    monkeypatch.setattr(skinny, "PATHS", ())


@pytest.mark.parametrize("wrap", [lambda model: model, in_eight_bits])
def test_models_are_computed_by_pytorch(wrap):
    model, weight = wrap(build(Gemma3ForCausalLM, head_dim=16)), torch.randn(8, 16)
    norms.learn_norms(model)
    same_within_a_scope(lambda ids: model(ids).logits, PROMPT)
    with reroute():
        assert torch.equal(routed_linear(weight, weight), weight @ weight.T)


def test_assistants_keep_no_copies(monkeypatch):
    monkeypatch.setattr(copies, "PATIENCE", 1)
    model = build(Gemma3ForCausalLM, head_dim=16, vocab_size=4096, hidden_size=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    known = COMPACT.nbytes(), WEIGHTS.nbytes()
    plain = run(model)
    for _ in range(2):
        assert torch.equal(run(model, assistant=SamAssistant()), plain)
    assert (COMPACT.nbytes(), WEIGHTS.nbytes()) == known


def test_what_cannot_do_without_says_so():
    x = torch.randn(1, 2, 3, 16)
    with pytest.raises(RuntimeError, match="expected a CPU with AVX2 or NEON"):
        kernel_attention(x, x, x)
    with pytest.raises(RuntimeError, match="expected a CPU with AVX2 or NEON"):
        QuantizedWeight.pack(x[0, 0])
    assistant = SamAssistant(fallback=QuantizedSelf())
    with pytest.raises(ValueError, match="QuantizedSelf: expected a CPU with AVX2 or NEON"):
        run(build(Gemma3ForCausalLM, head_dim=16), assistant=assistant)
