"""Assistants: whom they ask, what they tell drafters, what they count."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.simulation import simulate
from hf_retrieval_assist import Assistant, OutputMemory, SamAssistant, TokenTree
from hf_retrieval_assist.drafters.automaton import AutomatonDrafter
from hf_retrieval_assist.drafters.base import FeedbackNeeds
from hf_retrieval_assist.host.fingerprint import fingerprint
from hf_retrieval_assist.papers import Sequoia, SuffixDecoding
from hf_retrieval_assist.policy.stats import CallStats
from tests.support.memories import remembering
from tests.support.parts import needs
from tests.support.rounding import near

from .support.fixed_costs import FixedCosts
from .support.lossless import NEW_TOKENS, PROMPT, build, run, same
from .support.oracle_drafter import OracleDrafter
from .support.tiny_models import LAYERS


class Recorder(OracleDrafter):
    """Proposes chains of what its text will be, if it knows, and writes down what it is told.

    Args:
        idle: whether its sessions are.
        lost: how many drafts of rows it loses in each step.
        attributes: its own.
    """

    def __init__(self, text=(), idle=False, lost=0, **attributes):
        super().__init__([text])
        vars(self).update(attributes)
        self.idle, self.lost = idle, lost
        self.rows, self.commits = [], []
        self.costs_seen = self.closed = 0

    def start(self, prompt_ids, target):
        session = super().start(prompt_ids, target)
        session.idle, session.close = self.idle, self.close
        return session

    def prepare(self, sessions, curve):
        self.costs_seen += curve is not None

    def propose(self, sessions, budgets):
        self.rows.append(len(sessions))
        return super().propose(sessions, budgets)[self.lost :]

    def draft(self, coming, budget):
        tokens = coming[: min(budget, 4)]
        return TokenTree.chain(tokens, [0.9**i for i in range(1, len(tokens) + 1)])

    def commit(self, sessions, tokens, feedbacks):
        super().commit(sessions, tokens, feedbacks)
        self.commits += zip(tokens, feedbacks, strict=True)

    def close(self):
        self.closed += 1


# Seconds beside which neither drafting nor a machine that stands still for a while counts.
_AGES = 1e6

REQUEST = (list(range(10)), list(range(10, 210)))


@pytest.mark.parametrize(
    ("text", "budget", "cost", "steps"),
    [
        # What takes no time is asked in every step.
        ([], "auto", lambda n: _AGES, 199),
        ([], 4, lambda n: 1.0, 199),
        ([], "auto", None, 199),
        # Four tokens and one in every step.
        (REQUEST[0] + REQUEST[1], "auto", lambda n: _AGES, 40),
    ],
)
def test_costly_drafters_are_consulted(text, budget, cost, steps):
    drafter = Recorder(text, costly=True)
    simulate(Assistant([drafter], budget=budget), [REQUEST], cost)
    assert sum(drafter.rows) == steps
    assert drafter.closed == 1
    consulted = budget == "auto" and cost is not None
    assert drafter.costs_seen == (steps if consulted else 0)


def test_a_drafter_that_sat_steps_out_is_told_what_it_missed():
    drafter = Recorder()
    simulate(Assistant([drafter]), [REQUEST], lambda n: 1e-9)
    assert len(drafter.rows) < 100
    assert [token for tokens, _ in drafter.commits for token in tokens] == REQUEST[1]


@pytest.mark.parametrize("costly", [False, True])
def test_a_drafter_is_asked_once_in_a_step_for_all_rows(model, costly):
    prompts = PROMPT.repeat(3, 1)
    prompts[1, 0] += 1
    plain = run(model, prompts)
    drafters = [Recorder(), Recorder(plain[0].tolist(), costly=costly)]
    assistant = Assistant(drafters, costs=FixedCosts(lambda n: _AGES))
    assert torch.equal(plain, run(model, prompts, assistant=assistant))
    for drafter in drafters[: 2 - costly]:
        assert len(drafter.rows) == assistant.stats.last.forwards
        assert drafter.rows[0] == 3
        assert sum(drafter.rows) == assistant.stats.last.steps


def test_a_drafter_that_loses_drafts_of_rows_is_named(model):
    assistant = Assistant([Recorder(lost=1)], budget=4)
    with pytest.raises(ValueError, match=r"^drafter 'oracle': expected a draft for each of 1 r"):
        run(model, assistant=assistant)


@pytest.mark.parametrize(
    ("cost", "nodes"), [(lambda n: n**2, 0), (lambda n: _AGES if n <= 4 else 100 * _AGES, 3)]
)
def test_the_cost_bounds_the_drafts(model, plain, cost, nodes):
    """The last step has one token less to bring than it could."""
    assistant = Assistant([Recorder(plain[0].tolist())], costs=FixedCosts(cost))
    same(model, assistant=assistant)
    assert assistant.stats.last.steps == -(-(NEW_TOKENS - 1) // (nodes + 1))
    assert assistant.stats.last.drafted <= nodes * assistant.stats.last.steps


def test_drafters_get_what_they_need(model, plain):
    text = plain[0].tolist()
    needs = FeedbackNeeds(logits=True, hidden_layers=(1, -1))
    needy, other = Recorder(text, needs=needs), Recorder(text)
    run(model, assistant=Assistant([needy, other], budget=4))
    with torch.no_grad():
        expected = model(plain, output_hidden_states=True)
    length = PROMPT.shape[1]
    for tokens, feedback in needy.commits:
        fed = feedback.token_ids[feedback.accepted].tolist()
        # The prompt's last tokens; then the last token of the text and the accepted nodes.
        first = length - (1 if length > PROMPT.shape[1] else len(fed))
        rows = slice(first, first + len(fed))
        assert fed == text[rows]
        logits = feedback.logits  # of the prompt maybe its last token's alone
        if len(logits) == len(feedback.token_ids):
            logits = logits[feedback.accepted]
        close(logits, expected.logits[0, rows][-len(logits) :])
        states = [expected.hidden_states[k][0, rows] for k in (1, LAYERS)]
        close(feedback.hidden_states, torch.cat(states, dim=-1))
        length += len(tokens)
    assert length == len(text)
    for _, feedback in other.commits[1:]:
        assert feedback.hidden_states is None


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("fails", "closed"), [("start", [1, 0]), ("draft", [1, 1])])
def test_sessions_are_closed_when_a_drafter_fails(model, fails, closed):
    drafters = [Recorder(), Recorder()]
    setattr(drafters[1], fails, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, assistant=Assistant(drafters, budget=4))
    assert [drafter.closed for drafter in drafters] == closed


@pytest.mark.parametrize("idle", [False, True])
def test_idle_sessions_are_neither_asked_nor_told(idle, model, plain):
    drafter = Recorder(plain[0].tolist(), idle=idle)
    _, _, assistant = same(model, assistant=Assistant([drafter], budget=4))
    assert (assistant.stats.last.drafted == 0) is idle
    assert len(drafter.commits) == (1 if idle else 5)  # the prefill and four steps


def test_statistics_of_calls(model, plain):
    assistant = Assistant([Recorder(plain[0].tolist())], budget=4)
    assert assistant.stats.last.mean_accepted_tokens == 0
    assert "no call yet" in repr(assistant.stats)
    for _ in range(2):
        run(model, assistant=assistant)
    last, total = assistant.stats.last, assistant.stats.total
    # Four nodes and a token a step, and 19 tokens after the first.
    assert (last.calls, last.steps, last.tokens) == (1, 4, NEW_TOKENS)
    assert last.accepted == last.drafted == 15
    assert last.mean_accepted_tokens == near(19 / 4)
    assert last.nodes_per_step == near(15 / 4)
    assert (total.calls, total.steps, total.tokens) == (2, 8, 2 * NEW_TOKENS)
    assert total.mean_accepted_tokens == near(19 / 4)
    assert assistant.stats.last.tier == last.tier == "tree"
    assert all(seconds > 0 for phase, seconds in last.seconds.items() if phase != "pack")
    assert sum(last.seconds.values()) - last.seconds["total"] <= last.seconds["total"]
    told = f"last call: {last.summary}.\nall 2 calls: {total.summary}."
    assert repr(assistant.stats) == told
    assert f"{last.tokens} tokens in {last.steps + 1} forwards" in last.summary


def test_what_is_learnt_of_a_model_does_not_touch_another(model, plain):
    other = build(LlamaForCausalLM, num_hidden_layers=2)
    assistant = SamAssistant(corpus=[plain[0].tolist()])
    run(model, assistant=assistant)
    rates = [counts._counts.copy() for counts in assistant.policy.calibrators(fingerprint(model))]
    run(other, assistant=assistant)
    for counts, before in zip(assistant.policy.calibrators(fingerprint(model)), rates, strict=True):
        assert np.array_equal(counts._counts, before)
    accounts = assistant.policy._accounts
    assert {key.fingerprint for key in accounts} == set(map(fingerprint, (model, other)))


@needs("extensions/structured")
def test_drafters_of_one_name_are_told_apart():
    assistant = Assistant([AutomatonDrafter(), AutomatonDrafter(max_draft=3)])
    assert list(assistant.stats.sources) == ["automaton", "automaton 2", "grammar"]


def test_what_stands_in_the_place_of_something_else_is_named():
    expecting = SamAssistant().expecting
    for make, message in (
        (lambda: expecting(rows="texts", tokenizer=object()), "rows: expected a list of"),
        (lambda: expecting(rows=["text"], tokenizer=object()), "rows: expected a list of"),
        (lambda: expecting(tools=print, tokenizer=object()), "tools: expected a list of"),
        (lambda: expecting(tools={"name": "f"}, tokenizer=object()), "tools: expected a list of"),
        (lambda: Assistant("suffix"), "drafters: expected a list of"),
        (lambda: Assistant(AutomatonDrafter()), "drafters: expected a list of"),
        (lambda: SamAssistant(memory=OutputMemory), "memory: expected OutputMemory, got the class"),
        (lambda: SuffixDecoding(memory=[]), "memory: expected OutputMemory"),
        (lambda: Sequoia("a name"), "draft_model: expected Module, got str"),
        (lambda: SamAssistant(memory="x.log"), r"memory: .*str; write OutputMemory\(path='x.log'"),
    ):
        with pytest.raises(TypeError, match=f"^{message}"):
            make()


# Private texts are drafted from what was learnt, and leave no trace in it.

TEXT = np.random.default_rng(0).integers(1, 60, 60).tolist()


@pytest.mark.parametrize("preset", [SamAssistant, remembering])
def test_a_private_text_teaches_nothing(preset):
    assistant = preset(memory=OutputMemory())
    private = assistant.private()
    requests = [(TEXT[:1], TEXT[1:])]
    first, second = simulate(private, requests), simulate(private, requests)
    assert first.steps == second.steps
    assert len(assistant.memory) == 0
    simulate(assistant, requests)
    assert assistant.memory.token_count == len(TEXT) - 1
    assert simulate(private, requests).steps < first.steps / 2
    assert assistant.memory.token_count == len(TEXT) - 1


# What the figures of calls print.


def call_of(saved_seconds=0.0, **changes):
    figures = {"tier": "tree", "calls": 1, "steps": 15, "forwards": 15, "tokens": 48} | changes
    call = CallStats(accepted=figures["tokens"] - figures["steps"] - 1, **figures)
    call.saved_forwards, call.saved_seconds = 32, saved_seconds
    call.seconds["total"] = 2.0
    call.compared_seconds = 2.0 * (saved_seconds != 0)
    return call


def test_a_sentence_says_whether_the_assistant_helped():
    """What is done once for a model is no part of what is compared."""
    assert call_of(3.0).summary == (
        "about 2.50 times as fast as without drafts: 48 tokens in 16 forwards (3.00 a forward, 32 "
        "forwards saved), 24.0 tokens/s, 2.00 s where steps without drafts take about 5.00 s"
    )
    assert call_of(-1.0).summary.startswith("only 0.50 times as fast as without drafts: 48 tokens")
    # No step without a draft was timed, or none has a draft.
    assert call_of().summary.startswith("48 tokens in 16 forwards (3.00 a forward")
    plain = call_of(tier="plain", steps=47, forwards=47)
    assert plain.summary == ("not assisted: 48 tokens in 48 forwards, 24.0 tokens/s")
    first = call_of(3.0)
    first.seconds |= {"test": 5.0, "pack": 1.0, "total": 8.0}
    assert first.summary.startswith("about 2.50 times as fast as without drafts")
    assert first.summary.endswith("; 6.00 s went to what is done once for a model")
    first.add(call_of(3.0))
    assert first.summary.startswith("about 2.50 times as fast as without drafts")
    assert (first.saved_seconds, first.undrafted_seconds, first.saved_forwards) == (6.0, 10.0, 64)
    requests = CallStats(tier="continuous batching", calls=2, steps=6, forwards=4, tokens=16)
    requests.accepted = 8
    assert str(requests) == "16 tokens in 6 forwards (2.00 a forward) [continuous batching]"


def test_a_call_is_compared_with_steps_without_drafts_that_were_timed(llama):
    """The generator of random numbers is left as plain decoding leaves it."""
    costs = FixedCosts(lambda n: 0.01)
    options = {"max_new_tokens": 24, "do_sample": True, "seed": 5}
    plain = run(llama, **options)
    state = torch.get_rng_state()
    for budget in (0, 6):
        assistant = SamAssistant(costs=costs, budget=budget)
        assert torch.equal(plain, run(llama, assistant=assistant, **options))
        assert torch.equal(state, torch.get_rng_state())
        call = assistant.stats.last
        assert call.compared_seconds == near(call.seconds["total"] - call.once_seconds)
        assert " times as fast as without drafts" in call.summary
