"""What `generate` returns besides the sequences: one entry per generated token, as plain decoding
records them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from ..host.transformers_private import CACHE
from ..types.row_text import RowText


class OutputCollector:
    """Collects scores and logits of the tokens that were generated.

    Args:
        config: of the call; says what is wanted.
        batch_size: rows.
    """

    def __init__(self, config: GenerationConfig, batch_size: int):
        wanted = bool(config.return_dict_in_generate)
        self.return_dict = wanted
        asked = {"scores": config.output_scores, "logits": config.output_logits}
        # What each row's tokens were chosen from, by name.
        self._tokens: dict[str, list[list[torch.Tensor]]] = {
            name: [[] for _ in range(batch_size)] for name, one in asked.items() if wanted and one
        }
        self._shown: list[torch.Tensor] = []

    @property
    def wants_tokens(self) -> bool:
        """Whether something is recorded of every token."""
        return bool(self._tokens)

    @property
    def shown(self) -> tuple[torch.Tensor, ...] | None:
        """The scores so far, as stopping criteria that look at them are shown them, which only
        those of one row are. None: they are not recorded."""
        return tuple(self._shown) if "scores" in self._tokens else None

    def tokens(self, rows: Sequence[RowText], scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Record the processed scores and the logits, [rows, vocab_size], of tokens to come."""
        for name, kept in self._tokens.items():
            found = scores if name == "scores" else logits
            for row, entry in zip(rows, found.split(1), strict=True):
                kept[row.index].append(entry)
        if "scores" in self._tokens:
            self._shown.append(scores)

    def result(
        self, sequences: torch.Tensor, cache: Any, encoder_outputs: Any, tokens: int
    ) -> torch.Tensor | GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput:
        """What `generate` returns for `sequences` [batch, length], `tokens` of them generated."""
        if not self.return_dict:
            return sequences
        common = {
            "sequences": sequences,
            CACHE: cache,
            **{name: _by_step(kept, tokens) for name, kept in self._tokens.items()},
        }
        if encoder_outputs is None:
            return GenerateDecoderOnlyOutput(**common)
        return GenerateEncoderDecoderOutput(
            encoder_attentions=encoder_outputs.get("attentions"),
            encoder_hidden_states=encoder_outputs.get("hidden_states"),
            **common,
        )


def _by_step(rows: list[list[torch.Tensor]], tokens: int) -> tuple[torch.Tensor, ...]:
    """One [batch, vocab_size] tensor per step. Where any are recorded, rows end together."""
    return tuple(torch.cat([row[step] for row in rows]) for step in range(tokens))
