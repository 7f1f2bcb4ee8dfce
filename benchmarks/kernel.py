"""The kernels for few rows: attention, and what they change. `machine` has linear layers.

Two tables count, over real text, how often the most probable next token changes against plain
one-row forwards, beside what PyTorch's own forwards of several rows change. The last one counts the
logits that a screened output layer computes in full.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import DynamicCache

from hf_retrieval_assist.engines.cpu import screen as screen_module
from hf_retrieval_assist.engines.cpu.attention import plain_attention
from hf_retrieval_assist.engines.cpu.quantized import QuantizedWeight
from hf_retrieval_assist.engines.cpu.reroute import reroute
from hf_retrieval_assist.engines.cpu.screen import Screen, Screened
from hf_retrieval_assist.engines.cpu.skinny import (
    chosen_linear,
    kernel_attention,
    skinny_linear,
)
from hf_retrieval_assist.host.transformers_private import CACHE

from .inputs import load, model_name, read_prompts
from .report import Report, Table
from .timing import alternate
from .traces import SHIPPED, read_traces

ROWS = (1, 2, 4, 8, 16, 32)
# The demo model's heads, groups and depth, and those of a Llama of 8 billion parameters.
HEADS = ((4, 1, 256), (32, 8, 128))
SLOTS = (64, 400, 1500)
# Text is cut into pieces: what a piece begins with is processed in one forward, the rest counts.
PREFIX, PIECE = 16, 256
# Logits of so many tokens, the most probable of each position, are compared.
COMPARED = 32

FLIP_COLUMNS = {
    "what": "forwards",
    "positions": "positions",
    "flips": "argmax flips",
    "largest": f"largest difference of the {COMPARED} highest logits",
}

PARTS = ("attentions", "flips", "screen")

# Output layers of other models, tokens and depth, whose weights are made of the demo model's.
SHAPES = {"Llama-3.2-1B": (128256, 2048), "Qwen3-4B": (151936, 2560)}
SCREEN_COLUMNS = {
    "shape": "output layer",
    "text": "text",
    "tokens": "tokens",
    "logits": "logits in full: median / p99 / most",
    "whole": "whole layers",
}

Scope = Callable[[], AbstractContextManager[object]]


def typical_seconds(
    what: str,
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, float]:
    """Median seconds of each call, after one that warms up."""
    for call in calls.values():
        call()
    return alternate(calls, repeats, lambda text: progress(f"{what}: {text}"))[0]


def attentions(
    report: Report, arguments: argparse.Namespace, progress: Callable[[str], None]
) -> None:
    columns = {"what": "heads, slots", "method": "milliseconds", **{str(n): f"n={n}" for n in ROWS}}
    table = report.table("Attention under a mask, 18 layers", columns)
    for (heads, groups, depth), slots, dtype in product(HEADS, SLOTS, ("float32", "bfloat16")):
        calls = _attention_calls(heads, groups, depth, slots, getattr(torch, dtype))
        what = f"{heads}/{groups} x {depth}, {slots} {dtype}"
        found = {
            n: typical_seconds(
                f"{what}, n={n}",
                {name: partial(call, n) for name, call in calls.items()},
                arguments.kernel_repeats,
                progress,
            )
            for n in ROWS
        }
        for name in calls:
            times = {str(n): 1e3 * seconds[name] for n, seconds in found.items()}
            table.add(what=what, method=name, **times)


def _attention_calls(
    heads: int, groups: int, depth: int, slots: int, dtype: torch.dtype
) -> dict[str, Callable[[int], object]]:
    """18 layers, so that keys and values come from memory as they do in a model."""
    caches = [torch.randn(2, 1, groups, slots + ROWS[-1], depth).to(dtype) for _ in range(18)]
    queries = torch.randn(1, ROWS[-1], heads, depth).to(dtype).transpose(1, 2)
    layer = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=True)

    def run(attend: Callable[..., object], n: int) -> None:
        future = torch.ones(n, slots + n, dtype=torch.bool).triu(slots + 1)
        mask = torch.zeros(1, 1, n, slots + n, dtype=dtype)
        mask.masked_fill_(future, torch.finfo(dtype).min)
        for keys, values in caches:
            attend(queries[:, :, :n], keys[:, :, : slots + n], values[:, :, : slots + n], mask)

    return {
        "transformers": partial(run, partial(plain_attention, layer)),
        "kernel": partial(run, lambda *operands: kernel_attention(*operands, None)),
    }


def real_text(tokenizer: Any, positions: int) -> torch.Tensor:
    """int64 [pieces, PREFIX + PIECE]: Python's own manual, as every interpreter carries it."""
    from pydoc_data.topics import topics

    pieces = -(-positions // PIECE)
    # A token is seldom shorter than two characters of it.
    text = "\n".join(topics[name] for name in sorted(topics))[: 8 * pieces * (PREFIX + PIECE)]
    ids = torch.tensor(tokenizer(text).input_ids[: pieces * (PREFIX + PIECE)])
    return ids.view(-1, PREFIX + PIECE)


@torch.no_grad()
def logits_of(model: Any, piece: torch.Tensor, rows: int, scope: Scope) -> torch.Tensor:
    """float32 [PIECE, vocabulary]: after each token behind the prefix, fed `rows` at a time."""
    cache = DynamicCache(config=model.config)
    model(piece[None, :PREFIX], **{CACHE: cache}, logits_to_keep=1)
    found = []
    for part in piece[PREFIX:].split(rows):
        with scope():
            found.append(model(part[None], **{CACHE: cache}).logits[0].float())
    return torch.cat(found)


def flips(
    report: Report,
    model: Any,
    pieces: torch.Tensor,
    rows: int,
    progress: Callable[[str], None],
) -> None:
    """Argmax flips and the largest difference of likely tokens' logits."""
    ways = {
        f"PyTorch, {rows} rows": (rows, nullcontext),
        f"kernels, {rows} rows": (rows, reroute),
        "kernels, 1 row": (1, reroute),
    }
    table = report.table(f"Against PyTorch's one-row forwards, {model.dtype}", FLIP_COLUMNS)
    counts, largest = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    for number, piece in enumerate(pieces):
        progress(f"{model.dtype}: piece {number + 1} of {len(pieces)}")
        likely = logits_of(model, piece, 1, nullcontext).topk(COMPARED)
        for name, (width, scope) in ways.items():
            logits = logits_of(model, piece, width, scope)
            counts[name] += int((logits.argmax(-1) != likely.indices[:, 0]).sum())
            difference = (logits.gather(1, likely.indices) - likely.values).abs().max()
            largest[name] = max(largest[name], float(difference))
    for name in ways:
        table.add(
            what=name,
            positions=pieces[:, PREFIX:].numel(),
            flips=counts[name],
            largest=largest[name],
        )


@torch.no_grad()
def states_by_kind(model: Any, tokenizer: Any, name: str, count: int) -> dict[str, torch.Tensor]:
    """float32 [count or less, hidden size] by kind of text: what the output layer is given for
    answers to `prompts/`, which were recorded of Gemma-3, or for the prompts, and over Python's
    manual."""
    trace = next(one for one in read_traces(SHIPPED) if one.name == "sampled")
    kinds: dict[str, torch.Tensor] = {}
    for prompt, request in zip(read_prompts(), trace.requests, strict=True):
        known = kinds.get(prompt.category, torch.empty(0, model.config.hidden_size))
        if len(known) < count:
            ids, start = prompt.inputs(tokenizer)["input_ids"][0], 1
            if name == "gemma3":
                ids = torch.cat([torch.from_numpy(part).long() for part in request])
                start = len(request[0])
            states = model.model(ids[None]).last_hidden_state[0, start - 1 : -1]
            kinds[prompt.category] = torch.cat([known, states])[:count]
    piece = real_text(tokenizer, 1)[:1]
    kinds["Python's manual"] = model.model(piece).last_hidden_state[0, PREFIX:][:count]
    return kinds


def lifted(rows: torch.Tensor, basis: torch.Tensor, side: int) -> torch.Tensor:
    """Rows [n, depth] whose products with those of the other side are what they were, and as long
    as vectors of that depth would have to be: cosines of trained ones shrink with its root.

    Args:
        rows: float32 [n, width].
        basis: orthonormal [depth, depth].
        side: 0 for weights, 1 for what they multiply.
    """
    width, depth = rows.shape[1], len(basis)
    room = (depth - width) // 2
    rest = torch.randn(len(rows), room, generator=torch.Generator().manual_seed(side))
    rest *= (math.sqrt(math.sqrt(depth / width) - 1) * rows.norm(dim=1) / rest.norm(dim=1))[:, None]
    begin = width + side * room
    return rows @ basis[:width] + rest @ basis[begin : begin + room]


@contextmanager
def logits_counted() -> Iterator[list[int]]:
    """Scope that notes how many logits the screen computes in full, each time: none where bounds
    leave a single token."""
    sizes: list[int] = []

    def whole(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        sizes.append(len(weight))
        return skinny_linear(x, weight)

    def some(x: torch.Tensor, weight: torch.Tensor, ids: Any) -> torch.Tensor:
        sizes.append(len(ids))
        return chosen_linear(x, weight, ids)

    with mock.patch.multiple(screen_module, skinny_linear=whole, chosen_linear=some):
        yield sizes


def logits_needed(found: Screened, row: int) -> int:
    """How many logits of a row are computed in full before its greedy token is known."""
    with logits_counted() as sizes:
        found.argmax(row)
    return min(sum(sizes), found.near.shape[1])


def screened(
    table: Table,
    shape: str,
    weight: torch.Tensor,
    kinds: Mapping[str, torch.Tensor],
    progress: Callable[[str], None],
) -> None:
    """A row for each kind of text, and one for all."""
    screen = Screen(weight, QuantizedWeight.pack(weight))
    counts: dict[str, list[int]] = {}
    for text, states in kinds.items():
        progress(f"{shape}: {text}")
        for part in states.split(32):
            found = screen.look(part)
            for row in range(len(part)):
                for kind in (text, "all"):
                    counts.setdefault(kind, []).append(logits_needed(found, row))
    for text, needed in counts.items():
        few = torch.tensor([count for count in needed if count < len(weight)], dtype=torch.float64)
        marks = few.quantile(torch.tensor([0.5, 0.99, 1.0], dtype=few.dtype)) if len(few) else few
        table.add(
            **{"shape": shape, "text": text, "tokens": len(needed)},
            logits=" / ".join(f"{math.ceil(mark):,}" for mark in marks.tolist()) or None,
            whole=f"{1 - len(few) / len(needed):.1%}",
        )


def screens(
    report: Report,
    model: Any,
    tokenizer: Any,
    arguments: argparse.Namespace,
    progress: Callable[[str], None],
) -> None:
    table = report.table("Screened output layer", SCREEN_COLUMNS)
    name = model_name(arguments)
    kinds = states_by_kind(model, tokenizer, name, arguments.screen_tokens)
    weight = model.lm_head.weight.detach()
    screened(table, name, weight, kinds, progress)
    for shape, (tokens, depth) in SHAPES.items():
        generator = torch.Generator().manual_seed(2)
        basis = torch.linalg.qr(torch.randn(depth, depth, generator=generator))[0]
        deeper = {text: lifted(states, basis, side=1) for text, states in kinds.items()}
        screened(table, shape, lifted(weight[:tokens], basis, side=0), deeper, progress)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel-repeats", type=int, default=9)
    parser.add_argument(
        "--kernel-parts",
        nargs="+",
        choices=PARTS,
        default=[part for part in PARTS if part != "screen"],
        help="default: all but screen, whose counts need minutes and depend on no machine",
    )
    parser.add_argument("--flip-positions", type=int, default=256, help="of real text")
    parser.add_argument("--flip-rows", type=int, default=16, help="tokens of one forward")
    parser.add_argument("--screen-tokens", type=int, default=64, help="of each kind of text")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    if arguments.quick:
        arguments.kernel_repeats, arguments.flip_positions = 1, PIECE
        arguments.screen_tokens = 1
    names = (
        "model",
        "kernel_parts",
        "kernel_repeats",
        "flip_positions",
        "flip_rows",
        "screen_tokens",
    )
    report = Report("kernel", {name: getattr(arguments, name) for name in names})
    parts = arguments.kernel_parts
    if "attentions" in parts:
        attentions(report, arguments, progress)
    for dtype in ("float32", "bfloat16") if "flips" in parts else ():
        model, tokenizer = load(arguments, dtype)
        pieces = real_text(tokenizer, max(arguments.flip_positions, 1))
        flips(report, model, pieces, arguments.flip_rows, progress)
    if "screen" in parts:
        screens(report, *load(arguments, "float32"), arguments, progress)
    return report
