"""The table of what was likely behind contexts, and drafts from it, against dictionaries."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.structures import logit_ngrams
from hf_retrieval_assist.structures.draws import Numbers
from hf_retrieval_assist.structures.logit_ngrams import BLIND, GREEDY, RACED, Ngrams, NgramText
from hf_retrieval_assist.types.token_tree import Forest
from tests.support.trees import ids, paths

ORDERS, TOP, VOCAB = 4, logit_ngrams.LIKELIEST, 40
MODES, _, STEPS = logit_ngrams.CLASS_SHAPE
RATES = np.linspace(0.05, 0.95, STEPS, dtype=np.float32)
ALL_RATES = np.broadcast_to(RATES, logit_ngrams.CLASS_SHAPE).ravel().copy()
LAW = (GREEDY, 0.0, 2**31 - 1, 1.0, 0.0)


def text_of(table, tokens, own=None):
    text = NgramText(table, own)
    text.extend(list(tokens))
    return text


def show(text, fed, likely, parents=None, end=None):
    """Let a text know what was likely behind fed tokens: ids and logits of each."""
    n = len(fed)
    parents = list(range(-1, n - 1)) if parents is None else parents
    rows, logits = (np.array(part) for part in zip(*likely, strict=True))
    logit_ngrams.learn(
        [text],
        np.array([0, n]),
        ids(*fed),
        ids(*parents),
        np.array([n - 1 if end is None else end]),
        np.arange(n),
        rows.astype(np.int32),
        logits.astype(np.float32),
    )


def drafted(text, budget=8, law=LAW, numbers=(), rates=ALL_RATES, vocab_size=VOCAB, least=0.0):
    arrays = ([text], np.array([budget]), [law], [list(numbers)], rates, vocab_size, least)
    return Forest(*logit_ngrams.draft(*arrays))[0]


def shares_of(logits):
    weights = np.exp(np.array(logits) - max(logits))
    return weights / weights.sum()


@given(st.data())
def test_contexts_keep_the_likeliest_and_a_new_occurrence_counts_half(data):
    """A greedy draft of one level shows the order of shares behind the longest context."""
    table, known = Ngrams(1024), {}
    for _ in range(data.draw(st.integers(1, 12))):
        context = tuple(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)))
        row = data.draw(st.lists(st.integers(3, 20), min_size=TOP, max_size=TOP, unique=True))
        logits = -np.cumsum(data.draw(st.lists(st.integers(1, 3), min_size=TOP, max_size=TOP)))
        show(text_of(table, context), context[-1:], [(row, logits)])
        new = dict(zip(row, shares_of(logits), strict=True))
        for order in range(1, len(context) + 1):
            old = known.get(context[-order:])
            mixed = new
            if old is not None:
                mixed = {i: 0.5 * old.get(i, 0) + 0.5 * new.get(i, 0) for i in old | new}
            best = sorted(mixed, key=lambda i: -round(mixed[i], 6))[:TOP]
            known[context[-order:]] = {i: mixed[i] for i in best}
    assert len(table) == len(known)
    context = data.draw(st.sampled_from(sorted(known)))
    expected, rest = {}, 1.0
    for order in range(len(context), 0, -1):
        for token, share in known[context[-order:]].items():
            expected[token] = expected.get(token, 0) + 0.45 * rest * share
        rest *= 0.55
    tree = drafted(text_of(table, context), 400)
    roots = tree.token_ids[tree.parents < 0].tolist()
    least = 0.001 * sum(expected.values())
    near = {token for token, share in expected.items() if abs(share - least) < 1e-4 * least}
    assert {token for token, share in expected.items() if share > least} ^ {*roots} <= near
    # Equal shares may come in any order.
    assert (np.diff([expected[token] for token in roots]) <= 1e-6).all()


def test_what_was_nearly_the_last_token_may_come_next():
    table = Ngrams(1024)
    text = text_of(table, [5])
    show(text, [5], [([8, 9, 6], [2.0, 1.0, 0.0])])
    text.extend([9])
    tree = drafted(text, 2)
    assert paths(tree) == [(8,), (6,)]  # not 9, which it was
    assert (tree.classes // STEPS == 0).all()
    text.forget_last()
    assert len(drafted(text)) == 0
    # A drafted token's own siblings are likely below it, too.
    show(text_of(table, [8]), [8], [([20, 21], [1.0, 0.0])])
    found = paths(drafted(text_of(table, [5]), 60))
    assert {(8, 20), (8, 9), (8, 20, 21)} <= {*found}
    assert (8, 20, 8) not in found


def test_tables_grow_to_their_bound_and_the_oldest_give_way():
    table = Ngrams(2048)
    assert table.held == 1024
    for token in range(VOCAB * 100):
        show(text_of(table, [token]), [token], [([1, 2], [1.0, 0.0])])
    assert table.held == 2048
    assert 1900 < len(table) <= 2048
    assert table.nbytes == 2048 * 92
    newest = [len(drafted(text_of(table, [VOCAB * 100 - i]), 1)) for i in range(1, 501)]
    assert sum(newest) > 490
    assert sum(len(drafted(text_of(table, [i]), 1)) for i in range(500)) < 50


@given(st.integers(0, 10**6), st.sampled_from([0.5, 1.0, 3.0]))
def test_raced_drafts_put_the_shares_and_the_draws_numbers_together(seed, temperature):
    rng = np.random.default_rng(seed)
    table, numbers = Ngrams(64), Numbers(VOCAB)
    state = np.zeros(5056, np.uint8)
    state[8:12] = np.frombuffer(np.int32(1).tobytes(), np.uint8)  # no word is left
    state[24 : 24 + 624 * 8] = rng.integers(0, 2**32, 624, dtype=np.uint64).view(np.uint8)
    numbers.begin(state)
    low = np.zeros(VOCAB, np.float32)
    _, gains = numbers.reaching(low, low, VOCAB)
    row = rng.permutation(VOCAB)[:TOP]
    logits = -np.sort(rng.exponential(2.0, TOP))
    show(text_of(table, [1]), [1], [(row, logits)])
    heat = min(temperature, 2.0)
    shares = np.log(shares_of(logits))
    scores = 0.75 * shares + 0.57 * heat * gains[row]
    kept = shares > math.log(0.001)
    expected = row[kept][np.argsort(-scores[kept])]
    rising = np.arange(1, STEPS + 1, dtype=np.float32) / (STEPS + 1)
    rates = np.broadcast_to(rising, logit_ngrams.CLASS_SHAPE).ravel().copy()
    law = (RACED, temperature, 2**31 - 1, 1.0, 0.0)
    text = text_of(table, [1])
    tree = drafted(text, TOP, law, [numbers.words], rates)
    found = tree.token_ids.tolist()
    assert (tree.parents < 0).all()  # as deep as numbers are known
    assert (tree.classes // (STEPS * (ORDERS + 1)) == RACED).all()
    odds = np.append(np.exp(scores[kept]), math.exp(-0.2 + heat * heat * 1.5))
    chances = dict(zip(row[kept].tolist(), odds / odds.sum(), strict=False))
    steps = np.searchsorted(logit_ngrams.RATE_EDGES, [chances[token] for token in found])
    assert np.abs(tree.classes % STEPS - steps).max(initial=0) <= 1
    assert found[0] == expected[0] or abs(np.diff(np.sort(scores[kept])[-2:])[0]) < 1e-3
    assert set(found) == set(expected.tolist())
    blind = drafted(text, 1, (BLIND, *law[1:]))
    assert blind.token_ids.tolist() == [row[0]]


@pytest.mark.parametrize(
    ("warpers", "kept"),
    [
        ((2, 1.0, 0.0), 2),
        ((50, 0.6, 0.0), 2),
        ((50, 1.0, 0.3), 3),
        ((50, 1.0, 0.9), 1),
        ((50, 0.01, 0.0), 1),
    ],
)
def test_what_warpers_remove_is_not_drafted(warpers, kept):
    """Shares of 0.4, 0.3, 0.2 and 0.1."""
    table = Ngrams(64)
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    show(text_of(table, [1]), [1], [([8, 9, 5, 6], logits)])
    tree = drafted(text_of(table, [1]), 9, (BLIND, 1.0, *warpers))
    assert tree.token_ids[tree.parents < 0].tolist() == [8, 9, 5, 6][:kept]


def test_drafts_are_best_first_within_their_bounds():
    table = Ngrams(1024)
    rng = np.random.default_rng(1)
    for token in range(VOCAB):
        row = rng.permutation(VOCAB + 5)[:TOP]  # some are no tokens of the vocabulary
        show(text_of(table, [token]), [token], [(row, -np.sort(rng.exponential(2.0, TOP)))])
    texts = [text_of(table, [token]) for token in range(3)]
    budgets = np.array([0, 5, 30])
    forest = Forest(
        *logit_ngrams.draft(texts, budgets, [LAW] * 3, [[]] * 3, ALL_RATES, VOCAB, 0.01)
    )
    assert forest.sizes == budgets.tolist()
    for tree in forest:
        assert tree.fault(VOCAB, len(ALL_RATES)) is None
        assert (tree.probs >= 0.01).all()
        above = np.append(tree.probs, np.float32(1))[tree.parents]
        assert (tree.probs == above * ALL_RATES[tree.classes]).all()
        assert (np.diff(tree.probs) <= 1e-6).all()


def test_rows_without_numbers_teach_nothing():
    table = Ngrams(64)
    for fault in (math.nan, math.inf, -math.inf):
        show(text_of(table, [1]), [1], [([8, 9], [fault, 0.0])])
    assert len(table) == 0


def test_what_does_not_fit_is_refused():
    table = Ngrams(64)
    text = text_of(table, [1])
    numbers = Numbers(3)
    numbers.begin(torch.Generator().get_state().numpy())
    show(text, [1], [([8, 9], [1.0, 0.0])])
    raced = (RACED, 1.0, 50, 1.0, 0.0)
    row = [([8, 9], [1.0, 0.0])]
    for wrong, message in (
        (lambda: Ngrams(7), "power of 2 from 8 on, got 7"),
        (lambda: Ngrams(48), "power of 2 from 8 on, got 48"),
        (lambda: drafted(text, rates=ALL_RATES[1:]), "rates: expected 180 of them, got 179"),
        (lambda: drafted(text, law=(3, *LAW[1:])), "laws: expected a mode"),
        (lambda: drafted(text, law=(BLIND, *LAW[1:])), "positive temperature"),
        (lambda: drafted(text, law=raced, numbers=[numbers.words]), "expected 80 words, got 6"),
        (
            lambda: logit_ngrams.draft([text], np.array([1]), [], [[]], ALL_RATES, VOCAB, 0.0),
            "laws, numbers: expected 1 of each",
        ),
        (lambda: show(text, [1], row, parents=[0]), "parents: expected -1 to -1, got 0"),
        (lambda: show(text, [1, 2], row * 2, parents=[-1, 1]), "parents: expected -1 to 0, got 1"),
        (lambda: show(text, [1], row * 2, parents=[-1]), "nodes|rows"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
