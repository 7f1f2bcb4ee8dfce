"""Suffix-array lookup and selection, against searches that look at every position of the text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_retrieval_assist.corpus.build import align_suffixes, bucket_starts, count_codes, rank_codes
from hf_retrieval_assist.structures.suffix_array import SuffixArray, SuffixMatcher

VOCAB = 5


def make_shard(documents, vocab_size=VOCAB, width=1, shift=0):
    """A shard's buffers, sorted by comparing whole suffixes."""
    text = [code for document in documents for code in [*(t + 1 for t in document), 0]]
    codes = np.array(text, ">u4").view(np.uint8).reshape(-1, 4)[:, 4 - width :]
    codes = np.ascontiguousarray(codes).reshape(-1)
    order = sorted((i for i, code in enumerate(text) if code), key=lambda i: text[i:])
    starts = bucket_starts(count_codes(codes, width, vocab_size), shift)
    return codes, np.array(order, np.uint32), starts, shift


def make_index(documents, shards=1, shift=0):
    parts = [documents[i::shards] for i in range(shards)]
    return SuffixArray([make_shard(part, shift=shift) for part in parts if part], 1, VOCAB)


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
@given(corpora(), TEXT, st.integers(1, 3), st.integers(0, 2), st.integers(1, 5))
def test_matches_equal_a_search_of_every_position(documents, text, shards, shift, max_match):
    index = make_index(documents, shards, shift)
    matcher = SuffixMatcher(index, max_match)
    for end in range(1, len(text) + 1):
        matcher.extend(text[end - 1 : end])
        assert matcher.match_length == longest_match(documents, text[:end], max_match)
        for n in range(1, matcher.match_length + 1):
            suffix = text[end - n : end]
            assert index.count(suffix) == len(occurrences(documents, suffix))


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


@pytest.mark.parametrize(
    ("vocab_size", "width"), [(255, 1), (256, 2), (65535, 2), (65536, 3), (262144, 3), (1 << 25, 4)]
)
def test_ids_of_every_width(vocab_size, width):
    top = vocab_size - 1
    documents = [[top, 0, top], [0, top, top - 1]]
    shift = max(vocab_size.bit_length() - 8, 0)
    index = SuffixArray([make_shard(documents, vocab_size, width, shift)], width, vocab_size)
    assert (index.count([top]), index.count([0, top]), index.count([top, 0])) == (3, 2, 1)
    matcher = SuffixMatcher(index, 4, 8)
    matcher.extend([0, top])
    assert selected(matcher, 8, 4, 1) == [(top - 1, -1, 1, 2)]


def test_a_flat_distribution_is_given_up_deterministically():
    documents = [[0, token] for token in range(1, 2000)]
    index = SuffixArray([make_shard(documents, 2000, 2, 4)], 2, 2000)
    drafts = []
    for _ in range(2):
        matcher = SuffixMatcher(index, 2, 8)
        matcher.extend([0])
        drafts.append(selected(matcher, 8, 2, 1))
    assert drafts[0] == drafts[1]
    assert {(parent, count) for _, parent, count, _ in drafts[0]} <= {(-1, 1)}


@pytest.mark.parametrize("max_nodes", [1, 4, 32])
def test_more_searches_than_are_allowed_end(max_nodes):
    rng = np.random.default_rng(0)
    text = (400 ** rng.random(6000)).astype(int) - 1
    documents = [part.tolist() for part in np.split(text, 60)]
    matcher = SuffixMatcher(SuffixArray([make_shard(documents, 400, 2, 0)], 2, 400), 3, max_nodes)
    for token in text[:300].tolist():
        matcher.extend([token])
        tokens, parents, counts, parent_counts, _ = matcher.select(max_nodes, 4, 3)
        assert 0 < len(tokens) <= max_nodes
        assert (parents < np.arange(len(parents))).all()
        assert ((counts > 0) & (counts <= parent_counts)).all()


@settings(deadline=None)
@given(corpora(), st.sampled_from([(4, 1), (300, 2), (70_000, 3)]))
def test_codes_and_their_ranks_sort_as_texts_do(documents, scale):
    factor, width = scale
    documents = [[token * factor // VOCAB for token in document] for document in documents]
    codes, order, _, _ = make_shard(documents, factor, width, max(factor.bit_length() - 4, 0))
    ranks = rank_codes(codes, width, count_codes(codes, width, factor))
    assert ranks.shape[1] == 1
    for data, columns in ((codes.tobytes(), width), (ranks.tobytes(), 1)):
        by_bytes = np.array(sorted(range(len(data)), key=lambda i: data[i:]), np.int32)
        assert align_suffixes(by_bytes, columns, len(documents)).tolist() == order.tolist()


def test_ranks_widen_with_the_number_of_distinct_codes():
    codes = np.arange(300, dtype=">u2").view(np.uint8)
    ranks = rank_codes(codes, 2, count_codes(codes, 2, 299))
    assert ranks.shape == (300, 2)
    assert (ranks.reshape(-1) == codes).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": []}, "at least one"),
        ({"width": 5}, "width"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"codes": np.zeros(3, np.uint8), "width": 2}, "multiple of 2"),
        ({"codes": np.zeros(0, np.uint8)}, "multiple of 1"),
        ({"suffixes": np.zeros(0, np.uint32)}, "at least one suffix"),
        ({"starts": np.zeros(1, np.uint32)}, "one bucket"),
        ({"shift": 31}, "bucket_shift"),
    ],
)
def test_index_rejects(change, message):
    parts = dict(zip(("codes", "suffixes", "starts", "shift"), make_shard([[1, 2]]), strict=True))
    parts |= {name: value for name, value in change.items() if name in parts}
    shards = change.get("shards", [tuple(parts.values())])
    with pytest.raises(ValueError, match=message):
        SuffixArray(shards, change.get("width", 1), change.get("vocab_size", VOCAB))


@pytest.mark.parametrize(
    ("max_match", "max_nodes", "message"),
    [
        *((n, 1, "expected 1 to") for n in (0, 1 << 17)),
        *((1, n, "expected 1 to") for n in (0, 1 << 17)),
        (2, 3, "at most 3"),
    ],
)
def test_matcher_rejects_sizes_out_of_range(max_match, max_nodes, message):
    with pytest.raises(ValueError, match=message):
        SuffixMatcher(make_index([[1]]), max_match, max_nodes).select(max_nodes + 1, 1)
