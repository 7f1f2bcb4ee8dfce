"""Texts of a batch are drafted for together: the same drafts, one forward a level."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
import transformers

from hf_retrieval_assist import EarlyExit
from hf_retrieval_assist.draft_models.dflash import DFlashDrafter
from hf_retrieval_assist.draft_models.draft_model import DraftModelSession
from hf_retrieval_assist.draft_models.rows import offsets_of, parts
from hf_retrieval_assist.draft_models.sequoia import ShapeChooser
from hf_retrieval_assist.drafters.base import Drafter, Target
from hf_retrieval_assist.presets import fallback_drafters
from tests.support.feature_following import assert_same, features_of, seen
from tests.support.heads import block_drafter, head_drafter
from tests.support.lossless import build
from tests.support.tiny_models import VOCAB, randomise

NAMES = ["DFlash", "EAGLE", "MTP", "draft model", "windows", "early exit"]
# Known of each text when it starts.
LENGTHS = [3, 9, 1, 17, 9, 30, 5, 12]
BUDGET = 12


@pytest.fixture(autouse=True)
def _one_shape(monkeypatch):
    """Trees of draft models are not solved for again while drafts are compared."""
    monkeypatch.setattr(ShapeChooser, "_has_changed", lambda self: False)


def text_of(row):
    return torch.randint(1, VOCAB, (60,), generator=torch.Generator().manual_seed(row)).tolist()


class Batch:
    """A drafter, and texts that are told to it together or one by one."""

    def __init__(self, name):
        self.target = build(transformers.LlamaForCausalLM)
        self.drafter: Drafter
        if name == "early exit":
            self.drafter = EarlyExit(2)
        elif name in ("EAGLE", "MTP"):
            self.drafter = head_drafter(name, self.target)
        else:
            (self.drafter,) = fallback_drafters(self._fallback(name))
        layers = self.drafter.needs.hidden_layers
        self.features = {
            row: features_of(self.target, layers, text_of(row)) if layers else None
            for row in range(len(LENGTHS))
        }
        self.known = list(LENGTHS)
        self.sessions = [self.start(row, length) for row, length in enumerate(LENGTHS)]

    def _fallback(self, name):
        if name == "DFlash":
            return block_drafter(window=6)
        kind = "Gemma3ForCausalLM" if name == "windows" else "LlamaForCausalLM"
        model = build(getattr(transformers, kind))
        randomise(model, 0.3)
        return model

    def start(self, row, length):
        target = Target(VOCAB, model=self.target)
        session = self.drafter.start(np.array(text_of(row)[:length], np.int32), target)
        self.commit(session, row, 0, length)
        return session

    def commit(self, session, row, first, last):
        """The token at `last` is new, and hidden states of those from `first` on are known."""
        features = self.features[row]
        text = text_of(row)
        new = text[last : last + 1] if first == 0 else text[first + 1 : last + 1]
        session.commit(new, None if features is None else seen(features[first:last]))

    def grow(self, row, count):
        self.commit(self.sessions[row], row, self.known[row], self.known[row] + count)
        self.known[row] += count

    def alone(self, row):
        """What a session that knows this text alone drafts."""
        return self.start(row, self.known[row]).propose(BUDGET)

    def check(self, rows, trees):
        for row, tree in zip(rows, trees, strict=True):
            tree.check_invariants()
            assert_same(tree, self.alone(row))

    def propose(self, rows):
        sessions = [self.sessions[row] for row in rows]
        return self.drafter.propose_rows(sessions, [BUDGET] * len(rows))

    @contextmanager
    def counted(self):
        """An entry for each forward."""
        forwards = []

        def count(*given):
            forwards.append(1)

        session = self.sessions[0]
        if isinstance(session, DraftModelSession):
            module = session.drafter.model
        elif isinstance(self.drafter, DFlashDrafter):
            module = self.drafter.model
        else:
            module = session.follower.module
        hook = module.register_forward_hook(count)
        yield forwards
        hook.remove()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_takes_the_forwards_of_one_text(name):
    batch = Batch(name)
    rows = list(range(len(LENGTHS)))
    batch.check(rows, batch.propose(rows))
    for row in rows:
        batch.grow(row, 1 + row % 3)
    with batch.counted() as forwards:
        trees = batch.propose(rows)
    depth = max(int(tree.depths.max()) for tree in trees)
    batch.check(rows, trees)
    if name == "DFlash":
        assert len(forwards) == 1
    elif name in ("draft model", "windows", "early exit"):
        assert len(forwards) == depth > 1
    else:
        # The head reads what is new in the texts, then the nodes level by level.
        assert 1 < len(forwards) <= 6
        assert len(forwards) >= depth


@pytest.mark.parametrize("name", NAMES)
def test_texts_come_and_go(name):
    batch = Batch(name)
    rows = list(range(len(LENGTHS)))
    batch.propose(rows[:5])
    for row in rows[:5]:
        batch.grow(row, 2)
    # Some wait, which costs them nothing.
    batch.check([1, 3], batch.propose([1, 3]))
    batch.grow(1, 4)
    batch.sessions[0].close()
    batch.check([4, 1, 2], batch.propose([4, 1, 2]))
    # Others join, and those that waited come back.
    batch.check([3, 6, 1, 7], batch.propose([3, 6, 1, 7]))
    for row in (1, 6):
        batch.grow(row, 3)
    batch.check([6, 1], batch.propose([6, 1]))
    batch.check([5], batch.propose([5]))


@pytest.mark.parametrize("name", NAMES)
def test_each_text_has_a_budget_of_its_own(name):
    batch = Batch(name)
    budgets = [0, 1, 12, 5, 2, 0, 7, 3]
    trees = batch.drafter.propose_rows(batch.sessions, budgets)
    for tree, budget in zip(trees, budgets, strict=True):
        assert len(tree) <= budget
        assert len(tree) or not budget
        tree.check_invariants()


@pytest.mark.parametrize("name", ["draft model", "windows"])
def test_what_a_text_went_on_with_is_not_fed_again(name):
    """Rows that accepted different nodes, beside rows that accepted none."""
    batch = Batch(name)
    rows = [0, 1, 3]
    trees = batch.propose(rows)
    texts = {row: text_of(row)[: batch.known[row] + 1] for row in rows}
    for row, tree, length in zip(rows, trees, (3, 0, 1), strict=True):
        path = tree.path(int(tree.depths.argmax()))[:length]
        new = [*tree.token_ids[path].tolist(), 5]
        batch.sessions[row].commit(new, None)
        texts[row] += new
    fed = []
    hook = batch.drafter.model.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(kwargs["input_ids"]), with_kwargs=True
    )
    trees = batch.propose(rows)
    hook.remove()
    assert fed[0].shape[0] == 3
    assert fed[0].shape[1] <= 2
    for row, tree in zip(rows, trees, strict=True):
        fresh = batch.drafter.start(np.array(texts[row], np.int32), Target(VOCAB))
        expected = fresh.propose(BUDGET)
        assert tree.token_ids.tolist() == expected.token_ids.tolist()


def test_the_newest_of_every_text_are_fed_last():
    assert list(parts([5, 0, 2], 2)) == [
        [range(0, 1), range(0), range(0)],
        [range(1, 3), range(0), range(0)],
        [range(3, 5), range(0), range(0, 2)],
    ]
    assert not list(parts([0, 0], 4))
    # What fills a line up stands in slots behind the text's.
    assert offsets_of([1, 3, 0], 3).tolist() == [[1, 2, 0], [0, 1, 2], [0, 1, 2]]
