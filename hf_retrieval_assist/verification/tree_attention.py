"""Positions and masks under which one forward verifies the token trees of a batch.

Fed tokens are laid out per row as root, then the tree's nodes, then filler up to the widest row.
Query q of a row may attend to the row's kept slots, as far as its layer's window reaches, and to
the fed tokens that are q or its ancestors. Distances are measured along the text (a node lies at
its row's length plus its depth), never in slots, since siblings share a position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from .slot_layers import RowSlots

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

Places = TypeVar("Places", int, Int64Array, torch.Tensor)
"""Places in a row's text, counted from its first token: one, or an array of them."""


@dataclass(frozen=True)
class LayerMask:
    """How far back the layers of one type see: a sliding window, a chunk, or everything.

    `explicit` layers look into their mask themselves, and so need one where nothing is masked.
    """

    window: int | None = None
    chunk: int | None = None
    explicit: bool = False

    @property
    def reach(self) -> int | None:
        """Tokens a query can see at most, itself included."""
        return self.window or self.chunk

    def last_unseen(self, queries: Places) -> Places:
        """The last place in front of what queries reach, −1 where they reach all."""
        if self.window is not None:
            return queries - self.window
        if self.chunk is not None:
            return queries // self.chunk * self.chunk - 1
        return queries * 0 - 1

    def near(self, queries: Any, keys: Any) -> Any:
        """bool [batch, queries, keys]: whether queries reach keys, both [batch, places] and the
        same kind of array; a key may lie behind the query. True where all are reached."""
        if self.window is not None:
            return keys[:, None, :] > (queries - self.window)[:, :, None]
        if self.chunk is not None:
            return (queries // self.chunk)[:, :, None] == (keys // self.chunk)[:, None, :]
        return True


def layer_masks(config: PreTrainedConfig) -> dict[str, LayerMask]:
    """The mask rule of every layer type that a decoder configuration names."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    rules = {
        "sliding_attention": LayerMask(window=window),
        "chunked_attention": LayerMask(chunk=chunk),
        "indexed_attention": LayerMask(explicit=True),
        # Its names before transformers 5.20.
        "deepseek_sparse_attention": LayerMask(explicit=True),
        "qwen_sparse_attention": LayerMask(explicit=True),
    }
    return {
        kind: rules.get(kind, LayerMask())
        for kind in dict.fromkeys(getattr(config, "layer_types", None) or ())
    }


def single_mask(config: PreTrainedConfig) -> LayerMask:
    """The mask rule of a model whose layers are all alike."""
    if getattr(config, "use_sliding_window", True) is False:
        return LayerMask()
    return LayerMask(
        window=getattr(config, "sliding_window", None),
        chunk=getattr(config, "attention_chunk_size", None),
    )


@dataclass(frozen=True)
class FedTrees:
    """The token trees of a batch, laid out for one forward.

    Attributes:
        token_ids: int64 [batch, width] on the model's device.
        depths: int64 [batch, width] on the model's device; the root has depth 0.
        attends: bool [batch, width, columns] on the model's device, self or ancestor. The last
            columns are the tokens of this forward; those of earlier forwards that the cache holds
            behind the kept slots, all rows being equally long, come first.
        max_depth: of any node.
        column_depths: int64 [batch, columns]; None: the columns are the tokens of this forward.
    """

    token_ids: torch.Tensor
    depths: torch.Tensor
    attends: torch.Tensor
    max_depth: int
    column_depths: torch.Tensor | None = None

    @classmethod
    def on(
        cls,
        device: torch.device,
        token_ids: Int64Array,
        depths: Int64Array,
        attends: BoolArray,
        column_depths: Int64Array | None = None,
    ) -> FedTrees:
        """Trees that were laid out on the host."""
        return cls(
            torch.from_numpy(token_ids).to(device),
            torch.from_numpy(depths).to(device),
            torch.from_numpy(attends).to(device),
            int(depths.max()),
            None if column_depths is None else torch.from_numpy(column_depths).to(device),
        )

    @property
    def width(self) -> int:
        return self.token_ids.shape[1]

    @property
    def columns(self) -> torch.Tensor:
        """Depths of the columns of `attends`."""
        return self.depths if self.column_depths is None else self.column_depths


@dataclass(frozen=True, eq=False)
class TreeAttention:
    """Builds the additive masks of one call to `generate`.

    Attributes:
        rules: one rule per layer type, or a single rule for all layers.
        prompt_mask: bool [batch, prompt slots], False at padding; None without padding.
        dtype: of the masks, the model's.
    """

    rules: dict[str, LayerMask] | LayerMask
    prompt_mask: torch.Tensor | None
    dtype: torch.dtype

    def masks(
        self, fed: FedTrees, slots: RowSlots
    ) -> dict[str, torch.Tensor | None] | torch.Tensor | None:
        """Additive masks [batch, 1, width, slots shown]; None where everything shown is allowed.

        Also sets `slots.view_from`, the first slot that layers of limited reach show.
        """
        plain = fed.columns.shape[1] == 1 and self._is_simple(slots)
        single = isinstance(self.rules, LayerMask)
        rules = [self.rules] if isinstance(self.rules, LayerMask) else self.rules.values()
        reach = max((rule.reach or 0 for rule in rules), default=0)
        # The query itself takes one place of its reach.
        first = max(0, slots.shortest - reach + 1) if reach else 0
        if single and (slots.window is None or not slots.forgets):
            first = 0  # its layers show all
        slots.view_from = first
        if isinstance(self.rules, LayerMask):
            # A model whose cache has windows may not know of them in its own masks.
            unmasked = plain and _furthest_unseen(self.rules, fed, slots) < first
            return None if unmasked else self._mask(self.rules, fed, slots, first)
        return {
            kind: None
            if plain and not rule.explicit and _furthest_unseen(rule, fed, slots) < first
            else self._mask(rule, fed, slots, first if rule.reach else 0)
            for kind, rule in self.rules.items()
        }

    def _is_simple(self, slots: RowSlots) -> bool:
        """Whether slots are places in the text, all rows being equally long."""
        return slots.uniform and self.prompt_mask is None

    def _mask(self, rule: LayerMask, fed: FedTrees, slots: RowSlots, first: int) -> torch.Tensor:
        device, nodes = fed.depths.device, fed.attends
        batch, width, columns = nodes.shape
        kept, shown = slots.longest - first, slots.longest - first + columns
        mask = torch.zeros((batch, 1, width, shown), dtype=self.dtype, device=device)
        hidden = torch.finfo(self.dtype).min
        if self._is_simple(slots) and _furthest_unseen(rule, fed, slots) < first:
            mask[..., kept:].masked_fill_(~nodes[:, None], hidden)
            return mask
        # The slot of each row's first token.
        begin: Any = 0
        if self.prompt_mask is not None:
            begin = self.prompt_mask.int().argmax(dim=1, keepdim=True)
        _, lengths = slots.index(1, device)
        queries = lengths - begin + fed.depths
        index = torch.arange(first, slots.longest + columns, device=device)
        allowed = (index < lengths)[:, None, :]
        if self.prompt_mask is not None:
            missing = max(0, slots.longest + columns - self.prompt_mask.shape[1])
            seen = F.pad(self.prompt_mask, (0, missing), value=True)[:, None, first:]
            allowed = allowed & seen[:, :, :shown]
        if rule.reach is not None:
            allowed = allowed & (index > (rule.last_unseen(queries) + begin)[:, :, None])
            nodes = nodes & rule.near(queries, lengths - begin + fed.columns)
        allowed = allowed.expand(batch, width, shown).contiguous()
        if slots.uniform:
            allowed[:, :, kept:] = nodes
        else:
            rows, places = slots.index(columns, device)
            allowed.transpose(1, 2)[rows, places - first] = nodes.transpose(1, 2)
        return mask.masked_fill_(~allowed[:, None], hidden)


def _furthest_unseen(rule: LayerMask, fed: FedTrees, slots: RowSlots) -> int:
    """The last slot that the deepest query does not see, where slots are places in the text."""
    return rule.last_unseen(slots.longest + fed.max_depth)
