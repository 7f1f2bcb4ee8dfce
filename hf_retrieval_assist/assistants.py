"""Assistants: drafters, the policy that combines them, and what users pass to `generate`."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .drafters.base import ChildDraw, Drafter, DraftSession, FeedbackNeeds, Target, close_all
from .drafters.expected import Expected, ExpectedTexts, Text
from .drafters.feedback import RowFeedback, prompt_feedback
from .planning.acceptance import Calibrator
from .planning.consultation import Consultation
from .planning.cost_model import CostModel
from .planning.cost_store import CostKey, CostModels
from .planning.paces import Paces
from .planning.planner import Budget, Planner
from .planning.thrift import Thrift
from .record import CallRecord, Record, Step
from .record.html import assistant_html
from .stats import CallStats, Stats
from .system.locks import Lock
from .token_tree import TokenTree


class Assistant:
    """Drafts for `model.generate(..., assistant=...)`; reusable over calls, models and threads.

    Args:
        drafters: where drafts come from.
        budget: how many nodes a step verifies. "auto": as many as pay for themselves at the
            measured cost of this model on this machine, maybe none. "paper": the rule of the
            preset's paper. A number: that many.
        max_nodes: nodes that drafters are asked for at most under "auto".
        reroute: on a CPU, compute linear layers and attention of verification forwards by the
            fastest method for few rows; see :class:`~hf_retrieval_assist.kernels.reroute.reroute`.
        graphs: on a CUDA device, launch a verification forward at once, as a graph; see
            :mod:`~hf_retrieval_assist.target.fixed_verifier`.
        residual: verify sampled drafts by residual sampling; for drafters that record what they
            drew from.
        costs: measured costs, to share between assistants; None: its own. With
            `CostModels(CostModels.user_directory())` they are kept from one process to the next.

    Attributes:
        learn: whether texts teach later ones; see `private`.
        expected: texts that outputs are expected to resemble; see `expecting`.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        budget: Budget = "auto",
        max_nodes: int = 256,
        reroute: bool = True,
        graphs: bool = True,
        residual: bool = False,
        costs: CostModels | None = None,
    ):
        self.drafters = tuple(drafters)
        self.planner = Planner(budget, max_nodes)
        self.reroute = reroute
        self.graphs = graphs
        self.residual = residual
        self.costs = CostModels() if costs is None else costs
        self._thrifts: dict[CostKey, Thrift] = {}
        self._paces: dict[CostKey, Paces] = {}
        self.consultations = tuple(Consultation() for _ in self.drafters)
        # Costly drafters are asked for a better judgement, which stands; papers know of no others.
        self.calibrators = tuple(
            Calibrator(drafter.priors(), beside=i > 0 and not drafter.costly and budget != "paper")
            for i, drafter in enumerate(self.drafters)
        )
        names = _distinct([drafter.name for drafter in self.drafters])
        self.stats = Stats(dict(zip(names, self.calibrators, strict=True)))
        self.needs_feedback = any(drafter.needs != FeedbackNeeds() for drafter in self.drafters)
        self.top_k = max((drafter.needs.top_k for drafter in self.drafters), default=0)
        self.needs_all_logits = any(drafter.needs.logits for drafter in self.drafters)
        self.needs_logits = self.needs_all_logits or self.top_k > 0
        layers = (drafter.needs.hidden_layers for drafter in self.drafters)
        self.hidden_layers = tuple(dict.fromkeys(filter(None, layers)))
        self.learn = True
        self.expected = Expected()
        self._lock = Lock()
        self._records: list[Record] = []

    def private(self) -> Assistant:
        """This assistant for texts that must leave no trace in what later texts are drafted from.

        It drafts from all that was learnt so far. Statistics and measured costs, which hold no
        text, stay common to both.
        """
        assistant = copy.copy(self)
        assistant.learn = False
        return assistant

    def expecting(
        self, *texts: Text, rows: Sequence[Sequence[Text]] = (), tokenizer: Any = None
    ) -> Assistant:
        """This assistant for outputs that are expected to resemble `texts`.

        Such as the file that is to be edited, a template, or last week's report, none of which
        has to be in the prompt. Retrieval drafts from them as from the prompt and joins them
        again after each change. `stats` tells how many of their tokens came out.

        Args:
            texts: strings or token ids, for every row of a batch.
            rows: the texts of each row of a batch alone. Where `generate` returns several
                sequences of each prompt, one entry a prompt.
            tokenizer: of the model; for strings.

        Raises:
            TypeError: a string without a tokenizer, or ids that are no integers.
            ValueError: an id that no vocabulary has. `generate` raises it for a batch whose size is
                no multiple of `rows`.
        """
        assistant = copy.copy(self)
        assistant.expected = Expected.of(texts, rows, tokenizer)
        return assistant

    def attached(self, model: Any) -> AbstractContextManager[Assistant]:
        """A scope in which calls of `model.generate` by others are assisted; see `attach`."""
        from . import attachment

        return attachment.attached(model, self)

    def __copy__(self) -> Assistant:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Assistant:
        """Itself: callers copy the arguments of `generate`, and what was learnt is not copied."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__}: an assistant's native structures, locks and what it learnt "
            "cannot be pickled; make one in every process, over one OutputMemory(path=...) where "
            "processes are to share what they learn"
        )

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Decode; what `generate(custom_generate=assistant)` calls."""
        # Here, because engines that have a loop of their own draft with assistants too.
        from .decoding.decode import decode

        return decode(
            model,
            self,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            **model_kwargs,
        )

    def start(
        self, prompt_ids: NDArray[np.int32], target: Target, row: int = 0, batch_size: int = 1
    ) -> AssistantSession:
        """A session for one prompt (int32 [length], without padding), a row of a batch."""
        expected = self.expected.of_row(row, batch_size)
        return AssistantSession(
            self, prompt_ids, replace(target, learn=self.learn, expected=expected)
        )

    def choose(self, sessions: Sequence[DraftSession], drafts: Sequence[TokenTree]) -> TokenTree:
        """What `budget="paper"` verifies of the calibrated drafts, one of each session."""
        return union(drafts)

    def plan(
        self,
        trees: Sequence[TokenTree],
        cost: CostModel | None,
        extra_tokens: int = 0,
        packed: bool = False,
    ) -> list[TokenTree]:
        """The part of each row's draft that is worth verifying.

        Args:
            trees: one per row.
            cost: t(n) of this batch; None, in a simulation that counts tokens only, keeps all
                that the drafters were asked for.
            extra_tokens: that the forward carries besides roots and nodes.
            packed: whether rows are verified without padding, each as many nodes as it is worth.
        """
        if cost is None:
            return [tree.prune(self.planner.request()) for tree in trees]
        if packed:
            return self.planner.plan_packed(trees, cost)
        return self.planner.plan_batch(trees, cost, extra_tokens)

    def commit(
        self,
        sessions: Sequence[AssistantSession],
        tokens: Sequence[Sequence[int]],
        feedbacks: Sequence[RowFeedback | None],
    ) -> None:
        """Append to texts the tokens of a step, and learn what they and the forward show."""
        for session, token_ids in zip(sessions, tokens, strict=True):
            session.expected.follow(token_ids)
            session.learn_deferred()
        self.learn_rows(sessions, tokens, feedbacks)

    def learn_rows(
        self,
        sessions: Sequence[AssistantSession],
        tokens: Sequence[Sequence[int]],
        feedbacks: Sequence[RowFeedback | None],
    ) -> None:
        """Tell the drafters what came, all texts at once."""
        ids = [np.array(token_ids, np.int32) for token_ids in tokens]
        for number, drafter in enumerate(self.drafters):
            for session, token_ids in zip(sessions, ids, strict=True):
                session.calibrations[number].commit(token_ids)
            drafter.commit_rows(
                [session.sessions[number] for session in sessions],
                tokens,
                [None if shown is None else shown.share(drafter.needs) for shown in feedbacks],
            )

    def thrift(self, key: CostKey) -> Thrift | None:
        """The account of drafting for forwards of one kind; None where drafters are always asked.

        Under "auto" drafters that have not earned their own time lately are not asked.
        """
        if self.planner.budget != "auto":
            return None
        return self._thrifts.setdefault(key, Thrift())

    def paces(self, key: CostKey) -> Paces | None:
        """The paces of calls of one kind, drafted and plain; None where all are drafted for.

        Under "auto" calls rest from drafting that makes them slower. Drafters that read hidden
        states could not learn from such calls, and texts that are expected are worth a try.
        """
        if self.planner.budget != "auto" or self.hidden_layers or self.expected:
            return None
        return self._paces.setdefault(key, Paces())

    @contextmanager
    def record(
        self, tokenizer: Any = None, on_step: Callable[[Step], None] | None = None
    ) -> Iterator[Record]:
        """Record every call that starts inside the block, in whatever thread.

        Args:
            tokenizer: to show tokens as text.
            on_step: called with every finished step, while the call goes on.
        """
        record = Record(tokenizer, on_step)
        with self._lock:
            self._records.append(record)
        try:
            yield record
        finally:
            with self._lock:
                self._records.remove(record)

    def observe(self, prompts: Sequence[NDArray[np.int32]], call: CallStats) -> CallRecord | None:
        """What a call that starts now has to tell its steps to; None where nobody records."""
        with self._lock:
            records = list(self._records)
        if not records:
            return None
        listeners = [record.on_step for record in records if record.on_step is not None]
        observed = CallRecord(prompts, call, self.drafters, listeners)
        for record in records:
            record.calls.append(observed)
        return observed

    def count(self, call: CallStats) -> None:
        """Add a finished call to the statistics."""
        with self._lock:
            self.stats.record(call)

    def _repr_html_(self) -> str:
        """Drafters and figures, for notebooks."""
        return assistant_html(self)


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, a repeated one with its number: "suffix", "suffix 2"."""
    numbers = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name if n == 1 else f"{name} {n}" for name, n in zip(names, numbers, strict=True)]


def union(drafts: Sequence[TokenTree]) -> TokenTree:
    """One tree of all paths."""
    tree = TokenTree.empty()
    for draft in drafts:
        tree = tree.merge(draft)
    return tree


class AssistantSession:
    """The draft sessions of one text, with probabilities calibrated on it."""

    def __init__(self, assistant: Assistant, prompt_ids: NDArray[np.int32], target: Target):
        self.assistant = assistant
        self.prompt_ids = prompt_ids
        self.sessions: list[DraftSession] = []
        with ExitStack() as started:
            started.callback(close_all, self.sessions)
            for drafter in assistant.drafters:
                self.sessions.append(drafter.start(prompt_ids, target))
            started.pop_all()
        self._deferred: list[int] = []
        self.calibrations = [calibrator.session() for calibrator in assistant.calibrators]
        self.expected = ExpectedTexts(target.expected)
        self.drafts: list[TokenTree] = []  # the last proposals, one of each drafter

    def begin(
        self,
        token_ids: Sequence[int],
        logits: torch.Tensor | None = None,
        hidden_states: dict[tuple[int | str, ...], torch.Tensor] | None = None,
    ) -> None:
        """Append the first tokens, which follow the prefill; see `prompt_feedback`."""
        self.expected.follow(token_ids)
        for session, drafter in zip(self.sessions, self.assistant.drafters, strict=True):
            feedback = prompt_feedback(self.prompt_ids, drafter.needs, logits, hidden_states or {})
            session.commit(token_ids, feedback)

    def propose(
        self,
        max_depth: int | None = None,
        cost: CostModel | None = None,
        budget: int | None = None,
    ) -> TokenTree:
        """One tree of what the drafters propose, at most `max_depth` deep.

        Args:
            max_depth: None for any.
            cost: t(n); None where only tokens are counted.
            budget: nodes that every drafter is asked for; None: what the planner asks for.
        """
        self.learn_deferred()
        planner = self.assistant.planner
        if budget is None:
            budget = planner.request(cost)
        tree = TokenTree.empty()
        self.drafts = []
        for i, drafter in enumerate(self.assistant.drafters):
            if drafter.costly and cost is not None and planner.budget == "auto":
                draft = self._consult(i, tree, budget, cost)
            else:
                draft = self._draft(i, tree, budget)
            self.drafts.append(draft)
            tree = tree.merge(draft)
        if planner.budget == "paper":
            tree = self.assistant.choose(self.sessions, self.drafts)
        return tree if max_depth is None else tree.cut_depth(max_depth)

    def _draft(self, number: int, earlier: TokenTree, budget: int) -> TokenTree:
        """A drafter's draft beside those of the earlier ones, `earlier`."""
        return self.calibrations[number].calibrate(self.sessions[number].propose(budget), earlier)

    def _consult(self, number: int, tree: TokenTree, budget: int, cost: CostModel) -> TokenTree:
        """A costly drafter's draft, where it is expected to bring more than it takes."""
        record = self.assistant.consultations[number]
        if not record.worthwhile(tree, cost):
            return TokenTree.empty()
        self.sessions[number].see_cost(cost)
        started = time.perf_counter()
        draft = self._draft(number, tree, budget)
        seconds = time.perf_counter() - started
        record.observe(draft, seconds)
        return draft

    def draw_at(self, path: Sequence[int]) -> ChildDraw | None:
        """What children were drawn from below a path of tokens, for residual verification."""
        found = (session.draw_at(path) for session in self.sessions)
        return next((drawn for drawn in found if drawn is not None), None)

    def commit(self, token_ids: Sequence[int], feedback: RowFeedback | None) -> None:
        """Append tokens to the text and learn what they and the forward show."""
        self.assistant.commit([self], [token_ids], [feedback])

    def defer(self, token_ids: Sequence[int]) -> None:
        """Append tokens that nothing is learnt from before it has to be, and then all at once."""
        if self.assistant.hidden_layers:
            raise ValueError("expected feedback for drafters that read hidden states")
        self.expected.follow(token_ids)
        self._deferred += token_ids
        self.drafts = []

    def learn_deferred(self) -> None:
        """Learn from what was put off."""
        if self._deferred:
            tokens, self._deferred = self._deferred, []
            self.assistant.learn_rows([self], [tokens], [None])

    def close(self) -> None:
        """Close the drafters' sessions, the others too where one raises."""
        try:
            self.learn_deferred()
        finally:
            close_all(self.sessions)
