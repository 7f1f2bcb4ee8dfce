"""Drafts for transformers' continuous batching: `generate_batch`, managers, `transformers serve`.

Each request is a text of its own, which drafts from the prompt, from its output and from what other
requests have finished. The account of time decides for all requests of a step together how many
drafted tokens it carries: beside many requests, or where prompts need the room, drafts shrink to
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from .host.private_names import CONTINUOUS_BATCHING, absent
from .kernels.norms import learn_norms
from .kernels.reroute import reroute
from .planning.account import Drafting
from .planning.cost_store import CostKey, size_bucket
from .planning.cost_views import PackedCost
from .stats import CallStats
from .structures import draft_tree
from .system.log import get_logger
from .token_tree import Forest, TokenTree
from .verification.top_logits import ComputedTop

if TYPE_CHECKING:
    from .host.continuous_batching import FedRequest

logger = get_logger(__name__)


def draft_for(manager: Any, assistant: Assistant) -> None:
    """Let a manager of continuous batching draft, where its release has what that takes.

    Raises:
        ValueError: an assistant that cannot draft here; see :class:`RequestDrafts`.
    """
    drafts = RequestDrafts(assistant, manager.model)
    if lacking := absent(CONTINUOUS_BATCHING):
        logger.warning_once(
            f"continuous batching without the assistant: transformers {transformers.__version__} "
            f"lacks what it drafts with: {'; '.join(lacking)}"
        )
        return
    from .host.continuous_batching import serve

    serve(manager, drafts)


class RequestDrafts:
    """The drafts of a manager's requests.

    Args:
        assistant: where drafts come from.
        model: that the manager generates with.

    Raises:
        ValueError: an assistant whose drafters need what the forward does not show here.
    """

    def __init__(self, assistant: Assistant, model: Any):
        if assistant.hidden_layers or assistant.residual or assistant.expected.rows:
            raise ValueError(
                "assistant: expected drafters that need no hidden states, no residual sampling and "
                "no texts by row in continuous batching"
            )
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
        self._texts: dict[str, _Text] = {}
        self._assigned: dict[str, Assistant] = {}
        self._step: _Step | None = None
        self._forwards = 0  # behind a prefill, and not counted for `stats` yet
        self._rerouted = assistant.reroute and model.device.type == "cpu"
        if self._rerouted:
            learn_norms(model)

    def assign(self, request_id: str, assistant: Assistant) -> None:
        """Let a request that has not begun have a twin of the assistant.

        Raises:
            ValueError: another assistant, or texts by row.
        """
        if assistant.drafters != self.assistant.drafters or assistant.expected.rows:
            raise ValueError(
                "assistant: expected a twin of the manager's own, by private() or expecting(text), "
                f"got {assistant!r}"
            )
        self._assigned[request_id] = assistant

    def scope(self) -> reroute:
        """In which steps are computed."""
        return reroute(self._rerouted)

    def propose(self, requests: Sequence[Any], room: int, longest: int) -> dict[str, list[int]]:
        """Drafts by request, whose expected tokens pay for the time they take."""
        growing = [state for state in requests if _left(state, longest)] if room else []
        self._step = None
        if not growing:
            return {}
        sessions = [self._text(state).session for state in growing]
        depths = [_left(state, longest) for state in growing]
        cost = PackedCost(self.assistant.costs.get(self._key), len(requests))
        account = self.assistant.account(replace(self._key, batch_size=size_bucket(len(growing))))
        drafting = None if account is None else account.begin(cost)
        trees = self.assistant.propose(sessions, depths, cost, drafting=drafting)
        chains = [tree.best_chain() for tree in trees]
        planned = self.assistant.plan(chains, cost, packed=True, drafting=drafting)
        kept = _most_probable(planned, room)
        by_request = {s.request_id: chain for s, chain in zip(growing, kept, strict=True)}
        self._step = _Step(drafting, by_request)
        return {name: chain.token_ids.tolist() for name, chain in by_request.items() if len(chain)}

    def follow(self, fed: Sequence[FedRequest], logits: torch.Tensor) -> None:
        """Learn by how much the texts have grown, and what their logits show."""
        begun = [(one, self._text(one.state)) for one in fed]
        going_on = [(one, text) for one, text in begun if text.begun]
        for one, text in begun:
            if not text.begun:
                shown = logits[one.place : one.place + 1] if self.assistant.needs_logits else None
                text.begin(one.state, shown)
        self._forwards += bool(going_on)
        step, self._step = self._step or _Step(None, {}), None
        sessions = [text.session for _, text in going_on]
        tokens = [text.extend(one) for one, text in going_on]
        feedbacks = [
            self._feedback(one, new, logits) for (one, _), new in zip(going_on, tokens, strict=True)
        ]
        self.assistant.commit(sessions, tokens, feedbacks, step.drafting)
        if step.drafting is not None:
            asked = [one.state.request_id in step.chains for one, _ in going_on]
            trees = [
                step.chains.get(one.state.request_id, TokenTree.empty()).prune(len(one.draft))
                for one, _ in going_on
            ]
            self.assistant.settle(
                step.drafting,
                list(compress(sessions, asked)),
                list(compress(trees, asked)),
                list(compress(tokens, asked)),
                1 + sum(map(len, trees)),
            )

    def _feedback(
        self, one: FedRequest, new: Sequence[int], logits: torch.Tensor
    ) -> RowFeedback | None:
        """What a step showed of a text that has got these tokens by it."""
        if not self.assistant.needs_feedback or len(new) != one.kept:
            return None
        text = one.state.initial_tokens + one.state.generated_tokens
        places = np.arange(one.place, one.place + 1 + len(one.draft))
        return RowFeedback(
            token_ids=np.array([text[-1 - len(new)], *one.draft], np.int32),
            accepted=np.arange(len(new), dtype=np.int32),
            logits=logits[places] if self.assistant.needs_all_logits else None,
            hidden_states={},
            top=ComputedTop(logits, places),
        )

    def keep(self, request_ids: set[str]) -> None:
        """Finish the texts of all other requests, from which later ones draft."""
        going_on = {_root(request_id) for request_id in request_ids}
        for request_id in self._texts.keys() - request_ids:
            text = self._texts.pop(request_id)
            text.close()
            text.counts.forwards, self._forwards = self._forwards, 0
            self.assistant.count(text.counts)
            if (root := _root(request_id)) not in going_on:
                self._assigned.pop(root, None)

    def time(self, tokens: int, seconds: float) -> None:
        """Learn what a step takes that feeds so many tokens."""
        self.assistant.costs.get(self._key).observe(tokens, seconds)

    def _text(self, state: Any) -> _Text:
        if state.request_id not in self._texts:
            assistant = self._assigned.get(_root(state.request_id), self.assistant)
            self._texts[state.request_id] = _Text(assistant, self.target, state)
        return self._texts[state.request_id]


class _Step(NamedTuple):
    """What was proposed for a step."""

    drafting: Drafting | None
    chains: dict[str, TokenTree]  # by request


class _Text:
    """What a request's drafters know of its text."""

    def __init__(self, assistant: Assistant, target: Target, state: Any):
        prompt = target.known(state.initial_tokens)
        self.session: AssistantSession = assistant.start(prompt, target)
        self.counts = CallStats(tier="continuous batching", calls=1)
        self.known = len(prompt)
        self.begun = False

    def begin(self, state: Any, logits: torch.Tensor | None) -> None:
        """Append what follows the prompt; `logits` [1, vocab_size] of its last token."""
        self.session.begin(self._new(state), logits)
        self.begun = True

    def extend(self, one: FedRequest) -> list[int]:
        """Count a step; the tokens that it brought."""
        self.counts.count_step(len(one.draft), one.kept - 1)
        return self._new(one.state)

    def _new(self, state: Any) -> list[int]:
        new: list[int] = (state.initial_tokens + state.generated_tokens)[self.known :]
        self.known += len(new)
        self.counts.tokens += len(new)
        return new

    def close(self) -> None:
        """The text has ended."""
        self.counts.count_expected(self.session.expected.accepted, self.session.expected.rejected)
        self.session.close()


def _root(request_id: str) -> str:
    """The request that one of several sequences was asked for by."""
    return request_id.partition("__child#")[0]


def _left(state: Any, longest: int) -> int:
    """Tokens that a draft may have: the last one that may be generated needs none."""
    if state.max_new_tokens is None:
        return longest
    return max(0, min(longest, state.max_new_tokens - state.generated_len() - 1))


def _most_probable(chains: Sequence[TokenTree], room: int) -> list[TokenTree]:
    """The `room` most probable nodes of all chains."""
    forest = Forest.of(chains)
    if forest.nodes <= room:
        return list(chains)
    rows, _ = draft_tree.rank(forest.probs, forest.offsets)
    counts = np.bincount(rows[:room], minlength=len(chains))
    return [chain.prune(int(count)) for chain, count in zip(chains, counts, strict=True)]
