"""What one request of continuous batching, or a fault in drafting, must not do to the others."""

import functools
import gc
import itertools
import logging
import weakref
from contextlib import contextmanager

import pytest
import torch
import transformers
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from hf_retrieval_assist import Assistant, OutputMemory, SamAssistant
from hf_retrieval_assist.drafters.base import FeedbackNeeds
from hf_retrieval_assist.engines.cpu.engine import CpuEngine
from tests.support.batching import (
    LENGTH,
    DraftedRequest,
    add,
    drafted,
    finished,
    greedy,
    guess,
    half_knowing,
    half_known,
    manager_of,
    numbered,
    prompts,
    run,
    settled,
    texts,
)
from tests.support.lossless import build
from tests.support.memories import wait_until
from tests.support.scripted import Scripted
from tests.support.tiny_models import VOCAB
from tests.support.watching import calls_of

pytestmark = pytest.mark.slow

SMALL = {"num_blocks": 16}  # 256 tokens


LONE = [5, 6, 7]
SPOILING = {
    "no tokens wanted": ([LONE], {"max_new_tokens": 0}, None),
    "less than none": ([LONE], {"max_new_tokens": -3}, None),
    "a text for a number": ([LONE], {"max_new_tokens": "5"}, "max_new_tokens: expected a number"),
    "an id that is running": ([LONE] * 3, {"request_id": "a"}, "request_id: expected one"),
    "no prompt": ([[]], {}, "input_ids: expected 1 to 256 tokens"),
    "larger than the cache": ([[5] * 3000], {}, "input_ids: expected 1 to 256 tokens"),
    "as large as the cache": ([[5] * 256], {"max_new_tokens": 1}, None),
    "outgrows the cache": ([[5] * 100], {"max_new_tokens": 500}, "at most 256 tokens"),
    "two outgrow it": ([[5] * 100, [7] * 100], {"max_new_tokens": 500}, "at most 256 tokens"),
    "an unknown token": ([[5, VOCAB]], {}, f"ids from 0 to {VOCAB - 1}, got 5 to {VOCAB}"),
    "a negative token": ([[5, -1]], {}, "got -1 to 5"),
    "a huge token": ([[5, 10**30]], {}, "input_ids: expected integers"),
    "words": (["hello"], {}, "input_ids: expected integers"),
    "an unknown option": ([LONE], {"warmth": 1}, "warmth"),
}


@pytest.mark.parametrize("case", SPOILING)
def test_a_request_that_cannot_be_served_fails_alone(llama, case):
    spoiling, options, message = SPOILING[case]
    inputs, plain, assistant = half_known(llama, 3, memory=OutputMemory())
    with manager_of(llama, assistant, **SMALL) as manager:
        manager.add_request(inputs[0], request_id="before")
        for prompt in spoiling:
            manager.add_request(prompt, **options)
        manager.add_request(inputs[1], request_id="beside")
        found = finished(manager, 2 + len(spoiling))
        manager.add_request(inputs[2], request_id="after")
        found += finished(manager, 1)
        settled(manager)
        assert manager.batch_processor.cache.compute_free_capacity() > 0.5
    served = {out.request_id: out.generated_tokens for out in found if out.error is None}
    assert [served[name] for name in ("before", "beside", "after")] == plain
    errors = [out.error for out in found if out.error is not None]
    assert len(errors) == (0 if message is None else len(spoiling) - case.startswith("an id"))
    assert all(message in error for error in errors)
    assert assistant.stats.total.accepted > 0


def test_requests_behind_a_cancelled_one_go_on(llama):
    """The cancelled one had all of the cache, and no other request was to begin meanwhile."""
    with manager_of(llama, SamAssistant(), **SMALL) as manager:
        for name, token in (("first", 5), ("second", 7)):
            manager.add_request([token] * 120, request_id=name, max_new_tokens=130)
        wait_until(lambda: (one := manager.batch_processor) and one.scheduler.block_new_requests)
        (running,) = [*manager.batch_processor.scheduler.active_requests]
        manager.cancel_request(running)
        (output,) = finished(manager, 1)
    assert output.error is None
    assert output.request_id != running


def test_an_id_may_be_used_again(llama):
    """Each time it is another text, and a private one teaches nobody. An error of one that is
    running shows no other request's tokens."""
    inputs = prompts(4)
    plain = run(llama, inputs)
    memory = OutputMemory()
    assistant = SamAssistant(memory=memory, budget=8)
    with manager_of(llama, assistant) as manager:
        for number, prompt in enumerate(inputs):
            twin = assistant.private() if number % 2 else None
            manager.add_request(prompt, request_id="again", assistant=twin)
            assert [out.generated_tokens for out in finished(manager, 1)] == [plain[number]]
        settled(manager)
        tree = memory.tree(next(iter(memory._outputs)).fingerprint)
        kept = [tree.tokens(output.sequence).tolist() for output in memory._outputs]
        assert sorted(kept) == sorted(plain[::2])
        assert assistant.stats.total.calls == 4
        manager.add_request(LONE, request_id="a", max_new_tokens=60)
        manager.add_request([9, 10], request_id="a")
        failed, served = sorted(finished(manager, 2), key=lambda out: len(out.generated_tokens))
    assert "request_id" in failed.error
    assert failed.generated_tokens == []
    assert len(served.generated_tokens) == 60


def test_requests_that_are_sent_back_are_the_same_text(llama, monkeypatch):
    """The cache does not hold them all: some begin again, with what they have for a prompt."""
    inputs = [[token] * 110 for token in (5, 7, 9)]
    config, memory = greedy(max_new_tokens=90), OutputMemory()
    plain = run(llama, inputs, config)
    assistant = SamAssistant(memory=memory, budget=4)
    sent_back = calls_of(monkeypatch, DraftedRequest, "create_equivalent_initial_request")
    with manager_of(llama, assistant, config, allow_block_sharing=False, **SMALL) as manager:
        add(manager, inputs, {}, *[{"assistant": assistant.private()}] * 2)
        assert texts(manager, 3) == numbered(plain)
        settled(manager)
    assert sent_back
    total = assistant.stats.total
    assert (total.calls, total.tokens) == (3, 3 * 90)
    assert len(memory) == 1


def test_assistants_of_requests_that_never_began_are_let_go(llama, monkeypatch):
    # pytest would keep the errors that it logs, whose frames know the requests.
    monkeypatch.setattr(logging.getLogger("ContinuousBatchingLogger"), "disabled", True)
    assistant = SamAssistant(budget=8)
    twins = []

    def twin():
        made = assistant.expecting(range(1, 60))
        twins.append(weakref.ref(made))
        return made

    with manager_of(llama, assistant, max_requests_per_batch=1) as manager:
        manager.add_request(LONE, request_id="long", max_new_tokens=100)
        for number in range(20):
            manager.add_request(LONE, request_id=f"r{number}", assistant=twin())
            manager.cancel_request(f"r{number}")
        manager.add_request([], assistant=twin())
        manager.add_request(LONE, assistant=twin(), warmth=1)
        manager.add_request(LONE, assistant=twin(), max_new_tokens=2)
        manager.add_request(LONE, request_id="last", max_new_tokens=2)
        finished(manager, 5)
        settled(manager)
        gc.collect()
        assert not any(made() for made in twins)


# Where a drafter may fail.
PLACES = ("start", "prepare", "propose", "commit", "close", "restrict")


class Faulty(Scripted):
    """Fails at one place: in texts whose prompt has a token; None: in all."""

    name, costly = "faulty", True

    def __init__(self, place, prompt_token=None):
        super().__init__(*guess(4).functions)
        self.place, self.prompt_token, self.faults = place, prompt_token, 0

    def start(self, prompt_ids, target):
        session = super().start(prompt_ids, target)
        session.fails = self.prompt_token in (None, *prompt_ids.tolist())
        self.reach("start", session)
        if session.fails and self.place in ("close", "restrict"):
            # Whether a session restricts is told by its class.
            session.__class__ = type("Faulty", (type(session),), {self.place: self.fail})
        return session

    def prepare(self, sessions, curve):
        self.reach("prepare", *sessions)

    def propose(self, sessions, budgets):
        self.reach("propose", *sessions)
        return super().propose(sessions, budgets)

    def commit(self, sessions, tokens, feedbacks):
        self.reach("commit", *sessions)
        super().commit(sessions, tokens, feedbacks)

    def reach(self, place, *sessions):
        """Fail here, if it is the place, for texts of which one fails."""
        if place == self.place and any(session.fails for session in sessions):
            self.fail()

    def fail(self, *_):
        self.faults += 1
        raise RuntimeError(f"a fault in {self.place}")


@pytest.mark.parametrize("place", [*PLACES, "a draft that breaks the contract"])
def test_a_fault_in_drafting_costs_no_answer(llama, place, told):
    faulty = Faulty(place) if place in PLACES else guess(99_999)

    def make(*known):
        drafters = [*half_knowing(*known).drafters, faulty]
        return Assistant(drafters, budget="auto", max_nodes=8)

    total = drafted(llama, prompts(6), make=make, max_requests_per_batch=3)
    assert not isinstance(faulty, Faulty) or faulty.faults
    assert told.text.count("requests go on without drafts") == 1
    assert (total.calls, total.tokens) == (6, 6 * LENGTH)


@pytest.mark.parametrize("place", ["start", "propose"])
def test_a_fault_for_one_request_leaves_the_others_their_drafts(llama, place):
    inputs, faulty = [[1, 2, 3, 63], [4, 5, 6], [7, 8, 9]], Faulty(place, 63)

    def make(*known):
        return Assistant([*half_knowing(*known).drafters, faulty], budget=5)

    total = drafted(llama, inputs, greedy(max_new_tokens=40), make)
    assert faulty.faults in (1, 2)  # one with the others, and then one alone
    assert total.accepted > 15
    assert total.calls == 3


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM"])
def test_drafts_whose_states_are_no_numbers_change_nothing(name, told):
    """One drafted token makes NaN of its states, and under a mask of everybody's. Prompts are fed
    beside it in parts."""
    model = build(getattr(transformers, name))
    inputs = prompts(6, seed=3)
    options = {"config": greedy(max_new_tokens=24)}
    options |= {"max_batch_tokens": 12, "max_requests_per_batch": 3}
    plain = run(model, inputs, **options)
    spoiling = min({*range(1, VOCAB)} - {*itertools.chain(*inputs, *plain)})
    with torch.no_grad():
        model.get_input_embeddings().weight[spoiling] = float("nan")
        if model.config.tie_word_embeddings:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.nan_to_num(-9.0))
    total = drafted(
        model, inputs, make=lambda *_: Assistant([guess(spoiling)], budget=2), **options
    )
    assert run(model, inputs, **options) == plain
    assert told.text.count("FloatingPointError: logits that are no numbers") == 1
    # A request fails with its first draft, and has none from then on.
    assert (total.drafted, total.calls) == (0, len(inputs))


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("knows", [False, True])
def test_kernels_that_fail_cost_no_answer(llama, knows, step, monkeypatch):
    scopes = []

    @contextmanager
    def failing(engine, wanted, verified=0):
        scopes.append(wanted)
        if wanted and len(scopes) >= step:
            raise RuntimeError("a kernel")
        yield

    monkeypatch.setattr(CpuEngine, "scope", failing)
    make = half_knowing if knows else lambda *_: Assistant([guess(4)], budget=1)
    drafted(llama, prompts(5), make=make)
    # One more by the kernels, where the first to fail had drafts, which are left out then.
    assert step <= scopes.count(True) <= step + 1


def test_drafts_end_where_positions_do(told):
    model = build(GPT2LMHeadModel, n_positions=40)
    inputs = [[5, 9, 33] * 3, [7, 8] * 4]
    make = functools.partial(half_knowing, budget=16)
    assert drafted(model, inputs, greedy(max_new_tokens=31), make).accepted > 0
    # Whatever it guesses behind the last position would be a fault.
    guessing = Assistant([guess(4)], budget=2)
    with manager_of(model, guessing, greedy(max_new_tokens=90)) as manager:
        manager.add_request(inputs[0])
        manager.add_request([5] * 41)
        assert all("40 tokens" in output.error for output in finished(manager, 2))
        assert manager.is_running()
    assert "without drafts" not in told.text


@pytest.mark.parametrize("residual", [False, True])
def test_attached_assistants_that_cannot_draft_here_leave_plain_batches(residual, told):
    model = build(LlamaForCausalLM)
    model.set_attn_implementation("eager")
    inputs = prompts(2)
    plain = run(model, inputs)
    drafter = guess(4)
    drafter.needs = FeedbackNeeds(hidden_layers=() if residual else (-1,))
    assistant = Assistant([drafter], residual=residual)
    with assistant.attached(model):
        for _ in range(2):
            assert run(model, inputs) == plain
    assert told.text.count("decoding without the assistant (assistant: expected drafters") == 1
    assert assistant.stats.total.calls == 0
    with pytest.raises(ValueError, match="no hidden states, no residual sampling"):
        run(model, inputs, assistant=assistant)
    assert model.config._attn_implementation == "eager"


def test_a_manager_that_is_kept_goes_on_without_the_assistant(llama):
    inputs, plain, assistant = half_known(llama, 2)
    given, calls = {"assistant": assistant}, 2
    try:
        assert run(llama, inputs, persistent_manager=True) == plain
        # A call that keeps nothing uses what was kept, for the last time.
        assert run(llama, inputs, **given) == plain
        assert llama._cached_continuous_batching_manager.batch_processor is None
        for named in ({}, given, given, {}, {"assistant": None}, given):
            assert run(llama, inputs, persistent_manager=True, **named) == plain
            calls += 2 * (named is given)
            assert assistant.stats.total.calls == calls
    finally:
        llama.destroy_cached_continuous_batching_manager()
