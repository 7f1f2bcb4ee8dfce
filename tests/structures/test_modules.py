"""The parts of a model, each once, and what they hold."""

import pytest
import torch
from torch import nn

from hf_retrieval_assist.host.model_key import ASIDE
from hf_retrieval_assist.structures.modules import (
    INTERNAL,
    hooked,
    modules_of,
    names_of,
    own_attributes,
    told,
)
from tests.support.lossless import build


def test_modules_are_a_model_s_own_each_once():
    model = build()
    model.again = model.model.layers[1]
    model.model.layers[0].nothing = None
    model.model.layers[0].register_module("missing", None)
    found = modules_of(model)
    assert len(found) == len({*map(id, found)})
    assert {*map(id, found)} == {*map(id, model.modules())}
    assert found[0] is model


def test_modules_in_another_kind_of_table():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    assert {*map(id, modules_of(scripted))} == {*map(id, scripted.modules())}


def test_attributes_that_not_every_module_has():
    layer = nn.Linear(2, 3)
    del vars(layer)["_state_dict_hooks"]  # what follows stands elsewhere
    vars(layer)["_state_dict_hooks"] = {}
    layer.strength = 3
    expected = {name: x for name, x in vars(layer).items() if name not in INTERNAL}
    assert own_attributes(layer, INTERNAL) == expected
    assert {"training", "strength", "in_features"} <= expected.keys()
    assert "training" not in INTERNAL


def test_modules_with_hooks():
    layers = [nn.Linear(2, 3) for _ in range(3)]
    layers[0].register_forward_hook(lambda *_: None)
    layers[2].register_forward_pre_hook(lambda *_: None)
    assert hooked(layers) == [layers[0], layers[2]]


@pytest.mark.parametrize("value", [{"a": [1, (2.0, "b")]}, {3, 4}, [[]], 1j, torch.device("cpu")])
def test_values_are_told_by_what_they_are(value):
    assert told(value) == told(type(value)(value)) != told([value])


def test_a_function_that_stands_for_another_counts_as_that():
    def own(x):
        return x

    def other(x):
        return own(x)

    space = {"function": own, "number": 3, "table": {"own": own}}
    before = names_of([], ASIDE, [space])
    space["number"] = 4
    space["function"] = space["table"]["own"] = other
    assert names_of([], ASIDE, [space]) != before
    other.stands_for = own
    assert names_of([], ASIDE, [space]) == before
