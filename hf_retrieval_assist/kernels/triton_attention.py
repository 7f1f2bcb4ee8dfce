"""Attention of token trees over buffers of fixed capacity, in two Triton kernels.

The slots of a row are split into parts at fixed places, whatever is fed: programs attend to one
part each (flash decoding, Dao et al. 2023), and a second kernel merges the parts by their
log-sum-exps (the online softmax of Milakov and Gimelshein 2018, section 3). How many slots are in
use, which of them a layer's window reaches, and who sees whom among the fed tokens is read on the
device, so one recording serves every step of a width, no mask over the whole capacity is built, and
what is not in use is not read. Query heads that share a key and value head lie in one tile with the
nodes, so that keys and values are read once for all of them.

Importing this module needs Triton, which comes with PyTorch's builds for CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from .attention import asks_for_more
from .fixed_attention import Seen
from .scopes import Attention

# Slots of a part at least, and parts at most.
_PART = 128
_MOST_PARTS = 32

# Bytes of one head's keys that are read at once.
_BLOCK_BYTES = 1 << 14
_MOST_BLOCK = 64


class TritonAttention:
    """What computes attention over the buffers of a forward.

    Args:
        seen: by the address of the mask that layers are given, which nothing but this reads.
        name: of the implementation that the model was loaded with.
    """

    def __init__(self, seen: Mapping[int, Seen], name: str):
        self._seen = seen
        # PyTorch's own function knows neither bounds nor sinks, whatever a model passes it.
        self._knows_scores = name != "sdpa"

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
        seen = None if attention_mask is None else self._seen.get(attention_mask.data_ptr())
        if seen is None or asks_for_more(options):
            # Masks of the forward hold no numbers, so what needs them is found by its test.
            return plain(module, query, key, value, attention_mask, **options)
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        scores = (options.get("softcap"), options.get("s_aux")) if self._knows_scores else ()
        return tree_attention(query, key, value, seen, scale, *scores), None


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: Seen,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over kept slots and fed tokens, in two launches.

    Args:
        query: [batch, heads, width, depth]; of it, keys and values the last axis is contiguous.
        key, value: whole buffers [batch, shared heads, capacity, depth].
        seen: what the queries see. The fed tokens lie behind the kept slots.
        scale: of the products of queries and keys.
        softcap: where scores are bounded by `softcap * tanh(score / softcap)`.
        sinks: [heads], scores of nothing, which takes weight and brings no value.

    Returns:
        [batch, width, heads, depth of the values], in the queries' dtype; zeros for a query that
        sees nothing.
    """
    batch, heads, width, depth = query.shape
    shared, capacity = key.shape[1:3]
    deep, out_depth = key.shape[3], value.shape[3]
    part = part_of(capacity)
    parts = triton.cdiv(capacity, part)
    group = heads // shared
    queries = group * width
    tile = 16 if queries <= 16 else 64
    block = max(16, min(_MOST_BLOCK, _BLOCK_BYTES // (deep * key.element_size())))
    rows = batch * shared
    outs = query.new_empty((rows, parts, queries, out_depth), dtype=torch.float32)
    weights = query.new_empty((rows, parts, queries, 2), dtype=torch.float32)
    out = query.new_empty((batch, width, heads, out_depth))
    table, hidden = (None if x is None else x.view(torch.uint8) for x in (seen.table, seen.hidden))
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device_of(query):
        attend_parts[(parts, triton.cdiv(queries, tile), rows)](
            query,
            key,
            value,
            seen.kept,
            seen.first,
            table,
            seen.unseen,
            hidden,
            outs,
            weights,
            scale,
            softcap or 0.0,
            width,
            group,
            shared,
            capacity,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            DEPTH=depth,
            DEPTH2=max(16, triton.next_power_of_2(depth)),
            OUT_DEPTH=out_depth,
            OUT_DEPTH2=max(16, triton.next_power_of_2(out_depth)),
            TILE=tile,
            BLOCK=block,
            PART=part,
            LIMITED=seen.unseen is not None,
            HOLES=hidden is not None,
            CAPPED=bool(softcap),
        )
        merge_parts[(queries, rows)](
            outs,
            weights,
            sinks,
            out,
            width,
            group,
            shared,
            parts,
            DEPTH=out_depth,
            DEPTH2=triton.next_power_of_2(out_depth),
            PARTS2=triton.next_power_of_2(parts),
            SINKS=sinks is not None,
        )
    return out


def part_of(capacity: int) -> int:
    """Slots of a part: whatever is fed, a slot of a buffer belongs to the same part."""
    return max(_PART, triton.next_power_of_2(triton.cdiv(capacity, _MOST_PARTS)))


@triton.jit
def attend_parts(
    queries_at,
    keys_at,
    values_at,
    kept_at,
    first_at,
    table_at,
    unseen_at,
    hidden_at,
    outs_at,
    weights_at,
    scale,
    softcap,
    width,
    group,
    shared,
    capacity,
    query_row,
    query_head,
    query_node,
    key_row,
    key_head,
    key_slot,
    value_row,
    value_head,
    value_slot,
    DEPTH: tl.constexpr,
    DEPTH2: tl.constexpr,
    OUT_DEPTH: tl.constexpr,
    OUT_DEPTH2: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    LIMITED: tl.constexpr,
    HOLES: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """What the slots of one part bring to a tile of queries of one shared head.

    Writes outputs [batch * shared, parts, group * width, OUT_DEPTH], each relative to the part's
    best score, and that score with the sum of the weights [.., 2].
    """
    part, tile, line = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # Places in buffers are counted in 64 bits, as buffers may be larger than 32 bits count.
    row, head = (line // shared).to(tl.int64), line % shared
    first = tl.load(first_at + row)
    fed = first + tl.load(kept_at + row)
    number = tile * TILE + tl.arange(0, TILE)
    real = number < group * width
    member, node = number // width, number % width
    d, e, n = tl.arange(0, DEPTH2), tl.arange(0, OUT_DEPTH2), tl.arange(0, BLOCK)
    begin = tl.maximum(part * PART, first // BLOCK * BLOCK)
    end = tl.minimum(part * PART + PART, fed + width)
    if LIMITED:
        beyond = tl.load(unseen_at + row * width)
        nearest = tl.minimum(tl.maximum(beyond + 1, 0), fed).to(tl.int32)
        begin = tl.maximum(begin, nearest // BLOCK * BLOCK)
        unseen = tl.load(unseen_at + row * width + node, mask=real, other=0)
    q = tl.load(
        queries_at
        + row * query_row
        + ((head * group + member) * query_head + node * query_node)[:, None]
        + d[None, :],
        mask=real[:, None] & (d < DEPTH)[None, :],
        other=0.0,
    )
    top = tl.full((TILE,), -1e30, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    out = tl.zeros((TILE, OUT_DEPTH2), tl.float32)
    for at in range(begin, end, BLOCK):
        slot = at + n
        inside = (slot >= first) & (slot < fed + width)
        place = slot.to(tl.int64)[:, None]
        k = tl.load(
            keys_at + row * key_row + head * key_head + place * key_slot + d[None, :],
            mask=inside[:, None] & (d < DEPTH)[None, :],
            other=0.0,
        )
        v = tl.load(
            values_at + row * value_row + head * value_head + place * value_slot + e[None, :],
            mask=inside[:, None] & (e < OUT_DEPTH)[None, :],
            other=0.0,
        )
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            s = softcap * (2 * tl.sigmoid(2 * s / softcap) - 1)
        kept = (inside & (slot < fed))[None, :]
        if LIMITED:
            kept = kept & (slot[None, :] > unseen[:, None])
        if HOLES:
            hole = tl.load(hidden_at + row * capacity + slot, mask=inside, other=1)
            kept = kept & (hole == 0)[None, :]
        other = slot - fed
        # What is kept belongs to no column, and is not looked up.
        near = inside & (other >= 0)
        related = tl.load(
            table_at + ((row * width + node) * (width + 2))[:, None] + (1 + other)[None, :],
            mask=real[:, None] & near[None, :],
            other=0,
        )
        seen = kept | (related != 0)
        s = tl.where(seen, s, -1e30)
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.where(seen, tl.exp(s - higher[:, None]), 0.0)
        old = tl.exp(top - higher)
        total = total * old + tl.sum(p, 1)
        out = out * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = higher
    place = (line * tl.num_programs(0) + part).to(tl.int64) * group * width + number
    tl.store(weights_at + place * 2, top, mask=real)
    tl.store(weights_at + place * 2 + 1, total, mask=real)
    tl.store(
        outs_at + place[:, None] * OUT_DEPTH + e[None, :],
        out,
        mask=(real & (total > 0))[:, None] & (e < OUT_DEPTH)[None, :],
    )


@triton.jit
def merge_parts(
    outs_at,
    weights_at,
    sinks_at,
    out_at,
    width,
    group,
    shared,
    parts,
    DEPTH: tl.constexpr,
    DEPTH2: tl.constexpr,
    PARTS2: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One query's output, of [batch, width, heads, DEPTH]."""
    number, line = tl.program_id(0), tl.program_id(1)
    row, node = line // shared, number % width
    head = line % shared * group + number // width
    part, d = tl.arange(0, PARTS2), tl.arange(0, DEPTH2)
    place = (line * parts + part).to(tl.int64) * group * width + number
    top = tl.load(weights_at + place * 2, mask=part < parts, other=-1e30)
    total = tl.load(weights_at + place * 2 + 1, mask=part < parts, other=0.0)
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sinks_at + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    share = tl.exp(top - highest)
    weight = tl.sum(share * total, 0)
    if SINKS:
        weight += tl.exp(sink - highest)
    outs = tl.load(
        outs_at + place[:, None] * DEPTH + d[None, :],
        mask=(total > 0)[:, None] & (d < DEPTH)[None, :],
        other=0.0,
    )
    out = tl.sum(outs * share[:, None], 0) / tl.maximum(weight, 1e-30)
    at = ((row * width + node).to(tl.int64) * shared * group + head) * DEPTH
    tl.store(out_at + at + d, out.to(out_at.dtype.element_ty), mask=d < DEPTH)
