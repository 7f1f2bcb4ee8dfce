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
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_retrieval_assist.host.model_key import key_of, recording_key, structure_of
from tests.support.changes import COMPUTED, exchanged, hooked
from tests.support.int8_weight import rounded
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
TENSORS = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "four bits": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "complex": lambda: torch.zeros(4, dtype=torch.cfloat).conj(),
    "elsewhere": lambda: torch.zeros(4, device="meta"),
    "not there yet": nn.UninitializedParameter,
    "odd": lambda: OddTensor((4,)),
    "empty": lambda: torch.empty(0),
}


def as_parameter(model, x):
    x = x if isinstance(x, nn.Parameter) else nn.Parameter(x, requires_grad=False)
    model.model.norm.register_parameter("beside", x)


PLACES = {
    "attribute": lambda model, x: vars(model.model.layers[0].mlp).update(kept=x),
    "in a container": lambda model, x: setattr(model.model.layers[0].mlp, "kept", [(x,), {"a": x}]),
    "in an object": lambda model, x: setattr(model.model.norm, "kept", SimpleNamespace(x=x)),
}
OBJECT_PLACES = PLACES | {"configuration": lambda model, x: setattr(model.config, "kept", x)}
TENSOR_PLACES = PLACES | {
    "buffer": lambda model, x: model.model.register_buffer("beside", x),
    "parameter": as_parameter,
}
# Nobody could write such a configuration down.
ODD = [one for one in crossed(OBJECTS, OBJECT_PLACES) if one != ("2**60 paths", "configuration")]


@pytest.mark.parametrize(
    ("kind", "place"), cases(ODD, 8) + cases(crossed(TENSORS, TENSOR_PLACES), 5)
)
def test_what_nobody_can_describe(kind, place):
    model = build(num_hidden_layers=1)
    try:
        (OBJECT_PLACES | TENSOR_PLACES)[place](model, (OBJECTS | TENSORS)[kind]())
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        assert kind in TENSORS
        pytest.skip(f"PyTorch has none there: {error}")
    same(model, calls=3, tier="tree")
    end = weakref.ref(model)
    del model
    gc.collect()
    assert end() is None


class Holder:
    pass


def steered(*_):
    return None


# Whether it is the structure that changes; otherwise it is the memory alone.
NUMBERED = {
    "a number": (lambda held, n: held.update(a=n), True),
    "in a list": (lambda held, n: held.setdefault("a", []).append(n), True),
    "in a table of lists": (lambda held, n: held.update(a={"b": [[n]]}), True),
    "a tensor in a list": (lambda held, n: held.update(a=[torch.zeros(3 + n)]), False),
    "a function": (lambda held, n: held.setdefault("kept", []).append(lambda x: x), True),
    "a method of another": (lambda held, n: held.update(a=MethodType(steered, HOLDERS[n])), True),
    "an argument": (lambda held, n: held.update(a=partial(steered, n)), True),
    "an object": (lambda held, n: held.update(a=HOLDERS[n]), True),
    "a kind of list": (lambda held, n: held.update(a=(list, tuple)[n]([1, [2]])), True),
    "an enumeration": (lambda held, n: held.update(a=[*Mode][n]), True),
    "a dtype": (lambda held, n: held.update(a=(torch.float16, torch.float32)[n]), True),
}
HOLDERS = [Holder(), Holder()]


@pytest.mark.parametrize("kind", NUMBERED)
def test_what_changes_is_told(kind):
    change, of_structure = NUMBERED[kind]
    model, keys = build(num_hidden_layers=1), []
    for number in range(2):
        change(vars(model.model.norm), number)
        keys.append(key_of(model))
        assert keys[-1] == key_of(model)
    assert keys[0] != keys[1]
    assert (keys[0].structure != keys[1].structure) == of_structure


MATMUL = torch.backends.cuda.matmul
SCOPES = COMPUTED | {
    "inference mode": lambda model: torch.inference_mode(),
    "other attention": lambda model: exchanged(
        model.config, "_attn_implementation", lambda _: "eager"
    ),
    "a table in the configuration": lambda model: mock.patch.dict(
        model.config.rope_parameters, rope_theta=2.0
    ),
    "half precision": lambda model: exchanged(
        MATMUL, "allow_bf16_reduced_precision_reduction", lambda allowed: not allowed
    ),
    "sums in half precision": lambda model: exchanged(
        MATMUL, "allow_fp16_accumulation", lambda allowed: not allowed
    ),
}


@pytest.mark.parametrize("name", SCOPES)
def test_what_callers_change_is_told_while_it_is_so(name):
    """Under autocast nothing is recorded."""
    model = build()
    before = key_of(model)
    with SCOPES[name](model):
        assert (recording_key(model, {}, torch.device("cpu")) is None) == (name == "autocast")
        assert key_of(model) != before
    assert key_of(model) == before


def test_what_libraries_hook_in_counts_by_what_it_is():
    model = build()
    keys = []
    for factor in (2, 2, 3):
        # What is called is written in torch.
        hook = partial(torch.utils.hooks.unserializable_hook, [factor])
        with hooked(model.lm_head.register_forward_hook, hook):
            keys.append(key_of(model))
    assert keys[0] == keys[1] != keys[2]
    # A verdict holds for all of them: adapters are mixed by hooks of each call.
    assert keys[0].structure == keys[2].structure


def test_keywords_are_part_of_the_state():
    model = build()

    def state(**arguments):
        return recording_key(model, arguments, torch.device("cpu"))

    assert state(names=["a"]) == state(names=["a"])
    assert state(names=["a"]) != state(names=["b"])
    assert state(ids=torch.ones(1)) == state(ids=torch.zeros(1))


def test_quantised_weights_are_where_their_numbers_are():
    """Not where the tensor is that holds others, which has no address of its own."""
    model = build()
    model.lm_head.weight = weight = rounded(model.lm_head.weight)
    before = key_of(model)
    assert key_of(model) == before
    weight.values = weight.values.clone()
    assert key_of(model) != before


def test_what_is_equal_is_told_alike():
    model, settings = build(num_hidden_layers=1), []
    for _ in range(3):
        model.model.norm.held = {"a": [1, (2.0, "b")], "c": np.float64(3), "d": torch.device("cpu")}
        model.model.norm.does = MethodType(steered, model)
        model.model.norm.bound = partial(steered, [1], name="a")
        model.generation_config = GenerationConfig(max_new_tokens=3)
        settings.append(structure_of(model))
    assert settings[0] == settings[1] == settings[2]


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


@pytest.mark.parametrize("kind", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_how_a_checkpoint_was_read_is_no_change(kind, tmp_path):
    """Models whose weights were renamed or joined keep the rules by which they were."""
    build(kind).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model._weight_conversions
    assert key_of(model) == key_of(model)
