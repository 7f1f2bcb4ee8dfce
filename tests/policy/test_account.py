"""The account of time: how much is believed, whom it asks, and what tokens save."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation import KnownCost
from hf_retrieval_assist import Assistant
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.policy import policy
from hf_retrieval_assist.policy.account import Account
from hf_retrieval_assist.policy.cost_model import CostModel, CostView
from hf_retrieval_assist.policy.cost_store import CostKey
from hf_retrieval_assist.policy.planner import Planner
from hf_retrieval_assist.policy.policy import Ask, Outcome
from hf_retrieval_assist.policy.step import _LEAD, DraftedStep
from hf_retrieval_assist.types.token_tree import Limits, TokenTree
from tests.support.parts import needs
from tests.support.scripted import Scripted

FLAT = KnownCost(lambda n: 1.0)


def make(*costly):
    return Account(costly or (False,))


def ask(account, steps, spent, brought=lambda step: 0.0, cost=FLAT, width=1, missed=1.0, owed=0.0):
    """Steps of an account whose first drafter may be asked; `owed`: what it takes at first. Which
    asked it, and the time lost to that."""
    asked, lost = [], 0.0
    for step in range(steps):
        drafting = DraftedStep(cost, account)
        asked.append(drafting.asks(0, missed))
        gained = [0.0] * len(drafting.uses)
        if asked[-1]:
            use = drafting.uses[0]
            use.seconds, use.owed, use.promised = spent, 0.0 if step else owed, 1.0
            gained[0] = brought(step)
            lost += spent + cost.seconds(width) - cost.seconds(1) - gained[0]
        drafting.end(width, gained)
    return asked, lost


@pytest.mark.parametrize(
    ("costly", "steps", "spent", "brought"),
    [
        # Dearer than what is lent; one ask in ten may bring a little less than it takes.
        (True, 100, 6.3, lambda step: 7.0),
        (True, 100, 6.3, lambda step: 5.5 if step % 10 == 1 else 7.0),
        # Rare tokens pay for cheap drafting.
        (False, 1000, 0.01, lambda step: float(step % 25 == 24)),
    ],
)
def test_what_pays_is_asked_in_every_step(costly, steps, spent, brought):
    assert all(ask(make(costly), steps, spent, brought)[0])


def test_what_a_wider_forward_takes_is_not_gained():
    steep = KnownCost(lambda n: float(n))
    flat, wide = (
        sum(ask(make(), 300, 0.5, lambda step: 1.0, cost, width=2)[0]) for cost in (FLAT, steep)
    )
    assert flat == 300
    assert wide < 10


def test_a_costly_drafter_is_asked_for_what_others_lack():
    """Whether others leave a step open is told apart, in whatever order such steps come."""
    account = make(True)
    asked = {0.9: [], 0.1: []}
    for step in range(600):
        missed = 0.9 if step % 3 else 0.1
        asked[missed] += ask(account, 1, 0.5, lambda _, m=missed: 2.0 * m, missed=missed)[0]
    assert all(asked[0.9])
    assert sum(asked[0.1]) < 10


def test_a_costly_drafter_that_pays_beside_others_is_asked_there_too():
    assert all(ask(make(True), 300, 0.5, lambda step: 0.9, missed=0.1)[0][5:])


UNLUCKY = 1500  # steps in which nothing is brought


@settings(max_examples=8)
@given(
    drafters=st.lists(
        st.tuples(st.floats(0.01, 4.0), st.floats(0.0, 3.0), st.booleans()), min_size=1, max_size=4
    ),
    unlucky=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_pays_comes_into_use_and_what_does_not_costs_little(drafters, unlucky, seed):
    """Drafters of random prices, whose asks bring random multiples of the price.

    The prices of asks vary, and now and then a drafter has to get ready. Whatever happened before,
    there is no state from which a drafter that pays does not come into use.
    """
    random = np.random.default_rng(seed)
    account = make(*(costly for *_, costly in drafters))
    steps = 6000 + UNLUCKY * unlucky
    asked = np.zeros((steps, len(drafters)), bool)
    lost = np.zeros(len(drafters))
    for step in range(steps):
        drafting = DraftedStep(FLAT, account)
        brought = np.zeros(len(drafters))
        for number, (price, multiple, _) in enumerate(drafters):
            asked[step, number] = drafting.asks(number)
            if not asked[step, number]:
                continue
            spent = price * random.uniform(0.5, 1.5)
            use = drafting.uses[number]
            use.seconds, use.promised = spent, 1.0
            if random.random() < 0.02:
                use.owed = 2 * price
                lost[number] += 2 * price
            if step >= UNLUCKY * unlucky:
                brought[number] = price * multiple * random.uniform(0, 2)
            lost[number] += spent - brought[number]
        drafting.end(2, brought)
    for number, (price, multiple, costly) in enumerate(drafters):
        if multiple > 1.5:
            # Luck that is bad enough makes it wait for a trial.
            assert asked[-2000:, number].mean() > 0.95, (price, multiple)
        if multiple < 0.5:
            lent = 4.0 if costly else 0.75
            # What is lent at first, trials, and luck that is believed for too long.
            assert lost[number] < lent + steps / 256 + 10 * price + 10, (price, multiple)


def test_what_a_drafter_has_to_do_first_is_spread_over_its_asks():
    """A prompt that takes eight steps to read; each ask gains a quarter of a step."""
    asks = [ask(make(True), 100, 0.25, lambda step: 0.5, owed=owed)[0] for owed in (8.0, 800.0)]
    assert all(asks[0])
    # What never comes back is paid before it is asked again.
    assert sum(asks[1]) < 10


def test_promises_are_believed_as_far_as_they_come_true():
    account = make()
    assert account.belief == 0.5
    for came in (2, 0):
        for _ in range(100):
            account.count_promise(2.0, came)
        assert (account.belief > 0.95) if came else (account.belief < 0.2)


def test_a_doubtful_draft_is_not_verified_before_any_came_true():
    tree = TokenTree.chain([1, 2], [0.9, 0.8])
    cost = KnownCost(lambda n: 1.0 if n == 1 else 1.9)
    assert [len(Planner().plan([tree], cost, belief=b)[0]) for b in (0.5, 1.0)] == [0, 2]


@needs("extensions/structured")
def test_a_token_is_credited_to_the_first_drafter_that_has_it(monkeypatch):
    """Sources count it for each; the step's last one is the model's own, whoever knew it."""
    credited = []
    monkeypatch.setattr(DraftedStep, "end", lambda step, width, brought: credited.append(brought))
    first, wrong = TokenTree.chain([1, 2], [0.9, 0.8]), TokenTree.chain([1, 5], [0.9, 0.8])
    second = TokenTree.chain([1, 2, 3, 9], [0.9, 0.8, 0.7, 0.6])
    for drafts, brought, sources in (
        ((first, second, wrong), [2.0, 1.0, 0.0], [2, 3, 1]),
        ((second, wrong, first), [3.0, 0.0, 0.0], [3, 1, 2]),
    ):
        asked = Assistant([Scripted(lambda budget, d=draft: d) for draft in drafts]).policy
        session = asked.start(np.zeros(1, np.int32), Target(vocab_size=10))
        session.begin([0])
        account = asked.account(CostKey("", "", "", ""))
        step = asked.draft(Ask([session], FLAT, account))
        (tree,) = step.trees
        asked.learn(step, [Outcome(session, [1, 2, 3, 9], tree)], 4)
        assert credited.pop() == [*brought, 0.0]  # the grammar has nothing
        assert [*asked.stats.sources.values()] == [*sources, 0]


def test_what_asking_takes_is_the_host_s_time_without_the_drafters(monkeypatch):
    """The clock ticks when a drafter works."""
    now = [0.0]

    def works(seconds):
        now[0] += seconds

    monkeypatch.setattr(policy.time, "perf_counter", lambda: now[0])
    drafter = Scripted(lambda budget: works(1.0) or TokenTree.empty())
    asked = Assistant([drafter]).policy
    session = asked.start(np.zeros(1, np.int32), Target(vocab_size=10))
    session.begin([0])
    account = asked.account(CostKey("", "", "", ""))
    step = asked.draft(Ask([session], FLAT, account))
    step.count_host(now[0] + 0.25)
    assert account._host[False] == 0.25
    DraftedStep(FLAT, account).count_host(0.125)
    step.end(1, [0.0])
    [entry] = account._entries[0].values()
    assert entry.gain == -(0.125 + 1.0 / 32)  # what a first ask takes is paid in instalments


def step_of(came, price=None, **settings):
    """A step of texts that have come so far."""
    texts = [SimpleNamespace(came=tokens) for tokens in came]
    return DraftedStep(price or CostView(FLAT, rows=len(came)), None, texts, **settings)


@given(st.lists(st.lists(st.integers(0, 6), min_size=8, max_size=8), min_size=2, max_size=8))
def test_what_steps_save_adds_up_to_what_the_last_text_comes_further(rows):
    came, saved = np.zeros(len(rows)), 0.0
    for further in np.transpose(rows):
        saved += float(step_of(came).saved(further))
        came += 1 + further
    assert came.min() - 1e-9 <= saved + 8 <= came.min() + _LEAD * np.log(len(rows)) + 1e-9


def test_the_text_that_is_furthest_behind_counts_most():
    weights = step_of([30, 6, 5, 6]).weights
    assert weights[0] < 1e-3 < weights[1] == weights[3] < weights[2]
    step = step_of([7, 5, 6])
    assert step.saved(1e-6 * np.eye(3)) == pytest.approx(1e-6 * step.weights, rel=1e-4)
    assert step.saved(np.full(3, 2.0)) == pytest.approx(2)


@given(st.floats(0, 1))
def test_a_text_that_ends_earlier_saves_its_part_of_a_forward(slope):
    price = CostView(KnownCost(lambda fed: 1 + slope * (fed - 1)), rows=4)
    step = step_of([100, 0, 100, 100], price)
    part = slope / (1 + 3 * slope)
    assert step.weights == pytest.approx([part, 1 - 3 * part, part, part], abs=1e-9)
    assert step.saved(np.array([3.0, 0, 0, 0])) == pytest.approx(3 * part, abs=1e-6)


def test_a_plan_prefers_tokens_of_the_text_that_is_behind():
    asked = Assistant([Scripted(lambda budget: TokenTree.chain([1], [0.9]))]).policy
    texts = [asked.start(np.zeros(1, np.int32), Target(vocab_size=10)) for _ in range(2)]
    price = CostView(KnownCost(lambda n: 1 + 0.2 * n), rows=2)
    account = asked.account(CostKey("", "", "", "", batch_size=2))
    for ahead, sizes in ((0, [1, 1]), (5, [0, 1])):
        texts[0].came = ahead
        step = asked.draft(Ask(texts, price, account, limits=lambda: Limits(packed=True)))
        assert [len(tree) for tree in step.trees] == sizes
    assert [sum(ask(lent, 4, 0.11)[0]) for lent in (account, make())] == [2, 3]


def test_a_row_that_ends_earlier_is_not_hoped_to_save_what_was_never_timed():
    known = CostModel()
    price = CostView(known, rows=2)
    for tokens in (2, 4):
        known.observe(tokens, 0.01 * tokens)
        assert price.part_of_each(2) == 0
    for _ in range(200):
        known.observe(1, 0.018)
    assert price.part_of_each(2) == pytest.approx(0.1, rel=1e-3)


def test_requests_that_come_and_go_are_worth_their_part_of_what_they_accept():
    assert step_of([7, 5, 6], apart=True).saved(np.array([4.0, 0, 2])) == 2
