"""Tree operations against definitions written out in plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.structures import draft_tree
from hf_retrieval_assist.types.token_tree import Forest, TokenTree
from tests.support.trees import paths, trees


def probs_of(tree):
    """Each node's, by the tokens that lead to it."""
    return dict(zip(paths(tree), tree.probs.tolist(), strict=True))


@given(trees())
def test_depths_and_ancestors_follow_the_paths(tree):
    assert tree.fault(1 << 30, 1 << 30) is None
    for node in range(len(tree)):
        path = tree.path(node).tolist()
        assert tree.depths[node] == len(path)
        assert np.flatnonzero(tree.ancestor_mask[node]).tolist() == path


def test_what_is_no_tree_is_not_arranged():
    two, whole = np.ones(2, np.int32), (2, [-1, 0], None, 4)
    for count, parents, rows, width in (
        *((2, parents, None, 4) for parents in ([0, 0], [-1, 1], [-2, 0])),
        *((3, *whole[1:]), (1, *whole[1:]), (*whole[:2], [1], 4), (*whole[:3], 2)),
    ):
        offsets, nodes = np.array([0, count]), np.array(parents, np.int32)
        with pytest.raises(ValueError, match="expected"):
            draft_tree.arrange([1], [9], offsets, two, nodes, rows, width)


@given(trees(), st.integers(0, 30))
def test_prune_keeps_the_most_probable_nodes_closed_under_parents(tree, budget):
    pruned = tree.prune(budget)
    assert len(pruned) == min(budget, len(tree))
    assert probs_of(pruned).items() <= probs_of(tree).items()
    best = np.sort(tree.probs)[::-1][:budget]
    assert np.array_equal(np.sort(pruned.probs)[::-1], best)


@given(trees(), st.integers(0, 6))
def test_cut_depth(tree, depth):
    kept = tree.cut_depth(depth)
    assert probs_of(kept) == {k: v for k, v in probs_of(tree).items() if len(k) <= depth}


@given(trees(), trees())
def test_merge_is_the_union_of_paths_with_the_higher_probability(first, second):
    merged = first.merge(second)
    a, b = probs_of(first), probs_of(second)
    assert probs_of(merged) == {k: max(a.get(k, 0.0), b.get(k, 0.0)) for k in a | b}


@given(trees(), st.lists(st.integers(0, 3), max_size=8))
def test_follow_walks_as_far_as_the_tree_goes(tree, tokens):
    known = paths(tree)
    length = 0
    while length < len(tokens) and tuple(tokens[: length + 1]) in known:
        length += 1
    walked = tree.follow(tokens)
    assert len(walked) == length
    node = -1
    for token, expected in zip(tokens, walked.tolist(), strict=False):
        node = tree.child(node, token)
        assert node == expected


@given(st.lists(trees(), max_size=4))
def test_the_best_path_has_the_largest_sum_of_probabilities(several):
    paths = Forest.of(several).best_paths()
    assert len(paths) == len(several)
    for tree, path in zip(several, paths, strict=True):
        leaves = sorted({*range(len(tree))} - {*tree.parents.tolist()})
        ways = [tree.path(leaf) for leaf in leaves] or [np.empty(0, np.int32)]
        sums = [tree.probs[way].sum() for way in ways]
        assert path.parents.tolist() == [*range(-1, len(path) - 1)]
        assert path.probs.sum() == max(sums)
        assert path.token_ids.tolist() in [tree.token_ids[way].tolist() for way in ways]


def same(tree, other):
    fields = ("token_ids", "parents", "probs")
    return all(np.array_equal(getattr(tree, name), getattr(other, name)) for name in fields)


@given(st.lists(trees(), max_size=4), st.lists(trees(), min_size=4, max_size=4))
def test_a_forest_holds_trees_as_they_are(several, others):
    forest = Forest.of(several)
    assert [forest.first(i) for i in range(len(several))] == [
        (tree.probs[0], tree.token_ids[0]) if len(tree) else (0, -1) for tree in several
    ]
    assert len(forest) == len(several)
    assert len(forest.token_ids) == sum(map(len, several)) == sum(forest.sizes)
    assert all(same(a, b) for a, b in zip(forest, several, strict=True))
    assert all(same(forest[i], tree) for i, tree in enumerate(several))
    others = others[: len(several)]
    merged = forest.merge(Forest.of(others))
    pairs = list(zip(several, others, strict=True))
    assert all(same(m, a.merge(b)) for m, (a, b) in zip(merged, pairs, strict=True))
    depths = [number % 3 or None for number in range(len(several))]
    cut = forest.cut_depths(depths)
    for tree, depth, whole in zip(cut, depths, several, strict=True):
        assert same(tree, whole if depth is None else whole.cut_depth(depth))


def test_faults_of_a_forest_are_those_of_its_trees():
    good, bad = TokenTree.chain([1, 2], [0.5, 0.25]), TokenTree.chain([1, 2], [0.5, 0.75])
    assert Forest.of([good, good]).fault(9, 0) is None
    assert Forest.of([good, bad]).fault(9, 0) == bad.fault(9, 0)
    arrays = (good.token_ids, good.parents, good.probs, good.classes)
    for offsets in ([0, 1], [0, 3], [1, 2], [0, 2, 1]):
        assert "offsets" in Forest(*arrays, np.array(offsets)).fault(9, 0)
