"""Drafters that follow the target's hidden states, batch by batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...draft_models.growth import EVIDENCE
from ...draft_models.rows import DraftCache, Group, RowSession, groups, parts, proposed
from ...drafters.base import Drafter, Feedback, Feedbacks, Tokens
from ...types.token_tree import Forest, Int32Array, TokenTree
from ...verification.tree_attention import Int64Array

DFLASH_SETTINGS = ("block_size", "mask_token_id", "target_layer_ids")


def is_dflash(model: Any) -> bool:
    """Whether a model drafts blocks from the target's hidden states, by what it is configured."""
    return all(getattr(model.config, name, None) is not None for name in DFLASH_SETTINGS)


@dataclass(frozen=True)
class NewText:
    """How texts went on, by up to w tokens: each fills the last columns of its line.

    Attributes:
        counts: tokens of each row.
        features: [hidden states, feature_width], all of the target's that wait; the last one is 0.
        sources: int64 [rows, w], which of them stands before each token.
        token_ids: int64 [rows, w].
        positions: int64 [rows, w], of the hidden states.
    """

    counts: list[int]
    features: Tensor
    sources: Int64Array
    token_ids: Int64Array
    positions: Int64Array


class Follower(ABC):
    """A drafting model that follows hidden states; what it knows of a text is in the text's row.

    Attributes:
        feature_width: of the hidden states.
        device, dtype: that it wants them in.
        chunk: most tokens of a text that are run at once, and that may wait to be.
    """

    feature_width: int
    device: torch.device
    dtype: torch.dtype
    chunk: int = 512

    @abstractmethod
    def caches(self) -> list[DraftCache]:
        """The caches of one text that has not begun."""

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
        for text in self.waiting(group, self.chunk):
            self.follow(group, text)

    def waiting(self, group: Group, longest: int, widths: Sequence[int] = ()) -> Iterator[NewText]:
        """What the target has processed since it was followed last.

        Args:
            longest: tokens of a text that are run at once.
            widths: of lines; none: as many columns as there are tokens.
        """
        rows: list[FeatureSession | None] = group.rows
        counts = [0 if row is None else row.waiting for row in rows]
        if not any(counts):
            return
        pieces = [piece for row in rows if row is not None for piece in row.take()]
        blank = torch.zeros((1, self.feature_width), device=self.device, dtype=self.dtype)
        features = torch.cat([*(p.to(self.device, self.dtype) for p in pieces), blank])
        starts = np.cumsum(counts) - counts
        for spans in parts(counts, longest):
            most = max(map(len, spans))
            width = next((bucket for bucket in widths if bucket >= most), most)
            ids, positions = np.zeros((2, len(rows), width), np.int64)
            sources = np.full((len(rows), width), len(features) - 1)
            for number, (row, span) in enumerate(zip(rows, spans, strict=True)):
                if row is None or not len(span):
                    continue
                own = slice(width - len(span), width)
                first = row.reached - counts[number] + span.start
                sources[number, own] = starts[number] + np.array(span)
                positions[number, own] = np.arange(first, first + len(span))
                ids[number, own] = row.tokens[first + 1 : first + 1 + len(span)]
            yield NewText([len(span) for span in spans], features, sources, ids, positions)


class FeatureSession(RowSession):
    """A text and how far a model has followed it.

    What comes waits until a draft is wanted, so that a drafter which is only asked now
    and then catches up in one forward.

    Args:
        drafter: of the text.
        follower: shared with the other texts of a batch.
        prompt_ids: int32 [length], without padding.
        max_nodes: of a draft.

    Attributes:
        tokens: ids of the whole text.
        reached: position behind the last hidden state that is known.
    """

    group: Group

    def __init__(
        self, drafter: FeatureDrafter, follower: Follower, prompt_ids: Int32Array, max_nodes: int
    ) -> None:
        super().__init__(follower.caches())
        self.drafter, self.follower = drafter, follower
        self.tokens: list[int] = prompt_ids.tolist()
        self.reached = 0
        self._max_nodes = max_nodes
        self._pending: list[Tensor] = []
        self._after_prefill = True

    def wanted(self, budget: int) -> int:
        """Nodes to draft; none without the hidden states before the newest token."""
        current = 0 < self.reached == len(self.tokens) - 1
        return min(budget, self._max_nodes) if current else 0

    def append(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        """The text went on with these tokens, of which a forward has shown this."""
        known = len(self.tokens)
        self.tokens.extend(map(int, token_ids))
        after_prefill, self._after_prefill = self._after_prefill, False
        if feedback is None or feedback.hidden_states is None:
            return
        features = feedback.hidden_states
        # A prefill ends with the last token that was known; a step begins with it.
        first = known - len(features) if after_prefill else known - 1
        features = features[: len(self.tokens) - 1 - first]
        if first != self.reached:
            # What is followed is one piece of text: everything before a gap is forgotten.
            self.close()
            Group([self], self.follower.caches())
        self._pending.append(features)
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


class FeatureDrafter(Drafter):
    """A drafter whose sessions are `FeatureSession`s."""

    costly = True
    evidence = EVIDENCE

    @staticmethod
    def require_width(what: str, hidden_size: int, target: Any) -> None:
        """ValueError for what was made for another hidden size than the target model's."""
        if target is None:
            return
        width = target.config.get_text_config(decoder=True).hidden_size
        if width != hidden_size:
            raise ValueError(
                f"{what}: expected one for the target's hidden size of {width}, got one for "
                f"{hidden_size}"
            )

    @torch.no_grad()
    def propose(self, sessions: Sequence[FeatureSession], budgets: Sequence[int]) -> Forest:
        """One draft for each text, those of a batch together."""
        keeps = [session.wanted(budget) for session, budget in zip(sessions, budgets, strict=True)]
        asked = [session for session, keep in zip(sessions, keeps, strict=True) if keep > 0]
        drafts: dict[FeatureSession, TokenTree] = {}
        for group, rows in groups(asked):
            trees = asked[0].follower.draft(group, rows, max(keeps))
            drafts |= {row: trees[row.index] for row in rows}
        return proposed([drafts.get(session, TokenTree.empty()) for session in sessions], keeps)

    def commit(
        self, sessions: Sequence[FeatureSession], tokens: Tokens, feedbacks: Feedbacks
    ) -> None:
        for session, token_ids, feedback in zip(sessions, tokens, feedbacks, strict=True):
            session.append(token_ids, feedback)
