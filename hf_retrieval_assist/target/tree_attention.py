"""Positions and masks under which one forward verifies the token trees of a batch.

Fed tokens are laid out per row as root, then the tree's nodes, then filler up to the widest row.
Query q of a row may attend to the row's kept slots, as far as its layer's window reaches, and to
the fed tokens that are q or its ancestors. Distances are measured along the text (a node lies at
its row's length plus its depth), never in slots, since siblings share a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from ..structures import draft_tree
from ..token_tree import TokenTree
from .kv_cache import RowSlots

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


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


def layer_masks(config: PreTrainedConfig) -> dict[str, LayerMask]:
    """The mask rule of every layer type that a decoder configuration names."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    rules = {
        "sliding_attention": LayerMask(window=window),
        "chunked_attention": LayerMask(chunk=chunk),
        "indexed_attention": LayerMask(explicit=True),
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

    @property
    def width(self) -> int:
        return self.token_ids.shape[1]

    @property
    def columns(self) -> torch.Tensor:
        """Depths of the columns of `attends`."""
        return self.depths if self.column_depths is None else self.column_depths


def arrange(
    roots: Sequence[int], trees: Sequence[TokenTree], width: int | None = None
) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Token ids [batch, width], depths [batch, width] and who sees whom [batch, width, width].

    Filler repeats the root's token, seen by nobody. `width`: None is the widest row's.
    """
    counts = np.array([len(tree) for tree in trees], np.int64)
    return draft_tree.arrange(
        np.array(roots, np.int64),
        counts,
        np.concatenate([tree.token_ids for tree in trees]),
        np.concatenate([tree.parents for tree in trees]),
        width or 1 + int(counts.max()),
    )


def lay_out(roots: Sequence[int], trees: Sequence[TokenTree], device: torch.device) -> FedTrees:
    """Lay the trees out below their roots."""
    token_ids, depths, attends = arrange(roots, trees)
    return FedTrees(
        torch.from_numpy(token_ids).to(device),
        torch.from_numpy(depths).to(device),
        torch.from_numpy(attends).to(device),
        int(depths.max()),
    )


class TreeAttention:
    """Builds the additive masks of one call to `generate`.

    Args:
        rules: one rule per layer type, or a single rule for all layers.
        prompt_mask: bool [batch, prompt slots], False at padding; None without padding.
        dtype: of the masks, the model's.
    """

    def __init__(
        self,
        rules: dict[str, LayerMask] | LayerMask,
        prompt_mask: torch.Tensor | None,
        dtype: torch.dtype,
    ):
        self.rules = rules
        self.prompt_mask = prompt_mask
        self.dtype = dtype
        self.minimum = torch.finfo(dtype).min

    def masks(
        self, fed: FedTrees, slots: RowSlots
    ) -> dict[str, torch.Tensor | None] | torch.Tensor | None:
        """Additive masks [batch, 1, width, slots shown]; None where everything shown is allowed.

        Also sets `slots.view_from`, the first slot that layers of limited reach show.
        """
        plain = fed.columns.shape[1] == 1 and slots.uniform and self.prompt_mask is None
        if isinstance(self.rules, LayerMask):
            slots.view_from = None
            # A model whose cache has windows may not know of them in its own masks.
            unmasked = plain and _sees_all(self.rules, fed, slots, 0)
            return None if unmasked else self._mask(self.rules, fed, slots, 0)
        reach = max((rule.reach or 0 for rule in self.rules.values()), default=0)
        # The query itself takes one place of its reach.
        slots.view_from = first = max(0, min(slots.lengths) - reach + 1) if reach else 0
        return {
            kind: None
            if plain and not rule.explicit and _sees_all(rule, fed, slots, first)
            else self._mask(rule, fed, slots, first if rule.reach else 0)
            for kind, rule in self.rules.items()
        }

    def _mask(self, rule: LayerMask, fed: FedTrees, slots: RowSlots, first: int) -> torch.Tensor:
        nodes = fed.attends
        if rule.chunk is not None:
            nodes = nodes & self._same_chunk(rule.chunk, fed, slots)
        elif rule.window is not None and fed.max_depth >= rule.window:
            nodes = nodes & (fed.columns[:, None, :] > fed.depths[:, :, None] - rule.window)
        kept_slots, columns = slots.longest - first, nodes.shape[2]
        if slots.uniform and self.prompt_mask is None and _sees_all(rule, fed, slots, first):
            mask = self._zeros(len(nodes), fed.width, kept_slots + columns, nodes.device)
            mask[..., kept_slots:].masked_fill_(~nodes[:, None], self.minimum)
            return mask
        allowed = self._kept(rule, fed, slots, first, slots.longest + columns)
        if slots.uniform:
            allowed[:, :, kept_slots:] = nodes
        else:
            rows, places = slots.index(columns, nodes.device)
            allowed.transpose(1, 2)[rows, places - first] = nodes.transpose(1, 2)
        batch, width, shown = allowed.shape
        mask = self._zeros(batch, width, shown, allowed.device)
        return mask.masked_fill_(~allowed[:, None], self.minimum)

    def _zeros(self, batch: int, width: int, slots: int, device: torch.device) -> torch.Tensor:
        return torch.zeros((batch, 1, width, slots), dtype=self.dtype, device=device)

    def _kept(
        self, rule: LayerMask, fed: FedTrees, slots: RowSlots, first: int, stop: int
    ) -> torch.Tensor:
        """bool [batch, width, stop − first]: which of a row's kept slots each query may see."""
        device = fed.depths.device
        shape = (*fed.depths.shape, stop - first)
        index = torch.arange(first, stop, device=device)
        lengths = torch.tensor(slots.lengths, device=device)[:, None, None]
        allowed = index < lengths
        if self.prompt_mask is not None:
            missing = max(0, stop - self.prompt_mask.shape[1])
            seen = F.pad(self.prompt_mask, (0, missing), value=True)[:, None, first:stop]
            allowed = allowed & seen
        position = lengths + fed.depths[:, :, None]
        if rule.window is not None:
            allowed = allowed & (index > position - rule.window)
        elif rule.chunk is not None:
            start = self._first_tokens(device)[:, None, None]
            allowed = allowed & ((index - start) // rule.chunk == (position - start) // rule.chunk)
        return allowed.expand(shape).contiguous()

    def _first_tokens(self, device: torch.device) -> torch.Tensor:
        """int64 [batch], or [1] without padding: the slot of each row's first token."""
        if self.prompt_mask is None:
            return torch.zeros(1, dtype=torch.long, device=device)
        return self.prompt_mask.int().argmax(dim=1)

    def _same_chunk(self, chunk: int, fed: FedTrees, slots: RowSlots) -> torch.Tensor:
        """bool [batch, width, columns]: whether two tokens lie in one chunk of the text."""
        device = fed.depths.device
        start = (torch.tensor(slots.lengths, device=device) - self._first_tokens(device))[:, None]
        query, column = (start + fed.depths) // chunk, (start + fed.columns) // chunk
        return query[:, :, None] == column[:, None, :]


def _sees_all(rule: LayerMask, fed: FedTrees, slots: RowSlots, first: int) -> bool:
    """Whether every query of a uniform batch reaches back to slot `first`."""
    if rule.chunk is not None:
        return False
    return rule.window is None or slots.longest + fed.max_depth - rule.window < first
