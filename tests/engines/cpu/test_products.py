"""Products with a matrix against float64, on every instruction set this CPU has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_retrieval_assist.engines.cpu.skinny import PATHS, skinny_linear
from tests.support.products import DTYPES, KERNELS, everywhere, paths, random
from tests.support.threads import in_threads

# The paths whose bfloat16 instructions take subnormal numbers for zero.
FLUSHING = ("avx512bf16", "amx")

kernels = pytest.mark.parametrize("kernel", KERNELS)


@settings(max_examples=200)
@given(
    kernel=st.sampled_from(KERNELS),
    rows=st.integers(1, 70),
    depth=st.integers(1, 1100),
    outputs=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES),
    path=st.sampled_from(PATHS),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_shapes(kernel, rows, depth, outputs, dtype, path, with_bias, seed):
    x = random(rows, depth, dtype=dtype, seed=seed)
    weight = kernel(random(outputs, depth, dtype=dtype, seed=seed + 1), path)
    bias = random(outputs, dtype=dtype, seed=seed + 2) if with_bias else None
    weight.check(x, bias)


@everywhere
@kernels
@pytest.mark.parametrize("depth", [33, 640, 2049])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    path, dtype, kernel, depth
):
    x, weight = (
        random(64, depth, dtype=dtype),
        kernel(random(203, depth, dtype=dtype, seed=1), path),
    )
    alone = torch.cat([weight(row[None], threads=1) for row in x])
    for n in (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 63, 64):
        assert torch.equal(weight(x[:n], threads=1 + n % 3), alone[:n])
    assert torch.equal(weight(torch.cat([x, x]))[64:], alone)


@paths
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (64, 33), (300, 640), (1000, 1024)])
def test_bits_of_a_bfloat16_weight_are_those_of_the_same_in_float32(path, shape):
    weight, bias = random(*shape, dtype=torch.bfloat16), random(shape[0], seed=1)
    for rows in (1, 2, 5, 8, 65):
        x = random(rows, shape[1], seed=rows)
        for added in (None, bias):
            expected = skinny_linear(x, weight.float(), added, path=path)
            assert torch.equal(skinny_linear(x, weight, added, path=path), expected)


@everywhere
@kernels
def test_strided_arguments(path, dtype, kernel):
    x = random(3, 8, 100, dtype=dtype)
    weight = kernel(random(40, 120, dtype=dtype, seed=1)[1::3, 7:57], path)
    bias = random(13, 2, dtype=dtype, seed=2)[:, 1]
    for view in (
        x[..., :50],
        x[:, 1::2, 50:],
        x[..., ::2],
        x[:1, :1, :50].expand(3, 8, 50),
        x.transpose(0, 2)[:, :, 1][:, None, :1].expand(100, 2, 50),
        x[0, 0, :50],
    ):
        weight.check(view, bias)


@everywhere
@kernels
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_empty_sizes(path, dtype, kernel, shape):
    rows, depth, outputs = shape
    x, weight = random(rows, depth, dtype=dtype), kernel(random(outputs, depth, dtype=dtype), path)
    bias = random(outputs, dtype=dtype)
    expected = torch.nn.functional.linear(x, weight.exact.to(dtype), bias)
    assert torch.equal(weight(x, bias), expected)


@everywhere
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_infinities_and_nans_reach_exactly_the_outputs_they_belong_to(path, dtype, special):
    """Overflow rounds to infinity, which less itself is NaN."""
    x, weight = random(7, 50, dtype=dtype), random(21, 50, dtype=dtype, seed=1).abs() + 1
    x[3, 49] = special
    y = skinny_linear(x, weight, path=path)
    assert torch.equal(y[3], torch.full_like(y[3], special)) or y[3].isnan().all()
    assert y[3].isnan().all() == torch.tensor(special).isnan()
    assert y[[0, 1, 2, 4, 5, 6]].isfinite().all()
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype)
    for value, difference in ((torch.finfo(dtype).max, 0.0), (torch.inf, torch.nan)):
        y = skinny_linear(torch.full((1, 2), value, dtype=dtype), signs, path=path)
        expected = torch.tensor([[torch.inf, difference]], dtype=dtype)
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@paths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_passes_through(path, dtype):
    """Times one: what is read is what is written, for all 65536 bit patterns."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    if path in FLUSHING and dtype is torch.bfloat16:
        values = values[(values.abs() >= torch.finfo(dtype).smallest_normal) | (values == 0)]
    one = torch.ones(1, 1, dtype=dtype)
    y = skinny_linear(one, values[:, None], path=path)[0]
    assert torch.equal(y.isnan(), values.isnan())
    assert torch.equal(y[~y.isnan()], values[~values.isnan()])


@paths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_like_torch_rounds(path, dtype):
    """Sums of two numbers, of which many lie between two of the dtype or halfway."""
    low, high = (-24, 8) if dtype is torch.float16 else (-40, 40)
    left = random(4000, dtype=torch.float32) * 2.0 ** torch.randint(low, high, (4000,))
    weight = torch.stack([left.to(dtype), (left * 2.0**-7).to(dtype)], 1)
    exact = weight.float().sum(1)
    y = skinny_linear(torch.ones(1, 2, dtype=dtype), weight, path=path)[0]
    assert torch.equal(y, exact.to(dtype))


@everywhere
def test_bits_depend_neither_on_a_kernels_threads_nor_on_those_that_call_it(path, dtype):
    x, weight = random(9, 300, dtype=dtype), random(500, 300, dtype=dtype)
    expected = skinny_linear(x, weight, path=path)

    def work(number):
        for threads in 10 * (1 + number % 4, 2, 3, 4):
            assert torch.equal(skinny_linear(x, weight, path=path, threads=threads), expected)

    in_threads(work, range(6))
