"""Accepted tokens on recorded requests, with a perfect verifier and no model.

Every preset beside prompt lookup, the ablations that the papers report, and what the accepted
tokens are worth where verifying n tokens takes t(n): on a GPU (1 + 0.003 (n - 1)) and on two CPU
cores (measured with Gemma-3-270M in float32).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.draft_models.sequoia import OptimalTrees

from . import variants
from .report import Report, Table
from .simulation import SimulationReport, simulate
from .traces import SHIPPED, Trace, read_traces

CPU_TOKENS = (1, 2, 4, 8, 16, 32, 64)
CPU_TIMES = (1.0, 1.94, 2.31, 2.16, 2.56, 3.29, 5.0)

TREE_SIZES = (4, 8, 16, 32, 64, 128)
# How often the child of each rank is accepted where its parent was.
ACCEPTANCE_VECTORS = {
    "token recycling, Gemma-3-270M": (0.352, 0.093, 0.052, 0.037, 0.027, 0.020, 0.017, 0.014),
    "a good draft model": (0.75, 0.09, 0.04, 0.02, 0.015, 0.01, 0.008, 0.006),
}

COLUMNS = {
    "trace": "trace",
    "variant": "variant",
    "accepted": "tokens/step",
    "nodes": "nodes/step",
    "draft": "draft us/step",
    "update": "update us/token",
    "gpu": "x GPU",
    "cpu": "x CPU",
}


def gpu_time(n: int) -> float:
    """Time of verifying n tokens, in units of one."""
    return 1 + 0.003 * (n - 1)


def cpu_time(n: int) -> float:
    """The CPU's `gpu_time`; it grows beyond the measured range as at its end."""
    if n <= CPU_TOKENS[-1]:
        return float(np.interp(n, CPU_TOKENS, CPU_TIMES))
    return CPU_TIMES[-1] * n / CPU_TOKENS[-1]


@dataclass
class Study:
    """A question, the variants that answer it, and the traces it is asked of."""

    title: str
    variants: Callable[[Trace, Path], dict[str, Callable[[], Assistant]]]
    speedups: bool = False


STUDIES = {
    "presets": Study("Presets beside prompt lookup", variants.presets, speedups=True),
    "sam": Study("SAM-Decoding: what each part brings", variants.sam_parts),
    "rest": Study("REST: datastore size and longest match", variants.rest_sizes),
    "suffix": Study(
        "SuffixDecoding: nodes per match, and what is learnt", variants.suffix_settings
    ),
}


def measure(
    table: Table,
    trace: Trace,
    name: str,
    make: Callable[[], Assistant],
    speedups: bool,
) -> None:
    """Replay a trace through a fresh assistant, and once more under each t(n)."""
    vocab_size = trace.vocab_size
    counted = simulate(make(), trace.requests, vocab_size=vocab_size)
    gains: dict[str, float | None] = {}
    if speedups:
        for key, cost in (("gpu", gpu_time), ("cpu", cpu_time)):
            gains[key] = simulate(make(), trace.requests, cost, vocab_size).speedup
    table.add(trace=trace.name, variant=name, **_figures(counted), **gains)


def _figures(report: SimulationReport) -> dict[str, float]:
    return {
        "accepted": report.mean_accepted_tokens,
        "nodes": report.nodes_per_step,
        "draft": report.draft_us,
        "update": report.update_us_per_token,
    }


def sequoia_trees(report: Report) -> None:
    """Sequoia's figure 3: expected tokens of its tree, of k chains and of one, from theory."""
    columns = {"draft": "draft", "nodes": "nodes", "chain": "one chain", "chains": "best k chains"}
    table = report.table("Sequoia: expected tokens/step", columns | {"k": "k", "tree": "tree"})
    for draft, acceptance in ACCEPTANCE_VECTORS.items():
        trees = OptimalTrees(acceptance, max(TREE_SIZES) + 1)
        for nodes in TREE_SIZES:
            chains = {k: chain_tokens(acceptance, k, nodes) for k in range(1, len(acceptance) + 1)}
            best = max(chains, key=chains.__getitem__)
            tree = float(trees.values[nodes + 1, -1])
            table.add(
                draft=draft, nodes=nodes, chain=chains[1], chains=chains[best], k=best, tree=tree
            )


def chain_tokens(acceptance: Sequence[float], chains: int, nodes: int) -> float:
    """Expected tokens of a step that verifies k chains, equally long, below the k best children.

    `acceptance[r]` is the probability that the child of rank r is accepted where its parent was.
    """
    length = nodes // chains
    below_first = sum(acceptance[0] ** depth for depth in range(length))
    return 1 + sum(acceptance[:chains]) * below_first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traces", type=Path, default=SHIPPED, help="folder of .npz or .jsonl recordings"
    )
    parser.add_argument("--tokenizer", help="folder or hub id; needed for .jsonl")
    parser.add_argument("--requests", type=int, help="only the first requests of every trace")
    parser.add_argument(
        "--study", choices=STUDIES, nargs="+", default=list(STUDIES), help="default: all"
    )


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    requests = arguments.requests or (5 if arguments.quick else None)
    traces = [trace.head(requests) for trace in _load(arguments.traces, arguments.tokenizer)]
    report = Report(
        "acceptance",
        {"traces": arguments.traces.name, "requests": requests, "seed": arguments.seed},
    )
    with _workspace() as folder:
        for study in (STUDIES[name] for name in arguments.study):
            table = report.table(study.title, _columns(study))
            for trace, name, make in _plan(study, traces, folder):
                progress(f"{study.title}: {trace.name}, {name}")
                measure(table, trace, name, make, study.speedups)
    sequoia_trees(report)
    return report


def _columns(study: Study) -> dict[str, str]:
    without = () if study.speedups else ("gpu", "cpu")
    return {key: heading for key, heading in COLUMNS.items() if key not in without}


def _plan(
    study: Study, traces: Iterable[Trace], folder: Path
) -> Iterator[tuple[Trace, str, Callable[[], Assistant]]]:
    for trace in traces:
        for name, make in study.variants(trace, folder).items():
            yield trace, name, make


def _load(folder: Path, tokenizer: str | None) -> list[Trace]:
    if tokenizer is None:
        return read_traces(folder)
    from transformers import AutoTokenizer

    return read_traces(folder, AutoTokenizer.from_pretrained(tokenizer))


@contextmanager
def _workspace() -> Iterator[Path]:
    """A folder for the datastores that variants build."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
