"""Tokens as pieces of text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...types.token_tree import Int32Array

_CONTEXT = 4  # tokens before the first, by which a tokenizer decides about its leading space
_UNFINISHED = "\ufffd"  # stands for a character of which some bytes are missing
# What moves a terminal's cursor, or turns the direction of the text behind it.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class PieceStream:
    """Tells of one token after another what text it adds.

    A character made of several tokens belongs to the last of them; the others add nothing.

    Args:
        tokenizer: None gives the ids, each with a space behind it.
        context: tokens in front of the first.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] | Int32Array = ()):
        self._tokenizer = tokenizer
        # Decoding starts at a token whose own text is known already, since its start may look
        # different at the beginning of a text.
        self._known = [int(token) for token in context[-_CONTEXT:]]
        self._unfinished: list[int] = []

    def add(self, token: int) -> str:
        if self._tokenizer is None:
            return f"{int(token)} "
        self._unfinished.append(int(token))
        piece = self.rest()
        if piece.endswith(_UNFINISHED):
            return ""
        self._known, self._unfinished = self._unfinished, []
        return piece

    def rest(self) -> str:
        """The text of tokens that await the end of a character."""
        before = self._decoded(self._known)
        return self._decoded(self._known + self._unfinished)[len(before) :]

    def _decoded(self, ids: list[int]) -> str:
        if self._tokenizer is None or not ids:
            return ""
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def text_pieces(
    tokenizer: Any, token_ids: Sequence[int] | Int32Array, context: Sequence[int] | Int32Array = ()
) -> list[str]:
    """The text that each of the tokens adds behind a context; see :class:`PieceStream`."""
    stream = PieceStream(tokenizer, context)
    pieces = [stream.add(token) for token in token_ids]
    if pieces:
        pieces[-1] += stream.rest()
    return pieces


def readable(text: str) -> str:
    """The text without characters that a terminal or page would obey."""
    return _CONTROLS.sub("\ufffd", text)
