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

from ...host.scopes import Attention, asks_for_more
from .fixed_attention import Seen

# Slots of a part at least, and programs for each multiprocessor, as far as parts can bring them.
_LEAST_PART = 128
_PROGRAMS = 4

# Wider heads, and float32, leave a large tile no registers for its sums.
_MOST_LARGE = 256

# Bytes of a head from which on the sums of a tile need the registers of eight warps. In float32
# every head does: products of three parts take them (Triton 3.6).
_MOST_BYTES = 1024


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
    """Attention over kept slots and what lies behind them, in two launches.

    Args:
        query: [batch, heads, width, depth]; of it, keys and values the last axis is contiguous.
        key, value: whole buffers [batch, shared heads, capacity, depth].
        seen: what the queries see.
        scale: of the products of queries and keys.
        softcap: where scores are bounded by `softcap * tanh(score / softcap)`.
        sinks: [heads], scores of nothing, which takes weight and brings no value.

    Returns:
        [batch, width, heads, depth of the values], in the queries' dtype; zeros for a query that
        sees nothing.
    """
    batch, heads, width, depth = query.shape
    shared, capacity = key.shape[1:3]
    out_depth, group = value.shape[3], heads // shared
    queries, rows = group * width, batch * shared
    amd = torch.version.hip is not None
    tiles = tiles_of(depth, out_depth, key.element_size(), queries, amd)
    programs = rows * triton.cdiv(queries, tiles["TILE"])
    part = part_of(capacity, programs, _processors(query.device))
    parts = triton.cdiv(capacity, part)
    outs = query.new_empty((rows, parts, queries, out_depth), dtype=torch.float32)
    weights = query.new_empty((rows, parts, queries, 2), dtype=torch.float32)
    out = query.new_empty((batch, width, heads, out_depth))
    table, hidden = (None if x is None else x.view(torch.uint8) for x in (seen.table, seen.hidden))
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device_of(query):
        attend_parts[(programs * parts,)](
            *(query, key, value, seen.kept, seen.first, table, seen.unseen, hidden, outs, weights),
            *(scale, softcap or 0.0, width, seen.columns, group, shared, capacity, part, parts),
            *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]),
            DEPTH=depth,
            OUT_DEPTH=out_depth,
            LIMITED=seen.unseen is not None,
            HOLES=hidden is not None,
            CAPPED=bool(softcap),
            **tiles,
        )
        merge_parts[(rows * queries,)](
            *(outs, weights, sinks, out, width, group, shared, parts),
            DEPTH=out_depth,
            DEPTH2=tiles["OUT_DEPTH2"],
            SINKS=sinks is not None,
            SOME=parts_at_once(out_depth),
        )
    return out


def _processors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def part_of(capacity: int, programs: int, processors: int) -> int:
    """Slots of a part: so many that the device is busy, and no more outputs have to be merged.

    Whatever is kept, a slot of a buffer belongs to the same part in all forwards of one width.

    Args:
        programs: that there are for each part.
    """
    parts = triton.cdiv(_PROGRAMS * processors, programs)
    return triton.cdiv(triton.cdiv(capacity, parts), _LEAST_PART) * _LEAST_PART


def tiles_of(
    depth: int, out_depth: int, size: int, queries: int, amd: bool = False
) -> dict[str, int]:
    """How a program of `attend_parts` divides its work.

    Heads of up to 512 fit into the registers, and into 99 KB of shared memory, the least that cards
    from compute capability 8.0 on have; on AMD's into 64 KB.

    Args:
        depth, out_depth: of keys and of values.
        size: bytes of a number.
        queries: of a shared head.
        amd: whether the card is AMD's, for which a small tile that loads ahead is not translated
            (Triton 3.6).
    """
    deep, out = (max(16, triton.next_power_of_2(x)) for x in (depth, out_depth))
    widest = max(deep, out)
    large = queries > 16 and size == 2 and widest <= _MOST_LARGE
    block_bytes, most_block = (1 << 13, 32) if large else (1 << 14, 64)
    return {
        "DEPTH2": deep,
        "OUT_DEPTH2": out,
        "TILE": 64 if large else 16,
        "BLOCK": max(16, min(most_block, block_bytes // (widest * size))),
        "num_warps": 8 if large or size == 4 or widest * size > _MOST_BYTES else 4,
        "num_stages": 3 if large else 1 if amd else 2,
    }


def parts_at_once(out_depth: int) -> int:
    """How many parts' outputs `merge_parts` holds in registers."""
    return min(16, 2048 // max(16, triton.next_power_of_2(out_depth)))


@triton.jit(do_not_specialize=["width", "columns", "capacity", "part_slots", "parts"])
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
    columns,
    group,
    shared,
    capacity,
    part_slots,
    parts,
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
    LIMITED: tl.constexpr,
    HOLES: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """What the slots of one part bring to a tile of queries of one shared head.

    Writes outputs [batch * shared, parts, group * width, OUT_DEPTH], each relative to the part's
    best score, and that score with the sum of the weights [.., 2].
    """
    # One axis, since the others end at 65,535. Tiles of the same slots follow one another.
    tiles = tl.cdiv(group * width, TILE)
    program = tl.program_id(0)
    tile, part, line = program % tiles, program // tiles % parts, program // tiles // parts
    # Places in memory are counted in 64 bits, as buffers may be larger than 32 bits count.
    row, head = (line // shared).to(tl.int64), (line % shared).to(tl.int64)
    first = tl.load(first_at + row)
    end_kept = first + tl.load(kept_at + row)
    number = tile * TILE + tl.arange(0, TILE)
    real = number < group * width
    member, node = number // width, number % width
    begin = tl.maximum(part * part_slots, first // BLOCK * BLOCK)
    end = tl.minimum((part + 1) * part_slots, end_kept + columns)
    if LIMITED:
        unseen = tl.load(unseen_at + row * width + node, mask=real, other=capacity).to(tl.int32)
        nearest = tl.minimum(tl.maximum(tl.min(unseen, 0) + 1, 0), end_kept)
        begin = tl.maximum(begin, nearest // BLOCK * BLOCK)
    queries_at += row * query_row
    places = (head * group + member) * query_head + node * query_node
    q = _vectors(queries_at, places, real, DEPTH, DEPTH2)
    keys_at += row * key_row + head * key_head
    values_at += row * value_row + head * value_head
    table_at += ((row * width + node) * (columns + 2))[:, None] + 1
    top = tl.full((TILE,), -1e30, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    out = tl.zeros((TILE, OUT_DEPTH2), tl.float32)
    # Only blocks that lie behind kept slots, which come last, look at the table.
    middle = tl.maximum(begin, tl.minimum(end, end_kept // BLOCK * BLOCK))
    for behind in tl.static_range(2):
        if behind:
            start, stop = middle, end
        else:
            start, stop = begin, middle
        for at in range(start, stop, BLOCK):
            slot = at + tl.arange(0, BLOCK)
            inside = slot >= first
            if behind:
                inside = inside & (slot < end_kept + columns)
            k = _vectors(keys_at, slot.to(tl.int64) * key_slot, inside, DEPTH, DEPTH2)
            v = _vectors(values_at, slot.to(tl.int64) * value_slot, inside, OUT_DEPTH, OUT_DEPTH2)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if CAPPED:
                s = softcap * (2 * tl.sigmoid(2 * s / softcap) - 1)
            seen = (inside & (slot < end_kept))[None, :]
            if LIMITED:
                seen = seen & (slot[None, :] > unseen[:, None])
            if HOLES:
                hole = tl.load(hidden_at + row * capacity + slot, mask=inside, other=1)
                seen = seen & (hole == 0)[None, :]
            if behind:
                near = real[:, None] & (inside & (slot >= end_kept))[None, :]
                related = tl.load(table_at + (slot - end_kept)[None, :], mask=near, other=0)
                seen = seen | (related != 0)
            top, total, out = _weighed(top, total, out, s, seen, v)
    place = (line * parts + part).to(tl.int64) * group * width + number
    tl.store(weights_at + place * 2, top, mask=real)
    tl.store(weights_at + place * 2 + 1, total, mask=real)
    e = tl.arange(0, OUT_DEPTH2)
    tl.store(
        outs_at + place[:, None] * OUT_DEPTH + e[None, :],
        out,
        mask=(real & (total > 0))[:, None] & (e < OUT_DEPTH)[None, :],
    )


@triton.jit
def _vectors(at, places, wanted, SIZE: tl.constexpr, SIZE2: tl.constexpr):
    """[n, SIZE2], vectors of SIZE numbers at n places, filled up with zeros; zeros where none is
    wanted, which is not read."""
    i = tl.arange(0, SIZE2)
    mask = wanted[:, None] & (i < SIZE)[None, :]
    return tl.load(at + places[:, None] + i[None, :], mask=mask, other=0.0)


@triton.jit
def _weighed(top, total, out, s, seen, v):
    """An online softmax with one block of scores more: the best score so far, the sum of weights
    relative to it, and that of the weighted values."""
    s = tl.where(seen, s, -1e30)
    higher = tl.maximum(top, tl.max(s, 1))
    p = tl.where(seen, tl.exp(s - higher[:, None]), 0.0)
    old = tl.exp(top - higher)
    total = total * old + tl.sum(p, 1)
    return higher, total, out * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")


@triton.jit(do_not_specialize=["width", "parts"])
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
    SINKS: tl.constexpr,
    SOME: tl.constexpr,
):
    """One query's output, of [batch, width, heads, DEPTH], from SOME parts at a time."""
    queries = group * width
    number, line = tl.program_id(0) % queries, tl.program_id(0) // queries
    row, node = (line // shared).to(tl.int64), number % width
    head = line % shared * group + number // width
    d = tl.arange(0, DEPTH2)
    top = tl.full((), -1e30, tl.float32)
    total = tl.zeros((), tl.float32)
    out = tl.zeros((DEPTH2,), tl.float32)
    for at in range(0, parts, SOME):
        part = at + tl.arange(0, SOME)
        place = (line.to(tl.int64) * parts + part) * queries + number
        tops = tl.load(weights_at + place * 2, mask=part < parts, other=-1e30)
        totals = tl.load(weights_at + place * 2 + 1, mask=part < parts, other=0.0)
        outs = tl.load(
            outs_at + place[:, None] * DEPTH + d[None, :],
            mask=(totals > 0)[:, None] & (d < DEPTH)[None, :],
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(tops, 0))
        old, share = tl.exp(top - higher), tl.exp(tops - higher)
        total = total * old + tl.sum(share * totals, 0)
        out = out * old + tl.sum(outs * share[:, None], 0)
        top = higher
    if SINKS:
        sink = tl.load(sinks_at + head).to(tl.float32)
        higher = tl.maximum(top, sink)
        old = tl.exp(top - higher)
        total = total * old + tl.exp(sink - higher)
        out = out * old
    out = out / tl.maximum(total, 1e-30)
    at = ((row * width + node) * shared * group + head) * DEPTH
    tl.store(out_at + at + d, out.to(out_at.dtype.element_ty), mask=d < DEPTH)
