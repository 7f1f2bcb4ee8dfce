"""Drafts of EAGLE-1 and EAGLE-3 heads (Li et al. 2024, arXiv:2401.15077; 2025, arXiv:2503.01840).

A head predicts the token after next: from the target's features at position p and the embedding
of the token at p + 1 it drafts the token at p + 2. Fed its own output in place of the target's
features it goes on from there. EAGLE-2 (arXiv:2406.16858) is an EAGLE-1 head with another tree,
which all are drafted with here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ...draft_models.growth import GrowthLimits
from ...draft_models.rows import DraftCache, Group
from ...drafters.base import FeedbackNeeds, Target
from ...types.token_tree import TokenTree
from ...verification.tree_attention import LayerMask, TreeLayout
from .borrowed import BorrowedLayers
from .checkpoints import load_weights
from .dflash import product_trees
from .features import FeatureDrafter, FeatureSession, Follower
from .layers_follower import Layers, LayersFollower
from .published import EAGLE, PublishedHead, count, layer_settings, read_published, reading

_WIDEST = 1 << 14  # neurons of a head of attention


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
        self.needs = FeedbackNeeds(hidden_layers=head.boundaries)

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> FeatureSession:
        head = self.head
        target.require_ids("EAGLE head", head.vocab_size - 1)
        self.require_width("EAGLE head", head.target.hidden_size, target.model)
        kind = LayersFollower if head.slots == 1 else ParallelFollower
        follower = kind(head, self.limits, head.feature_width, target.call.graphs)
        return FeatureSession(self, follower, prompt_ids, self.limits.total - 1)


class ParallelFollower(LayersFollower):
    """A P-EAGLE head behind texts (arXiv:2602.01469); its cache grows on every device.

    It drafts all levels at once: behind the text it reads mask tokens, each beside one learnt
    vector instead of features, and none of these tells what the others will be.
    """

    def catch_up(self, group: Group) -> None:
        Follower.catch_up(self, group)

    def draft(
        self, group: Group, asked: Sequence[FeatureSession], keep: int
    ) -> Sequence[TokenTree]:
        self.catch_up(group)
        head: Any = self.module
        (cache,), rows = group.caches, len(group.rows)
        assert cache.last is not None  # it has read what the drafts stand behind
        masks = head.slots - 1
        reached = [[0 if row is None else row.reached] for row in group.rows]
        depths = torch.arange(masks)[None]
        sees = torch.ones(1, masks, masks, dtype=torch.bool).tril()
        fed = TreeLayout(depths, depths, sees, depths).to(self.device)
        ids = torch.full((rows, masks), head.mask_token_id, device=self.device)
        positions = (torch.tensor(reached) + 1 + depths).to(self.device)
        hidden = head.fuse(head.mask_hidden).expand(rows, masks, -1)
        try:
            with cache.feeding(fed) as mask:
                output = head(0, ids, hidden, positions, mask, cache)
        finally:
            group.settle()
        logits = head.logits(torch.cat([cache.last[:, None], output], dim=1))
        return product_trees(logits, self.limits.top_k, keep, head.to_target_ids)


class HeadAttention(nn.Module):
    """Grouped-query attention with RoPE over an explicit mask.

    Args:
        config: of the layer.
        names: of the checkpoint's tensors, which say what has a bias and what is normed.
        layer: its number.
        input_width: of what it reads.
    """

    def __init__(
        self, config: LlamaConfig, names: Collection[str], layer: int, input_width: int
    ) -> None:
        super().__init__()
        self.layer, prefix = layer, f"layers.{layer}.self_attn."
        self.head_dim, self.kv_heads = config.head_dim, config.num_key_value_heads
        q_width = config.num_attention_heads * self.head_dim
        kv_width = self.kv_heads * self.head_dim
        bias = any(f"{prefix}{name}_proj.bias" in names for name in "qkv")
        self.q_proj = nn.Linear(input_width, q_width, bias=bias)
        self.k_proj = nn.Linear(input_width, kv_width, bias=bias)
        self.v_proj = nn.Linear(input_width, kv_width, bias=bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=prefix + "o_proj.bias" in names)
        normed = any(f"{prefix}{name}_norm.weight" in names for name in "qk")
        self.q_norm, self.k_norm = (_norm(normed * self.head_dim, config) for _ in "qk")

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
    """A Llama block whose first norm may be missing (as in EAGLE-1's).

    Args:
        config, names, layer: see :class:`HeadAttention`.
        fuses: as EAGLE-3's first one does: its attention reads [normed embedding; normed hidden
            state].
        joined: whether the normed hidden state is that block's residual, too.
    """

    def __init__(
        self, config: LlamaConfig, names: Collection[str], layer: int, fuses: bool, joined: bool
    ) -> None:
        super().__init__()
        width, self.fuses, self.joined = config.hidden_size, fuses, joined
        self.self_attn = HeadAttention(config, names, layer, (1 + fuses) * width)
        self.mlp = LlamaMLP(config)
        # Some heads of EAGLE-1 norm what the original leaves as it is.
        normed = fuses or f"layers.{layer}.input_layernorm.weight" in names
        self.input_layernorm = _norm(normed * width, config)
        self.post_attention_layernorm = _norm(width, config)
        self.hidden_norm = _norm(fuses * width, config)

    def forward(self, x: Tensor, embeddings: Tensor, *context: Any) -> Tensor:
        if self.fuses:
            normed = self.hidden_norm(x)
            read = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
            x = normed if self.joined else x
        else:
            read = self.input_layernorm(x)
        x = x + self.self_attn(read, *context)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(Layers):
    """A draft head of EAGLE-1 (and EAGLE-2) or EAGLE-3.

    In EAGLE-1 the token enters through `fc`, in front of ordinary blocks; in EAGLE-3 `fc` mixes
    features of several depths, and the token enters in the first block. Settings say how large
    they are, and names of tensors what there is.

    Args:
        published: without its weights.
        target: that it drafts for.

    Raises:
        ValueError: the settings are none of such a head.

    Attributes:
        config: of its blocks; target: of the target.
        boundaries: residual-stream boundaries of the target that feed the head, counted as
            transformers counts `hidden_states`; −1: after the final norm.
        norm_output: whether the next drafting step is fed the normed output. With a norm of the
            features of each boundary, this is EAGLE-3.1 (arXiv:2605.09992).
        slots: tokens that a P-EAGLE head drafts at once, behind the last one's features and masks;
            mask_token_id: which the masks are.
    """

    d2t: Tensor  # int64 [drafted ids]: what to add to a draft id to get the target's
    t2d: Tensor  # bool [ids]: which of the target's ids may be drafted

    def __init__(self, published: PublishedHead, target: Any) -> None:
        super().__init__()
        settings, names = published.settings, published.tensors
        self.target = target.config.get_text_config(decoder=True)
        self.vocab_size = rows = len(target.get_input_embeddings().weight)
        self.borrowed = BorrowedLayers(target)
        self.generation = published.generation
        fuses = self.generation == 3
        asked = published.hidden_layers
        self.boundaries = asked(self.target.num_hidden_layers) if callable(asked) else tuple(asked)
        self.feature_width = len(self.boundaries) * self.target.hidden_size
        parallel = published.kind == "peagle"
        self.slots = published.drafts or 8 if parallel else 1
        self.mask_token_id = count(settings, "mask_token_id", least=0) if parallel else 0
        self.config = config = _layer_config(published)
        self.rotary_emb = rotary_of(config)
        width = config.hidden_size
        own = "embed_tokens.weight" in names or width != self.target.hidden_size
        self.embed_tokens = nn.Embedding(rows, width) if own else None
        self.embed_norm = _norm(("embed_norm.weight" in names) * width, config)
        last_norm = "norm.weight" in names
        self.norm = _norm((fuses or last_norm) * width, config)
        self.norm_output = bool(settings.get("norm_output", last_norm and not fuses))
        drafted = published.drafted_ids(rows)
        own = "lm_head.weight" in names or drafted < rows
        self.lm_head = nn.Linear(width, drafted, bias=False) if own else None
        if drafted < rows:
            self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(rows, dtype=torch.bool))
        fed = self.feature_width if fuses else width + self.feature_width
        self.fc = nn.Linear(fed, width, bias="fc.bias" in names)
        joined = bool(settings.get("norm_before_residual"))
        self.layers = nn.ModuleList(
            HeadLayer(config, names, layer, fuses and not layer, joined)
            for layer in range(config.num_hidden_layers)
        )
        # The features of each boundary are normed, or all together, or nothing is.
        each = bool(settings.get("fc_norm")) or "fc_norm.0.weight" in names
        joint = bool(settings.get("norm_before_fc")) or "input_norm.weight" in names
        norms = [_norm(self.target.hidden_size, config) for _ in self.boundaries]
        self.fc_norm = nn.ModuleList(norms) if each else None
        self.input_norm = _norm((joint and not each) * fed, config)
        if self.slots > 1:
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
            overrides: settings of `config.json` that the folder is wrong or silent about.

        Raises:
            ValueError: see `read_published`; or it is no EAGLE head for this target.
        """
        published = read_published(path_or_hub_id, **overrides)
        if published.kind not in EAGLE:
            raise ValueError(
                f"{path_or_hub_id}: expected an EAGLE head, got {published.kind!r}: give the "
                "folder itself as the fallback"
            )
        return cls.of(published, target, dtype, device)

    @classmethod
    def of(
        cls,
        published: PublishedHead,
        target: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> EagleHead:
        """A head fitted to a target; see `from_pretrained`."""
        with torch.device("meta"), reading("EAGLE layers"):
            head = cls(published, target)
        load_weights(head, published.tensors)
        head.to(device or head.borrowed.device, dtype or target.dtype)
        # Frequencies in half precision would turn positions that lie far apart by other angles.
        head.rotary_emb = rotary_of(head.config).to(head.device)
        return head.requires_grad_(False).eval()

    def cache(self, layer: int) -> DraftCache:
        return DraftCache(self.rotary_emb.config, LayerMask(), self.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        if self.generation == 1:
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
        x = hidden
        if self.generation == 1:
            x = self.fc(torch.cat([embeddings, hidden], dim=-1))
        for block in self.layers:
            x = block(x, embeddings, *context)
        return self.norm(x) if self.norm_output else x

    def logits(self, hidden: Tensor) -> Tensor:
        x = hidden if self.norm_output else self.norm(hidden)
        return self.borrowed.logits(x) if self.lm_head is None else self.lm_head(x)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        if "d2t" not in self._buffers:
            return draft_ids
        draft_ids = draft_ids.to(self.device)
        return draft_ids + self.d2t[draft_ids]


def _layer_config(published: PublishedHead) -> LlamaConfig:
    """The configuration of a head's blocks."""
    names, sizes = published.tensors, layer_settings(published.settings)
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        raise ValueError(
            f"num_attention_heads: expected a multiple of {sizes['num_key_value_heads']} "
            f"num_key_value_heads, got {sizes['num_attention_heads']}"
        )
    # So many frequencies are computed before a tensor is looked at.
    if sizes["head_dim"] % 2 or sizes["head_dim"] > _WIDEST:
        found = sizes["head_dim"]
        raise ValueError(f"head_dim: expected an even number up to {_WIDEST}, got {found}")
    return LlamaConfig(
        **sizes,
        num_hidden_layers=published.num_layers,
        mlp_bias="layers.0.mlp.up_proj.bias" in names,
    )


def rotary_of(config: LlamaConfig) -> LlamaRotaryEmbedding:
    """Turns positions as `rope_parameters` say; ValueError if not by finite numbers."""
    with torch.device("cpu"):
        # No file holds its frequencies.
        rotary = LlamaRotaryEmbedding(config)
    if not (rotary.inv_freq.isfinite().all() and math.isfinite(rotary.attention_scaling)):
        found = config.rope_parameters
        raise ValueError(f"rope_parameters: expected finite frequencies, got {found}")
    return rotary


def _norm(width: int, config: LlamaConfig) -> nn.Module:
    """An RMS norm, or nothing at width 0."""
    return nn.RMSNorm(width, eps=config.rms_norm_eps) if width else nn.Identity()
