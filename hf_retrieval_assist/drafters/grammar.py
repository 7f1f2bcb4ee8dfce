"""Drafts what a call's grammar forces, and keeps other drafts within it.

The brackets, keys and punctuation of structured output have no alternative. They are drafted as
evidence with a calibrated probability and verified like everything else: a forced *string* is not
forced tokens, and the model decides how it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..grammars.constraint import Constraint, constraint_of
from ..token_tree import Float32Array, TokenTree
from .base import Drafter, DraftSession, Feedback, Target

# Rates of the first forced token, and of later ones, before any observation.
_PRIORS = np.array([0.95, 0.97], np.float32)


class GrammarDrafter(Drafter):
    """Drafts from the constraint that it finds among the call's logits processors."""

    name = "grammar"
    certain = True

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> GrammarSession:
        return GrammarSession(constraint_of(target.processors, target.row))

    def priors(self) -> Float32Array:
        return _PRIORS


class GrammarSession(DraftSession):
    """One text, and its grammar's state; no state where there is no grammar."""

    def __init__(self, constraint: Constraint | None):
        self._constraint = constraint

    def propose(self, budget: int) -> TokenTree:
        if self._constraint is None:
            return TokenTree.empty()
        tokens = self._constraint.forced(budget)
        classes = [0] + [1] * (len(tokens) - 1) if tokens else []
        return TokenTree.chain(tokens, _PRIORS[classes].cumprod(), classes)

    def restrict(self, tree: TokenTree) -> TokenTree:
        return tree if self._constraint is None else self._constraint.prune(tree)

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        # A text that the grammar does not know (its end, most often) has no state any more.
        if self._constraint is not None and not all(map(self._constraint.advance, token_ids)):
            self._constraint = None
