"""Tokens as pieces of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...types.token_tree import Int32Array

_CONTEXT = 4  # tokens before the first, by which a tokenizer decides about its leading space
_UNFINISHED = "\ufffd"  # stands for a character of which some bytes are missing


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
        self._window = [int(token) for token in context[-_CONTEXT:]]
        self._known = len(self._window)

    def add(self, token: int) -> str:
        if self._tokenizer is None:
            return f"{int(token)} "
        self._window.append(int(token))
        piece = self.rest()
        if piece.endswith(_UNFINISHED):
            return ""
        del self._window[: self._known]
        self._known = len(self._window)
        return piece

    def rest(self) -> str:
        """The text of tokens that await the end of a character."""
        if len(self._window) == self._known:
            return ""
        before = _decode(self._tokenizer, self._window[: self._known])
        return _decode(self._tokenizer, self._window)[len(before) :]


def text_pieces(
    tokenizer: Any, token_ids: Sequence[int] | Int32Array, context: Sequence[int] | Int32Array = ()
) -> list[str]:
    """The text that each of the tokens adds behind a context; see :class:`PieceStream`."""
    stream = PieceStream(tokenizer, context)
    pieces = [stream.add(token) for token in token_ids]
    if pieces:
        pieces[-1] += stream.rest()
    return pieces


def _decode(tokenizer: Any, ids: list[int]) -> str:
    if not ids:
        return ""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def readable(text: str) -> str:
    """The text with control characters as symbols, which no terminal or page obeys."""
    return text.translate(_SYMBOLS)


_SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_SYMBOLS |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
# What turns the direction of the text behind it.
_SYMBOLS |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
