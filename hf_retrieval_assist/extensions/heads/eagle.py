"""Drafts of EAGLE-1 and EAGLE-3 heads (Li et al. 2024, arXiv:2401.15077; 2025, arXiv:2503.01840).

A head predicts the token after next: from the target's features at position p and the embedding
of the token at p + 1 it drafts the token at p + 2. Fed its own output in place of the target's
features it goes on from there. EAGLE-2 (arXiv:2406.16858) is an EAGLE-1 head with another tree,
which all are drafted with here.
"""

from __future__ import annotations

from os import PathLike
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

from ...draft_models.growth import GrowthLimits
from ...draft_models.rows import DraftCache
from ...drafters.base import FeedbackNeeds, Target
from ...verification.tree_attention import LayerMask
from .borrowed import BorrowedLayers, TargetShape
from .checkpoints import load_weights
from .eagle_format import ATTENTION, HeadConfig, config_of, layer_config, rotary_of
from .features import FeatureDrafter, FeatureSession
from .layers_follower import Layers, LayersFollower
from .peagle import ParallelFollower
from .published import EAGLE, PublishedHead, Settings, read_published


class EagleDrafter(FeatureDrafter):
    """Drafts with an EAGLE-1, EAGLE-2 or EAGLE-3 head (arXiv:2406.16858, section 4).

    Args:
        head: for the model that is being assisted; shared by all sessions.
        top_k: children of a node, and nodes expanded in a level.
        depth: levels below the first; the tree is `depth + 1` deep.
        total: nodes of the tree with its root, so at most `total - 1` are proposed.
        min_prob: nodes that the head holds less likely than this to be reached are not expanded.

    Raises:
        ValueError: a size is out of range; from `start`, the head is for another target.
    """

    name = "eagle"

    def __init__(
        self,
        head: EagleHead,
        top_k: int = 10,
        depth: int = 5,
        total: int = 60,
        min_prob: float = 0.01,
    ) -> None:
        self.limits = GrowthLimits(top_k, top_k, depth, total, min_prob)
        self.head = head
        self.needs = FeedbackNeeds(hidden_layers=head.config.boundaries)

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> FeatureSession:
        config = self.head.config
        target.require_ids("EAGLE head", config.vocab_size - 1)
        self.require_width("EAGLE head", config.target_width, target.model)
        kind = LayersFollower if config.slots == 1 else ParallelFollower
        follower = kind(self.head, self.limits, config.feature_width, target.call.graphs)
        return FeatureSession(self, follower, prompt_ids, self.limits.total - 1)


class HeadAttention(nn.Module):
    """Grouped-query attention with RoPE over an explicit mask."""

    def __init__(self, config: HeadConfig, layer: int, input_width: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim, self.kv_heads = config.head_dim, config.num_kv_heads
        q_width, kv_width = config.num_heads * config.head_dim, self.kv_heads * config.head_dim
        bias = any(f"{ATTENTION}{name}_proj.bias" in config.tensors for name in "qkv")
        self.q_proj = nn.Linear(input_width, q_width, bias=bias)
        self.k_proj = nn.Linear(input_width, kv_width, bias=bias)
        self.v_proj = nn.Linear(input_width, kv_width, bias=bias)
        bias = ATTENTION + "o_proj.bias" in config.tensors
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=bias)
        normed = any(f"{ATTENTION}{name}_norm.weight" in config.tensors for name in "qk")
        self.q_norm, self.k_norm = (_norm(normed * config.head_dim, config) for _ in "qk")

    def forward(self, x: Tensor, rotary: Any, mask: Tensor | None, cache: Cache) -> Tensor:
        queries, keys, values = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(self.q_norm(queries), self.k_norm(keys), *rotary)
        keys, values = cache.update(keys, values, self.layer)
        # The heads that share keys are laid out as further queries, so no key is copied.
        batch, heads, count, _ = queries.shape
        groups = heads // self.kv_heads
        queries = queries.reshape(batch, self.kv_heads, groups * count, self.head_dim)
        if mask is not None:
            mask = mask.repeat(*[1] * (mask.ndim - 2), groups, 1)
        mixed = F.scaled_dot_product_attention(queries, keys, values, mask)
        mixed = mixed.reshape(batch, heads, count, self.head_dim)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class HeadLayer(nn.Module):
    """A Llama block whose first norm may be missing (as in EAGLE-1's). EAGLE-3's first one fuses:
    its attention reads [normed embedding; normed hidden state]."""

    def __init__(self, config: HeadConfig, layer: int, input_norm: bool) -> None:
        super().__init__()
        width, self.fuses = config.hidden_size, config.generation == 3 and not layer
        self.self_attn = HeadAttention(config, layer, (1 + self.fuses) * width)
        self.mlp = LlamaMLP(layer_config(config))
        self.input_layernorm = _norm(input_norm * width, config)
        self.post_attention_layernorm = _norm(width, config)
        self.hidden_norm = _norm(self.fuses * width, config)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, x: Tensor, embeddings: Tensor, *context: Any) -> Tensor:
        if self.fuses:
            normed = self.hidden_norm(x)
            read = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
            x = normed if self.norm_before_residual else x
        else:
            read = self.input_layernorm(x)
        x = x + self.self_attn(read, *context)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(Layers):
    """A draft head of EAGLE-1 (and EAGLE-2) or EAGLE-3.

    In EAGLE-1 the token enters through `fc`, in front of ordinary blocks; in EAGLE-3 `fc` mixes
    features of several depths, and the token enters in the first block.
    """

    d2t: Tensor  # int64 [Vd]: what to add to a draft id to get the target's
    t2d: Tensor  # bool [V]: which of the target's ids may be drafted

    def __init__(self, config: HeadConfig, borrowed: BorrowedLayers) -> None:
        super().__init__()
        self.config, self.borrowed = config, borrowed
        width, fuses, names = config.hidden_size, config.generation == 3, config.tensors
        own = "embed_tokens.weight" in names
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if own else None
        self.embed_norm = _norm(("embed_norm.weight" in names) * width, config)
        with torch.device("cpu"):
            # No file holds its frequencies.
            self.rotary_emb = rotary_of(config)
        self.norm = _norm((fuses or "norm.weight" in names) * width, config)
        own = "lm_head.weight" in names
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if own else None
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        fed = config.feature_width if fuses else 2 * width
        self.fc = nn.Linear(fed, width, bias="fc.bias" in names)
        # Some heads of EAGLE-1 norm what the original leaves as it is.
        normed = fuses or "layers.0.input_layernorm.weight" in names
        blocks = [HeadLayer(config, layer, normed) for layer in range(config.num_layers)]
        self.layers = nn.ModuleList(blocks)
        if fuses:
            # The features of each boundary are normed, or all together, or nothing is.
            each, joint = ("fc_norm.0.weight" in names), ("input_norm.weight" in names)
            norms = [_norm(config.target_width, config) for _ in config.boundaries]
            self.fc_norm = nn.ModuleList(norms) if each else None
            self.input_norm = _norm((joint and not each) * fed, config)
        if config.slots > 1:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, fed))

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | PathLike[str],
        target: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **overrides: Any,
    ) -> EagleHead:
        """A head from a folder or a hub repository, fitted to `target`.

        Embeddings and output layer are the target's where the checkpoint has none.

        Args:
            path_or_hub_id: folder with `config.json` and the weights, or a hub repository id.
            target: the transformers model that the head drafts for.
            dtype: of the head; the target's by default.
            device: of the head; where the target's embeddings are computed by default.
            overrides: fields of :class:`HeadConfig` the checkpoint is wrong or silent about,
                and `rope_theta`.

        Raises:
            ValueError, TypeError: see `read_published` and `config_of`.
        """
        published = read_published(path_or_hub_id)
        if published.kind not in EAGLE:
            raise ValueError(
                f"{path_or_hub_id}: expected an EAGLE head, got {published.kind!r}: give the "
                "folder itself as the fallback"
            )
        return cls.of(published, target, dtype, device, overrides)

    @classmethod
    def of(
        cls,
        published: PublishedHead,
        target: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        overrides: Settings = MappingProxyType({}),
    ) -> EagleHead:
        """A head fitted to a target; see `from_pretrained`."""
        config = config_of(published, TargetShape.of(target), overrides)
        with torch.device("meta"):
            head = cls(config, BorrowedLayers(target))
        load_weights(head, published.tensors)
        head.to(device or head.borrowed.device, dtype or target.dtype)
        # Frequencies in half precision would turn positions that lie far apart by other angles.
        head.rotary_emb = rotary_of(config).to(head.device)
        return head.requires_grad_(False).eval()

    def cache(self, layer: int) -> DraftCache:
        return DraftCache(self.rotary_emb.config, LayerMask(), self.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        if self.config.generation == 1:
            return features
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(self.input_norm(features))

    def forward(
        self, layer: int, ids: Tensor, hidden: Tensor, positions: Tensor, mask: Any, cache: Cache
    ) -> Tensor:
        """See `Layers`. RoPE takes the positions of `hidden`, one below those of the tokens. The
        mask may also be bool [n, cached + n], True where a token may attend."""
        embed = self.borrowed.embed if self.embed_tokens is None else self.embed_tokens
        rows = embed(ids)
        embeddings = self.embed_norm(rows.to(self.device, self.dtype))
        context = (self.rotary_emb(hidden, positions - 1), mask, cache)
        if self.config.generation == 3:
            x = hidden
        else:
            x = self.fc(torch.cat([embeddings, hidden], dim=-1))
        for block in self.layers:
            x = block(x, embeddings, *context)
        return self.norm(x) if self.config.norm_output else x

    def logits(self, hidden: Tensor) -> Tensor:
        x = hidden if self.config.norm_output else self.norm(hidden)
        return self.borrowed.logits(x) if self.lm_head is None else self.lm_head(x)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        if self.config.draft_vocab_size == self.config.vocab_size:
            return draft_ids
        draft_ids = draft_ids.to(self.device)
        return draft_ids + self.d2t[draft_ids]


def _norm(width: int, config: HeadConfig) -> nn.Module:
    """An RMS norm, or nothing at width 0."""
    return nn.RMSNorm(width, eps=config.rms_norm_eps) if width else nn.Identity()
