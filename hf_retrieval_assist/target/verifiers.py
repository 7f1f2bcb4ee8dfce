"""How one forward checks drafts and how the cache forgets what was rejected, for each tier.

A verifier feeds every row its pending tokens (the ones the model has not processed, the root being
the last of them) followed by a draft, and later keeps what was accepted.

* :class:`TreeVerifier`: token trees under a 4D mask; rows advance independently.
* :class:`ChainVerifier`: one chain per row, for models without usable positions or masks. All rows
  advance by what the slowest one accepted; what faster rows know already stays pending.
* :class:`ConvolutionVerifier`: the same for models that also convolve over the last few tokens.
* :class:`ReplayVerifier`: chains for models with a recurrent state, which cannot forget single
  tokens: after a rejection the state is restored and the accepted tokens stay pending, so that
  replaying them shares the next step's forward.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.cache_utils import LinearAttentionLayer

from ..decoding.walk import RowText
from ..token_tree import TokenTree
from .kv_cache import HybridSlotLayer, SlotCache, SlotLayer
from .tree_attention import TreeAttention, lay_out

# Above this many pending tokens a recurrent model gets them without a draft behind, which always
# succeeds: it bounds the width that replaying adds to every forward.
_MAX_REPLAY = 16


class Verifier:
    """Common part: the keyword arguments of a forward and the rows' progress.

    Args:
        model: a transformers model.
        cache: its self-attention cache, filled by the prefill.
        model_kwargs: `generate`'s, after the prefill.
        prompt_ids: int64 [batch, length], as the rows of text begin.
    """

    def __init__(
        self,
        model: Any,
        cache: SlotCache,
        model_kwargs: dict[str, Any],
        prompt_ids: torch.Tensor,
    ):
        self.model = model
        self.cache = cache
        self.prompt_ids = prompt_ids
        self.device = input_device(model, prompt_ids)
        self.positions = model_kwargs.get("position_ids")
        if self.positions is not None:
            self.next_position = self.positions[..., -1:].to(self.device) + 1
        self.kwargs = {
            name: value
            for name, value in model_kwargs.items()
            if name not in ("position_ids", "logits_to_keep", "inputs_embeds", "cache_position")
        }
        self._ids_name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
        self._steady: dict[str, Any] | None = None
        # The cache holds this many generated tokens of each row.
        self.processed = [0] * len(prompt_ids)

    def limit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The part of the drafts that this tier can verify."""
        return list(trees)

    def backlog(self, rows: Sequence[RowText]) -> int:
        """Pending tokens that every forward carries besides the roots and drafts."""
        return 0

    def forward(
        self, rows: Sequence[RowText], trees: Sequence[TokenTree], **options: Any
    ) -> tuple[Any, list[int]]:
        """Feed pending tokens and drafts.

        Returns:
            The model's outputs, and for each row the index of its root among the fed tokens; the
            draft's nodes follow it.
        """
        raise NotImplementedError

    def keep(self, rows: Sequence[RowText], accepted: Sequence[Sequence[int]]) -> None:
        """Keep each row's accepted tokens: 0 for the root, 1 + i for node i; none at rest."""
        raise NotImplementedError

    def finish(self, tokens: int) -> None:
        """Leave the cache as plain decoding does after generating this many tokens per row."""
        prompt = self.cache.slots.lengths[0] - self.processed[0]
        self.cache.truncate(prompt + tokens - 1)
        self.cache.align()

    def _token_types(self, width: int) -> dict[str, torch.Tensor]:
        """Fed tokens continue the last token's type; in multimodal types they are text."""
        types = {}
        if (ids := self.kwargs.get("token_type_ids")) is not None:
            types["token_type_ids"] = ids[:, -1:].expand(-1, width)
        if (ids := self.kwargs.get("mm_token_type_ids")) is not None:
            types["mm_token_type_ids"] = ids.new_zeros((ids.shape[0], width))
        return types

    def _run(self, input_ids: torch.Tensor, width: int, arguments: dict, options: dict) -> Any:
        arguments = self._token_types(width) | arguments
        if self._steady is None:
            inputs = self._prepared(input_ids, width, arguments)
        else:
            inputs = self._steady | {self._ids_name: input_ids[:, -width:]}
        return self.model(**(inputs | arguments | options), return_dict=True)

    def _prepared(self, input_ids: torch.Tensor, width: int, arguments: dict) -> dict[str, Any]:
        """The forward's inputs as the model prepares them.

        What it only passes through is the same at every step, so a model that makes nothing else
        of them than the ids is not asked again.
        """
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=width, **(self.kwargs | arguments)
        )
        # Some models would keep the last token's logits only, whatever is asked of them.
        inputs.pop("logits_to_keep", None)
        rest = {n: v for n, v in inputs.items() if n not in arguments and n != self._ids_name}
        if all(value is self.kwargs.get(name) for name, value in rest.items()):
            self._steady = rest
        return inputs


class TreeVerifier(Verifier):
    """Verifies one token tree per row; see the module's docstring."""

    def __init__(self, *args: Any, attention: TreeAttention):
        super().__init__(*args)
        self.attention = attention

    def forward(
        self, rows: Sequence[RowText], trees: Sequence[TokenTree], **options: Any
    ) -> tuple[Any, list[int]]:
        fed = lay_out([row.last for row in rows], trees, self.device)
        arguments = {
            "attention_mask": self.attention.masks(fed, self.cache.slots),
            "position_ids": self._first_positions() + fed.depths,
        }
        return self._run(fed.token_ids, fed.width, arguments, options), [0] * len(rows)

    def _first_positions(self) -> torch.Tensor:
        """Position of each row's root: [batch, 1], or with a leading axis where ids have one."""
        if len(self.processed) == 1:
            return self.next_position + self.processed[0]
        progress = torch.tensor(self.processed, device=self.next_position.device)
        return self.next_position + progress[:, None]

    def keep(self, rows: Sequence[RowText], accepted: Sequence[Sequence[int]]) -> None:
        self.cache.keep(accepted)
        for row, path in zip(rows, accepted, strict=True):
            self.processed[row.index] += len(path)


class ChainVerifier(Verifier):
    """Verifies one chain per row, all rows in step; see the module's docstring."""

    _width = 0

    def pending(self, row: RowText) -> list[int]:
        """Tokens of the row that the cache does not hold; the last one is the draft's root."""
        return row.generated[self.processed[row.index] :] or [row.last]

    def limit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        return [best_chain(tree) for tree in trees]

    def backlog(self, rows: Sequence[RowText]) -> int:
        return max(len(self.pending(row)) for row in rows) - 1

    def forward(
        self, rows: Sequence[RowText], trees: Sequence[TokenTree], **options: Any
    ) -> tuple[Any, list[int]]:
        fed = [
            [*self.pending(row), *tree.token_ids.tolist()]
            for row, tree in zip(rows, trees, strict=True)
        ]
        self._width = width = max(len(tokens) for tokens in fed)
        # Filler stands behind everything that matters and is cut off again by `keep`.
        known = [
            _filled(row.generated, self.processed[row.index]) + _filled(tokens, width)
            for row, tokens in zip(rows, fed, strict=True)
        ]
        suffix = torch.tensor(known, device=self.prompt_ids.device)
        input_ids = torch.cat([self.prompt_ids, suffix], dim=1).to(self.device)
        arguments = self._causal_arguments(width)
        roots = [len(self.pending(row)) - 1 for row in rows]
        return self._run(input_ids, width, arguments, options), roots

    def _causal_arguments(self, width: int) -> dict[str, torch.Tensor]:
        generated = self.processed[0]
        arguments = {}
        name = (
            "decoder_attention_mask" if self.model.config.is_encoder_decoder else "attention_mask"
        )
        if (mask := self.kwargs.get(name)) is not None:
            arguments[name] = F.pad(mask, (0, generated + width), value=1)
        if self.positions is not None:
            steps = torch.arange(generated, generated + width, device=self.device)
            arguments["position_ids"] = self.next_position + steps
        return arguments

    def keep(self, rows: Sequence[RowText], accepted: Sequence[Sequence[int]]) -> None:
        valid = [
            len(row.generated) - 1 - self.processed[row.index] if path else 0
            for row, path in zip(rows, accepted, strict=True)
        ]
        running = [n for row, n in zip(rows, valid, strict=True) if not row.finished]
        # When nothing runs on, the cache is as long as the longest text.
        self._advance(min(running) if running else max(valid))

    def _advance(self, tokens: int) -> None:
        self.cache.keep([range(tokens)] * len(self.processed))
        self.processed = [done + tokens for done in self.processed]


class ConvolutionVerifier(ChainVerifier):
    """Verifies chains on a model with convolution states; see the module's docstring.

    The states of a forward's tokens are recorded. They are cropped before the next forward, since
    `finish` may drop more of them than `keep`.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._excess = 0
        for layer in self.cache.state_layers:
            if not layer.is_croppable:
                raise ValueError("its recurrent state cannot be cropped")
            layer.activate_past_recording()

    def forward(
        self, rows: Sequence[RowText], trees: Sequence[TokenTree], **options: Any
    ) -> tuple[Any, list[int]]:
        self._crop()
        return super().forward(rows, trees, **options)

    def _advance(self, tokens: int) -> None:
        super()._advance(tokens)
        self._excess = self._width - tokens

    def _crop(self) -> None:
        for layer in self.cache.state_layers:
            LinearAttentionLayer.crop(layer, -self._excess)
        self._excess = 0

    def finish(self, tokens: int) -> None:
        super().finish(tokens)
        self._excess += self.processed[0] - (tokens - 1)
        self._crop()
        for layer in self.cache.state_layers:
            layer.record_past = False


class ReplayVerifier(ChainVerifier):
    """Verifies chains on a model whose state cannot be cropped; see the module's docstring.

    For one row: rows of a batch would have to restore and replay for each other.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._backlog = 0
        self._snapshot: list[Any] = []

    def limit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        return [TokenTree.empty()] if self._backlog >= _MAX_REPLAY else super().limit(trees)

    def forward(
        self, rows: Sequence[RowText], trees: Sequence[TokenTree], **options: Any
    ) -> tuple[Any, list[int]]:
        # What a finished row is fed, for other processes, is not kept either.
        if len(trees[0]) or rows[0].finished:
            self._snapshot = [_state_of(layer) for layer in self.cache.layers]
        return super().forward(rows, trees, **options)

    def _advance(self, tokens: int) -> None:
        whole = tokens == self._width
        self._backlog = 0 if whole else tokens
        if whole:
            super()._advance(tokens)
        else:
            super()._advance(0)
            for layer, state in zip(self.cache.layers, self._snapshot, strict=True):
                layer.__dict__.update(state)
        self._snapshot = []


def _filled(tokens: list[int], length: int) -> list[int]:
    """A text cut or filled up to a length."""
    return (tokens + tokens[-1:] * length)[:length]


def input_device(model: Any, inputs: torch.Tensor) -> torch.device:
    """Where the forward wants its inputs; offloaded models take them where they are."""
    return inputs.device if model.device.type == "meta" else model.device


def best_chain(tree: TokenTree) -> TokenTree:
    """The path of a tree with the largest sum of probabilities."""
    if tree.is_chain:
        return tree
    totals = np.zeros(len(tree), np.float64)
    for node, parent in enumerate(tree.parents.tolist()):
        totals[node] = tree.probs[node] + (totals[parent] if parent >= 0 else 0.0)
    return tree.select(tree.path(int(totals.argmax())))


def _state_of(layer: Any) -> dict[str, Any]:
    """What a forward changes in a layer, copied where it changes in place.

    Slots forget by themselves. `keys` and `values` of other layers grow by concatenation, which
    leaves the old tensors as they are.
    """
    if isinstance(layer, HybridSlotLayer):
        return copy.deepcopy({name: layer.__dict__[name] for name in vars(LinearAttentionLayer())})
    if isinstance(layer, SlotLayer):
        return {}
    grown = {name: layer.__dict__[name] for name in ("keys", "values") if name in layer.__dict__}
    rest = {name: value for name, value in layer.__dict__.items() if name not in grown}
    return copy.deepcopy(rest) | grown
