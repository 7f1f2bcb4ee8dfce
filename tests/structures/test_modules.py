"""The parts of a model, each once; what is told of them stands in test_model_key.py."""

import torch
from torch import nn

from hf_retrieval_assist.host.model_key import ASIDE
from hf_retrieval_assist.structures.modules import modules_of, names_of
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
