"""Weights in eight bits: against products in float64, on every instruction set this CPU has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_retrieval_assist.kernels.quantized import QuantizedWeight, quantized_linear
from hf_retrieval_assist.kernels.skinny import PATHS, int8_linear, pack_int8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-120, torch.bfloat16: 2.0**-120, torch.float16: 2.0**-24}

paths = pytest.mark.parametrize("path", PATHS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(weight: torch.Tensor, path: str) -> QuantizedWeight:
    return QuantizedWeight(*pack_int8(weight, path=path), depth=weight.shape[1])


def product(x, weight, bias=None, *, path, threads=None):
    parts = (weight.values, weight.factors, weight.scales)
    return int8_linear(x, *parts, bias, path=path, threads=threads)


def assert_close(y, x, weight, bias=None):
    """Within what rounding x to 16 bits and sums in float32 take from the exact product."""
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    step = x.double().abs().amax(-1, keepdim=True) / 32767 / 2
    bound = 1.01 * step * weight.double().abs().sum(-1) + (x.shape[-1] + 8) * 2.0**-24 * size
    if bias is not None:
        exact = exact + bias.double()
        bound = bound + 2.0**-23 * (size + bias.double().abs())
    bound = bound + ROUNDING[y.dtype] * (exact.abs() + bound) + SMALLEST[y.dtype]
    assert y.shape == exact.shape
    assert ((y.double() - exact).abs() <= bound).all()


@settings(deadline=None)
@given(
    rows=st.integers(1, 70),
    depth=st.integers(1, 1100),
    outputs=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES),
    path=st.sampled_from(PATHS),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_shapes(rows, depth, outputs, dtype, path, with_bias, seed):
    x = random(rows, depth, dtype=dtype, seed=seed)
    weight = packed(random(outputs, depth, dtype=dtype, seed=seed + 1), path)
    bias = random(outputs, dtype=dtype, seed=seed + 2) if with_bias else None
    assert_close(product(x, weight, bias, path=path), x, weight.dequantized(), bias)


@settings(deadline=None)
@given(
    depth=st.integers(1, 300),
    outputs=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    path=st.sampled_from(PATHS),
    exponents=st.lists(st.integers(-14, 13), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
def test_rounding_takes_at_most_half_a_step_and_the_norms_are_bounds(
    depth, outputs, dtype, path, exponents, seed
):
    size = torch.tensor(exponents).repeat(depth)[:depth]
    weight = (random(outputs, depth, dtype=torch.float32, seed=seed) * 2.0**size).to(dtype)
    result = packed(weight, path)
    rest = weight.double() - result.dequantized().double()
    rounding = 2.0**-23 * weight.double().norm(dim=1)  # of a scale times a factor
    for group, left in zip(weight.double().split(32, 1), rest.split(32, 1), strict=True):
        # The factor is rounded up by less than 2^-7 of itself.
        step = group.abs().amax(1, keepdim=True) / 127
        assert (left.abs() <= step * 0.504 + 1e-30).all()
    assert (rest.norm(dim=1) <= result.left_out.double() + rounding).all()
    assert (weight.double().norm(dim=1) <= result.norms.double()).all()
    assert (result.left_out <= rest.norm(dim=1) * 1.0001 + rounding + 1e-30).all()
    assert (result.norms <= weight.double().norm(dim=1) * 1.0001).all()


@paths
@dtypes
@pytest.mark.parametrize("depth", [33, 640, 2049])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(path, dtype, depth):
    x = random(64, depth, dtype=dtype)
    weight = packed(random(203, depth, dtype=dtype, seed=1), path)
    alone = torch.cat([product(row[None], weight, path=path, threads=1) for row in x])
    for n in (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 63, 64):
        assert torch.equal(product(x[:n], weight, path=path, threads=1 + n % 3), alone[:n])
    assert torch.equal(product(torch.cat([x, x]), weight, path=path)[64:], alone)


@paths
@dtypes
def test_strided_arguments(path, dtype):
    x = random(3, 8, 100, dtype=dtype)
    weight = packed(random(40, 120, dtype=dtype, seed=1)[1::3, 7:57], path)
    bias = random(13, 2, dtype=dtype, seed=2)[:, 1]
    for view in (x[..., :50], x[:, 1::2, 50:], x[..., ::2], x[0, 0, :50]):
        assert_close(product(view, weight, bias, path=path), view, weight.dequantized(), bias)


@paths
def test_packing_does_not_depend_on_the_number_of_threads(path):
    weight = random(300, 100, dtype=torch.float32)
    for one, other in zip(
        pack_int8(weight, path=path, threads=1), pack_int8(weight, path=path), strict=True
    ):
        assert torch.equal(one, other)


@paths
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_empty_sizes(path, shape):
    rows, depth, outputs = shape
    x, weight = torch.ones(rows, depth), torch.ones(outputs, depth)
    bias = torch.ones(outputs)
    y = product(x, packed(weight, path), bias, path=path)
    assert torch.equal(y, torch.nn.functional.linear(x, weight, bias))


@paths
@dtypes
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_becomes_nan_in_its_own_row_or_column_alone(path, dtype, special):
    x, weight = random(7, 50, dtype=dtype), random(21, 50, dtype=dtype, seed=1)
    x[3, 49] = special
    weight[5, 0] = special
    result = packed(weight, path)
    y = product(x, result, path=path)
    expected = torch.zeros(7, 21, dtype=torch.bool)
    expected[3] = expected[:, 5] = True
    assert torch.equal(y.isnan(), expected)
    assert not result.norms[5].isfinite()
    assert not result.left_out[5].isfinite()


@paths
def test_zeros_tiny_and_huge_numbers(path):
    weight = torch.zeros(4, 64)
    weight[1] = 1e-38
    weight[2] = 3e38
    weight[3, :32] = 1e30
    weight[3, 32:] = 1e-30
    x = torch.zeros(3, 64)
    x[1] = 1e-38
    x[2] = 1
    result = packed(weight, path)
    y = product(x, result, path=path)
    assert torch.equal(y[:2], torch.zeros(2, 4))
    assert torch.equal(y[:, :2], torch.zeros(3, 2))
    assert y[2, 2] == float("inf")
    assert y[2, 3] == pytest.approx(3.2e31, rel=1e-4)
    assert (result.left_out[1].double() >= weight[1].double().norm()).all()


W, X = torch.ones(4, 40), torch.ones(2, 40)
PARTS = dict(zip(("values", "factors", "scales"), pack_int8(W)[:3], strict=True))


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "x: expected float32", {"x": X.double()}),
        (TypeError, "x: expected float32", {"x": [[1.0]]}),
        (ValueError, "x: expected shape", {"x": torch.ones(2, 65)}),
        (ValueError, "x: expected shape", {"x": torch.ones(2, 32)}),
        (ValueError, "x: expected shape", {"x": torch.tensor(1.0)}),
        (ValueError, "x: requires grad", {"x": X.clone().requires_grad_()}),
        (TypeError, "bias: expected torch.float32", {"bias": torch.ones(4).half()}),
        (ValueError, "bias: expected shape", {"bias": torch.ones(3)}),
        (TypeError, "values: expected torch.int8", {"values": W}),
        (ValueError, "values: expected adjacent", {"values": PARTS["values"][:, :40]}),
        (ValueError, "values: expected adjacent", {"values": PARTS["values"][::2]}),
        (ValueError, "factors: expected shape", {"factors": PARTS["factors"][1:]}),
        (TypeError, "factors: expected", {"factors": PARTS["factors"].float()}),
        (ValueError, "scales: expected shape", {"scales": PARTS["scales"][1:]}),
        (ValueError, "path: expected one of", {"path": "vax"}),
        (ValueError, "threads: expected a positive", {"threads": 0}),
    ],
)
def test_bad_arguments_are_named(error, match, arguments):
    with pytest.raises(error, match=match):
        int8_linear(**{"x": X, **PARTS, **arguments})


def test_what_cannot_be_packed_is_named():
    for error, match, weight in (
        (TypeError, "weight: expected float32", W.double()),
        (ValueError, "weight: expected a matrix", torch.ones(3)),
        (ValueError, "weight: expected a matrix", W.T),
        (ValueError, "weight: expected a dense", W.to("meta")),
    ):
        with pytest.raises(error, match=match):
            QuantizedWeight.pack(weight)
    with pytest.raises(ValueError, match="bits: expected 8"):
        QuantizedWeight.pack(W, bits=3)


def test_a_packed_parameter_multiplies():
    layer = torch.nn.Linear(40, 7)
    weight = QuantizedWeight.pack(layer.weight)
    assert weight.shape == (7, 40)
    assert weight.nbytes == 7 * 64 + 2 * (7 * 2 + 16) + 4 * (7 + 16) + 2 * 4 * 7
    with torch.no_grad():
        y = quantized_linear(X, weight, layer.bias)
        torch.testing.assert_close(y, layer(X), rtol=0.02, atol=0.02)
        with pytest.raises(ValueError, match=r"x: expected shape \[..., 40\]"):
            quantized_linear(torch.ones(2, 64), weight)
