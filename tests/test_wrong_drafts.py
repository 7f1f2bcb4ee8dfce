"""Drafts of drafters from outside, which nothing may believe unread."""

from dataclasses import replace

import numpy as np
import pytest

from hf_retrieval_assist import Assistant, TokenTree
from hf_retrieval_assist.types.evidence import EvidenceClasses
from tests.support.lossless import run, same
from tests.support.scripted import Scripted


def fixed(tree, n_classes=0):
    """Drafts the same arrays at every step."""
    evidence = EvidenceClasses([0.5] * n_classes)
    return Scripted(lambda budget: tree, name="outsider", evidence=evidence)


def tree(token_ids, parents, probs, classes=None):
    return TokenTree.build(token_ids, parents, probs, classes)


BOTH = np.array([5, 6], np.int32)
WRONG = {
    "log-probabilities": (tree([5, 9], [-1, 0], [-0.7, -1.9]), "probabilities"),
    "large negative": (tree([5, 9], [-1, 0], [-7e6, -9e6]), "probabilities"),
    "NaN and an id beyond the vocabulary": (tree([5, 9999], [-1, -1], [np.nan, 0.5]), "token_ids"),
    "a node more probable than its parent": (tree([5, 9], [-1, 0], [0.2, 0.9]), "parent"),
    "an id beyond the vocabulary": (tree([9999], [-1], [0.9]), "token_ids"),
    "a negative id": (tree([-1], [-1], [0.9]), "token_ids"),
    "a parent behind its child": (tree([5, 6], [1, -1], [0.5, 0.5]), "parents"),
    "a parent that is none": (tree([5, 6], [-1, -70000], [0.5, 0.5]), "parents"),
    "equal siblings": (tree([5, 5], [-1, -1], [0.5, 0.5]), "siblings"),
    "an unknown class": (tree([5], [-1], [0.5], [3]), "classes"),
    "unequal lengths": (replace(tree([5], [-1], [0.5]), token_ids=BOTH), "lengths"),
    "another dtype": (replace(tree([5], [-1], [0.5]), token_ids=np.array([5])), "int32"),
    "lists": (TokenTree([5], [-1], [0.5], [-1]), "arrays"),
    "every other element of an array": (
        replace(tree([5, 6], [-1, 0], [0.5, 0.2]), token_ids=BOTH.repeat(2)[::2]),
        "contiguous",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("budget", [8, "auto"])
def test_wrong_drafts_are_one_error_that_names_the_drafter(llama, kind, budget):
    wrong, words = WRONG[kind]
    with pytest.raises(ValueError, match="outsider") as raised:
        run(llama, assistant=Assistant([fixed(wrong)], budget=budget))
    assert words in str(raised.value)


@pytest.mark.parametrize("budget", [8, "auto"])
def test_nodes_of_no_probability_are_dropped_with_what_is_below_them(llama, budget):
    nan = float("nan")
    mixed = tree([5, 6, 9, 7], [-1, -1, 0, 1], [nan, 0.4, 0.3, 0.1])
    kept = mixed.without_nan()
    assert kept.token_ids.tolist() == [6, 7]
    assert kept.parents.tolist() == [-1, 0]
    assert kept.without_nan() is kept
    for draft in (mixed, tree([5], [-1], [nan])):
        _, _, assistant = same(llama, assistant=Assistant([fixed(draft)], budget=budget))
        if draft is not mixed:
            assert not assistant.stats.last.drafted
        elif budget != "auto":
            assert assistant.stats.last.drafted


def test_right_drafts_of_any_shape_are_taken(llama):
    right = tree([5, 6, 9, 7], [-1, -1, 0, 2], [0.5, 0.4, 0.5, 0.1], [1, -1, 0, 1])
    same(llama, assistant=Assistant([fixed(right, n_classes=2)], budget=8))
