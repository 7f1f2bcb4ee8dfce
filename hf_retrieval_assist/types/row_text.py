"""The text of one row of a batch, and by how much a step makes it longer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


class RowText:
    """The tokens of one row, as the processors and criteria are to see them.

    Args:
        index: the row's number in the batch.
        prompt_ids: int64 [prompt length], its padding included.
        capacity: tokens that room is made for; more are taken as well.
        pad_id: what plain decoding feeds in the row's place once it has ended; None where it never
            does, because no row ends before the others.

    Attributes:
        generated: ids generated so far.
        met: tokens that it had generated when its stopping criteria were met; None before.
        finished: whether it generates no more.
    """

    def __init__(
        self, index: int, prompt_ids: torch.Tensor, capacity: int, pad_id: int | None = None
    ):
        self.index = index
        self.pad_id = pad_id
        self.generated: list[int] = []
        self.met: int | None = None
        self.finished = False
        self._prompt_length = len(prompt_ids)
        self._ids = prompt_ids.new_empty((1, self._prompt_length + capacity))
        self._ids[0, : self._prompt_length] = prompt_ids
        self._written = 0

    def __len__(self) -> int:
        """Tokens of the row, its prompt and padding included."""
        return self._prompt_length + len(self.generated)

    @property
    def device(self) -> torch.device:
        """The prompt's, on which processors and criteria are shown the text."""
        return self._ids.device

    @property
    def last(self) -> int:
        """The last token, which the model has not processed yet."""
        return self.generated[-1]

    @property
    def ids(self) -> torch.Tensor:
        """int64 [1, len(self)]: the prefix that plain decoding would have at this point."""
        length = self._prompt_length + len(self.generated)
        if length > self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.empty_like(self._ids)], dim=1)
        if self._written < len(self.generated):
            tail = self._ids.new_tensor(self.generated[self._written :])
            self._ids[0, self._prompt_length + self._written : length] = tail
            self._written = len(self.generated)
        return self._ids[:, :length]

    @property
    def prompt(self) -> torch.Tensor:
        """int64 [prompt length], as code of the caller's has left it."""
        return self._ids[0, : self._prompt_length]

    def rewrite(self, ids: torch.Tensor) -> None:
        """Take over a text int64 [len(self)] into which code of the caller's has written."""
        self._ids[0, : len(self)] = ids
        self.generated[:] = ids[self._prompt_length :].tolist()
        self._written = len(self.generated)

    def cut(self, tokens: int) -> None:
        """Drop what was generated behind the first `tokens`."""
        del self.generated[tokens:]
        self._written = min(self._written, len(self.generated))

    def fed(self, start: int, stop: int) -> list[int]:
        """The tokens that plain decoding feeds at these places behind the prompt.

        Behind the end of a finished row that is padding; nobody looks at what stands behind the
        end of a running one.
        """
        tokens = self.generated[start:stop]
        pad_id = self.last if self.pad_id is None or not self.finished else self.pad_id
        return tokens + [pad_id] * (stop - start - len(tokens))


@contextmanager
def shown(rows: Sequence[RowText]) -> Iterator[torch.Tensor]:
    """The texts of rows, int64 [rows, length], for code of the caller's.

    What that writes into them is their text from then on, as in plain decoding.
    """
    ids = rows[0].ids if len(rows) == 1 else torch.cat([row.ids for row in rows])
    before = ids.clone() if ids.is_inference() else ids._version
    yield ids
    if not torch.equal(ids, before) if isinstance(before, torch.Tensor) else ids._version != before:
        for row, text in zip(rows, ids, strict=True):
            row.rewrite(text)


@dataclass(slots=True)
class Path:
    """What one walk brought.

    Attributes:
        start: tokens that the row had generated before it.
        tokens: generated, in order.
        accepted: indices of the fed tokens that the cache must keep: the root's 0 first, then
            1 + i for each node i on the way; none for a row that waits.
    """

    start: int = 0
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def chosen(self) -> list[int]:
        """Indices of the fed tokens behind which the generated ones were chosen."""
        return self.accepted[: len(self.tokens)]


def strip_padding(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> list[torch.Tensor]:
    """The prompts of a batch (int64 [batch, length]) without their padding."""
    if attention_mask is None or attention_mask.shape != input_ids.shape:
        return list(input_ids)
    return [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
