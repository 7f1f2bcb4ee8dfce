"""Assistants: drafters, the policy that combines them, and what users pass to `generate`."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .drafters.base import Drafter, DraftSession, Feedback, Target
from .engine import decode
from .stats import CallStats, Stats
from .token_tree import TokenTree

DEFAULT_NODES = 64


class Assistant:
    """Drafts for `model.generate(..., assistant=...)`; reusable over calls, models and threads.

    Args:
        drafters: where drafts come from; each is asked at every step.
        max_nodes: nodes that one step may draft at most.
    """

    def __init__(self, drafters: Sequence[Drafter], max_nodes: int = DEFAULT_NODES):
        self.drafters = tuple(drafters)
        self.max_nodes = max_nodes
        self.stats = Stats()
        self._lock = threading.Lock()

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
        return decode(
            model,
            self,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            **model_kwargs,
        )

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> AssistantSession:
        """A session for one prompt (int32 [length], without padding)."""
        return AssistantSession(self, prompt_ids, target)

    def combine(self, sessions: Sequence[DraftSession], budget: int) -> TokenTree:
        """One tree from the drafters' proposals: here, their union."""
        tree = TokenTree.empty()
        for session in sessions:
            tree = tree.merge(session.propose(budget))
        return tree

    def plan(self, trees: list[TokenTree]) -> list[TokenTree]:
        """The part of the proposals, one per row, that is worth verifying."""
        return [tree.prune(self.max_nodes) for tree in trees]

    def fingerprint(self, model: Any) -> str:
        return fingerprint(model)

    def record(self, call: CallStats) -> None:
        with self._lock:
            self.stats.record(call)


class AssistantSession:
    """The draft sessions of one text."""

    def __init__(self, assistant: Assistant, prompt_ids: NDArray[np.int32], target: Target):
        self.assistant = assistant
        self.sessions = [drafter.start(prompt_ids, target) for drafter in assistant.drafters]

    def propose(self, max_depth: int | None = None) -> TokenTree:
        tree = self.assistant.combine(self.sessions, self.assistant.max_nodes)
        return tree if max_depth is None else tree.cut_depth(max_depth)

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        for session in self.sessions:
            session.commit(token_ids, feedback)

    def close(self) -> None:
        for session in self.sessions:
            session.close()


def fingerprint(model: Any) -> str:
    """Equal for equal configurations of a model: what is learnt from outputs is shared by these."""
    text = model.config.to_json_string(use_diff=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
