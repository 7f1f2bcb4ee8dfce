"""Sessions of drafters that follow the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..token_tree import TokenTree
from .base import DraftSession, Feedback


class FeatureStream(Protocol):
    """A drafting model and how far it has followed one text.

    Attributes:
        feature_width: of what `extend` takes.
        chunk: features that may wait before they are followed in any case.
    """

    feature_width: int
    chunk: int

    def extend(self, features: torch.Tensor, token_ids: torch.Tensor, first_position: int) -> None:
        """Follow the text by m tokens.

        Args:
            features: [m, feature_width], the target's, at m consecutive positions.
            token_ids: int64 [m], for each the token one position later.
            first_position: position of the first feature.
        """

    def draft(self, keep: int) -> TokenTree:
        """A tree below the last token followed, which is the text's; `keep` (at least 1) is how
        many of its nodes will be kept."""


class FeatureSession(DraftSession):
    """A text and a stream that follows it.

    What `commit` brings waits until a draft is wanted, so that a drafter which is only asked now
    and then catches up in one forward.

    Args:
        stream: fresh, used by this session only.
        prompt_ids: int32 [length], without padding.
        max_nodes: of a draft.
    """

    def __init__(
        self, stream: FeatureStream, prompt_ids: NDArray[np.int32], max_nodes: int
    ) -> None:
        self._stream = stream
        self._tokens: list[int] = prompt_ids.tolist()
        self._max_nodes = max_nodes
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._after_prefill = True
        self._reached = 0

    def propose(self, budget: int) -> TokenTree:
        keep = min(budget, self._max_nodes)
        if keep < 1 or self._reached != len(self._tokens) - 1:
            return TokenTree.empty()
        self._catch_up()
        return self._stream.draft(keep).prune(keep)

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        known = len(self._tokens)
        self._tokens.extend(map(int, token_ids))
        after_prefill, self._after_prefill = self._after_prefill, False
        if feedback is None or feedback.hidden_states is None:
            return
        features = self._checked(feedback.hidden_states)
        # A prefill ends with the last token that was known; a step begins with it.
        first = known - len(features) if after_prefill else known - 1
        features = features[: len(self._tokens) - 1 - first]
        self._pending.append((first, features))
        self._reached = first + len(features)
        if sum(len(waiting) for _, waiting in self._pending) >= self._stream.chunk:
            self._catch_up()

    def close(self) -> None:
        del self._stream
        self._pending.clear()

    def _checked(self, features: torch.Tensor) -> torch.Tensor:
        width = self._stream.feature_width
        if features.ndim != 2 or features.shape[1] != width:
            raise ValueError(
                f"feedback.hidden_states: expected [accepted, {width}], got {tuple(features.shape)}"
            )
        return features

    def _catch_up(self) -> None:
        """Follow what the target has processed since the last draft."""
        for first, features in _consecutive(self._pending):
            tokens = torch.tensor(self._tokens[first + 1 : first + 1 + len(features)])
            self._stream.extend(features, tokens, first)
        self._pending.clear()


def _consecutive(
    parts: list[tuple[int, torch.Tensor]],
) -> list[tuple[int, torch.Tensor]]:
    """(first position, features) of each step, joined where one begins at the end of another."""
    runs: list[tuple[int, list[torch.Tensor]]] = []
    end = -1
    for first, features in parts:
        if first != end:
            runs.append((first, []))
        runs[-1][1].append(features)
        end = first + len(features)
    return [(first, torch.cat(group)) for first, group in runs]
