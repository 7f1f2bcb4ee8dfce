"""Code of the caller's in a model's forward: decoded plainly, unless its owner vouches for it."""

import sys
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import MethodType, ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.host.written import LIBRARIES, name_of, strangers_part, written_in
from tests.support.callers import agree
from tests.support.changes import COMPUTED, exchanged, first
from tests.support.lossless import build, knowing, run, same
from tests.support.quick import cases
from tests.support.wrapped_models import offloaded, with_lora


def passing(function):
    """A caller's function that does what another does."""
    return lambda *arguments, **options: function(*arguments, **options)


class Same(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states)


class Weight(nn.Parameter):
    pass


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextmanager
def hooked_everywhere(_):
    handle = register_module_forward_hook(lambda module, args, out: None)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def registered(model, attention, mask):
    AttentionInterface.register("sinks", attention)
    AttentionMaskInterface.register("sinks", mask)
    model.set_attn_implementation("sinks")
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def in_accelerate(model):
    hooks = pytest.importorskip("accelerate.hooks")
    own = type("Own", (hooks.ModelHook,), {"post_forward": lambda self, module, output: output})
    hooks.add_hook_to_module(first(model).mlp, own())
    return ExitStack()


def norm(model, name, change):
    return exchanged(model.model.norm, name, change)


SAME = {
    "an own class": lambda m: norm(m, "__class__", lambda _: Same),
    "a part": lambda m: exchanged(m.model, "norm", lambda part: nn.Sequential(part, Identity())),
    "a forward by another's name": lambda m: norm(
        m, "forward", lambda own: wraps(own)(passing(own))
    ),
    "a method of an object's": lambda m: norm(m, "forward", lambda own: MethodType(passed, own)),
    "a function for masks": lambda m: exchanged(modeling_llama, "create_causal_mask", passing),
    "PyTorch's function": lambda m: exchanged(torch, "rsqrt", passing),
    "an attention": lambda m: registered(m, passing(sdpa_attention_forward), sdpa_mask),
    "a mask": lambda m: registered(m, sdpa_attention_forward, passing(sdpa_mask)),
    "a hook of all modules": hooked_everywhere,
}


class Identity(nn.Module):
    def forward(self, x):
        return x


def passed(own, *arguments, **options):
    return own(*arguments, **options)


OTHERS = {
    "a mode": lambda _: Mode(),
    "a tensor's class": lambda m: norm(m, "weight", lambda x: Weight(x.data)),
    "an activation": lambda m: exchanged(first(m).mlp, "act_fn", lambda _: Identity()),
    "accelerate's hook": in_accelerate,
    "a hook": lambda m: hooked_beside(m),
}


@contextmanager
def hooked_beside(model):
    handle = model.model.norm.register_forward_hook(passed_on)
    try:
        yield
    finally:
        handle.remove()


def passed_on(module, arguments, out):
    return out


FOREIGN = SAME | OTHERS | {name: COMPUTED[name] for name in COMPUTED if name != "autocast"}


@pytest.mark.parametrize("kind", cases(FOREIGN, ["a hook", "a part", "an attention"]))
def test_code_of_the_callers_is_decoded_plainly(kind, told):
    model, assistant = build(), SamAssistant(budget=8)
    with FOREIGN[kind](model):
        last = agree(model, dict, assistant=assistant)
        assert last.tier == "plain"
        assert "trust_forward=True" in last.reason
        assert __name__ in last.reason or "tests.support" in last.reason
    assert sum("trust_forward=True" in text for text in told.messages) == 1
    if kind != "accelerate's hook":
        assert agree(model, dict, assistant=assistant).tier == "tree"


@pytest.mark.parametrize("kind", cases(SAME, ["an own class", "PyTorch's function"]))
def test_code_of_the_callers_is_drafted_for_on_its_owners_word(kind):
    model = build()
    with SAME[kind](model):
        last = agree(model, dict, assistant=knowing(run(model), budget=8))
        assert last.tier in ("tree", "chain")
        assert last.accepted > 0


@pytest.mark.parametrize("wrap", [with_lora, offloaded])
def test_code_of_known_libraries_is_drafted_for(wrap):
    model = wrap(build())
    _, _, assistant = same(model, assistant=SamAssistant(budget=8), tier="tree")
    assert assistant.stats.last.drafted > 0


def test_classes_of_callers_that_override_nothing_of_a_forward_are_drafted_for():
    model = build()
    own = {"training_step": lambda self, batch: self(**batch).loss, "kept": 3}
    model.__class__ = type("Mine", (type(model),), own)
    model.callback = len
    same(model, assistant=SamAssistant(budget=8), tier="tree")


def rounded(x):
    return (x * 8).round() / 8


def of_cache(update):
    return lambda keys, values, *more, **o: update(rounded(keys), rounded(values), *more, **o)


def of_instance(model):
    cache = DynamicCache(config=model.config)
    cache.update = of_cache(cache.update)
    return cache


def of_class(model):
    own = {"update": lambda self, *more, **options: DynamicLayer.update(self, *more, **options)}
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.__class__ = type("Own", (DynamicLayer,), own)
    return cache


@pytest.mark.parametrize("make", [of_instance, of_class])
def test_methods_of_callers_caches_are_called(make, llama):
    plain, assistant = (
        run(llama, **{CACHE: make(llama)}),
        SamAssistant(budget=8, trust_forward=True),
    )
    assert torch.equal(run(llama, **{CACHE: make(llama)}, assistant=assistant), plain)
    assert assistant.stats.last.tier == "plain"
    assert f"of {CACHE}" in assistant.stats.last.reason


WRITTEN = {
    "a library's": (F.silu, None),
    "a builtin": (torch.cat, None),
    "a method": (nn.Linear(1, 1).forward, None),
    "a library's partial": (partial(F.silu, inplace=False), None),
    "one's own": (passed_on, passed_on),
    "in a library's wrapper": (torch.no_grad()(passed_on), passed_on),
    "as an argument": (partial(F.silu, passed_on), passed_on),
    "in a property": (property(passed_on), passed_on),
    "an object": (one := Identity(), one),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_who_wrote_a_callable(kind):
    function, own = WRITTEN[kind]
    assert strangers_part(function) is own
    if own is not None:
        assert written_in(own) == __name__ in name_of(own)


def test_a_library_by_another_name_is_none():
    assert strangers_part(exec_in("numpyro.ops")) is not None
    assert strangers_part(exec_in("transformers_modules.org.model")) is not None
    assert strangers_part(exec_in("transformers.models.llama")) is None


@pytest.mark.parametrize("name", ["kernels", "code", "awq", "token"])
@pytest.mark.parametrize("is_package", [False, True])
def test_a_callers_file_may_have_a_librarys_name(name, is_package, monkeypatch, tmp_path):
    """A package of a library's name is taken for the library."""
    module = ModuleType(name)
    module.__file__ = str(tmp_path / (f"{name}/__init__.py" if is_package else f"{name}.py"))
    if is_package:
        module.__path__ = [str(tmp_path / name)]
    monkeypatch.setitem(sys.modules, name, module)
    known = is_package and name in LIBRARIES
    assert (strangers_part(exec_in(name)) is None) == known


def exec_in(module):
    space = {"__name__": module}
    exec("def function(x): return x", space)
    return space["function"]
