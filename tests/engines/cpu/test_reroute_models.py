"""Models generate with every linear and attention that allows it computed by the kernels what they
generate plainly, those among them whose weights are not plain tensors of the CPU.
"""

import pytest
import torch
from transformers import Gemma3ForCausalLM, LlamaForCausalLM

from hf_retrieval_assist import reroute
from tests.support.lossless import build, equal, knowing, run
from tests.support.products import attending_kernels
from tests.support.quick import cases, crossed
from tests.support.wrapped_models import WRAPS


@pytest.fixture(autouse=True)
def kernels():
    with attending_kernels() as queries:
        yield queries


CLASSES = [Gemma3ForCausalLM, LlamaForCausalLM]


@pytest.mark.parametrize(("model_class", "wrap"), cases(crossed(CLASSES, WRAPS), 2))
def test_wrapped_models(model_class, wrap, kernels):
    torch.manual_seed(0)
    equal(wrap(build(model_class, head_dim=16)))
    assert max(kernels) > 1


@pytest.mark.parametrize(
    ("model_class", "do_sample", "length"), cases(crossed(CLASSES, [False, True], [14, 70]), 2)
)
def test_bfloat16_logits_are_those_of_plain_decoding_in_a_scope(model_class, do_sample, length):
    """Prompts fit into one pass of the kernels or not."""
    model = build(model_class, head_dim=16, max_position_embeddings=128).to(torch.bfloat16)
    ids = torch.arange(length)[None] % 7 + 5
    options = {"ids": ids, "do_sample": do_sample, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    with reroute():
        plain = run(model, **options)
    assistant = knowing(plain)
    assisted = run(model, **options, assistant=assistant)
    assert assistant.stats.last.steps < assistant.stats.last.tokens - 1
    assert torch.equal(plain.sequences, assisted.sequences)
    assert torch.equal(torch.stack(plain.logits), torch.stack(assisted.logits))
