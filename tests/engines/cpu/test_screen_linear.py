"""The screened output layer against the whole one: the same token, whatever the weights are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_retrieval_assist.engines.cpu.quantized import QuantizedWeight
from hf_retrieval_assist.engines.cpu.screen import NO_TOKENS, Screen, Screened
from hf_retrieval_assist.engines.cpu.skinny import skinny_linear
from tests.support.products import DTYPES


def screen_of(weight):
    return Screen(weight, QuantizedWeight.pack(weight))


def argmax(screen, x):
    found = Screened(screen, x)
    return torch.tensor([found.argmax(row) for row in range(len(x))], dtype=torch.int64)


def logits(screen, x, also=NO_TOKENS, count=1):
    found = Screened(screen, x)
    return [found.logits(row, also, count) for row in range(len(x))]


def generator(seed):
    return torch.Generator().manual_seed(seed)


@st.composite
def layers(draw):
    """Rows of x and a matrix with what might mislead: equal rows, zeros, special numbers."""
    outputs, depth, n = draw(st.integers(1, 120)), draw(st.integers(1, 90)), draw(st.integers(1, 3))
    seed, dtype = draw(st.integers(0, 999)), draw(st.sampled_from(DTYPES))
    weight = torch.randn(outputs, depth, generator=generator(seed))
    x = torch.randn(n, depth, generator=generator(seed + 1))
    if draw(st.booleans()):  # few values: many ties
        weight, x = weight.round(), x.round()
    row = st.integers(0, outputs - 1)
    for to, by in draw(st.lists(st.tuples(row, row), max_size=6)):
        weight[to] = weight[by] * draw(st.sampled_from([1, 1, 1.001, -1, 0, 1e-20, 1e6]))
    for special in draw(st.lists(st.sampled_from([0, 1e30, -1e30, 3e38, 1e-40]), max_size=2)):
        weight[draw(row), draw(st.integers(0, depth - 1))] = special
    for special in draw(
        st.lists(st.sampled_from([float("inf"), float("-inf"), float("nan")]), max_size=1)
    ):
        weight[draw(row), draw(st.integers(0, depth - 1))] = special
    scale = draw(st.sampled_from([1, 1, 1, 0, 1e-25, 1e-38, 1e25, 3e38, float("inf")]))
    x[draw(st.integers(0, n - 1))] *= scale
    return x.to(dtype), weight.to(dtype)


@settings(max_examples=150)
@given(layer=layers())
def test_the_greatest_logit_is_that_of_the_whole_layer(layer):
    x, weight = layer
    assert torch.equal(argmax(screen_of(weight), x), skinny_linear(x, weight).argmax(-1))


@settings(max_examples=100)
@given(layer=layers(), data=st.data())
def test_logits_have_the_whole_layers_bits_and_hold_what_was_asked_for(layer, data):
    x, weight = layer
    also = data.draw(st.lists(st.integers(0, len(weight) - 1), unique=True, max_size=5))
    count = data.draw(st.integers(1, 6))
    whole = skinny_linear(x, weight)
    found = logits(screen_of(weight), x, torch.tensor(also, dtype=torch.int64), count)
    for (ids, values), row in zip(found, whole, strict=True):
        assert torch.equal(ids, ids.unique())
        assert set(also) <= set(ids.tolist())
        assert torch.equal(values.nan_to_num(), row[ids].nan_to_num())
        # Whatever becomes of those asked for, the greatest of the others are there, and with them
        # what equals the last one.
        others = row.clone()
        others[also] = -torch.inf
        if not row.isnan().any():
            last = others.topk(min(count, len(others))).values[-1]
            assert set(((others >= last) & (others > -torch.inf)).nonzero()[:, 0].tolist()) <= set(
                ids.tolist()
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_of_many_tokens_are_computed(dtype):
    weight = torch.randn(20_000, 256, generator=generator(0)).to(dtype)
    x = torch.randn(50, 256, generator=generator(1)).to(dtype)
    screen = screen_of(weight)
    counts = [len(ids) for ids, _ in logits(screen, x)]
    assert max(counts) < 200
    assert sum(counts) < 50 * 20
    assert torch.equal(argmax(screen, x), skinny_linear(x, weight).argmax(-1))


def test_what_rounding_takes_from_x_is_in_the_bounds():
    """The weights are such that eight bits hold them exactly."""
    weight, x = torch.zeros(100, 64), torch.full((1, 64), 3e-5)  # less than half a step
    x[0, :2] = torch.tensor([1.0, 8 / 8191])
    weight[:2, 0] = 127
    weight[0, 1] = 100
    weight[1, 2:] = 127
    packed = QuantizedWeight.pack(weight)
    assert packed.left_out[:2].max() < 1e-4
    screened = Screened(Screen(weight, packed), x)
    assert screened.near.argmax() == 0
    assert screened.argmax(0) == (x @ weight.T).argmax() == 1
