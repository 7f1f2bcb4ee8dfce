"""Texts of a batch are drafted for together: the same drafts, one forward a level."""

import pytest

from hf_retrieval_assist.draft_models.sequoia import ShapeChooser
from tests.support.changes import hooked
from tests.support.drafted_texts import ROWS, Texts
from tests.support.feature_following import assert_same
from tests.support.heads import assisted, layers_of
from tests.support.quick import cases
from tests.support.watching import fed_shapes

NAMES = ["DFlash", "EAGLE", "MTP", "draft model", "windows"]
# Heads of windows, of several layers, and of layers that read tokens in a row.
HEADS = ["MTP of Gemma 3", "Glm4MoeForCausalLM", "InklingForCausalLM"]


@pytest.fixture(autouse=True)
def _one_shape(monkeypatch):
    """Trees of draft models are not solved for again while drafts are compared."""
    monkeypatch.setattr(ShapeChooser, "_has_changed", lambda self: False)


def batch_of(name):
    target, drafter = assisted(name)
    batch = Texts(drafter, target)
    batch.start(*ROWS)
    return batch


def check(batch, rows, trees):
    """What a session that knows one text alone drafts."""
    for row, tree in zip(rows, trees, strict=True):
        assert tree.fault(1 << 30, 1 << 30) is None
        assert_same(tree, batch.fresh(row).propose(batch.budget))


def proposed(batch, *rows):
    """What is drafted for some texts together, which is what is drafted for each alone."""
    trees = batch.propose(rows)
    check(batch, rows, trees)


@pytest.mark.parametrize("name", cases(NAMES, 4))
def test_a_batch_takes_the_forwards_of_one_text(name):
    batch = batch_of(name)
    proposed(batch, *ROWS)
    for row in ROWS:
        batch.grow(row, 1 + row % 3)
    forwards, layers = [], layers_of(batch.drafter, batch.target)
    with hooked(layers.register_forward_hook, lambda *_: forwards.append(1)):
        trees = batch.propose(ROWS)
    depth = max(int(tree.depths.max()) for tree in trees)
    check(batch, ROWS, trees)
    if name == "DFlash":
        assert len(forwards) == 1
    elif name in ("draft model", "windows"):
        assert len(forwards) == depth > 1
    else:
        # The head reads what is new in the texts, then the nodes level by level.
        assert 1 < len(forwards) <= 6
        assert len(forwards) >= depth


@pytest.mark.parametrize("name", cases([*NAMES, *HEADS], ["EAGLE", "windows"]))
def test_texts_come_and_go(name):
    batch = batch_of(name)
    proposed(batch, *ROWS[:5])
    proposed(batch, *ROWS[:5])  # the same once more
    for row in ROWS[:5]:
        batch.grow(row, 2)
    # Some wait, which costs them nothing.
    proposed(batch, 1, 3)
    batch.grow(1, 4)
    batch.leave(0)
    proposed(batch, 4, 1, 2)
    # Others join, and those that waited come back.
    proposed(batch, 3, 6, 1, 7)
    for row in (1, 6):
        batch.grow(row, 3)
    proposed(batch, 6, 1)
    proposed(batch, 5)


@pytest.mark.parametrize("name", NAMES)
def test_each_text_has_a_budget_of_its_own(name):
    batch = batch_of(name)
    budgets = [0, 1, 12, 5, 2, 0, 7, 3]
    trees = batch.drafter.propose([one.session for one in batch.sessions.values()], budgets)
    for tree, budget in zip(trees, budgets, strict=True):
        assert len(tree) <= budget
        assert len(tree) or not budget
        assert tree.fault(1 << 30, 1 << 30) is None


@pytest.mark.parametrize("name", ["draft model", "windows"])
def test_what_a_text_went_on_with_is_not_fed_again(name):
    """Rows that accepted different nodes, beside rows that accepted none."""
    batch, rows = batch_of(name), [0, 1, 3]
    for row, tree, count in zip(rows, batch.propose(rows), (3, 0, 1), strict=True):
        batch.accept(row, tree, count)
    with fed_shapes(batch.drafter.model) as shapes:
        trees = batch.propose(rows)
    texts, tokens = shapes[0]
    assert texts == 3
    assert tokens <= 2
    check(batch, rows, trees)
