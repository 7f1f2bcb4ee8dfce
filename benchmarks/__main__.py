"""`python -m benchmarks [BENCHMARK ...] [--quick]`: measure, print tables, write JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from . import (
    ablation,
    accelerator,
    acceptance,
    batches,
    datastore,
    fallbacks,
    forwards,
    kernel,
    model,
    overhead,
    plots,
    repeated,
    replay,
    spec_bench,
    step,
    structures,
)
from .report import environment

BENCHMARKS: dict[str, ModuleType] = {
    "structures": structures,
    "datastore": datastore,
    "acceptance": acceptance,
    "ablation": ablation,
    "batches": batches,
    "forwards": forwards,
    "replay": replay,
    "accelerator": accelerator,
    "model": model,
    "spec_bench": spec_bench,
    "fallbacks": fallbacks,
    "repeated": repeated,
    "kernel": kernel,
    "step": step,
    "overhead": overhead,
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "benchmark", nargs="*", help=f"any of {', '.join(BENCHMARKS)} (default: all)"
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


def progress_line(started: float) -> Callable[[str], None]:
    """Prints what is going on: over the same line on a terminal, else a line each."""
    terminal = sys.stderr.isatty()

    def show(text: str) -> None:
        line = f"[{time.perf_counter() - started:6.1f} s] {text}"
        sys.stderr.write(f"\r\033[K{line[:118]}" if terminal else f"{line}\n")
        sys.stderr.flush()

    return show


def main(argv: list[str] | None = None) -> None:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    if arguments.plot:
        plots.require_matplotlib()
    machine = environment()
    print(f"{machine['cpu']}, {machine['cores']} cores, GPU: {machine['gpu'] or 'none'}")
    for name in arguments.benchmark or BENCHMARKS:
        report = BENCHMARKS[name].run(arguments, progress_line(time.perf_counter()))
        sys.stderr.write("\n")
        path = report.save(arguments.output)
        print(f"{report}\n\nwritten to {path}\n")
        if arguments.plot:
            for figure in plots.draw(report, arguments.output):
                print(f"drawn to {figure}")


if __name__ == "__main__":
    main()
