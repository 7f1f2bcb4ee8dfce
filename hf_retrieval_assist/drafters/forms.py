"""Forms that an output is expected to fill in: texts with blanks, such as JSON of a known schema.

The output is not constrained, and may leave a form or never begin one. A form is drafted from as
long as the output keeps to it: once the output ends with the beginning of a printed part, the rest
of that part is likely to follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Form:
    """A text with blanks.

    Attributes:
        parts: what is printed: before the first blank, between blanks and behind the last one.
        choices: for each part what may fill in the blank behind it; empty: anything.
    """

    parts: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...]


class Forms:
    """Forms, any of which may be filled in anywhere in an output, with the tokenizer of the model.

    Safe to share between threads.
    """

    def __init__(self, forms: Sequence[Form], tokenizer: Any) -> None:
        self.forms = tuple(dict.fromkeys(form for form in forms if form.parts[0]))
        self._tokenizer = tokenizer
        self._anchor = self._encoded("a")[-1:]
        self._texts: dict[tuple[int, ...], str] = {}
        self._ids: dict[str, list[int]] = {}
        self.beginning: dict[str, list[int]] = defaultdict(list)
        for number, form in enumerate(self.forms):
            self.beginning[form.parts[0][0]].append(number)

    def text_of(self, tokens: tuple[int, ...]) -> str:
        """What tokens add to a text."""
        if tokens not in self._texts:
            # Behind another token: tokenizers drop a space in front of the first one.
            before, after = map(self._decoded, (self._anchor, [*self._anchor, *tokens]))
            self._texts[tokens] = after[len(before) :]
        return self._texts[tokens]

    def ids_of(self, text: str) -> list[int]:
        """The tokens that go on with `text`; empty where the tokenizer spells it otherwise."""
        if text not in self._ids:
            self._ids[text] = next(self._spelt(text), [])
        return self._ids[text]

    def _spelt(self, text: str) -> Iterator[list[int]]:
        # Behind another text where the tokenizer puts a space in front of the first one.
        for before in ("", "\n", "a"):
            ids = self._encoded(before + text)
            yield from (ids[n:] for n in range(3) if self.text_of(tuple(ids[n:])) == text)

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _decoded(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
