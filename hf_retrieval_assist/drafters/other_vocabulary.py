"""A draft model whose tokenizer is not the target's, by way of the text.

Tokens that both vocabularies have are drafted as they are (Timor et al. 2025, arXiv:2502.05202,
section 3, token-level intersection); the rest goes through the text, as in universal assisted
generation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ..planning.cost_model import CostModel
from ..system.locks import Lock
from ..token_tree import TokenTree
from .base import DraftSession, Feedback, Target
from .translation import DraftTranslation, GrowingTranslation, Tokenizer, tokenizer_of

if TYPE_CHECKING:
    from .draft_model import DraftModelSession


class Tokenizers:
    """Both models' tokenizers, and the translations made of them, one for each target.

    Args:
        model: the draft model.
        assistant: its tokenizer; None: the one in its folder.
        target: the target's; None: the one in its folder.
    """

    def __init__(
        self,
        model: Any,
        assistant: PreTrainedTokenizerBase | None,
        target: PreTrainedTokenizerBase | None,
    ) -> None:
        self.given = assistant is not None or target is not None
        self._model, self._assistant, self._target = model, assistant, target
        self._translations: weakref.WeakKeyDictionary[Any, DraftTranslation] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = Lock()

    def translation(self, target: Target) -> DraftTranslation:
        """From the draft model's ids to the target's.

        Raises:
            ValueError: a tokenizer that was not given is not in its model's folder.
        """
        key = target if target.model is None else target.model
        with self._lock:
            if key not in self._translations:
                self._translations[key] = DraftTranslation(
                    _found("assistant_tokenizer", self._assistant, self._model),
                    _found("target_tokenizer", self._target, target.model),
                    target.vocab_size,
                )
            return self._translations[key]


def _found(label: str, tokenizer: PreTrainedTokenizerBase | None, model: Any) -> Tokenizer:
    """The tokenizer that was given, or the one in the model's folder."""
    if tokenizer is not None:
        return Tokenizer(tokenizer)
    folder = "" if model is None else model.config.name_or_path
    try:
        return tokenizer_of(folder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{label}: expected a tokenizer, because the draft model's vocabulary is not the "
            f"target's, got none and found none in {folder!r}"
        ) from error


class TranslatedSession(DraftSession):
    """The draft model's session over the same text in its own vocabulary.

    Args:
        translation: from the draft model's ids.
        prompt_ids: int32 [length], the target's.
        start: makes the draft model's session for a prompt of its own ids.
    """

    def __init__(
        self,
        translation: DraftTranslation,
        prompt_ids: NDArray[np.int32],
        start: Callable[[NDArray[np.int32]], DraftModelSession],
    ) -> None:
        self._translation = translation
        self._tokens: list[int] = prompt_ids.tolist()
        self._text = GrowingTranslation(translation.goal, translation.source, self._tokens)
        self._inner = start(np.array(self._text.ids, np.int32))

    def propose(self, budget: int) -> TokenTree:
        draft = self._inner.propose(budget)
        if not len(draft):
            return draft
        return self._translation.tree(draft, self._text.ids, self._tokens).prune(budget)

    def see_cost(self, cost: CostModel) -> None:
        self._inner.see_cost(cost)

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        self._tokens += map(int, token_ids)
        self._text.append(token_ids)
        known, text = self._inner.text, self._text.ids
        if text[: len(known)] != known:
            self._inner.rewrite(text)
        elif len(text) > len(known):
            self._inner.commit(text[len(known) :], None)

    def close(self) -> None:
        self._inner.close()
