"""Drafts for transformers' continuous batching: `generate_batch`, managers, `transformers serve`.

Each request is a text of its own, which drafts from the prompt, from its output and from what other
requests have finished. The account of time decides for all requests of a step together how many
drafted tokens it carries: beside many requests, or where prompts need the room, drafts shrink to
nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...assistants import Assistant
from ...drafters.base import Target
from ...drafters.expected import came_out
from ...drafters.feedback import RowFeedback
from ...host import transformers_private
from ...policy.cost_model import CostView
from ...policy.cost_store import CostKey, size_bucket
from ...policy.policy import Ask, AssistantSession, Outcome
from ...policy.stats import CallStats
from ...policy.step import DraftedStep
from ...system.log import get_logger
from ...types.token_tree import Limits, TokenTree
from ...verification.engine import engine_of
from ...verification.verified import TopLogits

if TYPE_CHECKING:
    from .batching import DraftedRequest
    from .paged import PagedStep

logger = get_logger(__name__)


class RequestDrafts:
    """The drafts of a manager's requests. A fault in drafting ends the drafts of the requests that
    it was for, and no request.

    Args:
        assistant: where drafts come from.
        model: that the manager generates with.
    """

    def __init__(self, assistant: Assistant, model: Any):
        self.assistant, self._policy = assistant, assistant.policy
        self.target = Target.of(model)
        self._key = CostKey(
            fingerprint=self.target.fingerprint,
            device=str(model.device),
            dtype=str(model.dtype),
            attention=f"paged {transformers_private.attention_of(model.config)}",
            batch_size=1,
            cache_length=size_bucket(0),
        )
        self._texts: set[_Text] = set()
        self._told: set[type[Exception]] = set()
        self._step: DraftedStep | None = None
        self._begun = self._drafting = 0.0  # when the step did, and its seconds of drafting
        self._uncounted: dict[str, float] = defaultdict(float)  # seconds by phase
        self._engine = engine_of(model.device)
        self._rerouted = self._policy.reroute and self._engine.has_kernels
        self._model, self._repeated, self._lent, self._fed = model, None, False, 0
        if self._rerouted:
            self._engine.prepare(model)

    def check_twin(self, assistant: Assistant) -> None:
        """ValueError for an assistant of a request that is no twin of the manager's."""
        if assistant.drafters != self.assistant.drafters or assistant.expected.rows:
            raise ValueError(
                "assistant: expected a twin of the manager's own, by private() or expecting(text), "
                f"got {assistant!r}"
            )

    def scope(self, requests: int) -> AbstractContextManager[Any]:
        """The scope in which a step of so many requests is computed."""
        return self._engine.scope(self._rerouted, requests)

    def propose(
        self, requests: Sequence[DraftedRequest], longest: Sequence[int], fed: int, room: int
    ) -> list[list[int]]:
        """A draft of each request, of at most so many tokens, and of at most `room` together beside
        `fed` others; their expected tokens pay for the time they take."""
        repeated, texts = self._repeated, len(requests)
        widths = () if repeated is None or not repeated.width(fed, texts) else repeated.widths
        # More would not be repeated, nor be rounded alike in half precision.
        room = min(room, widths[-1] - fed) if widths else room
        cost = CostView(self._policy.costs.get(self._key), widths, rows=texts)
        depths: dict[_Text, int] = {}
        for state, depth in zip(requests, longest, strict=True):
            text = self._text(state)
            if text.session and room and depth > 0:
                depths[text] = depth
        if depths:
            with self._at_the_cost_of(*depths):
                self._propose(depths, cost, room)
        chains = [state.text and state.text.chain for state in requests]
        return [[] if chain is None else chain.token_ids.tolist() for chain in chains]

    def _propose(self, depths: dict[_Text, int], cost: CostView, room: int) -> None:
        account = self._policy.account(replace(self._key, batch_size=size_bucket(len(depths))))
        limits = partial(Limits, [*depths.values()], total=room, chains=True, packed=True)
        sessions = [text.session for text in depths if text.session]
        try:
            step = self._policy.draft(Ask(sessions, cost, account, limits=limits, apart=True))
        except Exception:
            # Whose drafts failed is found out one by one; the step does without any.
            for text, session in zip(depths, sessions, strict=True):
                with self._at_the_cost_of(text):
                    self._policy.draft(Ask([session]))
            if all(text.session for text in depths):
                raise
            return
        self._step = step
        for text, chain in zip(depths, step.trees, strict=True):
            text.chain = chain

    def follow(self, fed: Sequence[DraftedRequest], logits: torch.Tensor) -> None:
        """The texts of these requests have grown; `logits` [places, vocab_size] are processed."""
        grown: list[tuple[DraftedRequest, list[int]]] = []
        for state in fed:
            text = self._text(state)
            begun, new = text.counts.tokens > 0, text.new(state)
            if begun:
                text.counts.count_steps(1, len(state.draft), state.kept - 1)
                text.counts.forwards += 1
                text.counts.saved_forwards += state.kept - 1
            if not new or text.session is None:
                continue
            if begun:
                grown.append((state, new))
                continue
            shown = logits[state.place : state.place + 1] if self._policy.needs_logits else None
            with self._at_the_cost_of(text):
                text.session.begin(new, shown)
        with self._at_the_cost_of(*(state.text for state, _ in grown)):
            outcomes = [self._outcome(state, new, logits) for state, new in grown]
            drafted = sum(len(outcome.tree or ()) for outcome in outcomes)
            self._policy.learn(self._step, outcomes, 1 + drafted)

    def _outcome(self, state: DraftedRequest, new: list[int], logits: torch.Tensor) -> Outcome:
        """How much a text has grown, and what its logits show."""
        chain = state.text.chain
        tree = None if chain is None else chain.prune(len(state.draft))
        return Outcome(state.text.session, new, tree, self._feedback(state, new, logits))

    def _feedback(
        self, state: DraftedRequest, new: Sequence[int], logits: torch.Tensor
    ) -> RowFeedback | None:
        """What a step showed of a text that has got these tokens by it."""
        if not self._policy.needs_feedback or len(new) != state.kept:
            return None
        text = state.generated_tokens
        before = text[-1 - len(new)] if len(text) > len(new) else state.initial_tokens[-1]
        places = np.arange(state.place, state.place + 1 + len(state.draft))
        return RowFeedback(
            token_ids=np.array([before, *state.draft], np.int32),
            accepted=np.arange(len(new), dtype=np.int32),
            parents=np.arange(-1, len(state.draft), dtype=np.int32),
            logits=logits[places] if self._policy.needs_all_logits else None,
            top=TopLogits(logits, places),
        )

    def close_others(self, requests: Sequence[DraftedRequest]) -> None:
        """Finish the texts of all other requests, from which later ones draft."""
        kept = {state.text for state in requests}
        for text in self._texts - kept:
            with self._at_the_cost_of():
                text.close()
            self._policy.count(text.counts)
        self._texts &= kept
        if not requests:
            self.end_repeats()

    def fill(self, step: PagedStep, tokens: int, texts: int) -> int:
        """How many tokens a step feeds with filler, so that its forward may be repeated."""
        if self._rerouted and self._policy.graphs and not self._lent:
            with torch.no_grad():
                self._repeated, self._lent = self._engine.repeated(self._model, step), True
            variant = "repeated" if self._repeated and self._repeated.repeats else ""
            self._key = replace(self._key, cost_variant=variant)
        width = None if self._repeated is None else self._repeated.width(tokens, texts)
        step.forward = None if width is None else self._repeated
        self._fed = tokens if width is None else min(width, step.cache.max_batch_tokens)
        return self._fed

    def end_repeats(self) -> None:
        """Leave what was recorded to calls, and the next step, if the model is what it was."""
        repeated, self._repeated, self._lent = self._repeated, None, False
        if repeated is not None:
            with torch.no_grad():
                repeated.give_back()

    def begin_step(self) -> None:
        """The time of a step begins, for which nothing is drafted yet."""
        self._begun, self._drafting, self._step = time.perf_counter(), 0.0, None
        for text in self._texts:
            text.chain = None

    def end_step(self, grown: Sequence[DraftedRequest], decoding: bool) -> None:
        """Share the time of a step among the requests that have grown by it; what steps took that
        brought no token is shared with the next one's. `decoding`: no prompt was fed."""
        seconds, drafting = time.perf_counter() - self._begun, self._drafting
        if decoding and self._fed and (self._repeated is None or self._repeated.typical):
            with self._at_the_cost_of():
                self._policy.costs.get(self._key).observe(self._fed, seconds - drafting)
        spent = self._uncounted
        spent["forward" if decoding else "prefill"] += seconds - drafting
        spent["draft"] += drafting
        spent["total"] += seconds
        if not grown:
            return
        rows, self._uncounted = len(grown), defaultdict(float)
        for state in grown:
            state.text.counts.count_seconds(**{phase: took / rows for phase, took in spent.items()})

    def blame(self, requests: Sequence[DraftedRequest], error: Exception) -> None:
        """A step failed with drafts of these requests; with none, by the kernels."""
        self._fed = 0  # its time tells nothing
        if not requests:
            self._rerouted = False
            self.end_repeats()
        with self._at_the_cost_of(*map(self._text, requests)):
            raise error

    @contextmanager
    def _at_the_cost_of(self, *texts: _Text) -> Iterator[None]:
        """A scope of drafting, in which a fault ends the drafts of these texts."""
        begun = time.perf_counter()
        try:
            yield
        except Exception as error:
            if type(error) not in self._told:
                self._told.add(type(error))
                logger.warning("requests go on without drafts", exc_info=error)
            for text in texts:
                with suppress(Exception):
                    text.close()
        finally:
            self._drafting += time.perf_counter() - begun

    def _text(self, state: DraftedRequest) -> _Text:
        if state.text is None:
            text = state.text = _Text(len(state.initial_tokens))
            self._texts.add(text)
            policy = (state.assistant or self.assistant).policy
            with self._at_the_cost_of(text):
                text.session = policy.start(self.target.known(state.initial_tokens), self.target)
        return state.text


@dataclass(eq=False)
class _Text:
    """A request's text.

    Attributes:
        known: tokens that have been looked at.
        session: what drafts for it; None: nothing does.
        chain: that was drafted for a step; None: nothing was to be.
        counts: of its steps. It counts every forward that it had a part in, and of what a step
            took as much as the other requests that got tokens by it.
        written: the tokens that it has got.
    """

    known: int
    session: AssistantSession | None = None
    chain: TokenTree | None = None
    counts: CallStats = field(default_factory=partial(CallStats, "continuous batching", calls=1))
    written: list[int] = field(default_factory=list)

    def new(self, state: DraftedRequest) -> list[int]:
        """The tokens that it has got since it was last looked at."""
        new = state.generated_tokens[self.known - len(state.initial_tokens) :]
        self.known += len(new)
        self.written += new
        self.counts.tokens += len(new)
        return new

    def close(self) -> None:
        """Nothing drafts for it from now on."""
        session, self.session = self.session, None
        if session is not None:
            self.counts.count_expected(*came_out(session.expected, self.written))
            session.close()
