"""Drafts what a call's grammar forces, and keeps other drafts within it.

Where nothing is forced, drafts what the forms print that the caller expects to be filled in.

The brackets, keys and punctuation of structured output have no alternative. They are drafted as
evidence with a calibrated probability and verified like everything else: a forced *string* is not
forced tokens, and the model decides how it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..structures import draft_tree
from ..token_tree import Float32Array, TokenTree
from .base import Drafter, DraftSession, Feedback, Target
from .form_session import FORM_PRIORS, FormSession

if TYPE_CHECKING:
    from ..grammars.constraint import Constraint

_CONSTRAINTS = "hf_retrieval_assist.grammars"  # may be left out of an installation

# Before any observation, the rates of the first forced token, of later ones, of the last one, which
# may be part of a longer one, and of the shorter ones that may stand in the place of any.
_FORCED = np.array([0.8, 0.9, 0.6, 0.2, 0.1, 0.1, 0.1], np.float32)
_FIRST, _NEXT, _LAST, _SHORTER = range(4)
_PRIORS = np.concatenate([FORM_PRIORS, _FORCED])


class GrammarDrafter(Drafter):
    """Drafts from the constraint that it finds among the call's logits processors, or forms."""

    name = "grammar"
    certain = True

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> DraftSession:
        forms = None
        if target.forms is not None:
            forms = FormSession(target.forms, prompt_ids, target.vocab_size)
        constraint = None
        if target.processors and find_spec(_CONSTRAINTS):
            found = import_module(f"{_CONSTRAINTS}.constraint")
            constraint = found.constraint_of(target.processors, target.row)
        return GrammarSession(constraint, forms)

    def priors(self) -> Float32Array:
        return _PRIORS


class GrammarSession(DraftSession):
    """One text, and its grammar's state; no state where there is no grammar."""

    def __init__(self, constraint: Constraint | None, forms: FormSession | None = None):
        self._constraint = constraint
        self._forms = forms
        self.idle = constraint is None and forms is None
        # What is known to follow, so that no mask is computed twice.
        self._forced: list[list[int]] = []

    def propose(self, budget: int) -> TokenTree:
        tree = self._propose_forced(budget)
        return self._forms.propose(budget) if self._forms and not len(tree) else tree

    def _propose_forced(self, budget: int) -> TokenTree:
        if self._constraint is None:
            return TokenTree.empty()
        budget = min(budget, self._constraint.deepest)
        known = len(self._forced)
        if known < budget and all(self._constraint.advance(cuts[0]) for cuts in self._forced):
            self._forced += self._constraint.forced(budget - known)
            self._constraint.rollback(known)
        tokens: list[int] = []
        parents: list[int] = []
        kinds: list[int] = []
        parent = -1
        spans = [cuts[: len(_FORCED) - _LAST] for cuts in self._forced[:budget]]
        for depth, cuts in enumerate(spans):
            last = depth == len(spans) - 1 < budget - 1
            kinds.append(_LAST if last else _NEXT if depth else _FIRST)
            kinds += range(_SHORTER, _SHORTER + len(cuts) - 1)
            parents += [parent] * len(cuts)
            parent = len(tokens)
            tokens += cuts
        classes = len(FORM_PRIORS) + np.array(kinds, np.int32)
        tree = TokenTree.build(tokens, parents, _PRIORS[classes], classes)
        return replace(tree, probs=draft_tree.path_products(tree.parents, tree.probs)).prune(budget)

    def restrict(self, tree: TokenTree) -> TokenTree:
        return tree if self._constraint is None else self._constraint.prune(tree)

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        if self._forms is not None:
            self._forms.commit(token_ids, feedback)
        came = list(token_ids)
        known = [cuts[0] for cuts in self._forced[: len(came)]] == came
        self._forced = self._forced[len(came) :] if known else []
        # A text that the grammar does not know (its end, most often) has no state any more.
        if self._constraint is not None and not all(map(self._constraint.advance, token_ids)):
            self._constraint = None
