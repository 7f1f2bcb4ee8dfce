"""Running a head along a text, and drafting the dynamic tree of EAGLE-2 from where it stands.

Li et al. 2024, arXiv:2406.16858, section 4: nodes are expanded level by level in order of their
cumulative probability, then the most probable of all candidates are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import HeadCache
from .head import EagleHead


@dataclass
class Candidates:
    """Nodes of one level, or of all levels in order; flat tensors on the head's device.

    Attributes:
        token_ids: int64, ids of the target's vocabulary.
        parents: int64, index among all candidates; −1 for children of the root.
        scores: float32, log-probability of the path from the root.
        log_probs: float32, log-probability of the node given its parent.
        ranks: int64, place among its siblings, from the most probable.
    """

    token_ids: Tensor
    parents: Tensor
    scores: Tensor
    log_probs: Tensor
    ranks: Tensor

    @staticmethod
    def join(levels: list[Candidates]) -> Candidates:
        return Candidates(*(torch.cat(parts) for parts in zip(*map(_fields, levels), strict=True)))


def _fields(level: Candidates) -> tuple[Tensor, ...]:
    return (level.token_ids, level.parents, level.scores, level.log_probs, level.ranks)


@dataclass
class _Frontier:
    """Nodes that have been run through the head.

    Attributes:
        nodes: index among all candidates [f]; scores: [f]; hidden: outputs [1, f, H].
        visible: bool [f, tree entries of the cache], each node's ancestors and itself.
    """

    nodes: Tensor
    scores: Tensor
    hidden: Tensor
    visible: Tensor


class HeadStream:
    """A head, its cache, and how far they have followed one text.

    The cache holds what was computed from the target's own features; a draft writes behind that
    and is forgotten when it is done.

    Args:
        head: shared with other streams.
        chunk: most tokens run at once when following a text.
    """

    def __init__(self, head: EagleHead, chunk: int = 512) -> None:
        self.head = head
        self.chunk = chunk
        self.cache = HeadCache(head.config, head.device, head.dtype)
        self._last_hidden: Tensor | None = None
        self._next_position = 0

    @torch.inference_mode()
    def extend(self, features: Tensor, token_ids: Tensor, first_position: int) -> None:
        """Follow the text by m tokens.

        Args:
            features: [m, feature_width], the target's, at m consecutive positions.
            token_ids: int64 [m], for each the token one position later.
            first_position: position of the first feature.
        """
        features = features.to(self.head.device, self.head.dtype)
        token_ids = token_ids.to(self.head.device)
        for start in range(0, len(features), self.chunk):
            part = slice(start, start + self.chunk)
            self._run(features[part], token_ids[part], first_position + start)

    def _run(self, features: Tensor, token_ids: Tensor, position: int) -> None:
        count, known = len(features), self.cache.length
        mask = features.new_ones((count, known + count), dtype=torch.bool).tril(known)
        positions = torch.arange(position, position + count, device=features.device)
        hidden = self.head.fuse(features[None])
        output = self.head(hidden, token_ids[None], positions[None], mask, self.cache)
        self.cache.advance(count)
        self._last_hidden = output[:, -1:]
        self._next_position = position + count

    @torch.inference_mode()
    def draft(self, top_k: int, depth: int, keep: int, min_prob: float = 0.0) -> Candidates:
        """Candidates below the last token of the text, in level order.

        Every candidate that belongs to the `keep` most probable of the full tree is among them:
        nodes are left unexpanded only when their descendants cannot be.

        Args:
            top_k: children of a node, and nodes expanded in a level.
            depth: levels expanded below the first, so the tree is `depth + 1` deep.
            keep: how many candidates the caller will keep, at least 1.
            min_prob: nodes no more probable than this are not expanded either.

        Raises:
            RuntimeError: the stream has not followed any text yet.
        """
        if self._last_hidden is None:
            raise RuntimeError("draft: expected `extend` to have been called before")
        known = self.cache.length
        try:
            return self._draft(min(top_k, keep), min(depth, keep - 1), _Floor(keep, min_prob))
        finally:
            self.cache.truncate(known)

    def _draft(self, top_k: int, depth: int, floor: _Floor) -> Candidates:
        frontier = self._root()
        levels = [self._children(frontier, top_k)]
        offset = 0
        for step in range(depth):
            level = levels[-1]
            best = self._most_probable(level, top_k, floor)
            if not len(best):
                break
            frontier = self._expand(frontier, level, best, offset, step)
            offset += len(level.token_ids)
            levels.append(self._children(frontier, top_k))
        return Candidates.join(levels)

    def _root(self) -> _Frontier:
        hidden = self._last_hidden
        assert hidden is not None
        return _Frontier(
            nodes=torch.full((1,), -1, device=hidden.device),
            scores=torch.zeros(1, device=hidden.device),
            hidden=hidden,
            visible=torch.ones((1, 0), dtype=torch.bool, device=hidden.device),
        )

    def _children(self, frontier: _Frontier, top_k: int) -> Candidates:
        """The `top_k` likeliest children of each node of the frontier, grouped by parent."""
        logits = self.head.logits(frontier.hidden)[0]
        log_probs = logits.float().log_softmax(-1).clamp_(max=0.0)
        top, draft_ids = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1)
        count = top.shape[1]
        return Candidates(
            token_ids=self.head.to_target_ids(draft_ids.to(self.head.device)).flatten(),
            parents=frontier.nodes.repeat_interleave(count),
            scores=(frontier.scores[:, None] + top).flatten(),
            log_probs=top.flatten(),
            ranks=torch.arange(count, device=top.device).repeat(len(top)),
        )

    @staticmethod
    def _most_probable(level: Candidates, top_k: int, floor: _Floor) -> Tensor:
        """Indices into the level of the nodes to expand, best first."""
        floor.see(level.scores)
        scores, best = level.scores.topk(min(top_k, len(level.scores)))
        return best[: int((scores > floor.value).sum())]

    def _expand(
        self, above: _Frontier, level: Candidates, best: Tensor, offset: int, step: int
    ) -> _Frontier:
        """Run the chosen nodes of a level, whose first node is candidate `offset`."""
        parent_rows = best // (len(level.token_ids) // len(above.nodes))
        own = torch.eye(len(best), dtype=torch.bool, device=best.device)
        visible = torch.cat([above.visible[parent_rows], own], dim=1)
        known = visible.new_ones((len(best), self.cache.length - above.visible.shape[1]))
        output = self.head(
            above.hidden[:, parent_rows],
            level.token_ids[best][None],
            torch.full_like(best, self._next_position + step)[None],
            torch.cat([known, visible], dim=1),
            self.cache,
        )
        self.cache.advance(len(best))
        return _Frontier(best + offset, level.scores[best], output, visible)


class _Floor:
    """The score that a node must exceed for any descendant to be kept."""

    def __init__(self, keep: int, min_prob: float) -> None:
        self._keep = keep
        self._least = torch.tensor(min_prob).log().item()
        self._best: Tensor | None = None

    def see(self, scores: Tensor) -> None:
        seen = scores if self._best is None else torch.cat([self._best, scores])
        self._best = seen.topk(min(self._keep, len(seen))).values

    @property
    def value(self) -> float:
        if self._best is None or len(self._best) < self._keep:
            return self._least
        return max(self._least, float(self._best[-1]))
