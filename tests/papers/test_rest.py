"""REST as published: the longest match, and its most frequent continuations."""

import numpy as np
import pytest

from hf_retrieval_assist import Datastore
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.drafters.rest import RestDrafter
from hf_retrieval_assist.papers import Rest
from hf_retrieval_assist.policy.policy import Ask
from tests.support.one_text import OneText
from tests.support.trees import check_draft, paths

TARGET = Target(50)


@pytest.fixture
def store(tmp_path):
    documents = [[1, 2, 3, 4], [1, 2, 3, 5], [9, 2, 7], [9, 2, 7], [1, 2, 3, 4, 6]]
    return Datastore.build(documents, tmp_path / "tiny", vocab_size=50, progress=False)


@pytest.mark.parametrize(
    ("sizes", "drafted"),
    [
        # Behind 1 2 comes 3 three times, then 4 twice and 5 once; 7 comes behind 2 alone.
        ({}, [(3,), (3, 4), (3, 5), (3, 4, 6)]),
        ({"continuation": 2}, [(3,), (3, 4), (3, 5)]),
        ({"nodes": 2}, [(3,), (3, 4)]),
        ({"max_match": 1, "continuation": 1}, [(3,), (7,)]),
    ],
)
def test_the_most_frequent_continuations_of_the_longest_match_make_the_tree(store, sizes, drafted):
    policy = Rest(store, **sizes).policy
    session = policy.start(np.array([8, 1], np.int32), TARGET)
    session.begin([2])
    (tree,) = policy.draft(Ask([session])).trees
    assert paths(tree) == drafted


def test_a_datastore_is_opened_by_its_path(store):
    assert Rest(str(store.path)).datastore.token_count == store.token_count
    with pytest.raises(TypeError, match=r"^datastore: expected Datastore, got list"):
        Rest([[1, 2]])


def test_our_drafter_goes_on_with_shorter_matches(store):
    session = OneText(RestDrafter(store), [8, 1], TARGET)
    session.commit([2], None)
    assert session.matcher.match_length == 2
    tree = session.propose(64)
    assert paths(tree) == [(3,), (3, 4), (3, 5), (3, 4, 6), (7,)]
    check_draft(tree, session.drafter, 64)
    assert paths(session.propose(3)) == [(3,), (3, 4), (3, 5)]
