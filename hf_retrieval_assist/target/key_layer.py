"""Keys and values of a target's layer, computed once more from what the layer was fed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from .feature_taps import find_blocks, key_layer


class KeyLayer:
    """The block whose keys and values later ones of its kind reuse, and a drafter with them.

    Two projections of the accepted tokens cost less than reaching into a cache that differs from
    tier to tier, and see no token that was refused.

    Args:
        model: the target.
        kind: of layer, as the configuration names it.

    Raises:
        ValueError: there is no such layer, or it makes its keys in another way.
    """

    def __init__(self, model: Any, kind: str) -> None:
        decoder, blocks = find_blocks(model)
        block: Any = blocks[key_layer(model, kind)]
        self.kind = kind
        self._rotary: Any = decoder.rotary_emb
        self._norm, self._attention = block.input_layernorm, block.self_attn
        normed = all(hasattr(self._attention, name) for name in ("k_norm", "v_norm"))
        if not normed or hasattr(block, "altup"):
            raise ValueError(
                f"expected a target of one residual stream whose attention norms its keys and "
                f"values, got {type(model).__name__}"
            )

    @property
    def head_dim(self) -> int:
        return int(self._attention.head_dim)

    @property
    def num_kv_heads(self) -> int:
        return int(self._attention.k_proj.out_features) // self.head_dim

    def entries(self, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Keys (after RoPE) and values, each [1, num_kv_heads, n, head_dim].

        Args:
            hidden: [n, hidden_size], what the block was fed, at consecutive positions.
            position: the first one.
        """
        attention, x = self._attention, self._norm(hidden[None])
        positions = torch.arange(position, position + len(hidden), device=hidden.device)
        cos, sin = self._rotary(x, positions[None], self.kind)
        keys = attention.k_proj(x).unflatten(-1, (-1, self.head_dim))
        values = keys
        if attention.v_proj is not None:
            values = attention.v_proj(x).unflatten(-1, (-1, self.head_dim))
        keys = attention.k_norm(keys)
        keys = keys * cos[:, :, None] + rotate_half(keys) * sin[:, :, None]
        return keys.transpose(1, 2), attention.v_norm(values).transpose(1, 2)
