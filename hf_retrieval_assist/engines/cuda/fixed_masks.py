"""Additive masks over whole buffers, built on the device from a few small tables.

The tables of `seen_slots` are filled on the host: `[batch, width, columns + 2]` for the tokens that
are fed and earlier ones behind the kept slots. Buffers of layers that forget what lies beyond their
window begin with a later slot.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ...verification.tree_attention import (
    Int64Array,
    LayerMask,
    TreeLayout,
    by_kind,
    every_rule,
    seen_slots,
)
from .arena import Shape
from .fixed_attention import Seen
from .packed_buffer import Field

# The number of a slot that nobody sees, padding: behind all others.
_NOWHERE = 1 << 40

Masks = dict[str, torch.Tensor] | torch.Tensor
"""Each kind of layer's, or one for all."""


class FixedMasks:
    """The masks over memory of a shape.

    Attributes:
        first: int32 [batch], the slots of padding in front of each row.
        gapless: whether all other slots of the prompts hold tokens.
    """

    def __init__(self, shape: Shape):
        self._shape, self._near = shape, shape.near
        self._distinct = list(dict.fromkeys(every_rule(shape.rules)))
        dtype, device, near = shape.dtype, shape.device, self._near or 0
        slots = shape.batch, shape.capacity + near
        self._columns = torch.zeros(slots, dtype=torch.int64, device=device)
        self._near_slots = torch.arange(near, device=device)
        self._shown = torch.zeros((), dtype=dtype, device=device)
        self._hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)
        self._empty = torch.full((len(self._distinct),), torch.nan, dtype=dtype, device=device)
        self.first = torch.zeros(shape.batch, dtype=torch.int32, device=device)
        self.start(None)

    def start(self, prompt_mask: torch.Tensor | None) -> None:
        """Hide the padding of a call's prompt, bool [batch, length]; None: there is none."""
        batch, slots = self._columns.shape
        columns = torch.arange(slots).repeat(batch, 1)
        # The slot of each row's first token.
        self._first = np.zeros(batch, np.int64)
        self.gapless = True
        if prompt_mask is not None:
            seen = prompt_mask.cpu()
            columns[:, : seen.shape[1]].masked_fill_(~seen, _NOWHERE)
            self._first = seen.int().argmax(dim=1).numpy()
            self.gapless = bool((seen[:, 1:] >= seen[:, :-1]).all())
        self._columns.copy_(columns)
        self.first.copy_(torch.from_numpy(self._first))

    def fields(self, width: int, columns: int) -> dict[str, Field]:
        """What `write` fills and `build` reads; `columns` are tokens behind the kept slots."""
        batch = self._shape.batch
        fields: dict[str, Field] = {
            "shift": (torch.int64, (batch, 1)),
            "kept": (torch.int32, (batch,)),
        }
        if self._near is not None:
            fields["begin"] = torch.int64, (1,)
        for i, rule in enumerate(self._distinct):
            fields[f"table{i}"] = (torch.bool, (batch, width, columns + 2))
            if rule.reach is not None:
                fields[f"unseen{i}"] = (torch.int64, (batch, width, 1))
        return fields

    def write(
        self, host: Mapping[str, torch.Tensor], fed: TreeLayout, kept: Int64Array, begin: int = 0
    ) -> None:
        """Tell of tokens behind `kept` slots, int64 [batch, 1]; `begin`: the slot that buffers of
        layers begin with which forget."""
        host["shift"].numpy()[:] = 1 - kept
        host["kept"].numpy()[:] = kept[:, 0] - self._first
        if self._near is not None:
            host["begin"].numpy()[:] = begin
        first = self._first[:, None]
        for i, rule in enumerate(self._distinct):
            sees, unseen = rule.limited(fed.sees, kept, fed.depths, fed.columns, first)
            table = host[f"table{i}"].numpy()
            table[:, :, 0] = True
            table[:, :, 1:] = False
            table[:, :, 1 : 1 + sees.shape[2]] = sees
            if unseen is not None:
                host[f"unseen{i}"].numpy()[:] = unseen

    def seen(self, device: Mapping[str, torch.Tensor], masks: Masks) -> dict[int, Seen]:
        """The same for kernels that need no mask, by the address of the empty one."""
        kinds = masks.values() if isinstance(masks, dict) else [masks]
        found = {}
        for mask, rule in zip(kinds, every_rule(self._shape.rules), strict=True):
            i = self._distinct.index(rule)
            kept, first, unseen = device["kept"], self.first, device.get(f"unseen{i}")
            if unseen is not None and "begin" in device:
                begin = device["begin"].to(torch.int32)
                end = first + kept - begin
                first = (first - begin).clamp(min=0)
                kept, unseen = end - first, unseen - begin
            holes = None
            if not self.gapless:
                holes = self._columns_of(unseen is not None, device.get("begin")) == _NOWHERE
            found[mask.data_ptr()] = Seen(kept, first, device[f"table{i}"], unseen, holes)
        return found

    def build(self, device: Mapping[str, torch.Tensor]) -> Masks:
        """Masks [batch, 1, width, slots] from the written fields, on the device."""
        shift, begin = device["shift"], device.get("begin")
        made = {
            rule: self.mask(device[f"table{i}"], device.get(f"unseen{i}"), shift, begin)
            for i, rule in enumerate(self._distinct)
        }
        return by_kind(self._shape.rules, made.__getitem__)

    def empty(self, width: int) -> Masks:
        """Masks that tell kinds of layers apart and take no memory; whatever reads them is NaN."""

        def empty(rule: LayerMask) -> torch.Tensor:
            shape, near = self._shape, None if rule.reach is None else self._near
            one = self._empty[self._distinct.index(rule)]
            return one.expand(shape.batch, 1, width, near or shape.capacity)

        return by_kind(self._shape.rules, empty)

    def _columns_of(self, limited: bool, begin: torch.Tensor | None) -> torch.Tensor:
        """int64 [batch, slots], the columns of a buffer's slots."""
        if begin is None or not limited:
            return self._columns[:, : self._shape.capacity]
        return self._columns.index_select(1, self._near_slots + begin)

    def mask(
        self,
        table: torch.Tensor,
        unseen: torch.Tensor | None,
        shift: torch.Tensor,
        begin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One mask from fields on the device, whatever wrote them."""
        columns = self._columns_of(unseen is not None, begin)
        places = (columns + shift).clamp(0, table.shape[2] - 1)[:, None]
        seen = seen_slots(table, places, unseen, columns)
        return torch.where(seen, self._shown, self._hidden)[:, None]
