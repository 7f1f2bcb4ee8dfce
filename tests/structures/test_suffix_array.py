"""Suffix-array lookup and selection, against searches that look at every position of the text."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_retrieval_assist.corpus.build import sorted_suffixes
from hf_retrieval_assist.structures.suffix_array import SuffixArray, SuffixMatcher

VOCAB = 5


def make_shard(documents, vocab_size=VOCAB):
    """A shard's arrays."""
    text = np.array([token for ids in documents for token in [*ids, -1]], np.int32)
    return text, sorted_suffixes(text, vocab_size)[len(documents) :]


def make_index(documents, shards=1, vocab_size=VOCAB):
    parts = [documents[i::shards] for i in range(shards)]
    return SuffixArray([make_shard(part, vocab_size) for part in parts if part], vocab_size)


def occurrences(documents, query):
    """(document, end) of every occurrence of `query`."""
    n = len(query)
    return [
        (document, i + n)
        for document in documents
        for i in range(len(document) - n + 1)
        if document[i : i + n] == query
    ]


def longest_match(documents, text, max_match):
    for n in range(min(max_match, len(text)), 0, -1):
        if occurrences(documents, text[-n:]):
            return n
    return 0


def best_first(documents, text, max_match, budget, depth, sources):
    """The selection's contract, word by word: a list of (token, parent, count, parent_count)."""
    nodes, index, paths = [], {}, {-1: ()}
    seen = 0
    for n in range(longest_match(documents, text, max_match), 0, -1):
        places = occurrences(documents, text[-n:])
        if len(places) <= seen or not sources:
            continue
        seen, sources = len(places), sources - 1
        frontier = expand(documents, text[-n:], paths, -1)
        while frontier and len(nodes) < budget:
            best = min(frontier)
            frontier.remove(best)
            count, node_depth, parent, token, parent_count = best
            if (parent, token) not in index:
                index[parent, token] = len(nodes)
                nodes.append((token, parent, -count, parent_count))
            node = index[parent, token]
            paths[node] = (*paths[parent], token)
            if node_depth < depth:
                frontier += expand(documents, text[-n:], paths, node)
    return nodes


def expand(documents, match, paths, parent):
    """The children of a node as heap entries (−count, depth, parent, token, parent_count)."""
    path = paths[parent]
    places = occurrences(documents, [*match, *path])
    following = [document[end] for document, end in places if end < len(document)]
    return [
        (-following.count(token), len(path) + 1, parent, token, len(places))
        for token in sorted(set(following))
    ]


def selected(matcher, budget, depth, sources):
    tokens, parents, counts, parent_counts, _ = matcher.select(budget, depth, sources)
    columns = (tokens, parents, counts, parent_counts)
    return [*zip(*(column.tolist() for column in columns), strict=True)]


def corpora(max_documents=6):
    document = st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=12)
    return st.lists(document, min_size=1, max_size=max_documents)


TEXT = st.lists(st.integers(-1, VOCAB), min_size=1, max_size=15)


@settings(deadline=None)
@given(corpora(), TEXT, st.integers(1, 3), st.integers(1, 5))
def test_matches_equal_a_search_of_every_position(documents, text, shards, max_match):
    index = make_index(documents, shards)
    matcher = SuffixMatcher(index, max_match)
    for end in range(1, len(text) + 1):
        matcher.extend(text[end - 1 : end])
        assert matcher.match_length == longest_match(documents, text[:end], max_match)
        for n in range(1, matcher.match_length + 1):
            suffix = text[end - n : end]
            places = occurrences(documents, suffix)
            assert index.count(suffix) == len(places)


@settings(deadline=None)
@given(
    corpora(),
    st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(0, 20),
    st.integers(0, 4),
    st.integers(1, 3),
)
def test_selection_is_best_first_by_exact_counts(documents, text, shards, budget, depth, sources):
    matcher = SuffixMatcher(make_index(documents, shards), 4, 512)
    matcher.extend(text)
    expected = best_first(documents, text, 4, budget if depth else 0, depth, sources)
    assert selected(matcher, budget, depth, sources) == expected


def skewed_documents(tokens=60_000, ids=400):
    rng = np.random.default_rng(0)
    text = (ids ** rng.random(tokens)).astype(int) - 1
    return [part.tolist() for part in np.split(text, 60)]


@pytest.mark.parametrize("shards", [1, 3])
def test_what_follows_a_frequent_match_is_counted_in_proportion(shards):
    """Within four standard deviations of a sample of 1,024."""
    documents = skewed_documents()
    matcher = SuffixMatcher(make_index(documents, shards, 400), 1, 32)
    matcher.extend([0])
    tokens, parents, counts, parent_counts, contexts = matcher.select(32, 2, 1)
    follows = [b for document in documents for a, b in pairwise(document) if a == 0]
    total = sum(document.count(0) for document in documents)
    assert total > 5 * 1024
    assert (parent_counts[parents == -1] == total).all()
    first = tokens[parents == -1]
    for token, count in zip(first.tolist(), counts[parents == -1].tolist(), strict=True):
        share = follows.count(token) / total
        assert abs(count / total - share) < 4 * (share * (1 - share) / 1024) ** 0.5
    assert {0, 1} < {*first.tolist()}
    assert (counts <= parent_counts).all()
    assert (contexts == 1 + (parents >= 0)).all()


@pytest.mark.parametrize("max_nodes", [1, 4, 32])
def test_more_continuations_than_are_counted_have_room(max_nodes):
    documents = [*skewed_documents(6000), *([0, token] for token in range(1, 2000))]
    matcher = SuffixMatcher(make_index(documents, 1, 2000), 3, max_nodes)
    for token in [*documents[0], 0]:
        matcher.extend([token])
        assert 0 < len(selected(matcher, max_nodes, 4, 3)) <= max_nodes
    assert selected(matcher, max_nodes, 4, 3) == selected(matcher, max_nodes, 4, 3)


@settings(deadline=None)
@given(corpora(), st.sampled_from([4, 300, 70_000]))
def test_suffixes_are_sorted(documents, scale):
    documents = [[token * scale // VOCAB for token in document] for document in documents]
    text, suffixes = make_shard(documents, scale)
    at_ids = [i for i, token in enumerate(text) if token >= 0]
    assert suffixes.tolist() == sorted(at_ids, key=lambda i: text[i:].tolist())


@pytest.mark.parametrize("ids", [254, 255, 65_534, 65_535])
def test_ranks_of_all_widths_are_sorted(ids):
    text = np.append(np.random.default_rng(0).permutation(ids), -1).astype(np.int32)
    assert (text[sorted_suffixes(text, ids)] == np.arange(-1, ids)).all()


EMPTY, SOME = np.zeros(0, np.int32), np.zeros(1, np.int32)


def test_what_does_not_fit_is_refused():
    index = make_index([[1]])
    for wrong, message in (
        (lambda: SuffixArray([], VOCAB), "at least one"),
        (lambda: SuffixArray([(SOME, SOME)], 0), "vocab_size"),
        (lambda: SuffixArray([(SOME, SOME)], 1 << 31), "vocab_size"),
        (lambda: SuffixArray([(EMPTY, SOME)], VOCAB), "one token and one"),
        (lambda: SuffixArray([(SOME, EMPTY)], VOCAB), "one token and one"),
        (lambda: index.count([]), "token_ids: expected at least one"),
        *((lambda n=n: SuffixMatcher(index, n, 1), "expected 1 to") for n in (0, 1 << 17)),
        *((lambda n=n: SuffixMatcher(index, 1, n), "expected 1 to") for n in (0, 1 << 17)),
        (lambda: SuffixMatcher(index, 2, 3).select(4, 1), "at most 3"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
