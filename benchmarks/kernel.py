"""The kernels for few rows: linear layers, attention, and what they change.

The last table counts, over real text, how often the most probable next token changes against plain
one-row forwards, beside what PyTorch's own forwards of several rows change.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from hf_retrieval_assist.demo_model import load_demo_model
from hf_retrieval_assist.kernels.attention import plain_attention
from hf_retrieval_assist.kernels.linear import transposed_linear
from hf_retrieval_assist.kernels.reroute import reroute
from hf_retrieval_assist.kernels.skinny import kernel_attention, kernel_linear

from .report import Report, Table
from .timing import alternate

ROWS = (1, 2, 4, 8, 16, 32)
WEIGHTS = ((262144, 640, "float32"), (262144, 640, "bfloat16"), (4096, 4096, "float32"))
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

Scope = Callable[[], AbstractContextManager[object]]


def time_columns(first: str) -> dict[str, str]:
    return {"what": first, "method": "milliseconds", **{str(n): f"n={n}" for n in ROWS}}


def time_rows(
    table: Table,
    what: str,
    calls: Mapping[str, Callable[[int], object]],
    arguments: argparse.Namespace,
    progress: Callable[[str], None],
) -> None:
    """A row for each method: median milliseconds of `calls[method](n)` for every n of ROWS."""
    rows: dict[str, dict[str, float]] = {name: {} for name in calls}
    for n in ROWS:
        for call in calls.values():
            call(n)
        seconds, _ = alternate(
            {name: partial(call, n) for name, call in calls.items()},
            arguments.kernel_repeats,
            lambda text, n=n: progress(f"{what}, n={n}: {text}"),
        )
        for name in calls:
            rows[name][str(n)] = 1e3 * seconds[name]
    for name, times in rows.items():
        table.add(what=what, method=name, **times)


def linears(report: Report, arguments: argparse.Namespace, progress: Callable[[str], None]) -> None:
    table = report.table("Linear layers", time_columns("weight"))
    for outputs, depth, dtype in WEIGHTS:
        weight = torch.randn(outputs, depth).to(getattr(torch, dtype))
        x = torch.randn(ROWS[-1], depth).to(weight.dtype)
        calls = {
            "F.linear": lambda n, x=x, weight=weight: F.linear(x[:n], weight),
            "transposed": lambda n, x=x, weight=weight: transposed_linear(x[:n], weight, None),
            "kernel": lambda n, x=x, weight=weight: kernel_linear(x[:n], weight, None),
        }
        time_rows(table, f"{outputs} x {depth} {dtype}", calls, arguments, progress)


def attentions(
    report: Report, arguments: argparse.Namespace, progress: Callable[[str], None]
) -> None:
    table = report.table("Attention under a mask, 18 layers", time_columns("heads, slots"))
    for heads, groups, depth in HEADS:
        for slots in SLOTS:
            for dtype in (torch.float32, torch.bfloat16):
                calls = _attention_calls(heads, groups, depth, slots, dtype)
                what = f"{heads}/{groups} x {depth}, {slots} {str(dtype)[6:]}"
                time_rows(table, what, calls, arguments, progress)


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
    model(piece[None, :PREFIX], past_key_values=cache, logits_to_keep=1)
    found = []
    for part in piece[PREFIX:].split(rows):
        with scope():
            found.append(model(part[None], past_key_values=cache).logits[0].float())
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel-repeats", type=int, default=9)
    parser.add_argument("--flip-positions", type=int, default=256, help="of real text; 0: none")
    parser.add_argument("--flip-rows", type=int, default=16, help="tokens of one forward")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    if arguments.quick:
        arguments.kernel_repeats, arguments.flip_positions = 1, PIECE
    names = ("kernel_repeats", "flip_positions", "flip_rows")
    report = Report("kernel", {name: getattr(arguments, name) for name in names})
    linears(report, arguments, progress)
    attentions(report, arguments, progress)
    for dtype in (torch.float32, torch.bfloat16):
        model, tokenizer = load_demo_model(dtype)
        pieces = real_text(tokenizer, max(arguments.flip_positions, 1))
        if arguments.flip_positions:
            flips(report, model, pieces, arguments.flip_rows, progress)
    return report
