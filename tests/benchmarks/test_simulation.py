"""Replays of hand-made requests, whose every step can be counted."""

import pytest

from benchmarks.simulation import simulate
from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.drafters.logit_ngrams import LogitNgramDrafter
from tests.support.rounding import near

TEXT = list(range(1, 11))
# An output that repeats its prompt: after the first token the rest is one chain.
COPY = (TEXT, TEXT)


def sam(make=SamAssistant, **options):
    return make(**({"fallback": None} | options))


def counts(report):
    return report.steps, report.tokens, report.nodes


@pytest.mark.parametrize("output", [[], [7]])
@pytest.mark.parametrize("prompt", [[], TEXT])
def test_outputs_without_a_step(prompt, output):
    report = simulate(sam(), [(prompt, output)], cost=lambda n: 1.0)
    assert counts(report) == (0, 0, 0)
    assert report.speedup == 0
    assert report.draft_us == report.update_us_per_token == 0


def test_the_planner_follows_the_cost():
    steep, flat = (simulate(sam(), [COPY], cost=cost) for cost in (lambda n: n**2, lambda n: 1.0))
    assert counts(steep) == (9, 9, 0)
    assert steep.speedup == near(1)
    assert counts(flat) == (1, 9, 8)
    assert flat.speedup == near(9)


def test_of_logits_it_is_shown_which_token_came():
    """A text that is new goes on as an earlier one, in rows of other lengths."""
    output = list(range(20, 60))
    requests = [([1], output), ([2], [3, 4, 5]), ([3], [9, *output]), ([4], output)]
    for batch_size in (1, 2):
        assistant = Assistant([LogitNgramDrafter()], budget=8)
        assert simulate(assistant, requests[:2], batch_size=batch_size).nodes == 0
        assert simulate(assistant, requests[2:], batch_size=batch_size).forwards < 39


def test_rows_of_a_batch_go_in_lockstep():
    # Alone: one forward over 8 nodes for 9 tokens, and two forwards without a draft.
    requests = [COPY, (list(range(60, 70)), [80, 81, 82])]
    report = simulate(sam(budget=8), requests, batch_size=2, cost=lambda n: 1 + 0.5 * n)
    assert counts(report) == (1 + 2, 9 + 2, 8)
    assert (report.mean_accepted_tokens, report.nodes_per_step) == (11 / 3, 8 / 3)
    assert (report.forwards, report.plain_forwards) == (2, 9)
    # The first forward is 9 tokens wide, the second 1; plain decoding takes 9 of those.
    assert report.cost == near((1 + 0.5 * 9) / 1.5 + 1)
    assert report.speedup == near(9 / report.cost)
