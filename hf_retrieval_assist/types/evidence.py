"""Classes of evidence: what a drafter tells its nodes apart by."""

from __future__ import annotations

from typing import Any

import numpy as np

from .token_tree import Float32Array, Int32Array


class EvidenceClasses:
    """What a drafter tells its nodes apart by, and how often such nodes are accepted.

    Args:
        priors: of each class, the probability that a node is accepted given that its parent was,
            before any observation. It has an axis for each quantity that the classes are told by;
            or one, where the drafter itself numbers them.
        edges: of each axis, ascending, the values from which on another bucket begins.

    Attributes:
        priors: float32 [classes].

    Raises:
        ValueError: they are no probabilities, or as many as edges do not tell apart.
    """

    def __init__(self, priors: Any = (), *edges: Any):
        rates = np.asarray(priors, np.float32)
        shape = tuple(len(one) + 1 for one in edges) or rates.shape[:1]
        if rates.shape != shape or not ((rates >= 0) & (rates <= 1)).all():
            raise ValueError(f"priors: expected {list(shape)} rates in [0, 1], got {priors}")
        self.priors: Float32Array = rates.ravel()
        self._edges = [np.asarray(one) for one in edges]

    def __len__(self) -> int:
        return len(self.priors)

    def of(self, *values: Any) -> Int32Array:
        """int32 [n]: the classes of nodes, from a value or [n] of each quantity."""
        classes: Any = 0
        for edges, value in zip(self._edges, values, strict=True):
            classes = classes * (len(edges) + 1) + edges.searchsorted(value, "right")
        found: Int32Array = classes.astype(np.int32)
        return found
