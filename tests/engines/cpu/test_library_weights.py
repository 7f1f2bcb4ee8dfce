"""Weights in eight bits of quantisation libraries: which are read, and models of them."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Gemma3ForCausalLM, LlamaForCausalLM

from hf_retrieval_assist import reroute
from hf_retrieval_assist.engines.cpu.skinny import int8, product
from tests.support.int8_weight import Int8Weight, in_eight_bits, rounded
from tests.support.lossless import build, knowing, run
from tests.support.products import DTYPES, ROUNDING, random, same_within_a_scope
from tests.support.quick import cases


def products(*arguments):
    """How often the weights' own class multiplied for a linear."""
    before = Int8Weight.products
    F.linear(*arguments)
    return Int8Weight.products - before


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_are_multiplied_by_the_kernel(dtype):
    weight, bias = rounded(random(70, 200).to(dtype)), random(70).to(dtype)
    x = random(2, 3, 200).to(dtype)
    plain = F.linear(x, weight, bias)
    with reroute():
        F.linear(x, weight, bias)
        assert products(x, weight, bias) == 0
        ours = F.linear(x, weight, bias)
        exact = product(x[1], int8(weight.values, weight.scales.view(-1)), bias)
        assert torch.equal(ours[1], exact)
    # Both may round each of the 200 terms, and plain's the widened weights.
    size = x.double().abs() @ weight.widened().double().abs().T + 5
    bound = 2 * (200 * 2.0**-24 + ROUNDING[dtype]) * size
    assert ((plain.double() - ours.double()).abs() <= bound).all()


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
    same_within_a_scope(lambda x: F.linear(x, weight), x)
    with reroute():
        assert products(x, weight) == 1


def test_the_library_multiplies_many_rows_recorded_ones_and_those_outside_of_scopes():
    # Zero points that are all zero are no other meaning.
    weight = rounded(random(70, 200), zeros=torch.zeros(70, 1, dtype=torch.int8))
    one, many, recorded = random(1, 200), random(66, 200), random(1, 200).requires_grad_()
    with reroute():
        for _ in range(2):  # also where it is met there first
            with torch.autocast("cpu", torch.bfloat16):
                assert products(one, weight) == 1
            F.linear(one, weight)
            assert products(one, weight) == 0
        assert products(many, weight) == 1
        assert products(recorded, weight) == 1
    assert products(one, weight) == 1


MODELS = [
    (Gemma3ForCausalLM, torch.float32),
    (LlamaForCausalLM, torch.bfloat16),
    (LlamaForCausalLM, torch.float32),
]


@pytest.mark.parametrize(("model_class", "dtype"), cases(MODELS, 2))
def test_models_generate_what_they_generate_plainly(model_class, dtype):
    """Half precision inside of a scope."""
    model = in_eight_bits(build(model_class, head_dim=16).to(dtype))
    with reroute(dtype is torch.bfloat16):
        plain = run(model)
    assistant = knowing(plain, fallback="quantized_self")
    run(model, assistant=assistant)
    before = Int8Weight.products
    assert torch.equal(run(model, assistant=assistant), plain)
    assert Int8Weight.products == before
