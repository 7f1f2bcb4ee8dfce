"""The REST drafter: its contract, its evidence classes, and what the corpus brings."""

import pytest

from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.drafters.rest import RestDrafter
from tests.support.one_text import OneText
from tests.support.trees import check_draft, paths

VOCAB = 50
TARGET = Target(VOCAB)


@pytest.fixture
def tiny(tmp_path):
    documents = [[1, 2, 3, 4], [1, 2, 3, 5], [9, 2, 7], [1, 2, 3, 4, 6]]
    return Datastore.build(documents, tmp_path / "tiny", vocab_size=VOCAB, progress=False)


def test_continuations_of_the_longest_match_then_of_shorter_ones(tiny):
    session = OneText(RestDrafter(tiny), [8, 1], TARGET)
    session.commit([2], None)
    assert session.matcher.match_length == 2
    tree = session.propose(64)
    assert paths(tree) == [(3,), (3, 4), (3, 5), (3, 4, 6), (7,)]
    check_draft(tree, session.drafter, 64)
    assert paths(session.propose(3)) == [(3,), (3, 4), (3, 5)]
    capped = OneText(RestDrafter(tiny, max_match=2), [1, 2, 3], TARGET)
    assert capped.matcher.match_length == 2
    published = OneText(RestDrafter(tiny, sources=1, continuation=2), [1, 2], TARGET)
    assert paths(published.propose(64)) == [(3,), (3, 4), (3, 5)]
