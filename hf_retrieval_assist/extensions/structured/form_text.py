"""Follows forms in a text, and drafts what they print next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from ...structures import draft_tree
from ...types.token_tree import TokenTree
from .forms import Forms

_SKIPPED = 3  # parts that an output may leave out before another one of its form is recognised
_TELLING = 4  # characters of a part that is recognised out of turn
_CHOICES = 16  # ways to fill in a blank that are drafted at once
_PROMPT = 32  # tokens at the end of a prompt in which a form may begin
_LONGEST = 4000  # characters of a text in which a part is found
_UNFINISHED = "\ufffd"  # stands for a character of which some bytes are missing
_MOST_BYTES = 4  # a character's

# What a draft rests on: that the text ends with some of the part that is due; with some of a first
# part, or of a choice; nothing but that a part is due, or one character.
_DUE, _BEGUN, _GUESS = range(3)
# How likely the text is to go on with a token that is the only one drafted in its place, one of
# two, or one of more.
_RATES = np.array([[0.95, 0.9, 0.8], [0.95, 0.6, 0.2], [0.3, 0.1, 0.05]], np.float32)
FORM_PRIORS = _RATES.ravel()


class FormText:
    """One text, and which part of which form is due in it."""

    def __init__(self, forms: Forms, prompt_ids: NDArray[np.int32], vocab_size: int) -> None:
        self._forms = forms
        self._vocab_size = vocab_size
        self._due: dict[int, int] = {}  # the next part of each form being filled in
        self._text = ""  # its last characters
        self._behind = 0  # where in them the last part has ended
        self._unread: tuple[int, ...] = ()  # tokens of a character that is not complete
        # A prompt may end with the beginning of the output.
        self.append(prompt_ids[-_PROMPT:].tolist())

    def append(self, token_ids: Sequence[int]) -> None:
        """The text went on with these tokens."""
        for token in token_ids:
            self._unread += (token,)
            text = self._forms.text_of(self._unread)
            if not text.endswith(_UNFINISHED) or len(self._unread) == _MOST_BYTES:
                self._unread = ()
                self._text += text
                while self._read_part():
                    pass
                cut = max(len(self._text) - _LONGEST, 0)
                self._text, self._behind = self._text[cut:], max(self._behind - cut, 0)

    def _read_part(self) -> bool:
        """Whether one of the expected parts has come; what comes next is looked for behind it."""
        ends: dict[int, list[tuple[int, int]]] = {}
        for form, number in self._expected():
            part = self._forms.forms[form].parts[number]
            # The first part of a form may begin with that of another one.
            since = self._behind if number else max(self._behind + 1 - len(part), 0)
            if (start := self._text.find(part, since)) >= 0:
                ends.setdefault(start + len(part), []).append((form, number + 1))
        if ends:
            self._behind = min(ends)
            self._due = dict(ends[self._behind])
        return bool(ends)

    def _expected(self) -> Iterator[tuple[int, int]]:
        """The parts that may come: those due or soon after, the last one, the first of any form."""
        for number, form in enumerate(self._forms.forms):
            due, count = self._due.get(number, 0), len(form.parts)
            later = range(due, min(due + 1 + _SKIPPED, count)) if due else ()
            for part in {0, *later, *([count - 1] if later else [])}:
                if part in (0, due) or len(form.parts[part]) >= _TELLING:
                    yield number, part

    def draft(self, budget: int) -> TokenTree:
        """What the forms print next; `budget` nodes at most."""
        paths = []
        for kind, text in sorted(self._continuations(), key=lambda found: found[0]):
            ids = self._forms.ids_of(text)[:budget]
            paths.append((kind, [*takewhile(self._vocab_size.__gt__, ids)]))
        return _tree(paths).prune(budget) if paths else TokenTree.empty()

    def _continuations(self) -> Iterator[tuple[int, str]]:
        """What may follow, and the kind of evidence for it."""
        typed = self._text[self._behind :]
        for number, index in self._expected():
            form = self._forms.forms[number]
            part, is_due = form.parts[index], index > 0 and index == self._due[number]
            met = _overlap(typed if index else self._text, part)
            if met:
                begun = _BEGUN if met > 1 and not index else _GUESS
                yield _DUE if is_due else begun, part[met:]
            if is_due:
                choices = form.choices[index - 1]
                fitting = [c for c in choices if c.startswith(typed) and c != typed]
                for choice in fitting[:_CHOICES]:
                    yield _BEGUN, choice[len(typed) :] + part
                if typed in choices:
                    yield _DUE, part
                elif typed and not choices and not met:
                    yield _GUESS, part


def _overlap(text: str, part: str) -> int:
    """How much of a part a text ends with."""
    tail = text[-len(part) :]
    start = tail.find(part[:1])
    while start >= 0 and not part.startswith(tail[start:]):
        start = tail.find(part[:1], start + 1)
    return len(tail) - start if start >= 0 else 0


def _tree(paths: Sequence[tuple[int, Sequence[int]]]) -> TokenTree:
    """The union of paths, the better evidence first, with the classes of `FORM_PRIORS`."""
    nodes: dict[tuple[int, int], int] = {}
    kinds: list[int] = []
    for kind, ids in paths:
        node = -1
        for depth, token in enumerate(ids):
            node = nodes.setdefault((node, token), len(nodes))
            if node == len(kinds):
                # Where the first token of a guess has come, it is none any more.
                kinds.append(_BEGUN if depth and kind == _GUESS else kind)
    tokens, parents = [token for _, token in nodes], [parent for parent, _ in nodes]
    among = Counter(parents)
    shares = [min(among[parent], 3) - 1 for parent in parents]
    classes = np.array(kinds, np.int32) * _RATES.shape[1] + np.array(shares, np.int32)
    tree = TokenTree.build(tokens, parents, FORM_PRIORS[classes], classes)
    return replace(tree, probs=draft_tree.path_products(tree.parents, tree.probs))
