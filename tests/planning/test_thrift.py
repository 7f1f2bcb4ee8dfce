"""The account of what drafting brings and takes."""

from __future__ import annotations

import pytest

from hf_retrieval_assist.planning.cost_model import CostModel
from hf_retrieval_assist.planning.thrift import Thrift

FLAT = CostModel.fixed(lambda n: 1.0)


def run(thrift, steps, spent, brought=lambda step: 0.0, cost=FLAT, width=1):
    """Steps that ask where they may. Returns which did, and the time lost to asking."""
    asked, lost = [], 0.0
    for step in range(steps):
        asked.append(thrift.affords())
        gain = brought(step)
        if asked[-1]:
            thrift.observe(cost, width, gain, spent)
            lost += spent + cost.seconds(width) - cost.seconds(1) - gain * cost.seconds(1)
    return asked, lost


@pytest.mark.parametrize("spent", [0.01, 0.3, 1.0, 5.0])
def test_fruitless_drafting_loses_a_small_share(spent):
    steps = 5000
    asked, lost = run(Thrift(), steps, spent)
    assert asked[0]
    # The first credit, one question beyond it, and what is lent from then on.
    assert lost <= 4 + spent + steps / 32
    late = run(Thrift(), 20_000, spent)[0][10_000:]
    assert sum(late) * spent <= 10_000 / 120 + spent
    assert any(late), "asked again, now and then"


def test_pauses_grow_with_what_asking_takes():
    cheap, dear = (sum(run(Thrift(), 4000, spent)[0]) for spent in (0.2, 2.0))
    assert 5 * dear < cheap < 400


def test_drafting_that_pays_is_always_asked():
    asked, lost = run(Thrift(), 500, 0.4, lambda step: 0.5)
    assert all(asked)
    assert lost < 0


def test_rare_tokens_pay_for_cheap_drafting():
    # One step in fifty brings a token, and asking takes a hundredth of a step.
    assert all(run(Thrift(), 1000, 0.01, lambda step: float(step % 50 == 49))[0])


def test_a_text_that_becomes_repetitive_is_noticed():
    thrift = Thrift()
    run(thrift, 2000, 0.5)
    asked, _ = run(thrift, 400, 0.5, lambda step: 3.0)
    assert all(asked[200:])


def test_past_success_does_not_pay_for_long():
    thrift = Thrift()
    run(thrift, 500, 0.5, lambda step: 5.0)
    asked, _ = run(thrift, 200, 0.5)
    assert sum(asked) <= 2 * 8 + 10


def test_wider_forwards_are_counted():
    steep = CostModel.fixed(lambda n: float(n))
    narrow, wide = (sum(run(Thrift(), 300, 0.01, cost=steep, width=w)[0]) for w in (1, 4))
    assert narrow == 300
    assert wide < 10
