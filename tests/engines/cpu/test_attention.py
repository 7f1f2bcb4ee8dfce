"""The exchange of transformers' `sdpa` attention function: what it serves and leaves."""

from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_retrieval_assist.engines.cpu import attention as module
from hf_retrieval_assist.engines.cpu.attention import plain_attention
from hf_retrieval_assist.engines.cpu.reroute import reroute
from hf_retrieval_assist.engines.cpu.skinny import FEW_ROWS, MAX_ROWS
from hf_retrieval_assist.host.scopes import attending
from tests.support.products import attending_kernels
from tests.support.threads import elsewhere

SHARED = SimpleNamespace(num_key_value_groups=2, is_causal=True)
Q, K, V = (torch.randn(1, heads, 5, 16) for heads in (4, 2, 2))
MASK = torch.zeros(1, 1, 5, 5).masked_fill_(~torch.ones(5, 5).tril().bool(), -1e38)


@pytest.fixture
def served():
    """The numbers of queries of the calls that the kernel computed."""
    with attending_kernels() as queries:
        yield queries
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is plain_attention


def attend(*arguments, layer=SHARED, **options):
    return ALL_ATTENTION_FUNCTIONS["sdpa"](layer, *arguments, **options)


def check(*arguments, **options):
    """The scope gives what transformers gives."""
    with torch.no_grad(), reroute():
        y, weights = attend(*arguments, **options)
    expected, _ = attend(*arguments, **options)
    # PyTorch rounds weights to half precision before it sums values; the kernel does not.
    tolerance = 1e-5 if y.dtype is torch.float32 else 0.02
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    assert y.is_contiguous()
    assert weights is None


def test_attention_inside_is_served_and_right(served):
    for mask in (MASK, MASK == 0):
        check(Q, K, V, mask)
        check(Q, K, V, mask, scaling=0.1, dropout=0.0, sliding_window=3)
    check(Q[:, :, :1], K, V, None)
    check(Q, K, V, None, is_causal=False)
    check(Q[:, :2], K, V, MASK, layer=SimpleNamespace())
    check(Q, K, V, torch.randn(1, 4, 5, 5))
    for dtype in (torch.bfloat16, torch.float16):
        check(*(x.to(dtype) for x in (Q, K, V, torch.zeros(1, 1, 5, 5))))
    assert served == [5, 5, 5, 5, 1, 5, 5, 5, 5, 5]


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((Q, K, V, None), {}),
        ((Q, K, V, MASK), {"position_bias": torch.zeros(1, 4, 5, 5)}),
        ((Q, K, V, MASK), {"output_attentions": True}),
        ((Q, K, V, MASK), {"cache": object()}),
        ((Q, K, V[..., :15], MASK), {}),
        ((Q.double(), K.double(), V.double(), MASK.double()), {}),
        ((Q.as_subclass(Subclass), K, V, MASK), {}),
        ((*(torch.randn(1, 2, FEW_ROWS + 1, 16) for _ in "qkv"), None), {"is_causal": False}),
    ],
    ids=[
        *("causal", "bias", "weights", "a cache", "width", "double"),
        *("subclass", "many queries"),
    ],
)
def test_what_is_left_to_transformers(served, arguments, options):
    layer = SHARED if arguments[0].shape[1] == 4 else SimpleNamespace()
    check(*arguments, layer=layer, **options)
    assert not served


def test_autograd_dropout_and_much_memory_are_left_to_transformers(served, monkeypatch):
    query = Q.clone().requires_grad_()
    with reroute():
        attend(query, K, V, MASK)[0].sum().backward()
        attend(Q, K, V, MASK, dropout=0.5)
    assert query.grad is not None
    assert not served
    monkeypatch.setattr(module, "MAX_SCORES", 2 * 5 * 5 - 1)
    check(Q, K, V, MASK)
    check(Q[:, :, :4], K, V, MASK[:, :, :4])
    assert served == [4]


def test_kernels_serve_whatever_scope_another_thread_is_in(served):
    with elsewhere(attending("sdpa", set(), None)):
        with torch.no_grad(), reroute():
            attend(Q, K, V, MASK)
        attend(Q, K, V, MASK)
    assert served == [5]


@pytest.mark.parametrize("queries", [FEW_ROWS, MAX_ROWS, MAX_ROWS + 1])
def test_more_queries_are_the_kernels_where_drafts_are_verified(served, queries):
    query, *others = (torch.randn(2, 2, queries, 16) for _ in "qkv")
    for verifying in (False, True):
        with torch.no_grad(), reroute(verifying=verifying):
            attend(query, *others, None, layer=SimpleNamespace(), is_causal=False)
    assert served == [queries] * ((queries <= FEW_ROWS) + (queries <= MAX_ROWS))
