"""What `fallback="auto"` has besides a table: drafts of the target itself, once they may pay."""

import copy
import gc

import numpy as np
import pytest
import torch

from hf_retrieval_assist import SamAssistant, release_memory
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.engines.cpu import quantized_self
from hf_retrieval_assist.engines.cpu.few_bits import FewBits, bytes_of
from hf_retrieval_assist.engines.cpu.quantized import IN_FOUR_BITS
from hf_retrieval_assist.engines.cpu.quantized_self import QuantizedSelf
from hf_retrieval_assist.engines.cpu.skinny import PATHS
from hf_retrieval_assist.system import memory
from tests.support.few_bits import pack_small
from tests.support.fixed_costs import FixedCosts
from tests.support.lossless import build, run, same
from tests.support.memories import remembering
from tests.support.quick import cases, crossed
from tests.support.tiny_models import VOCAB
from tests.support.watching import results_of

pytestmark = pytest.mark.skipif(not PATHS, reason="no kernels for this CPU")

NEW = 40
SAMPLED = {"do_sample": True, "temperature": 0.9}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Models are packed when they are first asked for."""
    pack_small(monkeypatch)
    monkeypatch.setattr(quantized_self, "PATIENCE", 0)


@pytest.fixture
def drafted(monkeypatch):
    """Nodes of each draft."""
    return results_of(monkeypatch, QuantizedSelf, "propose", lambda found, *_: len(found.token_ids))


@pytest.fixture
def packed(monkeypatch):
    """The weights with which each call that was due drafts; None: it does not."""
    return results_of(
        monkeypatch, QuantizedSelf, "_given", lambda found, *_: found and found.weights
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
    model, assistant = model_of(), automatic(preset)
    for seed in range(3):
        same(model, assistant=assistant, seed=seed, max_new_tokens=NEW, **options)
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
    packed.clear()
    release_memory(model)
    gc.collect()
    assert FewBits.known_of(model) is None
    assert IN_FOUR_BITS.nbytes() == known


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
