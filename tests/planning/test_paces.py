"""Calls that are decoded plainly while drafts make them slower."""

from __future__ import annotations

import numpy as np
import pytest

from hf_retrieval_assist.planning.paces import Paces

TOKENS = 64


def run(calls, drafted, paces=None, plain=1.0, tokens=TOKENS):
    """Calls whose drafted pace is `drafted(call)` against `plain`. Which of them rested."""
    paces = paces or Paces()
    rested = []
    for call in range(calls):
        rested.append(paces.rests())
        if rested[-1]:
            paces.observe_plain(plain * tokens, tokens, paces.reroutes())
        else:
            paces.observe_drafted(drafted(call) * tokens, tokens, plain)
    return rested


def lost(rested, drafted):
    """Share of plain's time that the calls took more, or less."""
    return sum(0 if rests else drafted(i) - 1 for i, rests in enumerate(rested)) / len(rested)


@pytest.mark.parametrize("excess", [1.05, 1.2, 1.5])
def test_a_loop_that_is_slower_is_left_for_ever_longer(excess):
    rested = run(400, lambda call: excess)
    assert lost(rested, lambda call: excess) < 0.05 * (excess - 1) + 8 * excess / 400
    assert not all(rested[200:]), "drafts are given another chance, now and then"


@pytest.mark.parametrize("pace", [0.3, 0.8])
def test_calls_that_drafts_make_faster_are_all_drafted_for(pace):
    assert not any(run(300, lambda call: pace))


def test_a_tie_is_looked_into_ever_more_seldom():
    rested = run(600, lambda call: 1.0)
    assert sum(rested[:100]) <= 6
    assert 1 <= sum(rested[300:]) <= 5


def test_rare_calls_with_large_gains_count():
    random = np.random.default_rng(0)
    paces = np.where(random.random(4000) < 0.15, 0.2, 1.06)
    always = np.mean(paces - 1)
    assert lost(run(len(paces), paces.item), paces.item) < 0.6 * always < 0


def test_drafts_that_begin_to_pay_are_found():
    paces = Paces()
    run(300, lambda call: 1.4, paces)
    assert not any(run(200, lambda call: 0.4, paces)[80:])


def test_the_first_calls_do_not_count():
    assert not any(run(40, lambda call: 50.0 if call < 2 else 0.7))


def test_short_calls_are_taken_together():
    rested = run(40, lambda call: 1.5, tokens=4)
    assert not any(rested[: 2 + 8])
    assert any(rested)


@pytest.mark.parametrize("faster", [True, False])
def test_plain_calls_run_by_the_faster_kernels(faster):
    paces, chosen = Paces(), []
    for call in range(200):
        chosen.append(paces.reroutes())
        usual = faster if call < 100 else not faster
        paces.observe_plain(TOKENS * (1.0 if chosen[-1] is usual else 1.2), TOKENS, chosen[-1])
    assert set(chosen[:2]) == {True, False}
    assert 85 <= chosen[:100].count(faster) <= 97
    assert chosen[160:].count(not faster) >= 35


def test_short_plain_calls_try_both_kernels():
    paces, chosen = Paces(), []
    for _ in range(20):
        chosen.append(paces.reroutes())
        paces.observe_plain(4 * (1.2 if chosen[-1] else 1.0), 4, chosen[-1])
    assert chosen == 8 * [True] + 12 * [False]


def test_drafts_compete_with_the_faster_kernels():
    paces = Paces()
    run(60, lambda call: 0.9 if call < 40 else 1.1, paces, plain=1.0)
    for rerouted in (True, False):
        paces.observe_plain((0.7 if rerouted else 1.5) * TOKENS, TOKENS, rerouted)
    paces.observe_drafted(0.9 * TOKENS, TOKENS, 1.0)
    assert paces.rests()
