"""What drafts for texts: several drafters, the policy that combines them, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..drafters.base import (
    ChildDraw,
    Drafter,
    DraftSession,
    Feedback,
    FeedbackNeeds,
    Graphs,
    Target,
    close_all,
)
from ..drafters.expected import Expected, ExpectedTexts
from ..drafters.feedback import RowFeedback, prompt_feedback
from ..plugins import every
from ..structures import draft_tree
from ..structures.evidence import OpenDrafts
from ..system.locks import Lock
from ..types.token_tree import Forest, Int32Array, Int64Array, TokenTree
from .acceptance import Calibrator
from .account import Account, Drafting
from .cost_model import CostModel
from .cost_store import CostKey, CostModels
from .planner import Budget, Planner
from .stats import CallStats, Stats


class DraftingPolicy:
    """Drafters, and how their drafts are judged, combined and paid for.

    What is learnt of a model is kept by model: how often drafts were accepted by its fingerprint,
    t(n) and the account of time by model and kind of call.

    Args: see :class:`~hf_retrieval_assist.assistants.Assistant`.
    """

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
        costs: CostModels | None = None,
    ):
        if fixed_width is not None and fixed_width < 1:
            raise ValueError(f"fixed_width: expected at least 1, got {fixed_width}")
        if graphs not in (True, False, "fused"):
            raise ValueError(f"graphs: expected True, False or 'fused', got {graphs!r}")
        # The rule of a paper knows of no others.
        others = [] if budget == "paper" else [make() for make in every("drafters")]
        self.drafters = (*drafters, *others)
        self.planner = Planner(budget, max_nodes)
        self.reroute = reroute
        self.graphs = graphs
        self.fixed_width = fixed_width
        self.extra_memory = extra_memory
        self.residual = residual
        self.costs = CostModels() if costs is None else costs
        self._accounts: dict[CostKey, Account] = {}
        self._calibrators: dict[str, tuple[Calibrator, ...]] = {}
        self._names = _distinct([drafter.name for drafter in self.drafters])
        self.stats = Stats(self._names, self._calibrators)
        self.needs_feedback = any(drafter.needs != FeedbackNeeds() for drafter in self.drafters)
        self.top_k = max((drafter.needs.top_k for drafter in self.drafters), default=0)
        self.needs_all_logits = any(drafter.needs.logits for drafter in self.drafters)
        self.needs_logits = self.needs_all_logits or self.top_k > 0
        layers = (drafter.needs.hidden_layers for drafter in self.drafters)
        self.hidden_layers = tuple(dict.fromkeys(filter(None, layers)))
        self.learn = True
        self.expected = Expected()
        self.records: list[Any] = []
        self._lock = Lock()

    def calibrators(self, fingerprint: str) -> tuple[Calibrator, ...]:
        """Of each drafter, how often its drafts for one model were accepted."""
        with self._lock:
            if fingerprint not in self._calibrators:
                # The judgement of costly drafters is better and stays; papers know of no others.
                paper = self.planner.budget == "paper"
                self._calibrators[fingerprint] = tuple(
                    Calibrator(drafter.evidence, beside=number > 0 and drafter.defers and not paper)
                    for number, drafter in enumerate(self.drafters)
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
                planner = Planner("auto", self.planner.max_nodes, self.planner.exploration)
                costly = [drafter.costly for drafter in self.drafters]
                self._accounts[key] = Account(planner, costly)
            return self._accounts[key]

    def may_rest(self) -> bool:
        """Whether calls may be decoded plainly.

        Drafters that read hidden states could not learn from such calls, texts that are expected
        are worth a try, and plain forwards have another width than a fixed one.
        """
        return not self.hidden_layers and not self.expected and self.fixed_width is None

    def start(
        self, prompt_ids: NDArray[np.int32], target: Target, row: int = 0, batch_size: int = 1
    ) -> AssistantSession:
        """A session for one prompt (int32 [length], without padding), a row of a batch."""
        expected = self.expected.of_row(row, batch_size)
        told = replace(
            target, expected=expected, forms=self.expected.forms, learn=self.learn, row=row
        )
        return AssistantSession(self, prompt_ids, told)

    def choose(self, sessions: Sequence[DraftSession], drafts: Sequence[TokenTree]) -> TokenTree:
        """What `budget="paper"` verifies of the calibrated drafts, one of each session."""
        return union(drafts)

    def begin(self, price: CostModel | None = None, account: Account | None = None) -> Drafting:
        """A step at a price, t(n) for one row, in which all draft whom no account leaves alone."""
        return Drafting(price, self.planner if account is None else account.planner, account)

    def propose(
        self,
        sessions: Sequence[AssistantSession],
        drafting: Drafting | None = None,
        budget: int | None = None,
    ) -> Forest:
        """One tree for each text, merged of what each drafter proposes in one call.

        Args:
            sessions: the texts, of one model; at least one.
            drafting: the step; None: all draft, whatever it takes.
            budget: the most nodes of each drafter; None: the planner's number.

        Raises:
            ValueError: a draft breaks the contract of a token tree; names the drafter.
        """
        drafting = drafting or self.begin()
        if budget is None:
            budget = self.planner.request(drafting.price)
        trees = nothing = Forest.empty(len(sessions))
        proposals: list[Forest] = []
        for row, session in enumerate(sessions):
            session.proposed = proposals, row
        for number in range(len(self.drafters)):
            drafts = nothing
            if budget and self._asks(number, sessions, trees, drafting):
                drafts = self._draft(number, sessions, budget, trees, drafting)
                known, trees = trees.expected_tokens, trees.merge(drafts)
                gained = trees.expected_tokens - known
                drafting.uses[number].promised += gained / len(sessions)
            proposals.append(drafts)
        if self.planner.budget == "paper":
            trees = Forest.of([self.choose(s.sessions, s.drafts) for s in sessions])
        return trees

    def _asks(
        self, number: int, sessions: Sequence[AssistantSession], trees: Forest, drafting: Drafting
    ) -> bool:
        """Whether to ask a drafter beside these drafts of those before it."""
        costly = self.drafters[number].costly
        for session in sessions:
            if not session.idle[number] and (not costly or session.sessions[number].ready):
                return drafting.asks(number, _missed(trees) if costly else 1.0)
        return False

    def _draft(
        self,
        number: int,
        sessions: Sequence[AssistantSession],
        budget: int,
        earlier: Forest,
        drafting: Drafting,
    ) -> Forest:
        """A drafter's proposals, checked and calibrated beside those of the drafters before it."""
        drafter, cost, use = self.drafters[number], drafting.price, drafting.uses[number]
        started = time.perf_counter()
        self._learn_deferred(number, sessions)
        caught_up = time.perf_counter()
        own = [session.sessions[number] for session in sessions]
        if drafter.costly and cost is not None and self.planner.budget == "auto":
            for one in own:
                one.see_cost(cost.curve)
        drafts = self._checked(number, sessions, drafter.propose_rows(own, [budget] * len(own)))
        texts = [session.calibrations[number] for session in sessions]
        drafts = sessions[0].calibrators[number].calibrate(texts, drafts, earlier)
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
            for draft in drafts:
                if (fault := draft.fault(*limits)) is not None:
                    raise ValueError(
                        f"drafter {drafter.name!r}: its draft breaks a tree's contract: {fault}"
                    )
        if not any(session.restricting for session in sessions):
            return Forest.of(drafts)
        pairs = zip(sessions, drafts, strict=True)
        return Forest.of([session.restrict(draft) for session, draft in pairs])

    def commit(
        self,
        sessions: Sequence[AssistantSession],
        tokens: Sequence[Sequence[int]],
        feedbacks: Sequence[RowFeedback | None],
        drafting: Drafting | None = None,
    ) -> None:
        """Append to texts the tokens of a step, and learn what they and the forward show.

        Drafters that sat the step out learn the tokens before they draft again, except those that
        read hidden states.
        """
        for session, token_ids in zip(sessions, tokens, strict=True):
            session.expected.follow(token_ids)
            if len(token_ids) > 1:
                self.stats.count_sources(session.drafts, token_ids[:-1])
        flat = draft_tree.flattened(tokens)
        for number, drafter in enumerate(self.drafters):
            if all(session.idle[number] for session in sessions):
                continue
            asked = drafting is None or drafting.asked(number)
            if not asked and not drafter.needs.hidden_layers:
                for session, token_ids in zip(sessions, tokens, strict=True):
                    session.deferred[number] += token_ids
                continue
            started = time.perf_counter()
            self._learn_deferred(number, sessions)
            shown = [None if found is None else found.share(drafter.needs) for found in feedbacks]
            self._learn(number, sessions, tokens, flat, shown)
            if drafting is not None and number in drafting.uses:
                drafting.uses[number].seconds += time.perf_counter() - started

    def _learn(
        self,
        number: int,
        sessions: Sequence[AssistantSession],
        tokens: Sequence[Sequence[int]],
        flat: tuple[Int32Array, Int64Array],
        feedbacks: Sequence[Feedback | None],
    ) -> None:
        """Tell one drafter what came, all texts at once; `flat` has all tokens in one array."""
        if sessions:
            texts = [session.calibrations[number] for session in sessions]
            sessions[0].calibrators[number].judge(texts, *flat)
            rows = [session.sessions[number] for session in sessions]
            self.drafters[number].commit_rows(rows, tokens, feedbacks)

    def _learn_deferred(self, number: int, sessions: Sequence[AssistantSession]) -> None:
        """Pass a drafter the tokens it skipped."""
        late = [session for session in sessions if session.deferred[number]]
        if late:
            tokens = [session.deferred[number] for session in late]
            for session in late:
                session.deferred[number] = []
            flat = draft_tree.flattened(tokens)
            self._learn(number, late, tokens, flat, [None] * len(late))

    def end(
        self,
        drafting: Drafting,
        sessions: Sequence[AssistantSession],
        trees: Sequence[TokenTree],
        tokens: Sequence[Sequence[int]],
        width: int,
    ) -> None:
        """Enter a step in its account.

        Args:
            drafting: the step.
            sessions: the texts that were drafted for.
            trees: what was verified of each.
            tokens: what came of each; of rows in step, fewer than were right.
            width: tokens per row that were verified.
        """
        if drafting.account is None or drafting.is_plain:
            return
        rows = max(1, len(sessions))
        brought = [0.0] * len(self.drafters)
        for session, tree, token_ids in zip(sessions, trees, tokens, strict=True):
            if not token_ids:
                continue
            drafting.planner.learn(*_promise(session, tree, token_ids))
            accepted, known = np.array(token_ids[:-1], np.int32), 0
            for number, draft in enumerate(session.drafts if len(accepted) else ()):
                reached = len(draft.follow(accepted))
                brought[number] += max(0, reached - known) / rows
                known = max(known, reached)
        drafting.end(width, brought)

    def count(self, call: CallStats) -> None:
        """Add a finished call to the statistics."""
        with self._lock:
            self.stats.record(call)


def _promise(
    session: AssistantSession, tree: TokenTree, token_ids: Sequence[int]
) -> tuple[float, int]:
    """Tokens that a verified tree was expected to bring, and those that came of it; where nothing
    was verified, the same of the drafts' best guess at the next token, which the text judges."""
    if len(tree):
        return tree.expected_tokens, len(token_ids) - 1
    proposals, row = session.proposed
    prob, token = max((forest.first(row) for forest in proposals), default=(0.0, -1))
    return prob, int(token == token_ids[0])


def _missed(trees: Forest) -> float:
    """Mean share of next tokens that trees are expected not to have among their first nodes."""
    hits = [min(1.0, float(tree.probs[tree.parents < 0].sum())) for tree in trees]
    return 1 - sum(hits) / max(1, len(hits))


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, a repeated one with its number: "suffix", "suffix 2"."""
    numbers = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name if n == 1 else f"{name} {n}" for name, n in zip(names, numbers, strict=True)]


def union(drafts: Sequence[TokenTree]) -> TokenTree:
    """One tree of all paths."""
    return reduce(TokenTree.merge, drafts, TokenTree.empty())


class AssistantSession:
    """The draft sessions of one text, with probabilities calibrated on it."""

    def __init__(self, assistant: DraftingPolicy, prompt_ids: NDArray[np.int32], target: Target):
        self.assistant = assistant
        self.prompt_ids = prompt_ids
        self.vocab_size = target.vocab_size
        self.sessions: list[DraftSession] = []
        with ExitStack() as started:
            started.callback(close_all, self.sessions)
            for drafter in assistant.drafters:
                self.sessions.append(drafter.start(prompt_ids, target))
            started.pop_all()
        self.idle = [session.idle for session in self.sessions]
        self.unasked = {*range(len(self.sessions))}
        # Asked in every step, so without those that know of nothing.
        knows = DraftSession.restrict
        self.restricting = [
            s for s in self.sessions if type(s).restrict is not knows and not s.idle
        ]
        # Of each drafter, tokens that it learns all at once before it drafts again.
        self.deferred: list[list[int]] = [[] for _ in self.sessions]
        self.calibrators = assistant.calibrators(target.fingerprint)
        self.calibrations = [OpenDrafts() for _ in self.calibrators]
        self.expected = ExpectedTexts(target.expected)
        # The last proposals, one of each drafter for all rows, and the row of this text.
        self.proposed: tuple[list[Forest], int] = [], 0

    def begin(
        self,
        token_ids: Sequence[int],
        logits: torch.Tensor | None = None,
        hidden_states: dict[tuple[int, ...], torch.Tensor] | None = None,
    ) -> None:
        """Append the first tokens, which follow the prefill; see `prompt_feedback`."""
        self.expected.follow(token_ids)
        for session, drafter in zip(self.sessions, self.assistant.drafters, strict=True):
            feedback = prompt_feedback(self.prompt_ids, drafter.needs, logits, hidden_states or {})
            session.commit(token_ids, feedback)

    def propose(self, drafting: Drafting | None = None, budget: int | None = None) -> TokenTree:
        """The tree of this text alone; see `DraftingPolicy.propose`."""
        return self.assistant.propose([self], drafting, budget)[0]

    @property
    def drafts(self) -> list[TokenTree]:
        """The last proposals, one of each drafter, calibrated."""
        proposals, row = self.proposed
        return [proposal[row] for proposal in proposals]

    def restrict(self, tree: TokenTree) -> TokenTree:
        """The nodes that every drafter thinks can still be chosen."""
        for session in self.restricting:
            tree = session.restrict(tree)
        return tree

    def draw_at(self, path: Sequence[int]) -> ChildDraw | None:
        """What children were drawn from below a path of tokens, for residual verification."""
        found = (session.draw_at(path) for session in self.sessions)
        return next((drawn for drawn in found if drawn is not None), None)

    def commit(self, token_ids: Sequence[int], feedback: RowFeedback | None) -> None:
        """Append tokens to the text and learn what they and the forward show."""
        self.assistant.commit([self], [token_ids], [feedback])

    def learn_plain(self, token_ids: Sequence[int]) -> None:
        """Append a text that was decoded without drafts."""
        self.expected.follow(token_ids)
        for waiting in self.deferred:
            waiting += token_ids

    def close(self) -> None:
        """Close the drafters' sessions, the others too where one raises."""
        try:
            for number in range(len(self.sessions)):
                self.assistant._learn_deferred(number, [self])
        finally:
            close_all(self.sessions)
