from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation import KnownCost
from hf_retrieval_assist.policy.cost_model import CostModel, CostView
from hf_retrieval_assist.policy.planner import Planner
from hf_retrieval_assist.types.token_tree import Limits, TokenTree
from tests.support.fixed_costs import CURVES
from tests.support.trees import trees


def chain(rate, length):
    return TokenTree.chain(np.arange(length), rate ** np.arange(1, length + 1))


def subtrees(tree):
    """Every set of nodes that holds with a node its parent."""
    sets = [()]
    for node in range(len(tree)):
        parent = int(tree.parents[node])
        sets += [(*kept, node) for kept in sets if parent < 0 or parent in kept]
    return sets


@given(
    trees(8),
    st.sampled_from(sorted(CURVES)),
    st.integers(0, 3),
    st.sampled_from([(), (1, 2, 4, 8)]),
)
def test_no_subtree_brings_more_tokens_per_second(tree, name, extra, widths):
    """Whether a forward feeds what is planned, or is filled up to one of some widths."""
    cost = CostView(KnownCost(CURVES[name]), widths)
    curve = cost.seconds

    def rate(nodes):
        gain = 1 + sum(float(tree.probs[node]) for node in nodes)
        return gain / curve(1 + extra + len(nodes))

    kept = Planner().plan([tree], cost, Limits(backlog=extra))[0]
    assert kept.fault(1 << 30, 1 << 30) is None
    best = max(map(rate, subtrees(tree)))
    assert rate(kept.follow([]).tolist()) <= best
    gain = 1 + float(kept.probs.sum())
    assert gain / curve(1 + extra + len(kept)) == pytest.approx(best, rel=1e-5)


@given(st.lists(trees(8), min_size=1, max_size=3), st.sampled_from(sorted(CURVES)))
def test_a_batch_shares_the_width_that_is_best_for_all(rows, name):
    curve = CURVES[name]
    kept = Planner().plan(rows, KnownCost(curve))

    def rate(width):
        return sum(1 + np.sort(row.probs)[::-1][:width].sum() for row in rows) / curve(1 + width)

    best = max(rate(width) for width in range(max(map(len, rows)) + 1))
    gain = sum(1 + row.probs.sum() for row in kept)
    assert gain / curve(1 + max(map(len, kept))) == pytest.approx(best, rel=1e-5)
    for row in kept:
        assert row.fault(1 << 30, 1 << 30) is None


def test_budgets():
    tree, cost = chain(0.5, 32), KnownCost(CURVES["cpu"])
    assert len(Planner(budget=5).plan([tree], cost)[0]) == 5
    assert len(Planner(budget=0).plan([tree], cost)[0]) == 0
    assert [Planner(budget=b).request() for b in ("auto", 7)] == [64, 7]


@pytest.mark.parametrize("planner", [Planner(), Planner(100)])
@pytest.mark.parametrize("cost", [None, KnownCost(CURVES["flat"])])
def test_no_more_is_kept_than_a_forward_can_verify(planner, cost):
    drafts = [chain(0.9, n) for n in (30, 2, 30, 0)]

    def sizes(**limits):
        return [len(tree) for tree in planner.plan(drafts, cost, Limits(**limits))]

    assert sizes() == [30, 2, 30, 0]
    assert sizes(nodes=15) == [15, 2, 15, 0]
    assert sizes(depths=[9, None, 1, None]) == [9, 2, 1, 0]
    packed = sizes(packed=True, total=41)
    assert sum(packed) == 41
    assert packed[1] == 2
    assert abs(packed[0] - packed[2]) == 1


def test_only_the_likeliest_path_is_kept_where_trees_cannot_be_verified():
    tree = TokenTree.build([1, 2, 3], [-1, -1, 1], [0.5, 0.4, 0.4])
    (kept,) = Planner(budget=8).plan([tree], None, Limits(chains=True))
    assert kept.token_ids.tolist() == [2, 3]


def test_drafters_are_asked_for_no_more_than_could_pay():
    planner = Planner(max_nodes=96)
    curves = (CURVES["flat"], CURVES["step"], lambda n: 0.02 * n**2)
    assert [planner.request(KnownCost(curve)) for curve in curves] == [96, 63, 0]


class Run:
    """Steps with noisy timings under a true curve, and the tokens per second they got."""

    def __init__(self, seed=0):
        self.cost = CostModel()
        self.planner = Planner(max_nodes=96)
        self.random = np.random.default_rng(seed)

    def steps(self, curve, rates, count):
        """Mean share of the time lost against a planner who knows the curve, and the sizes."""
        knowing, known = Planner(), KnownCost(curve)
        lost = spent = 0.0
        sizes = []
        for _ in range(count):
            tree = chain(self.random.choice(rates), 96)
            kept = self.planner.plan([tree], self.cost)[0]
            seconds = curve(1 + len(kept))
            noise = np.exp(self.random.normal(0, 0.05)) * (4 if self.random.random() < 0.02 else 1)
            self.cost.observe(1 + len(kept), seconds * noise)
            best_kept = knowing.plan([tree], known)[0]
            best = (1 + float(best_kept.probs.sum())) / curve(1 + len(best_kept))
            lost += seconds - (1 + float(kept.probs.sum())) / best
            spent += seconds
            sizes.append(len(kept))
        return lost / spent, sizes


MIXED = (0.98, 0.8, 0.4, 0.1)


def mean_loss(before, after):
    """The loss of 200 steps under the curve `after`, 60 steps after it followed on `before`."""
    runs = [Run(seed=seed) for seed in range(4)]
    for run in runs:
        run.steps(CURVES[before], MIXED, 200)
        run.steps(CURVES[after], MIXED, 60)
    return np.mean([run.steps(CURVES[after], MIXED, 200)[0] for run in runs])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *((name, name) for name in ("flat", "linear", "step", "cpu")),
        *(("flat", "linear"), ("linear", "flat"), ("flat", "step"), ("cpu", "flat")),
    ],
)
def test_finds_the_right_sizes_also_of_another_curve(before, after):
    assert mean_loss(before, after) < 0.03


@pytest.mark.parametrize("name", ["linear", "cpu"])
def test_trials_cost_less_than_one_percent(name):
    run = Run()
    lost, sizes = run.steps(CURVES[name], [0.1], 1000)
    assert max(sizes) > 0
    assert lost < 0.01


def test_drafts_again_when_the_text_turns_predictable():
    run = Run()
    _, sizes = run.steps(CURVES["cpu"], [0.1], 300)
    assert np.median(sizes) == 0
    _, sizes = run.steps(CURVES["cpu"], [0.98], 10)
    assert min(sizes) > 8


@given(st.lists(trees(4), min_size=2, max_size=3), st.sampled_from(sorted(CURVES)))
def test_no_other_share_of_packed_rows_brings_more_tokens_per_second(rows, name):
    curve = CURVES[name]

    def rate(choice):
        gain = sum(
            1 + sum(float(tree.probs[node]) for node in kept)
            for tree, kept in zip(rows, choice, strict=True)
        )
        return gain / curve(sum(1 + len(kept) for kept in choice))

    cost = CostView(KnownCost(curve), rows=len(rows))
    kept = Planner().plan(rows, cost, Limits(packed=True))
    gain = len(rows) + sum(float(tree.probs.sum()) for tree in kept)
    best = max(map(rate, product(*map(subtrees, rows))))
    assert gain / curve(len(rows) + sum(map(len, kept))) == pytest.approx(best, rel=1e-5)


def test_many_rows_share_what_is_asked_for():
    flat = KnownCost(CURVES["flat"])
    asked = [Planner().request(CostView(flat, rows=rows)) for rows in (1, 2, 8, 64)]
    assert asked == [255, 255, 63, 16]
