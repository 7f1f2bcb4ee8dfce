"""Attention in two launches, in Triton's interpreter, against attention as it is defined."""

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton: make test-triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: make test-triton", allow_module_level=True)

from hf_retrieval_assist.kernels import triton_attention  # noqa: E402
from hf_retrieval_assist.kernels.fixed_attention import Seen  # noqa: E402
from hf_retrieval_assist.kernels.triton_attention import tree_attention  # noqa: E402

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


class Case:
    """Random trees behind rows of unequal lengths, two of them padded."""

    def __init__(
        self,
        heads,
        shared,
        depth,
        width,
        dtype,
        lengths,
        reach=None,
        sinks=False,
        softcap=None,
        holes=False,
    ):
        torch.manual_seed(0)
        self.softcap = softcap
        batch, capacity = len(lengths), -(-(max(lengths) + width) // 64) * 64
        buffers = torch.randn(2, batch, capacity, shared, depth, dtype=dtype)
        self.key, self.value = (buffer.transpose(1, 2) for buffer in buffers)
        self.query = torch.randn(batch, width, heads, depth, dtype=dtype).transpose(1, 2)
        self.scale, self.width, self.sharing = depth**-0.5, width, heads // shared
        length = torch.tensor(lengths)
        self.first = torch.arange(batch).int() * 5
        self.kept = (length - self.first).int()
        self.slots = length[:, None] + torch.arange(width)
        tree = torch.eye(width, dtype=torch.bool).repeat(batch, 1, 1)
        depths = torch.zeros(batch, width, dtype=torch.int64)
        for row in range(batch):
            for node in range(1, width):
                parent = int(torch.randint(0, node, ()))
                tree[row, node] |= tree[row, parent]
                depths[row, node] = depths[row, parent] + 1
        self.unseen = self.hidden = None
        columns = torch.arange(capacity)
        seen = (columns < length[:, None]) & (columns >= self.first[:, None])
        seen = seen[:, None].repeat(1, width, 1)
        if reach is not None:
            self.unseen = length[:, None] + depths - reach
            tree = tree & (depths[:, None, :] > depths[:, :, None] - reach)
            seen &= columns > self.unseen[..., None]
        if holes:
            self.hidden = torch.rand(batch, capacity) < 0.3
            self.hidden &= columns < length[:, None]
            seen &= ~self.hidden[:, None]
        self.seen = seen.scatter(2, self.slots[:, None].expand(-1, width, -1), tree)
        edge = torch.ones(batch, width, 1, dtype=torch.bool)
        self.table = torch.cat([edge, tree, edge], 2)
        self.sinks = torch.randn(heads) if sinks else None

    def run(self, width=None):
        width = width or self.width
        reached = None if self.unseen is None else self.unseen[:, :width, None].contiguous()
        table = self.table[:, :width, : width + 2].contiguous()
        out = tree_attention(
            self.query[:, :, :width],
            self.key,
            self.value,
            Seen(self.kept, self.first, table, reached, self.hidden),
            self.scale,
            self.softcap,
            self.sinks,
        )
        return out.transpose(1, 2)

    def error(self):
        key, value = (x.double().repeat_interleave(self.sharing, 1) for x in (self.key, self.value))
        scores = self.query.double() @ key.transpose(2, 3) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~self.seen[:, None], -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        expected = scores.softmax(-1)[..., : key.shape[2]] @ value
        return float((self.run().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "shared", "depth", "width"),
    [(4, 1, 32, 1), (2, 2, 24, 5), (6, 2, 64, 16), (2, 1, 16, 70)],
    ids=str,
)
@pytest.mark.parametrize("reach", [None, 40])
def test_equals_attention_as_it_is_defined(heads, shared, depth, width, dtype, reach):
    case = Case(heads, shared, depth, width, dtype, [301, 40], reach)
    assert case.error() < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256])
def test_every_width(width):
    for reach in (None, 300):
        assert Case(4, 1, 32, width, torch.float32, [700, 90], reach).error() < 2e-6


def test_sinks():
    assert Case(4, 2, 32, 4, torch.float32, [301, 40], sinks=True).error() < 2e-6


def test_scores_that_are_bounded():
    assert Case(4, 2, 32, 4, torch.float32, [301, 40], softcap=1.5).error() < 2e-6


@pytest.mark.parametrize("reach", [None, 40])
def test_prompts_with_holes(reach):
    assert Case(4, 2, 32, 4, torch.float32, [301, 40], reach, holes=True).error() < 2e-6


def test_a_query_that_sees_nothing_brings_zeros():
    case = Case(4, 2, 32, 4, torch.float32, [301, 40], reach=1)
    case.table[:, 2, 1:-1] = False
    out = case.run()
    assert not out[:, :, 2].any()
    assert out[:, :, 1].any()


def test_slots_that_are_not_in_use_are_not_read():
    case = Case(4, 2, 32, 4, torch.float32, [301, 40])
    for buffer in (case.key, case.value):
        for row, length in enumerate((301, 40)):
            buffer[row, :, length + 4 :] = torch.nan
            buffer[row, :, : case.first[row]] = torch.nan
    assert not case.run().isnan().any()


def test_a_row_does_not_depend_on_the_width_beyond_rounding():
    case = Case(2, 1, 16, 40, torch.float32, [301, 40])
    torch.testing.assert_close(case.run(4), case.run()[:, :, :4], rtol=1e-6, atol=1e-6)


def test_two_launches(monkeypatch):
    launches = []
    for name in ("attend_parts", "merge_parts"):
        kernel = getattr(triton_attention, name)

        class Counted:
            def __getitem__(self, grid, kernel=kernel):
                launches.append(grid)
                return kernel[grid]

        monkeypatch.setattr(triton_attention, name, Counted())
    Case(4, 1, 32, 16, torch.float32, [301, 40]).run()
    assert len(launches) == 2
