"""Retrieved drafts for transformers' own assisted decoding loop.

That loop verifies one chain for one row, and accepts a draft by comparing it with what the model
selects; `generate(assistant=...)` does more. This class is for code that is built on the loop.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from transformers.generation import CandidateGenerator

from .assistants import Assistant
from .drafters.base import Target
from .policy.policy import Ask, Outcome
from .types.token_tree import Limits


class RetrievalCandidateGenerator(CandidateGenerator):
    """The likeliest chain of an assistant's drafts.

    A text is finished by `close`, or when the loop lets go of its generator, which it never closes.

    Args:
        assistant: where drafts come from. Drafters that learn from the model's logits or hidden
            states learn nothing here, since the loop shows processed scores only.
        target: the model that is assisted; see :meth:`for_model`.
        max_length: of the whole text; drafts end one token before it. None: no limit.
    """

    def __init__(self, assistant: Assistant, target: Target, max_length: int | None = None):
        self.assistant = assistant
        self.target = target
        self.max_length = max_length
        self._session: Any = None
        self._step: Any = None
        self._finish: Any = None
        self._committed = 0

    @classmethod
    def for_model(
        cls, assistant: Assistant, model: Any, max_length: int | None = None
    ) -> RetrievalCandidateGenerator:
        """A generator for one call to a model's loop."""
        return cls(assistant, Target.of(model), max_length)

    def get_candidates(
        self, input_ids: torch.LongTensor
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """A chain behind a text.

        Args:
            input_ids: int64 [1, length], the text so far.

        Returns:
            int64 [1, length + drafted], and None: drafts have no logits.

        Raises:
            ValueError: more than one row.
        """
        if len(input_ids) != 1:
            raise ValueError(f"input_ids: expected one row, got {len(input_ids)}")
        text = self.target.known(input_ids[0].cpu()).tolist()
        if self._session is None:
            # The last token of the prompt is the first that a session takes as generated.
            policy, prompt_ids = self.assistant.policy, np.array(text[:-1], np.int32)
            self._session = policy.start(prompt_ids, self.target)
            self._finish = weakref.finalize(self, self._session.close)
            self._session.begin(text[-1:])
            self._committed = len(text)
        self._commit(text)
        room = None if self.max_length is None else max(0, self.max_length - len(text) - 1)
        ask = Ask([self._session], limits=partial(Limits, [room], chains=True))
        self._step = self.assistant.policy.draft(ask)
        tokens = input_ids.new_tensor(self._step.trees[0].token_ids.tolist())[None]
        return cast(torch.LongTensor, torch.cat([input_ids, tokens], dim=1)), None

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """Learn from the loop's verdict, int64 [1, length] being the text after it."""
        self._commit(self.target.known(input_ids[0].cpu()).tolist())

    def close(self) -> None:
        """Release the draft session; a next text starts a new one."""
        if self._session is not None:
            self._session = self._step = None
            self._finish()

    def _commit(self, text: list[int]) -> None:
        if len(text) > self._committed:
            tree = None if self._step is None else self._step.trees[0]
            outcome = Outcome(self._session, text[self._committed :], tree)
            self.assistant.policy.learn(self._step, [outcome])
            self._committed, self._step = len(text), None
