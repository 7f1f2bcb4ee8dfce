"""A draft model whose tokenizer is not the target's, by way of the text.

Tokens that both vocabularies have are drafted as they are (Timor et al. 2025, arXiv:2502.05202,
section 3, token-level intersection); the rest goes through the text, as in universal assisted
generation.
"""

from __future__ import annotations

import weakref
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..drafters.base import Target
from ..system.locks import Lock
from .translation import DraftTranslation, Tokenizer, tokenizer_of


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
        self._translations = weakref.WeakKeyDictionary[Any, DraftTranslation]()
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
