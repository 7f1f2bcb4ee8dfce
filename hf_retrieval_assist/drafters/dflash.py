"""Drafts of a DFlash model: the tokens of a whole block at once, as a tree.

Chen et al. 2026, DFlash: Block Diffusion for Flash Speculative Decoding, arXiv:2602.06036. One
forward over mask tokens behind the text gives the distribution at each of the next positions, none
of which knows what the others will hold.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..token_tree import Float32Array, TokenTree
from .base import Drafter, FeedbackNeeds, Target
from .feature_session import FeatureSession
from .tree_growth import PRIORS, evidence_classes

_SETTINGS = ("block_size", "mask_token_id", "target_layer_ids")


def is_dflash(model: Any) -> bool:
    """Whether a model drafts blocks from the target's hidden states, by what it is configured."""
    return all(getattr(model.config, name, None) is not None for name in _SETTINGS)


class DFlashDrafter(Drafter):
    """Drafts with a block drafter for the model that is being assisted.

    The tree holds the most probable paths under the product of the positions' distributions; how
    much a probability is worth at its depth and rank is calibrated.

    Args:
        model: a DFlash model of transformers, shared by all sessions.
        top_k: ids looked at in each position.
        total: nodes of the tree with its root, so at most `total - 1` are proposed.

    Raises:
        ValueError: a size is out of range, or the model is no DFlash model; from `start`, it is
            not one for this target.
    """

    name = "dflash"
    costly = True

    def __init__(self, model: Any, top_k: int = 8, total: int = 60) -> None:
        for label, value, least in (("top_k", top_k, 1), ("total", total, 2)):
            if value < least:
                raise ValueError(f"{label}: expected at least {least}, got {value}")
        if not is_dflash(model):
            raise ValueError(
                f"model: expected a DFlash model, whose configuration names {_SETTINGS}, got "
                f"{type(model).__name__}"
            )
        self.model, self.top_k, self.total = model, top_k, total
        # A layer's output is the next one's input.
        layers = tuple(layer + 1 for layer in model.config.target_layer_ids)
        self.needs = FeedbackNeeds(hidden_layers=layers)

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> FeatureSession:
        model = target.require_model("DFlashDrafter")
        target.require_width("DFlash model", self.model.config.hidden_size)
        self._check_mask_token(model)
        stream = DFlashStream(self.model, target, self.top_k)
        return FeatureSession(stream, prompt_ids, self.total - 1)

    def _check_mask_token(self, target: Any) -> None:
        rows = target.get_input_embeddings().weight.shape[0]
        if not 0 <= self.model.config.mask_token_id < rows:
            raise ValueError(
                f"DFlash model: expected a mask_token_id below the target's {rows} ids, got "
                f"{self.model.config.mask_token_id}"
            )

    def priors(self) -> Float32Array:
        """The model's own probabilities, as if it were right about them at any rank and depth."""
        return PRIORS


class DFlashStream:
    """A block drafter's cache over one text.

    The cache holds what the target's hidden states gave; the block that a draft puts behind them
    is forgotten when it is done. Hidden states wait for the next draft, whose forward takes them
    in.

    Args:
        model: shared with other streams.
        target: whose embeddings and output layer the model shares.
        top_k: ids looked at in each position.
    """

    chunk = 512

    def __init__(self, model: Any, target: Target, top_k: int) -> None:
        from transformers.cache_utils import DFlashCache

        config = model.config
        self.feature_width = len(config.target_layer_ids) * config.hidden_size
        self._model, self._top_k = model, top_k
        self._embeddings = target.model.get_input_embeddings()
        self._output = target.model.get_output_embeddings()
        self._vocab_size = target.vocab_size
        self._cache = DFlashCache(config=config)
        self._cache.activate_past_recording()
        self._waiting: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._last_token = 0
        self._next_position = 0

    def extend(self, features: Tensor, token_ids: Tensor, first_position: int) -> None:
        """Follow the text by m tokens; see `FeatureStream`."""
        self._waiting.append(features)
        self._next_position = first_position + len(features)
        self._positions.append(torch.arange(first_position, self._next_position))
        self._last_token = int(token_ids[-1])

    def draft(self, keep: int) -> TokenTree:
        """The `keep` most probable paths over the next block."""
        log_probs = self._logits().float().log_softmax(dim=-1)
        best = log_probs.topk(min(self._top_k, keep, log_probs.shape[1]), dim=-1)
        return product_tree(
            best.indices.cpu().numpy().astype(np.int32), best.values.cpu().numpy(), keep
        )

    @torch.inference_mode()
    def _logits(self) -> Tensor:
        """[block_size − 1, vocab_size], of the positions behind the text's last token."""
        device, config = self._model.device, self._model.config
        context = torch.cat(self._waiting or [torch.empty(0, self.feature_width)])
        block = torch.arange(config.block_size) + self._next_position
        positions = torch.cat([*self._positions, block])
        self._cache.set_previous_accepted_tokens(len(context))
        output = self._model(
            noise_embeds=self._block_embeddings().to(device, self._model.dtype),
            context_hidden_states=context[None].to(device, self._model.dtype),
            position_ids=positions[None].to(device),
            attention_mask=None,
            past_key_values=self._cache,
        ).last_hidden_state[0, 1:]
        self._cache.crop(-config.block_size)
        self._waiting.clear()
        self._positions.clear()
        weight = self._output.weight
        return self._output(output.to(weight.device, weight.dtype))[:, : self._vocab_size]

    def _block_embeddings(self) -> Tensor:
        """[1, block_size, hidden_size]: the last token and masks, as embedded without a norm."""
        config, layer = self._model.config, self._embeddings
        ids = torch.full((1, config.block_size), config.mask_token_id, device=layer.weight.device)
        ids[0, 0] = self._last_token
        return F.embedding(ids, layer.weight) if hasattr(layer, "embed_norm") else layer(ids)


def product_tree(token_ids: NDArray[np.int32], log_probs: Float32Array, keep: int) -> TokenTree:
    """The `keep` most probable paths when positions are independent, found best first.

    Args:
        token_ids: int32 [positions, k], the likeliest of each position, best first.
        log_probs: float32 [positions, k], theirs.
        keep: nodes.
    """
    depths, ranks = token_ids.shape
    nodes: list[tuple[int, int, int]] = []  # parent, depth, rank
    totals: list[float] = []
    # Minus a path's log-probability, then its last node; what lies above it is in the tree.
    heap = [(-float(log_probs[0, 0]), -1, 0, 0)]
    while heap and len(nodes) < keep:
        cost, parent, depth, rank = heapq.heappop(heap)
        above = cost + float(log_probs[depth, rank])
        if rank + 1 < ranks:
            heapq.heappush(
                heap, (above - float(log_probs[depth, rank + 1]), parent, depth, rank + 1)
            )
        if depth + 1 < depths:
            below = cost - float(log_probs[depth + 1, 0])
            heapq.heappush(heap, (below, len(nodes), depth + 1, 0))
        nodes.append((parent, depth, rank))
        totals.append(-cost)
    parents, depth_of, rank_of = (np.array(column) for column in zip(*nodes, strict=True))
    classes = evidence_classes(
        np.exp(log_probs[depth_of, rank_of]), rank_of, (depth_of + 1).astype(np.int32)
    )
    return TokenTree.build(token_ids[depth_of, rank_of], parents, np.exp(totals), classes)
