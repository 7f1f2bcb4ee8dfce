"""SuffixDecoding: drafts from the text so far and from earlier outputs.

Follows https://arxiv.org/abs/2411.04975: one suffix tree for the text, one for all outputs,
candidates over the lengths of match. Where the paper keeps the one match whose draft scores best
(Algorithm 1), matches of several lengths in both trees vote here for each token, the longest first,
and what their word is worth comes from measurements instead of from counts alone. `scored=True`
drafts as the paper does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..memory.output_memory import OutputMemory, RunningOutput, prompt_group
from ..structures.suffix_tree import BLEND_SHAPE, MAX_DEPTH, Speculation, SuffixTree
from ..token_tree import Float32Array, Int32Array, TokenTree
from .base import Drafter, DraftSession, Feedback, Target

# The middle of each bucket of evidence.
_LENGTHS = (1, 2, 3, 4, 5.5, 8.5, 15, 26, 45, 90)
_SUPPORTS = (1, 2, 3.5, 7, 20, 100)
_SHARES = (0.01, 0.04, 0.1, 0.22, 0.4, 0.6, 0.85, 1)

_FREQUENCIES = 10  # classes of scored drafts

# Log odds that a token is accepted after its parent was, as a quadratic form in: one, drafted from
# the memory, not by the longest match, by the third or a later one, log length, log support,
# log share, and whether all continuations agree. Fitted to recorded outputs of five kinds (open
# chat, short programs, mathematics, SQL, edits of files), each of equal weight.
_WEIGHTS = np.array(
    [
        [-1.20, -0.07, -0.35, -0.31, -0.14, 0.87, 1.91, 0.31],
        [0, -0.07, -0.46, -0.74, 0.22, 0.09, 0.03, -0.76],
        [0, 0, -0.35, -0.31, -0.05, -0.14, -0.50, -0.81],
        [0, 0, 0, -0.31, 0.17, -0.07, -0.53, 0.42],
        [0, 0, 0, 0, 0.11, -0.09, -0.13, 0.98],
        [0, 0, 0, 0, 0, -0.07, 0.05, 0.28],
        [0, 0, 0, 0, 0, 0, 0.16, 0],
        [0, 0, 0, 0, 0, 0, 0, 0.31],
    ]
)


def acceptance_rates() -> Float32Array:
    """float32 [BLEND_CLASSES], how often a token on this evidence is right where its parent was."""
    source, rank, length, support, share = np.indices(BLEND_SHAPE).reshape(5, -1)
    evidence = np.stack(
        [
            np.ones(len(source)),
            source,
            rank > 0,
            rank > 1,
            np.log(_LENGTHS)[length],
            np.log(_SUPPORTS)[support],
            np.log(_SHARES)[share],
            share == len(_SHARES) - 1,
        ]
    )
    log_odds = np.einsum("in,ij,jn->n", evidence, _WEIGHTS, evidence)
    return (1 / (1 + np.exp(-log_odds))).astype(np.float32)


class SuffixDrafter(Drafter):
    """Drafts what followed the last tokens earlier in the text or in the memory's outputs.

    Args:
        memory: outputs to draft from, and to teach; None for a new one that this drafter keeps.
        max_depth: longest match plus draft within the text, in tokens.
        alpha: nodes for each token of the longest match, at most.
        min_prob: no node is drafted that is estimated to be less probable.
        tree: draft trees; otherwise single paths.
        scored: draft by the paper's Algorithm 1: the match of the highest SCORE in the better of
            the two trees; `alpha` then bounds each match's draft by the match's own length.
        learn: teach the outputs to the memory, from their first token on.
        learn_prompts: teach the prompts too, each as the beginning of its output.
        by_prompt: keep the outputs of every prompt apart: a text drafts from those of its own
            prompt alone, others that are being written beside it among them.
    """

    name = "suffix"

    def __init__(
        self,
        memory: OutputMemory | None = None,
        max_depth: int = 64,
        alpha: float = math.inf,
        min_prob: float = 0.02,
        tree: bool = True,
        scored: bool = False,
        learn: bool = True,
        learn_prompts: bool = False,
        by_prompt: bool = False,
    ) -> None:
        if not 1 <= max_depth <= MAX_DEPTH:
            raise ValueError(f"max_depth: expected 1 to {MAX_DEPTH}, got {max_depth}")
        if not alpha > 0:
            raise ValueError(f"alpha: expected a number above 0, got {alpha}")
        if not 0 < min_prob <= 1:
            raise ValueError(f"min_prob: expected a number above 0, at most 1, got {min_prob}")
        self.memory = OutputMemory() if memory is None else memory
        self.max_depth = max_depth
        self.alpha = alpha
        self.min_prob = min_prob
        self.tree = tree
        self.scored = scored
        self.learn = learn
        self.learn_prompts = learn_prompts
        self.by_prompt = by_prompt
        self.rates = acceptance_rates()
        # Scored drafts know of no other evidence than the frequency of each token.
        self._priors = (np.arange(_FREQUENCIES) + 0.5) / _FREQUENCIES if scored else self.rates

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> SuffixSession:
        return SuffixSession(self, prompt_ids, target)

    def priors(self) -> Float32Array:
        return self._priors.astype(np.float32)

    @property
    def origins(self) -> tuple[str, ...]:
        return ("text or memory",) if self.scored else ("text", "memory")

    def origins_of(self, classes: Int32Array) -> Int32Array:
        # The first dimension of the classes; scored drafts' classes fit into its first half.
        return classes // (len(self.rates) // 2)


def _frequency_tree(draft: Speculation, vocab_size: int) -> TokenTree:
    """A scored draft without foreign ids, classed by each token's frequency after its parent."""
    above = np.append(draft.probs, np.float32(1))[draft.parents]
    classes = np.minimum(draft.probs / above * _FREQUENCIES, _FREQUENCIES - 1).astype(np.int32)
    tree = TokenTree(draft.token_ids, draft.parents, draft.probs, classes)
    kept = draft.token_ids < vocab_size
    if kept.all():
        return tree
    for node, parent in enumerate(draft.parents.tolist()):
        kept[node] &= parent < 0 or kept[parent]
    return tree.select(np.flatnonzero(kept).astype(np.int32))


class SuffixSession(DraftSession):
    """A text and its suffix tree.

    Attributes:
        score: number of tokens of the last draft that its evidence promises (the paper's SCORE).
    """

    def __init__(
        self, drafter: SuffixDrafter, prompt_ids: NDArray[np.int32], target: Target
    ) -> None:
        self.score = 0.0
        self._drafter = drafter
        self._vocab_size = target.vocab_size
        self._kind = target.fingerprint
        if drafter.by_prompt:
            self._kind = prompt_group(target.fingerprint, prompt_ids)
        self._text = SuffixTree(drafter.max_depth)
        self._sequence = self._text.add_sequence()
        self._text.extend(self._sequence, np.ascontiguousarray(prompt_ids, dtype=np.int32))
        self._context_length = max(drafter.max_depth, drafter.memory.max_depth)
        self._context = np.array(prompt_ids[-self._context_length :], dtype=np.int32)
        self._output: RunningOutput | None = None
        if drafter.learn and target.learn:
            self._output = drafter.memory.start(self._kind)
            if drafter.learn_prompts:
                self._output.extend(prompt_ids)
        else:
            drafter.memory.refresh()

    def propose(self, budget: int) -> TokenTree:
        tree = self._scored(budget) if self._drafter.scored else self._blended(budget)
        self.score = tree.expected_tokens
        return tree

    def _blended(self, budget: int) -> TokenTree:
        drafter = self._drafter
        with drafter.memory.lock:
            return TokenTree(
                *self._text.blend(
                    self._sequence,
                    drafter.memory.tree(self._kind),
                    None if self._output is None else self._output.live_sequence,
                    self._context,
                    budget,
                    drafter.rates,
                    vocab_size=self._vocab_size,
                    alpha=drafter.alpha,
                    min_prob=drafter.min_prob,
                    path=not drafter.tree,
                )
            )

    def _scored(self, budget: int) -> TokenTree:
        """Algorithm 1, its expansion counting the matched node; the memory first among equals."""
        drafter = self._drafter
        how: dict[str, Any] = {
            "factor": drafter.alpha,
            "offset": -1.0,
            "min_prob": drafter.min_prob,
            "tree": drafter.tree,
            "convention": "paper",
        }
        drafts = [self._text.speculate_after(self._sequence, budget, **how)]
        with drafter.memory.lock:
            outputs = drafter.memory.tree(self._kind)
            if outputs is not None:
                drafts.insert(0, outputs.speculate(self._context, budget, **how))
        best = max(drafts, key=lambda draft: draft.score)
        return _frequency_tree(best, self._vocab_size)

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        tokens = np.asarray(token_ids, dtype=np.int32)
        self._text.extend(self._sequence, tokens)
        self._context = np.concatenate([self._context, tokens])[-self._context_length :]
        if self._output is not None:
            self._output.extend(tokens)

    def close(self) -> None:
        if self._output is not None:
            self._output.close()
