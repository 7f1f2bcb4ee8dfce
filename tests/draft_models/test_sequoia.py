"""Sequoia: its trees against the paper's figures, and its sampling against the target's law."""

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.draft_models.residual import child_acceptance, draw_children
from hf_retrieval_assist.draft_models.sequoia import AcceptanceCounts, OptimalTrees, ShapeChooser
from hf_retrieval_assist.types.token_tree import TokenTree
from tests.support import trees
from tests.support.laws import assert_near
from tests.support.rounding import near

EXAMPLES = json.loads((Path(__file__).parents[1] / "fixtures/sequoia_examples.json").read_text())
TREES = EXAMPLES["trees"]


def paths(shape):
    """0-based child indices from the root to every node, in one order."""
    tree = TokenTree.build(shape.ranks, shape.parents, np.ones(len(shape)))
    return sorted(map(list, trees.paths(tree)))


def expected_tokens(shape, acceptance):
    """F(T) of the paper: the sum of the acceptance along every path, and the root's term 1."""
    return 1.0 + sum(np.prod(np.take(acceptance, path)) for path in paths(shape))


def check_invariants(shape):
    assert (shape.parents < np.arange(len(shape))).all(), "a child before its parent"
    assert (np.diff(shape.parents) >= 0).all(), "not level by level"
    for parent in np.unique(shape.parents):
        ranks = shape.ranks[shape.parents == parent]
        assert ranks.tolist() == list(range(len(ranks))), "siblings that skip a rank"


def check_case(shape, expected, acceptance):
    check_invariants(shape)
    assert expected_tokens(shape, acceptance) == pytest.approx(expected["F"], abs=1e-12)
    if expected["unique"]:
        assert paths(shape) == sorted(expected["paths"])


@pytest.mark.parametrize("case", TREES, ids=lambda case: f"{case['p'][:2]}-{case['n']}")
def test_worked_examples(case):
    nodes, vector = case["n"], case["p"]
    bounds = {int(levels): expected for levels, expected in case["bounded"].items()}
    whole, bounded = OptimalTrees(vector, nodes), OptimalTrees(vector, nodes, max(bounds))
    check_case(whole.tree(nodes), case["unbounded"], vector)
    assert len(whole.tree(nodes)) == nodes - 1
    assert whole.values[nodes, -1] == pytest.approx(case["unbounded"]["F"], abs=1e-12)
    for levels, expected in bounds.items():
        value = bounded.values[nodes, levels]
        if expected is None:
            assert value == -np.inf
            continue
        assert value == pytest.approx(expected["F"], abs=1e-12)
        shape = bounded.tree(nodes, levels)
        assert shape.levels <= levels
        check_case(shape, expected, vector)


def test_an_infeasible_size_gives_the_best_smaller_tree():
    shape = OptimalTrees([0.5, 0.3], 4, 2).tree(4)
    assert paths(shape) == [[0], [1]]


@st.composite
def vectors(draw):
    weights = np.array(draw(st.lists(st.floats(0, 1), min_size=1, max_size=5)))
    return weights / max(weights.sum(), 1.0)


@given(vectors(), st.integers(1, 12), st.integers(1, 5))
def test_values_are_those_of_the_trees_and_grow_with_size_and_depth(vector, nodes, levels):
    solved = OptimalTrees(vector, nodes, levels)
    for size in range(1, nodes + 1):
        for bound in range(1, levels + 1):
            value = solved.values[size, bound]
            shape = solved.tree(size, bound)
            check_invariants(shape)
            assert shape.levels <= bound
            if np.isfinite(value):
                assert len(shape) == size - 1
                assert expected_tokens(shape, vector) == near(value)
    # A deeper bound only adds trees, and so does a larger size where it is feasible.
    feasible = np.where(np.isfinite(solved.values), solved.values, 0)
    assert (np.diff(feasible[1:, 1:], axis=1) >= 0).all()
    for column in feasible[1:, 1:].T:
        assert (np.diff(column[column > 0]) >= -1e-12).all()


SPEEDUP = EXAMPLES["speedup"]
TIMES = list(SPEEDUP["t_of_n"].values())


def test_speedups_and_the_fastest_tree():
    solved = OptimalTrees(SPEEDUP["p"], 7, 7)
    rates = solved.speedups(TIMES, SPEEDUP["c"])
    for cell, expected in SPEEDUP["grid"].items():
        assert rates[tuple(map(int, cell.split(",")))] == pytest.approx(expected, abs=1e-6)
    shape = solved.fastest(TIMES, SPEEDUP["c"])
    assert f"{1 + len(shape)},{shape.levels}" == SPEEDUP["argmax"]
    milliseconds = [30 * t for t in TIMES]
    assert paths(solved.fastest(milliseconds, 30 * SPEEDUP["c"])) == paths(shape)
    # A slow draft model is not asked.
    assert len(solved.fastest(TIMES, 10.0)) == 0


def test_acceptance_is_measured_though_nodes_have_few_children():
    truth = np.array([0.5, 0.2, 0.1])
    counts, rng = AcceptanceCounts(3), np.random.default_rng(0)
    assert counts.vector[0] == near(0.6)
    for _ in range(6000):
        rank = int(rng.choice(4, p=[*truth, 0.2]))
        children = int(rng.integers(1, 4))
        counts.observe(children, rank if rank < children else -1)
    assert counts.vector == pytest.approx(truth, abs=0.04)
    assert counts.vector.sum() <= 1


def test_acceptance_follows_a_change():
    counts = AcceptanceCounts(2)
    for _ in range(5000):
        counts.observe(2, 0)
    assert (counts.vector > 0).all()  # no child is ever ruled out
    for _ in range(5000):
        counts.observe(2, 1)
    assert counts.vector[1] > 0.85


def test_a_draft_model_that_cannot_pay_is_known_before_its_first_draft():
    seconds = np.linspace(0.04, 0.06, 16)
    like_the_target, small, unknown = (ShapeChooser(4, 16, 4, share) for share in (1.0, 0.02, 0.0))
    for chooser in (like_the_target, small, unknown):
        chooser.set_seconds(seconds)
    assert len(like_the_target.shape()) == 0
    assert small.shape().levels > 2
    assert unknown.shape().levels > 2
    assert (like_the_target.draft_seconds, unknown.draft_seconds) == (0.04, 0.0)
    # What was timed counts from the next draft on.
    small.observe_pass(0.5)
    assert small.draft_seconds == 0.5
    assert len(small.shape()) == 0
    like_the_target.observe_pass(1e-4)
    assert len(like_the_target.shape()) > 0


def test_one_budget_has_one_shape_until_the_tree_is_solved_for_again():
    chooser = ShapeChooser(4, 16, 4)
    small, smaller = chooser.shape(6), chooser.shape(3)
    assert (len(small), len(smaller)) == (6, 3)
    assert chooser.shape(6) is small
    assert chooser.shape(3) is smaller
    for _ in range(500):
        chooser.observe(4, 3)
    shapes = {id(shape): shape for shape in (chooser.shape(6) for _ in range(100))}
    assert len(shapes) == 2


def draw_probability(draft, order):
    """Probability of drawing `order` without replacement; uniform once Q's support is used up."""
    probability, left = 1.0, draft.clone()
    remaining = torch.ones_like(left)
    for token in order:
        weights = left if left.sum() > 0 else remaining
        probability *= float(weights[token] / weights.sum())
        left[token] = remaining[token] = 0.0
    return probability


def enumerate_law(target, draft, count):
    """Output distribution and acceptance by rank, over all draws and all decisions."""
    law, accepted = torch.zeros_like(target), np.zeros(count)
    for order in permutations(range(len(target)), count):
        weight = draw_probability(draft, order)
        if weight == 0:
            continue
        rates, otherwise = child_acceptance(target, draft, torch.tensor(order, dtype=torch.long))
        for rank, (token, rate) in enumerate(zip(order, rates.tolist(), strict=True)):
            law[token] += weight * rate
            accepted[rank] += weight * rate
            weight *= 1 - rate
        law += weight * otherwise
    return law, accepted


@st.composite
def distributions(draw, size=4):
    kinds = st.sampled_from([0.0, 1e-30, 1e-9, 0.1, 0.5, 1.0, 3.0])
    weights = draw(st.lists(kinds, min_size=size, max_size=size).filter(any))
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


@given(distributions(), distributions(), st.integers(0, 4))
def test_the_law_is_the_targets(target, draft, count):
    law, accepted = enumerate_law(target, draft, count)
    assert law == pytest.approx(target, abs=1e-9)
    if count == 4:
        assert accepted.sum() == near(1)


def test_float32_rows_of_a_large_vocabulary():
    torch.manual_seed(0)
    target, draft = torch.softmax(6 * torch.randn(2, 3, 5000), dim=-1)
    draft[2] = target[2] * 1.0001  # rounding that is no rate above 1
    children = draw_children(draft, 16)
    rates, otherwise = child_acceptance(target, draft, children)
    assert rates.shape == (3, 16)
    assert ((rates >= 0) & (rates <= 1)).all()
    assert otherwise.sum(-1) == near(torch.ones(3, dtype=torch.float64))
    assert (otherwise >= 0).all()
    for row in range(3):
        alone = child_acceptance(target[row], draft[row], children[row])
        assert all(map(torch.equal, alone, (rates[row], otherwise[row])))


@pytest.mark.parametrize("law", [[0.6, 0.3, 0.1, 0.0], [0.0, 1.0, 0.0, 0.0]])
def test_draws_are_without_replacement_in_order_and_uniform_beyond_the_support(law):
    draft, generator = torch.tensor(law), torch.Generator().manual_seed(0)
    drawn = draw_children(draft.expand(20000, 4), 4, generator)
    assert torch.equal(drawn.sort(-1).values, torch.arange(4).expand(20000, 4))
    orders = list(permutations(range(4)))
    numbers = {order: i for i, order in enumerate(orders)}
    observed = np.bincount([numbers[tuple(row)] for row in drawn.tolist()], minlength=24)
    assert_near(observed, np.array([draw_probability(draft, order) for order in orders]))
