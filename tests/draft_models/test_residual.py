import json
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist.draft_models import residual
from hf_retrieval_assist.draft_models.residual import child_acceptance, draw_children, verify_node
from tests.support.rounding import near

FIXTURE = Path(__file__).parents[1] / "fixtures/sequoia_examples.json"
EXAMPLES = json.loads(FIXTURE.read_text())["verification"]["examples"]


def floats(fractions):
    return torch.tensor([float(Fraction(value)) for value in fractions], dtype=torch.float64)


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


@pytest.mark.parametrize("case", EXAMPLES, ids=lambda case: f"{case['name']}-{case['k']}")
def test_worked_examples(case):
    target, draft = floats(case["target_P"]), floats(case["draft_Q"])
    law, accepted = enumerate_law(target, draft, case["k"])
    assert law == pytest.approx(floats(case["output_distribution"]), abs=1e-12)
    assert accepted == pytest.approx(case["acceptance_vector_float"], abs=1e-12)


@st.composite
def distributions(draw, size=4):
    """Some with zeros, some very uneven."""
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


def chi_square(observed, expected):
    """The statistic and its mean plus five standard deviations."""
    seen = expected > 0
    assert observed[~seen].sum() == 0
    statistic = ((observed - expected)[seen] ** 2 / expected[seen]).sum()
    freedom = seen.sum() - 1
    return statistic, freedom + 5 * np.sqrt(2 * freedom)


def test_draws_are_without_replacement_and_in_order():
    draft = torch.tensor([0.6, 0.3, 0.1, 0.0])
    generator = torch.Generator().manual_seed(0)
    drawn = draw_children(draft.expand(20000, 4), 4, generator)
    assert torch.equal(drawn.sort(-1).values, torch.arange(4).expand(20000, 4))
    assert (drawn[:, 3] == 3).all()
    orders = list(permutations(range(4)))
    numbers = {order: i for i, order in enumerate(orders)}
    observed = np.bincount([numbers[tuple(row)] for row in drawn.tolist()], minlength=24)
    expected = 20000 * np.array([draw_probability(draft, order) for order in orders])
    statistic, limit = chi_square(observed, expected)
    assert statistic < limit


def test_beyond_the_support_draws_are_uniform():
    generator = torch.Generator().manual_seed(0)
    draft = torch.tensor([0.0, 1.0, 0.0, 0.0])
    drawn = draw_children(draft.expand(12000, 4), 2, generator)
    assert (drawn[:, 0] == 1).all()
    counts = np.bincount(drawn[:, 1], minlength=4)
    statistic, limit = chi_square(counts, np.array([4000, 0, 4000, 4000]))
    assert statistic < limit


def test_a_leaf_samples_from_the_target():
    target = torch.tensor([0.0, 1.0, 0.0])
    assert verify_node(target, target, torch.empty(0, dtype=torch.long)) == (-1, 1)


def test_every_child_gets_its_own_draw(monkeypatch):
    drawn = []

    def rand(shape, **options):
        drawn.append(tuple(shape))
        return torch.full(shape, 0.999999, dtype=torch.float64)

    monkeypatch.setattr(residual.torch, "rand", rand)
    law = torch.tensor([0.5, 0.5, 0.0])
    verify_node(law, law, torch.tensor([0, 1]))
    verify_node(law, law, torch.tensor([1]))
    assert drawn == [(2,), (1,)]
