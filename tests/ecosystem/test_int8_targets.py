"""Models whose weights torchao, optimum-quanto or bitsandbytes keep in eight bits."""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from hf_retrieval_assist import SamAssistant, reroute
from hf_retrieval_assist.kernels import library_weights
from tests.support.lossless import build, equal, knowing, run, same


def linears(model):
    return [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]


def by_torchao(model, dynamic=False):
    quantization = pytest.importorskip("torchao.quantization")
    config = (
        quantization.Int8DynamicActivationInt8WeightConfig()
        if dynamic
        else quantization.Int8WeightOnlyConfig()
    )
    names = {name for name, _ in linears(model)}
    quantization.quantize_(model, config, filter_fn=lambda layer, name: name in names)
    return model


def by_quanto(model):
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8, exclude="lm_head")
    quanto.freeze(model)
    return model


def by_bitsandbytes(model, threshold=0.0):
    bnb = pytest.importorskip("bitsandbytes")
    for name, layer in linears(model):
        bias = layer.bias is not None
        other = bnb.nn.Linear8bitLt(
            *(layer.in_features, layer.out_features, bias),
            has_fp16_weights=False,
            threshold=threshold,
        )
        other.load_state_dict(layer.state_dict())
        model.set_submodule(name, other.to("cpu"))
    return model.eval()  # in training it widens the weight and rounds no row


@pytest.fixture
def kernel_products(monkeypatch):
    """The numbers of rows that the kernel multiplied."""
    rows = []
    routed_scaled = library_weights.routed_scaled

    def counted(x, *arguments):
        product = routed_scaled(x, *arguments)
        if product is not None:
            rows.append(x.numel() // x.shape[-1])
        return product

    monkeypatch.setattr(library_weights, "routed_scaled", counted)
    return rows


@pytest.mark.parametrize("quantise", [by_torchao, by_quanto])
def test_weights_alone_in_eight_bits_are_read_by_the_kernel(quantise, kernel_products):
    model = quantise(build(LlamaForCausalLM))
    plain = run(model)
    assert not kernel_products
    equal(model)
    assert max(kernel_products) > 1
    assert torch.equal(run(model, assistant=SamAssistant(fallback="quantized_self")), plain)


@pytest.mark.parametrize("quantise", [by_torchao, by_quanto])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_that_of_plain_decoding_inside_a_scope(quantise, dtype, kernel_products):
    model = quantise(build(LlamaForCausalLM).to(dtype))
    with reroute():
        plain = run(model)
    assert kernel_products
    assert torch.equal(run(model, assistant=knowing(plain)), plain)


@pytest.mark.parametrize(
    "quantise", [lambda model: by_torchao(model, dynamic=True), by_bitsandbytes]
)
def test_rows_in_eight_bits_stay_with_the_library(quantise, kernel_products, told):
    model = quantise(build(LlamaForCausalLM))
    _, _, assistant = same(model)
    # One row of each weight is multiplied to learn what the library means by it.
    assert kernel_products.count(1) <= len(linears(model))
    plainly = assistant.stats.last.tier == "plain"
    assert plainly == any("cannot draft here: " in text for text in told.messages)


def test_bitsandbytes_without_outliers_is_drafted():
    """Each row has a scale of its own, and its sums are of integers."""
    equal(by_bitsandbytes(build(LlamaForCausalLM)))


def test_bitsandbytes_with_outliers_says_that_it_is_not(told):
    """What is an outlier of one row is left out of the eight bits of all rows beside it."""
    model = by_bitsandbytes(build(LlamaForCausalLM), threshold=1.0)
    _, _, assistant = same(model)
    assert assistant.stats.last.tier == "plain"
    assert sum("cannot draft here: " in text for text in told.messages) == 1
