"""What a forward over n tokens costs, t(n): by dtype, by PyTorch's operators and by ours.

    python -m benchmarks forwards --context 0 --gguf float32=FILE Q8_0=FILE

Drafts are worth as much as this curve is flat. All in one process, in turn. llama.cpp needs
`llama_cpp` (llama-cpp-python) and the same weights, which `python -m benchmarks beside --llama`
makes files of.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from hf_retrieval_assist.engines.cpu.reroute import reroute
from hf_retrieval_assist.host.transformers_private import CACHE

from .inputs import load, model_name
from .llama_engine import LlamaCpp
from .report import Report
from .timing import orders

SIZES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 512
DTYPES = ("float32", "bfloat16")
# Forwards of one kind in a row, the first of which finds another library's threads still spinning
# and is not counted, and how often their turn comes.
BURST, REPEATS = 4, 6

COLUMNS = {"variant": "dtype, by", "tokens": "n", "ms": "ms", "ratio": "t(n) / t(1)"}

Variant = Callable[[list[int]], float]
"""Seconds of a forward over ids."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens in the cache")
    parser.add_argument("--gguf", nargs="+", default=[], help="WEIGHTS=FILE, for llama.cpp")


@torch.no_grad()
def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    models = {}
    for dtype in arguments.dtypes:
        progress(f"loading the model in {dtype}")
        models[dtype] = load(arguments, dtype)[0]
    return measure(models, arguments, progress)


def measure(
    models: Mapping[str, Any], arguments: argparse.Namespace, progress: Callable[[str], None]
) -> Report:
    """Every variant over every number of tokens; medians."""
    sizes, repeats = (SIZES[:3], 1) if arguments.quick else (SIZES, REPEATS)
    settings = {"model": model_name(arguments), "context": arguments.context, "sizes": sizes}
    report = Report("forwards", settings | {"repeats": repeats, "burst": BURST})
    table = report.table("A forward over n tokens", COLUMNS)
    variants: dict[str, Variant] = {}
    for name, model in models.items():
        cache = filled_cache(model, arguments.context)
        variants[f"{name}, PyTorch's"] = partial(forward_seconds, model, cache, False)
        variants[f"{name}, ours"] = partial(forward_seconds, model, cache, True)
    for weights, file in (entry.split("=", 1) for entry in arguments.gguf):
        cache_dtype = weights if weights in DTYPES else DTYPES[0]
        engine = LlamaCpp(Path(file), cache_dtype, torch.get_num_threads())
        variants[f"{weights}, llama.cpp"] = partial(llama_seconds, engine, arguments.context)
    found: dict[str, dict[int, float]] = {name: {} for name in variants}
    for n in sizes:
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for order in orders(list(variants), repeats):
            progress(f"{n} tokens")
            for name in order:
                ids = random_ids(n)
                seconds[name] += [variants[name](ids) for _ in range(BURST)][1:]
        for name, times in seconds.items():
            found[name][n] = median(times)
    for name, medians in found.items():
        for n, spent in medians.items():
            table.add(variant=name, tokens=n, ms=1e3 * spent, ratio=spent / medians[1])
    return report


def random_ids(count: int) -> list[int]:
    """Ids of any model's vocabulary."""
    ids: list[int] = torch.randint(1, 10_000, (count,)).tolist()
    return ids


def filled_cache(model: Any, context: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    if context:
        ids = torch.tensor([random_ids(context)]) % model.config.vocab_size
        model(ids, **{CACHE: cache}, logits_to_keep=1)
    return cache


def forward_seconds(model: Any, cache: DynamicCache, routed: bool, ids: list[int]) -> float:
    cache = copy.deepcopy(cache)
    with reroute(routed, verifying=True):
        started = time.perf_counter()
        model(torch.tensor([ids]) % model.config.vocab_size, **{CACHE: cache})
        return time.perf_counter() - started


def llama_seconds(engine: LlamaCpp, context: int, ids: list[int]) -> float:
    engine.clear()
    if context:
        engine.decode(random_ids(context), 0, 1)
    started = time.perf_counter()
    engine.decode(ids, context, len(ids))
    return time.perf_counter() - started
