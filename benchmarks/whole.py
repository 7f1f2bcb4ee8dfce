"""Whole forwards of Gemma-3-270M over n tokens without a context, also beside llama.cpp.

    python -m benchmarks whole --gguf float32=FILE bfloat16=FILE Q8_0=FILE

All in one process, in turn. llama.cpp needs `llama_cpp` (llama-cpp-python) and the same weights,
which `python -m benchmarks.llama_engine --write` makes files of.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from hf_retrieval_assist.demo_model import load_demo_model
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.kernels.reroute import reroute

from .llama_engine import LlamaCpp
from .report import Report, Table
from .timing import orders

DTYPES = ("float32", "bfloat16")
SIZES = (1, 4, 8, 16, 32)
# Forwards of one kind in a row, the first of which finds another library's threads still spinning
# and is not counted, and how often their turn comes.
BURST, REPEATS = 4, 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gguf", nargs="+", default=[], help="WEIGHTS=FILE, for llama.cpp")


@torch.no_grad()
def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    models = {}
    for dtype in DTYPES:
        progress(f"loading the model in {dtype}")
        models[dtype] = load_demo_model(getattr(torch, dtype))[0]
    files = dict(entry.split("=", 1) for entry in arguments.gguf)
    return measure(models, files, arguments.quick, progress)


def measure(
    models: Mapping[str, Any],
    files: Mapping[str, str],
    quick: bool,
    progress: Callable[[str], None],
) -> Report:
    """By PyTorch's operators, by ours, and by llama.cpp where a file has the weights of a dtype, or
    weights that are no dtype's."""
    sizes, repeats = (SIZES[:2], 1) if quick else (SIZES, REPEATS)
    report = Report("whole", {"repeats": repeats, "burst": BURST})
    columns = {"variant": "dtype, by", **{str(n): f"n={n}" for n in sizes}}
    table = report.table("Milliseconds of a forward over n tokens", columns)
    for dtype, model in models.items():
        variants = {
            "PyTorch": partial(forward_seconds, model, False),
            "ours": partial(forward_seconds, model, True),
        }
        if dtype in files:
            variants["llama.cpp"] = llama_variant(files[dtype], dtype)
        time_variants(table, dtype, variants, sizes, repeats, progress)
    for weights in [weights for weights in files if weights not in models]:
        variants = {"llama.cpp": llama_variant(files[weights], DTYPES[0])}
        time_variants(table, weights, variants, sizes, repeats, progress)
    return report


def llama_variant(file: str, cache_dtype: str) -> Callable[[list[int]], float]:
    return partial(llama_seconds, LlamaCpp(Path(file), cache_dtype, torch.get_num_threads()))


def time_variants(
    table: Table,
    dtype: str,
    variants: Mapping[str, Callable[[list[int]], float]],
    sizes: tuple[int, ...],
    repeats: int,
    progress: Callable[[str], None],
) -> None:
    """A row of median milliseconds for each variant, a function of the ids to seconds."""
    ms: dict[str, dict[str, float]] = {name: {} for name in variants}
    for n in sizes:
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for order in orders(list(variants), repeats):
            progress(f"{dtype}, {n} tokens")
            for name in order:
                ids = torch.randint(1000, 200_000, (n,)).tolist()
                seconds[name] += [variants[name](ids) for _ in range(BURST)][1:]
        for name in variants:
            ms[name][str(n)] = 1e3 * median(seconds[name])
    for name, row in ms.items():
        table.add(variant=f"{dtype}, {name}", **row)


def forward_seconds(model: Any, routed: bool, ids: list[int]) -> float:
    cache = DynamicCache(config=model.config)
    with reroute(routed):
        started = time.perf_counter()
        model(torch.tensor([ids]) % model.config.vocab_size, **{CACHE: cache})
        return time.perf_counter() - started


def llama_seconds(engine: LlamaCpp, ids: list[int]) -> float:
    engine.clear()
    started = time.perf_counter()
    engine.decode(ids, 0, len(ids))
    return time.perf_counter() - started
