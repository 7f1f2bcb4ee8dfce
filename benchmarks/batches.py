"""Batches in lockstep: recorded outputs side by side as rows, padded to one width and packed.

Replayed without a model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from hf_retrieval_assist import OutputMemory, SamAssistant

from .acceptance import cpu_time, gpu_time
from .report import Report, Table
from .simulation import simulate
from .traces import Trace, read_traces

ROWS = (1, 8, 32)
COSTS = {"a CPU": cpu_time, "a GPU": gpu_time}

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


def replay(table: Table, trace: Trace, rows: int, machine: str, packed: bool) -> None:
    """One recording in batches, drafted by suffix trees alone, the memory empty at first."""
    cost = COSTS[machine]

    def of_padded(tokens: int) -> float:
        return cost(rows * tokens)

    found = simulate(
        SamAssistant(fallback=None, memory=OutputMemory()),
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-traces", nargs="+", help="names of recordings; all by default")
    parser.add_argument("--batch-requests", type=int, default=96, help="of each recording")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
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
