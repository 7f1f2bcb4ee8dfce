"""SuffixDecoding (Oliaro et al., 2024, https://arxiv.org/abs/2411.04975)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from ..assistants import Assistant
from ..drafters.base import Drafter, DraftSession, Feedbacks, Target, Tokens
from ..memory.output_memory import OutputMemory
from ..policy.policy import DraftingPolicy, Options
from ..policy.step import DraftedStep
from ..presets import require
from ..structures.suffix_tree import SuffixTree
from ..types.token_tree import Forest, TokenTree
from .paper import MOST_NODES, PaperPolicy, PapersFallback, papers_fallback


class ScoredSuffixDrafter(Drafter):
    """Algorithm 1 over the tree of finished outputs, S_g, and that of the text, S_r.

    Args:
        memory: S_g, of each model.
        alpha: see `SuffixDecoding`.
    """

    name = "suffix"
    origins = ("text or memory",)

    def __init__(self, memory: OutputMemory, alpha: float) -> None:
        self.memory, self.alpha = memory, alpha

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> ScoredSession:
        return ScoredSession(self.memory, prompt_ids, target)

    def propose(
        self, sessions: Sequence[ScoredSession], budgets: Sequence[int]
    ) -> Sequence[TokenTree]:
        return [self._draft(*pair) for pair in zip(sessions, budgets, strict=True)]

    def _draft(self, session: ScoredSession, budget: int) -> TokenTree:
        memory, tree, options = self.memory, session.tree, {"alpha": self.alpha}
        with memory.lock:
            outputs = memory.tree(session.target.fingerprint)
            last = tree.last_tokens(session.sequence, memory.max_depth)
            found = [] if outputs is None else [outputs.speculate(last, budget, **options)]
        found.append(tree.speculate(None, budget, sequence=session.sequence, **options))
        best = max(found, key=lambda draft: draft.score)  # the first one among equals
        session.score = best.score
        drafted = TokenTree.build(best.token_ids, best.parents, best.probs)
        return drafted.without(best.token_ids >= session.target.vocab_size)

    def commit(
        self, sessions: Sequence[ScoredSession], tokens: Tokens, feedbacks: Feedbacks
    ) -> None:
        for session, token_ids in zip(sessions, tokens, strict=True):
            session.tree.extend(session.sequence, np.array(token_ids, np.int32))
            session.written += token_ids


class ScoredSession(DraftSession):
    """A text, its tree, and what the memory learns of it when it has ended.

    Attributes:
        score: SCORE of the last draft, the matched node's D(N_p) = 1 among it; 0 without a match.
        tree, sequence: S_r, and the text's number in it.
        written: the output.
    """

    def __init__(self, memory: OutputMemory, prompt_ids: NDArray[np.int32], target: Target) -> None:
        self.score = 0.0
        self.target, self._memory = target, memory
        self.tree = SuffixTree(memory.max_depth)
        for text in target.expected:
            self.tree.extend(self.tree.add_sequence(), text)
        self.sequence = self.tree.add_sequence()
        self.tree.extend(self.sequence, np.ascontiguousarray(prompt_ids, np.int32))
        self.written: list[int] = []
        memory.refresh()
        self._output = memory.start(target.fingerprint) if target.learn else None

    def close(self) -> None:
        if self._output is not None:
            self._output.extend(self.written)
            self._output.close()


class SuffixPolicy(PaperPolicy):
    """The trees' draft where its SCORE reaches the threshold; elsewhere the fallback's.

    Args:
        drafters: the `ScoredSuffixDrafter`, then the fallback's.
        threshold: see `SuffixDecoding`.
    """

    def __init__(
        self, drafters: Sequence[Drafter], threshold: float | None, **options: Any
    ) -> None:
        super().__init__(drafters, **options)
        self._threshold = threshold

    def propose(self, step: DraftedStep, budget: int) -> Forest:
        drafts = self.ask(0, step, budget)
        scores: list[float] = [text.sessions[0].score for text in step.sessions]
        bar = math.inf if self._threshold is None else self._threshold
        low = [place for place, score in enumerate(scores) if score < bar]
        others = self.ask_fallback(step, budget, low)
        bars = [1 + one.expected_tokens if self._threshold is None else bar for one in others]
        rows = zip(drafts, others, scores, bars, strict=True)
        return Forest.of(
            [own if score >= bar or not len(other) else other for own, other, score, bar in rows]
        )


class SuffixDecoding(Assistant):
    """Algorithm 1 drafts from the match of the highest SCORE, in the text's tree or the outputs'.

    A match of p tokens is tried for each p. Its tree grows from the matched node N_p, by the node
    of the highest D, until it has MAX_SPEC = alpha p nodes, N_p among them. SCORE sums D over the
    tree, with D(N_p) = 1, and only a higher SCORE takes a tree's place: S_g is looked at before
    S_r, and short matches before long ones. S_g holds finished outputs alone. Where SCORE is low,
    a fallback drafts (the paper's hybrid).

    Differences: matches and drafts together end at `memory.max_depth`, the depth of the released
    code's trees, and a draft at 255 nodes; the memory is bounded, the oldest outputs go first; the
    texts of `expecting` stand in the text's tree. The paper grows trees only from leaves
    ("CHILDREN(LEAVES(T))"), which would forbid a second child of an inner node that its figures
    show; any node may get one here, as in the released code.

    Args:
        memory: S_g, outputs to draft from and to teach; None for a new one, at hand as
            `assistant.memory`.
        alpha: nodes of a tree for each matched token.
        threshold: SCORE from which on the trees draft, where there is a fallback, which then is
            asked only for the texts below it. None: one more than the tokens that the fallback's
            own draft is expected to bring, which the paper's constant stands for; then the fallback
            is asked in every step.
        fallback: None; "token_recycling"; or as for
            :class:`~hf_retrieval_assist.presets.SamAssistant`.

    Raises:
        ValueError: alpha or the threshold is out of range.
        TypeError: a memory of another kind.
    """

    def __init__(
        self,
        memory: OutputMemory | None = None,
        alpha: float = 4.0,
        threshold: float | None = None,
        fallback: PapersFallback = None,
        **options: Unpack[Options],
    ):
        if not alpha > 0:
            raise ValueError(f"alpha: expected a number above 0, got {alpha}")
        if threshold is not None and not threshold >= 0:
            raise ValueError(f"threshold: expected None or at least 0, got {threshold}")
        self.memory = OutputMemory() if memory is None else memory
        require(OutputMemory, memory=self.memory)
        self.threshold = threshold
        drafters = [
            ScoredSuffixDrafter(self.memory, alpha),
            *papers_fallback(fallback, self.memory),
        ]
        super().__init__(drafters, budget=MOST_NODES, **options)

    def _policy(self, drafters: Sequence[Drafter], **options: Any) -> DraftingPolicy:
        return SuffixPolicy(drafters, self.threshold, **options)
