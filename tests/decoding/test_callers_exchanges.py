"""Classes, loops and functions that a caller exchanges for the whole process."""

from functools import wraps

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationMixin,
    LlamaForCausalLM,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host.plain_step import LOOP_METHODS
from hf_retrieval_assist.host.transformers_private import loop
from tests.support.callers import START, TEXT, agree, both
from tests.support.lossless import INPUTS, build
from tests.support.quick import cases, crossed

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


def chooses_otherwise(name):
    """A function that stands for one of PyTorch's that choose a token."""
    if name == "argmax":
        return torch, lambda scores, dim: scores.topk(2, dim=dim).indices[..., 1]
    if name == "softmax":
        softmax = F.softmax
        return F, lambda scores, dim: softmax(scores * 3, dim=dim)
    draw, own = torch.multinomial, torch.Generator()
    return torch, lambda probs, num_samples: draw(probs, num_samples, generator=own.manual_seed(3))


CHOOSING = ["argmax", "multinomial", "softmax"]


@pytest.mark.parametrize("name", cases(CHOOSING, ["multinomial"]))
def test_functions_that_choose_are_asked(llama, name, monkeypatch):
    agree(llama, dict, do_sample=True, top_k=0)  # draws are known from here on
    monkeypatch.setattr(*chooses_otherwise(name)[:1], name, chooses_otherwise(name)[1])
    for sampled in (False, True):
        last = agree(llama, dict, do_sample=sampled, top_k=0)
        assert last.tier == "plain"
        assert f"{name}, which chooses tokens, is" in last.reason
    monkeypatch.undo()
    assert agree(llama, dict, do_sample=True, top_k=0).tier == "tree"


def second_best(self, input_ids, logits_processor, stopping_criteria, generation_config, **_):
    while input_ids.shape[1] < generation_config.max_length:
        best = self(input_ids).logits[:, -1].topk(2).indices[:, 1:]
        input_ids = torch.cat([input_ids, best], 1)
    return input_ids


@pytest.mark.parametrize("whose", cases(["all models'", "an instance's", "a class's"]))
def test_a_loop_that_is_exchanged_decodes(whose, monkeypatch):
    model = build()
    before = agree(model, dict)
    owner = {"all models'": GenerationMixin, "a class's": LlamaForCausalLM}.get(whose, model)
    monkeypatch.setattr(owner, loop().__name__, second_best, raising=False)
    plain, assisted, assistant = both(model, dict)
    assert torch.equal(plain, assisted)
    if whose == "an instance's":  # which plain decoding does not ask
        assert assistant.stats.last.tier == before.tier
    else:
        assert "another loop" in assistant.stats.last.reason
    with SamAssistant().attached(model):
        assert torch.equal(plain, model.generate(**INPUTS["one row"], **TEXT))


@pytest.mark.parametrize("name", cases(LOOP_METHODS, ["prepare_inputs_for_generation"]))
def test_methods_that_the_loop_asks(name):
    """Nobody knows what those of a caller's class say next, unless its owner does."""
    model = build()
    before = getattr(type(model), name)
    own = wraps(before)(lambda self, *arguments, **options: before(self, *arguments, **options))
    model.__class__ = type("Own", (LlamaForCausalLM,), {name: own})
    last = agree(model, dict, assistant=SamAssistant(budget=8))
    assert last.tier == "plain"
    assert f"nobody knows what its {name}" in last.reason
    assert agree(model, dict).tier == "tree"


@pytest.mark.parametrize("kind", [DynamicLayer, DynamicCache])
def test_methods_of_caches_that_are_exchanged_make_calls_plain(llama, kind, monkeypatch):
    update = kind.update

    def halves(self, *arguments, **options):
        keys, values = update(self, *arguments, **options)
        return keys, values * 0.5

    monkeypatch.setattr(kind, "update", halves)
    last = agree(llama, dict)
    assert last.tier == "plain"
    assert "update of transformers' caches" in last.reason
    monkeypatch.undo()
    assert agree(llama, dict).tier == "tree"
