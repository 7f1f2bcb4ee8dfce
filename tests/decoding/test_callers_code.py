"""Code of the caller's in a model's forward, in its loop and in what chooses tokens: decoded
plainly, where its owner does not vouch for it or cannot."""

import sys
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import product
from types import MethodType, ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    EosTokenCriteria,
    GenerationMixin,
    LlamaForCausalLM,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host.plain_step import LOOP_METHODS
from hf_retrieval_assist.host.transformers_private import CACHE, loop
from hf_retrieval_assist.host.written import LIBRARIES, name_of, strangers_part, written_in
from tests.support.callers import START, TEXT, agree
from tests.support.changes import COMPUTED, exchanged, first, hooked
from tests.support.lossless import INPUTS, build, knowing, run, same
from tests.support.quick import cases, crossed
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
    "a forward that takes anything": lambda m: exchanged(m, "forward", passing),
    "a method of an object's": lambda m: norm(m, "forward", lambda own: MethodType(passed, own)),
    "a function for masks": lambda m: exchanged(modeling_llama, "create_causal_mask", passing),
    "PyTorch's function": lambda m: exchanged(torch, "rsqrt", passing),
    "an attention": lambda m: registered(m, passing(sdpa_attention_forward), sdpa_mask),
    "a mask": lambda m: registered(m, sdpa_attention_forward, passing(sdpa_mask)),
    "a hook of all modules": lambda _: hooked(register_module_forward_hook, lambda *_: None),
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
    "a hook": lambda m: hooked(m.model.norm.register_forward_hook, passed_on),
}


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


def second_best(self, input_ids, logits_processor, stopping_criteria, generation_config, **_):
    while input_ids.shape[1] < generation_config.max_length:
        best = self(input_ids).logits[:, -1].topk(2).indices[:, 1:]
        input_ids = torch.cat([input_ids, best], 1)
    return input_ids


def seeded(draw):
    """Draws that use another generator than the call's."""
    own = torch.Generator()
    return lambda probs, num_samples: draw(probs, num_samples, generator=own.manual_seed(3))


def halved(update):
    def halves(self, *arguments, **options):
        keys, values = update(self, *arguments, **options)
        return keys, values * 0.5

    return halves


def with_method(model, name):
    """The model as of a caller's class, which has a method of its own that does the same."""
    before = getattr(type(model), name)
    own = wraps(before)(lambda self, *arguments, **options: before(self, *arguments, **options))
    made = type("Own", (LlamaForCausalLM,), {name: own})
    return exchanged(model, "__class__", lambda _: made)


# What is exchanged, and why no owner's word helps.
EXCHANGED = {
    "multinomial": (lambda _: exchanged(torch, "multinomial", seeded), "which chooses tokens, is"),
    "all models' loop": (
        lambda _: exchanged(GenerationMixin, loop().__name__, lambda _: second_best),
        "another loop",
    ),
    "a cache's method": (
        lambda _: exchanged(DynamicCache, "update", halved),
        "update of transformers' caches",
    ),
    "argmax": (
        lambda _: exchanged(
            torch, "argmax", lambda _: lambda scores, dim: scores.topk(2, dim=dim).indices[..., 1]
        ),
        "argmax, which chooses tokens, is",
    ),
    "softmax": (
        lambda _: exchanged(F, "softmax", lambda own: lambda scores, dim: own(scores * 3, dim=dim)),
        "softmax, which chooses tokens, is",
    ),
    "a class's loop": (
        lambda _: exchanged(LlamaForCausalLM, loop().__name__, lambda _: second_best),
        "another loop",
    ),
    "a layer's method": (
        lambda _: exchanged(DynamicLayer, "update", halved),
        "update of transformers' caches",
    ),
}


@pytest.mark.parametrize("kind", cases(EXCHANGED, 3))
def test_what_is_exchanged_for_all_is_asked(kind):
    model, (exchange, why) = build(), EXCHANGED[kind]
    agree(model, dict, do_sample=True, top_k=0)  # draws are known from here on
    with exchange(model):
        for sampled in (False, True):
            last = agree(model, dict, do_sample=sampled, top_k=0)
            assert last.tier == "plain"
            assert why in last.reason
        plain = model.generate(**INPUTS["one row"], **TEXT)
        with SamAssistant().attached(model):
            assert torch.equal(plain, model.generate(**INPUTS["one row"], **TEXT))
    assert agree(model, dict, do_sample=True, top_k=0).tier == "tree"


@pytest.mark.parametrize("name", cases(LOOP_METHODS, ["prepare_inputs_for_generation"]))
def test_methods_that_the_loop_asks(name):
    """Nobody knows what those of a caller's class say next, unless its owner does."""
    model = build()
    with with_method(model, name):
        last = agree(model, dict, assistant=SamAssistant(budget=8))
        assert last.tier == "plain"
        assert f"nobody knows what its {name}" in last.reason
        assert agree(model, dict).tier == "tree"


CALLED = {
    TemperatureLogitsWarper: lambda self, ids, scores: (
        scores / (0.05 + (ids.shape[1] + len(ids)) % 3)
    ),
    StoppingCriteriaList: lambda self, ids, scores, **_: torch.full(
        (len(ids),), ids.shape[1] >= START + 11
    ),
    MaxLengthCriteria: lambda self, ids, scores, **_: torch.full(
        (len(ids),), ids.shape[1] >= START + 9
    ),
    EosTokenCriteria: lambda self, ids, scores, **_: ids[:, -1] % 7 == 3,
}


@pytest.mark.parametrize(("kind", "inputs"), cases(crossed(CALLED, INPUTS)))
def test_calls_of_transformers_classes_that_are_exchanged(llama, kind, inputs, monkeypatch):
    own = {"eos_token_id": 66} if kind is EosTokenCriteria else {}
    options = {"do_sample": True, "temperature": 0.7, "top_k": 5, "inputs": inputs} | own
    agree(llama, dict, **options)
    monkeypatch.setattr(kind, "__call__", CALLED[kind])
    agree(llama, dict, **options)
    agree(llama, dict, **options | {"do_sample": False})
    monkeypatch.undo()
    agree(llama, dict, **options)


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


def test_a_method_of_a_callers_cache_is_called(llama):
    def given():
        cache = DynamicCache(config=llama.config)
        cache.update = halved(DynamicCache.update).__get__(cache)
        return {CACHE: cache}

    plain, assistant = run(llama, **given()), SamAssistant(budget=8, trust_forward=True)
    assert torch.equal(run(llama, **given(), assistant=assistant), plain)
    assert assistant.stats.last.tier == "plain"
    assert f"of {CACHE}" in assistant.stats.last.reason


WRITTEN = {
    "a builtin": (torch.cat, None),
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


def exec_in(module):
    space = {"__name__": module}
    exec("def function(x): return x", space)
    return space["function"]


def test_a_library_is_told_by_its_package(monkeypatch, tmp_path):
    """Not by the beginning of its name, nor by that of a file of the caller's."""
    assert strangers_part(exec_in("numpyro.ops")) is not None
    assert strangers_part(exec_in("transformers_modules.org.model")) is not None
    assert strangers_part(exec_in("transformers.models.llama")) is None
    for name, is_package in product(("kernels", "token"), (False, True)):
        module = ModuleType(name)
        module.__file__ = str(tmp_path / (f"{name}/__init__.py" if is_package else f"{name}.py"))
        if is_package:
            module.__path__ = [str(tmp_path / name)]
        monkeypatch.setitem(sys.modules, name, module)
        known = is_package and name in LIBRARIES
        assert (strangers_part(exec_in(name)) is None) == known
