"""Norms in one operation: the bits of the modules' own forward, or the modules' own forward."""

import gc

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, LlamaForCausalLM, Olmo2ForCausalLM, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_retrieval_assist.engines.cpu import norms
from hf_retrieval_assist.engines.cpu.norms import learn_norms
from hf_retrieval_assist.engines.cpu.reroute import reroute
from hf_retrieval_assist.engines.cpu.skinny import NORM_LANES, fused_norm
from tests.support.lossless import build
from tests.support.products import DTYPES, same_within_a_scope
from tests.support.watching import results_of

MODELS = (LlamaForCausalLM, Gemma3ForCausalLM, Qwen3ForCausalLM, Olmo2ForCausalLM)
IDS = torch.tensor([[5, 17, 3, 42, 8]])


@pytest.fixture
def fused(monkeypatch):
    """Whether each norm that might be was computed in one operation."""
    return results_of(monkeypatch, norms, "fused_norm", lambda y, *_: y is not None)


def norms_of(model):
    return [module for module in model.modules() if "RMSNorm" in type(module).__name__]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("depth", [1, 7, 8, 33, 64, 100, 640, 1152, 2560, 4100, 16384])
def test_bits_are_those_of_pytorchs_operators(depth, dtype):
    """Heads that were moved keep their strides."""
    module = LlamaRMSNorm(depth).to(dtype)
    nn.init.normal_(module.weight)
    learn_norms(module)
    random = torch.Generator().manual_seed(depth)
    for scale in (1e-6, 1.0, 1e4):
        x = (torch.randn(2, 3, depth, generator=random) * scale).to(dtype)
        plain = same_within_a_scope(module, x)
        with torch.no_grad(), reroute():
            rows = [module(x[i : i + 1, j : j + 1]) for i in range(2) for j in range(3)]
        assert torch.equal(torch.cat(rows).view_as(plain), plain)
    x = torch.randn(4, 5, 2, depth, generator=random).to(dtype)
    outer = torch.randn(depth, 4, 5, 2, generator=random).to(dtype)
    for moved in (x.transpose(1, 2), x.transpose(0, 1), outer.permute(3, 1, 2, 0)):
        same_within_a_scope(module, moved)
        same_within_a_scope(module, moved[:, 1:])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("model_class", MODELS)
def test_every_norm_of_a_model_is_served_and_its_logits_stay(model_class, dtype, fused):
    model = build(model_class).to(dtype)
    for module in norms_of(model):
        nn.init.normal_(module.weight)
    with torch.no_grad(), reroute():
        plain = model(IDS).logits
        learn_norms(model)
        fused.clear()
        with reroute():  # norms that were learnt since are exchanged
            assert torch.equal(model(IDS).logits, plain)
    assert fused == [True] * len(norms_of(model))


def test_what_changes_after_it_was_learnt_is_followed(fused):
    module = LlamaRMSNorm(32)
    learn_norms(module)
    x = torch.randn(1, 32)
    changes = [
        lambda: nn.init.normal_(module.weight),
        lambda: setattr(module, "variance_epsilon", 0.5),
        lambda: setattr(module, "weight", nn.Parameter(torch.randn(32))),
        lambda: module.bfloat16(),
    ]
    for change in changes:
        change()
        same_within_a_scope(module, x)
    # The last change is of the dtype that it was learnt for.
    assert fused[-3:] == [True, True, True]


class Centred(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class Clipped(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x.clamp(-1000, 1000))


@pytest.mark.parametrize("module", [Centred(24), Clipped(24), nn.LayerNorm(24), nn.RMSNorm(24)])
def test_other_norms_are_left_alone(module, fused):
    learn_norms(module)
    fused.clear()
    same_within_a_scope(module, torch.randn(3, 24) * 3)
    assert not fused


def test_gradients_hooks_and_keywords_see_the_modules_own_operators(fused):
    module = LlamaRMSNorm(24)
    learn_norms(module)
    fused.clear()
    x = torch.randn(2, 24)
    with reroute():
        module(x).sum().backward()
        assert module.weight.grad is not None
        with torch.no_grad():
            keyword = module(hidden_states=x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                module(x)
    assert not any(fused)
    seen = []
    module.register_forward_hook(lambda *arguments: seen.append(arguments[2]))
    with torch.no_grad(), reroute():
        assert module(x) is seen[0]
    assert fused[-1]
    assert torch.equal(seen[0], keyword)


def test_outside_of_scopes_classes_are_as_they_were(monkeypatch):
    """And what is known of a module goes with it."""
    plain = LlamaRMSNorm.forward
    module = LlamaRMSNorm(8)
    learn_norms(module)
    gc.collect()
    known = len(norms._forms)
    with reroute():
        assert LlamaRMSNorm.forward is not plain
    assert LlamaRMSNorm.forward is plain

    def replaced(self, x):
        return x

    monkeypatch.setattr(LlamaRMSNorm, "forward", replaced)
    with reroute():
        assert LlamaRMSNorm.forward is replaced
    assert LlamaRMSNorm.forward is replaced
    del module
    gc.collect()
    assert len(norms._forms) == known - 1


@pytest.mark.parametrize(
    ("owner", "name"), [(torch, "rsqrt"), (torch.Tensor, "mean"), (torch.Tensor, "pow")]
)
def test_operators_that_somebody_has_exchanged_are_asked(owner, name, monkeypatch):
    module, own = LlamaRMSNorm(8), getattr(owner, name)
    learn_norms(module)
    x = torch.randn(1, 8)
    monkeypatch.setattr(owner, name, lambda *args, **options: 2 * own(*args, **options))
    with torch.no_grad():
        expected = module(x)
    same_within_a_scope(module, x)
    monkeypatch.undo()
    with torch.no_grad():
        assert not torch.equal(module(x), expected)
    same_within_a_scope(module, x)


@pytest.mark.parametrize(
    ("rows", "weight"),
    [
        (torch.randn(2, 8), torch.ones(7)),
        (torch.randn(2, 8), torch.ones(8).bfloat16()),
        (torch.randn(2, 8), torch.ones(1, 8)),
        (torch.empty(0, 8), torch.ones(8)),
        (torch.empty(2, 8, device="meta"), torch.ones(8, device="meta")),
    ],
)
def test_arguments_that_the_kernel_leaves_alone(rows, weight):
    assert fused_norm(rows, weight, 0.0, False, False, NORM_LANES[0]) is None
