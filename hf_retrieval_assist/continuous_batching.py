"""Drafts for transformers' continuous batching: `generate_batch`, managers, `transformers serve`.

Each request is a text of its own, which drafts from the prompt, from its output and from what other
requests have finished. The account of time decides for all requests of a step together how many
drafted tokens it carries: beside many requests, or where prompts need the room, drafts shrink to
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import transformers

from .assistants import Assistant
from .drafters.base import Target
from .drafters.feedback import RowFeedback
from .drafting.policy import AssistantSession
from .host import transformers_private
from .host.fingerprint import fingerprint
from .host.positions import position_limit
from .host.private_names import CONTINUOUS_BATCHING, absent
from .kernels.norms import learn_norms
from .kernels.reroute import reroute
from .planning.account import Drafting
from .planning.cost_store import CostKey, size_bucket
from .planning.cost_views import PackedCost
from .stats import CallStats
from .structures import draft_tree
from .system.log import get_logger
from .token_tree import Forest, Limits, TokenTree
from .verification.top_logits import ComputedTop

if TYPE_CHECKING:
    from .host.continuous_batching import FedRequest

logger = get_logger(__name__)


def objection(assistant: Assistant) -> str | None:
    """Why an assistant's drafters cannot draft here; None: they can."""
    if assistant.hidden_layers or assistant.residual or assistant.expected.rows:
        return (
            "assistant: expected drafters that need no hidden states, no residual sampling and no "
            "texts by row in continuous batching"
        )
    return None


def draft_for(manager: Any, assistant: Assistant | None) -> None:
    """Let a manager of continuous batching draft, where its release has what that takes; None: let
    a manager that has drafted before do without."""
    if lacking := absent(CONTINUOUS_BATCHING):
        if assistant is not None:
            logger.warning_once(
                f"continuous batching without the assistant: transformers "
                f"{transformers.__version__} lacks what it drafts with: {'; '.join(lacking)}"
            )
        return
    from .host.continuous_batching import serve

    serve(manager, None if assistant is None else RequestDrafts(assistant, manager.model))


class RequestDrafts:
    """The drafts of a manager's requests. A fault in drafting ends the drafts of the requests that
    it was for, and no request.

    Args:
        assistant: where drafts come from.
        model: that the manager generates with.
    """

    def __init__(self, assistant: Assistant, model: Any):
        self.assistant = assistant
        self.target = Target(
            vocab_size=model.config.get_text_config(decoder=True).vocab_size,
            device=model.device,
            fingerprint=fingerprint(model),
            model=model,
        )
        self._key = CostKey(
            fingerprint=self.target.fingerprint,
            device=str(model.device),
            dtype=str(model.dtype),
            attention=f"paged {transformers_private.attention_of(model.config)}",
            batch_size=1,
            cache_length=size_bucket(0),
        )
        self._positions = position_limit(model)
        self._texts: dict[int, _Text] = {}  # by the identity of their requests, which they hold
        self._told: set[type[Exception]] = set()
        self._step = _Step(None, {})
        self._forwards = 0  # behind a prefill, and not counted for `stats` yet
        self._rerouted = assistant.reroute and model.device.type == "cpu"
        if self._rerouted:
            learn_norms(model)

    def check_twin(self, assistant: Assistant) -> None:
        """ValueError for an assistant of a request that is no twin of the manager's."""
        if assistant.drafters != self.assistant.drafters or assistant.expected.rows:
            raise ValueError(
                "assistant: expected a twin of the manager's own, by private() or expecting(text), "
                f"got {assistant!r}"
            )

    def scope(self) -> reroute:
        """In which steps are computed."""
        return reroute(self._rerouted)

    def propose(self, requests: Sequence[Any], room: int, longest: int) -> dict[str, list[int]]:
        """Drafts by request, whose expected tokens pay for the time they take."""
        self._step = _Step(None, {})
        depths: dict[_Text, int] = {}
        for text in map(self._text, requests if room else ()):
            depth = min(longest, self._left(text.state))
            if text.session and depth > 0:
                depths[text] = depth
        with self._at_the_cost_of(*depths):
            self._propose(depths, len(requests), room)
        chains = self._step.chains
        return {name: chain.token_ids.tolist() for name, chain in chains.items() if len(chain)}

    def _left(self, state: Any) -> int:
        """Tokens that a draft may have: the last one that may be generated needs none."""
        left: int = self._positions - len(state.initial_tokens) - state.generated_len()
        if state.max_new_tokens is None:
            return left
        return min(left, math.ceil(state.max_new_tokens) - state.generated_len() - 1)

    def _propose(self, depths: dict[_Text, int], requests: int, room: int) -> None:
        if not depths:
            return
        cost = PackedCost(self.assistant.costs.get(self._key), requests)
        account = self.assistant.account(replace(self._key, batch_size=size_bucket(len(depths))))
        drafting = self.assistant.begin(cost, account)
        sessions = [text.session for text in depths if text.session]
        try:
            drafts = self.assistant.propose(sessions, drafting)
        except Exception:
            for text, session in zip(depths, sessions, strict=True):
                with self._at_the_cost_of(text):
                    self.assistant.propose([session])
            if all(text.session for text in depths):
                raise
            return
        limits = Limits([*depths.values()], chains=True, packed=True)
        planned = drafting.planner.plan(drafts, cost, limits)
        kept = _most_probable(planned, room)
        names = [text.state.request_id for text in depths]
        self._step = _Step(drafting, dict(zip(names, kept, strict=True)))

    def follow(self, fed: Sequence[FedRequest], logits: torch.Tensor) -> None:
        """The texts of these requests have grown; `logits` [places, vocab_size] are processed."""
        rows: list[tuple[_Text, FedRequest, list[int]]] = []
        going_on = False
        for one in fed:
            text = self._text(one.state)
            new = text.new()
            going_on |= text.begun
            if text.begun:
                text.counts.count_step(len(one.draft), one.kept - 1)
                rows += [(text, one, new)] if new and text.session else []
            elif new and text.session:
                shown = logits[one.place : one.place + 1] if self.assistant.needs_logits else None
                with self._at_the_cost_of(text):
                    text.session.begin(new, shown)
            text.begun = True
        self._forwards += going_on
        with self._at_the_cost_of(*(text for text, _, _ in rows)):
            self._commit(rows, logits)

    def _commit(
        self, rows: Sequence[tuple[_Text, FedRequest, list[int]]], logits: torch.Tensor
    ) -> None:
        """Learn by how much the texts have grown, and what their logits show."""
        drafting, chains = self._step
        sessions = [text.session for text, _, _ in rows if text.session]
        tokens = [new for _, _, new in rows]
        feedbacks = [self._feedback(text, one, new, logits) for text, one, new in rows]
        self.assistant.commit(sessions, tokens, feedbacks, drafting)
        if drafting is not None:
            asked = [one.state.request_id in chains for _, one, _ in rows]
            trees = [
                chains.get(one.state.request_id, TokenTree.empty()).prune(len(one.draft))
                for _, one, _ in rows
            ]
            self.assistant.end(
                drafting,
                list(compress(sessions, asked)),
                list(compress(trees, asked)),
                list(compress(tokens, asked)),
                1 + sum(map(len, trees)),
            )

    def _feedback(
        self, text: _Text, one: FedRequest, new: Sequence[int], logits: torch.Tensor
    ) -> RowFeedback | None:
        """What a step showed of a text that has got these tokens by it."""
        if not self.assistant.needs_feedback or len(new) != one.kept:
            return None
        places = np.arange(one.place, one.place + 1 + len(one.draft))
        return RowFeedback(
            token_ids=np.array([text.token_before(new), *one.draft], np.int32),
            accepted=np.arange(len(new), dtype=np.int32),
            logits=logits[places] if self.assistant.needs_all_logits else None,
            hidden_states={},
            top=ComputedTop(logits, places),
        )

    def keep(self, requests: Sequence[Any]) -> None:
        """Finish the texts of all other requests, from which later ones draft."""
        for identity in self._texts.keys() - {id(state) for state in requests}:
            text = self._texts.pop(identity)
            with self._at_the_cost_of():
                text.close()
            text.counts.forwards, self._forwards = self._forwards, 0
            self.assistant.count(text.counts)

    def go_on(self, before: Any, state: Any) -> None:
        """A request was sent back to wait as another one, whose prompt is the text so far."""
        if (text := self._texts.pop(id(before), None)) is not None:
            text.state = state
            self._texts[id(state)] = text

    def time(self, tokens: int, seconds: float) -> None:
        """A step that fed nothing but these tokens of decoding requests took so long."""
        with self._at_the_cost_of():
            self.assistant.costs.get(self._key).observe(tokens, seconds)

    def blame(self, requests: Sequence[Any], error: Exception) -> None:
        """A step failed with drafts of these requests; with none, by the kernels."""
        self._rerouted &= bool(requests)
        with self._at_the_cost_of(*map(self._text, requests)):
            raise error

    @contextmanager
    def _at_the_cost_of(self, *texts: _Text) -> Iterator[None]:
        """A scope in which a fault ends the drafts of these texts."""
        try:
            yield
        except Exception as error:
            if type(error) not in self._told:
                self._told.add(type(error))
                logger.warning("requests go on without drafts", exc_info=error)
            for text in texts:
                with suppress(Exception):
                    text.close()

    def _text(self, state: Any) -> _Text:
        if id(state) not in self._texts:
            text = self._texts[id(state)] = _Text(state)
            assistant = getattr(state, "assistant", None) or self.assistant
            with self._at_the_cost_of(text):
                text.session = assistant.start(self.target.known(state.initial_tokens), self.target)
        return self._texts[id(state)]


class _Step(NamedTuple):
    """What was proposed for a step."""

    drafting: Drafting | None
    chains: dict[str, TokenTree]  # by request


class _Text:
    """A request's text.

    Attributes:
        session: what drafts for it; None: nothing does.
        counts: of its steps.
        begun: whether it has more than its prompt.
    """

    def __init__(self, state: Any):
        self.state = state
        self.session: AssistantSession | None = None
        self.counts = CallStats(tier="continuous batching", calls=1)
        self.begun = False
        self._known = len(state.initial_tokens)

    def new(self) -> list[int]:
        """The tokens that it has got since it was last looked at."""
        tokens: list[int] = self.state.generated_tokens
        new = tokens[self._known - len(self.state.initial_tokens) :]
        self._known += len(new)
        self.counts.tokens += len(new)
        return new

    def token_before(self, new: Sequence[int]) -> int:
        """The last token before the newest ones."""
        tokens = self.state.generated_tokens
        return tokens[-1 - len(new)] if len(tokens) > len(new) else self.state.initial_tokens[-1]

    def close(self) -> None:
        """Nothing drafts for it from now on."""
        session, self.session = self.session, None
        if session is not None:
            self.counts.count_expected(session.expected.accepted, session.expected.rejected)
            session.close()


def _most_probable(chains: Sequence[TokenTree], room: int) -> list[TokenTree]:
    """The `room` most probable nodes of all chains."""
    forest = Forest.of(chains)
    if forest.nodes <= room:
        return list(chains)
    rows, _ = draft_tree.rank(forest.probs, forest.offsets)
    counts = np.bincount(rows[:room], minlength=len(chains))
    return [chain.prune(int(count)) for chain, count in zip(chains, counts, strict=True)]
