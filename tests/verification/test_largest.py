"""The largest scores, against torch's own searches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.structures.scores import BLOCK_COLUMNS, Scores, peaks_of, reaching
from hf_retrieval_assist.verification.largest import argmax_rows, host_scores, largest

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def scores_of(seed, rows, columns, dtype, padded=False, spread=None):
    """Random scores; with a spread, integers below it, so that many are equal."""
    torch.manual_seed(seed)
    scores = (
        torch.randn(rows, columns) if spread is None else torch.randint(spread, (rows, columns))
    )
    scores = scores.to(dtype)
    if padded:
        scores[:, columns // 2 :] = -torch.inf
    return scores


@given(st.integers(1, 8), st.integers(0, 600), st.integers(0, 2**32 - 1), st.booleans(), dtypes)
def test_largest_is_torch_topk(k, extra, seed, padded, dtype):
    """Some rows, parts of rows, columns that lie apart, more dimensions."""
    columns = max(k, extra) + (9000 if seed % 2 else 0)
    scores = scores_of(seed, 4, columns, dtype, padded)
    rows = np.array([0, 2, 3])
    values, ids = largest(scores, k, rows)
    assert torch.equal(values, scores[rows].topk(k, 1).values)
    assert torch.equal(scores[rows].gather(1, ids), values)
    assert all(len(set(row)) == k for row in ids.tolist())
    for found in (
        largest(scores[rows], k),
        largest(torch.cat([scores, scores], 1)[:, :columns], k, rows),
        largest(torch.stack([scores, scores], 2)[..., 0], k, rows),
        [x.flatten(0, 1)[rows] for x in largest(scores.view(2, 2, columns), k)],
    ):
        assert torch.equal(found[0], values)
        assert torch.equal(found[1], ids)


@given(st.integers(1, 40), st.integers(1, 900), st.integers(0, 2**32 - 1))
def test_of_equal_scores_the_first_come_first(k, columns, seed):
    scores = scores_of(seed, 2, columns, torch.float32, spread=5)
    values, ids = largest(scores, k)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    assert torch.equal(ids, order)
    assert torch.equal(values, scores.gather(1, order))


@given(st.integers(1, 900), st.integers(0, 2**32 - 1), dtypes, st.booleans())
def test_argmax_rows_is_torch_argmax(columns, seed, dtype, broken):
    scores = scores_of(seed, 3, columns, dtype, spread=4)
    if broken:
        scores[1, columns // 2 :: 7] = torch.nan
    assert torch.equal(argmax_rows(scores), scores.argmax(dim=-1))


class Named(torch.Tensor):
    """A tensor of another class."""


def test_scores_of_another_class_or_dtype_are_copied():
    scores = scores_of(0, 3, 9, torch.float32)
    for other in (scores.as_subclass(Named), scores.double(), torch._neg_view(-scores)):
        assert host_scores(other) is None
        assert argmax_rows(other).tolist() == scores.argmax(1).tolist()
        assert torch.equal(largest(other, 4)[1], scores.topk(4).indices)


def test_wrong_arguments_are_refused():
    scores = scores_of(0, 2, 9, torch.float32)
    table, rows = host_scores(scores), np.array([0])
    for k, columns in ((0, 9), (10, 9), (4, 3), (1, 10)):
        with pytest.raises(ValueError, match=f"k: expected 1 to {columns} of 9 columns"):
            table.top_k(rows, k, columns)
    for row in (-1, 2):
        with pytest.raises(IndexError, match="row: expected 0 to 1"):
            table.top_k(np.array([row]), 1, 9)
        with pytest.raises(IndexError, match="row: expected 0 to 1"):
            table.argmax(row)
    for refused in (scores[:, ::2], scores.double(), scores.to("meta"), torch._neg_view(scores)):
        assert host_scores(refused) is None
    with pytest.raises(ValueError, match="dtype: expected one of"):
        Scores(scores, scores.data_ptr(), 2, 9, "float64")


@given(st.integers(1, 900), st.integers(0, 2**32 - 1), dtypes)
def test_a_nan_in_front_is_seen(columns, seed, dtype):
    scores = scores_of(seed, 3, columns, dtype)
    assert not host_scores(scores).starts_with_nan()
    scores[:, 1:] = torch.nan
    assert not host_scores(scores).starts_with_nan()
    scores[2, 0] = torch.nan
    assert host_scores(scores).starts_with_nan()


@given(
    st.integers(1, 1200), st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-2])
)
def test_what_may_be_among_the_largest_is_found(columns, k, seed, tolerance):
    """Against the definition, with bounds of which some are large and values that are equal."""
    torch.manual_seed(seed)
    near = torch.randn(columns) if seed % 2 else torch.randint(4, (columns,)).float()
    bounds, k = torch.rand(columns) ** 4, min(k, columns)
    least = (near - 0.5 * bounds).topk(k).values[-1] - 0.25
    least -= tolerance * least.abs() + 0.25
    expected = (near + 0.5 * bounds >= least).nonzero()[:, 0]
    peaks = torch.stack([block.amax() for block in bounds.split(BLOCK_COLUMNS)]).numpy()
    np.testing.assert_array_equal(peaks_of(bounds.numpy()), peaks)
    given = near.numpy(), bounds.numpy(), peaks
    found = reaching(*given, 0.5, k, 1e30, tolerance, 0.25)
    np.testing.assert_array_equal(found, expected)
    assert len(reaching(*given, 0.5, k, -1e3, tolerance, 0.25)) == columns
    with pytest.raises(ValueError, match="k: expected 1 to"):
        reaching(*given, 0.5, columns + 1, 1e30, tolerance, 0.25)
