"""The kernel against attention in float64, on every instruction set this CPU has."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.engines.cpu.skinny import PATHS, kernel_attention
from tests.support.products import DTYPES, everywhere, paths, random, with_rounding
from tests.support.rounding import within


def operands(batch=1, groups=2, heads=2, queries=5, slots=40, depth=32, dtype=torch.float32):
    """Query, key and value; the latter two as a cache shows them, a part of longer buffers."""
    query = random(batch, queries, groups * heads, depth, dtype=dtype).transpose(1, 2)
    buffers = (random(batch, groups, slots + 7, depth, dtype=dtype, seed=seed) for seed in (1, 2))
    return query, *(buffer[:, :, :slots] for buffer in buffers)


def exact(query, key, value, mask=None, scale=None):
    """[batch, queries, heads, width] in float64, by PyTorch's plain formula."""
    shared = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(shared, dim=1) for x in (key, value))
    scores = query.double() @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.double()
    return (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2)


def assert_close(y, query, key, value, mask=None, scale=None):
    """Allow the textbook bounds of float32 sums, plus one rounding to the dtype.

    A weight errs by a factor e^d where d is twice the error of the largest score, a sum of `depth`
    products; its sum and that of the weighted values err by `slots` roundings each.
    """
    expected = exact(query, key, value, mask, scale)
    assert y.shape == expected.shape
    assert y.is_contiguous()
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    largest = factor * query.double().norm(dim=-1).max() * key.double().norm(dim=-1).max()
    roundings = 2 * (query.shape[-1] + 4) * largest + 2 * key.shape[2] + 16
    bound = roundings * 2.0**-24 * exact(query, key, value.abs(), mask, scale)
    bound = with_rounding(bound, expected, y.dtype)
    assert ((y.double() - expected).abs() <= bound).all()


def added(mask, dtype):
    """A boolean mask as one that is added, with the dtype's smallest number."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


@given(
    batch=st.integers(1, 2),
    groups=st.integers(1, 3),
    heads=st.integers(1, 5),
    queries=st.integers(1, 20),
    slots=st.integers(1, 150),
    depth=st.integers(1, 70),
    width=st.integers(1, 9),
    mask_kind=st.sampled_from(["none", "bool", "added"]),
    dtype=st.sampled_from(DTYPES),
    path=st.sampled_from(PATHS),
    seed=st.integers(0, 99),
)
def test_random_shapes(
    batch, groups, heads, queries, slots, depth, width, mask_kind, dtype, path, seed
):
    query = random(batch, groups * heads, queries, depth, dtype=dtype, seed=seed)
    key = random(batch, groups, slots, depth, dtype=dtype, seed=seed + 1)
    value = random(batch, groups, slots, 16 * width, dtype=dtype, seed=seed + 2)
    seen = random(batch if seed % 2 else 1, 1, queries, slots, seed=seed) > -0.5
    seen[..., 0] = True
    mask = {"none": None, "bool": seen, "added": added(seen, dtype)}[mask_kind]
    y = kernel_attention(query, key, value, mask, path=path, threads=1 + seed % 3)
    assert_close(y, query, key, value, mask)


@everywhere
def test_a_query_has_the_same_bits_in_any_company_and_on_any_number_of_threads(path, dtype):
    query, key, value = operands(groups=1, queries=64, slots=50, dtype=dtype)
    alone = [
        kernel_attention(query[:, :, i : i + 1], key, value, path=path, threads=1)
        for i in range(64)
    ]
    for n in range(1, 65, 3):
        together = kernel_attention(query[:, :, :n], key, value, path=path, threads=1 + n % 3)
        assert torch.equal(together, torch.cat(alone[:n], dim=1))


@everywhere
@pytest.mark.parametrize("boolean", [True, False])
def test_slots_that_are_not_seen_change_no_bit_wherever_they_stand(path, dtype, boolean):
    query, key, value = operands(queries=3, slots=90, dtype=dtype)
    seen = random(90, seed=5) > -0.3
    mask = seen.expand(1, 1, 3, 90) if boolean else added(seen, dtype).expand(1, 1, 3, 90)
    y = kernel_attention(query, key, value, mask, path=path)
    assert torch.equal(y, kernel_attention(query, key[:, :, seen], value[:, :, seen], path=path))


@everywhere
def test_strided_arguments(path, dtype):
    query, key, value = operands(batch=2, depth=64, slots=33, dtype=dtype)
    mask = added(random(2, 33, 5, 1) > -0.5, dtype).permute(0, 3, 2, 1)
    for arguments in (
        (query[..., ::2], key[..., :32], value),
        (query, key.flip(2)[:, :, ::3], value[:, :, ::3]),
        (query[:1].expand(2, -1, -1, -1), key[:, :1].expand(-1, 4, -1, -1), value[:, [0, 1, 0, 1]]),
        (query, key.mT.contiguous().mT, value.mT.contiguous().mT, mask),
        (query, key, value, mask[:, :, :1], 0.3),
    ):
        assert_close(kernel_attention(*arguments, path=path), *arguments)


@everywhere
def test_many_scores_take_several_passes(path, dtype):
    query, key, _ = operands(3, groups=2, heads=1, queries=64, slots=6000, depth=1, dtype=dtype)
    value = random(3, 2, 6000, 16, dtype=dtype, seed=3)
    assert_close(kernel_attention(query, key, value, path=path), query, key, value)


@paths
@pytest.mark.parametrize(
    ("dtype", "hidden"),
    [(torch.float32, None), (torch.float32, -torch.inf), *((dtype, "least") for dtype in DTYPES)],
)
def test_a_query_that_sees_nothing_gives_what_torch_gives(path, dtype, hidden):
    """Zeros, or the mean where the smallest number is added everywhere; zeros of no slots too."""
    query, key, value = operands(heads=1, dtype=dtype)
    mask = torch.ones(1, 1, 5, 40, dtype=torch.bool)
    mask[:, :, 2] = False
    if hidden == "least":
        mask = torch.full(mask.shape, torch.finfo(dtype).min, dtype=dtype)
    elif hidden is not None:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, hidden)
    y = kernel_attention(query, key, value, mask, path=path)
    plain = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
    if hidden == "least":
        torch.testing.assert_close(y, plain, rtol=0.02, atol=0.02)
    else:
        assert (y[:, 2] == 0).all()
        torch.testing.assert_close(y, plain, **within(plain, 8 * key.shape[2]))
    assert (kernel_attention(query, key[:, :, :0], value[:, :, :0], path=path) == 0).all()
    assert kernel_attention(query[:, :, :0], key, value, path=path).shape == (1, 0, 2, 32)


@paths
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("masked", [False, True])
def test_infinities_and_nans_spread_as_in_torch(path, special, where, masked):
    tensors = dict(zip(("query", "key", "value"), operands(groups=1, heads=1), strict=True))
    tensors = {name: tensor.clone().abs() + 1 for name, tensor in tensors.items()}
    tensors[where][0, 0, 3, 1] = special
    mask = torch.ones(1, 1, 5, 40, dtype=torch.bool)
    mask[..., 3] = not masked
    y = kernel_attention(**tensors, mask=mask, path=path)
    plain = F.scaled_dot_product_attention(*tensors.values(), attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(y, plain, equal_nan=True, **within(plain, 8 * 40))


@paths
def test_weights_follow_the_exponential_over_its_whole_range(path):
    """One slot of score 0 and value 0, another of score x and value 1: a logistic curve."""
    scores = torch.cat([torch.linspace(-100, 0, 4001), torch.linspace(0, 100, 4001)])
    value = torch.tensor([0.0, 1.0])[None, None, :, None].expand(1, 1, 2, 16)
    key = torch.tensor([0.0, 1.0])[None, None, :, None]
    y = torch.cat(
        [
            kernel_attention(part[None, None, :, None], key, value, scale=1.0, path=path)[0, :, 0]
            for part in scores.split(64)
        ]
    )
    expected = scores.double().sigmoid()
    assert ((y[:, 0] - expected).abs() <= 2.0**-22 * expected + 2e-38).all()
