"""Acceptance probabilities from counts: what a drafter's evidence was worth lately.

A drafter names for every node the evidence class its proposal rests on (source, match length,
depth, rank). A node was tried when the text reached its parent, and hit when the text then went on
with its token, whether or not it was verified: the text itself judges every proposal, so no
verification has to be spent on exploring.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..structures import evidence
from ..structures.evidence import OpenDrafts
from ..system.locks import Lock
from ..types.evidence import EvidenceClasses
from ..types.token_tree import Float32Array, Forest, Int32Array, Int64Array

Float64Array = NDArray[np.float64]

_PRIOR_TRIALS = 4.0  # what a drafter's prior is worth against the counts
_MEMORY = 2000.0  # trials of a class, after which half of its counts are forgotten
_ALONE = 0.15  # a prior's share where earlier drafters have not drafted the same
_BINS = 10


@dataclass(frozen=True)
class Reliability:
    """Predicted against observed hits of the tried nodes, by predicted rate in tenths.

    Attributes:
        trials: float64 [10], nodes tried.
        predicted: float64 [10], sum of their predicted rates: the hits expected.
        observed: float64 [10], the hits.
    """

    trials: Float64Array
    predicted: Float64Array
    observed: Float64Array

    @classmethod
    def total(cls, parts: Iterable[Reliability]) -> Reliability:
        """The sum of several."""
        found = [np.stack([part.trials, part.predicted, part.observed]) for part in parts]
        return cls(*sum(found, np.zeros((3, _BINS))))

    @property
    def ratio(self) -> float:
        """Expected hits over observed hits; 1 is calibrated, NaN before the first hit."""
        hits = self.observed.sum()
        return float(self.predicted.sum() / hits) if hits else float("nan")


class Calibrator:
    """Conditional acceptance rates of one drafter's evidence classes, learnt over all its texts.

    A rate is the probability that a node is accepted given that its parent was. Safe to share
    between threads. The proposals that a text has not judged yet are `OpenDrafts` of its own, used
    by one thread at a time.

    Args:
        classes: of the drafter.
        conditional: the drafter adds to what others have drafted. What those have drafted as well
            they judge better: their probability stands. What they have not is worth less than its
            evidence says, and counted apart. Nothing to a drafter without classes, whose
            probabilities are its own.

    Attributes:
        n_classes: evidence classes that a draft may name.
    """

    def __init__(self, classes: EvidenceClasses, conditional: bool = False):
        self.n_classes, priors = len(classes), classes.priors
        self.conditional = conditional and self.n_classes > 0
        if self.conditional:
            priors = np.concatenate([priors, _ALONE * priors])
        self._prior_counts: Float64Array = np.full((len(priors), 2), _PRIOR_TRIALS)
        self._prior_counts[:, 1] *= priors
        # float64 [classes, 2]: trials and hits, the prior's included.
        self._counts = self._prior_counts.copy()
        self._bins = np.zeros((_BINS, 3))
        self._lock = Lock()

    def rates(self, classes: Int32Array) -> Float32Array:
        """float32 [...]: posterior mean rate of each class in `classes`, over all texts."""
        counts = self._counts[classes]
        return (counts[..., 1] / counts[..., 0]).astype(np.float32)

    def calibrate(
        self, texts: list[OpenDrafts], drafts: Forest, earlier: Forest | None = None
    ) -> Forest:
        """Proposals with probabilities from the counts, remembered until their texts have judged
        them.

        A node of class −1 keeps the rate that the drafter gave it.

        Args:
            texts: one for each tree.
            drafts: the proposals.
            earlier: what others have drafted, calibrated, for a drafter that is `conditional`;
                None: nothing.
        """
        if not len(drafts.token_ids):
            return drafts
        known = None
        if self.conditional:
            known = (earlier or Forest.empty(len(drafts))).known_probs(drafts)
        arrays = drafts.token_ids, drafts.parents, drafts.probs, drafts.classes, drafts.offsets
        probs = evidence.calibrated(texts, *arrays, known, self._counts)
        return Forest(drafts.token_ids, drafts.parents, probs, drafts.classes, drafts.offsets)

    def judge(self, texts: list[OpenDrafts], token_ids: Int32Array, offsets: Int64Array) -> None:
        """Learn from the tokens by which texts went on; once per step, after `calibrate`.

        Args:
            texts: that they follow.
            token_ids: int32 [n], one text's behind another's.
            offsets: int64 [texts + 1], where each text's begin.
        """
        with self._lock:
            counts = self._counts, self._prior_counts
            evidence.judge(texts, token_ids, offsets, self._bins, *counts, _MEMORY)

    def reliability(self) -> Reliability:
        """How the rates that sessions predicted have held so far."""
        with self._lock:
            return Reliability(*self._bins.T.copy())
