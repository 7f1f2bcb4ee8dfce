"""Tokens as pieces of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..token_tree import Int32Array

_CONTEXT = 4  # tokens before the first, by which a tokenizer decides about its leading space
_UNFINISHED = "\ufffd"  # stands for a character of which some bytes are missing


def text_pieces(
    tokenizer: Any, token_ids: Sequence[int] | Int32Array, context: Sequence[int] | Int32Array = ()
) -> list[str]:
    """The text that each token adds to what stands before it.

    A character made of several tokens belongs to the last of them; the others add nothing.

    Args:
        tokenizer: None gives the ids, each with a space behind it.
        token_ids: [n] tokens.
        context: tokens in front of them.
    """
    if tokenizer is None:
        return [f"{int(token)} " for token in token_ids]
    ids = [int(token) for token in (*context[-_CONTEXT:], *token_ids)]
    first = len(ids) - len(token_ids)
    pieces = []
    # Decoding starts at a token whose own text is known already, since its start may look different
    # at the beginning of a text.
    start, known = 0, first
    for end in range(first + 1, len(ids) + 1):
        text = _decode(tokenizer, ids[start:end])
        if text.endswith(_UNFINISHED) and end < len(ids):
            pieces.append("")
            continue
        pieces.append(text[len(_decode(tokenizer, ids[start:known])) :])
        start, known = known, end
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
