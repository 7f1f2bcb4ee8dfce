"""Weights in eight bits: what packing takes, and numbers at the ends of their ranges."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.engines.cpu.quantized import QuantizedWeight
from hf_retrieval_assist.engines.cpu.skinny import PATHS, PEAK_COLUMNS, int8_linear, pack_int8
from tests.support.products import DTYPES, Packed, dequantized, everywhere, packed, paths, random


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
    rest = weight.double() - dequantized(result).double()
    rounding = 2.0**-23 * weight.double().norm(dim=1)  # a scale times a value
    step = weight.double().abs().amax(1, keepdim=True) / 127
    assert (rest.abs() <= step * 0.5001 + 1e-30).all()
    assert (rest.norm(dim=1) <= result.left_out.double() + rounding).all()
    assert (weight.double().norm(dim=1) <= result.norms.double()).all()
    assert (result.left_out <= rest.norm(dim=1) * 1.0001 + rounding + 1e-30).all()
    assert (result.norms <= weight.double().norm(dim=1) * 1.0001).all()


@paths
def test_packing_does_not_depend_on_the_number_of_threads(path):
    weight = random(300, 100, dtype=torch.float32)
    found = pack_int8(weight, path=path, threads=1), pack_int8(weight, path=path)
    assert all(map(torch.equal, *found))


@paths
@pytest.mark.parametrize(("rows", "outputs"), [(1, 5), (3, 256), (66, 700), (2, 2047)])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_largest_outputs_of_each_part_are_told(path, rows, outputs, threads):
    x, weight = random(rows, 70, dtype=torch.float32), random(outputs, 70, seed=1)
    values, scales, *_ = pack_int8(weight, path=path)
    parts = -(-outputs // PEAK_COLUMNS)
    peaks = torch.full((rows, parts), torch.nan)
    y = int8_linear(x, values, scales, peaks=peaks, path=path, threads=threads)
    assert torch.equal(y, int8_linear(x, values, scales, path=path))
    assert torch.equal(peaks, torch.stack([part.amax(1) for part in y.split(PEAK_COLUMNS, 1)], 1))
    with pytest.raises(ValueError, match="peaks: expected shape"):
        int8_linear(x, values, scales, peaks=peaks[:, :0], path=path)
    with pytest.raises(ValueError, match="peaks: expected adjacent ones of float32"):
        int8_linear(x.bfloat16(), values, scales, peaks=peaks.bfloat16(), path=path)


@everywhere
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_becomes_nan_in_its_own_row_or_column_alone(path, dtype, special):
    x, weight = random(7, 50, dtype=dtype), random(21, 50, dtype=dtype, seed=1)
    x[3, 49] = special
    weight[5, 0] = special
    product = Packed(weight, path)
    result, y = product.weight, product(x)
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
    weight[3, 32:] = 1e-30  # nothing, beside the others
    x = torch.zeros(3, 64)
    x[1] = 1e-38
    x[2] = 1
    product = Packed(weight, path)
    result, y = product.weight, product(x)
    assert torch.equal(y[:2], torch.zeros(2, 4))
    assert torch.equal(y[:, :2], torch.zeros(3, 2))
    assert y[2, 2] == float("inf")
    assert y[2, 3] == pytest.approx(3.2e31, rel=1e-4)
    assert (result.left_out[1].double() >= weight[1].double().norm()).all()


@paths
def test_sums_of_the_greatest_integers_do_not_overflow(path):
    depth = 70_000  # more than a lane of any instruction set sums up in 32 bits
    y = Packed(torch.ones(3, depth), path)(-torch.ones(2, depth))
    torch.testing.assert_close(y, torch.full((2, 3), -float(depth)), rtol=1e-5, atol=0)


W, X = torch.ones(4, 40), torch.ones(2, 40)
PARTS = dict(zip(("values", "scales"), pack_int8(W)[:2], strict=True))


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "x: expected float32", {"x": X.double()}),
        (ValueError, "x: expected shape", {"x": torch.ones(2, 65)}),
        (ValueError, "x: expected shape", {"x": torch.ones(2, 0)}),
        (TypeError, "values: expected torch.int8", {"values": W}),
        (ValueError, "values: expected adjacent", {"values": PARTS["values"][:, :40]}),
        (ValueError, "values: expected adjacent", {"values": PARTS["values"][::2]}),
        (ValueError, "values: expected rows of", {"values": PARTS["values"][:, :40].clone()}),
        (TypeError, "scales: expected", {"scales": PARTS["scales"].half()}),
        (ValueError, "scales: expected shape", {"scales": PARTS["scales"][1:]}),
    ],
)
def test_bad_arguments_are_named(error, match, arguments):
    with pytest.raises(error, match=match):
        int8_linear(**{"x": X, **PARTS, **arguments})
    with pytest.raises(ValueError, match="weight: expected a matrix"):
        QuantizedWeight.pack(W.T)


def test_a_packed_parameter_multiplies():
    weight = QuantizedWeight.pack(torch.nn.Linear(40, 7).weight)
    assert (weight.shape, weight.nbytes) == ((7, 40), 7 * 64 + 3 * 4 * 7)
    with pytest.raises(ValueError, match=r"x: expected shape \[..., 40\]"):
        weight(torch.ones(2, 64))
