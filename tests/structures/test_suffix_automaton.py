"""The suffix automaton against brute force over the text."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.structures.suffix_automaton import SuffixAutomaton

SEPARATOR = -1
LARGEST = 2**31 - 1


def texts(max_size=24):
    """Texts over 1 to 5 symbols, over more than 64, and with the largest ids."""
    small = st.integers(1, 5).flatmap(lambda k: st.lists(st.integers(0, k - 1), max_size=max_size))
    wide = st.lists(st.integers(0, 70), max_size=max_size)
    large = st.lists(st.sampled_from([0, 70_000, 262_143, LARGEST - 1, LARGEST]), max_size=max_size)
    return st.one_of(small, wide, large)


def documents():
    return st.lists(texts(max_size=10), max_size=5)


def ends_of(pattern, text):
    """1-based end positions of the occurrences, ascending."""
    m = len(pattern)
    return [end for end in range(m, len(text) + 1) if text[end - m : end] == pattern]


def longest_suffix(seen, text):
    """The longest suffix of `seen` that occurs in `text`."""
    starts = range(len(seen) + 1)
    return next(seen[start:] for start in starts if not seen[start:] or ends_of(seen[start:], text))


def longest_earlier_suffix(text):
    suffixes = (text[start:] for start in range(1, len(text)))
    return next((suffix for suffix in suffixes if len(ends_of(suffix, text)) > 1), [])


def array(tokens):
    return np.array(tokens, np.int32)


def build(text):
    automaton = SuffixAutomaton()
    automaton.extend(array(text))
    return automaton


def build_documents(docs):
    """An automaton over the documents, and its text with separators."""
    automaton, text = SuffixAutomaton(), []
    for doc in docs:
        automaton.extend(array(doc))
        automaton.end_document()
        text += [*doc, SEPARATOR]
    return automaton, text


def document_tail(text, end):
    """The tokens after a 1-based end position, up to the end of their document."""
    tail = text[end:]
    return tail[: tail.index(SEPARATOR)] if SEPARATOR in tail else tail


@given(texts())
def test_every_substring_is_found_where_it_occurs(text):
    automaton = build(text)
    assert automaton.tokens().tolist() == text
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
        matched = query[i - cursor.length : i]
        cursor.advance(token)
        assert cursor.length == len(longest_suffix([*matched, token], grown))
        automaton.extend(array(piece))
        grown += piece
        if cursor.length:
            found = query[i + 1 - cursor.length : i + 1]
            assert cursor.earliest == ends_of(found, grown)[0]


@given(texts(max_size=32), st.integers(1, 8))
def test_a_draft_continues_the_longest_suffix_with_enough_followers(text, limit):
    automaton = SuffixAutomaton()
    cursor = automaton.cursor()
    automaton.extend(array(text), cursor)
    best = []
    for start in range(len(text) - len(longest_earlier_suffix(text)), len(text)):
        ends = ends_of(text[start:], text)[:-1]
        tail = text[ends[0] :][:limit]
        best = tail if len(tail) > len(best) else best
    draft = cursor.draft(limit)
    assert draft.dtype == np.int32
    assert draft.tolist() == best


@given(documents(), texts(), st.integers(0, 6))
def test_no_match_and_no_draft_crosses_documents(docs, query, limit):
    automaton, text = build_documents(docs)
    cursor = automaton.cursor()
    for i, token in enumerate(query):
        expected = longest_suffix(query[: i + 1], text)
        assert cursor.advance(token) == len(expected)
        if expected:
            suffixes = [expected[start:] for start in range(len(expected))]
            tails = [document_tail(text, ends_of(suffix, text)[0]) for suffix in suffixes]
            draft = cursor.draft(limit).tolist()
            assert draft == max((tail[:limit] for tail in tails), key=len)


def fibonacci_word(n):
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


RANDOM = np.random.default_rng(0)
HARD_TEXTS = {
    "one token": [3] * 20_000,
    "fibonacci": fibonacci_word(20_000),
    # Nearly every word of 14 or of 3 symbols.
    "2 symbols": RANDOM.integers(0, 2, 20_000),
    "16 symbols": RANDOM.integers(0, 16, 20_000),
    "one change": [0] + [1] * 20_000,
    "squares": [i * i % 251 for i in range(20_000)],
    "distinct": list(range(20_000)),
}


@pytest.mark.parametrize("text", HARD_TEXTS.values(), ids=HARD_TEXTS)
def test_linear_time_and_memory_on_hard_texts(text):
    """Four times the tokens may take eight times as long, where quadratic time takes sixteen."""

    def seconds(length):
        automaton, started = SuffixAutomaton(), time.process_time()
        automaton.extend(array(text[:length]), automaton.cursor())
        taken = time.process_time() - started
        assert automaton.nbytes <= 100 * max(length, 1_000)
        return taken

    few, many = (min(seconds(n) for _ in range(3)) for n in (len(text) // 4, len(text)))
    assert many < 8 * few


@given(texts(), st.integers(0, 40))
def test_capacity_and_pieces_make_no_difference(text, capacity):
    whole, pieces = build(text), SuffixAutomaton(capacity=capacity)
    for token in text:
        pieces.extend(array([token]))
    assert pieces.tokens().tolist() == whole.tokens().tolist()
    assert len(pieces) == len(text)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (array([1, -1]), ValueError),
        (np.zeros(2, np.int64), ValueError),
        (np.zeros((2, 2), np.int32), ValueError),
        ([1, 2], TypeError),
    ],
)
def test_bad_tokens_are_refused_and_nothing_is_appended(tokens, error):
    automaton = SuffixAutomaton()
    for taker in (automaton.extend, automaton.cursor().advance_all):
        with pytest.raises(error, match=r"token_ids: expected|[Bb]uffer|bytes-like"):
            taker(tokens)
    assert len(automaton) == 0


def test_misuse_is_refused():
    automaton, other = build([1, 2]), build([1])
    for misuse, message in (
        (lambda: automaton.extend(array([3]), other.cursor()), "over another"),
        (lambda: automaton.cursor().advance(-1), "token: expected"),
        (lambda: SuffixAutomaton(capacity=-1), "capacity"),
    ):
        with pytest.raises(ValueError, match=message):
            misuse()
