"""The scope round `torch.nn.functional.linear`: what it serves and leaves."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.engines.cpu import linear as module
from hf_retrieval_assist.engines.cpu import skinny
from hf_retrieval_assist.engines.cpu.engine import CpuEngine
from hf_retrieval_assist.engines.cpu.reroute import overriding, reroute
from hf_retrieval_assist.engines.cpu.skinny import (
    FEW_ROWS,
    MAX_ROWS,
    can_multiply,
    routed_linear,
    skinny_linear,
)
from tests.support.lossless import build
from tests.support.rounding import within
from tests.support.threads import in_threads

PLAIN = F.linear
W, X = torch.randn(48, 32), torch.randn(5, 32)


@pytest.fixture(autouse=True)
def _restore():
    yield
    assert F.linear is PLAIN


@pytest.fixture
def served(monkeypatch):
    """The row counts of the products that the kernel computed."""
    rows = []

    def routed(x, weight, bias=None):
        found = routed_linear(x, weight, bias)
        if can_multiply(x, weight, bias):
            rows.append(x.numel() // x.shape[-1])
            assert torch.equal(found, skinny_linear(x, weight, bias))
        return found

    monkeypatch.setattr(module, "routed_linear", routed)
    return rows


def of_products(expected, x, weight):
    """Tolerances of sums of products, and of a bias of about one."""
    sizes = x.double().abs() @ weight.double().abs().T + 4
    return within(expected, x.shape[-1] + 1, float(sizes.max()))


def test_linears_inside_are_served_and_right(served):
    """Other threads see nothing of it."""
    layer = torch.nn.Linear(32, 48).requires_grad_(False)
    with reroute():
        y = layer(X.view(1, 5, 32))
        F.linear(X, W)
        F.linear(input=X, weight=W, bias=None)
        (other,) = in_threads(lambda x: F.linear(x, W), [X])
    with reroute(enabled=False):
        assert F.linear is PLAIN
    F.linear(X, W)
    assert served == [5, 5, 5]
    expected = PLAIN(X, layer.weight, layer.bias)[None]
    torch.testing.assert_close(y, expected, **of_products(expected, X, layer.weight))
    # A new thread starts with as many OpenMP threads as there are cores, and may sum differently.
    torch.testing.assert_close(other, PLAIN(X, W), rtol=1e-4, atol=1e-4)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(MAX_ROWS + 1, 32), W),
        (X.double(), W.double()),
        (X[:0], W),
        (X, W.as_subclass(Subclass)),
        (X.as_subclass(Subclass), W),
        (X, W.to_sparse_csr()),
        (X, torch._neg_view(W)),
        (X.to("meta"), W.to("meta")),
        (X, torch.randn(32, 48).T),
        (X, torch.randn(32)),
    ],
    ids=[
        *("many rows", "double", "no rows", "subclassed weight", "subclassed input"),
        *("sparse", "negated", "meta", "transposed", "vector"),
    ],
)
def test_what_is_left_to_pytorch(served, x, weight):
    with reroute():
        y = F.linear(x, weight)
    assert not served
    if not x.is_meta:
        assert torch.equal(y, PLAIN(x, weight))


def test_wrong_arguments_raise_what_pytorch_raises(served):
    for arguments in ((X[:, 1:], W), (X, W, torch.ones(3)), (X, W.half()), (X, None)):
        with pytest.raises((RuntimeError, TypeError)) as expected:
            PLAIN(*arguments)
        with reroute(), pytest.raises(expected.type) as raised:
            F.linear(*arguments)
        assert str(raised.value) == str(expected.value)
    assert not served


def test_autograd_autocast_function_transforms_and_tracing_are_left_to_pytorch(served):
    weight = torch.nn.Parameter(W.clone())
    with reroute():
        F.linear(X, weight).sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            assert F.linear(X, W).dtype is torch.bfloat16
        batched = torch.func.vmap(lambda x: F.linear(x, W))(X)
    assert weight.grad is not None
    torch.testing.assert_close(batched, PLAIN(X, W), **of_products(batched, X, W))

    def traced(x):
        with reroute():
            return F.linear(x, W)

    assert "aten::linear" in str(torch.jit.trace(traced, X, check_trace=False).graph)
    assert not served
    with reroute(), torch.no_grad():
        F.linear(X, weight)
    assert served == [5]


def test_modes_that_watch_operators_see_the_linears(served):
    class Watch(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += func is PLAIN
            return func(*args, **(kwargs or {}))

    with FlopCounterMode(display=False) as flops, reroute():
        F.linear(X, W)
    others = {id(W): lambda x, bias: pytest.fail("a copy was read")}
    with overriding(others), FlopCounterMode(display=False) as inside:
        F.linear(X, W)
    with Watch() as watch, reroute():
        F.linear(X, W)
    products = 2 * X.shape[0] * W.numel()
    assert (flops.get_total_flops(), inside.get_total_flops()) == (products, products)
    assert watch.seen == 1
    assert not served


@pytest.mark.parametrize("rows", [FEW_ROWS, FEW_ROWS + 1, MAX_ROWS, MAX_ROWS + 1])
def test_more_rows_are_the_kernels_where_drafts_are_verified(served, rows):
    """Of a few texts; a scope within keeps to what the one round it said."""
    x, expected = torch.randn(rows, 32), []
    for texts in (0, 1, FEW_ROWS, FEW_ROWS + 1):
        most = MAX_ROWS if 0 < texts <= FEW_ROWS else FEW_ROWS
        with CpuEngine().scope(True, texts):
            F.linear(x, W)
            with reroute():
                F.linear(x, W)
        with reroute():
            F.linear(x[:FEW_ROWS], W)
        expected += [*[rows] * (2 * (rows <= most)), FEW_ROWS]
    assert served == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("native", [False, True])
def test_many_rows_in_half_precision_are_the_kernels_where_pytorch_is_slow(
    served, dtype, native, monkeypatch
):
    half = [] if native else [torch.bfloat16, torch.float16]
    monkeypatch.setattr(skinny, "ANY_ROWS", frozenset(half))
    x, weight = torch.randn(300, 32, dtype=dtype), W.to(dtype)
    with reroute():
        found = F.linear(x, weight)
        rows = torch.cat([F.linear(row, weight) for row in x.split(1)])
    assert served == [300] * (dtype in half) + [1] * 300
    if dtype in half:
        assert torch.equal(found, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [FEW_ROWS, FEW_ROWS + 1, MAX_ROWS, MAX_ROWS + 1])
def test_longer_prompts_are_pytorchs(served, length, dtype, monkeypatch):
    """Whoever feeds them; tokens behind them, and the row of the output layer, are not."""
    monkeypatch.setattr(skinny, "ANY_ROWS", frozenset())
    most = MAX_ROWS if "amx" in skinny.PATHS and dtype is torch.bfloat16 else FEW_ROWS
    model = build().to(dtype)
    ids, layers = torch.arange(length)[None] % 60 + 3, 7 * len(model.model.layers)
    for assistant in (None, SamAssistant(budget=0, extra_memory=0)):
        for _ in range(2):  # the first of which tests the model
            served.clear()
            with reroute():
                model.generate(ids, max_new_tokens=1, do_sample=False, assistant=assistant)
        assert served.count(length) == (layers if length <= most else 0)
        assert served.count(1) == 1
