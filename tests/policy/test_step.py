"""What the tokens of a batch's rows are worth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.policy.cost_model import CostModel, CostView
from hf_retrieval_assist.policy.step import DraftedStep

LENGTH = 12
ROWS = st.lists(st.lists(st.integers(1, 4), min_size=LENGTH, max_size=LENGTH), min_size=1)


@given(ROWS, st.floats(0, 1))
def test_tokens_are_worth_the_time_that_their_rows_end_earlier(rows, slope):
    """Rows of one length that come further by given numbers a step: the seconds that their batch
    is spared are those that it takes less than without drafts."""

    def seconds(fed):
        return 1 + slope * (fed - 1)

    price = CostView(CostModel.fixed(seconds), rows=len(rows))
    came, saved, taken = [0] * len(rows), 0.0, 0.0
    for brought in zip(*rows, strict=True):
        running = [row for row, length in enumerate(came) if length < LENGTH]
        if not running:
            break
        taken += seconds(len(running))
        step = DraftedStep(CostView(CostModel.fixed(seconds), rows=len(running)))
        further = [min(brought[row], LENGTH - came[row]) - 1 for row in running]
        worth = step.worth([came[row] for row in running], further)
        saved += worth * seconds(len(running))
        for row, accepted in zip(running, further, strict=True):
            came[row] += 1 + accepted
    assert taken + saved == pytest.approx(LENGTH * price.seconds(1), rel=1e-9)


def test_rows_that_are_fed_until_the_last_one_ends_are_worth_what_it_comes_further():
    step = DraftedStep(CostModel.fixed(lambda fed: 1.0))
    assert step.worth([7, 5, 6], [0, 2, 3]) == 2
    assert step.worth([7, 5, 6], [4, 0, 3]) == 0


def test_requests_that_come_and_go_are_worth_their_part_of_what_they_accept():
    step = DraftedStep(CostModel.fixed(lambda fed: 1.0), apart=True)
    assert step.worth([7, 5, 6], [4, 0, 2]) == 2
