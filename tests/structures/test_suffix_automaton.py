"""The suffix automaton against brute force over the text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.structures.suffix_automaton import SuffixAutomaton
from tests.support.trees import array, ends_of

LARGEST = 2**31 - 1


def texts(max_size=24):
    """Texts over 1 to 5 symbols, over more than 64, and with the largest ids."""
    small = st.integers(1, 5).flatmap(lambda k: st.lists(st.integers(0, k - 1), max_size=max_size))
    wide = st.lists(st.integers(0, 70), max_size=max_size)
    large = st.lists(st.sampled_from([0, 70_000, 262_143, LARGEST - 1, LARGEST]), max_size=max_size)
    return st.one_of(small, wide, large)


def build(text):
    automaton = SuffixAutomaton()
    automaton.extend(array(text))
    return automaton


@given(texts(), st.integers(0, 40))
def test_every_substring_is_found_where_it_occurs(text, capacity):
    automaton = SuffixAutomaton(capacity=capacity)
    for token in text:
        automaton.extend(array([token]))
    assert len(automaton) == len(text)
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            cursor = automaton.cursor()
            assert cursor.advance_all(array(text[start:end])) == end - start
            assert cursor.earliest == ends_of(text[start:end], text)[0]


@given(texts(), texts())
def test_a_cursor_stays_exact_while_the_text_grows(text, query):
    """Splits move matched strings to other states behind the cursor's back."""
    automaton, grown = SuffixAutomaton(), []
    cursor = automaton.cursor()
    for i, token in enumerate(query):
        piece = text[2 * i : 2 * i + 2]
        seen = query[i - cursor.length : i + 1]
        cursor.advance(token)
        lengths = range(1, 1 + len(seen))
        assert cursor.length == max((n for n in lengths if ends_of(seen[-n:], grown)), default=0)
        automaton.extend(array(piece))
        grown += piece
        if cursor.length:
            found = query[i + 1 - cursor.length : i + 1]
            assert cursor.earliest == ends_of(found, grown)[0]


MANY = np.arange(400_000)
HARD_TEXTS = {
    "one token": MANY * 0,
    "one change": np.minimum(MANY, 1),
    "distinct": MANY,
    # Nearly every word of 18 symbols.
    "2 symbols": np.random.default_rng(0).integers(0, 2, 400_000),
}


@pytest.mark.parametrize("text", HARD_TEXTS.values(), ids=HARD_TEXTS)
def test_hard_texts_take_linear_time_and_memory(text):
    """Quadratic time would take minutes, which no test has."""
    automaton = SuffixAutomaton()
    automaton.extend(array(text), automaton.cursor())
    assert automaton.nbytes <= 100 * len(text)


def test_what_does_not_fit_is_refused_and_nothing_is_appended():
    automaton = SuffixAutomaton()
    for taker in (automaton.extend, automaton.cursor().advance_all):
        for tokens in (array([1, -1]), np.zeros(2, np.int64), np.zeros((2, 2), np.int32)):
            with pytest.raises(ValueError, match=r"token_ids: expected|Buffer"):
                taker(tokens)
    for wrong, message in (
        (lambda: automaton.extend(array([3]), build([1]).cursor()), "over another"),
        (lambda: automaton.cursor().advance(-1), "token: expected"),
        (lambda: SuffixAutomaton(capacity=-1), "capacity"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    assert len(automaton) == 0
