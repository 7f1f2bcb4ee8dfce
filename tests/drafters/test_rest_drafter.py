"""The REST drafter: its contract, its evidence classes, and what the corpus brings."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.drafters.rest import RestDrafter
from tests.support.one_text import OneText
from tests.support.trees import check_draft, paths

VOCAB = 50
TARGET = Target(VOCAB)


def prompt(*token_ids):
    return np.array(token_ids, np.int32)


def sample_text(rng, length, order=0.8):
    """A walk on a ring that mostly steps by one: predictable, with surprises."""
    steps = np.where(rng.random(length) < order, 1, rng.integers(0, VOCAB, length))
    return np.cumsum(steps) % VOCAB


@pytest.fixture(scope="module")
def datastore(tmp_path_factory):
    rng = np.random.default_rng(0)
    documents = [sample_text(rng, 60) for _ in range(60)]
    path = tmp_path_factory.mktemp("rest") / "store"
    return Datastore.build(documents, path, vocab_size=VOCAB, progress=False)


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
    assert paths(session.propose(3)) == [(3,), (3, 4), (3, 5)]
    capped = OneText(RestDrafter(tiny, max_match=2), [1, 2, 3], TARGET)
    assert capped.matcher.match_length == 2
    published = OneText(RestDrafter(tiny, sources=1, continuation=2), [1, 2], TARGET)
    assert paths(published.propose(64)) == [(3,), (3, 4), (3, 5)]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.integers(0, 80), sources=st.integers(1, 4))
def test_drafts_keep_the_contract(datastore, seed, budget, sources):
    drafter = RestDrafter(datastore, max_match=6, max_nodes=32, continuation=5, sources=sources)
    text = sample_text(np.random.default_rng(seed), 12)
    session = OneText(drafter, text[:6], TARGET)
    for token in text[6:].tolist():
        session.commit([token], None)
        tree = session.propose(budget)
        check_draft(tree, drafter, min(budget, 32))
        assert tree.depths.max(initial=0) <= 5
        assert (tree.classes >= 0).all()


def test_priors_rise_with_the_evidence(datastore):
    priors = RestDrafter(datastore).evidence.priors.reshape(6, 7, 4)
    assert priors.dtype == np.float32
    assert ((priors > 0) & (priors < 1)).all()
    assert (np.diff(priors[:, 1:], axis=1) >= 0).all(), "share of the parent's occurrences"
    assert (np.diff(priors[1:], axis=0)[:, -1] > -0.02).all(), "context, where it is unanimous"
