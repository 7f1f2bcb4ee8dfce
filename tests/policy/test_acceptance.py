import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.policy.acceptance import Calibrator
from hf_retrieval_assist.structures import draft_tree, evidence
from hf_retrieval_assist.types.evidence import EvidenceClasses
from hf_retrieval_assist.types.token_tree import Forest, TokenTree
from tests.support.rounding import near
from tests.support.trees import paths, trees


class Session:
    def __init__(self, calibrator):
        self.calibrator, self.open = calibrator, [evidence.OpenDrafts()]

    def calibrate(self, tree):
        return self.calibrator.calibrate(self.open, Forest.of([tree]))[0]

    def commit(self, token_ids):
        self.calibrator.judge(self.open, *draft_tree.flattened([token_ids]))


def observe(calibrator, evidence_class, hit):
    session = Session(calibrator)
    session.calibrate(TokenTree.chain([1], [0.5], [evidence_class]))
    session.commit([1 if hit else 2])


def tried_by_definition(tree, tokens):
    """Node by node: the path above it is the text's, and the text has a token to judge it by."""
    spelt = paths(tree)
    nodes = [
        node
        for node, path in enumerate(spelt)
        if len(path) <= len(tokens) and path[:-1] == tuple(tokens[: len(path) - 1])
    ]
    return nodes, [spelt[node] == tuple(tokens[: len(spelt[node])]) for node in nodes]


def judged(tree, pieces, counts, priors, memory):
    """Whether a text in pieces, which has judged a tree, is still inside."""
    text = evidence.OpenDrafts()
    evidence.calibrated([text], *arrays_of(tree), counts)
    for piece in pieces:
        tokens, offsets = np.array(piece, np.int32), np.array([0, len(piece)])
        evidence.judge([text], tokens, offsets, counts, priors, memory)
    return len(text) > 0


def arrays_of(tree):
    offsets = np.array([0, len(tree)])
    return tree.token_ids, tree.parents, tree.probs, tree.classes, offsets


@given(trees(12), st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=4))
def test_tried_nodes_are_those_below_the_texts_path(tree, pieces):
    assert tree.fault(1 << 30, 1 << 30) is None
    tokens = [token for piece in pieces for token in piece]
    # A class for each node tells which were tried and hit.
    counts = np.ones((12, 2))
    before = counts.copy()
    inside = judged(tree, pieces, counts, np.ones((12, 2)), 100.0)
    nodes, on_path = tried_by_definition(tree, tokens)
    assert np.flatnonzero(counts[:, 0] - before[:, 0]).tolist() == nodes
    assert (counts - before)[nodes, 1].tolist() == on_path
    assert inside == (len(tree) > 0 and len(tree.follow(tokens)) == len(tokens))


def test_counts_beyond_the_memory_are_halved_down_to_the_prior():
    counts = np.array([[8.0, 6.0]])
    judged(TokenTree.chain([1], [0.5], [0]), [[1]], counts, np.array([[3.0, 1.0]]), 8.5)
    assert counts.tolist() == [[6.0, 4.0]]


def test_texts_side_by_side_judge_their_own_proposals():
    texts = [evidence.OpenDrafts() for _ in range(3)]
    forest = Forest.of([TokenTree.chain([1], [0.5], [kind]) for kind in range(3)])
    counts = np.ones((3, 2))
    arrays = forest.token_ids, forest.parents, forest.probs, forest.classes, forest.offsets
    evidence.calibrated(texts, *arrays, counts)
    tokens, offsets = np.array([1, 2, 1], np.int32), np.array([0, 1, 3, 3])
    evidence.judge(texts, tokens, offsets, counts, np.ones((3, 2)), 9.0)
    assert counts.tolist() == [[2, 2], [2, 1], [1, 1]]
    assert [len(text) for text in texts] == [1, 0, 1]


def test_what_does_not_fit_is_refused_and_opens_nothing():
    text, tree = evidence.OpenDrafts(), TokenTree.chain([1], [0.5], [3])
    with pytest.raises(ValueError, match="expected evidence classes below 2, got 3"):
        evidence.calibrated([text], *arrays_of(tree), np.ones((2, 2)))
    assert len(text) == 0
    evidence.calibrated([text], *arrays_of(tree), np.ones((4, 2)))
    with pytest.raises(ValueError, match="offsets: expected"):
        evidence.calibrated([text], *arrays_of(tree)[:4], np.array([0, 2]), np.ones((4, 2)))
    with pytest.raises(ValueError, match="counts: expected 4 classes, got 2"):
        evidence.judge(
            *([text], np.array([1], np.int32), np.array([0, 1])),
            *(np.ones((2, 2)), np.ones((2, 2)), 9.0),
        )


def test_the_oldest_of_many_open_proposals_gives_way():
    text, tree = evidence.OpenDrafts(), TokenTree.chain([1] * 9, [1.0] * 9, [0] * 9)
    for _ in range(6):
        evidence.calibrated([text], *arrays_of(tree), np.ones((1, 2)))
    assert len(text) == 4


def test_classes_number_the_buckets_row_by_row():
    counts, totals, contexts = np.array([1, 9, 10]), np.array([10, 10, 10]), np.array([1, 2, 3])
    told = EvidenceClasses(np.full((2, 3, 3), 0.5), [2.0], [0.5, 1.0], [10.0, 11.0])
    classes = told.of(contexts, counts / totals, totals)
    assert classes.tolist() == [0 * 9 + 0 * 3 + 1, 1 * 9 + 1 * 3 + 1, 1 * 9 + 2 * 3 + 1]
    assert classes.dtype == np.int32
    assert len(told) == 18
    with pytest.raises(ValueError, match=r"priors: expected \[2, 3\] rates"):
        EvidenceClasses(np.full((2, 3, 3), 0.5), [2.0], [0.5, 1.0])


def test_priors_come_first_and_counts_take_over():
    calibrator = Calibrator(EvidenceClasses([0.2, 0.9]))
    classes = np.array([0, 1, 1], np.int32)
    assert calibrator.rates(classes) == near([0.2, 0.9, 0.9])
    rng = np.random.default_rng(0)
    for _ in range(1000):
        observe(calibrator, 0, rng.random() < 0.7)
        observe(calibrator, 1, rng.random() < 0.1)
    assert calibrator.rates(classes) == pytest.approx([0.7, 0.1, 0.1], abs=0.05)


def test_recovers_when_texts_turn_predictable_though_nothing_was_verified():
    calibrator, rates = Calibrator(EvidenceClasses([0.5])), []
    for step in range(160):
        observe(calibrator, 0, step >= 80)
        rates.append(calibrator.rates(np.zeros(1, np.int32))[0])
    assert rates[79] < 0.05
    assert rates[159] == near(0.5)


def test_nodes_without_a_class_keep_their_rate():
    calibrator = Calibrator(EvidenceClasses([0.5]))
    tree = TokenTree.chain([7, 8, 9], [0.8, 0.2, 0.1], [-1, -1, 0])
    session = Session(calibrator)
    assert session.calibrate(tree).probs == near([0.8, 0.2, 0.1])
    session.commit([7, 8, 9])
    assert calibrator._counts[0].tolist() == [5, 3]


@pytest.mark.parametrize("priors", [[1.5], [-0.1], [float("nan")], [[0.5]]])
def test_rejects_priors_that_are_no_rates(priors):
    with pytest.raises(ValueError, match=r"priors: expected \[1\] rates in \[0, 1\]"):
        EvidenceClasses(priors)
