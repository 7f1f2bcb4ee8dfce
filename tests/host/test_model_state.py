"""What is told of a model: by values where they are plain, and by which objects where they are not.

Objects of a caller's may raise whatever they are asked, and containers may hold themselves.
"""

import enum
import gc
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from functools import partial, reduce
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from hf_retrieval_assist.host.model_state import model_settings
from tests.support.lossless import build, knowing, run, same
from tests.support.quick import cases, crossed


def refuse(*arguments, **options):
    raise RuntimeError("odd")


def odd(*methods, base=object):
    """A class of which some methods raise whatever they are asked."""
    return type("Odd", (base,), dict.fromkeys(methods, refuse))


NoRepr = odd("__repr__")


class Slotted:
    __slots__ = ("held",)

    def __init__(self):
        self.held = [1]


class OddTensor(torch.Tensor):
    """One that has no memory and computes nothing."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    __torch_dispatch__ = classmethod(refuse)


Mode = enum.Enum("Mode", ["A", "B"])


def holding_itself():
    own = []
    own += [own, own]
    return own


OBJECTS = {
    **{kind.__name__: kind for kind in (Slotted, threading.Lock, object)},
    "no text": NoRepr,
    "no equality": odd("__eq__", "__hash__"),
    "no attributes": odd("__getattr__"),
    "nothing at all": odd("__getattribute__"),
    "no class": type("NoClass", (), {"__class__": property(refuse)}),
    "no length": odd("__len__", "__iter__", "__bool__"),
    "an odd list": lambda: odd("__iter__", "__len__", "__eq__", "__repr__", base=list)([1, [2]]),
    "an odd dictionary": lambda: odd("items", "keys", "__iter__", "__repr__", base=dict)(a=1),
    "an odd number": lambda: odd("__repr__", "__hash__", "__eq__", "__int__", base=int)(3),
    "an odd text": lambda: odd("__repr__", "__hash__", "__eq__", "__str__", base=str)("a"),
    "3,000 lists deep": lambda: reduce(lambda x, _: [x], range(3000), 0),
    "3,000 dictionaries deep": lambda: reduce(lambda x, _: {"a": x}, range(3000), 0),
    "itself": holding_itself,
    "2**60 paths": lambda: reduce(lambda x, _: [x, x], range(60), 0),
    "an ended proxy": lambda: weakref.proxy(NoRepr()),
    "an enumeration's": lambda: Mode.A,
    "arrays of objects": lambda: np.array([NoRepr()], dtype=object),
    "odd keys": lambda: {object(): NoRepr(), (1, NoRepr): 2},
    "a method": lambda: NoRepr().__repr__,
    "collections": lambda: [OrderedDict(a=[1]), defaultdict(list), deque([NoRepr()]), {1, (2, 3)}],
    "numbers": lambda: [np.float32(2), np.float64(2), 1j, 10**400, b"a", slice(NoRepr()), ...],
}
PLACES = {
    "attribute": lambda model, x: vars(model.model.layers[0].mlp).update(kept=x),
    "in a container": lambda model, x: setattr(model.model.layers[0].mlp, "kept", [(x,), {"a": x}]),
    "in an object": lambda model, x: setattr(model.model.norm, "kept", SimpleNamespace(x=x)),
    "configuration": lambda model, x: setattr(model.config, "kept", x),
}


@pytest.mark.parametrize(("kind", "place"), cases(crossed(OBJECTS, PLACES), 8))
def test_objects_that_nobody_can_describe(kind, place):
    if (kind, place) == ("2**60 paths", "configuration"):
        pytest.skip("nobody could write such a configuration down")
    model = build(num_hidden_layers=1)
    PLACES[place](model, OBJECTS[kind]())
    same(model, calls=3, tier="tree")
    end = weakref.ref(model)
    del model
    gc.collect()
    assert end() is None


TENSORS = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse by rows": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "a library's": lambda: torch.ones(4).to_mkldnn(),
    "four bits": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "eight bits": lambda: torch.zeros(4).to(torch.float8_e4m3fn),
    "complex": lambda: torch.zeros(4, dtype=torch.cfloat).conj(),
    "elsewhere": lambda: torch.zeros(4, device="meta"),
    "not there yet": nn.UninitializedParameter,
    "a buffer that is not": nn.UninitializedBuffer,
    "odd": lambda: OddTensor((4,)),
    "empty": lambda: torch.empty(0),
}


def as_parameter(model, x):
    x = x if isinstance(x, nn.Parameter) else nn.Parameter(x, requires_grad=False)
    model.model.norm.register_parameter("beside", x)


TENSOR_PLACES = {
    "buffer": lambda model, x: model.model.register_buffer("beside", x),
    "parameter": as_parameter,
    **{place: put for place, put in PLACES.items() if place != "configuration"},
}


@pytest.mark.parametrize(("kind", "place"), cases(crossed(TENSORS, TENSOR_PLACES), 5))
def test_tensors_of_kinds_that_cannot_be_read(kind, place):
    model = build(num_hidden_layers=1)
    try:
        TENSOR_PLACES[place](model, TENSORS[kind]())
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        pytest.skip(f"PyTorch has none there: {error}")
    same(model, calls=3, tier="tree")


class Holder:
    pass


def steered(*_):
    return None


CHANGES = {
    "a number": lambda held, n: held.update(a=n),
    "a number's kind": lambda held, n: held.update(a=(1, True)[n]),
    "in a list": lambda held, n: held.setdefault("a", []).append(n),
    "a tensor in a list": lambda held, n: held.update(a=[torch.zeros(3)]),
    "written to in a list": lambda held, n: held.setdefault("a", [torch.zeros(3)])[0].add_(1),
    "a limit": lambda held, n: held.setdefault("a", torch.tensor(4)).add_(1),
    "a function": lambda held, n: held.update(a=lambda x: x),
    "a method of another": lambda held, n: held.update(a=MethodType(steered, Holder())),
    "an argument": lambda held, n: held.update(a=partial(steered, n)),
    "an object": lambda held, n: held.update(a=Holder()),
    "what an object of no identity holds": lambda held, n: held.update(a=SimpleNamespace(n=n)),
    "a kind of list": lambda held, n: held.update(a=(list, tuple)[n]([1, [2]])),
    "an enumeration": lambda held, n: held.update(a=[*Mode][n]),
    "a dtype": lambda held, n: held.update(a=(torch.float16, torch.float32)[n]),
    "the forward": lambda held, n: held.update(forward=partial(nn.Linear.forward, n)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_changes_is_told(kind):
    model, settings = build(num_hidden_layers=1), []
    for number in range(2):
        CHANGES[kind](vars(model.model.norm), number)
        gc.collect()  # another object gets the address of the last one
        settings.append([model_settings(model), model_settings(model)])
    assert settings[0][0] == settings[0][1]
    assert settings[0][0] != settings[1][0]


def test_what_is_equal_is_told_alike():
    model, settings = build(num_hidden_layers=1), set()
    for _ in range(3):
        model.model.norm.held = {"a": [1, (2.0, "b")], "c": np.float64(3), "d": torch.device("cpu")}
        model.model.norm.does = MethodType(steered, model)
        model.model.norm.bound = partial(steered, [1], name="a")
        model.generation_config = GenerationConfig(max_new_tokens=3)
        settings.add(model_settings(model))
        gc.collect()
    assert len(settings) == 1


def settings_of(text):
    """Changes of a decoder's configuration."""
    return {
        "a setting": lambda n: setattr(text, "sliding_window", n),
        "a list in place": lambda n: text.layer_types.__setitem__(0, str(n)),
        "a table in place": lambda n: text.rope_parameters.update(rope_theta=float(n)),
        "another attribute": lambda n: setattr(text, f"new_{n}", None),
    }


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "LlavaForConditionalGeneration"])
@pytest.mark.parametrize("change", settings_of(None))
def test_configurations_are_told_by_value(kind, change):
    model = build(kind)
    text = model.config.get_text_config(decoder=True)
    text.layer_types = ["full_attention"] * 3
    found = []
    for number in (2, 3):
        settings_of(text)[change](number)
        found.append(model_settings(model))
    assert found[0] != found[1]


def grown_by_hook(model):
    model.model.norm.seen = seen = []
    model.model.norm.register_forward_hook(lambda module, args, out: seen.append(out))


def noted_by_hook(model):
    def note(module, args, out):
        module.last = out
        module.table[len(module.table)] = out.shape

    model.model.norm.last, model.model.norm.table = None, {}
    model.model.norm.register_forward_hook(note)


def replaced_by_hook(model):
    def note(module, args, out):
        module.held = [*module.held, out]

    model.model.norm.held = []
    model.model.norm.register_forward_hook(note)


@pytest.mark.parametrize("grow", cases([noted_by_hook, grown_by_hook, replaced_by_hook]))
def test_what_hooks_note_on_a_module_is_no_other_model(grow, tests):
    model = build()
    grow(model)
    same(model, calls=12, tier="tree")
    assert len(tests) < 5


def test_parameters_can_be_exchanged_after_assisted_calls():
    """`module.to` exchanges quantised ones; PyTorch refuses it where anything refers to them
    weakly."""
    model = build()
    assistant = knowing(run(model), budget=6)
    for _ in range(6):  # forwards are repeated then
        run(model, assistant=assistant)
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 1.5))
    assert torch.equal(run(model, assistant=assistant), run(model))
    assert assistant.stats.last.tier == "tree"


@pytest.mark.parametrize("place", [slice(3), slice(3, 6)])
def test_tensors_of_one_memory_are_told_apart(place):
    model, steering = build(), torch.arange(8.0)
    model.model.layers[0].held = [steering[:3]]
    before = model_settings(model)
    model.model.layers[0].held[0] = steering[place]
    assert (model_settings(model) == before) == (place == slice(3))
