"""`python -m benchmarks [BENCHMARK ...] [--quick]`: measure, print tables, write JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from . import (
    ablation,
    accelerator,
    acceptance,
    batches,
    datastore,
    edits,
    fallbacks,
    forwards,
    kernel,
    model,
    overhead,
    plots,
    propose,
    repeated,
    replay,
    requests,
    roofline,
    spec_bench,
    step,
    structured,
    structures,
    whole,
)
from .report import environment

BENCHMARKS: dict[str, ModuleType] = {
    "structures": structures,
    "datastore": datastore,
    "acceptance": acceptance,
    "ablation": ablation,
    "edits": edits,
    "batches": batches,
    "propose": propose,
    "forwards": forwards,
    "replay": replay,
    "accelerator": accelerator,
    "model": model,
    "spec_bench": spec_bench,
    "fallbacks": fallbacks,
    "repeated": repeated,
    "requests": requests,
    "kernel": kernel,
    "roofline": roofline,
    "whole": whole,
    "step": step,
    "overhead": overhead,
    "structured": structured,
}
# About what each takes with its default settings on two cores, in minutes.
UNKNOWN_MINUTES = 5.0
MINUTES = {
    "structures": 1.0,
    "datastore": 0.5,
    "acceptance": 0.5,
    "ablation": 9.5,
    "edits": 1.0,
    "batches": 0.5,
    "propose": 0.4,
    "forwards": 4.5,
    "replay": 3.5,
    "accelerator": 10.0,
    "model": 8.5,
    "spec_bench": 4.5,
    "fallbacks": 3.5,
    "repeated": 5.0,
    "requests": 4.0,
    "kernel": 2.5,
    "roofline": 1.0,
    "whole": 1.5,
    "step": 4.0,
    "overhead": 4.0,
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "benchmark",
        nargs="*",
        help=f"any of {', '.join(BENCHMARKS)} (default: all but structured; accelerator on a GPU)",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/out"), help="for JSON")
    parser.add_argument("--plot", action="store_true", help="also draw figures (extra `plot`)")
    for name, benchmark in BENCHMARKS.items():
        benchmark.add_arguments(parser.add_argument_group(name, benchmark.__doc__.splitlines()[0]))
    arguments = parser.parse_args(argv)
    unknown = set(arguments.benchmark) - BENCHMARKS.keys()
    if unknown:
        parser.error(f"unknown benchmark {sorted(unknown)}, expected {list(BENCHMARKS)}")
    return arguments


class Progress:
    """Says which of the chosen benchmarks is at what, and how long all of them may still take.

    Over the same line on a terminal, else a line each.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._at = -1
        self._started = self._begun = time.perf_counter()

    def next(self) -> str:
        """Go on to the next benchmark; returns its name."""
        self._at += 1
        self._begun = time.perf_counter()
        return self.names[self._at]

    @property
    def minutes_left(self) -> float:
        spent = (time.perf_counter() - self._begun) / 60
        left = self.names[self._at :]
        current, *waiting = (MINUTES.get(name, UNKNOWN_MINUTES) for name in left)
        return max(current - spent, 0) + sum(waiting)

    def __call__(self, text: str) -> None:
        minutes = (time.perf_counter() - self._started) / 60
        line = (
            f"[{self._at + 1} of {len(self.names)}: {self.names[self._at]}, {minutes:.1f} min, "
            f"about {self.minutes_left:.0f} to go] {text}"
        )
        terminal = sys.stderr.isatty()
        sys.stderr.write(f"\r\033[K{line[:118]}" if terminal else f"{line}\n")
        sys.stderr.flush()


def chosen(names: Sequence[str]) -> Sequence[str]:
    """The named benchmarks, or all that this machine is for."""
    if names:
        return names
    gpu = torch.cuda.is_available()
    # The libraries of structured output lie in an environment of their own.
    left_out = {"structured"} if gpu else {"structured", "accelerator"}
    return [name for name in BENCHMARKS if name not in left_out]


def main(argv: list[str] | None = None) -> None:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    if arguments.plot:
        plots.require_matplotlib()
    machine = environment()
    print(f"{machine['cpu']}, {machine['cores']} cores, GPU: {machine['gpu'] or 'none'}")
    progress = Progress(chosen(arguments.benchmark))
    for _ in progress.names:
        report = BENCHMARKS[progress.next()].run(arguments, progress)
        sys.stderr.write("\n")
        path = report.save(arguments.output)
        print(f"{report}\n\nwritten to {path}\n")
        if arguments.plot:
            for figure in plots.draw(report, arguments.output):
                print(f"drawn to {figure}")


if __name__ == "__main__":
    main()
