"""Planning for forwards that are filled up to a few widths."""

import numpy as np

from hf_retrieval_assist.planning.cost_model import CostModel
from hf_retrieval_assist.planning.cost_views import PackedCost, SteppedCost, stepped
from hf_retrieval_assist.planning.planner import Planner
from hf_retrieval_assist.token_tree import TokenTree

LINEAR = CostModel.fixed(lambda n: 1.0 + 0.1 * n)


def test_the_curve_stands_at_the_next_width():
    cost = SteppedCost(LINEAR, (1, 2, 4, 8))
    widths = [1, 2, 4, 4, 8, 8, 8, 8, 9, 10]
    assert np.allclose(cost.curve(10), [1.0 + 0.1 * n for n in widths])
    assert np.isclose(cost.seconds(3), cost.seconds(4))
    assert stepped(LINEAR, ()) is LINEAR


def test_what_it_measures_is_what_was_measured():
    measured = CostModel("cuda")
    for _ in range(5):
        measured.observe(4, 0.02)
    cost = SteppedCost(measured, (1, 4))
    assert cost.observations == 5
    assert np.allclose(cost.spread(4, 3), measured.spread(4, 4)[[0, 3, 3, 3]])


def test_a_width_that_is_paid_for_is_filled():
    """Where the second node pays for four tokens, the third one costs nothing."""
    probs = [0.9, 0.5, 0.05, 0.02, 0.01]
    tree = TokenTree.build([1, 2, 3, 4, 5], [-1] * 5, probs)
    steep = CostModel.fixed(lambda n: 1.0 + 0.2 * n)
    planner = Planner(exploration=0)
    assert len(planner.plan([tree], steep)[0]) == 2
    assert len(planner.plan([tree], SteppedCost(steep, (1, 2, 4, 8)))[0]) == 3


def test_a_packed_row_is_charged_for_what_it_adds():
    cost = PackedCost(LINEAR, rows=4)
    assert np.allclose(cost.curve(3), [1.4, 1.5, 1.6])
    assert np.isclose(cost.seconds(2), LINEAR.seconds(5))
    assert cost.company == 3
    assert cost.share(4) == 1
    assert cost.share(9) == 6


def test_rows_in_step_are_charged_for_all():
    cost = PackedCost(LINEAR, rows=4, alike=True)
    assert np.allclose(cost.curve(3), [1.4, 1.8, 2.2])
    assert cost.company == 0
    assert cost.share(12) == 3


def test_what_is_known_of_packed_rows_is_what_was_measured():
    measured = CostModel()
    for _ in range(5):
        measured.observe(6, 0.02)
    cost = PackedCost(measured, rows=4)
    assert cost.observations == 5
    assert np.allclose(cost.spread(4, 2), measured.spread(7, 5)[3:])
