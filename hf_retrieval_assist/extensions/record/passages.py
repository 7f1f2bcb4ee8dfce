"""Where drafted tokens stand, as records tell it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Passage:
    """Drafted tokens in a row, and where they stand in a source, word for word.

    Attributes:
        call: number of the call in the record.
        row: of the batch.
        start, stop: of the row's generated tokens, those that the source named.
        origin: what the source is: "text", "memory" or "corpus".
        name: of the document: a corpus has names of its own; others are "prompt", "this answer",
            "expected text 1" and "earlier output 1", counted from the oldest that is remembered.
        document: its number in the source, from 0 on.
        place: where the first of the tokens stands in the document, counted in tokens.
        text: the passage, which may be longer than the tokens that were drafted; "" without a
            tokenizer.
        before, after: up to twelve tokens of the document beside it, as text.
        count: passages of this length that the source has.
    """

    call: int
    row: int
    start: int
    stop: int
    origin: str
    name: str
    document: int
    place: int
    text: str
    before: str
    after: str
    count: int

    @property
    def where(self) -> str:
        """The place in words."""
        document = "the prompt" if self.name == "prompt" else self.name
        if self.origin == "corpus":
            document = f"the corpus, document {self.name.removeprefix('document ')}"
        return f"in {document}, token {self.place:,}"

    def __str__(self) -> str:
        others = f", one of {self.count:,}" if self.count > 1 else ""
        return f"{self.where}{others}: {self.before}[{self.text}]{self.after}"


class Passages(list[Passage]):
    """Passages in the order of the tokens; printed, a line each, or a sentence where there are
    none."""

    def __str__(self) -> str:
        none = "No drafted token stands in the prompt, this answer, an earlier output or a corpus."
        return "\n".join(map(str, self)) or none
