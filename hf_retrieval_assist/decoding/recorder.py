"""What `generate` returns besides the sequences: one entry per generated token, as plain decoding
records them, cut out of forwards that processed many tokens at once.
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

from ..cache.kv_cache import SlotCache
from ..cache.slot_layers import SlotLayer
from ..host.transformers_private import CACHE
from ..types.row_text import RowText
from ..verification.verified import Verified


class OutputCollector:
    """Collects scores, logits, hidden states and attentions of the tokens that were generated.

    Args:
        config: of the call; says what is wanted.
        batch_size: hidden states and attentions are recorded for a single row only.
    """

    def __init__(self, config: GenerationConfig, batch_size: int):
        wanted = bool(config.return_dict_in_generate)
        self.return_dict = wanted
        self.wants_states = wanted and bool(config.output_hidden_states or config.output_attentions)
        self._states: dict[str, list[Any]] = {}
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
        """The scores so far, as stopping criteria that look at them are shown them: only one row
        or all rows in lockstep have any. None: they are not recorded."""
        return tuple(self._shown) if "scores" in self._tokens else None

    def tokens(self, rows: Sequence[RowText], scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Record the processed scores and the logits, [rows, vocab_size], of tokens to come."""
        for name, kept in self._tokens.items():
            found = scores if name == "scores" else logits
            for row, entry in zip(rows, found.split(1), strict=True):
                kept[row.index].append(entry)
        if "scores" in self._tokens:
            self._shown.append(scores)

    def prefill(self, outputs: Any, cache: SlotCache) -> None:
        """Record the states of the prompt, which belong to the first token.

        Args:
            outputs: of the forward over the prompt, or over what a cache lacked of it.
            cache: whose layers know their windows.
        """
        for name in self._state_names(outputs):
            entry = outputs[name]
            if _is_self_attention(name):
                entry = tuple(_in_window(layer, _window(cache, i)) for i, layer in enumerate(entry))
            self._states.setdefault(name, []).append(entry)

    def step(self, verified: Verified, accepted: Sequence[int], cache: SlotCache) -> None:
        """Record the states of a single row's accepted tokens.

        Args:
            verified: the forward that fed them.
            accepted: the fed tokens, 0 being the root.
            cache: whose layers know their windows.
        """
        root = verified.roots[0]
        # Pending tokens before the root were recorded when they were accepted.
        fed = [*range(root), *(root + node for node in accepted)]
        for name in self._state_names(verified.outputs):
            entries = self._states.setdefault(name, [])
            for end in range(root + 1, len(fed) + 1):
                path = fed[:end]
                entries.append(
                    tuple(
                        _attention(layer, path, _window(cache, i))
                        if _is_self_attention(name)
                        else layer.narrow(-2, path[-1], 1)
                        for i, layer in enumerate(verified.outputs[name])
                    )
                )

    def _state_names(self, outputs: Any) -> list[str]:
        if not self.wants_states:
            return []
        names = ["hidden_states", "attentions", "decoder_hidden_states", "decoder_attentions"]
        if outputs.get("decoder_attentions") is not None:
            # Decoders without an encoder have the name too, and nothing to tell under it.
            names.append("cross_attentions")
        return [name for name in names if outputs.get(name) is not None]

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
            **{name: tuple(entries[:tokens]) for name, entries in self._states.items()},
        }
        if encoder_outputs is None:
            return GenerateDecoderOnlyOutput(**common)
        return GenerateEncoderDecoderOutput(
            encoder_attentions=encoder_outputs.get("attentions"),
            encoder_hidden_states=encoder_outputs.get("hidden_states"),
            **common,
        )


def _is_self_attention(name: str) -> bool:
    return name.endswith("attentions") and name != "cross_attentions"


def _attention(layer: torch.Tensor | None, path: Sequence[int], window: int | None) -> Any:
    """Attention weights [batch, heads, 1, keys] of a path's last token over the text up to it."""
    if layer is None:
        return None
    kept = layer.shape[-1] - layer.shape[-2]
    columns = [*range(kept), *(kept + index for index in path)]
    return _in_window(layer[:, :, path[-1] : path[-1] + 1, columns], window)


def _in_window(layer: torch.Tensor | None, window: int | None) -> torch.Tensor | None:
    """Attention weights [batch, heads, fed, keys] without the keys that a sliding layer of plain
    decoding has forgotten."""
    if layer is None or window is None:
        return layer
    return layer[..., -(window - 1 + layer.shape[-2]) :]


def _window(cache: SlotCache, index: int) -> int | None:
    layer = cache.layers[index] if index < len(cache.layers) else None
    return layer.window if isinstance(layer, SlotLayer) else None


def _by_step(rows: list[list[torch.Tensor]], tokens: int) -> tuple[torch.Tensor, ...]:
    """One [batch, vocab_size] tensor per step. Where any are recorded, rows end together."""
    return tuple(torch.cat([row[step] for row in rows]) for step in range(tokens))
