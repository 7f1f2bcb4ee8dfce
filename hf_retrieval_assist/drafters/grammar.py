"""Drafts what a call's grammar forces, and keeps other drafts within it.

Without a grammar, drafts what the forms print that the caller expects to be filled in.

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
from .form_session import FORM_PRIORS, FormSession

# Rates of the first forced token, and of later ones, before any observation.
_FORCED = np.array([0.95, 0.97], np.float32)
_PRIORS = np.concatenate([FORM_PRIORS, _FORCED])


class GrammarDrafter(Drafter):
    """Drafts from the constraint that it finds among the call's logits processors, or forms."""

    name = "grammar"
    certain = True

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> DraftSession:
        constraint = constraint_of(target.processors, target.row)
        if constraint is None and target.forms is not None:
            return FormSession(target.forms, prompt_ids, target.vocab_size)
        return GrammarSession(constraint)

    def priors(self) -> Float32Array:
        return _PRIORS


class GrammarSession(DraftSession):
    """One text, and its grammar's state; no state where there is no grammar."""

    def __init__(self, constraint: Constraint | None):
        self._constraint = constraint
        self._forced: list[int] = []  # what is known to follow, so that no mask is computed twice

    def propose(self, budget: int) -> TokenTree:
        if self._constraint is None:
            return TokenTree.empty()
        known = len(self._forced)
        if known < budget and all(map(self._constraint.advance, self._forced)):
            self._forced += self._constraint.forced(budget - known)
            self._constraint.rollback(known)
        tokens = self._forced[:budget]
        classes = len(FORM_PRIORS) + np.minimum(np.arange(len(tokens)), 1)
        return TokenTree.chain(tokens, _PRIORS[classes].cumprod(), classes)

    def restrict(self, tree: TokenTree) -> TokenTree:
        return tree if self._constraint is None else self._constraint.prune(tree)

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        came = list(token_ids)
        self._forced = self._forced[len(came) :] if self._forced[: len(came)] == came else []
        # A text that the grammar does not know (its end, most often) has no state any more.
        if self._constraint is not None and not all(map(self._constraint.advance, token_ids)):
            self._constraint = None
