"""Mixing of contexts against its definition, written down in Python."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_retrieval_assist.drafters.mixture import Mixture
from hf_retrieval_assist.structures.suffix_tree import (
    CELL_SHAPE,
    WEIGHT_SHAPE,
    Mixer,
    SuffixTree,
)

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 24)
ORDERS = len(LENGTHS)
BOTH, BIAS = 30, 31
VOCABULARY = 1000


def array(tokens):
    return np.array(tokens, dtype=np.int32)


def grown(texts):
    tree = SuffixTree()
    for text in texts:
        tree.extend(tree.add_sequence(), array(text))
    return tree


def mixture(seed=0):
    """Cells and weights without any order."""
    rng = np.random.default_rng(seed)
    cells = np.zeros((*CELL_SHAPE, 2), np.float32)
    cells[..., 0] = rng.uniform(0.01, 0.99, CELL_SHAPE)
    cells[..., 1] = rng.integers(0, 300, CELL_SHAPE)
    return cells, rng.normal(0, 0.2, WEIGHT_SHAPE).astype(np.float32)


class Plain:
    """One step of mixing over whole texts, for texts so short that no context is left out."""

    def __init__(self, cells, weights, rate=0.003):
        self.cells, self.weights, self.rate = cells.astype(float), weights.astype(float), rate

    def witnesses(self, sources, context):
        """(source, order) -> continuations in order of time, for each that has any."""
        found = {}
        for source, texts in enumerate(sources):
            for order, length in enumerate(LENGTHS):
                if length > len(context):
                    break
                wanted = context[-length:]
                following = [
                    text[i + length]
                    for text in texts
                    for i in range(len(text) - length)
                    if text[i : i + length] == wanted
                ]
                if following:
                    found[source, order] = following
        return found

    def cell(self, witness, following, token):
        support = len(following)
        bucket = sum(support > edge for edge in (1, 2, 4, 9, 49, 199))
        count = following.count(token)
        share = float(np.float32(count) / np.float32(support))
        edges = (0.02, 0.06, 0.15, 0.3)
        kind = 1 + sum(share > e for e in edges) + (share >= 0.5) + (share > 0.7) + (share > 0.999)
        if not count:
            kind = 9 if len(set(following)) == 1 else 0
        return (*witness, bucket, kind, int(following[-1] == token))

    def inputs(self, witnesses, token):
        x = np.zeros(WEIGHT_SHAPE[1])
        for witness, following in witnesses.items():
            p = self.cells[self.cell(witness, following, token)][0]
            p = min(max(p, 0.0005), 0.9995)
            x[witness[0] * ORDERS + witness[1]] = math.log(p / (1 - p))
        named = {source for (source, _), following in witnesses.items() if token in following}
        x[BOTH], x[BIAS] = 0 in named and len(named) > 1, 1
        return x

    def groups(self, witnesses):
        text = max((order + 1 for source, order in witnesses if source == 0), default=0)
        other = max((order + 1 for source, order in witnesses if source > 0), default=0)
        return [0, 1 + other, 2 + ORDERS + text]

    def probabilities(self, witnesses, tokens):
        weights = self.weights[self.groups(witnesses)].sum(0)
        scores = np.array([weights @ self.inputs(witnesses, token) for token in tokens])
        odds = np.exp(scores)
        return odds / (1 + odds.sum())

    def learn(self, witnesses, tokens, right):
        probs = self.probabilities(witnesses, tokens)
        x = np.array([self.inputs(witnesses, token) for token in tokens])
        slope = self.rate * (np.array([t == right for t in tokens]) - probs) @ x
        for group in self.groups(witnesses):
            self.weights[group] += slope
        for witness, following in witnesses.items():
            # Candidates that the witness names come first; the others share a cell.
            for token in sorted(tokens, key=lambda token: token not in following):
                cell = self.cells[self.cell(witness, following, token)]
                cell[1] = min(cell[1] + 1, 400)
                cell[0] += ((token == right) - cell[0]) / (cell[1] + 1.5)


few = st.lists(st.integers(0, 4), min_size=2, max_size=30)


def started(memory, text, corpus):
    """Trees, sequences and context of a text, and what a plain reader sees."""
    own = SuffixTree()
    sequence = own.add_sequence()
    own.extend(sequence, array(text))
    trees = (own, grown(memory) if memory else None, grown(corpus) if corpus else None)
    return trees, (sequence, None, None), array(text), [[text], memory, corpus]


@settings(max_examples=150, deadline=None)
@given(st.lists(few, max_size=3), few, st.lists(few, max_size=2))
def test_probabilities_are_those_of_the_definition(memory, text, corpus):
    trees, sequences, context, sources = started(memory, text, corpus)
    cells, weights = mixture()
    draft = Mixer(cells, weights).draft(trees, sequences, context, 5, vocab_size=VOCABULARY)
    plain = Plain(cells, weights)
    witnesses = plain.witnesses(sources, text)
    tokens = sorted({token for following in witnesses.values() for token in following})
    expected = dict(zip(tokens, plain.probabilities(witnesses, tokens), strict=True))
    found = {
        token: prob for token, parent, prob in zip(*map(list, draft[:3]), strict=True) if parent < 0
    }
    assert set(found) <= set(expected)
    for token, prob in found.items():
        assert prob == pytest.approx(expected[token], rel=1e-3)
    assert all(expected[token] <= min(draft[2]) + 1e-6 for token in set(expected) - set(found))


@settings(max_examples=60, deadline=None)
@given(st.lists(few, max_size=2), few, st.integers(0, 5))
def test_learning_is_gradient_descent_on_the_coding_cost(memory, text, right):
    trees, sequences, context, sources = started(memory, text, [])
    cells, weights = mixture()
    mixer, plain = Mixer(cells, weights, 0.1), Plain(cells, weights, 0.1)
    mixer.learn(trees, sequences, context, array([right]), vocab_size=VOCABULARY)
    witnesses = plain.witnesses(sources, text)
    tokens = list({token: None for following in witnesses.values() for token in following})
    if tokens:
        plain.learn(witnesses, tokens, right)
    assert np.allclose(mixer.weights, plain.weights, atol=1e-4)
    assert np.allclose(mixer.cells[..., 1], plain.cells[..., 1])
    # Trials that share a cell are counted together, where one after another would differ a little.
    assert np.abs(mixer.cells[..., 0] - plain.cells[..., 0]).max() < 0.03


def test_learning_follows_the_text_it_is_given():
    """After 1 comes 2 or 3 in turn; the text goes on with 3 only."""
    trees, sequences, context, _ = started([], [1, 2, 1, 3, 1, 2, 1, 3, 1], [])
    mixer = Mixture.untrained().mixer()
    before = dict(zip(*_root(mixer.draft(trees, sequences, context, 8, vocab_size=9)), strict=True))
    for _ in range(200):
        mixer.learn(trees, sequences, context, array([3]), vocab_size=9)
    after = dict(zip(*_root(mixer.draft(trees, sequences, context, 8, vocab_size=9)), strict=True))
    assert after[3] > before[3] + 0.2
    assert after.get(2, 0) < before[2]


def _root(draft):
    tokens, parents, probs, _ = draft
    return tokens[parents < 0].tolist(), probs[parents < 0].tolist()


def test_the_latest_continuation_is_evidence():
    cells, weights = np.zeros((*CELL_SHAPE, 2), np.float32), np.zeros(WEIGHT_SHAPE, np.float32)
    cells[..., 0] = 0.5
    cells[..., 1, 0] = 0.9
    weights[0, :BOTH] = 1
    mixer = Mixer(cells, weights)
    for text, latest in (([1, 2, 1, 3, 1], 3), ([1, 3, 1, 2, 1], 2)):
        trees, sequences, context, _ = started([], text, [])
        tokens, probs = _root(mixer.draft(trees, sequences, context, 8, vocab_size=9))
        assert tokens[int(np.argmax(probs))] == latest


def test_the_latest_continuation_survives_a_removal():
    tree = grown([[1, 2], [1, 3, 9], [1, 2, 8]])
    tree.remove(2)
    tree.check_invariants()
    draft = (
        Mixture.untrained()
        .mixer()
        .draft((tree, None, None), (None, None, None), array([1]), 8, vocab_size=9)
    )
    assert set(draft[0].tolist()) == {2, 3}


def test_ids_outside_the_vocabulary_are_no_candidates():
    trees, sequences, context, _ = started([], [1, 7, 1, 2, 1], [])
    draft = Mixture.untrained().mixer().draft(trees, sequences, context, 8, vocab_size=7)
    assert 7 not in draft[0]
    assert 2 in draft[0]


def test_a_shape_of_another_version_is_refused():
    cells, weights = mixture()
    with pytest.raises(ValueError, match="cells and weights: expected shapes"):
        Mixer(cells[:1], weights)


def test_a_mixture_is_written_and_read(tmp_path):
    saved = Mixture(*mixture())
    saved.save(tmp_path / "mixture.npz")
    loaded = Mixture.load(tmp_path / "mixture.npz")
    assert (loaded.cells == saved.cells).all()
    assert (loaded.weights == saved.weights).all()


def test_what_is_shipped_is_small_and_knows_which_evidence_is_good():
    shipped = Mixture.trained()
    assert shipped.cells.nbytes + shipped.weights.nbytes <= 128 << 10
    text = list(range(100, 140))
    trees, sequences, context, _ = started([], [*text, *text[:30]], [])
    draft = shipped.mixer().draft(trees, sequences, context, 8, vocab_size=VOCABULARY)
    assert draft[0].tolist()[:4] == text[30:34]
    assert draft[2][0] > 0.9
