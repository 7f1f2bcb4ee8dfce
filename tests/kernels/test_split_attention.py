"""Attention in two parts against attention under one dense mask."""

import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_retrieval_assist.kernels import split_attention as module
from hf_retrieval_assist.kernels.scopes import attending
from hf_retrieval_assist.kernels.split_attention import (
    FedSlots,
    SplitAttention,
    masked_attention,
    split_attention,
    varlen,
    ways,
    windowed_attention,
)
from tests.support.fake_cuda import DEVICE, on_a_card

VIEWS = ("view", "slice", "select", "expand", "transpose", "unsqueeze", "detach", "alias", "t")


class Case:
    """Random trees behind rows of random lengths, in buffers of a layout like the arena's."""

    def __init__(self, seed, sharing, dtype=torch.float64, capacity=64, longest=40, batch=3):
        torch.manual_seed(seed)
        self.width, depth, shared = int(torch.randint(1, 9, ())), 8, 2
        buffers = torch.randn(2, batch, capacity, shared, depth, dtype=dtype)
        self.key, self.value = (buffer.transpose(1, 2) for buffer in buffers)
        query = torch.randn(batch, self.width, shared * sharing, depth, dtype=dtype)
        self.query, self.scale, self.sharing = query.transpose(1, 2), 0.3, sharing
        lengths = torch.randint(1, longest + 1, (batch,))
        lengths[0] = longest
        first = (torch.rand(batch) * lengths).int()
        tree = torch.rand(batch, self.width, self.width) < 0.4
        tree = (tree | torch.eye(self.width, dtype=torch.bool)).tril()
        self.slots = lengths[:, None] + torch.arange(self.width)
        columns = torch.arange(capacity)
        seen = (columns < lengths[:, None]) & (columns >= first[:, None])
        seen = seen[:, None].repeat(1, self.width, 1)
        seen.scatter_(2, self.slots[:, None].expand(-1, self.width, -1), tree)
        self.seen = seen
        kept = (lengths - first).int()
        self.fed = FedSlots(
            self.slots, kept, first, longest, self.additive(tree), self.additive(seen)
        )

    def additive(self, seen):
        zeros = torch.zeros(seen.shape, dtype=self.query.dtype)
        return zeros.masked_fill(~seen, torch.finfo(self.query.dtype).min)[:, None]

    def dense(self, mask):
        """Attention as it is defined."""
        key, value = (x.repeat_interleave(self.sharing, 1) for x in (self.key, self.value))
        return F.scaled_dot_product_attention(
            self.query, key, value, attn_mask=mask, scale=self.scale
        )

    def windowed(self, reach):
        depths = torch.arange(self.width)
        columns = torch.arange(self.seen.shape[2])
        near = columns > (self.slots[:, :1] + depths)[..., None] - reach
        return self.additive(self.seen & near)


CASES = {"seed": st.integers(0, 2**31), "sharing": st.sampled_from([1, 2, 4, 8])}


@settings(max_examples=60, deadline=None)
@given(**CASES, longest=st.integers(1, 40))
def test_two_parts_are_the_whole(seed, sharing, longest):
    case = Case(seed, sharing, longest=longest)
    out = split_attention(case.query, case.key, case.value, case.fed, case.scale)
    torch.testing.assert_close(out, case.dense(case.fed.mask), atol=1e-13, rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(**CASES, reach=st.integers(1, 30))
def test_windows_read_what_they_reach(seed, sharing, reach):
    case = Case(seed, sharing, longest=40)
    mask = case.windowed(reach)
    # What lies outside of the window is never read.
    case.key[:, :, : max(0, int(case.slots.min()) - reach)] = torch.nan
    expected = Case(seed, sharing, longest=40).dense(mask)
    out = windowed_attention(case.query, case.key, case.value, case.fed, mask, reach, case.scale)
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=1e-12)


@given(**CASES)
@settings(max_examples=20, deadline=None)
def test_any_mask_at_all(seed, sharing):
    case = Case(seed, sharing)
    out = masked_attention(case.query, case.key, case.value, case.fed.mask, case.scale)
    torch.testing.assert_close(out, case.dense(case.fed.mask), atol=1e-13, rtol=1e-12)


class Written(TorchDispatchMode):
    """Adds up the bytes that operators write."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in VIEWS:
            tensors = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.nbytes += sum(x.numel() * x.element_size() for x in tensors)
        return out


@pytest.mark.parametrize("windowed", [False, True])
def test_what_is_written_follows_the_tokens_in_use(windowed):
    written = []
    for capacity in (64, 1024):
        case = Case(3, 4, torch.float32, capacity)
        mask = case.windowed(20)
        arguments = case.query, case.key, case.value, case.fed
        with Written() as counted:
            if windowed:
                windowed_attention(*arguments, mask, 20, case.scale)
            else:
                split_attention(*arguments, case.scale)
        written.append(counted.nbytes)
    assert written[0] == written[1]
    # Less than one copy of the keys of every row would be, let alone one per query head.
    assert written[1] < case.key.nbytes


@pytest.mark.parametrize(
    ("capability", "installed", "expected"),
    [((9, 0), True, "triton"), ((7, 5), True, None), ((8, 0), False, None)],
)
def test_ways_of_a_card(capability, installed, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = object() if installed else None
    monkeypatch.setattr(module, "find_spec", {"triton": found}.get)
    triton = [] if expected is None else [expected]
    assert ways(DEVICE) == triton + (["parts"] if varlen is not None else [])
    assert ways(torch.device("cpu")) == ["parts"]
    assert ways(torch.device("mps")) == []


class Module:
    is_causal = False

    def __init__(self, sharing):
        self.num_key_value_groups = sharing


def test_scopes_serve_their_thread_only_and_leave_nothing():
    case = Case(5, 2)
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    module = Module(2)
    inputs = module, case.query, case.key, case.value
    expected = plain(*inputs, case.fed.mask, scaling=case.scale)[0]
    windowed = case.windowed(9)
    other = []

    def elsewhere():
        other.append(ALL_ATTENTION_FUNCTIONS["sdpa"](*inputs, case.fed.mask, scaling=case.scale))

    with attending("sdpa", {module}, SplitAttention(case.fed, [(windowed, 9)])):
        routed = ALL_ATTENTION_FUNCTIONS["sdpa"]
        assert routed is not plain
        out, weights = routed(*inputs, case.fed.mask, scaling=case.scale)
        assert weights is None
        torch.testing.assert_close(out, expected, atol=1e-13, rtol=1e-12)
        out = routed(*inputs, windowed, scaling=case.scale)[0]
        torch.testing.assert_close(out.transpose(1, 2), case.dense(windowed))
        with attending("sdpa", {module}, SplitAttention(case.fed, [])):
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is routed
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert torch.equal(other[0][0], expected)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is plain


@pytest.mark.skipif(varlen is None, reason="needs torch 2.12")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 2, 4, 64])
@pytest.mark.parametrize(("heads", "shared", "depth"), [(32, 8, 128), (16, 16, 64)])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_kernels_of_a_card_take_what_they_are_given(dtype, width, heads, shared, depth, batch):
    """The memory-efficient kernel raises on a bias whose rows are not aligned."""
    capacity = 2048
    with on_a_card() as kernels:
        made = {"dtype": dtype, "device": DEVICE}
        rows = torch.empty(batch, dtype=torch.int32, device=DEVICE)
        slots = torch.empty(batch, width, dtype=torch.int64, device=DEVICE)
        query = torch.empty(batch, width, heads, depth, **made).transpose(1, 2)
        buffers = torch.empty(2, batch, capacity, shared, depth, **made)
        inputs = query, *(x.transpose(1, 2) for x in torch.unbind(buffers))
        bias = torch.empty(batch, 1, width, width, **made)
        mask = torch.empty(batch, 1, width, capacity, **made)
        fed = FedSlots(slots, rows, rows, 40, bias, mask)
        for out in (
            split_attention(*inputs, fed, 0.1),
            windowed_attention(*inputs, fed, mask, 512, 0.1),
            masked_attention(*inputs, mask, 0.1),
        ):
            assert out.shape == query.shape
            assert (out.device, out.dtype) == (DEVICE, dtype)
    assert (kernels.efficient, kernels.flash) == (3, 1)
