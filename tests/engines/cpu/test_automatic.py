"""What `fallback="auto"` has besides a table: drafts of the target itself, once they may pay."""

import copy
import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_retrieval_assist import SamAssistant, release_memory
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.engines.cpu import few_bits, quantized_self, weight_copies
from hf_retrieval_assist.engines.cpu.few_bits import FewBits, bytes_of
from hf_retrieval_assist.engines.cpu.quantized import IN_FOUR_BITS
from hf_retrieval_assist.engines.cpu.quantized_self import QuantizedSelf
from hf_retrieval_assist.engines.cpu.skinny import PATHS
from hf_retrieval_assist.system import memory
from tests.support.fixed_costs import FixedCosts
from tests.support.lossless import PROMPT, build, run, same
from tests.support.memories import remembering
from tests.support.quick import cases, crossed
from tests.support.tiny_models import VOCAB
from tests.support.watching import results_of

pytestmark = pytest.mark.skipif(not PATHS, reason="no kernels for this CPU")

NEW = 40
SAMPLED = {"do_sample": True, "temperature": 0.9}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Tiny models are packed when they are first asked for, and levels take no time."""
    price = SimpleNamespace(seconds=0.0, observe=lambda seconds: None)
    monkeypatch.setattr(quantized_self, "_Price", lambda: price)
    monkeypatch.setattr(quantized_self, "PATIENCE", 0)
    for part in (few_bits, weight_copies):
        monkeypatch.setattr(part, "LEAST_ELEMENTS", 1000)


@pytest.fixture
def drafted(monkeypatch):
    """Nodes of each draft."""
    return results_of(
        *(monkeypatch, QuantizedSelf, "propose"), lambda drafts, *_: len(drafts.token_ids)
    )


@pytest.fixture
def packed(monkeypatch):
    """The weights with which each call that was due drafts; None: it does not."""
    return results_of(
        *(monkeypatch, QuantizedSelf, "_given"), lambda given, *_: given and given.weights
    )


@pytest.fixture
def asked(monkeypatch):
    """Whether packing was due, each time that somebody asked."""
    return results_of(monkeypatch, QuantizedSelf, "_is_due")


def model_of():
    return build(head_dim=16)


def automatic(preset=SamAssistant, **options):
    """One whose forwards take so long that any draft pays."""
    return preset(**{"costs": FixedCosts(lambda tokens: 1.0)} | options)


@pytest.mark.parametrize(
    ("preset", "options"), cases(crossed([SamAssistant, remembering], [SAMPLED, {}]))
)
def test_output_is_plain(preset, options, drafted):
    model, assistant, inputs = model_of(), automatic(preset), {"input_ids": PROMPT}
    for seed in range(3):
        results = []
        for one in (None, assistant):
            torch.manual_seed(seed)
            given = {"do_sample": False, "max_new_tokens": NEW} | options
            results.append(model.generate(**inputs, **given, assistant=one))
        assert torch.equal(*results)
    assert sum(drafted) > NEW
    assert assistant.stats.last.steps < (NEW - 1) / 1.5


def test_weights_are_packed_after_some_asks(packed, asked, drafted, monkeypatch):
    """Those of several calls of a model count together, whatever the assistants."""
    monkeypatch.setattr(quantized_self, "PATIENCE", 5)
    run(model_of(), assistant=automatic(), max_new_tokens=4)
    packed.clear()
    gc.collect()  # copies of other models
    model, known = model_of(), IN_FOUR_BITS.nbytes()
    for tokens in (4, NEW):
        same(model, assistant=automatic(), max_new_tokens=tokens)
        assert (IN_FOUR_BITS.nbytes() > known) == (tokens == NEW)
    assert asked[-6:] == [False] * 5 + [True]
    assert packed == [FewBits.known_of(model)]
    assert not any(drafted[:5])
    assert any(drafted[5:])
    # Another assistant of the same model waits for nothing.
    packed.clear()
    run(model, assistant=automatic())
    assert packed == [FewBits.known_of(model)]


def test_weights_that_change_between_calls_are_packed_after_more_and_more_asks(asked, monkeypatch):
    """A training loop would pack them for each of its calls."""
    monkeypatch.setattr(quantized_self, "PATIENCE", 5)
    monkeypatch.setattr(quantized_self, "MOST_PATIENCE", 18)
    model, waited = model_of(), []
    for tokens in (4, NEW, NEW, 4, 4, NEW, NEW):
        asked.clear()
        same(model, assistant=automatic(), max_new_tokens=tokens)
        waited.append(asked.index(True) if asked[-1] else None)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.roll(1, 0))
    assert waited == [None, 5, 10, None, None, 18, 18]


def test_calls_share_what_was_packed_until_weights_change(packed):
    model, assistant = model_of(), automatic()
    for _ in range(3):
        same(model, assistant=assistant)
    assert len(packed) == 3
    assert {*packed} == {before := FewBits.known_of(model)}
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.roll(1, 0))
    for _ in range(3):
        same(model, assistant=assistant, max_new_tokens=NEW)
    assert {*packed[3:]} == {FewBits.known_of(model)} != {before}
    # Drafts of other weights are hardly ever right.
    assert assistant.stats.last.accepted > NEW / 2


def test_what_was_packed_is_given_back(packed):
    gc.collect()
    model, assistant, known = model_of(), automatic(), IN_FOUR_BITS.nbytes()
    same(model, assistant=assistant)
    assert IN_FOUR_BITS.nbytes() > known
    release_memory(model)
    packed.clear()
    gc.collect()
    assert FewBits.known_of(model) is None
    assert IN_FOUR_BITS.nbytes() == known
    same(model, assistant=assistant)
    assert packed == [FewBits.known_of(model)]


WITHOUT = {
    "no memory": {"extra_memory": 0},
    "less memory than it takes": {"extra_memory": -1},
    "nobody counts": {"budget": 4},
    "a machine without memory": {},
}


@pytest.mark.parametrize("name", cases(WITHOUT))
def test_nothing_is_packed_where_it_may_not_be(name, drafted, monkeypatch):
    model, options = model_of(), dict(WITHOUT[name])
    if name == "a machine without memory":
        monkeypatch.setattr(memory, "free_memory", lambda: 0)
    if options.get("extra_memory") == -1:
        options["extra_memory"] += sum(bytes_of(model))
    gc.collect()
    known = IN_FOUR_BITS.nbytes()
    same(model, assistant=automatic(**options), calls=2)
    assert IN_FOUR_BITS.nbytes() == known
    assert not any(drafted)
    same(model, assistant=automatic(extra_memory=sum(bytes_of(model))))
    assert IN_FOUR_BITS.nbytes() > known


def test_it_is_idle_where_it_cannot_draft():
    """Also of a call that nobody generates in."""
    ids, model = np.array([1, 2], np.int32), model_of()
    for target in (
        Target(VOCAB),
        Target(VOCAB, model=copy.deepcopy(model).to("meta")),
        Target(VOCAB, model=model),
    ):
        assert quantized_self.automatic().start(ids, target).idle


@pytest.mark.parametrize("name", ["BloomForCausalLM", "Lfm2ForCausalLM"])
def test_models_that_take_no_trees_are_drafted_for_without_it(name, drafted):
    same(build(name), assistant=automatic())
    assert not any(drafted)
