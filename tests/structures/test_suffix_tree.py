"""The suffix tree against a plain trie that stores every suffix token by token."""

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_retrieval_assist.structures.suffix_tree import SuffixTree
from hf_retrieval_assist.types.token_tree import TokenTree
from tests.support.trees import array, paths


class PlainTrie:
    """Counts of every token run of at most `depth` tokens, and drafts by their definition."""

    def __init__(self, depth):
        self.depth = depth
        self.sequences = {}

    def runs(self):
        counts = {}
        for text in self.sequences.values():
            for i, j in itertools.combinations(range(len(text) + 1), 2):
                if j - i <= self.depth:
                    run = tuple(text[i:j])
                    counts[run] = counts.get(run, 0) + 1
        counts[()] = sum(map(len, self.sequences.values()))
        return counts

    def speculate(self, context, max_nodes, alpha):
        """Algorithm 1: the length of the match and the SCORE of its tree."""
        counts, below = self.runs(), {}
        for run in counts:
            if run:
                below.setdefault(run[:-1], []).append(run)
        best, score = 0, 0.0
        for p in range(1, min(self.depth, len(context)) + 1):
            match = tuple(context[len(context) - p :])
            if match not in counts:
                break
            probs = self.expand(counts, below, match, min(alpha * p, 1 + max_nodes))
            if sum(probs) > score + 1e-9:
                best, score = p, sum(probs)
        return best, score

    @staticmethod
    def expand(counts, below, match, max_spec):
        """D of each node of the tree, which grows while it has fewer nodes than MAX_SPEC."""
        tree, frontier, ties = [1.0], [], itertools.count()

        def offer(run, prob):
            children = below.get(run, [])
            for child in children:
                share = counts[child] / sum(map(counts.get, children))
                heapq.heappush(frontier, (-prob * share, next(ties), child))

        offer(match, 1.0)
        while len(tree) < max_spec and frontier:
            negative, _, run = heapq.heappop(frontier)
            tree.append(-negative)
            offer(run, -negative)
        return tree


def assert_equal_counts(tree, trie):
    """Every run of the trie, and the runs one token longer that are not in it."""
    counts = trie.runs()
    alphabet = {run[0] for run in counts if run}
    assert tree.token_count == counts[()]
    for run in counts:
        children = tree.children(array(run))
        expected = {t: counts[(*run, t)] for t in alphabet if (*run, t) in counts}
        assert dict(children) == expected
        assert len(children) == len(expected)
        assert [c for _, c in children] == sorted(expected.values(), reverse=True)


def grown(sequences, depth=64):
    tree, trie = SuffixTree(depth), PlainTrie(depth)
    for text in sequences:
        sequence = tree.add_sequence()
        assert tree.extend(sequence, array(text)) == len(text)
        trie.sequences[sequence] = list(text)
    return tree, trie


tokens = st.sampled_from([0, 1, 1 << 29])
texts = st.lists(tokens, max_size=24)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 3), st.lists(tokens, max_size=9)),
        st.tuples(st.just("remove"), st.integers(0, 3)),
    ),
    max_size=14,
)


@given(operations, st.sampled_from([1, 2, 3, 6, 12]))
def test_counts_agree_with_a_plain_trie_while_sequences_grow_and_go(steps, depth):
    tree, trie = SuffixTree(depth), PlainTrie(depth)
    ids = {}
    for kind, slot, *more in steps:
        if kind == "append":
            if slot not in ids:
                ids[slot] = tree.add_sequence()
                trie.sequences[ids[slot]] = []
            for token in more[0]:
                assert tree.extend(ids[slot], array([token])) == 1
            trie.sequences[ids[slot]] += more[0]
        elif slot in ids:
            tree.remove(ids[slot])
            del trie.sequences[ids.pop(slot)]
        assert_equal_counts(tree, trie)
    for sequence in ids.values():
        assert tree.tokens(sequence).tolist() == trie.sequences.pop(sequence)
        tree.remove(sequence)
        assert_equal_counts(tree, trie)
    assert tree.token_count == len(tree) == 0


@given(
    st.lists(texts, min_size=1, max_size=3),
    texts,
    st.sampled_from([0.5, 1.0, 1.5, 4.0]),
    st.sampled_from([0, 1, 12]),
)
@settings(max_examples=200)
def test_scores_agree_with_a_plain_trie(sequences, context, alpha, most):
    tree, trie = grown(sequences, 8)
    counts = trie.runs()
    for tail in ([*context], *sequences):
        got = tree.speculate(array(tail), most, alpha=alpha)
        length, score = trie.speculate(tail, most, alpha)
        assert got.score == pytest.approx(score, abs=1e-5)
        assert got.match_length == length
        # The draft is that tree: it goes on as sequences did, within the depth.
        draft = TokenTree.build(got.token_ids, got.parents, got.probs)
        match = tuple(tail[len(tail) - length :])
        assert all((*match, *path) in counts for path in paths(draft))
        assert got.score == pytest.approx((length > 0) + got.probs.sum(), abs=1e-4)


@given(st.lists(texts, min_size=1, max_size=3))
def test_a_sequences_own_matches_equal_matching_its_tokens(sequences):
    tree, trie = grown(sequences, 8)
    for sequence, text in trie.sequences.items():
        ours = tree.speculate(None, 12, sequence=sequence)
        from_scratch = tree.speculate(array(text), 12)
        assert ours.token_ids.tolist() == from_scratch.token_ids.tolist()
        if len(ours.token_ids):  # or else the whole text may match itself, at its end
            assert ours[3:] == from_scratch[3:]


@pytest.mark.parametrize("period", [1, 2, 5])
def test_repetition_beyond_a_page_and_the_depth(period):
    text = list(range(period)) * (150 // period)
    tree, trie = grown([text, text[3:40]], 64)
    assert_equal_counts(tree, trie)
    tree.remove(0)
    del trie.sequences[0]
    assert_equal_counts(tree, trie)


def test_one_repeated_token_takes_linear_time_and_space():
    """Quadratic time would take minutes, which no test has."""
    tree = SuffixTree(64)
    tree.extend(tree.add_sequence(), np.zeros(400_000, np.int32))
    assert tree.nbytes < 400_000 * 40


def test_memory_is_reused_and_never_above_the_limit():
    rng = np.random.default_rng(5)
    tree = SuffixTree(16, max_bytes=60_000)
    kept = []
    for _ in range(60):
        rest = rng.integers(0, 50, 100).astype(np.int32)
        kept.append(tree.add_sequence())
        while len(rest):
            rest = rest[tree.extend(kept[-1], rest) :]
            assert tree.nbytes <= 60_000
            if len(rest):
                tree.remove(kept.pop(0))
        assert tree.token_count == 100 * len(kept)
    assert tree.token_count > 400


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=5),
    st.sampled_from([None, 10_000, 14_000, 20_000]),
)
def test_sequences_extended_together_are_as_one_after_another(sequences, max_bytes):
    """They are so up to the first token that does not fit."""
    together, each = SuffixTree(8, max_bytes=max_bytes), SuffixTree(8, max_bytes=max_bytes)
    names = [[tree.add_sequence() for _ in sequences] for tree in (together, each)]
    offsets = np.cumsum([0, *map(len, sequences)])
    fitted = together.extend_all(names[0], array([*itertools.chain(*sequences)]), offsets)
    expected = 0
    for name, tokens in zip(names[1], sequences, strict=True):
        learnt = each.extend(name, array(tokens))
        expected += learnt
        if learnt < len(tokens):
            break
    assert fitted == expected
    assert together.nbytes == each.nbytes
    for one, other in zip(*names, strict=True):
        assert together.tokens(one).tolist() == each.tokens(other).tolist()


def test_nothing_is_appended_where_something_is_wrong():
    tree = SuffixTree()
    assert tree.extend(tree.add_sequence(), array([2**31 - 1] * 2)) == 2
    assert tree.speculate(array([2**31 - 1]), 1, alpha=2).token_ids.tolist() == [2**31 - 1]
    good, gone = tree.add_sequence(), tree.add_sequence()
    tree.remove(gone)
    one, two, offsets = array([1]), array([1, 2]), np.array([0, 1, 2])
    for wrong, message in (
        (lambda: SuffixTree(0), "max_depth: expected 1 to 65536, got 0"),
        (lambda: SuffixTree(max_bytes=10), "max_bytes: expected at least"),
        (lambda: tree.extend(good, array([1, -1])), "token_ids: expected 0 or more, got -1"),
        (lambda: tree.extend(gone, one), f"sequence: .* one that is here, got {gone}"),
        (lambda: tree.extend(-1, one), "sequence: expected the id of one that is here, got -1"),
        (lambda: tree.extend(7, one), "sequence: expected the id of one that is here, got 7"),
        (lambda: tree.extend_all([good, 5], two, offsets), "sequence: .* here, got 5"),
        (lambda: tree.extend_all([good, good], array([1, -2]), offsets), "0 or more, got -2"),
        (lambda: tree.extend_all([good], two, offsets), "offsets: expected 2 of them, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    assert tree.token_count == 2
