"""Batches in lockstep: recorded outputs side by side as rows, padded to one width and packed.

Replayed without a model; or, with `--batch-forwards`, what forwards of the demo model over the rows
of a batch take, padded and packed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from hf_retrieval_assist import SuffixAssistant, simulate
from hf_retrieval_assist.demo_model import load_demo_model
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.kernels.reroute import reroute
from hf_retrieval_assist.row_text import RowText
from hf_retrieval_assist.token_tree import TokenTree
from hf_retrieval_assist.verification.fixed_verifier import ForwardOptions
from hf_retrieval_assist.verification.kv_cache import SlotCache
from hf_retrieval_assist.verification.tiers import Service, Tier
from hf_retrieval_assist.verification.tree_attention import layer_masks, single_mask

from .acceptance import cpu_time, gpu_time
from .report import Report, Table
from .timing import alternate
from .traces import Trace, read_traces

ROWS = (1, 8, 32)
COSTS = {"a CPU": cpu_time, "a GPU": gpu_time}
CACHED = 150  # tokens of each row in the cache
# Tokens fed of each row; none of one that has ended.
SHAPES: dict[str, list[int]] = {
    "8 rows of 1": [1] * 8,
    "8 rows of 3": [3] * 8,
    "8 rows, one of 9": [9] + [1] * 7,
    "8 rows, 2 left": [1, 1] + [0] * 6,
    "32 rows of 1": [1] * 32,
    "32 rows of 2": [2] * 32,
    "32 rows of 1 and 2": [1, 2] * 16,
    "32 rows, one of 16": [16] + [1] * 31,
}

REPLAYED = {
    "trace": "outputs",
    "rows": "rows",
    "machine": "t(n) of",
    "layout": "rows are",
    "accepted": "tokens/row-step",
    "nodes": "nodes/row-step",
    "forwards": "forwards",
    "plain_forwards": "plain's",
    "running": "rows running",
    "speedup": "speedup",
}
TIMED = {"shape": "tokens fed", "padded": "padded, ms", "packed": "packed, ms"}


def replay(table: Table, trace: Trace, rows: int, machine: str, packed: bool) -> None:
    """One recording in batches, drafted by suffix trees alone, the memory empty at first."""
    cost = COSTS[machine]

    def of_padded(tokens: int) -> float:
        return cost(rows * tokens)

    found = simulate(
        SuffixAssistant(fallback=None),
        trace.requests,
        cost if packed else of_padded,
        trace.vocab_size,
        batch_size=rows,
        packed=packed,
    )
    table.add(
        trace=trace.name,
        rows=rows,
        machine=machine,
        layout="packed" if packed else "padded",
        accepted=found.mean_accepted_tokens,
        nodes=found.nodes_per_step,
        forwards=found.forwards,
        plain_forwards=found.plain_forwards,
        running=found.steps / found.forwards,
        speedup=found.speedup,
    )


class Batch:
    """Rows of one random text behind its prefill, and drafts of so many tokens."""

    @torch.no_grad()
    def __init__(self, model: Any, widths: Sequence[int], packed: bool):
        config = model.config.get_text_config(decoder=True)
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(1, config.vocab_size, (1, CACHED), generator=random)
        cache = DynamicCache(config=config)
        model(input_ids=ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        rows = len(widths)
        cache.batch_repeat_interleave(rows)
        ids = ids.expand(rows, -1)
        kwargs = {
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(CACHED).expand(rows, -1),
            CACHE: (cache := SlotCache.around(cache, config)),
            "use_cache": True,
        }
        rules = layer_masks(config) or single_mask(config)
        service = Service(Tier.TREE, "", rules, packed=packed)
        self.verifier = service.verifier(model, cache, kwargs, ids, ForwardOptions())
        self.rows = [RowText(row, ids[row], 1) for row in range(rows)]
        for row, width in zip(self.rows, widths, strict=True):
            row.generated.append(1)
            row.finished = width == 0
        drafts = [max(0, width - 1) for width in widths]
        self.trees = [TokenTree.chain([1] * n, [1.0] * n) for n in drafts]

    @torch.no_grad()
    def forward(self) -> None:
        """Feed the drafts, and keep nothing."""
        with reroute(True):
            verified = self.verifier.forward(self.rows, self.trees)
        self.verifier.keep(self.rows, verified, [[] for _ in self.rows])


def time_forwards(
    report: Report, model: Any, repeats: int, progress: Callable[[str], None]
) -> None:
    """Forwards over the same tokens, padded and packed in turn."""
    table = report.table(f"A forward over the rows of a batch, {model.dtype}", TIMED)
    for shape, widths in SHAPES.items():
        batches = {name: Batch(model, widths, name == "packed") for name in ("padded", "packed")}
        calls = {name: batch.forward for name, batch in batches.items()}
        for call in calls.values():
            call()
        seconds, _ = alternate(calls, repeats, partial(_show, progress, shape))
        table.add(shape=shape, **{name: 1e3 * value for name, value in seconds.items()})


def _show(progress: Callable[[str], None], shape: str, text: str) -> None:
    progress(f"{shape}: {text}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-traces", nargs="+", help="names of recordings; all by default")
    parser.add_argument("--batch-requests", type=int, default=96, help="of each recording")
    parser.add_argument("--batch-forwards", action="store_true", help="time forwards instead")
    parser.add_argument("--batch-repeats", type=int, default=7)


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    if arguments.batch_forwards:
        repeats = 1 if arguments.quick else arguments.batch_repeats
        report = Report("batch-forwards", {"cached": CACHED, "repeats": repeats})
        time_forwards(report, load_demo_model()[0], repeats, progress)
        return report
    requests = 4 if arguments.quick else arguments.batch_requests
    report = Report("batches", {"traces": arguments.traces.name, "requests": requests})
    table = report.table("Recorded outputs side by side", REPLAYED)
    traces = read_traces(arguments.traces)
    for trace in (t for t in traces if t.name in (arguments.batch_traces or [t.name])):
        for rows in ROWS[1:2] if arguments.quick else ROWS:
            for machine in COSTS:
                for packed in (False, True) if rows > 1 else (True,):
                    progress(f"{trace.name}: {rows} rows, {machine}")
                    replay(table, trace.head(requests), rows, machine, packed)
    return report
