"""Acceptance probabilities from counts: what a drafter's evidence was worth lately.

A drafter names for every node the evidence class its proposal rests on (source, match length,
depth, rank). A node was tried when the text reached its parent, and hit when the text then went on
with its token, whether or not it was verified: the text itself judges every proposal, so no
verification has to be spent on exploring.
"""

from __future__ import annotations

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


class Calibrator:
    """Conditional acceptance rates of one drafter's evidence classes, learnt over all its texts.

    A rate is the probability that a node is accepted given that its parent was. Safe to share
    between threads. The proposals that a text has not judged yet are `OpenDrafts` of its own, used
    by one thread at a time.

    Args:
        classes: of the drafter.

    Attributes:
        n_classes: evidence classes that a draft may name.
    """

    def __init__(self, classes: EvidenceClasses):
        self.n_classes = len(classes)
        self._prior_counts: Float64Array = np.full((self.n_classes, 2), _PRIOR_TRIALS)
        self._prior_counts[:, 1] *= classes.priors
        # float64 [classes, 2]: trials and hits, the prior's included.
        self._counts = self._prior_counts.copy()
        self._lock = Lock()

    def rates(self, classes: Int32Array) -> Float32Array:
        """float32 [...]: posterior mean rate of each class in `classes`, over all texts."""
        counts = self._counts[classes]
        return (counts[..., 1] / counts[..., 0]).astype(np.float32)

    def calibrate(self, texts: list[OpenDrafts], drafts: Forest) -> Forest:
        """Proposals with probabilities from the counts, remembered until their texts have judged
        them.

        A node of class −1 keeps the rate that the drafter gave it.

        Args:
            texts: one for each tree.
            drafts: the proposals.
        """
        if not len(drafts.token_ids):
            return drafts
        arrays = drafts.token_ids, drafts.parents, drafts.probs, drafts.classes, drafts.offsets
        probs = evidence.calibrated(texts, *arrays, self._counts)
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
            evidence.judge(texts, token_ids, offsets, *counts, _MEMORY)
