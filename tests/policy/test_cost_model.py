"""What forwards cost: learnt, borrowed, and looked up where more tokens are fed than planned."""

from dataclasses import replace

import numpy as np
import pytest

from hf_retrieval_assist.policy.cost_model import CostModel, CostView
from hf_retrieval_assist.policy.cost_store import CallCosts, CostKey, CostModels
from tests.support.fixed_costs import CURVES
from tests.support.rounding import near
from tests.support.threads import in_threads


def fed(*timings):
    model = CostModel()
    for tokens, seconds in timings:
        model.observe(tokens, seconds)
    return model


def test_more_than_was_fed_is_hoped_to_be_cheap_and_less_as_well():
    assert CostModel().curve(64) == near(1 + 0.02 * np.arange(64))
    model = fed(*[(8, 0.02)] * 2)
    assert model.seconds(64) < 2.2 * 0.02
    assert model.seconds(1) < 0.5 * 0.02
    # Half as steep as it has been so far.
    model = fed(*[(1, 0.02), (11, 0.03)] * 20)
    assert model.seconds(6) == pytest.approx(0.025, rel=0.01)
    assert model.seconds(31) == pytest.approx(0.04, rel=0.01)
    packed = CostModels().get(replace(KEY, packed=True))
    for tokens in [1, 11] * 20:
        packed.observe(tokens, 0.019 + 0.001 * tokens)
    assert packed.seconds(31) == pytest.approx(0.05, rel=0.04)


@pytest.mark.parametrize("tokens", [1, 24])
def test_one_slow_timing_is_not_believed_and_two_are(tokens):
    model = fed(*[(1, 0.02)] * 5)
    before = model.seconds(tokens)
    model.observe(tokens, 5 * before)
    assert model.seconds(tokens) == before
    model.observe(tokens, 5 * before)
    assert model.seconds(tokens) == near(5 * before)


def test_slow_first_calls_are_forgotten():
    """Those of widths that nobody feeds again too."""
    model = fed((1, 0.5), (16, 0.7), (8, 0.02), (1, 0.018))
    assert model.seconds(8) == near(0.02)
    assert model.seconds(16) < 0.04


def test_no_mean_stands_that_is_longer_than_a_wider_ones():
    model = fed(*[(1, 0.02)] * 5, *[(1, 0.2)] * 2, *[(16, 0.03)] * 2)
    assert model.seconds(1) < 0.02


def test_widths_that_are_not_fed_any_more_are_hoped_to_be_faster():
    model, found = fed(*[(1, 0.02), (16, 0.06)] * 20), []
    for _ in range(4000):
        model.observe(1, 0.02)
        found.append(model.seconds(16))
    assert found[400] == near(0.06)
    assert 0.03 < found[-1] < 0.05


KEY = CostKey("model", "cpu", "float32", "sdpa", 1, 1024)
LIKE = {"cache_length": 2048}, {"batch_size": 4}


def test_a_model_that_nobody_timed_knows_what_the_nearest_knows():
    models = CostModels()
    seen, far = models.get(KEY), models.get(replace(KEY, cache_length=1))
    assert seen.seconds(1) == far.seconds(1) == 1
    for _ in range(20):
        seen.observe(1, 0.1)
        seen.observe(8, 0.2)
        far.observe(1, 0.05)
    longer, batch = (models.get(replace(KEY, **key)) for key in LIKE)
    for model in (longer, batch):
        assert (model.curve(96) == seen.curve(96)).all()
        assert not model.observations
    assert models.get(replace(KEY, dtype="bfloat16")).seconds(1) == 1
    assert models.get(replace(KEY, cache_length=2048)) is longer
    longer.observe(1, 0.09)
    assert longer.seconds(1) == near(0.095)
    assert seen.seconds(1) == near(0.1)
    timed = {key for key, model in models._models.items() if model.observations}
    assert timed == {KEY, replace(KEY, cache_length=1), replace(KEY, **LIKE[0])}


def test_threads_may_share_a_model():
    model = CostModel()

    def feed(thread):
        for tokens in [1, 8, 64, 8] * 50:
            model.observe(tokens, CURVES["linear"](tokens))
            assert (np.diff(model.curve(96)) >= 0).all()

    in_threads(feed, range(4))
    assert model.observations == 800
    assert model.seconds(8) == near(CURVES["linear"](8))


STEPS = (1, 2, 4, 8)
# How a forward is fed, the tokens where 1, 2, … are planned, and what a row pays for the others.
VIEWS = {
    "filled up": (lambda cost: CostView(cost, STEPS), [1, 2, 4, 4, 8, 8, 8, 8, 9, 10], 0),
    "packed": (lambda cost: CostView(cost, rows=4), [4, 5, 6], 3),
}


@pytest.mark.parametrize(("view", "fed", "shared_width"), VIEWS.values(), ids=VIEWS)
def test_a_view_is_what_was_measured_at_the_tokens_that_are_fed(view, fed, shared_width):
    measured, most = CostModel(), len(fed)
    for _ in range(5):
        measured.observe(4, 0.02)
    cost, places = view(measured), np.array(fed) - 1
    assert cost.shared_width == shared_width
    assert cost.curve(most) == near(measured.curve(fed[-1])[places])
    assert cost.seconds(3) == near(measured.seconds(fed[2]))


def test_a_rows_share_of_what_was_fed():
    packed = CostView(CostModel(), rows=4)
    assert [packed.share(4), packed.share(9)] == [1, 6]


def test_a_step_is_priced_by_what_it_is_now():
    costs = CallCosts(CostModels(), CostKey("model", "cpu", "float32", "sdpa"))
    for seconds in (0.1, 0.2):
        first = costs.at(100, "")
        costs.learn(1, seconds, plain=False, typical=True)
    assert costs.at(100, "") is first
    assert costs.at(1000, "") is not first
    assert costs.at(100, "repeated") is not first
    assert costs.at(100, "", packed=3) is not first
    assert costs.at(100, "", (4, 8)).curve(3)[0] == first.curve(4)[3]
    assert costs.at(100, "") is first


def test_only_widths_that_were_fed_have_a_time():
    cost = CostModel()
    assert cost.timed(1) is None
    cost.observe(3, 0.5)
    assert (cost.timed(1), cost.timed(3)) == (None, 0.5)
    assert CostView(cost, (3, 8)).timed(1) == 0.5
    assert CostView(cost, rows=3).timed(1) == 0.5
    assert CostView(cost, rows=2).timed(1) is None
