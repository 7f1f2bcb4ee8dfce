"""The automaton drafters through the drafter protocol."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.drafters.automaton import AutomatonDrafter, StaticAutomatonDrafter
from hf_retrieval_assist.drafters.base import Target
from tests.support.trees import check_draft

TARGET = Target(vocab_size=262_144)
tokens = st.lists(st.integers(0, 3), max_size=20)


def start(drafter, prompt, target=TARGET):
    return drafter.start(np.array(prompt, dtype=np.int32), target)


@given(tokens, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6))
def test_every_draft_keeps_the_contract(prompt, steps):
    for drafter in (
        AutomatonDrafter(max_draft=9),
        StaticAutomatonDrafter([[0, 1, 2, 3, 1, 2], [0, 1, 3]], max_draft=9),
    ):
        session = start(drafter, prompt)
        for accepted in steps:
            session.commit(accepted, None)
            for budget in (0, 1, 5, 40):
                check_draft(session.propose(budget), drafter, min(budget, 9))
        session.close()


def test_the_text_drafts_its_own_continuation():
    session = start(AutomatonDrafter(), [5, 6, 7, 8, 9, 5, 6])
    session.commit([7], None)
    tree = session.propose(2)
    assert session.match_length == 3
    assert len({*tree.depths}) == len(tree)
    assert tree.token_ids.tolist() == [8, 9]
    session.commit(np.array([8, 4], dtype=np.int32), None)
    assert session.match_length == 0
    assert not len(session.propose(2))


def test_latest_or_earliest_occurrence():
    prompt = [1, 2, 30, 1, 2, 40, 1, 2]
    drafts = {
        latest: start(AutomatonDrafter(latest=latest), prompt).propose(1).token_ids.tolist()
        for latest in (False, True)
    }
    assert drafts == {False: [30], True: [40]}


def test_short_matches_may_be_ignored():
    for drafter in (
        AutomatonDrafter(min_match=3),
        StaticAutomatonDrafter([[1, 2, 3, 4]], min_match=3),
    ):
        session = start(drafter, [1, 2, 3, 4, 9, 1])
        session.commit([2], None)
        assert session.match_length == 2
        assert not len(session.propose(8))
        session.commit([3], None)
        assert session.propose(8).token_ids[0] == 4


def test_longer_matches_are_trusted_more():
    session = start(AutomatonDrafter(), [*range(100, 150), 0, 100])
    probs = []
    for token in range(101, 130):
        probs.append(float(session.propose(1).probs[0]))
        session.commit([token], None)
    assert probs == sorted(probs)
    assert probs[0] < 0.5 < 0.9 < probs[-1]


def test_ids_outside_the_output_layer_are_never_proposed():
    session = start(AutomatonDrafter(), [1, 2, 9, 3, 1, 2], Target(vocab_size=9))
    assert not len(session.propose(4))
    session = start(AutomatonDrafter(), [1, 2, 8, 9, 1, 2], Target(vocab_size=9))
    assert session.propose(4).token_ids.tolist() == [8]


def test_the_corpus_branches_by_counts():
    corpus = [[1, 2, 3], [1, 2, 4], [1, 2, 4], [7, 2, 5]]
    session = start(StaticAutomatonDrafter(corpus), [9, 1])
    tree = session.propose(8)
    assert tree.token_ids.tolist() == [2, 4, 3]
    assert tree.parents.tolist() == [-1, 0, 0]
    assert session.propose(2).token_ids.tolist() == [2, 4]


def test_what_occurred_once_is_told_from_what_always_went_on_alike():
    session = start(StaticAutomatonDrafter([[1, 2], [3, 4], [3, 4]]), [1])
    once = session.propose(1)
    session.commit([3], None)
    twice = session.propose(1)
    assert (once.probs[0], twice.probs[0]) == (np.float32(0.133), np.float32(0.355))


def test_sessions_share_a_corpus_but_not_their_place():
    drafter = StaticAutomatonDrafter([[1, 2, 3], [4, 5, 6]])
    first, second = start(drafter, [1]), start(drafter, [4])
    first.commit([2], None)
    second.commit([5], None)
    assert first.propose(4).token_ids.tolist() == [3]
    assert second.propose(4).token_ids.tolist() == [6]


def test_bad_corpora_are_refused():
    for corpus in ([], [[]], [[], []]):
        with pytest.raises(ValueError, match="corpus: expected at least one token"):
            StaticAutomatonDrafter(corpus)
    with pytest.raises(ValueError, match="corpus: document 1: expected ids"):
        StaticAutomatonDrafter([[1], [-1]])
    with pytest.raises(TypeError, match="corpus: document 0: expected integer ids"):
        StaticAutomatonDrafter([[0.5]])
    with pytest.raises(
        ValueError, match="corpus: expected ids below the vocabulary size 10, got 10"
    ):
        start(StaticAutomatonDrafter([[3, 10]]), [1], Target(vocab_size=10))


@pytest.mark.parametrize("argument", ["max_draft", "min_match", "max_children"])
def test_arguments_are_checked(argument):
    with pytest.raises(ValueError, match=argument):
        StaticAutomatonDrafter([[1]], **{argument: 0})
