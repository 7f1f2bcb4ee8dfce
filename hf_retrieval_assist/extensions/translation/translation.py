"""Texts and drafts between two tokenizers, by way of the text.

Tokens that both vocabularies have are drafted as they are (Timor et al. 2025, arXiv:2502.05202,
section 3, token-level intersection); the rest goes through the text, as in universal assisted
generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ...drafters.base import Target
from ...types.token_tree import TokenTree

_CONTEXT = 8  # tokens in front of a piece of text, so that it is cut as in the middle of a text
_TAIL = 16  # tokens whose encoding may still change with what follows
_ANCHOR = "\n"
_BROKEN = "�"  # what a decoder shows for an unfinished character


class Tokenizer:
    """A tokenizer as pieces of a text need it: nothing added, nothing cleaned up."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._tokenizer = tokenizer

    def prompt(self, text: str) -> list[int]:
        """A whole text, with the special tokens that the tokenizer puts before it."""
        return list(self._tokenizer(text)["input_ids"])

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def inside(self, text: str) -> list[int]:
        """A text from the middle of another one: some tokenizers put a space before what they
        take for a beginning."""
        anchor = self.encode(_ANCHOR)
        ids = self.encode(_ANCHOR + text)
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self.encode(text)

    def after(self, context: Sequence[int], text: str) -> list[int]:
        """The ids of a text that follows ids; of the text alone where it would merge with them."""
        before = self.decode(context)
        ids = self.encode(before + text)
        for count in range(len(ids) + 1):
            if self.decode(ids[:count]) == before:
                return ids[count:]
        return self.inside(text)

    def ends(self, ids: Sequence[int], context: Sequence[int] = (), first: int = 0) -> list[int]:
        """Characters of the text behind `context` after each id from the `first` on; −1 inside of a
        character."""
        start = len(self.decode(context))
        texts = [self.decode([*context, *ids[: i + 1]]) for i in range(first, len(ids))]
        return [-1 if text.endswith(_BROKEN) else len(text) - start for text in texts]


class DraftTranslation:
    """Drafts of one vocabulary as drafts of another.

    Where all tokens of a path are in both vocabularies they are drafted as they are; other paths
    are decoded and encoded again, and a token is as probable as the node that completes its text.

    Args:
        source: of the draft.
        goal: of the target.
        size: ids that the target has.
    """

    def __init__(self, source: Tokenizer, goal: Tokenizer, size: int) -> None:
        self.source, self.goal, self._size = source, goal, size
        self._known = _shared_ids(source, goal)

    def tree(
        self, draft: TokenTree, source_context: Sequence[int], context: Sequence[int]
    ) -> TokenTree:
        """The draft below a text whose last tokens are the contexts, one in each vocabulary."""
        tree = TokenTree.empty()
        source_context, context = source_context[-_CONTEXT:], context[-_CONTEXT:]
        leaves = np.setdiff1d(np.arange(len(draft)), draft.parents)
        for leaf in leaves.tolist():
            tree = tree.merge(self._chain(draft, draft.path(leaf), source_context, context))
        return tree

    def _chain(
        self, draft: TokenTree, path: Any, source_context: Sequence[int], context: Sequence[int]
    ) -> TokenTree:
        ids = draft.token_ids[path].tolist()
        same = [self._known.get(token, -1) for token in ids]
        if min(same) >= 0:
            return TokenTree.chain(same, draft.probs[path], draft.classes[path])
        ends = self.source.ends(ids, source_context)
        whole = max((i for i, end in enumerate(ends) if end > 0), default=-1) + 1
        text = self.source.decode([*source_context, *ids[:whole]])
        text = text[len(self.source.decode(source_context)) :]
        found = self.goal.after(context, text)
        nodes = path[_completing(ends[:whole], self.goal.ends(found, context))]
        found = found[: len(nodes)]
        known = next((i for i, token in enumerate(found) if token >= self._size), len(found))
        return TokenTree.chain(
            found[:known], draft.probs[nodes][:known], draft.classes[nodes][:known]
        )

    def text(self, prompt_ids: Sequence[int] | NDArray[np.int32]) -> TranslatedText:
        """A text of the target that drafts of the other vocabulary are made for, [length] ids."""
        return TranslatedText(self, prompt_ids)


class TranslatedText:
    """A text of the target in the draft model's ids too, while it grows.

    Its last tokens are encoded anew whenever some are added, which may change the end of the ids.
    What lies before them is settled: there both tokenizers have a boundary, so the texts stay
    equal.

    Args:
        translation: from the draft model's ids to the target's.
        prompt_ids: [length], the target's.

    Attributes:
        ids: of the whole text, the draft model's.
    """

    def __init__(
        self, translation: DraftTranslation, prompt_ids: Sequence[int] | NDArray[np.int32]
    ) -> None:
        self._translation = translation
        self._source, self._goal = translation.goal, translation.source
        self._settled: list[int] = []
        # Ids of the target: the last ones settled, and those that are not.
        self._before: list[int] = []
        self._tail: list[int] = []
        self.ids: list[int] = []
        self.append(prompt_ids)

    def tree(self, draft: TokenTree) -> TokenTree:
        """A draft below the text, in the target's vocabulary."""
        return self._translation.tree(draft, self.ids, [*self._before, *self._tail])

    def append(self, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """The text went on with these ids of the target's."""
        self._tail += map(int, token_ids)
        tail = self._encoded()
        self.ids = self._settled + tail
        if len(self._tail) >= 2 * _TAIL:
            self._settle(tail)

    def _encoded(self) -> list[int]:
        text = self._text(len(self._tail))
        return self._goal.inside(text) if self._before else self._goal.prompt(text)

    def _text(self, count: int) -> str:
        """The text of the first tokens of the tail."""
        start = len(self._source.decode(self._before))
        return self._source.decode([*self._before, *self._tail[:count]])[start:]

    def _settle(self, tail: list[int]) -> None:
        """Move all but the end of the tail, up to a boundary of both tokenizers."""
        context, first = self._settled[-_CONTEXT:], max(0, len(tail) - 4 * _TAIL)
        start, ends = len(self._goal.decode(context)), self._goal.ends(tail, context, first)
        most, whole = len(self._tail) - _TAIL, self._text(len(self._tail))
        for count in range(most, max(0, most - 2 * _TAIL), -1):
            text = self._text(count)
            if len(text) not in ends or text.endswith(_BROKEN):
                continue
            kept = tail[: first + ends.index(len(text)) + 1]
            # Some tokenizers put a space before what they encode alone.
            rest = self._goal.inside(whole[len(text) :])
            if self._goal.decode([*context, *kept, *rest])[start:] == whole:
                self._settled += kept
                self._before = [*self._before, *self._tail[:count]][-_CONTEXT:]
                del self._tail[:count]
                return


def _completing(ends: Sequence[int], goal_ends: Sequence[int]) -> NDArray[np.int64]:
    """The token of the other text that reaches as far as each of the one, while there is one."""
    reached, needed = (np.maximum.accumulate(np.array(of, np.int64)) for of in (ends, goal_ends))
    nodes = np.searchsorted(reached, needed)
    return nodes[nodes < len(ends)]


def _shared_ids(source: Tokenizer, goal: Tokenizer) -> dict[int, int]:
    """Ids of the goal for the ids of tokens that both vocabularies spell alike.

    How a space is spelt differs; it is read off how each encodes one.
    """
    spaces = [_space_sign(tokenizer) for tokenizer in (source, goal)]
    shared = {}
    for token, number in source.vocabulary.items():
        spelt = token
        if None not in spaces and token.startswith(spaces[0]):
            spelt = spaces[1] + token[len(spaces[0]) :]
        if spelt in goal.vocabulary:
            shared[number] = goal.vocabulary[spelt]
    return shared


def _space_sign(tokenizer: Tokenizer) -> Any:
    """The character that stands for a space, or None."""
    first = tokenizer.encode(" ")
    spelt = {number: token for token, number in tokenizer.vocabulary.items() if number in first[:1]}
    return next(iter(spelt.values()))[0] if spelt else None


def translation_between(
    tokenizers: tuple[Any, Any], draft_model: Any, target: Target
) -> DraftTranslation:
    """The translation of a draft model's ids to a target's.

    Args:
        tokenizers: of the two; None: the one in the model's folder.

    Raises:
        ValueError: a tokenizer is missing.
    """
    source = _found("assistant_tokenizer", tokenizers[0], draft_model)
    goal = _found("target_tokenizer", tokenizers[1], target.model)
    return DraftTranslation(source, goal, target.vocab_size)


def _found(label: str, tokenizer: PreTrainedTokenizerBase | None, model: Any) -> Tokenizer:
    """The tokenizer that was given, or the one in the model's folder.

    Raises:
        ValueError: there is none; `label` names it.
    """
    if tokenizer is not None:
        return Tokenizer(tokenizer)
    folder = "" if model is None else model.config.name_or_path
    try:
        return _saved(folder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{label}: expected a tokenizer, because the draft model's vocabulary is not the "
            f"target's, got none and found none in {folder!r}"
        ) from error


@lru_cache(maxsize=8)
def _saved(folder: str) -> Tokenizer:
    from transformers import AutoTokenizer

    return Tokenizer(AutoTokenizer.from_pretrained(folder))
