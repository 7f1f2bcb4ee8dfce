"""Drafts of a smaller model, as a tree whose shape is Sequoia's (Chen et al. 2024)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ..planning.cost_model import CostModel
from ..structures import draft_tree
from ..system.locks import Lock
from ..target.ranks import require_whole
from ..token_tree import Float32Array, Int32Array, TokenTree
from .base import ChildDraw, Drafter, DraftSession, Feedback, Target
from .draft_stream import DraftStream, mask_rules
from .other_vocabulary import Tokenizers, TranslatedSession
from .residual import draw_children
from .sequoia import ShapeChooser, TreeShape

# Evidence: the draft model's probability of the node given its parent, and its rank.
PROB_EDGES = np.array([0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97], np.float32)
PROB_MIDDLES = np.array(
    [0.005, 0.02, 0.045, 0.08, 0.15, 0.25, 0.37, 0.52, 0.67, 0.82, 0.93, 0.98], np.float32
)
RANKS = 4  # the last one stands for all further ranks

PRIORS: Float32Array = np.repeat(PROB_MIDDLES, RANKS)
"""Of the evidence classes: the model's own probabilities, as if right about them at any rank."""

# A pass over more new text than this says little of what a level costs.
_LEVEL_LIKE = 16


class DraftModelDrafter(Drafter):
    """Drafts with a small transformers model.

    The tree's shape is solved for the measured acceptance by rank, the model's own time and the
    target's t(n). Every level takes one forward of the draft model, with one cache per text.

    Args:
        model: shared by all sessions.
        max_nodes: nodes of a draft at most.
        max_levels: levels of a draft at most, which are forwards of the draft model.
        width: children of a node at most.
        temperature: None drafts the most probable tokens, which suits the plain walk under any
            sampling. A number draws them without replacement from the model's distribution at that
            temperature, and records what residual verification needs.
        assistant_tokenizer: the draft model's, where it is not the target's; looked for in the
            model's folder if not given and the vocabularies differ in size. Drafts then go by
            way of the text; see :mod:`~hf_retrieval_assist.drafters.other_vocabulary`.
        target_tokenizer: the target's, likewise.

    Raises:
        ValueError: an argument is out of range, or the model cannot be fed token trees; from
            `start`, a tokenizer is needed and not found.
    """

    name = "draft model"
    costly = True

    def __init__(
        self,
        model: Any,
        *,
        max_nodes: int = 63,
        max_levels: int = 8,
        width: int = 8,
        temperature: float | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        for label, value in (
            ("max_nodes", max_nodes),
            ("max_levels", max_levels),
            ("width", width),
        ):
            if value < 1:
                raise ValueError(f"{label}: expected at least 1, got {value}")
        if temperature is not None and not temperature > 0:
            raise ValueError(f"temperature: expected None or a number > 0, got {temperature}")
        mask_rules(model)
        self.model = model
        self.max_nodes, self.max_levels, self.width = max_nodes, max_levels, width
        self.temperature = temperature
        self._tokenizers = Tokenizers(model, assistant_tokenizer, target_tokenizer)
        self._choosers: dict[str, ShapeChooser] = {}
        self._lock = Lock()

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> DraftSession:
        require_whole(self.model, "draft model")
        chooser = self.chooser(target.fingerprint)
        if self.vocab_size == target.vocab_size and not self._tokenizers.given:
            return DraftModelSession(self, prompt_ids, chooser)
        if self.temperature is not None:
            raise ValueError(
                f"draft_model: expected the target's vocabulary of {target.vocab_size} ids where "
                f"children are drawn, got {type(self.model).__name__} with {self.vocab_size}"
            )
        return TranslatedSession(
            self._tokenizers.translation(target),
            prompt_ids,
            lambda prompt: DraftModelSession(self, prompt, chooser),
        )

    def chooser(self, fingerprint: str) -> ShapeChooser:
        """What is measured of this draft model against one target."""
        with self._lock:
            if fingerprint not in self._choosers:
                width = min(self.width, self.vocab_size)
                chooser = ShapeChooser(width, self.max_nodes + 1, self.max_levels + 1)
                self._choosers[fingerprint] = chooser
            return self._choosers[fingerprint]

    def priors(self) -> Float32Array:
        """The model's own probabilities, as if it were right about them at any rank."""
        return PRIORS


@dataclass(frozen=True, eq=False)
class _Level:
    """One forward: nodes that have children, and the nodes below them.

    Attributes:
        chosen: int64 [w], which nodes of the level above's children are fed.
        depths, column_depths, attends: see `DraftStream.feed`.
        parents: int64 [children], row of each child's parent among the fed nodes.
        ranks: int64 [children].
    """

    chosen: NDArray[np.int64]
    depths: NDArray[np.int64]
    column_depths: NDArray[np.int64]
    attends: NDArray[np.bool_]
    parents: NDArray[np.int64]
    ranks: NDArray[np.int64]


class _Schedule:
    """The forwards that draft a tree of one shape; the first one feeds the text only."""

    def __init__(self, shape: TreeShape):
        self.shape = shape
        self.child_counts = shape.child_counts
        inner = np.flatnonzero(self.child_counts[1:])
        # Number of each node in the order of feeding; −1: a leaf, never fed.
        self.fed_number = np.full(len(shape), -1, np.int32)
        self.fed_number[inner] = np.arange(len(inner))
        depths = draft_tree.depths(shape.parents).astype(np.int64) - 1
        above = draft_tree.ancestor_mask(shape.parents)
        self.levels = [
            self._level(level, inner, depths, above) for level in range(shape.levels - 1)
        ]

    def _level(
        self,
        level: int,
        inner: NDArray[np.int64],
        depths: NDArray[np.int64],
        above: NDArray[np.bool_],
    ) -> _Level:
        """Forward number `level`, whose children lie at that depth."""
        children = np.flatnonzero(depths == level)
        fed = inner[depths[inner] == level - 1]
        columns = inner[depths[inner] < level]
        parents = self.shape.parents[children]
        first = np.flatnonzero(depths == level - 1)
        return _Level(
            chosen=fed - first[0] if len(first) else fed,
            depths=depths[fed],
            column_depths=depths[columns],
            attends=above[np.ix_(fed, columns)],
            parents=np.searchsorted(fed, parents) if level else np.zeros(len(children), np.int64),
            ranks=self.shape.ranks[children].astype(np.int64),
        )


class DraftModelSession(DraftSession):
    """One text and the draft model's cache over it.

    Attributes:
        chooser: what is measured; tell it t(n) for shapes that fit the target's cost.
    """

    def __init__(
        self, drafter: DraftModelDrafter, prompt_ids: NDArray[np.int32], chooser: ShapeChooser
    ):
        self.chooser = chooser
        self._temperature = drafter.temperature
        self._stream = DraftStream(drafter.model, prompt_ids.tolist())
        self._schedule = _Schedule(chooser.shape())
        self._tree = TokenTree.empty()
        self._draws: list[ChildDraw] = []

    def propose(self, budget: int) -> TokenTree:
        self._tree, self._draws = TokenTree.empty(), []
        shape = self.chooser.shape(budget)
        if not len(shape):
            return self._tree
        if shape is not self._schedule.shape:
            self._schedule = _Schedule(shape)
        new = len(self._stream.text) - self._stream.cached
        started = time.perf_counter()
        self._tree = self._draft(self._schedule)
        if new <= _LEVEL_LIKE:
            passes = len(self._schedule.levels)
            self.chooser.observe_pass((time.perf_counter() - started) / passes)
        return self._tree

    def _draft(self, schedule: _Schedule) -> TokenTree:
        tokens: list[torch.Tensor] = []
        rates: list[torch.Tensor] = []
        for number, level in enumerate(schedule.levels):
            logits = self._logits(level, tokens[-1]) if number else self._stream.catch_up()
            children, probs = self._children(logits, int(level.ranks.max()) + 1, level)
            tokens.append(children[level.parents, level.ranks])
            rates.append(probs[level.parents, level.ranks])
        # One transfer of all levels.
        ids = torch.cat(tokens).cpu().numpy().astype(np.int32)
        given = torch.cat(rates).float().cpu().numpy()
        shape = schedule.shape
        reached = draft_tree.path_products(shape.parents, given)
        return TokenTree(ids, shape.parents, reached, classes_by_rank(given, shape.ranks))

    def _logits(self, level: _Level, above: torch.Tensor) -> torch.Tensor:
        fed = above[level.chosen]
        return self._stream.feed(fed, level.depths, level.column_depths, level.attends)

    def _children(
        self, logits: torch.Tensor, count: int, level: _Level
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [w, count] below each fed node, and the model's probabilities of them."""
        if self._temperature is None:
            return _most_probable(logits, count)
        draft = torch.softmax(logits.float() / self._temperature, dim=-1)
        children = draw_children(draft, count)
        counts = np.bincount(level.parents, minlength=len(children)).tolist()
        self._draws += [
            ChildDraw(law, drawn[:number])
            for law, drawn, number in zip(draft, children, counts, strict=True)
        ]
        return children, draft.gather(-1, children)

    def see_cost(self, cost: CostModel) -> None:
        self.chooser.set_seconds(cost.curve(self.chooser.max_nodes) + cost.overhead())

    def draw_at(self, path: Sequence[int]) -> ChildDraw | None:
        nodes = self._tree.follow(np.array(path, np.int32))
        if not self._draws or len(nodes) < len(path):
            return None
        number = 0 if not len(path) else 1 + int(self._schedule.fed_number[nodes[-1]])
        return self._draws[number] if number or not len(path) else None

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        tokens = np.array(token_ids, np.int32)
        if len(self._tree):
            path = self._tree.follow(tokens)
            self._measure(path, len(tokens))
            fed = self._schedule.fed_number[path]
            self._stream.keep(fed[fed >= 0])
            self._tree, self._draws = TokenTree.empty(), []
        self._stream.text += tokens.tolist()

    @property
    def text(self) -> list[int]:
        """Ids of the whole text."""
        return self._stream.text

    def rewrite(self, token_ids: Sequence[int]) -> None:
        """Put another text in the text's place; what both begin with stays cached."""
        self._tree, self._draws = TokenTree.empty(), []
        self._stream.rewrite(token_ids)

    def _measure(self, path: Int32Array, length: int) -> None:
        """Count by rank what the text accepted, at every node that it reached."""
        reached = [-1, *path.tolist()][:length]
        for place, node in enumerate(reached):
            children = int(self._schedule.child_counts[node + 1])
            if children:
                hit = place < len(path)
                rank = int(self._schedule.shape.ranks[path[place]]) if hit else -1
                self.chooser.observe(children, rank)

    def close(self) -> None:
        del self._stream


def _most_probable(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids [w, count] of the largest logits, and their probabilities."""
    best = logits.float().topk(count, dim=-1)
    total = logits.float().logsumexp(-1, keepdim=True)
    return best.indices, (best.values - total).exp()


def classes_by_rank(rates: Float32Array, ranks: Int32Array) -> Int32Array:
    """int32 [n]: class of each node from the model's probability of it and its rank."""
    bins = np.searchsorted(PROB_EDGES, rates)
    return (bins * RANKS + np.minimum(ranks, RANKS - 1)).astype(np.int32)
