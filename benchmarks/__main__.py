"""`python -m benchmarks [BENCHMARK ...] [--quick]`: measure, print tables, write JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from . import accelerator, acceptance, beside, groups, machine, model, replay
from .report import environment

BENCHMARKS: dict[str, ModuleType] = {
    "acceptance": acceptance,
    "replay": replay,
    "accelerator": accelerator,
    "beside": beside,
    "model": model,
    "groups": groups,
    "machine": machine,
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "benchmark",
        nargs="*",
        help=f"any of {', '.join(BENCHMARKS)} (default: what this machine is for)",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/out"), help="for JSON")
    parser.add_argument(
        "--model",
        default="gemma3",
        help="gemma3, smollm2, or a folder or hub id; where one is used",
    )
    parser.add_argument("--dtype", help="of its weights (default: its own)")
    parser.add_argument("--threads", type=int, help="that compute (default: PyTorch's)")
    for name, benchmark in BENCHMARKS.items():
        benchmark.add_arguments(parser.add_argument_group(name, benchmark.__doc__.splitlines()[0]))
    arguments = parser.parse_args(argv)
    unknown = set(arguments.benchmark) - BENCHMARKS.keys()
    if unknown:
        parser.error(f"unknown benchmark {sorted(unknown)}, expected {list(BENCHMARKS)}")
    return arguments


class Progress:
    """Says which of the chosen benchmarks is at what.

    Over the same line on a terminal, else a line each.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._at = -1
        self._started = time.perf_counter()

    def next(self) -> str:
        """Go on to the next benchmark; returns its name."""
        self._at += 1
        return self.names[self._at]

    def __call__(self, text: str) -> None:
        minutes = (time.perf_counter() - self._started) / 60
        done = f"{self._at + 1} of {len(self.names)}: {self.names[self._at]}"
        line = f"[{done}, {minutes:.1f} min] {text}"
        sys.stderr.write(f"\r\033[K{line[:118]}" if sys.stderr.isatty() else f"{line}\n")
        sys.stderr.flush()


def chosen(names: Sequence[str]) -> Sequence[str]:
    """The named benchmarks, or all that this machine is for."""
    if names:
        return names
    left_out = set() if torch.cuda.is_available() else {"accelerator"}
    return [name for name in BENCHMARKS if name not in left_out]


def main(argv: list[str] | None = None) -> None:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    machine = environment()
    print(f"{machine['cpu']}, {machine['cores']} cores, GPU: {machine['gpu'] or 'none'}")
    progress = Progress(chosen(arguments.benchmark))
    for _ in progress.names:
        # Each may fill in what it lacks.
        own = argparse.Namespace(**vars(arguments))
        report = BENCHMARKS[progress.next()].run(own, progress)
        sys.stderr.write("\n")
        print(f"{report}\n\nwritten to {report.save(arguments.output)}\n")


if __name__ == "__main__":
    main()
