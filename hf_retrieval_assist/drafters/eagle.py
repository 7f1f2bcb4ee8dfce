"""Drafts of an EAGLE head: the dynamic tree of EAGLE-2 over the target's own features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..eagle.drafting import Candidates, HeadStream
from ..eagle.head import EagleHead
from ..token_tree import Float32Array, Int32Array, TokenTree
from .base import Drafter, DraftSession, Feedback, FeedbackNeeds, Target

# Evidence: how likely the head holds the token after its parent, its place among the siblings,
# and how deep it stands, for the head is trusted less the longer it feeds on its own output.
PROB_EDGES = np.array([0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95], np.float32)
PROB_MIDDLES = np.array([0.015, 0.06, 0.15, 0.3, 0.5, 0.7, 0.88, 0.98], np.float32)
RANKS = 4
DEPTHS = 4


class EagleDrafter(Drafter):
    """Drafts with an EAGLE-1, EAGLE-2 or EAGLE-3 head (arXiv:2406.16858, section 4).

    Args:
        head: for the model that is being assisted; shared by all sessions.
        top_k: children of a node, and nodes expanded in a level.
        depth: levels below the first; the tree is `depth + 1` deep.
        total: nodes of the tree with its root, so at most `total - 1` are proposed.
        min_prob: nodes that the head holds less likely than this to be reached are not expanded.

    Raises:
        ValueError: a size is out of range.
    """

    name = "eagle"
    costly = True

    def __init__(
        self,
        head: EagleHead,
        top_k: int = 10,
        depth: int = 5,
        total: int = 60,
        min_prob: float = 0.01,
    ) -> None:
        for label, value, least in (("top_k", top_k, 1), ("depth", depth, 0), ("total", total, 2)):
            if value < least:
                raise ValueError(f"{label}: expected at least {least}, got {value}")
        if not 0 <= min_prob < 1:
            raise ValueError(f"min_prob: expected a value in [0, 1), got {min_prob}")
        self.head = head
        self.top_k, self.depth, self.total, self.min_prob = top_k, depth, total, min_prob
        self.needs = FeedbackNeeds(hidden_layers=head.config.boundaries)

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> EagleSession:
        if self.head.config.vocab_size > target.vocab_size:
            raise ValueError(
                f"head: expected at most {target.vocab_size} ids, the target's, got a head of "
                f"{self.head.config.vocab_size}"
            )
        return EagleSession(self, prompt_ids)

    def priors(self) -> Float32Array:
        """The head's own probabilities, as if it were right about them at any rank and depth."""
        return np.repeat(PROB_MIDDLES, RANKS * DEPTHS)


class EagleSession(DraftSession):
    """A text and the head's cache over it.

    What `commit` brings waits until a draft is wanted, so that a head which is only asked now and
    then catches up in one forward.
    """

    def __init__(self, drafter: EagleDrafter, prompt_ids: NDArray[np.int32]) -> None:
        self._drafter = drafter
        self._tokens: list[int] = prompt_ids.tolist()
        self._stream = HeadStream(drafter.head)
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._after_prefill = True
        self._reached = 0

    def propose(self, budget: int) -> TokenTree:
        keep = min(budget, self._drafter.total - 1)
        if keep < 1 or self._reached != len(self._tokens) - 1:
            return TokenTree.empty()
        self._catch_up()
        draft = self._drafter
        found = self._stream.draft(draft.top_k, draft.depth, keep, draft.min_prob)
        return _tree(found).prune(keep)

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
        width = self._drafter.head.config.feature_width
        if features.ndim != 2 or features.shape[1] != width:
            raise ValueError(
                f"feedback.hidden_states: expected [accepted, {width}], got {tuple(features.shape)}"
            )
        return features

    def _catch_up(self) -> None:
        """Run the head over what the target has processed since the last draft."""
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


def _tree(found: Candidates) -> TokenTree:
    parents = found.parents.cpu().numpy().astype(np.int32)
    tree = TokenTree.build(found.token_ids.cpu().numpy(), parents, found.scores.exp().cpu().numpy())
    probs = found.log_probs.exp().cpu().numpy()
    classes = classes_by_depth(probs, found.ranks.cpu().numpy(), tree.depths)
    return TokenTree.build(tree.token_ids, parents, tree.probs, classes)


def classes_by_depth(
    probs: Float32Array, ranks: NDArray[np.int64], depths: Int32Array
) -> Int32Array:
    """The class of each node from its probability after its parent, rank (0: the likeliest
    sibling) and depth (1: a child of the root); int32 [n]."""
    bucket = np.searchsorted(PROB_EDGES, probs, side="right")
    rank = np.minimum(ranks, RANKS - 1)
    depth = np.minimum(depths, DEPTHS) - 1
    return ((bucket * RANKS + rank) * DEPTHS + depth).astype(np.int32)
