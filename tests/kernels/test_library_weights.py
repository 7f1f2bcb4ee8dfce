"""Weights in eight bits of quantisation libraries: products, which are read, and models of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3ForCausalLM, LlamaForCausalLM

from hf_retrieval_assist import reroute
from hf_retrieval_assist.kernels.skinny import PATHS, scaled_linear
from tests.support.int8_weight import Int8Weight, in_eight_bits, rounded
from tests.support.lossless import build, equal, knowing, run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bytes_of(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


@settings(deadline=None)
@given(
    rows=st.integers(1, 70),
    depth=st.integers(1, 300),
    outputs=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES),
    scale_dtype=st.sampled_from(DTYPES),
    path=st.sampled_from(PATHS),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products(rows, depth, outputs, dtype, scale_dtype, path, with_bias, seed):
    x = random(rows, depth, seed=seed).to(dtype)
    values = bytes_of(outputs, depth, seed=seed)
    scales = (random(outputs, seed=seed + 1).abs() / 100).to(scale_dtype)
    bias = random(outputs, seed=seed + 2).to(dtype) if with_bias else None
    y = scaled_linear(x, values, scales, bias, path=path)
    weight = values.double() * scales.double()[:, None]
    exact = x.double() @ weight.T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.abs().T + exact.abs() + (bias is not None) * 5
    bound = (depth + 8) * 2.0**-24 * size
    bound = bound + ROUNDING[dtype] * (exact.abs() + bound) + 2.0**-24
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gives_the_same_bits_whatever_stands_beside_it(path, dtype):
    x, values, scales = random(65, 77).to(dtype), bytes_of(203, 77), random(203)
    alone = torch.cat([scaled_linear(row[None], values, scales, path=path) for row in x])
    for n in range(1, 66):
        together = scaled_linear(x[:n], values, scales, path=path, threads=1 + n % 3)
        assert torch.equal(together, alone[:n])


def test_arguments():
    x, values, scales = torch.ones(2, 8), torch.ones(3, 8, dtype=torch.int8), torch.ones(3)
    with pytest.raises(TypeError, match=r"values: expected torch\.int8"):
        scaled_linear(x, values.short(), scales)
    with pytest.raises(TypeError, match=r"x: expected float32, bfloat16 or float16"):
        scaled_linear(x.double(), values, scales)
    with pytest.raises(TypeError, match=r"scales: expected float32, bfloat16 or float16"):
        scaled_linear(x, values, scales.int())
    with pytest.raises(ValueError, match=r"scales: expected shape \[3\]"):
        scaled_linear(x, values, scales[:2])
    with pytest.raises(ValueError, match=r"scales: expected adjacent"):
        scaled_linear(x, values, torch.ones(6)[::2])
    with pytest.raises(ValueError, match=r"x: expected shape \[..., 8\]"):
        scaled_linear(x[:, :7], values, scales)
    with pytest.raises(ValueError, match="values: expected a matrix with adjacent columns"):
        scaled_linear(x, torch.ones(8, 3, dtype=torch.int8).T, scales)


def products(action) -> int:
    """How often the weights' own class multiplied."""
    before = Int8Weight.products
    action()
    return Int8Weight.products - before


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_are_multiplied_by_the_kernel(dtype):
    weight, bias = rounded(random(70, 200).to(dtype)), random(70).to(dtype)
    x = random(2, 3, 200).to(dtype)
    plain = torch.nn.functional.linear(x, weight, bias)
    with reroute():
        torch.nn.functional.linear(x, weight, bias)
        assert products(lambda: torch.nn.functional.linear(x, weight, bias)) == 0
        ours = torch.nn.functional.linear(x, weight, bias)
        assert torch.equal(
            ours[1], scaled_linear(x[1], weight.values, weight.scales.view(-1), bias)
        )
    # Both may round each of the 200 terms, and plain's the widened weights.
    size = x.double().abs() @ weight.widened().double().abs().T + 5
    bound = 2 * (200 * 2.0**-24 + ROUNDING[dtype]) * size
    assert ((plain.double() - ours.double()).abs() <= bound).all()


def test_what_is_written_to_the_weight_later_is_read():
    weight, x = rounded(random(70, 200)), random(1, 200)
    with reroute():
        torch.nn.functional.linear(x, weight)
        weight.scales.mul_(2)
        weight.values = weight.values.clone().neg_()
        after = torch.nn.functional.linear(x, weight)
    assert torch.allclose(after, torch.nn.functional.linear(x, weight), atol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: rounded(weight, rounds_rows=True),
        lambda weight: rounded(weight, zeros=torch.ones(70, 1, dtype=torch.int8)),
        lambda weight: rounded(weight.double()),
    ],
    ids=["dynamic activations", "zero points", "float64"],
)
def test_other_meanings_are_left_to_the_library(make):
    weight = make(random(70, 200))
    x = random(1, 200).to(weight.dtype)
    plain = torch.nn.functional.linear(x, weight)
    with reroute():
        torch.nn.functional.linear(x, weight)
        assert products(lambda: torch.nn.functional.linear(x, weight)) == 1
        assert torch.equal(torch.nn.functional.linear(x, weight), plain)


def test_a_weight_met_within_autocast_is_read_later():
    weight, one = rounded(random(70, 200)), random(1, 200)
    with reroute():
        with torch.autocast("cpu", torch.bfloat16):
            assert products(lambda: torch.nn.functional.linear(one, weight)) == 1
        torch.nn.functional.linear(one, weight)
        assert products(lambda: torch.nn.functional.linear(one, weight)) == 0


def test_zero_points_of_zero_are_no_other_meaning():
    weight, x = rounded(random(70, 200), zeros=torch.zeros(70, 1, dtype=torch.int8)), random(1, 200)
    with reroute():
        torch.nn.functional.linear(x, weight)
        assert products(lambda: torch.nn.functional.linear(x, weight)) == 0


def test_the_library_multiplies_many_rows_recorded_ones_and_those_outside_of_scopes():
    weight = rounded(random(70, 200))
    one, many, recorded = random(1, 200), random(66, 200), random(1, 200).requires_grad_()
    with reroute():
        torch.nn.functional.linear(one, weight)
        assert products(lambda: torch.nn.functional.linear(one, weight)) == 0
        assert products(lambda: torch.nn.functional.linear(many, weight)) == 1
        assert products(lambda: torch.nn.functional.linear(recorded, weight)) == 1
        with torch.autocast("cpu", torch.bfloat16):
            assert products(lambda: torch.nn.functional.linear(one, weight)) == 1
    assert products(lambda: torch.nn.functional.linear(one, weight)) == 1


@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Gemma3ForCausalLM])
def test_models_generate_what_they_generate_plainly(model_class):
    model = in_eight_bits(build(model_class, head_dim=16))
    plain, _ = equal(model)
    assistant = knowing(plain, fallback="quantized_self")
    run(model, assistant=assistant)
    assert products(lambda: run(model, assistant=assistant)) == 0
    assert torch.equal(run(model, assistant=assistant), plain)


def test_half_precision_is_that_of_plain_decoding_inside_a_scope():
    model = in_eight_bits(build(LlamaForCausalLM).bfloat16())
    with reroute():
        plain = run(model)
    assert torch.equal(run(model, assistant=knowing(plain)), plain)
