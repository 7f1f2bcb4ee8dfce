"""Drafts what a call's grammar forces, and keeps other drafts within it.

Where nothing is forced, drafts what the forms print that the caller expects to be filled in.

The brackets, keys and punctuation of structured output have no alternative. They are drafted as
evidence with a calibrated probability and verified like everything else: a forced *string* is not
forced tokens, and the model decides how it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...drafters.base import Drafter, DraftSession, Feedbacks, Target, Tokens
from ...structures import draft_tree
from ...types.evidence import EvidenceClasses
from ...types.token_tree import TokenTree
from .constraint import DEEPEST, Constraint, constraint_of
from .form_text import FORM_PRIORS, FormText

# Rates before any observation: of the first forced token, of later ones, of the last one, which
# may be part of a longer one, and of the shorter ones that may stand in the place of any.
_FORCED = np.array([0.8, 0.9, 0.6, 0.2, 0.1, 0.1, 0.1], np.float32)
_FIRST, _NEXT, _LAST, _SHORTER = range(4)
_EVIDENCE = EvidenceClasses(np.concatenate([FORM_PRIORS, _FORCED]))


class GrammarDrafter(Drafter):
    """Drafts from the constraint that it finds among the call's logits processors, or forms."""

    name = "grammar"
    evidence = _EVIDENCE

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> DraftSession:
        forms = None
        if target.forms is not None:
            forms = FormText(target.forms, prompt_ids, target.vocab_size)
        return GrammarSession(constraint_of(target.call.processors, target.call.row), forms)

    def propose(
        self, sessions: Sequence[GrammarSession], budgets: Sequence[int]
    ) -> Sequence[TokenTree]:
        return [session.draft(most) for session, most in zip(sessions, budgets, strict=True)]

    def commit(
        self, sessions: Sequence[GrammarSession], tokens: Tokens, feedbacks: Feedbacks
    ) -> None:
        for session, token_ids in zip(sessions, tokens, strict=True):
            session.append(token_ids)


class GrammarSession(DraftSession):
    """One text, and its grammar's state; no state where there is no grammar."""

    def __init__(self, constraint: Constraint | None, forms: FormText | None = None):
        self._constraint = constraint
        self._forms = forms
        self.idle = constraint is None and forms is None
        # What is known to follow, so that no mask is computed twice.
        self._forced: list[list[int]] = []

    def draft(self, budget: int) -> TokenTree:
        """What is forced, or else what forms print; `budget` nodes at most."""
        tree = self._forced_tree(budget)
        return self._forms.draft(budget) if self._forms and not len(tree) else tree

    def _forced_tree(self, budget: int) -> TokenTree:
        if self._constraint is None:
            return TokenTree.empty()
        budget = min(budget, DEEPEST)
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
        tree = TokenTree.build(tokens, parents, _EVIDENCE.priors[classes], classes)
        return replace(tree, probs=draft_tree.path_products(tree.parents, tree.probs)).prune(budget)

    def restrict(self, tree: TokenTree) -> TokenTree:
        return tree if self._constraint is None else self._constraint.prune(tree)

    def append(self, token_ids: Sequence[int]) -> None:
        """The text went on with these tokens."""
        if self._forms is not None:
            self._forms.append(token_ids)
        came = list(token_ids)
        known = [cuts[0] for cuts in self._forced[: len(came)]] == came
        self._forced = self._forced[len(came) :] if known else []
        # A text that the grammar does not know (its end, most often) has no state any more.
        if self._constraint is not None and not all(map(self._constraint.advance, token_ids)):
            self._constraint = None
