"""Mixing of contexts against its definition, written down in Python."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_retrieval_assist.drafters.suffix import Mixture
from hf_retrieval_assist.structures.suffix_tree import (
    CELL_SHAPE,
    COPY_SHAPE,
    WEIGHT_SHAPE,
    Mixer,
    SuffixTree,
    Text,
    extend_texts,
)
from hf_retrieval_assist.types.token_tree import TokenTree
from tests.support.rounding import near
from tests.support.trees import array

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 24)
ORDERS = len(LENGTHS)
GAP = ORDERS  # the kind of context that follows the lengths
KINDS, COPY_STATES = ORDERS + 1, 3
COPY, BOTH, BIAS = 3 * KINDS, 3 * KINDS + 2, 3 * KINDS + 3
VOCABULARY = 1000


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
    copy_cells = np.zeros((*COPY_SHAPE, 2), np.float32)
    copy_cells[..., 0] = rng.uniform(0.01, 0.99, COPY_SHAPE)
    return cells, copy_cells, rng.normal(0, 0.2, WEIGHT_SHAPE).astype(np.float32)


class Plain:
    """One step of mixing over whole texts, for texts so short that nothing is left out."""

    def __init__(self, cells, copy_cells, weights, rate=0.002):
        self.cells, self.copy_cells = cells.astype(float), copy_cells.astype(float)
        self.weights, self.rate = weights.astype(float), rate

    def witnesses(self, sources, context):
        """(source, kind) -> continuations in order of time, for each that has any."""
        found = {}
        for source, texts in enumerate(sources):
            for kind in range(KINDS):
                wanted, gap = (context[-3:-1], 1) if kind == GAP else (context[-LENGTHS[kind] :], 0)
                if len(context) < (3 if gap else LENGTHS[kind]):
                    continue
                length = len(wanted)
                following = [
                    text[i + length + gap]
                    for text in texts
                    for i in range(len(text) - length - gap)
                    if text[i : i + length] == wanted
                ]
                if following:
                    found[source, kind] = following
        # The longest alone of lengths that occur alike in the text itself.
        for kind in range(ORDERS - 1):
            if len(found.get((0, kind), ())) == len(found.get((0, kind + 1), [None] * 99)):
                del found[0, kind]
        return found

    def copied(self, witnesses):
        """The tokens copied and the one that comes next, where the text copies from itself."""
        order = max((k for source, k in witnesses if source == 0 and k != GAP), default=-1)
        if order < 0 or LENGTHS[order] < 3:
            return 0, None
        return LENGTHS[order], witnesses[0, order][-1]

    def cell(self, witness, following, token):
        support = len(following)
        bucket = sum(support > edge for edge in (1, 2, 4, 9, 49, 199))
        count = following.count(token)
        share = float(np.float32(count) / np.float32(support))
        edges = (0.02, 0.06, 0.15, 0.3)
        kind = 1 + sum(share > e for e in edges) + (share >= 0.5) + (share > 0.7) + (share > 0.999)
        if not count:
            kind = 9 if len(set(following)) == 1 else 0
        return self.cells[(*witness, bucket, kind, int(following[-1] == token))]

    def copy_cell(self, length, follows):
        bucket = sum(length > edge for edge in (2, 4, 8, 16, 32, 80, 250))
        return self.copy_cells[0, bucket * 4, int(follows)]

    def inputs(self, witnesses, token):
        x = np.zeros(WEIGHT_SHAPE[1])
        for witness, following in witnesses.items():
            x[witness[0] * KINDS + witness[1]] = logit(self.cell(witness, following, token)[0])
        length, copied = self.copied(witnesses)
        if length:
            x[COPY] = logit(self.copy_cell(length, token == copied)[0])
        named = {source for (source, _), following in witnesses.items() if token in following}
        x[BOTH], x[BIAS] = 0 in named and len(named) > 1, 1
        return x

    def groups(self, witnesses):
        orders = {(source, kind) for source, kind in witnesses if kind != GAP}
        text = max((order + 1 for source, order in orders if source == 0), default=0)
        other = max((order + 1 for source, order in orders if source > 0), default=0)
        state = 2 if self.copied(witnesses)[0] else 0
        return [0, 1 + other, 2 + ORDERS + COPY_STATES * text + state]

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
                self.count(self.cell(witness, following, token), token == right)
        length, copied = self.copied(witnesses)
        for token in tokens if length else []:
            self.count(self.copy_cell(length, token == copied), token == right)

    def count(self, cell, hit):
        cell[1] = min(cell[1] + 1, 400)
        cell[0] += (hit - cell[0]) / (cell[1] + 1.5)


def logit(p):
    p = min(max(p, 0.0005), 0.9995)
    return math.log(p / (1 - p))


few = st.lists(st.integers(0, 3), min_size=2, max_size=30)


def started(memory, text, corpus):
    """What a mixer is told of a text and its sources, and what a plain reader sees."""
    own = SuffixTree()
    sequence = own.add_sequence()
    own.extend(sequence, array(text))
    trees = grown(memory) if memory else None, grown(corpus) if corpus else None
    state = Text(own, sequence, array(text), VOCABULARY)
    return ([state], [trees[0]], [None], trees[1]), [[text], memory, corpus]


def beside(memory, context, vocab_size=VOCABULARY):
    """The same of a text that is drafted from a memory alone."""
    return [Text(None, None, array(context), vocab_size)], [memory], [None], None


def drafted(mixer, evidence, budget):
    """Token ids, parents, probabilities and classes."""
    *draft, offsets = mixer.draft(*evidence, [budget])
    assert offsets.tolist() == [0, len(draft[0])]
    return draft


def learn(mixer, evidence, tokens):
    mixer.learn(*evidence, array(tokens), np.array([0, len(tokens)]))


@settings(max_examples=150, deadline=None)
@given(st.lists(few, max_size=3), few, st.lists(few, max_size=2), st.integers(1, 40))
def test_probabilities_are_those_of_the_definition(memory, text, corpus, budget):
    evidence, sources = started(memory, text, corpus)
    learnt = mixture()
    draft = drafted(Mixer(*learnt), evidence, budget)
    assert TokenTree(*draft).fault(1 << 30, 1 << 30) is None
    assert len(draft[0]) == min(budget, len(drafted(Mixer(*learnt), evidence, 200)[0]))
    plain = Plain(*learnt)
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
@given(st.lists(few, min_size=1, max_size=3), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_below_a_node_is_what_would_be_drafted_behind_its_token(memory, context):
    """The texts are so short that every length has an order of its own."""
    tree, mixer = grown(memory), Mixer(*mixture())
    tokens, parents, probs, _ = drafted(mixer, beside(tree, context), 60)
    for node in np.flatnonzero(parents < 0):
        below = np.flatnonzero(parents == node)
        longer = drafted(mixer, beside(tree, [*context, int(tokens[node])]), 60)
        expected = dict(zip(*_root(longer), strict=True))
        for child in below:
            given_it = probs[child] / probs[node]
            assert given_it == pytest.approx(expected[tokens[child]], rel=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.lists(few, max_size=2), few, st.integers(0, 5))
def test_learning_is_gradient_descent_on_the_coding_cost(memory, text, right):
    evidence, sources = started(memory, text, [])
    learnt = mixture()
    mixer, plain = Mixer(*learnt, 0.1), Plain(*learnt, 0.1)
    learn(mixer, evidence, [right])
    witnesses = plain.witnesses(sources, text)
    tokens = list({token: None for following in witnesses.values() for token in following})
    if tokens:
        plain.learn(witnesses, tokens, right)
    assert np.allclose(mixer.weights, plain.weights, rtol=0, atol=1e-4)
    for mixed, defined in ((mixer.cells, plain.cells), (mixer.copy_cells, plain.copy_cells)):
        assert mixed[..., 1] == near(defined[..., 1])
    # Trials that share a cell are counted together, where one after another would differ a little.
    assert np.abs(mixer.cells[..., 0] - plain.cells[..., 0]).max() < 0.03


def _root(draft):
    tokens, parents, probs, _ = draft
    return tokens[parents < 0].tolist(), probs[parents < 0].tolist()


def test_what_is_shipped_is_small_and_knows_which_evidence_is_good():
    shipped = Mixture.trained()
    learnt = (shipped.cells, shipped.copy_cells, shipped.weights)
    assert sum(array.nbytes for array in learnt) <= 128 << 10
    text = list(range(100, 140))
    evidence, _ = started([], [*text, *text[:30]], [])
    draft = drafted(shipped.mixer(), evidence, 8)
    assert draft[0].tolist()[:4] == text[30:34]
    assert draft[2][0] > 0.85


def followed(text, prompt_length):
    """The shipped mixer, the evidence and the trees after a text that was learnt token by token."""
    mixer = Mixture.trained().mixer()
    evidence, _ = started([], text[:prompt_length], [])
    for token in text[prompt_length:]:
        learn(mixer, evidence, [token])
        extend_texts(evidence[0], array([token]), np.array([0, 1]))
    return mixer, evidence


FILE = list(range(100, 160))


@pytest.mark.parametrize(
    "changed",
    [
        [*FILE[:20], 500, *FILE[21:23]],
        [*FILE[:20], 500, 501, 502, *FILE[20:22]],
        [*FILE[:20], *FILE[24:26]],
    ],
    ids=["replaced", "put in", "left out"],
)
def test_a_copy_is_joined_again_after_a_change(changed):
    """The two tokens after the change stand elsewhere as well, and there last."""
    elsewhere = [*changed[-2:], 700, 701]
    mixer, evidence = followed([*FILE, *elsewhere, *changed], len(FILE) + len(elsewhere))
    draft = drafted(mixer, evidence, 12)
    here = FILE.index(changed[-1])
    assert draft[0][0] == FILE[here + 1]
    assert len(TokenTree(*draft).follow(FILE[here + 1 :])) > 3
    (text,) = evidence[0]
    known = text.tree.tokens(text.sequence)
    unled = [Text(text.tree, text.sequence, known, VOCABULARY)], *evidence[1:]
    fresh = drafted(mixer, unled, 12)
    assert draft[2][0] > dict(zip(*_root(fresh), strict=True)).get(FILE[here + 1], 0) + 0.02


def test_an_unknown_token_may_have_been_put_in():
    mixer, evidence = followed([*FILE, *FILE[:20], 500], len(FILE))
    tokens, _ = _root(drafted(mixer, evidence, 8))
    assert FILE[20] in tokens


def test_a_text_that_breaks_its_copies_is_trusted_less():
    """Two texts whose last tokens are alike: one copied up to there, the other changed much."""
    kept, broken = [*FILE, *FILE[:40]], [*FILE]
    for start in range(0, 40, 4):
        broken += [*FILE[start : start + 3], 500 + start]
    broken += FILE[40:44]
    mixer, evidence = followed(kept, len(FILE))
    steady = drafted(mixer, evidence, 1)
    mixer, evidence = followed(broken, len(FILE))
    shaken = drafted(mixer, evidence, 1)
    assert steady[2][0] > 0.95
    assert shaken[2][0] < steady[2][0] - 0.05


@settings(max_examples=50, deadline=None)
@given(st.lists(few, min_size=2, max_size=6), st.integers(0, 5))
def test_removal_takes_back_what_was_counted(texts, removed):
    """Drafts go by counts alone where the latest continuation, which is forgotten, says nothing."""
    removed %= len(texts)
    cells, *rest = mixture()
    cells[..., 1, :] = cells[..., 0, :]
    changed = grown(texts)
    changed.remove(removed)
    fresh = grown([text for number, text in enumerate(texts) if number != removed])
    for pair in {(text[i], text[i + 1]) for text in texts for i in range(len(text) - 3)}:
        found, expected = (
            dict(
                zip(*_root(drafted(Mixer(cells, *rest), beside(tree, [*pair, 50]), 9)), strict=True)
            )
            for tree in (changed, fresh)
        )
        assert found == near(expected)


changes = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 2), st.lists(st.integers(0, 2), max_size=9)),
        st.tuples(st.just("remove"), st.integers(0, 2), st.just([])),
    ),
    min_size=2,
    max_size=12,
)


def _same(draft, other):
    return all((a == b).all() for a, b in zip(draft, other, strict=True))


@settings(max_examples=150, deadline=None)
@given(changes, few)
def test_what_is_kept_of_a_node_is_what_would_be_read_anew(changes, text):
    """One mixer drafts from two memories after every change, another starts afresh each time."""
    own, _ = started([], text, [])
    memories, ids = [SuffixTree(6), SuffixTree(6)], {}
    lasting = Mixer(*mixture())
    for kind, slot, tokens in changes:
        memory = memories[slot % 2]
        if kind == "append":
            ids.setdefault(slot, memory.add_sequence() if slot not in ids else None)
            memory.extend(ids[slot], array(tokens))
        elif slot in ids:
            memory.remove(ids.pop(slot))
        for one in memories:
            evidence = own[0], [one], [None], None
            drafts = [drafted(m, evidence, 12) for m in (lasting, Mixer(*mixture()))]
            assert _same(*drafts)


@settings(max_examples=60, deadline=None)
@given(st.lists(few, max_size=2), st.lists(few, min_size=1, max_size=4), st.integers(0, 12))
def test_texts_side_by_side_are_drafted_as_each_by_itself(memory, texts, budget):
    """One call for all texts, some of which want no draft."""
    outputs = grown(memory) if memory else None
    each = [started([], text, [])[0][0][0] for text in texts]
    budgets = [budget * (number % 2) for number in range(len(texts))]
    together = Mixer(*mixture()).draft(
        each, [outputs] * len(each), [None] * len(each), None, budgets
    )
    *arrays, offsets = together
    for text, most, first, end in zip(each, budgets, offsets[:-1], offsets[1:], strict=True):
        alone = drafted(Mixer(*mixture()), ([text], [outputs], [None], None), most)
        assert _same([field[first:end] for field in arrays], alone)


def test_what_does_not_fit_together_is_refused():
    evidence, _ = started([[1, 2]], [1], [])
    (cells, *rest), mixer, one = mixture(), Mixture.trained().mixer(), array([3])
    for wrong, message in (
        (lambda: Mixer(cells[:1], *rest), "cells, copy_cells and weights: expected shapes"),
        (lambda: drafted(mixer, (*evidence[:2], [7], None), 4), "sequence: .* is here, got 7"),
        (lambda: mixer.draft(*evidence, [4, 4]), "budgets: expected 1 of them, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    for offsets in ([0], [0, 2], [0, 1, 1], [1, 1], [0, -1]):
        for learn_them in (partial(mixer.learn, *evidence), partial(extend_texts, evidence[0])):
            with pytest.raises(ValueError, match="offsets: expected"):
                learn_them(one, np.array(offsets))
