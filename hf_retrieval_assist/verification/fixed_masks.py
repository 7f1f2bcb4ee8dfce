"""Additive masks over whole buffers, built on the device from a few small tables.

What a query may see behind the kept slots, of the tokens that are fed with it and of earlier ones,
is decided on the host: a table `[batch, width, columns + 2]` holds, for each query, whether it sees
the kept slots, each of these tokens, and the slots behind. A column's entry is looked up by its
distance from the row's length, so the same few kernels build the mask of any trees at any lengths.
Kept slots that lie beyond a query's window or chunk are cut off by the last slot that it does not
see.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ..kernels.fixed_attention import Seen
from .fed_tokens import FedTokens
from .packed_buffer import Field
from .tree_attention import LayerMask

# The column of a slot that nobody sees, padding: behind all others.
_NOWHERE = 1 << 40


class FixedMasks:
    """The masks of one batch over `capacity` slots.

    Args:
        rules: one rule per layer type, or a single rule for all layers.
        batch: rows.
        capacity: slots of each row.
        dtype: of the masks, the model's.
        device: of the masks.

    Attributes:
        first: int32 [batch], the slots of padding in front of each row.
        gapless: whether all other slots of the prompts hold tokens.
    """

    def __init__(
        self,
        rules: dict[str, LayerMask] | LayerMask,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.rules = rules
        self.batch = batch
        self.capacity = capacity
        every = [rules] if isinstance(rules, LayerMask) else rules.values()
        self._distinct = list(dict.fromkeys(every))
        self._columns = torch.zeros((batch, capacity), dtype=torch.int64, device=device)
        self._shown = torch.zeros((), dtype=dtype, device=device)
        self._hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)
        self._empty = torch.full((len(self._distinct),), torch.nan, dtype=dtype, device=device)
        self._holes = torch.zeros((batch, capacity), dtype=torch.bool, device=device)
        # The slot of each row's first token, on the host and on the device.
        self._first = np.zeros(batch, np.int64)
        self.first = torch.zeros(batch, dtype=torch.int32, device=device)
        self.gapless = True

    def start(self, prompt_mask: torch.Tensor | None) -> None:
        """Hide the padding of a call's prompt, bool [batch, length]; None: there is none."""
        columns = torch.arange(self.capacity).repeat(self.batch, 1)
        self._first = np.zeros(self.batch, np.int64)
        self.gapless = True
        if prompt_mask is not None:
            seen = prompt_mask.cpu()
            columns[:, : seen.shape[1]].masked_fill_(~seen, _NOWHERE)
            self._first = seen.int().argmax(dim=1).numpy()
            self.gapless = bool((seen[:, 1:] >= seen[:, :-1]).all())
        self._columns.copy_(columns)
        self._holes.copy_(columns == _NOWHERE)
        self.first.copy_(torch.from_numpy(self._first))

    def fields(self, width: int, columns: int) -> dict[str, Field]:
        """What `write` fills and `build` reads; `columns` are tokens behind the kept slots."""
        fields: dict[str, Field] = {
            "shift": (torch.int64, (self.batch, 1)),
            "kept": (torch.int32, (self.batch,)),
        }
        for i, rule in enumerate(self._distinct):
            fields[f"table{i}"] = (torch.bool, (self.batch, width, columns + 2))
            if rule.reach is not None:
                fields[f"unseen{i}"] = (torch.int64, (self.batch, width, 1))
        return fields

    def write(self, host: Mapping[str, torch.Tensor], fed: FedTokens) -> None:
        """Tell of the tokens of all rows."""
        kept = fed.lengths[:, None]
        host["shift"].numpy()[:] = 1 - kept
        host["kept"].numpy()[:] = kept[:, 0] - self._first
        first = self._first[:, None]
        places, columns = fed.depths + kept - first, fed.columns + kept - first
        for i, rule in enumerate(self._distinct):
            table = host[f"table{i}"].numpy()
            table[:, :, 0] = True
            table[:, :, 1:] = False
            table[:, :, 1 : 1 + columns.shape[1]] = fed.sees & rule.near(places, columns)
            if rule.reach is not None:
                host[f"unseen{i}"].numpy()[..., 0] = rule.last_unseen(places) + first

    def narrow(self, device: Mapping[str, torch.Tensor], sees: torch.Tensor) -> None:
        """Let the first queries see no more of the columns than bool [batch, queries, columns] on
        the device says, behind what was sent."""
        _, queries, columns = sees.shape
        for i in range(len(self._distinct)):
            device[f"table{i}"][:, :queries, 1 : 1 + columns].logical_and_(sees)

    def seen(
        self,
        device: Mapping[str, torch.Tensor],
        masks: dict[str, torch.Tensor] | torch.Tensor,
    ) -> dict[int, Seen]:
        """What kernels that need no mask read instead, by the address of the empty one."""
        kinds = masks.values() if isinstance(masks, dict) else [masks]
        rules = [self.rules] if isinstance(self.rules, LayerMask) else self.rules.values()
        holes = None if self.gapless else self._holes
        found = {}
        for mask, rule in zip(kinds, rules, strict=True):
            i = self._distinct.index(rule)
            table, unseen = device[f"table{i}"], device.get(f"unseen{i}")
            found[mask.data_ptr()] = Seen(device["kept"], self.first, table, unseen, holes)
        return found

    def build(
        self, device: Mapping[str, torch.Tensor], empty: bool = False
    ) -> dict[str, torch.Tensor] | torch.Tensor:
        """Masks [batch, 1, width, capacity] from the written fields, on the device.

        Empty ones tell kinds of layers apart and take no memory; whatever reads them is NaN.
        """
        width = device["table0"].shape[1]
        if empty:
            shape = self.batch, 1, width, self.capacity
            masks = {rule: self._empty[i].expand(shape) for i, rule in enumerate(self._distinct)}
        else:
            masks = {
                rule: self.mask(device[f"table{i}"], device.get(f"unseen{i}"), device["shift"])
                for i, rule in enumerate(self._distinct)
            }
        if isinstance(self.rules, LayerMask):
            return masks[self.rules]
        return {kind: masks[rule] for kind, rule in self.rules.items()}

    def mask(
        self, table: torch.Tensor, unseen: torch.Tensor | None, shift: torch.Tensor
    ) -> torch.Tensor:
        """One mask from fields on the device, whatever wrote them."""
        batch, width, entries = table.shape
        places = (self._columns + shift).clamp(0, entries - 1)[:, None, :]
        if unseen is None:
            places = places.expand(batch, width, self.capacity)
        else:
            near = self._columns[:, None, :] > unseen
            places = torch.where(near, places, entries - 1)
        seen = table.gather(2, places)
        return torch.where(seen, self._shown, self._hidden)[:, None]
