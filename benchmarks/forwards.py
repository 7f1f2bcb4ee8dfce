"""What a forward over n tokens costs, t(n): Gemma-3-270M by dtype, with and without our kernels.

Drafts are worth as much as this curve is flat. Measured by the decoding loop itself, on drafts of
random tokens of the sizes in question. Then whole forwards over n tokens without a context, where
wanted beside llama.cpp's on the same weights:

    python -m benchmarks forwards --gguf float32=FILE bfloat16=FILE

which needs `llama_cpp` (llama-cpp-python).
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
from hf_retrieval_assist.kernels.reroute import reroute
from hf_retrieval_assist.planning.cost_measurement import measure_cost
from hf_retrieval_assist.planning.cost_model import CostModel
from hf_retrieval_assist.planning.cost_store import CostModels

from .llama_engine import LlamaCpp
from .report import Report, Table
from .timing import orders

SIZES = (1, 2, 4, 8, 16, 32, 64)
CACHE_LENGTH = 512
REPEATS = 3
DTYPES = ("float32", "bfloat16")
# Without a context: tokens of a forward; forwards of one kind in a row, the first of which finds
# another library's threads still spinning and is not counted; how often their turn comes.
WHOLE_SIZES = (1, 4, 8, 16, 32)
BURST, WHOLE_REPEATS = 4, 6

COLUMNS = {"variant": "dtype, kernels", "tokens": "n", "ms": "ms", "ratio": "t(n) / t(1)"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--gguf", nargs="+", default=[], help="DTYPE=FILE, the model for llama.cpp")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    models = {}
    for dtype in arguments.dtypes:
        progress(f"loading the model in {dtype}")
        models[dtype] = load_demo_model(getattr(torch, dtype))[0]
    report = measure(models, arguments, progress)
    files = dict(entry.split("=", 1) for entry in arguments.gguf)
    with torch.no_grad():
        compare_whole(report, models, files, arguments.quick, progress)
    return report


def measure(
    models: Mapping[str, Any], arguments: argparse.Namespace, progress: Callable[[str], None]
) -> Report:
    """t(n) of every model with PyTorch's operators and with ours, in turn; medians."""
    sizes, repeats = (SIZES[:3], 1) if arguments.quick else (SIZES, REPEATS)
    report = Report("forwards", {"sizes": sizes, "cache_length": CACHE_LENGTH, "repeats": repeats})
    table = report.table("A forward over n tokens", COLUMNS)
    variants: dict[str, Callable[[], CostModel]] = {}
    for name, model in models.items():
        # Nothing may end the measurement early.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        variants[f"{name}, PyTorch's"] = partial(curve, model, sizes, reroute=False)
        variants[f"{name}, ours"] = partial(curve, model, sizes, reroute=True)
    found: dict[str, list[CostModel]] = {name: [] for name in variants}
    for order in orders(list(variants), repeats):
        for name in order:
            progress(f"{name}, {len(found[name]) + 1} of {repeats}")
            found[name].append(variants[name]())
    for name, costs in found.items():
        seconds = {n: median(cost.seconds(n) for cost in costs) for n in sizes}
        for n in sizes:
            ratio = seconds[n] / seconds[1]
            table.add(variant=name, tokens=n, ms=1e3 * seconds[n], ratio=ratio)
    return report


def curve(model: Any, sizes: tuple[int, ...], reroute: bool) -> CostModel:
    return measure_cost(model, sizes, CostModels(), cache_length=CACHE_LENGTH, reroute=reroute)


def compare_whole(
    report: Report,
    models: Mapping[str, Any],
    files: Mapping[str, str],
    quick: bool,
    progress: Callable[[str], None],
) -> None:
    """Forwards without a context: PyTorch's, ours, and llama.cpp's where a file has the weights."""
    table = report.table("Whole forwards without a context", {"variant": "dtype, by"})
    sizes, repeats = (WHOLE_SIZES[:2], 1) if quick else (WHOLE_SIZES, WHOLE_REPEATS)
    table.columns = {**table.columns, **{str(n): f"n={n}" for n in sizes}}
    for dtype, model in models.items():
        variants = {
            "PyTorch": partial(forward_seconds, model, False),
            "ours": partial(forward_seconds, model, True),
        }
        if dtype in files:
            engine = LlamaCpp(Path(files[dtype]), dtype, torch.get_num_threads())
            variants["llama.cpp"] = partial(llama_seconds, engine)
        time_whole(table, dtype, variants, sizes, repeats, progress)


def time_whole(
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
            progress(f"{dtype}, {n} tokens without a context")
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
        model(torch.tensor([ids]) % model.config.vocab_size, past_key_values=cache)
        return time.perf_counter() - started


def llama_seconds(engine: LlamaCpp, ids: list[int]) -> float:
    engine.clear()
    started = time.perf_counter()
    engine.decode(ids, 0, len(ids))
    return time.perf_counter() - started
