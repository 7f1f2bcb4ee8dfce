"""What a table of successors learns, against lists."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.structures import successors
from hf_retrieval_assist.types.token_tree import Forest

ROWS, KINDS = 5, 7
EDGES = np.array([0.02, 0.1, 0.2, 0.5, 0.85, 0.97], np.float32)
tokens = st.integers(-1, ROWS - 1)


@st.composite
def tables(draw):
    """Successors without repetition, unknown ones last, and their classes."""
    k = draw(st.integers(1, 4))
    rows = draw(
        st.lists(st.lists(st.integers(0, 9), max_size=k, unique=True), min_size=ROWS, max_size=ROWS)
    )
    classes = draw(st.lists(st.integers(0, 4 * KINDS - 1), min_size=ROWS * k, max_size=ROWS * k))
    table = [row + [-1] * (k - len(row)) for row in rows]
    return np.array(table, np.int32), np.array(classes, np.uint8).reshape(ROWS, k)


def replaced(old, old_classes, new, kinds):
    """Classes of a row's new successors."""
    stable = []
    for token in new:
        if token not in old:
            stable.append(0)
        elif token != old[0]:
            stable.append(1)
        else:
            stable.append(3 if old_classes[0] // KINDS >= 2 else 2)
    return [KINDS * level + kind for level, kind in zip(stable, kinds, strict=True)]


@given(tables(), st.data())
def test_rows_are_replaced_and_say_how_stable_they_are(given_table, data):
    table, classes = given_table
    k = table.shape[1]
    found = np.array(data.draw(st.lists(st.integers(0, ROWS - 1), unique=True)), np.int32)
    new, logits = (
        np.array(
            [data.draw(st.lists(values, min_size=k, max_size=k, unique=unique)) for _ in found],
            dtype,
        ).reshape(len(found), k)
        for values, unique, dtype in (
            (st.integers(0, 9), True, np.int32),
            (st.sampled_from([-3.0, 0.0, 0.5, 2.0, 9.0]), False, np.float32),
        )
    )
    logits = -np.sort(-logits, axis=1)
    weights = np.exp(logits)
    kinds = np.searchsorted(EDGES, weights / weights.sum(axis=1, keepdims=True))
    expected, expected_classes = table.tolist(), classes.tolist()
    for token, row, row_kinds in zip(found, new.tolist(), kinds.tolist(), strict=True):
        expected_classes[token] = replaced(expected[token], expected_classes[token], row, row_kinds)
        expected[token] = row
    successors.write(table, classes, found, new, logits, EDGES, KINDS)
    assert table.tolist() == expected
    assert classes.tolist() == expected_classes


@given(tables(), st.lists(tokens, max_size=30))
def test_what_followed_a_token_moves_to_the_front_of_its_row(given_table, text):
    table, classes = given_table
    k = table.shape[1]
    kinds = list(range(k))
    expected, expected_classes = table.tolist(), classes.tolist()
    for token, follower in pairwise(text):
        if token >= 0 and follower >= 0:
            row = expected[token]
            expected[token] = [follower, *(other for other in row if other != follower)][:k]
    for token in {token for token, follower in pairwise(text) if min(token, follower) >= 0}:
        expected_classes[token] = replaced(
            table[token].tolist(), expected_classes[token], expected[token], kinds
        )
    ids = np.array(text, np.int32)
    order = np.argsort(ids[:-1], kind="stable")
    successors.learn_text(table, classes, ids, ids[:-1], order, np.array(kinds, np.uint8), KINDS)
    assert table.tolist() == expected
    assert classes.tolist() == expected_classes


@given(tables(), tokens, st.integers(0, 12), st.data())
def test_a_draft_is_the_template_without_what_is_unknown(given_table, root, budget, data):
    """A root with k children, each of which has the likeliest one of its own; cut to size."""
    table, classes = given_table[0], given_table[1] % 4
    k = table.shape[1]
    parents = np.array([-1] * k + list(range(k)), np.int32)
    ranks = np.array([*range(k), *([0] * k)], np.int32)
    rates = np.array(data.draw(st.permutations([0.9, 0.6, 0.4, 0.2])), np.float32)
    expected = {}
    for rank in range(k):
        if root < 0 or (child := int(table[root, rank])) < 0:
            continue
        expected[child,] = rates[classes[root, rank]]
        if child < ROWS and (below := int(table[child, 0])) >= 0:
            expected[child, below] = expected[child,] * rates[classes[child, 0]]
    template = successors.Template(parents, ranks, rates)
    roots = np.array([root, root], np.int32)
    tree, alone = Forest(*successors.draft(table, classes, roots, np.array([budget, 1]), template))
    assert len(alone) == min(1, len(expected))
    assert tree.fault(1 << 30, 1 << 30) is None
    assert len(tree) == min(budget, len(expected))
    found = {tuple(tree.token_ids[tree.path(i)].tolist()): tree.probs[i] for i in range(len(tree))}
    assert found == {path: expected[path] for path in found}
    left = [prob for path, prob in expected.items() if path not in found]
    assert min(found.values(), default=1) >= max(left, default=0)


def test_what_does_not_fit_the_table_is_refused():
    table, classes = np.zeros((3, 2), np.int32), np.zeros((3, 2), np.uint8)
    write, learn, draft = (
        partial(function, table)
        for function in (successors.write, successors.learn_text, successors.draft)
    )
    one, new = np.array([1], np.int32), (np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32))
    text, order, kinds = np.array([-1, 2, 0], np.int32), np.arange(2), np.zeros(2, np.uint8)
    sizes, rates = np.array([8]), np.ones(9, np.float32)
    template = successors.Template(one - 2, one - 1, rates)
    for wrong, message in (
        (lambda: write(classes, one - 2, *new, EDGES, KINDS), "tokens: expected 0 to 2"),
        (lambda: write(classes, one + 2, *new, EDGES, KINDS), "tokens: expected 0 to 2"),
        (lambda: write(classes, one, new[0][:, :1].copy(), *new[1:], EDGES, KINDS), "1 rows of 2"),
        (lambda: learn(classes, text + 1, text[:-1] + 1, order, kinds, KINDS), "-1 to 2, got 3"),
        (lambda: learn(classes, text, text[:-1], order[:1], kinds, KINDS), "2 tokens and 2 kinds"),
        (lambda: learn(classes, text, text[:1], order, kinds, KINDS), "got 2, 1 and 2"),
        (
            lambda: learn(classes[:, :1].copy(), text, text[:-1], order, kinds, KINDS),
            "classes: expected 2 columns, got 1",
        ),
        (lambda: draft(classes[:2], one, sizes, template), r"kinds: expected \[3, 2\]"),
        (lambda: draft(classes, one, sizes.repeat(2), template), "expected 1 budgets"),
        (lambda: successors.Template(one - 2, text[1:], rates), "1 of them, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
