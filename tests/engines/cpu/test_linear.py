"""The scope round `torch.nn.functional.linear`: what it serves, leaves and remembers."""

import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import GenerationMixin

from hf_retrieval_assist.engines.cpu import linear as module
from hf_retrieval_assist.engines.cpu import reroute as reroute_module
from hf_retrieval_assist.engines.cpu import tuning as tuning_module
from hf_retrieval_assist.engines.cpu.linear import MAX_ROWS, METHODS, LinearTuning
from hf_retrieval_assist.engines.cpu.reroute import overriding, reroute
from hf_retrieval_assist.engines.cpu.skinny import FEW_ROWS, kernel_linear, set_chooser
from tests.support.lossless import build
from tests.support.rounding import within
from tests.support.threads import in_threads

PLAIN = F.linear
W, X = torch.randn(48, 32), torch.randn(5, 32)


@pytest.fixture(autouse=True)
def _restore():
    yield
    assert F.linear is PLAIN
    set_chooser(module.TUNING.choose)


@pytest.fixture
def served():
    """The row counts of the products that the scope computed itself."""
    rows = []

    def kernel(x, weight, bias):
        rows.append(x.numel() // x.shape[-1])
        return kernel_linear(x, weight, bias)

    set_chooser(lambda weight, prompt: kernel)
    return rows


@pytest.fixture
def tuning(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEAST_ELEMENTS", 0)
    return LinearTuning(tmp_path / "cache" / "tuning.json")


def of_products(expected, x, weight):
    """Tolerances of sums of products, and of a bias of about one."""
    sizes = x.double().abs() @ weight.double().abs().T + 4
    return within(expected, x.shape[-1] + 1, float(sizes.max()))


def measure_as(monkeypatch, name):
    """Let tuning find `name` fastest; returns the list of the weights it was asked about."""
    asked = []
    monkeypatch.setattr(
        module, "fastest_method", lambda weight, *_: asked.append(weight.shape) or name
    )
    return asked


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


def test_compiled_code_keeps_its_linears_in_the_graph(served):
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph

    compiled = torch.compile(lambda x: F.linear(x, W) + 1, backend=backend, fullgraph=True)
    with reroute():
        y = compiled(X)
    torch.testing.assert_close(y, PLAIN(X, W) + 1, **of_products(y, X, W))
    assert "linear" in graphs[0]
    assert not served


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 32), (2, 3, 32), (32,)])
def test_every_method_computes_the_product(name, dtype, shape):
    x, weight, bias = torch.randn(shape).to(dtype), W.to(dtype), torch.randn(48).to(dtype)
    for b in (None, bias):
        y = METHODS[name](x, weight, b)
        expected = PLAIN(x, weight, b)
        torch.testing.assert_close(y, expected, **of_products(expected, x, weight))
        assert y.is_contiguous()


def seconds_as(monkeypatch, serial=20, **seconds):
    """Let each method take so many seconds for 1, 2, 4 and 16 rows."""

    def measured(call):
        method, x, *_ = call.args
        names = [name for name in METHODS if METHODS[name] is method]
        return seconds[names[0]][(1, 2, 4, 16).index(len(x))] if names else serial

    monkeypatch.setattr(tuning_module, "_seconds", measured)


@pytest.mark.parametrize(
    ("kernel", "transposed", "pytorch", "fastest"),
    [
        ((1, 1, 1, 20), (9, 9, 9, 1), (2, 2, 2, 1), "pytorch"),  # all numbers of rows together
        ((1, 1, 1, 3), (9, 9, 9, 1), (2, 2, 2, 1), "kernel"),
        ((1,) * 4, (2,) * 4, (0.95,) * 4, "kernel"),  # unless another wins clearly
        ((1,) * 4, (0.8,) * 4, (0.9,) * 4, "transposed"),
    ],
)
def test_the_fastest_method_is_chosen(monkeypatch, kernel, transposed, pytorch, fastest):
    seconds_as(monkeypatch, kernel=kernel, transposed=transposed, pytorch=pytorch)
    assert module.fastest_method(W) == fastest


@pytest.mark.parametrize("shape", [(48, 32), (5000, 700), (20000, 700)])
def test_weights_have_left_the_caches_when_they_are_read_again(monkeypatch, shape):
    read = []

    def recorded(call):
        *_, weights = call.args
        weight = next(weights)
        assert weight.shape[1] == shape[1]
        read.append(weight.data_ptr())
        return 1.0

    monkeypatch.setattr(tuning_module, "_seconds", recorded)
    module.fastest_method(torch.ones(shape))
    distinct, nbytes = len(set(read)), 4 * shape[0] * shape[1]
    assert distinct == min(len(read), module.MAX_COPIES, max(1, module.TUNING_BYTES // nbytes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_choices_are_made_once_and_remembered(tuning, monkeypatch, dtype):
    """But for small weights, which are the kernel's, and of a busy machine."""
    with monkeypatch.context() as patch:
        seconds_as(patch, serial=1, kernel=(2,) * 4, transposed=(9,) * 4, pytorch=(1,) * 4)
        assert module.fastest_method(W) is None
        assert LinearTuning(tuning.path).choose(W) is METHODS["kernel"]
    assert not tuning.path.exists()
    weight = W.to(dtype)
    assert tuning.choose(weight) in METHODS.values()
    asked = measure_as(monkeypatch, "transposed")
    again = LinearTuning(tuning.path)
    assert again.choose(weight) is tuning.choose(weight)
    assert not asked
    assert again.choose(weight[:7]) is METHODS["transposed"]
    assert asked == [(7, 32)]
    assert list(tuning.path.parent.iterdir()) == [tuning.path]
    monkeypatch.setattr(module, "LEAST_ELEMENTS", 10_000)
    assert LinearTuning(tuning.path).choose(weight[:9]) is METHODS["kernel"]
    assert asked == [(7, 32)]


def test_products_of_prompts_are_chosen_apart(tuning, monkeypatch):
    """Those that are timed are a prompt's; small weights are the kernel's."""
    seen = []

    def fastest(cases):
        seen.extend(cases)
        return "pytorch"

    monkeypatch.setattr(module, "fastest", fastest)
    monkeypatch.setattr(module, "LEAST_OF_PROMPTS", 0)
    assert tuning.choose(W, True) is METHODS["pytorch"]
    assert len(seen) == len(module.PROMPT_ROWS)
    assert tuning.choose(W) is METHODS["pytorch"]
    assert len(seen) == len(module.PROMPT_ROWS) + len(module.TUNING_ROWS)
    assert len(json.loads(tuning.path.read_text())["choices"]) == 2
    monkeypatch.setattr(module, "LEAST_OF_PROMPTS", 10_000)
    assert tuning.choose(W[:9], True) is METHODS["kernel"]


def test_prompts_that_generate_feeds_have_products_of_their_own():
    """Of more than a few tokens, in scopes of the thread alone; forwards that are no prompt's have
    those of any number of rows."""
    model, asked, plain = build(), [], GenerationMixin._prefill
    for length, prompts in ((FEW_ROWS, {False}), (FEW_ROWS + 1, {False, True})):
        asked.clear()
        set_chooser(lambda weight, prompt: asked.append(prompt) or kernel_linear)
        ids = torch.arange(length)[None] + 3
        with reroute():
            assert GenerationMixin._prefill is not plain
            model.generate(ids, max_new_tokens=3, do_sample=False)
            # The output layer has one row of a prompt.
            assert {*asked} == prompts
            before = asked.count(True)
            with torch.no_grad():
                model(torch.arange(40)[None])
        assert asked.count(True) == before
        assert GenerationMixin._prefill is plain


@pytest.mark.parametrize("before", [True, False])
def test_a_caller_s_way_to_feed_prompts_stays_where_it_is(before, monkeypatch):
    """Also one that was there before the package was imported."""
    plain = GenerationMixin._prefill

    def own(*given):
        return plain(*given)

    monkeypatch.setattr(GenerationMixin, "_prefill", own)
    if before:
        monkeypatch.setattr(reroute_module, "_plain_prefill", reroute_module._plain_method())
    with reroute():
        assert GenerationMixin._prefill is own


@pytest.mark.parametrize("part", ["cpu", "kernels", "torch", "package"])
def test_another_environment_starts_anew(tuning, monkeypatch, part):
    measure_as(monkeypatch, "kernel")
    tuning.choose(W)
    stored = json.loads(tuning.path.read_text())
    assert stored["environment"]["torch"] == torch.__version__
    assert stored["environment"][part]
    stored["environment"][part] = "0.0"
    tuning.path.write_text(json.dumps(stored))
    measure_as(monkeypatch, "pytorch")
    assert LinearTuning(tuning.path).choose(W) is METHODS["pytorch"]


@pytest.mark.parametrize(
    "content", [*(b"{", b"[]", b"\xff\xfe", b"[" * 100_000), "choices is a list", "unknown method"]
)
def test_a_bad_file_is_ignored_with_one_warning(tuning, monkeypatch, content):
    bad = {"choices is a list": [], "unknown method": {"a": "magic"}}
    if content in bad:
        stored = {"environment": tuning_module._environment(), "choices": bad[content]}
        content = json.dumps(stored).encode()
    measure_as(monkeypatch, "kernel")
    tuning.path.parent.mkdir()
    tuning.path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert tuning.choose(W) is tuning.choose(W[:3]) is METHODS["kernel"]
    assert len(caught) == 1
    assert len(json.loads(tuning.path.read_text())["choices"]) == 2
