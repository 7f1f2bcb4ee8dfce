"""Weights in few bits: what packing takes, and numbers at the ends of their ranges."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.engines.cpu.quantized import FourBitWeight, QuantizedWeight
from hf_retrieval_assist.engines.cpu.skinny import (
    PATHS,
    RepeatedLinears,
    dense,
    pack_int4,
    pack_int8,
    product,
)
from tests.support.products import (
    DTYPES,
    LEVELS,
    Packed,
    PackedInFour,
    dequantized,
    everywhere,
    from_four_bits,
    in_groups,
    packed,
    paths,
    random,
)


def of_sizes(exponents, *shape, dtype=torch.float32, seed=0):
    """A matrix whose columns have such sizes in turn."""
    size = torch.tensor(exponents).repeat(shape[1])[: shape[1]]
    return (random(*shape, seed=seed) * 2.0**size).to(dtype)


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
    weight = of_sizes(exponents, outputs, depth, dtype=dtype, seed=seed)
    result = packed(weight, path)
    rest = weight.double() - dequantized(result).double()
    rounding = 2.0**-23 * weight.double().norm(dim=1)  # a scale times a value
    step = weight.double().abs().amax(1, keepdim=True) / 127
    assert (rest.abs() <= step * 0.5001 + 1e-30).all()
    assert (rest.norm(dim=1) <= result.left_out.double() + rounding).all()
    assert (weight.double().norm(dim=1) <= result.norms.double()).all()
    assert (result.left_out <= rest.norm(dim=1) * 1.0001 + rounding + 1e-30).all()
    assert (result.norms <= weight.double().norm(dim=1) * 1.0001).all()


def left_out(weight, rounded):
    """The squared norm of what rounding takes from each group."""
    return in_groups(weight.double() - rounded).square().sum(-1)


def plainly_in_four_bits(weight, sign):
    """Groups whose element of the greatest magnitude becomes the last level, to whose nearest half
    numbers are rounded before."""
    groups = in_groups(weight.float())
    scales = (sign * groups.abs().amax(-1, keepdim=True) / LEVELS.abs().amax()).half().float()
    halves = (2 * (1 / scales) * groups).nan_to_num().round() / 2
    values = LEVELS[torch.bucketize(halves, (LEVELS[1:] + LEVELS[:-1]) / 2)]
    return (values * scales.double()).flatten(1)[:, : weight.shape[1]]


@given(
    depth=st.integers(1, 300),
    outputs=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    path=st.sampled_from(PATHS),
    exponents=st.lists(st.integers(-20, 13), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
def test_a_group_in_four_bits_loses_no_more_than_by_the_plain_scale(
    depth, outputs, dtype, path, exponents, seed
):
    weight = of_sizes(exponents, outputs, depth, dtype=dtype, seed=seed)
    own = left_out(weight, from_four_bits(pack_int4(weight, path=path), weight.shape))
    for sign in (1, -1):
        plain = left_out(weight, plainly_in_four_bits(weight, sign))
        # Sums are of float32, in which their differences are known to so much of the whole.
        assert (own <= plain * (1 + 1e-4) + 1e-6 * left_out(weight, 0)).all()


@paths
def test_normal_numbers_lose_little_in_four_bits(path):
    weight = random(64, 640)
    rounded = from_four_bits(pack_int4(weight, path=path), weight.shape)
    assert (weight - rounded).norm() < 0.077 * weight.norm()


@paths
def test_columns_that_count_more_lose_less(path):
    weight, counts = random(64, 320), random(320, seed=1).square().square()
    counts[5::32] = 0
    rounded = [
        from_four_bits(pack_int4(weight, given, path=path), weight.shape)
        for given in (None, torch.ones(320), counts)
    ]
    assert torch.equal(rounded[0], rounded[1])
    lost = [(counts * (weight - one).square()).sum() for one in rounded]
    assert lost[2] < 0.7 * lost[0]


@everywhere
@pytest.mark.parametrize(("outputs", "depth"), [(1, 1), (15, 32), (16, 33), (40, 100), (7, 64)])
def test_what_fills_blocks_up_counts_as_zero(path, dtype, outputs, depth):
    """Columns behind a row's, which count nothing, and outputs behind the last."""
    weight, behind = random(outputs, depth, dtype=dtype), (0, -depth % 32)
    filled, counts = F.pad(weight, (*behind, 0, -outputs % 16)), F.pad(torch.ones(depth), behind)
    wide = random(outputs, depth + 9, dtype=dtype)
    wide[:, 4 : 4 + depth] = weight
    for one in (weight, wide[:, 4 : 4 + depth]):
        assert torch.equal(pack_int4(one, path=path), pack_int4(filled, counts, path=path))


@paths
@pytest.mark.parametrize(
    "pack", [pack_int8, lambda *given, **options: [pack_int4(*given, **options)]]
)
def test_packing_does_not_depend_on_the_number_of_threads(path, pack):
    weight = random(300, 100, dtype=torch.float32)
    expected = pack(weight, path=path, threads=1)
    for threads in (2, 3, 8):
        assert all(map(torch.equal, pack(weight, path=path, threads=threads), expected))


@everywhere
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_becomes_nan_in_its_own_row_or_column_alone(path, dtype, special):
    x, weight = random(7, 50, dtype=dtype), random(21, 50, dtype=dtype, seed=1)
    x[3, 49] = special
    weight[5, 0] = special
    packed = Packed(weight, path)
    result, y = packed.weight, packed(x)
    expected = torch.zeros(7, 21, dtype=torch.bool)
    expected[3] = expected[:, 5] = True
    assert torch.equal(y.isnan(), expected)
    assert not result.norms[5].isfinite()
    assert not result.left_out[5].isfinite()


@everywhere
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_own_row_or_output_in_four_bits(path, dtype, special):
    """All others have the bits that they have without."""
    x, weight = random(7, 50, dtype=dtype), random(21, 50, dtype=dtype, seed=1)
    plain = PackedInFour(weight, path)(x)
    x[3, 49] = special
    weight[5, 0] = special
    y, broken = PackedInFour(weight, path)(x), torch.zeros(7, 21, dtype=torch.bool)
    broken[3] = broken[:, 5] = True
    assert torch.equal(y.isfinite(), ~broken)
    assert torch.equal(y[~broken], plain[~broken])


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
    packed = Packed(weight, path)
    result, y = packed.weight, packed(x)
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


@pytest.mark.parametrize("kind", [QuantizedWeight, FourBitWeight])
def test_layers_of_the_same_rows_are_computed_together(kind):
    """As each alone; others are refused."""
    x, biases = random(3, 70), (None, random(300, seed=5))
    weights = [kind.pack(random(n, 70, seed=n)) for n in (40, 300)]
    outs = [torch.empty(3, len(weight)) for weight in (biases[1][:40], biases[1])]
    together = RepeatedLinears(x, weights[0].matrix, biases[0], outs[0])
    assert together.add(x, weights[1].matrix, biases[1], outs[1])
    [other] = {QuantizedWeight, FourBitWeight} - {kind}
    for unlike in (dense(random(40, 70)), other.pack(random(40, 70)).matrix):
        assert not together.add(x, unlike, None, torch.empty(3, 40))
    for _ in range(2):
        together()
        for weight, bias, out in zip(weights, biases, outs, strict=True):
            assert torch.equal(out, product(x, weight.matrix, bias))
        x.mul_(-2)


@pytest.mark.parametrize("kind", [QuantizedWeight, FourBitWeight])
def test_the_memory_of_a_copy_is_known_beforehand(kind):
    for shape in ((7, 40), (16, 32), (33, 65)):
        weight = random(*shape)
        copy = kind.pack(torch.nn.Parameter(weight))
        assert copy.shape == shape
        assert copy.nbytes == kind.size_of(weight)
        x, bias = random(3, shape[1], seed=1), random(shape[0], seed=2)
        found, expected = product(x, copy.matrix, bias), F.linear(x, weight, bias)
        assert (found - expected).norm() < 0.12 * (x @ weight.T).norm()
