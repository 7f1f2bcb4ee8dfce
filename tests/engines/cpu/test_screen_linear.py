"""The screened output layer against the whole one: the same token, whatever the weights are."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopPLogitsWarper

from hf_retrieval_assist.decoding.draws import reaching_of
from hf_retrieval_assist.engines.cpu.quantized import QuantizedWeight
from hf_retrieval_assist.engines.cpu.screen import PLAIN, Sampling, Screen
from hf_retrieval_assist.engines.cpu.skinny import skinny_linear
from hf_retrieval_assist.tools import demo_model
from tests.support.products import DTYPES
from tests.support.quick import cases, crossed


def screen_of(weight):
    return Screen(weight, QuantizedWeight.pack(weight))


def argmax(screen, x):
    found = screen.look(x)
    return torch.tensor([found.argmax(row) for row in range(len(x))], dtype=torch.int64)


def draw(screen, x, noise, sampling=PLAIN):
    """The tokens; -1 where all logits are needed."""
    found = screen.look(x)
    tokens = [found.draw(row, partial(reaching_of, noise[row]), sampling) for row in range(len(x))]
    return torch.tensor([-1 if one is None else one for one in tokens], dtype=torch.int64)


def logits(screen, x, also=None, count=1):
    found = screen.look(x)
    return [found.logits(row, also, count) for row in range(len(x))]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def plain_draw(logits, noise, sampling=PLAIN):
    """Tokens as transformers draws them."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits.float())
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p > 0:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return (torch.softmax(scores, -1) / noise).argmax(-1)


def assert_drawn(drawn, expected):
    assert torch.equal(drawn, torch.where(drawn < 0, drawn, expected))


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


@settings(max_examples=300)
@given(
    layer=layers(),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([1e-30, 0.01, 0.3, 1.0, 1.5, 20.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 0.02, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
)
def test_the_drawn_token_is_that_of_the_whole_layer(layer, seed, temperature, top_p, min_p):
    x, weight = layer
    sampling = Sampling(temperature, top_p, min_p)
    noise = torch.empty(len(x), len(weight)).exponential_(generator=generator(seed))
    drawn = draw(screen_of(weight), x, noise, sampling)
    assert_drawn(drawn, plain_draw(skinny_linear(x, weight), noise, sampling))


def test_a_logit_that_its_dtype_or_the_temperature_makes_infinite():
    """It leaves no distribution, although another token's score is greater."""
    weight = torch.zeros(64, 1, dtype=torch.float16)
    weight[:2, 0] = torch.tensor([656.0, 655.0])
    noise = torch.ones(1, 64)
    noise[0, 1] = 1e-20
    screen, sampling = screen_of(weight), Sampling(4.0)
    assert draw(screen, torch.full((1, 1), 100.0).half(), noise, sampling).tolist() == [-1]
    assert draw(screen, torch.full((1, 1), 90.0).half(), noise, sampling).tolist() == [1]
    weight, x = torch.zeros(64, 1), torch.full((1, 1), 1e17)
    weight[5] = 1e17
    screen, noise = screen_of(weight), torch.ones(1, 64)
    assert draw(screen, x, noise, Sampling(1e-5)).tolist() == [-1]
    assert draw(screen, x, noise, Sampling(1.0)).tolist() == [5]


KEPT = [(1.0, 0.0), (0.9, 0.0), (1.0, 0.05), (0.7, 0.1)]


@pytest.mark.parametrize(("temperature", "kept"), cases(crossed([0.7, 0.1, 1.0, 2.0], KEPT), 4))
def test_most_draws_are_told(temperature, kept):
    """The rows' logits fall off as those of text do."""
    weight = torch.randn(20_000, 64, generator=generator(0))
    x = torch.randn(200, 64, generator=generator(1)) / 2
    noise = torch.empty(200, 20_000).exponential_(generator=generator(2))
    sampling = Sampling(temperature, *kept)
    drawn = draw(screen_of(weight), x, noise, sampling)
    assert_drawn(drawn, plain_draw(skinny_linear(x, weight), noise, sampling))
    assert int((drawn < 0).sum()) < 40


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


def test_bad_arguments_are_named():
    weight = torch.randn(10, 8)
    with pytest.raises(ValueError, match=r"packed: expected \[10, 8\], got \[10, 7\]"):
        Screen(weight, QuantizedWeight.pack(weight[:, :7]))
    with pytest.raises(ValueError, match="temperature: expected a positive"):
        draw(screen_of(weight), torch.ones(1, 8), torch.ones(1, 10), Sampling(0.0))
    with pytest.raises(TypeError, match=r"x: expected torch\.float32"):
        argmax(screen_of(weight), torch.ones(1, 8).half())


@pytest.mark.demo
@torch.inference_mode()
def test_real_rows_of_the_demo_model():
    model, tokenizer = demo_model.load_demo_model()
    inputs = tokenizer("Question: Why is the sky blue?\nAnswer:", return_tensors="pt")
    text = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    x = model.model(input_ids=text).last_hidden_state[0, -24:]
    weight = model.lm_head.weight
    screen, whole = screen_of(weight), skinny_linear(x, weight)
    assert torch.equal(argmax(screen, x), whole.argmax(-1))
    noise = torch.empty_like(whole).exponential_(generator=generator(0))
    assert_drawn(draw(screen, x, noise), plain_draw(whole, noise))
    assert max(len(ids) for ids, _ in logits(screen, x)) < 1000


def test_what_rounding_takes_from_x_is_in_the_bounds():
    """The weights are such that eight bits hold them exactly."""
    weight, x = torch.zeros(100, 64), torch.full((1, 64), 3e-5)  # less than half a step
    x[0, :2] = torch.tensor([1.0, 8 / 8191])
    weight[:2, 0] = 127
    weight[0, 1] = 100
    weight[1, 2:] = 127
    packed = QuantizedWeight.pack(weight)
    assert packed.left_out[:2].max() < 1e-4
    screened = Screen(weight, packed).look(x)
    assert screened.near.argmax() == 0
    assert screened.argmax(0) == (x @ weight.T).argmax() == 1
