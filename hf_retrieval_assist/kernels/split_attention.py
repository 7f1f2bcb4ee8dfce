"""Attention of token trees over buffers of fixed capacity, at the cost of the tokens in use.

A query of a tree sees all kept slots of its row and some of the tokens that were fed with it. The
first part needs no mask and the second is as small as the tree, so each is computed by itself and
both are merged by their log-sum-exps (the online softmax of Milakov and Gimelshein 2018, section 3,
over two blocks). Query heads that share a key and value head are folded into more queries of it:
nothing is copied for each of them.

Within :class:`~.scopes.attending` the forwards of a thread attend by a :class:`SplitAttention`.
"""

from __future__ import annotations

import importlib
import inspect
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F

from .attention import asks_for_more
from .scopes import Attention

varlen: Any = None
with suppress(ImportError):  # before torch 2.10
    varlen = importlib.import_module("torch.nn.attention.varlen")

aten = torch.ops.aten

# Columns of a bias are laid out in multiples of so many.
_BIAS_COLUMNS = 8

_Part = tuple[torch.Tensor, torch.Tensor]
"""What some columns contribute: outputs [batch, heads, queries, width] and the logarithm of their
weight [batch, heads, queries]."""


@dataclass(frozen=True)
class FedSlots:
    """Where the tokens of one forward lie in the buffers, and who sees whom.

    Attributes:
        slots: int64 [batch, width], behind each row's kept slots.
        kept: int32 [batch], kept slots of each row that are no padding; at least 1.
        first: int32 [batch], slots of padding in front of them.
        longest: no row has kept more slots, padding included.
        bias: [batch, 1, width, width], additive; what a query sees of the tokens of the forward.
            None where no layer sees all kept slots, or some of them are hidden.
        mask: [batch, 1, width, capacity], additive; the same and the kept slots, as layers that
            see all of them are given it; None where none does.
    """

    slots: torch.Tensor
    kept: torch.Tensor
    first: torch.Tensor
    longest: int
    bias: torch.Tensor | None
    mask: torch.Tensor | None


AttentionBy = Literal["triton", "parts", "mask"]
"""What computes attention over buffers of fixed capacity: the kernels of :mod:`.triton_attention`,
PyTorch's in two parts, or the model's own function under a mask over the whole capacity."""


@dataclass(frozen=True)
class Seen:
    """What the queries of one forward see, for the layers of one kind.

    Attributes:
        kept: int32 [batch], slots of each row in front of the fed tokens, padding left out.
        first: int32 [batch], slots of padding in front of them.
        table: bool [batch, width, width + 2], whether a query sees fed token j in column j + 1.
        unseen: int64 [batch, width, 1], the last slot beyond a query's reach, the first query's
            being the smallest; None: all are within it.
        hidden: bool [batch, capacity], slots that hold no token; None: those of the padding alone.
    """

    kept: torch.Tensor
    first: torch.Tensor
    table: torch.Tensor
    unseen: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


def ways(device: torch.device) -> list[AttentionBy]:
    """What there is on a device in the place of the model's own function, best first.

    On CUDA, Triton from the cards on that multiply bfloat16 (compute capability 8.0); and flash
    attention that is told what is in use (from torch 2.12 on).
    """
    if device.type != "cuda":
        return ["parts"] if device.type == "cpu" else []
    found: list[AttentionBy] = []
    if find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0):
        found.append("triton")
    if varlen is not None and "seqused_k" in inspect.signature(varlen.varlen_attn).parameters:
        found.append("parts")
    return found


def split_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, fed: FedSlots, scale: float
) -> torch.Tensor:
    """[batch, heads, width, head_dim] for queries of that shape, from whole buffers
    [batch, shared heads, capacity, head_dim]."""
    rows = torch.arange(len(key), device=key.device)[:, None]
    near_key, near_value = (buffer[rows, :, fed.slots].transpose(1, 2) for buffer in (key, value))
    sharing = query.shape[1] // key.shape[1]
    assert fed.bias is not None
    tree = _biased(query, near_key, near_value, fed.bias.repeat(1, 1, sharing, 1), scale)
    return _merged(_kept_part(query, key, value, fed, scale), tree)


def windowed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    fed: FedSlots,
    mask: torch.Tensor,
    reach: int,
    scale: float,
) -> torch.Tensor:
    """The same for layers that see `reach` tokens at most, under their mask
    [batch, 1, width, capacity]: of the buffers those slots are read and no others."""
    width, capacity = mask.shape[2:]
    if reach + width >= capacity:
        return masked_attention(query, key, value, mask, scale)
    steps = torch.arange(-reach, width, device=key.device)
    places = fed.slots[:, :1] + steps
    rows = torch.arange(len(key), device=key.device)[:, None]
    at = places.clamp(min=0)
    near_key, near_value = (buffer[rows, :, at].transpose(1, 2) for buffer in (key, value))
    bias = mask.gather(3, at[:, None, None, :].expand(-1, 1, width, -1))
    bias = bias.masked_fill((places < 0)[:, None, None, :], torch.finfo(mask.dtype).min)
    sharing = query.shape[1] // key.shape[1]
    return _biased(query, near_key, near_value, bias.repeat(1, 1, sharing, 1), scale)[0]


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention over whole buffers under an additive mask [batch, 1, width, capacity]."""
    sharing = query.shape[1] // key.shape[1]
    return _biased(query, key, value, mask.repeat(1, 1, sharing, 1), scale)[0]


def _merged(one: _Part, other: _Part) -> torch.Tensor:
    share = torch.sigmoid(other[1] - one[1])[..., None]
    return torch.lerp(one[0], other[0], share.to(one[0].dtype))


def _kept_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, fed: FedSlots, scale: float
) -> _Part:
    if query.device.type == "cuda":
        return _flash(query, key, value, fed, scale)
    key, value = (buffer[:, :, : fed.longest] for buffer in (key, value))
    columns = torch.arange(fed.longest, device=key.device) - fed.first[:, None]
    hidden = (columns < 0) | (columns >= fed.kept[:, None])
    bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
    bias.masked_fill_(hidden, torch.finfo(query.dtype).min)
    return _biased(query, key, value, bias[:, None, None, :], scale)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, fed: FedSlots, scale: float
) -> _Part:
    """Flash attention over packed rows that says how many slots of each are in use."""
    batch, heads, width, depth = query.shape
    capacity = key.shape[2]
    rows = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    begin = rows * capacity
    begin[:-1].add_(fed.first)
    packed_key, packed_value = (buffer.transpose(1, 2).flatten(0, 1) for buffer in (key, value))
    out, weight = varlen.varlen_attn(
        query.transpose(1, 2).reshape(batch * width, heads, depth),
        packed_key,
        packed_value,
        rows * width,
        begin,
        width,
        capacity,
        return_aux=varlen.AuxRequest(lse=True),
        scale=scale,
        enable_gqa=heads != key.shape[1],
        seqused_k=fed.kept,
    )
    out = out.unflatten(0, (batch, width)).transpose(1, 2)
    return out, weight.view(heads, batch, width).transpose(0, 1)


def _biased(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> _Part:
    """One fused kernel under an additive bias, heads that share keys folded into queries.

    `bias` broadcasts to [batch, shared heads, folded queries, columns].
    """
    batch, heads, width, depth = query.shape
    shared = key.shape[1]
    folded = query.reshape(batch, shared, heads // shared * width, depth)
    if query.device.type != "cpu" and (excess := -bias.shape[3] % _BIAS_COLUMNS):
        # The kernel reads rows that begin at multiples of 16 bytes.
        bias = F.pad(bias, (0, excess))[..., : bias.shape[3]]
    bias = bias.expand(batch, shared, folded.shape[2], key.shape[2])
    if query.device.type == "cpu":
        out, weight = aten._scaled_dot_product_flash_attention_for_cpu(
            folded, key, value, attn_mask=bias, scale=scale
        )
    else:
        out, weight, _, _ = aten._scaled_dot_product_efficient_attention(
            folded, key, value, bias, True, scale=scale
        )
    weight = weight[:, :, : folded.shape[2]]
    return out.reshape(batch, heads, width, -1), weight.reshape(batch, heads, width)


class SplitAttention:
    """What computes attention over the buffers of a forward.

    Args:
        fed: where the tokens of the forward lie.
        reaches: the masks of layers that do not see all kept slots, and how far they see.
    """

    def __init__(self, fed: FedSlots, reaches: list[tuple[torch.Tensor, int]]):
        self._fed = fed
        self._reaches = {mask.data_ptr(): reach for mask, reach in reaches}

    def __call__(
        self,
        plain: Attention,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        if attention_mask is None or asks_for_more(options, ("softcap", "s_aux")):
            return plain(module, query, key, value, attention_mask, **options)
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        out = self.attend(query, key, value, attention_mask, scale)
        return out.transpose(1, 2).contiguous(), None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        fed, whole = self._fed, self._fed.mask
        if fed.bias is not None and whole is not None and mask.data_ptr() == whole.data_ptr():
            return split_attention(query, key, value, self._fed, scale)
        if (reach := self._reaches.get(mask.data_ptr())) is not None:
            return windowed_attention(query, key, value, self._fed, mask, reach, scale)
        return masked_attention(query, key, value, mask, scale)
