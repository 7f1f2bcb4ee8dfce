"""Models whose weights torchao, optimum-quanto or bitsandbytes keep in eight bits."""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from hf_retrieval_assist import SamAssistant, reroute
from hf_retrieval_assist.engines.cpu import library_weights
from tests.support.lossless import PROMPT, build, knowing, run, same


def linears(model):
    return [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]


def by_torchao(model, form="Int8WeightOnlyConfig", scales=None, **options):
    quantization = pytest.importorskip("torchao.quantization")
    if scales is not None:
        options["granularity"] = getattr(quantization, scales)()
    config = getattr(quantization, form)(**options)
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
    return model.eval()  # training widens the weight and rounds no row


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_alone_in_eight_bits_are_read_by_the_kernel(quantise, dtype, kernel_products):
    """Half precision is that of plain decoding inside of a scope."""
    model = quantise(build(LlamaForCausalLM).to(dtype))
    with reroute(dtype is not torch.float32):
        plain = run(model)
    assert bool(kernel_products) is (dtype is not torch.float32)
    assert torch.equal(run(model, assistant=knowing(plain)), plain)
    assert max(kernel_products) > 1
    if dtype is torch.float32:
        assert torch.equal(run(model, assistant=SamAssistant(fallback="quantized_self")), plain)


def by_quanto_with_activations(model):
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8, activations=quanto.qint8, exclude="lm_head")
    with quanto.Calibration():
        model(PROMPT)
    quanto.freeze(model)
    return model


def by_pytorch(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)


def by_rows_of(*names, **options):
    return lambda model: by_torchao(model, *names, **options)


ROUNDED_ROWS = {
    "int8": by_rows_of("Int8DynamicActivationInt8WeightConfig"),
    "one scale": by_rows_of("Int8DynamicActivationInt8WeightConfig", "PerTensor"),
    "8da4w": by_rows_of("Int8DynamicActivationIntxWeightConfig", weight_dtype=torch.int4),
    "quanto": by_quanto_with_activations,
    "pytorch": by_pytorch,
    "bitsandbytes": by_bitsandbytes,
    "bitsandbytes with outliers": lambda model: by_bitsandbytes(model, threshold=1.0),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("quantise", ROUNDED_ROWS.values(), ids=ROUNDED_ROWS)
def test_rows_in_eight_bits_leave_float32_to_plain_decoding(quantise, kernel_products, told):
    model = quantise(build(LlamaForCausalLM, intermediate_size=64))
    for _ in range(2):  # the hooks of some are met in the first call
        _, _, assistant = same(model)
        assert assistant.stats.last.tier == "plain"
    # One row of each weight is multiplied to learn what the library means by it.
    assert kernel_products.count(1) <= len(linears(model))
    assert any("its logits move in steps" in text for text in told.messages)


@pytest.mark.parametrize("quantise", [ROUNDED_ROWS["int8"], by_bitsandbytes])
def test_rows_in_eight_bits_are_drafted_in_half_precision(quantise):
    """Each row has a scale of its own, and its sums are of integers."""
    model = quantise(build(LlamaForCausalLM).bfloat16())
    with reroute():
        plain = run(model)
    assistant = knowing(plain)
    assert torch.equal(run(model, assistant=assistant), plain)
    assert assistant.stats.last.accepted > 0
