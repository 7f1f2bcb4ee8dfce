"""What a forward over n tokens costs, t(n): Gemma-3-270M by dtype, with and without our kernels.

Drafts are worth as much as this curve is flat. Measured by the decoding loop itself, on drafts of
random tokens of the sizes in question.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from hf_retrieval_assist.cost_measurement import measure_cost
from hf_retrieval_assist.demo_model import load_demo_model
from hf_retrieval_assist.planning.cost_model import CostModel
from hf_retrieval_assist.planning.cost_store import CostModels

from .report import Report
from .timing import orders

SIZES = (1, 2, 4, 8, 16, 32, 64)
CACHE_LENGTH = 512
REPEATS = 3
DTYPES = ("float32", "bfloat16")

COLUMNS = {"variant": "dtype, kernels", "tokens": "n", "ms": "ms", "ratio": "t(n) / t(1)"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    models = {}
    for dtype in arguments.dtypes:
        progress(f"loading the model in {dtype}")
        models[dtype] = load_demo_model(getattr(torch, dtype))[0]
    return measure(models, arguments, progress)


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
