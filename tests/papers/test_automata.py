"""SAM-Decoding's two automata through the drafter protocol."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.drafters.automaton import AutomatonDrafter, StaticAutomatonDrafter
from hf_retrieval_assist.drafters.base import Target
from tests.support.one_text import OneText
from tests.support.trees import check_draft

TARGET = Target(vocab_size=262_144)
tokens = st.lists(st.integers(0, 3), max_size=20)


def start(drafter, prompt, target=TARGET):
    return OneText(drafter, prompt, target)


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


@pytest.mark.parametrize(
    ("most", "drafted"),
    [
        (2, [30, 1]),  # behind the first 1 2, not the second
        (6, [30, 1, 2, 40, 1, 2]),  # as many as follow it
    ],
)
def test_the_earliest_occurrence_drafts(most, drafted):
    text = [1, 2, 30, 1, 2, 40, 1, 2]
    assert start(AutomatonDrafter(most), text).propose(40).token_ids.tolist() == drafted
    corpus = StaticAutomatonDrafter([text, [1, 2, 50]], most)
    assert start(corpus, [9, 1, 2]).propose(40).token_ids.tolist() == drafted


def test_a_shorter_match_drafts_where_too_few_tokens_follow_the_longest():
    # 8 1 2 3 matches 1 2 3, behind which one token stands in its document; 3 stood earlier.
    corpus = StaticAutomatonDrafter([[3, 4, 5, 6, 7], [1, 2, 3, 9]], 3)
    session = start(corpus, [8, 1, 2, 3])
    assert session.match_length == 3
    assert session.propose(40).token_ids.tolist() == [4, 5, 6]
    assert session.propose(1).token_ids.tolist() == [9]


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
    with pytest.raises(ValueError, match="corpus: expected ids below the vocabulary size 9, got 9"):
        start(StaticAutomatonDrafter([[3, 9]]), [1], Target(vocab_size=9))
