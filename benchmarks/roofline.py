"""How near linear layers of few rows come to what the memory and the arithmetic of this CPU allow.

A layer of n rows reads its weights once and multiplies each n times: at few rows it can go no
faster than memory brings the weights, at many no faster than large products run. Both bounds are
measured beside it: a plain read of the same bytes (a dot product of the weights with themselves),
and PyTorch's product of two large square matrices.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from hf_retrieval_assist.kernels.skinny import kernel_linear

from .report import Report
from .timing import alternate

ROWS = (1, 2, 4, 8, 16, 32, 64)
# The vocabulary layer of Gemma-3-270M.
SHAPE = (262144, 640)
SQUARE = 2048
DTYPES = ("float32", "bfloat16")

COLUMNS = {
    "dtype": "dtype",
    "method": "by",
    "rows": "rows",
    "ms": "ms",
    "gbytes": "GB/s",
    "gflops": "GFLOP/s",
    "share": "% of the bound",
}
BOUNDS = {"dtype": "dtype", "gbytes": "plain read, GB/s", "gflops": "large product, GFLOP/s"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--roofline-repeats", type=int, default=9)


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    repeats, shape, square = arguments.roofline_repeats, SHAPE, SQUARE
    if arguments.quick:
        repeats, shape, square = 1, (4096, 640), 256
    report = Report("roofline", {"shape": list(shape), "square": square, "repeats": repeats})
    bounds = report.table("What bounds linear layers", BOUNDS)
    table = report.table("Linear layers of few rows", COLUMNS)
    for name in DTYPES:
        dtype = getattr(torch, name)
        weight = torch.randn(shape).to(dtype)
        gbytes, gflops = measure_bounds(weight, square, repeats, progress)
        bounds.add(dtype=name, gbytes=gbytes, gflops=gflops)
        for rows in ROWS:
            seconds = measure_layer(weight, rows, repeats, progress)
            bound = max(weight.nbytes / gbytes, 2 * rows * weight.numel() / gflops) / 1e9
            for method, spent in seconds.items():
                table.add(
                    dtype=name,
                    method=method,
                    rows=rows,
                    ms=1e3 * spent,
                    gbytes=weight.nbytes / spent / 1e9,
                    gflops=2 * rows * weight.numel() / spent / 1e9,
                    share=100 * bound / spent,
                )
    return report


def measure_bounds(
    weight: torch.Tensor, square: int, repeats: int, progress: Callable[[str], None]
) -> tuple[float, float]:
    """GB/s of a plain read of the weight's bytes, GFLOP/s of a product of square matrices."""
    numbers = weight.view(-1).view(torch.float32)
    factor = torch.randn(square, square).to(weight.dtype)
    calls = {
        "read": lambda: torch.dot(numbers, numbers),
        "product": lambda: torch.mm(factor, factor.T),
    }
    for call in calls.values():
        call()
    seconds, _ = alternate(calls, repeats, progress)
    return weight.nbytes / seconds["read"] / 1e9, 2 * square**3 / seconds["product"] / 1e9


def measure_layer(
    weight: torch.Tensor, rows: int, repeats: int, progress: Callable[[str], None]
) -> dict[str, float]:
    """Seconds by the kernel and by PyTorch."""
    x = torch.randn(rows, weight.shape[1]).to(weight.dtype)
    calls = {
        "kernel": partial(kernel_linear, x, weight, None),
        "PyTorch": partial(F.linear, x, weight),
    }
    for call in calls.values():
        call()
    what = f"{weight.dtype}, {rows} rows"
    seconds, _ = alternate(calls, repeats, lambda text: progress(f"{what}: {text}"))
    return seconds
