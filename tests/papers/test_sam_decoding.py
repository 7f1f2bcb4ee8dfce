"""SAM-Decoding's rule: the longer match drafts, and below the threshold the fallback; and the two
automata that match."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation import simulate
from hf_retrieval_assist import Datastore
from hf_retrieval_assist.drafters.automaton import AutomatonDrafter, StaticAutomatonDrafter
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.papers import SamDecoding
from hf_retrieval_assist.policy.policy import Ask
from hf_retrieval_assist.types.token_tree import TokenTree
from tests.support.one_text import OneText
from tests.support.scripted import Scripted
from tests.support.trees import ends_of

TARGET = Target(vocab_size=1000)
TEXT = list(range(1, 11))


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        # One token a step until 5 are matched, then the remaining 5 with 4 nodes.
        ({}, (5, 9, 4)),
        ({"min_match": 3}, (3, 9, 6)),
        ({"max_draft": 2}, (6, 9, 3)),
    ],
)
def test_how_a_copy_is_drafted(options, counted):
    report = simulate(SamDecoding(fallback=None, **options), [(TEXT, TEXT)])
    assert (report.steps, report.tokens, report.nodes) == counted


class Seven(Scripted):
    """A fallback that drafts 7, and counts the texts that it is asked for."""

    def __init__(self):
        super().__init__(lambda budget: TokenTree.chain([7], [0.5]))
        self.asked = []

    def propose(self, sessions, budgets):
        self.asked.append(len(sessions))
        return super().propose(sessions, budgets)


def draft_rows(prompts, **options):
    """What is drafted behind several texts, and how many the fallback was asked for."""
    fallback = Seven()
    policy = SamDecoding(fallback=fallback, **options).policy
    sessions = []
    for *prompt, first in prompts:
        sessions.append(policy.start(np.array(prompt, np.int32), TARGET))
        sessions[-1].begin([first])
    step = policy.draft(Ask(sessions))
    return [tree.token_ids.tolist() for tree in step.trees], fallback.asked, step


def test_the_fallback_is_asked_for_no_text_but_those_below_the_threshold():
    matching, new = [1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5], [1, 2, 3]
    drafts, asked, step = draft_rows([matching, new, matching], max_draft=1)
    assert drafts == [[9], [7], [9]]
    assert asked == [1]
    assert [step.reached(place, [9, 7][place : place + 1]) for place in (0, 1)] == [[1, 0], [0, 1]]
    assert draft_rows([matching], max_draft=1)[:2] == ([[9]], [])


def test_by_default_a_match_takes_ten_tokens_of_a_corpus_and_drafts_forty():
    corpus = list(range(100, 160))
    drafts, asked, _ = draft_rows([corpus[:9], corpus[:10]], corpus=[corpus])
    assert drafts == [[7], corpus[10:50]]
    assert asked == [1]


def by_definition(text, documents, min_match, bias, most):
    """The draft of a rule that looks at every suffix; None: the fallback's."""

    def found(suffixes, texts, own):
        """The longest match, and behind its ancestors the first longest chain."""
        length, best = 0, []
        for size in range(len(suffixes), 0, -1):
            pattern = suffixes[-size:]
            places = [(t, end) for t in texts for end in ends_of(pattern, t)]
            if own:
                places = [(t, end) for t, end in places if end < len(t)]
            if places:
                length = length or size
                t, end = places[0]
                best = max(best, t[end : end + most], key=len)
        return length, best

    dynamic, own = found(text, [text], True)
    static, corpus = found(text, documents, False)
    static -= bias
    if max(dynamic, static) < min_match:
        return None
    return (own if dynamic >= static else corpus) or None


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=24),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_drafts_are_those_of_the_definition(text, documents, min_match, bias, most):
    options = {"min_match": min_match, "corpus_bias": bias, "max_draft": most}
    (draft,), asked, _ = draft_rows([text], corpus=documents, **options)
    expected = by_definition(text, documents, min_match, bias, most)
    assert draft == ([7] if expected is None else expected)
    assert asked == ([1] if expected is None else [])


def test_a_datastore_has_no_automaton(tmp_path):
    store = Datastore.build([[1, 2]], tmp_path / "store", vocab_size=9, progress=False)
    for corpus in (store, str(store.path)):
        with pytest.raises(TypeError, match=r"^corpus: expected documents"):
            SamDecoding(corpus)


def test_longer_matches_are_trusted_more():
    session = OneText(AutomatonDrafter(), [*range(100, 150), 0, 100], TARGET)
    probs = []
    for token in range(101, 130):
        probs.append(float(session.propose(1).probs[0]))
        session.commit([token], None)
    assert probs == sorted(probs)
    assert probs[0] < 0.5 < 0.9 < probs[-1]


def test_ids_outside_the_output_layer_are_never_proposed():
    session = OneText(AutomatonDrafter(), [1, 2, 9, 3, 1, 2], Target(vocab_size=9))
    assert not len(session.propose(4))
    session = OneText(AutomatonDrafter(), [1, 2, 8, 9, 1, 2], Target(vocab_size=9))
    assert session.propose(4).token_ids.tolist() == [8]
    with pytest.raises(ValueError, match="corpus: expected ids below the vocabulary size 9, got 9"):
        OneText(StaticAutomatonDrafter([[3, 9]]), [1], Target(vocab_size=9))
