"""What forwards cost: learnt, borrowed, and looked up where more tokens are fed than planned."""

from dataclasses import replace

import numpy as np
import pytest

from hf_retrieval_assist.policy.cost_model import KNOTS, MAX_TOKENS, CostModel, CostView
from hf_retrieval_assist.policy.cost_store import CallCosts, CostKey, CostModels, PlainStep
from hf_retrieval_assist.policy.planner import Planner
from hf_retrieval_assist.types.token_tree import TokenTree
from tests.support.fixed_costs import CURVES
from tests.support.rounding import near
from tests.support.threads import in_threads

PROBES = (1, 2, 4, 8, 16, 32, 64, 96)


def feed(model, curve, count, *, seed=0, slow_calls=0, factor=1.0):
    """Timings of random sizes with 8% noise and 3% of outliers."""
    rng = np.random.default_rng(seed)
    for step in range(count):
        tokens = int(rng.choice(PROBES) if rng.random() < 0.5 else rng.integers(1, 97))
        noise = np.exp(rng.normal(0, 0.08)) * (5 if rng.random() < 0.03 else 1)
        model.observe(tokens, factor * curve(tokens) * noise * (10 if step < slow_calls else 1))


def worst_error(model, curve, factor=1.0):
    """The largest factor by which the learnt curve is off at the probed sizes."""
    learnt = model.curve(96)
    return max(np.exp(abs(np.log(learnt[n - 1] / (factor * curve(n))))) for n in PROBES)


def check_invariants(model):
    curve = model.curve(MAX_TOKENS + 50)
    assert np.isfinite(curve).all()
    assert (curve > 0).all()
    assert (np.diff(curve) >= -1e-15).all()
    covariance = model._covariance
    assert covariance == near(covariance.T)
    assert np.linalg.eigvalsh(covariance).min() > -1e-9


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_learns_the_curve(device, name):
    model = CostModel(device)
    feed(model, CURVES[name], 150, slow_calls=2)
    check_invariants(model)
    assert worst_error(model, CURVES[name]) < 1.3


@pytest.mark.parametrize("name", CURVES)
def test_follows_a_slower_machine(name):
    model = CostModel()
    feed(model, CURVES[name], 300)
    feed(model, CURVES[name], 40, seed=1, factor=2.5)
    assert worst_error(model, CURVES[name], 2.5) < 1.4


def test_prior_shapes():
    cpu, gpu = CostModel("cpu").curve(64), CostModel("cuda").curve(64)
    assert cpu[15] / cpu[0] > 1.5
    assert gpu[63] / gpu[0] < 1.3


def test_spread_shrinks_where_it_was_fed():
    model = CostModel()
    before = model.spread(64, 1)
    assert before[0] == 0
    for _ in range(20):
        model.observe(1, 0.02)
        model.observe(8, 0.03)
    after = model.spread(64, 1)
    assert after[7] < 0.3 * before[7]
    assert after[63] > 2 * after[7]


def test_one_slow_timing_of_a_new_size_is_not_believed():
    model = CostModel()
    for _ in range(5):
        model.observe(1, 0.02)
    before = model.seconds(24)
    model.observe(24, 5 * before)
    assert model.seconds(24) == before
    model.observe(24, 5 * before)
    assert model.seconds(24) > 2 * before


def test_beyond_the_last_knot_it_goes_on_linearly():
    model = CostModel()
    for n in KNOTS:
        for _ in range(5):
            model.observe(int(n), 0.001 * int(n))
    curve = model.curve(2 * MAX_TOKENS)
    assert curve[-1] == pytest.approx(0.001 * 2 * MAX_TOKENS, rel=0.15)


def test_rejects_empty_forwards():
    with pytest.raises(ValueError, match="tokens: expected at least 1"):
        CostModel().observe(0, 0.1)


KEY = CostKey("model", "cpu", "float32", "sdpa", 1, 1024)


def test_a_model_that_nobody_timed_knows_what_its_neighbours_know():
    models = CostModels()
    unseen, seen = replace(KEY, cache_length=1), replace(KEY, cache_length=1024)
    prior = models.get(unseen).seconds(1)
    for _ in range(20):
        models.get(seen).observe(1, 0.1)
    short, longer = (models.get(replace(KEY, cache_length=length)) for length in (2, 2048))
    assert prior > 0.2
    for model in (short, longer, models.get(unseen)):
        assert np.allclose(model.curve(96), models.get(seen).curve(96), rtol=0.05, atol=0)
        check_invariants(model)
    assert models.get(replace(KEY, dtype="bfloat16")).seconds(1) == prior
    for _ in range(20):
        models.get(seen).observe(1, 0.05)
    before = short.seconds(1)
    assert models.get(replace(KEY, cache_length=2)) is short
    assert short.seconds(1) < 0.9 * before
    short.observe(1, 0.02)
    own = short.seconds(1)
    assert models.get(replace(KEY, cache_length=2)).seconds(1) == own


def test_threads_may_share_a_model():
    model = CostModel()
    in_threads(lambda seed: feed(model, CURVES["linear"], 200, seed=seed), range(4))
    assert model.observations == 800
    check_invariants(model)
    assert worst_error(model, CURVES["linear"]) < 1.3


STEPS = (1, 2, 4, 8)
# How a forward is fed, the tokens where 1, 2, … are planned, and what a row pays for the others.
VIEWS = {
    "filled up": (lambda cost: CostView(cost, STEPS), [1, 2, 4, 4, 8, 8, 8, 8, 9, 10], 0),
    "packed": (lambda cost: CostView(cost, rows=4), [4, 5, 6], 3),
    "packed, in lockstep": (lambda cost: CostView(cost, rows=4, lockstep=True), [4, 8, 12], 0),
}


@pytest.mark.parametrize(("view", "fed", "shared_width"), VIEWS.values(), ids=VIEWS)
def test_a_view_is_what_was_measured_at_the_tokens_that_are_fed(view, fed, shared_width):
    measured, most = CostModel("cuda"), len(fed)
    for _ in range(5):
        measured.observe(4, 0.02)
    cost, places = view(measured), np.array(fed) - 1
    assert (cost.observations, cost.shared_width) == (5, shared_width)
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
    packed, lockstep = (
        CostView(CostModel(), rows=4, lockstep=lockstep) for lockstep in (False, True)
    )
    assert [packed.share(4), packed.share(9), lockstep.share(12)] == [1, 6, 3]


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


def test_a_plain_step_is_timed_again_for_a_share_of_the_time_and_busy_moments_do_not_last():
    plain, found = PlainStep(), []
    assert plain.is_due
    assert plain.seconds is None
    for seconds in (0.5, 0.04, 0.05, 0.06, 0.3):
        plain.observe(seconds, spent=4 * seconds)
        found.append(plain.seconds)
        plain.count(199 * seconds)
        assert not plain.is_due
        plain.count(1.01 * seconds)
        assert plain.is_due
    # Alone; the shorter of two; then the middle one of the last three.
    assert found == [0.5, 0.04, 0.05, 0.05, 0.06]
    plain.observe(None, spent=1.0)
    plain.count(1e9)
    assert not plain.is_due
