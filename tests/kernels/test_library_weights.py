"""Weights in eight bits of quantisation libraries: which are read, and models of them."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, LlamaForCausalLM

from hf_retrieval_assist import reroute
from hf_retrieval_assist.kernels.skinny import scaled_linear
from tests.support.int8_weight import Int8Weight, in_eight_bits, rounded
from tests.support.lossless import build, equal, knowing, run
from tests.support.products import DTYPES, ROUNDING, random


def products(action):
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
    plain, _, _ = equal(model)
    assistant = knowing(plain, fallback="quantized_self")
    run(model, assistant=assistant)
    assert products(lambda: run(model, assistant=assistant)) == 0
    assert torch.equal(run(model, assistant=assistant), plain)


def test_half_precision_is_that_of_plain_decoding_inside_a_scope():
    model = in_eight_bits(build(LlamaForCausalLM).bfloat16())
    with reroute():
        plain = run(model)
    assert torch.equal(run(model, assistant=knowing(plain)), plain)
