"""Planning for forwards that feed other numbers of tokens than are planned."""

import numpy as np
import pytest

from hf_retrieval_assist.policy.cost_model import CostModel, CostView
from hf_retrieval_assist.policy.planner import Planner
from hf_retrieval_assist.types.token_tree import TokenTree
from tests.support.rounding import near

STEPS = (1, 2, 4, 8)
# How a forward is fed, the tokens where 1, 2, … are planned, and what a row pays for the others.
VIEWS = {
    "alone": (CostView, [1, 2, 3, 4], 0),
    "filled up": (lambda cost: CostView(cost, STEPS), [1, 2, 4, 4, 8, 8, 8, 8, 9, 10], 0),
    "packed": (lambda cost: CostView(cost, rows=4), [4, 5, 6], 3),
    "packed, in step": (lambda cost: CostView(cost, rows=4, alike=True), [4, 8, 12], 0),
}


@pytest.mark.parametrize(("view", "fed", "company"), VIEWS.values(), ids=VIEWS)
def test_a_view_is_what_was_measured_at_the_tokens_that_are_fed(view, fed, company):
    measured, most = CostModel("cuda"), len(fed)
    for _ in range(5):
        measured.observe(4, 0.02)
    cost, places = view(measured), np.array(fed) - 1
    assert (cost.observations, cost.company) == (5, company)
    assert cost.curve(most) == near(measured.curve(fed[-1])[places])
    assert cost.seconds(3) == near(measured.seconds(fed[2]))
    assert cost.spread(most, 3) == near(measured.spread(fed[-1], fed[2])[places])


def test_a_width_that_is_paid_for_is_filled():
    """Where the second node pays for four tokens, the third one costs nothing."""
    probs = [0.9, 0.5, 0.05, 0.02, 0.01]
    tree = TokenTree.build([1, 2, 3, 4, 5], [-1] * 5, probs)
    steep = CostModel.fixed(lambda n: 1.0 + 0.2 * n)
    planner = Planner(exploration=0)
    assert len(planner.plan([tree], steep)[0]) == 2
    assert len(planner.plan([tree], CostView(steep, STEPS))[0]) == 3


def test_a_rows_share_of_what_was_fed():
    packed, in_step = (CostView(CostModel(), rows=4, alike=alike) for alike in (False, True))
    assert [packed.share(4), packed.share(9), in_step.share(12)] == [1, 6, 3]
