"""Drafts from the text so far, from earlier outputs and from a corpus in memory.

The sources are those of SuffixDecoding (https://arxiv.org/abs/2411.04975): one suffix tree for the
text, one for all outputs, candidates over the lengths of match. Where the paper keeps the one match
whose draft scores best (`papers.SuffixDecoding`), matches of several lengths in all trees are mixed
here, and what each is worth is learnt while drafting (`Mixer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..memory.output_memory import OutputMemory
from ..memory.running_output import RunningOutput, prompt_group
from ..structures import draft_tree
from ..structures.suffix_tree import MAX_DEPTH, Mixer, SuffixTree, Text, extend_texts
from ..system.locks import Lock
from ..types.token_tree import (
    Float32Array,
    Forest,
    Ids,
    Int32Array,
    NamedIds,
    TokenTree,
    checked_documents,
)
from .base import Drafter, DraftSession, Feedbacks, Target, Tokens


@dataclass(frozen=True)
class Mixture:
    """What is known of how much contexts are worth: the state of a `Mixer`.

    Attributes:
        cells: float32 [*CELL_SHAPE, 2], probabilities of evidence and the trials behind them.
        copy_cells: float32 [*COPY_SHAPE, 2], the same of what copies name.
        weights: float32 WEIGHT_SHAPE.
        rate: by which the weights follow a text.
    """

    cells: Float32Array
    copy_cells: Float32Array
    weights: Float32Array
    rate: float = 0.002

    @classmethod
    def load(cls, path: Path) -> Mixture:
        """The arrays of an .npz file, by their names here."""
        with np.load(path, allow_pickle=False) as arrays:
            return cls(arrays["cells"], arrays["copy_cells"], arrays["weights"])

    @classmethod
    @cache
    def trained(cls) -> Mixture:
        """Trained on recorded texts: chat, programs, mathematics, SQL, edits of files."""
        with as_file(files(__package__) / "mixture.npz") as path:
            return cls.load(path)

    def mixer(self) -> Mixer:
        """A mixer that starts from here."""
        return Mixer(self.cells, self.copy_cells, self.weights, self.rate)


class SuffixDrafter(Drafter):
    """Drafts what followed the last tokens earlier in the text or in the memory's outputs.

    Args:
        memory: outputs to draft from, and to teach; None for a new one that this drafter keeps.
        max_depth: longest match plus draft within the text, in tokens.
        min_prob: no node is drafted that is estimated to be less probable.
        learn: teach the outputs to the memory, from their first token on.
        corpus: further texts to draft from, indexed once and only read.
        mixture: what is known of the worth of contexts at first; None: what was learnt from
            recorded texts.
    """

    name = "suffix"

    def __init__(
        self,
        memory: OutputMemory | None = None,
        max_depth: int = 64,
        min_prob: float = 0.002,
        learn: bool = True,
        corpus: Iterable[Ids | NamedIds] | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        if not 1 <= max_depth <= MAX_DEPTH:
            raise ValueError(f"max_depth: expected 1 to {MAX_DEPTH}, got {max_depth}")
        if not 0 < min_prob <= 1:
            raise ValueError(f"min_prob: expected a number above 0, at most 1, got {min_prob}")
        self.memory = OutputMemory() if memory is None else memory
        self.max_depth = max_depth
        self.min_prob = min_prob
        self.learn = learn
        self.corpus: SuffixTree | None = None
        self._largest_id = -1  # the corpus's
        if corpus is not None:
            self.corpus = indexed = SuffixTree(max_depth)
            for ids in checked_documents(corpus):
                indexed.extend(indexed.add_sequence(), ids)
                self._largest_id = max(self._largest_id, int(ids.max()))
        self.mixer = (mixture or Mixture.trained()).mixer()
        self._mixing = Lock()  # taken after the memory's

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> SuffixSession:
        target.require_ids("corpus", self._largest_id)
        return SuffixSession(self, prompt_ids, target)

    def propose(
        self, sessions: Sequence[SuffixSession], budgets: Sequence[int]
    ) -> Sequence[TokenTree]:
        with self.memory.lock, self._mixing:
            evidence = self._evidence(sessions)
            draft = self.mixer.draft(*evidence, list(budgets), min_prob=self.min_prob)
        return Forest(*draft)

    def commit(
        self, sessions: Sequence[SuffixSession], tokens: Tokens, feedbacks: Feedbacks
    ) -> None:
        ids, offsets = draft_tree.flattened(tokens)
        with self.memory.lock, self._mixing:
            self.mixer.learn(*self._evidence(sessions), ids, offsets)
        extend_texts([session.text for session in sessions], ids, offsets)
        self.memory.extend([session.output for session in sessions], ids, offsets)

    def _evidence(self, sessions: Sequence[SuffixSession]) -> tuple[Any, Any, Any, Any]:
        """Texts, and what they are drafted from: outputs of their kinds, and that of these which
        ends as the text does; the memory is locked."""
        trees = {kind: self.memory.tree(kind) for kind in {s.kind for s in sessions}}
        return (
            [session.text for session in sessions],
            [trees[session.kind] for session in sessions],
            [None if s.output is None else s.output.live_sequence for s in sessions],
            self.corpus,
        )

    @property
    def origins(self) -> tuple[str, ...]:
        return ("text", "memory") if self.corpus is None else ("text", "memory", "corpus")

    def origins_of(self, classes: Int32Array) -> Int32Array:
        # The classes of mixed probabilities name the origin alone, as −1 and below.
        return -1 - classes


class SuffixSession(DraftSession):
    """A text and its suffix tree.

    Attributes:
        text: with its tree.
        kind: of the memory's outputs that it is drafted from.
        output: that the memory learns of it; None: none.
    """

    def __init__(
        self, drafter: SuffixDrafter, prompt_ids: NDArray[np.int32], target: Target
    ) -> None:
        self.drafter = drafter
        self.kind = target.fingerprint
        if drafter.memory.by_prompt:
            self.kind = prompt_group(target.fingerprint, prompt_ids)
        prompt = np.ascontiguousarray(prompt_ids, dtype=np.int32)
        tree = SuffixTree(drafter.max_depth)
        for expected in target.expected:
            tree.extend(tree.add_sequence(), expected)
        sequence = tree.add_sequence()
        tree.extend(sequence, prompt)
        self.text = Text(tree, sequence, prompt, target.vocab_size)
        self.output: RunningOutput | None = None
        if drafter.learn and target.learn:
            self.output = drafter.memory.start(self.kind)
        else:
            drafter.memory.refresh()

    def close(self) -> None:
        if self.output is not None:
            self.output.close()
