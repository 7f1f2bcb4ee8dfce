"""What drafts for texts: several drafters, the policy that combines them, and what they cost."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from ..cache.prefixes import Prefixes
from ..draft_models.residual import ChildDraw
from ..drafters.base import Drafter, DraftSession, Feedback, FeedbackNeeds, Target
from ..drafters.expected import Expected
from ..drafters.feedback import RowFeedback, of_layers, prompt_feedback
from ..host.feature_taps import HiddenLayers
from ..structures import draft_tree
from ..structures.evidence import OpenDrafts
from ..system.locks import Lock
from ..types.token_tree import Forest, Int32Array, Int64Array, Limits, TokenTree
from . import cost_store
from .acceptance import Calibrator
from .account import Account
from .cost_model import CostModel
from .cost_store import CostKey, CostModels
from .planner import Budget, Planner
from .stats import CallStats, Stats
from .step import DraftedStep

Graphs = bool | Literal["fused"]
"""Whether forwards may be repeated from recordings; see :class:`~..assistants.Assistant`."""


class Options(TypedDict, total=False):
    """What every preset takes besides its own arguments; see :class:`~..assistants.Assistant`."""

    reroute: bool
    graphs: Graphs
    fixed_width: int | None
    extra_memory: int | None
    trust_forward: bool
    prefixes: Prefixes | None
    costs: CostModels | None


@dataclass
class Ask:
    """What one step wants drafted.

    Attributes:
        sessions: the texts, of one model; at least one.
        price: t(n) for one row; None: only tokens are counted.
        account: says who drafts; None: everybody does.
        budget: the most nodes of each drafter; None: the planner's number.
        limits: of the forward that is to verify the drafts, which is asked where there are any.
        agree: makes of this process's plan, and the number of texts, that of all processes which
            compute the model together; None: there are no others.
        apart: whether the texts are of requests that come and go; else their call ends with the
            last of them.
    """

    sessions: Sequence[AssistantSession]
    price: CostModel | None = None
    account: Account | None = None
    budget: int | None = None
    limits: Callable[[], Limits] = Limits
    agree: Callable[[Forest, int], Forest] | None = None
    apart: bool = False


class Outcome(NamedTuple):
    """What a step brought to one text.

    Attributes:
        session: the text.
        tokens: that came, in their order; none where the text had ended.
        tree: what was verified; None: the step did not draft for the text.
        feedback: what the forward showed; None: nothing.
    """

    session: AssistantSession
    tokens: Sequence[int]
    tree: TokenTree | None = None
    feedback: RowFeedback | None = None


class DraftingPolicy:
    """Drafters, and how their drafts are judged, combined and paid for.

    What is learnt of a model is kept by model: how often drafts were accepted by its fingerprint,
    t(n) and the account of time by model and kind of call.

    Args: see :class:`~hf_retrieval_assist.assistants.Assistant`.

    Attributes:
        joins: whether drafts become one tree, in which a later one adds to those before it; a paper
            whose rule is another overrides `propose`.
        teaches: whether texts teach later ones.
        expected: texts that outputs are expected to resemble.
    """

    joins = True

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        budget: Budget = "auto",
        max_nodes: int = 255,
        reroute: bool = True,
        graphs: Graphs = True,
        fixed_width: int | None = None,
        extra_memory: int | None = None,
        residual: bool = False,
        trust_forward: bool = False,
        prefixes: Prefixes | None = None,
        costs: CostModels | None = None,
    ):
        if fixed_width is not None and fixed_width < 1:
            raise ValueError(f"fixed_width: expected at least 1, got {fixed_width}")
        if graphs not in (True, False, "fused"):
            raise ValueError(f"graphs: expected True, False or 'fused', got {graphs!r}")
        self.drafters = (*drafters,)
        self.planner = Planner(budget, max_nodes)
        self.reroute = reroute
        self.graphs = graphs
        self.fixed_width = fixed_width
        self.extra_memory = extra_memory
        self.residual = residual
        self.trust_forward = trust_forward
        self.prefixes = prefixes
        self.costs = cost_store.OF_PROCESS if costs is None else costs
        self._accounts: dict[CostKey, Account] = {}
        self._calibrators: dict[str, tuple[Calibrator, ...]] = {}
        names = _distinct([drafter.name for drafter in self.drafters])
        self.stats = Stats(names)
        self.needs_feedback = any(drafter.needs != FeedbackNeeds() for drafter in self.drafters)
        self.top_k = max((drafter.needs.top_k for drafter in self.drafters), default=0)
        self.needs_all_logits = any(drafter.needs.logits for drafter in self.drafters)
        self.needs_logits = self.needs_all_logits or self.top_k > 0
        layers = [drafter.needs.hidden_layers for drafter in self.drafters]
        self.hidden_layers = tuple(dict.fromkeys(asked for asked in layers if asked))
        self.teaches = True
        self.expected = Expected()
        self._lock = Lock()

    def twin(self, **changes: Any) -> Self:
        """The same policy, which shares what it learns, with other attributes."""
        twin = copy.copy(self)
        vars(twin).update(changes)
        return twin

    def calibrators(self, fingerprint: str) -> tuple[Calibrator, ...]:
        """How often each drafter's drafts for one model were accepted."""
        with self._lock:
            if fingerprint not in self._calibrators:
                self._calibrators[fingerprint] = tuple(
                    Calibrator(drafter.evidence) for drafter in self.drafters
                )
            return self._calibrators[fingerprint]

    def account(self, key: CostKey) -> Account | None:
        """The account of time of calls of one kind; None where drafters are always asked.

        Under "auto" drafters that have not earned their own time lately are left alone.
        """
        if self.planner.budget != "auto":
            return None
        with self._lock:
            if key not in self._accounts:
                costly = [drafter.costly for drafter in self.drafters]
                self._accounts[key] = Account(costly, key.batch_size)
            return self._accounts[key]

    def start(
        self, prompt_ids: NDArray[np.int32], target: Target, row: int = 0, batch_size: int = 1
    ) -> AssistantSession:
        """A session for one prompt (int32 [length], without padding), a row of a batch."""
        expected = self.expected.of_row(row, batch_size)
        forms = self.expected.forms
        told = replace(target, expected=expected, forms=forms, learn=self.teaches)
        return AssistantSession(self, prompt_ids, told)

    def draft(self, ask: Ask) -> DraftedStep:
        """Begin a step: ask the drafters, and plan what is to be verified of their drafts.

        Raises:
            ValueError: a draft breaks the contract of a token tree; names the drafter.
        """
        step = DraftedStep(ask.price, ask.account, ask.sessions, apart=ask.apart)
        budget = self.planner.request(ask.price) if ask.budget is None else ask.budget
        drafts = self.propose(step, budget)
        limits = ask.limits() if ask.agree or len(drafts.token_ids) else Limits()
        belief = 1.0 if ask.account is None else ask.account.belief
        texts = len(ask.sessions)
        weights = texts * step.weights if texts > 1 and ask.account is not None else None
        step.trees = self.planner.plan(drafts, ask.price, limits, belief, weights)
        if ask.agree is not None:
            step.trees = ask.agree(step.trees, len(ask.sessions))
        return step

    def propose(self, step: DraftedStep, budget: int) -> Forest:
        """One tree for each text of a step, merged of at most `budget` nodes of each drafter; what
        each drafter proposed is kept in `step.proposals`."""
        sessions, known = step.sessions, 0.0
        trees = nothing = Forest.empty(len(sessions))
        for number, drafter in enumerate(self.drafters):
            drafts = nothing
            able = budget and self.can_draft(number, sessions)
            if able and step.asks(number, _missed(trees) if drafter.costly else 1.0):
                drafts = self.ask_drafter(number, step, sessions, budget)
                trees = trees.merge(drafts)
                if step.account is not None:
                    promised = trees.expected_tokens
                    step.uses[number].promised += (promised - known) / len(sessions)
                    known = promised
            step.proposals.append(drafts)
        return trees

    def can_draft(self, number: int, sessions: Sequence[AssistantSession]) -> bool:
        """Whether a drafter has something to draft from for any of these texts."""
        costly = self.drafters[number].costly
        for text in sessions:  # no generator, which Python calls for each
            if not text.idle[number] and (text.sessions[number].ready or not costly):
                break
        else:
            return False
        return True

    def ask_drafter(
        self,
        number: int,
        step: DraftedStep,
        sessions: Sequence[AssistantSession],
        budget: int,
    ) -> Forest:
        """A drafter's proposals for some texts of a step, checked and calibrated."""
        drafter, use = self.drafters[number], step.uses[number]
        own = [session.sessions[number] for session in sessions]
        asked = time.perf_counter()
        if drafter.costly:
            price = step.price if self.planner.budget == "auto" else None
            drafter.prepare(own, None if price is None else price.curve)
        started = time.perf_counter()
        use.uncharged += started - asked
        if any(session.deferred[number] for session in sessions):
            self._catch_up(number, sessions)
        caught_up = time.perf_counter()
        drafts = self._checked(number, sessions, drafter.propose(own, [budget] * len(own)))
        texts = [session.calibrations[number] for session in sessions]
        drafts = sessions[0].calibrators[number].calibrate(texts, drafts)
        ended = prepared = time.perf_counter()
        # The first draft of a text reads its prompt.
        if not any(number in session.unasked for session in sessions):
            prepared = caught_up
        use.owed += prepared - started
        use.seconds += ended - prepared
        for session in sessions:
            session.unasked.discard(number)
        return drafts

    def _checked(
        self, number: int, sessions: Sequence[AssistantSession], drafts: Sequence[TokenTree]
    ) -> Forest:
        """Drafts that keep a tree's contract, within what other drafters know to be possible."""
        drafter = self.drafters[number]
        limits = sessions[0].vocab_size, sessions[0].calibrators[number].n_classes
        if len(drafts) != len(sessions):
            raise ValueError(
                f"drafter {drafter.name!r}: expected a draft for each of {len(sessions)} rows, "
                f"got {len(drafts)}"
            )
        whole = [drafts] if isinstance(drafts, Forest) else drafts
        if any(draft.fault(*limits) for draft in whole):
            drafts = [draft.without_nan() for draft in drafts]
            if fault := next(filter(None, [draft.fault(*limits) for draft in drafts]), None):
                raise ValueError(
                    f"drafter {drafter.name!r}: its draft breaks a tree's contract: {fault}"
                )
        if not any(session.restricting for session in sessions):
            return Forest.of(drafts)
        pairs = zip(sessions, drafts, strict=True)
        return Forest.of([session.restrict(draft) for session, draft in pairs])

    def learn(self, step: DraftedStep | None, outcomes: Sequence[Outcome], width: int = 1) -> None:
        """End a step: append to texts what it brought, learn from it, and enter it in its account.

        Drafters that sat the step out learn the tokens before they draft again, except those that
        read hidden states.

        Args:
            step: None where nothing was to be drafted: then no drafter sat out.
            outcomes: of the texts.
            width: tokens per row that were verified.
        """
        grown = [outcome for outcome in outcomes if outcome.tokens]
        for outcome in grown:
            outcome.session.came += len(outcome.tokens)
        sessions, tokens = [one.session for one in grown], [one.tokens for one in grown]
        flat = draft_tree.flattened(tokens)
        feedbacks = [outcome.feedback for outcome in grown]
        judged = step is not None and step.account is not None
        for number, drafter in enumerate(self.drafters):
            if not [session for session in sessions if not session.idle[number]]:
                continue
            use = None if step is None else step.uses.get(number)
            if use is None and judged and not drafter.needs.hidden_layers:
                for session, token_ids in zip(sessions, tokens, strict=True):
                    session.deferred[number] += token_ids
                continue
            started = time.perf_counter()
            if any(session.deferred[number] for session in sessions):
                self._catch_up(number, sessions)
            shown = of_layers(feedbacks, drafter.needs.hidden_layers)
            self._learn(number, sessions, tokens, flat, shown)
            if use is not None:
                use.seconds += time.perf_counter() - started
        if step is not None and step.uses:
            self._credit(step, outcomes, width)

    def _learn(
        self,
        number: int,
        sessions: Sequence[AssistantSession],
        tokens: Sequence[Sequence[int]],
        flat: tuple[Int32Array, Int64Array],
        feedbacks: Sequence[Feedback | None],
    ) -> None:
        """Tell one drafter what came, all texts at once; `flat` has all tokens in one array."""
        texts = [session.calibrations[number] for session in sessions]
        sessions[0].calibrators[number].judge(texts, *flat)
        rows = [session.sessions[number] for session in sessions]
        self.drafters[number].commit(rows, tokens, feedbacks)

    def _catch_up(self, number: int, sessions: Sequence[AssistantSession]) -> None:
        """Pass a drafter the tokens it skipped."""
        late = [session for session in sessions if session.deferred[number]]
        tokens = [session.deferred[number] for session in late]
        for session in late:
            session.deferred[number] = []
        flat = draft_tree.flattened(tokens)
        self._learn(number, late, tokens, flat, [None] * len(late))

    def _credit(self, step: DraftedStep, outcomes: Sequence[Outcome], width: int) -> None:
        """Count what became of drafts, in the statistics and in the step's account."""
        places = {session: place for place, session in enumerate(step.sessions)}
        drafted = [
            (places[one.session], one.tokens, one.tree)
            for one in outcomes
            if one.tokens and one.tree is not None
        ]
        if not drafted:
            return
        # Accepted tokens, of the drafters up to each of them together; the first line is nobody's.
        reached = np.zeros((1 + len(self.drafters), len(places)))
        for place, tokens, _ in drafted:
            reached[1:, place] = step.reached(place, tokens[:-1])
        self.stats.count_sources(reached[1:].sum(1).astype(int).tolist())
        if step.account is None:
            return
        promises = np.zeros((2, len(places)))  # tokens, and how many of them came
        for place, tokens, tree in drafted:
            promises[:, place] = step.promise(place, tree, tokens)
        promised, came = (len(places) * promises @ step.weights).tolist()
        step.account.count_promise(promised, came)
        saved = step.saved(np.maximum.accumulate(reached))
        step.end(width, np.diff(saved).tolist())

    def count(self, call: CallStats) -> None:
        """Add a finished call to the statistics."""
        with self._lock:
            self.stats.add(call)


def _missed(trees: Forest) -> float:
    """Mean share of next tokens that trees are expected not to have among their first nodes."""
    hits = [min(1.0, float(tree.probs[tree.parents < 0].sum())) for tree in trees]
    return 1 - sum(hits) / max(1, len(hits))


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, a repeated one with its number: "suffix", "suffix 2"."""
    numbers = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name if n == 1 else f"{name} {n}" for name, n in zip(names, numbers, strict=True)]


def _close_all(sessions: Sequence[DraftSession]) -> None:
    """Close each session in turn, the others too where one raises."""
    with ExitStack() as stack:
        for session in reversed(sessions):
            stack.callback(session.close)


class AssistantSession:
    """The draft sessions of one text, with probabilities calibrated on it."""

    def __init__(self, policy: DraftingPolicy, prompt_ids: NDArray[np.int32], target: Target):
        self.policy = policy
        self.prompt_ids = prompt_ids
        self.vocab_size = target.vocab_size
        self.sessions: list[DraftSession] = []
        with ExitStack() as started:
            started.callback(_close_all, self.sessions)
            for drafter in policy.drafters:
                self.sessions.append(drafter.start(prompt_ids, target))
            started.pop_all()
        self.idle = [session.idle for session in self.sessions]
        self.unasked = {*range(len(self.sessions))}
        # Asked in every step, so without those that know of nothing.
        knows = DraftSession.restrict
        self.restricting = [
            s for s in self.sessions if type(s).restrict is not knows and not s.idle
        ]
        # Tokens that each drafter learns all at once before it drafts again.
        self.deferred: list[list[int]] = [[] for _ in self.sessions]
        self.calibrators = policy.calibrators(target.fingerprint)
        self.calibrations = [OpenDrafts() for _ in self.calibrators]
        self.expected = target.expected
        self.came = 0  # tokens behind the first

    def begin(
        self,
        token_ids: Sequence[int],
        logits: torch.Tensor | None = None,
        hidden_states: dict[HiddenLayers, torch.Tensor] | None = None,
    ) -> None:
        """Append the first tokens, which follow the prefill; see `prompt_feedback`."""
        for session, drafter in zip(self.sessions, self.policy.drafters, strict=True):
            feedback = prompt_feedback(self.prompt_ids, drafter.needs, logits, hidden_states or {})
            drafter.commit([session], [token_ids], [feedback])

    def restrict(self, tree: TokenTree) -> TokenTree:
        """The nodes that every drafter thinks can still be chosen."""
        for session in self.restricting:
            tree = session.restrict(tree)
        return tree

    def draw_at(self, path: Sequence[int]) -> ChildDraw | None:
        """What children were drawn from below a path of tokens, for residual verification."""
        found = (session.draw_at(path) for session in self.sessions)
        return next((drawn for drawn in found if drawn is not None), None)

    def close(self) -> None:
        """Close the drafters' sessions, the others too where one raises."""
        try:
            for number, waiting in enumerate(self.deferred):
                if waiting:
                    self.policy._catch_up(number, [self])
        finally:
            _close_all(self.sessions)
