"""The kernel against products in float64, on every instruction set this CPU has."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_retrieval_assist.kernels.skinny import PATHS, skinny_linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a unit in the last place, relative, of each dtype, and its smallest number.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# The path whose bfloat16 instruction takes subnormal numbers for zero.
FLUSHING = "avx512bf16"
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}

paths = pytest.mark.parametrize("path", PATHS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(y, x, weight, bias=None):
    """Within the textbook bound of a float32 sum of k products, plus one rounding to the dtype."""
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    bound = (x.shape[-1] + 2) * 2.0**-24 * size
    bound += ROUNDING[y.dtype] * (exact.abs() + bound) + SMALLEST[y.dtype]
    assert y.shape == exact.shape
    assert ((y.double() - exact).abs() <= bound).all()


@settings(deadline=None)
@given(
    rows=st.integers(1, 70),
    depth=st.integers(1, 200),
    outputs=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES),
    path=st.sampled_from(PATHS),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_shapes(rows, depth, outputs, dtype, path, with_bias, seed):
    x = random(rows, depth, dtype=dtype, seed=seed)
    weight = random(outputs, depth, dtype=dtype, seed=seed + 1)
    bias = random(outputs, dtype=dtype, seed=seed + 2) if with_bias else None
    assert_close(skinny_linear(x, weight, bias, path=path), x, weight, bias)


@paths
@dtypes
@pytest.mark.parametrize("depth", [33, 640, 2049])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(path, dtype, depth):
    x = random(64, depth, dtype=dtype)
    weight = random(203, depth, dtype=dtype, seed=1)
    alone = torch.cat([skinny_linear(row[None], weight, path=path, threads=1) for row in x])
    for n in range(1, 65):
        together = skinny_linear(x[:n], weight, path=path, threads=1 + n % 3)
        assert torch.equal(together, alone[:n])
    assert torch.equal(skinny_linear(torch.cat([x, x]), weight, path=path)[64:], alone)


@paths
@dtypes
def test_strided_arguments(path, dtype):
    x = random(3, 8, 100, dtype=dtype)
    weight = random(40, 120, dtype=dtype, seed=1)[1::3, 7:57]
    bias = random(13, 2, dtype=dtype, seed=2)[:, 1]
    for view in (
        x[..., :50],
        x[:, 1::2, 50:],
        x[..., ::2],
        x[:1, :1, :50].expand(3, 8, 50),
        x.transpose(0, 2)[:, :, 1][:, None, :1].expand(100, 2, 50),
        x[0, 0, :50],
    ):
        assert_close(skinny_linear(view, weight, bias, path=path), view, weight, bias)


@paths
@dtypes
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_empty_sizes(path, dtype, shape):
    rows, depth, outputs = shape
    x, weight = random(rows, depth, dtype=dtype), random(outputs, depth, dtype=dtype)
    bias = random(outputs, dtype=dtype)
    y = skinny_linear(x, weight, bias, path=path)
    assert torch.equal(y, torch.nn.functional.linear(x, weight, bias))


@paths
@dtypes
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_infinities_and_nans_reach_exactly_the_outputs_they_belong_to(path, dtype, special):
    x, weight = random(7, 50, dtype=dtype), random(21, 50, dtype=dtype, seed=1).abs() + 1
    x[3, 49] = special
    y = skinny_linear(x, weight, path=path)
    assert torch.equal(y[3], torch.full_like(y[3], special)) or y[3].isnan().all()
    assert y[3].isnan().all() == torch.tensor(special).isnan()
    assert y[[0, 1, 2, 4, 5, 6]].isfinite().all()


@paths
def test_infinity_minus_infinity_is_nan(path):
    x, weight = torch.tensor([[float("inf"), float("inf")]]), torch.tensor([[1.0, -1.0]])
    assert skinny_linear(x, weight, path=path).isnan().all()


@paths
@dtypes
def test_overflow_rounds_to_infinity(path, dtype):
    largest = torch.finfo(dtype).max
    x, weight = torch.full((1, 2), largest, dtype=dtype), torch.ones(3, 2, dtype=dtype)
    assert (skinny_linear(x, weight, path=path) == float("inf")).all()


@paths
@dtypes
def test_subnormal_numbers_are_kept(path, dtype):
    if path == FLUSHING and dtype is torch.bfloat16:
        pytest.skip("its instruction takes subnormal numbers for zero")
    tiny = torch.finfo(dtype).smallest_normal
    x = torch.tensor([[tiny, 0.0], [tiny / 2, 0.0], [tiny / 4, tiny / 8]], dtype=dtype)
    weight = torch.tensor([[1.0, 1.0], [0.5, -1.0]], dtype=dtype)
    exact = x.double() @ weight.double().T
    assert torch.equal(skinny_linear(x, weight, path=path).double(), exact)
    assert torch.equal(skinny_linear(weight, x, path=path).double(), exact.T)


@paths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_passes_through(path, dtype):
    """Times one: what is read is what is written, for all 65536 bit patterns."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    if path == FLUSHING and dtype is torch.bfloat16:
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


@paths
def test_many_threads_at_once(path):
    x, weight = random(9, 300, dtype=torch.float32), random(500, 300, dtype=torch.float32, seed=1)
    expected = skinny_linear(x, weight, path=path, threads=1)
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(40):
            y = skinny_linear(x, weight, path=path, threads=1 + (number + turn) % 4)
            if not torch.equal(y, expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


X, W = torch.ones(2, 3), torch.ones(4, 3)


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "weight: expected float32", {"weight": W.double()}),
        (TypeError, "weight: expected float32", {"weight": None}),
        (TypeError, "x: expected torch.float32", {"x": X.half()}),
        (TypeError, "x: expected a tensor", {"x": [[1.0, 2.0, 3.0]]}),
        (TypeError, "bias: expected torch.float32", {"bias": torch.ones(4).half()}),
        (ValueError, "x: expected shape", {"x": torch.ones(2, 4)}),
        (ValueError, "x: expected shape", {"x": torch.tensor(1.0)}),
        (ValueError, "weight: expected a matrix", {"weight": torch.ones(3)}),
        (ValueError, "weight: expected a matrix", {"weight": torch.ones(3, 4).T}),
        (ValueError, "weight: expected a dense", {"weight": W.to_sparse()}),
        (ValueError, "weight: expected a dense", {"weight": W.to("meta")}),
        (ValueError, "weight: requires grad", {"weight": W.clone().requires_grad_()}),
        (ValueError, "x: expected values in memory", {"x": torch._neg_view(X)}),
        (ValueError, "bias: expected shape", {"bias": torch.ones(1)}),
        (ValueError, "path: expected one of", {"path": "vax"}),
        (ValueError, "threads: expected a positive", {"threads": 0}),
    ],
)
def test_bad_arguments_are_named(error, match, arguments):
    with pytest.raises(error, match=match):
        skinny_linear(**{"x": X, "weight": W, **arguments})
