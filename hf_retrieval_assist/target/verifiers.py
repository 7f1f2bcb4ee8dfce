"""How one forward checks drafts and how the cache forgets what was rejected, for each tier.

A verifier feeds every row its pending tokens (the ones the model has not processed, the root being
the last of them) followed by a draft, and later keeps what was accepted.

* :class:`TreeVerifier`: token trees under a 4D mask; rows advance independently.
* :class:`~hf_retrieval_assist.target.packed_verifier.PackedVerifier`: the same without padding.
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
from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from ..decoding.row_text import RowText
from ..system.lazy import cached_property
from ..token_tree import TokenTree
from .host import input_device
from .kv_cache import HybridSlotLayer, SlotCache, SlotLayer
from .tree_attention import TreeAttention, lay_out
from .verified import Verified

# Above this many pending tokens a recurrent model gets them without a draft behind, which always
# succeeds: it bounds the width that replaying adds to every forward.
_MAX_REPLAY = 16

# Tokens per row that one forward catches up on at most, since each of them gets logits.
_MOST_FED = 64


class Verifier:
    """Common part: the keyword arguments of a forward and the rows' progress.

    Args:
        model: a transformers model.
        cache: its self-attention cache, filled by the prefill.
        model_kwargs: `generate`'s, after the prefill.
        prompt_ids: int64 [batch, length], as the rows of text begin.

    Attributes:
        processed: generated tokens of each row that the cache holds.
        widths: the numbers of tokens per row that forwards are filled up to; what is wider, or any
            number where there are none, is fed as it is.
        feeding: whether a forward has begun whose tokens are neither kept nor dropped yet.
        packed: whether a forward costs what all rows feed together, so that rows which have ended
            cost nothing; otherwise it is as wide as the widest row.
        manner: how forwards run, where it is not kernel by kernel; the cost of a width is its own.
    """

    packed = False
    manner = ""

    def __init__(
        self,
        model: Any,
        cache: SlotCache,
        model_kwargs: dict[str, Any],
        prompt_ids: torch.Tensor,
    ):
        self.model = model
        self.call = model
        self.widths: tuple[int, ...] = ()
        self.cache = cache
        self.prompt_ids = prompt_ids
        self.device = input_device(model)
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
        self.processed = [0] * len(prompt_ids)
        self.feeding = False

    def limit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The part of the drafts that this tier can verify."""
        return list(trees)

    def backlog(self, rows: Sequence[RowText]) -> int:
        """Pending tokens that every forward carries besides the roots and drafts."""
        return 0

    def forward(self, rows: Sequence[RowText], trees: Sequence[TokenTree]) -> Verified:
        """Feed pending tokens and drafts, one tree per row."""
        raise NotImplementedError

    def keep(
        self, rows: Sequence[RowText], verified: Verified, accepted: Sequence[Sequence[int]]
    ) -> None:
        """Keep each row's accepted tokens: 0 for the root, 1 + i for node i; none at rest."""
        raise NotImplementedError

    def lacking(self, tokens: int) -> int:
        """How many tokens the cache lacks at most of what plain decoding leaves in it after
        generating `tokens` per row: all but the last one."""
        return max(tokens - 1 - done for done in self.processed)

    def catch_up(self, rows: Sequence[RowText], tokens: int) -> None:
        """Feed some of what the cache lacks, see `lacking`; finished rows are fed their padding."""
        raise NotImplementedError

    def finish(self, tokens: int) -> None:
        """Forget what rows generated beyond this many tokens; make the cache one of plain use."""
        prompt = self.cache.slots.lengths[0] - self.processed[0]
        self.cache.require_room(prompt + tokens - 1)
        self.processed = [min(done, tokens - 1) for done in self.processed]
        self.cache.truncate(prompt + tokens - 1)
        self.cache.align()

    def abandon(self) -> None:
        """Leave the cache with what all rows have in it, wherever the call was interrupted."""
        self.cache.truncate(min(self.cache.slots.lengths))
        self.cache.align()

    def _token_types(self, width: int) -> dict[str, torch.Tensor]:
        """Fed tokens continue the last token's type; in multimodal types they are text."""
        types = {}
        if (ids := self.kwargs.get("token_type_ids")) is not None:
            types["token_type_ids"] = ids[:, -1:].expand(-1, width)
        if (ids := self.kwargs.get("mm_token_type_ids")) is not None:
            types["mm_token_type_ids"] = ids.new_zeros((ids.shape[0], width))
        return types

    def _run(self, input_ids: torch.Tensor, width: int, arguments: dict[str, Any]) -> Any:
        arguments = self._token_types(width) | arguments
        inputs = self._prepared(input_ids, width, arguments) if self._steady is None else {}
        if self._steady is not None:
            inputs = self._steady | {self._ids_name: input_ids[:, -width:]}
        self.feeding = True
        # Compiled code is made once more for arguments in another order.
        given = sorted((inputs | arguments | {"return_dict": True}).items())
        return self.call(**dict(given))

    def _prepared(
        self, input_ids: torch.Tensor, width: int, arguments: dict[str, Any]
    ) -> dict[str, Any]:
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

    @cached_property
    def _modules(self) -> frozenset[nn.Module]:
        """Whose attention belongs to these forwards; hooks may call other models."""
        return frozenset(self.model.modules())

    def forward(self, rows: Sequence[RowText], trees: Sequence[TokenTree]) -> Verified:
        return self._feed(
            [row.last for row in rows], trees, [row for row in rows if not row.finished]
        )

    def _feed(
        self, roots: Sequence[int], trees: Sequence[TokenTree], rows: Sequence[RowText]
    ) -> Verified:
        """Feed roots and trees, one of each per row of the batch, for the sake of some rows."""
        fed = lay_out(roots, trees, self.device)
        arguments = {
            "attention_mask": self.attention.masks(fed, self.cache.slots),
            "position_ids": self._first_positions() + fed.depths,
        }
        outputs = self._run(fed.token_ids, fed.width, arguments)
        return Verified(outputs.logits, [0] * len(trees), outputs)

    def _first_positions(self) -> torch.Tensor:
        """Position of each row's root: [batch, 1], or with a leading axis where ids have one."""
        if len(self.processed) == 1:
            return self.next_position + self.processed[0]
        progress = torch.tensor(self.processed, device=self.next_position.device)
        return self.next_position + progress[:, None]

    def keep(
        self, rows: Sequence[RowText], verified: Verified, accepted: Sequence[Sequence[int]]
    ) -> None:
        self.cache.keep(accepted)
        self.feeding = False
        self.processed = [
            done + len(path) for done, path in zip(self.processed, accepted, strict=True)
        ]

    def catch_up(self, rows: Sequence[RowText], tokens: int) -> None:
        stops = [min(tokens - 1, done + _MOST_FED) for done in self.processed]
        fed = [row.fed(*span) for row, *span in zip(rows, self.processed, stops, strict=True)]
        roots = [ids[0] if ids else row.last for row, ids in zip(rows, fed, strict=True)]
        trees = [TokenTree.chain(ids[1:], [1.0] * len(ids[1:])) for ids in fed]
        lacking = [row for row, ids in zip(rows, fed, strict=True) if ids]
        self.keep(rows, self._feed(roots, trees, lacking), [range(len(ids)) for ids in fed])


class ChainVerifier(Verifier):
    """Verifies one chain per row, all rows in step; see the module's docstring."""

    def _pending(self, row: RowText) -> list[int]:
        """Tokens of the row that the cache does not hold; the last one is the draft's root."""
        done = self.processed[row.index]
        return row.fed(done, max(len(row.generated), done + 1))

    def limit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        return [best_chain(tree) for tree in trees]

    def backlog(self, rows: Sequence[RowText]) -> int:
        return max(len(self._pending(row)) for row in rows) - 1

    def forward(self, rows: Sequence[RowText], trees: Sequence[TokenTree]) -> Verified:
        pending = [self._pending(row) for row in rows]
        fed = [
            [*known, *tree.token_ids.tolist()] for known, tree in zip(pending, trees, strict=True)
        ]
        width = max(len(tokens) for tokens in fed)
        # Filler stands behind everything that matters and is cut off again by `keep`.
        for row, tokens in zip(rows, fed, strict=True):
            done = self.processed[row.index] + len(tokens)
            tokens += row.fed(done, done + width - len(tokens))
        return self._feed(rows, fed, [len(known) - 1 for known in pending])

    def _feed(
        self, rows: Sequence[RowText], fed: Sequence[Sequence[int]], roots: Sequence[int]
    ) -> Verified:
        width = len(fed[0])
        input_ids = torch.tensor(fed, device=self.prompt_ids.device)
        if self._steady is None:
            # What models prepare may depend on the whole text.
            texts = [self._cached_ids(row) for row in rows]
            input_ids = torch.cat([torch.cat(texts), input_ids], dim=1)
        outputs = self._run(input_ids.to(self.device), width, self._causal_arguments(width))
        return Verified(outputs.logits, roots, outputs)

    def _cached_ids(self, row: RowText) -> torch.Tensor:
        """int64 [1, tokens in the cache] of a row."""
        done, known = self.processed[row.index], len(row.generated)
        length = self.prompt_ids.shape[1] + done
        if done <= known:
            return row.ids[:, :length]
        return torch.cat([row.ids, row.ids.new_tensor([row.fed(known, done)])], dim=1)

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

    def keep(
        self, rows: Sequence[RowText], verified: Verified, accepted: Sequence[Sequence[int]]
    ) -> None:
        # Of a row at rest all that was fed is its text or its padding.
        valid = [
            len(row.generated) - 1 - self.processed[row.index] if path else verified.width
            for row, path in zip(rows, accepted, strict=True)
        ]
        self._advance(min(valid) if any(map(len, accepted)) else 0, verified)

    def catch_up(self, rows: Sequence[RowText], tokens: int) -> None:
        done = self.processed[0]
        width = min(tokens - 1 - done, _MOST_FED)
        fed = [row.fed(done, done + width) for row in rows]
        self._advance(width, self._feed(rows, fed, [0] * len(rows)))

    def _advance(self, tokens: int, verified: Verified) -> None:
        """Keep the first tokens that a forward fed."""
        self.cache.keep([range(tokens)] * len(self.processed))
        self.feeding = False
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

    def _feed(self, *args: Any) -> Verified:
        self._crop()
        return super()._feed(*args)

    def _advance(self, tokens: int, verified: Verified) -> None:
        super()._advance(tokens, verified)
        self._excess = verified.width - tokens

    def _crop(self) -> None:
        for layer in self.cache.state_layers:
            LinearAttentionLayer.crop(layer, -self._excess)
        self._excess = 0

    def finish(self, tokens: int) -> None:
        self._excess += max(0, self.processed[0] - (tokens - 1))
        super().finish(tokens)
        self._rest()

    def abandon(self) -> None:
        super().abandon()
        if self.feeding:
            # Blocks that the forward had reached hold all that it fed.
            for layer in self.cache.state_layers:
                grown = layer.conv_states[0].shape[-1] - layer.conv_kernel_size[0]
                LinearAttentionLayer.crop(layer, -grown)
        self._rest()

    def _rest(self) -> None:
        """Leave states of the last token only, as plain decoding does."""
        self._crop()
        for layer in self.cache.state_layers:
            layer.record_past = False


class ReplayVerifier(ChainVerifier):
    """Verifies chains on a model whose state cannot be cropped; see the module's docstring.

    Rows of a batch go in step, since they restore and replay together.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._backlog = 0
        self._states: list[dict[str, Any]] | None = None

    def limit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        if self._backlog >= _MAX_REPLAY:
            return [TokenTree.empty()] * len(trees)
        return super().limit(trees)

    def forward(self, rows: Sequence[RowText], trees: Sequence[TokenTree]) -> Verified:
        # What a finished row is fed, for other processes, is not kept either.
        restored = any(map(len, trees)) or rows[0].finished
        self._states = [state_of(layer) for layer in self.cache.layers] if restored else None
        return super().forward(rows, trees)

    def _advance(self, tokens: int, verified: Verified) -> None:
        whole = tokens == verified.width
        self._backlog = 0 if whole else tokens
        super()._advance(tokens if whole else 0, verified)
        if not whole:
            self._restore()
        self._states = None

    def _restore(self) -> None:
        assert self._states is not None
        for layer, state in zip(self.cache.layers, self._states, strict=True):
            layer.__dict__.update(state)

    def abandon(self) -> None:
        if self.feeding and self._states is None:
            # The state may have gone half a step, and cannot go back.
            self.cache.forget()
            return
        super().abandon()
        if self.feeding:
            self._restore()


def best_chain(tree: TokenTree) -> TokenTree:
    """The path of a tree with the largest sum of probabilities."""
    if tree.is_chain:
        return tree
    totals = np.zeros(len(tree), np.float64)
    for node, parent in enumerate(tree.parents.tolist()):
        totals[node] = tree.probs[node] + (totals[parent] if parent >= 0 else 0.0)
    return tree.select(tree.path(int(totals.argmax())))


def state_of(layer: Any) -> dict[str, Any]:
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
