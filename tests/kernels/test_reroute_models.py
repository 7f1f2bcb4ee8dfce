"""Models generate with every linear and attention that allows it computed by the kernels what they
generate plainly, those among them whose weights are not plain tensors of the CPU.
"""

import pytest
import torch
from transformers import Gemma3ForCausalLM, LlamaForCausalLM

from hf_retrieval_assist.kernels import attention, linear
from hf_retrieval_assist.kernels.attention import AttentionTuning
from hf_retrieval_assist.kernels.skinny import kernel_linear, set_chooser
from tests.drafters.test_eagle_lossless import offloaded, quantised, with_lora
from tests.lossless import build, equal


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Whatever is fastest here, the kernels serve; how often the one for attention did."""
    served: list[int] = []
    attend = attention.kernel_attention

    def counted(query, *arguments):
        served.append(query.shape[2])
        return attend(query, *arguments)

    monkeypatch.setattr(attention, "kernel_attention", counted)
    monkeypatch.setattr(AttentionTuning, "takes_kernel", lambda *arguments: True)
    set_chooser(lambda weight: kernel_linear)
    yield served
    set_chooser(linear.TUNING.choose, linear.LEAST_ELEMENTS)


@pytest.mark.parametrize("wrap", [quantised, offloaded, with_lora])
@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Gemma3ForCausalLM])
def test_wrapped_models(model_class, wrap, kernels):
    torch.manual_seed(0)
    equal(wrap(build(model_class, head_dim=16)))
    assert max(kernels) > 1


@pytest.mark.parametrize("do_sample", [False, True])
def test_plain_models(do_sample, kernels):
    equal(build(Gemma3ForCausalLM, head_dim=16), do_sample=do_sample)
    assert max(kernels) > 1


def test_eager_attention_is_left_alone(kernels):
    equal(build(LlamaForCausalLM, attn_implementation="eager"))
    assert not kernels
