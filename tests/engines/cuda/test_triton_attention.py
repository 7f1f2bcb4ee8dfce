"""Attention in two launches, in Triton's interpreter, against attention as it is defined."""

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton: make test-triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: make test-triton", allow_module_level=True)

from hf_retrieval_assist.engines.cuda import triton_attention  # noqa: E402
from hf_retrieval_assist.engines.cuda.triton_attention import part_of  # noqa: E402
from tests.support.tree_case import TOLERANCE, Case  # noqa: E402


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "shared", "depth", "width"),
    [(4, 1, 32, 1), (2, 2, 24, 5), (6, 2, 64, 16), (2, 1, 16, 70)],
)
@pytest.mark.parametrize("reach", [None, 40])
def test_equals_attention_as_it_is_defined(heads, shared, depth, width, dtype, reach):
    case = Case(heads, shared, depth, width, dtype, [301, 40], reach=reach)
    assert case.error() < TOLERANCE[dtype]


@pytest.mark.parametrize("depth", [80, 96, 160, 192, 256, 512])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_head(depth, dtype):
    case = Case(2, 1, depth, 9, dtype, [90], out_depth=128 if depth == 192 else depth)
    assert case.error() < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 257])
def test_every_width(width):
    for reach in (None, 300):
        assert Case(4, 1, 32, width, torch.float32, [700, 90], reach=reach).error() < 2e-6


@pytest.mark.parametrize(
    "kinds",
    [{"sinks": True}, {"softcap": 1.5}, {"holes": True}, {"holes": True, "reach": 40}],
    ids=["sinks", "bounded scores", "holes", "holes in a window"],
)
def test_other_kinds_of_attention(kinds):
    assert Case(4, 2, 32, 4, torch.float32, [301, 40], **kinds).error() < 2e-6


def test_a_query_that_sees_nothing_brings_zeros():
    case = Case(4, 2, 32, 4, torch.float32, [301, 40], reach=1)
    case.table[:, 2, 1:-1] = False
    out = case.run()
    assert not out[:, :, 2].any()
    assert out[:, :, 1].any()


def test_slots_that_are_not_in_use_are_not_read():
    """Nor does a row depend on the width beyond rounding."""
    case = Case(2, 1, 16, 40, torch.float32, [301, 40])
    torch.testing.assert_close(case.run(4), case.run()[:, :, :4], rtol=1e-6, atol=1e-6)
    case = Case(4, 2, 32, 4, torch.float32, [301, 40])
    for buffer in (case.key, case.value):
        for row, length in enumerate((301, 40)):
            buffer[row, :, length + 4 :] = torch.nan
            buffer[row, :, : case.first[row]] = torch.nan
    assert not case.run().isnan().any()


@pytest.mark.parametrize("reach", [None, 3, 40])
def test_a_level_of_a_tree_that_was_fed_before(reach):
    """Its nodes see some of what lies behind the kept slots, and no first one is the shallowest."""
    case = Case(4, 2, 32, 40, torch.float32, [301, 40], reach=reach)
    torch.testing.assert_close(case.run(skipped=23), case.run()[:, :, 23:], rtol=1e-6, atol=1e-6)


def test_two_launches(monkeypatch):
    """Each has one axis, as the others of a grid end at 65,535."""
    grids = []
    for name in ("attend_parts", "merge_parts"):
        kernel = getattr(triton_attention, name)

        class Counted:
            def __getitem__(self, grid, kernel=kernel):
                grids.append(grid)
                return kernel[grid]

        monkeypatch.setattr(triton_attention, name, Counted())
    Case(4, 1, 32, 16, torch.float32, [301, 40]).run()
    assert [len(grid) for grid in grids] == [1, 1]


def test_many_parts(monkeypatch):
    """More than are merged at once."""
    monkeypatch.setattr(triton_attention, "_processors", lambda device: 132)
    case = Case(2, 1, 16, 3, torch.float32, [2500])
    assert part_of(case.key.shape[2], 1, 132) == 128
    assert case.error() < 2e-6


def test_buffers_larger_than_32_bits_count():
    """Three shared heads 2^30 numbers apart; only what is in use takes memory."""
    case = Case(3, 3, 16, 2, torch.float16, [60])
    memory = torch.empty(2, (1 << 31) + (1 << 12), dtype=torch.float16)
    for name, buffer in zip(("key", "value"), memory, strict=True):
        given = getattr(case, name)
        placed = buffer.as_strided(given.shape, (0, 1 << 30, 16, 1))
        setattr(case, name, placed.copy_(given))
    assert case.error() < TOLERANCE[torch.float16]
