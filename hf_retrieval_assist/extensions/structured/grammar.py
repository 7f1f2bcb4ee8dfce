"""Drafts what a call's grammar forces, and keeps other drafts within it.

Where nothing is forced, drafts what the forms print that the caller expects to be filled in.

The brackets, keys and punctuation of structured output have no alternative. They are drafted as
evidence with a calibrated probability and verified like everything else: a forced *string* is not
forced tokens, and the model decides how it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from ...drafters.base import Drafter, DraftSession, Feedbacks, Target, Tokens
from ...structures import draft_tree
from ...types.evidence import EvidenceClasses
from ...types.token_tree import TokenTree
from .constraint import Constraint, constraint_of
from .forms import Forms

_SKIPPED = 3  # parts that an output may leave out before another one of its form is recognised
_TELLING = 4  # characters of a part that is recognised out of turn
_CHOICES = 16  # ways to fill in a blank that are drafted at once
_PROMPT = 32  # tokens at the end of a prompt in which a form may begin
_LONGEST_CHOICE = 200  # characters
_UNFINISHED = "\ufffd"  # stands for a character of which some bytes are missing
_MOST_BYTES = 4  # a character's

# What a draft rests on: that the text ends with some of the part that is due; a choice; some of the
# first part; some of a part after skipped ones; one character of the first part; nothing but the
# part that is due.
_DUE, _CHOICE, _START, _LATER, _HINT, _TYPED = range(6)
_FIRM = {_HINT: _START, _TYPED: _DUE}  # what the second token of a draft rests on
# How likely the text is to go on with a token that all such drafts have, half of them, or few; then
# the same where it is the last one of a draft, which what fills in the blank may lengthen.
_RATES = np.array(
    [
        [0.95, 0.9, 0.8],
        [0.9, 0.5, 0.2],
        [0.95, 0.6, 0.2],
        [0.3, 0.1, 0.05],
        [0.3, 0.1, 0.05],
        [0.3, 0.3, 0.3],
    ],
    np.float32,
)
_FORM_PRIORS = np.stack([_RATES, 0.8 * _RATES], 2).ravel()

# Rates before any observation: of the first forced token, of later ones, of the last one, which
# may be part of a longer one, and of the shorter ones that may stand in the place of any.
_FORCED = np.array([0.8, 0.9, 0.6, 0.2, 0.1, 0.1, 0.1], np.float32)
_FIRST, _NEXT, _LAST, _SHORTER = range(4)
_EVIDENCE = EvidenceClasses(np.concatenate([_FORM_PRIORS, _FORCED]))


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
        classes = len(_FORM_PRIORS) + np.array(kinds, np.int32)
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


class FormText:
    """One text, and how much of which form it ends with."""

    def __init__(self, forms: Forms, prompt_ids: NDArray[np.int32], vocab_size: int) -> None:
        self._forms = forms
        self._vocab_size = vocab_size
        self._due: dict[int, int] = {}  # the next part of each form being filled in
        self._typed = ""  # the blank's text
        self._unread: tuple[int, ...] = ()  # tokens of a character that is not complete
        # How much of each part, by form and number, the text ends with.
        self._met: dict[tuple[int, int], int] = {}
        # A prompt may end with the beginning of the output.
        self.append(prompt_ids[-_PROMPT:].tolist())

    def append(self, token_ids: Sequence[int]) -> None:
        """The text went on with these tokens."""
        for token in token_ids:
            self._unread += (token,)
            text = self._forms.text_of(self._unread)
            if not text.endswith(_UNFINISHED) or len(self._unread) == _MOST_BYTES:
                self._unread = ()
                for char in text:
                    self._read(char)

    def _read(self, char: str) -> None:
        if len(self._typed) <= _LONGEST_CHOICE:
            self._typed += char
        starting = [(number, 0) for number in self._forms.beginning.get(char, ())]
        met = {
            place: _extended(self._part(place), self._met.get(place, 0), char)
            for place in {*self._met, *starting, *self._expected()}
        }
        ended = {place for place, length in met.items() if length == len(self._part(place))}
        self._met = {place: n for place, n in met.items() if n and place not in ended}
        if ended:
            self._due = {form: number + 1 for form, number in ended}
            self._typed = ""
            self._met = {place: n for place, n in self._met.items() if not place[1]}

    def _part(self, place: tuple[int, int]) -> str:
        form, number = place
        return self._forms.forms[form].parts[number]

    def _expected(self) -> Iterator[tuple[int, int]]:
        """The parts that may follow the blank."""
        for form, due in self._due.items():
            parts = self._forms.forms[form].parts
            near = range(due, min(due + 1 + _SKIPPED, len(parts)))
            for number in {*near, *([len(parts) - 1] if near else [])}:
                if number == due or len(parts[number]) >= _TELLING:
                    yield form, number

    def draft(self, budget: int) -> TokenTree:
        """What the forms print next; `budget` nodes at most."""
        paths = []
        for kind, text in sorted(self._continuations(), key=lambda found: found[0]):
            ids = self._forms.ids_of(text)[:budget]
            paths.append((kind, [*takewhile(self._vocab_size.__gt__, ids)]))
        return _tree(paths).prune(budget) if paths else TokenTree.empty()

    def _continuations(self) -> Iterator[tuple[int, str]]:
        """What may follow, and the kind of evidence for it."""
        for form, due in self._due.items():
            parts, choices = self._forms.forms[form].parts, self._forms.forms[form].choices[due - 1]
            fitting = [c for c in choices if c.startswith(self._typed) and c != self._typed]
            for choice in fitting[:_CHOICES]:
                yield _CHOICE, choice[len(self._typed) :] + "".join(parts[due : due + 1])
            if self._typed and due < len(parts) and (form, due) not in self._met:
                if self._typed in choices:
                    yield _DUE, parts[due]
                elif not choices:
                    yield _TYPED, parts[due]
        for place, length in self._met.items():
            form, number = place
            kind = _HINT if length == 1 else _START
            if number:
                kind = _DUE if number == self._due.get(form) else _LATER
            yield kind, self._part(place)[length:]


def _extended(part: str, length: int, char: str) -> int:
    """How much of a part a text ends with that ended with `length` of it, before `char`."""
    if part[length : length + 1] == char:
        return length + 1
    end = part[:length] + char
    return next(n for n in range(length, -1, -1) if end.endswith(part[:n]))


def _tree(paths: Sequence[tuple[int, Sequence[int]]]) -> TokenTree:
    """The union of paths, the better evidence first, with the classes of `_FORM_PRIORS`."""
    nodes: dict[tuple[int, int], int] = {}
    kinds: list[int] = []
    lasts: list[bool] = []
    passing: list[int] = []  # paths through each node
    for kind, ids in paths:
        node = -1
        for depth, token in enumerate(ids, 1):
            node = nodes.setdefault((node, token), len(nodes))
            if node == len(kinds):
                kinds.append(kind if depth == 1 else _FIRM.get(kind, kind))
                lasts.append(depth == len(ids))
                passing.append(0)
            passing[node] += 1
    tokens, parents = [token for _, token in nodes], [parent for parent, _ in nodes]
    classes = []
    for parent, kind, last, count in zip(parents, kinds, lasts, passing, strict=True):
        share = count / (len(paths) if parent < 0 else passing[parent])
        classes.append(6 * kind + 2 * (0 if share == 1 else 1 if share >= 0.5 else 2) + last)
    tree = TokenTree.build(tokens, parents, _FORM_PRIORS[classes], classes)
    return replace(tree, probs=draft_tree.path_products(tree.parents, tree.probs))
