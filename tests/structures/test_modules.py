"""The parts of a model, each once, and what was told of values, compared with what `marshal` writes
of copies of them."""

import marshal
import math
import random

import pytest
import torch
from torch import nn

from hf_retrieval_assist.host.told import NAMES_OF_ALL, Teller, Told, told
from hf_retrieval_assist.structures.modules import (
    INTERNAL,
    held_by,
    hooked,
    modules_of,
    own_attributes,
)
from tests.support.lossless import build

PLAIN = [0, 1, True, False, None, 0.0, -0.0, 1.0, math.nan, math.inf, "", "1", b"1", 1j, 2**70]


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
    expected = {name: x for name, x in vars(layer).items() if name not in NAMES_OF_ALL}
    assert own_attributes(layer, NAMES_OF_ALL) == expected
    assert {"training", "strength", "in_features"} <= expected.keys()
    assert "training" not in INTERNAL


def test_what_modules_keep():
    model = build()
    model.listed, model.named = [torch.ones(1), 3], {"one": torch.ones(2)}
    model.again, model.own = model.listed[0], torch.ones(3)
    modules = modules_of(model)
    values = [value for module in modules for value in vars(module).values()]
    tables, lists, tensors = held_by(modules)
    assert [*map(id, tables)] == [id(x) for x in values if isinstance(x, dict)]
    assert [*map(id, lists)] == [id(x) for x in values if type(x) is list]
    inside = [*model.listed, *model.named.values(), model.own, *model.buffers()]
    expected = {id(x) for x in [*inside, *model.parameters()] if isinstance(x, torch.Tensor)}
    assert len(tensors) == len(expected)
    assert {*map(id, tensors)} == expected


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooked_modules(register):
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    assert not hooked(modules_of(model))
    getattr(model[1], register)(lambda *_: None)
    assert hooked(modules_of(model)) == [model[1]]


def some(source, depth=3):
    """A value of plain ones, which is another object each time."""
    kind = source.choice([tuple, list, dict, None, None]) if depth else None
    if kind is None:
        return source.choice(PLAIN)
    parts = [some(source, depth - 1) for _ in range(source.randrange(3))]
    return dict(enumerate(parts)) if kind is dict else kind(parts)


@pytest.mark.parametrize("seed", range(8))
def test_values_are_told_as_they_are_written_down(seed):
    source = random.Random(seed)
    values = [some(source, depth=2) for _ in range(120)]
    written = [marshal.dumps(value, 2) for value in values]
    for one, text in zip(values, written, strict=True):
        for other, its in zip(values, written, strict=True):
            same = told(one) == told(marshal.loads(its))
            assert same == (text == its), (one, other)
            assert not same or hash(told(one)) == hash(told(other))


def test_more_objects_than_there_was_room_for():
    """And references to the first of them."""

    def listed(last):
        objects = [[i] for i in range(5000)]
        return objects + [objects[i] for i in (0, 4000, last)]

    assert told(listed(7)) == told(listed(7)) != told(listed(8))


def test_what_stands_for_values_counts_by_its_place():
    def made(*values):
        teller = Teller()
        return Told(teller, *([teller.tell(x) for x in value] for value in values))

    assert made([1, 2], [3]) == made([1, 2], [3])
    assert made([1, 2], [3]) != made([1], [2, 3])
