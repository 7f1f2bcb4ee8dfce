"""Drafters that follow the target's hidden states, batch by batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafters.base import Drafter, Feedback
from ..token_tree import Float32Array, Forest, TokenTree
from .growth import PRIORS
from .rows import DraftCache, Group, Int64Array, RowSession, chain, groups, parts


@dataclass(frozen=True)
class NewText:
    """How texts went on: for each row the newest columns of w, as many as `counts` says.

    Attributes:
        counts: tokens of each row.
        features: [rows, w, feature_width], the target's, at consecutive positions.
        token_ids: int64 [rows, w], for each the token one position later.
        positions: int64 [rows, w], of the features.
    """

    counts: list[int]
    features: Tensor
    token_ids: Tensor
    positions: Tensor

    def layout(self) -> tuple[Int64Array, Tensor]:
        """Depths and who sees whom; see `chain`."""
        return chain(self.counts, self.features.device)


class Follower(ABC):
    """A drafting model that follows hidden states; what it knows of a text is in the text's row.

    Attributes:
        feature_width: of the hidden states.
        device, dtype: that it wants them in.
        layers: whose last hidden states each row keeps.
        chunk: most tokens of a text that are run at once, and that may wait to be.
    """

    feature_width: int
    device: torch.device
    dtype: torch.dtype
    layers: int = 1
    chunk: int = 512

    @abstractmethod
    def caches(self) -> list[DraftCache]:
        """For one text that has not begun."""

    @abstractmethod
    def follow(self, group: Group, text: NewText) -> None:
        """Take in how the texts of a group went on."""

    @abstractmethod
    def draft(
        self, group: Group, asked: Sequence[FeatureSession], keep: int
    ) -> Sequence[TokenTree]:
        """A tree below the last token of each text of a group, after what waits was followed.

        Args:
            group: of the texts.
            asked: those whose trees count.
            keep: how many nodes of each tree will be kept.
        """

    def catch_up(self, group: Group) -> None:
        """Follow what waits."""
        for text in self.waiting(group):
            self.follow(group, text)

    def waiting(self, group: Group) -> Iterator[NewText]:
        """What the target has processed since it was followed last."""
        rows = group.rows
        counts = [0 if row is None else row.waiting for row in rows]
        features = [
            torch.cat(row.take()) if count else None
            for row, count in zip(rows, counts, strict=True)
        ]
        for spans in parts(counts, self.chunk):
            yield self._part(rows, counts, features, spans)

    def _part(
        self,
        rows: Sequence[Any],
        counts: Sequence[int],
        features: Sequence[Tensor | None],
        spans: Sequence[range],
    ) -> NewText:
        width = max(map(len, spans))
        shown = torch.zeros(
            (len(rows), width, self.feature_width), device=self.device, dtype=self.dtype
        )
        ids, positions = np.zeros((2, len(rows), width), np.int64)
        for number, (row, span) in enumerate(zip(rows, spans, strict=True)):
            found = features[number]
            if found is None or not len(span):
                continue
            own = slice(width - len(span), width)
            shown[number, own] = found[span.start : span.stop].to(self.device, self.dtype)
            first = row.reached - counts[number] + span.start
            positions[number, own] = np.arange(first, first + len(span))
            ids[number, own] = row.tokens[first + 1 : first + 1 + len(span)]
        return NewText(
            [len(span) for span in spans],
            shown,
            torch.from_numpy(ids).to(self.device),
            torch.from_numpy(positions).to(self.device),
        )


class FeatureSession(RowSession):
    """A text and how far a model has followed it.

    What `commit` brings waits until a draft is wanted, so that a drafter which is only asked now
    and then catches up in one forward.

    Args:
        follower: shared with other sessions.
        prompt_ids: int32 [length], without padding.
        max_nodes: of a draft.

    Attributes:
        tokens: ids of the whole text.
        reached: position behind the last hidden state that is known.
        last: of each layer [hidden_size] at the last token that it has read; None before any.
    """

    def __init__(self, follower: Follower, prompt_ids: NDArray[np.int32], max_nodes: int) -> None:
        super().__init__(follower.caches())
        self.follower = follower
        self.tokens: list[int] = prompt_ids.tolist()
        self.reached = 0
        self.last: list[Tensor | None] = [None] * follower.layers
        self._max_nodes = max_nodes
        self._pending: list[Tensor] = []
        self._after_prefill = True
        self._begun = False

    def propose(self, budget: int) -> TokenTree:
        return draft_rows([self], [budget])[0]

    def wanted(self, budget: int) -> int:
        """Nodes to draft; none without the hidden states before the newest token."""
        current = self._begun and self.reached == len(self.tokens) - 1
        return min(budget, self._max_nodes) if current else 0

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        known = len(self.tokens)
        self.tokens.extend(map(int, token_ids))
        after_prefill, self._after_prefill = self._after_prefill, False
        if feedback is None or feedback.hidden_states is None:
            return
        features = self._checked(feedback.hidden_states)
        # A prefill ends with the last token that was known; a step begins with it.
        first = known - len(features) if after_prefill else known - 1
        features = features[: len(self.tokens) - 1 - first]
        if first != self.reached:
            self._begin_at(first)
        self._pending.append(features)
        self._begun = True
        self.reached = first + len(features)
        if self.waiting >= self.follower.chunk:
            self.group.settle()
            with torch.no_grad():
                self.follower.catch_up(self.group)

    @property
    def waiting(self) -> int:
        """Hidden states that were not followed yet."""
        return sum(map(len, self._pending))

    def take(self) -> list[Tensor]:
        """Them, [n, feature_width] each."""
        features, self._pending = self._pending, []
        return features

    def close(self) -> None:
        super().close()
        self._pending.clear()

    def _begin_at(self, position: int) -> None:
        """Forget everything before a gap: what is followed is one piece of text."""
        self._pending.clear()
        self.group.settle()
        self.group.move_out()
        self.last = [None] * len(self.last)
        for cache in self.group.caches:
            lengths = list(cache.slots.lengths)
            lengths[self.index] = 0
            cache.shorten(lengths)
            cache.firsts[self.index] = position

    def _checked(self, features: Tensor) -> Tensor:
        width = self.follower.feature_width
        if features.ndim != 2 or features.shape[1] != width:
            raise ValueError(
                f"feedback.hidden_states: expected [accepted, {width}], got {tuple(features.shape)}"
            )
        return features


@torch.no_grad()
def draft_rows(sessions: Sequence[FeatureSession], budgets: Sequence[int]) -> Forest:
    """One draft for each text, those of a batch together."""
    keeps = [session.wanted(budget) for session, budget in zip(sessions, budgets, strict=True)]
    asked = [session for session, keep in zip(sessions, keeps, strict=True) if keep > 0]
    drafts: dict[FeatureSession, TokenTree] = {}
    if asked:
        follower = asked[0].follower
        for group, rows in groups(asked):
            trees = follower.draft(group, rows, max(keeps))
            drafts |= {row: trees[row.index] for row in rows}
    trees = [drafts.get(session, TokenTree.empty()) for session in sessions]
    return Forest.of(trees).prune(keeps)


class FeatureDrafter(Drafter):
    """A drafter whose sessions are `FeatureSession`s."""

    costly = True

    def propose_rows(self, sessions: Sequence[FeatureSession], budgets: Sequence[int]) -> Forest:
        return draft_rows(sessions, budgets)

    def priors(self) -> Float32Array:
        """The model's own probabilities, as if it were right about them at any rank and depth."""
        return PRIORS


def stacked(rows: Sequence[FeatureSession | None], layer: int, like: Tensor) -> Tensor:
    """[rows, hidden_size], what a layer gave last in each text; zeros where it has read none."""
    found = [None if row is None else row.last[layer] for row in rows]
    return torch.stack([torch.zeros_like(like) if one is None else one for one in found])


def remember(group: Group, layer: int, counts: Sequence[int], hidden: Tensor) -> None:
    """Keep a layer's hidden states, [rows, w, hidden_size], at the last token of each text."""
    newest = hidden[:, -1].clone()
    for row, count, state in zip(group.rows, counts, newest, strict=True):
        if row is not None and count:
            row.last[layer] = state
