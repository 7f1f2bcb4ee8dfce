"""The head's own key-value cache: accepted text in front, the tree being drafted behind it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class CacheShape(Protocol):
    """Whose entries are cached; a `HeadConfig` is one."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


class HeadCache:
    """Keys and values of one text, preallocated and grown by doubling.

    Attributes:
        length: entries in use. Lowering it (`truncate`) forgets the newest.
    """

    def __init__(self, config: CacheShape, device: torch.device, dtype: torch.dtype) -> None:
        self.length = 0
        shape = (config.num_layers, 2, 1, config.num_kv_heads, 64, config.head_dim)
        self._store = torch.empty(shape, device=device, dtype=dtype)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write [1, kv_heads, n, head_dim] behind `length`; returns everything up to there.

        `length` itself moves by `advance`, once all layers have written.
        """
        end = self.length + keys.shape[2]
        self._reserve(end)
        self._store[layer, 0, :, :, self.length : end] = keys
        self._store[layer, 1, :, :, self.length : end] = values
        return self._store[layer, 0, :, :, :end], self._store[layer, 1, :, :, :end]

    def advance(self, count: int) -> None:
        """Keep the `count` entries that every layer has just written."""
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` entries."""
        self.length = length

    def entries(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys (after RoPE) and values of a layer, each [1, kv_heads, length, head_dim]."""
        keys, values = self._store[layer, :, :, :, : self.length]
        return keys, values

    def _reserve(self, length: int) -> None:
        capacity = self._store.shape[4]
        if length <= capacity:
            return
        grown = self._store.new_empty(
            (*self._store.shape[:4], max(2 * capacity, length), self._store.shape[5])
        )
        grown[:, :, :, :, : self.length] = self._store[:, :, :, :, : self.length]
        self._store = grown
