"""What a benchmark hands back: tables that print, and JSON that says where they come from."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import hf_retrieval_assist

PACKAGES = ("torch", "transformers", "numpy", "tokenizers")


@dataclass
class Table:
    """Rows of equal keys.

    Attributes:
        title: what the figures are.
        columns: key -> heading, with the unit.
        rows: one mapping per row; a key that is missing or None prints as a dash.
    """

    title: str
    columns: Mapping[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **values: Any) -> None:
        unknown = values.keys() - self.columns.keys()
        if unknown:
            raise KeyError(f"no such columns in {self.title!r}: {sorted(unknown)}")
        self.rows.append(values)

    def __str__(self) -> str:
        cells = [list(self.columns.values())]
        cells += [[cell(row.get(key)) for key in self.columns] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(_align(row, widths)) for row in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self.title, *lines])


def cell(value: Any, digits: str = "") -> str:
    """What is printed: three digits, or so many behind the point; from a thousand on whole numbers;
    a dash for nothing."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if digits:
        return f"{value:,.{digits}f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _align(row: list[str], widths: list[int]) -> list[str]:
    """The first column left, figures right."""
    first, *figures = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
    return [row[0].ljust(len(first)), *figures]


@dataclass
class Report:
    """One run of one benchmark.

    Attributes:
        benchmark: its subcommand.
        settings: everything that chose what was measured, seeds included.
        tables: the figures.
        notes: what a reader must know, such as what was skipped and why.
    """

    benchmark: str
    settings: dict[str, Any]
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self, title: str, columns: Mapping[str, str]) -> Table:
        """A new empty table."""
        self.tables.append(Table(title, columns))
        return self.tables[-1]

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __str__(self) -> str:
        blocks = [str(table) for table in self.tables if table.rows]
        return "\n\n".join([*blocks, *(f"note: {note}" for note in self.notes)])

    def save(self, folder: Path) -> Path:
        """Write `folder`/<benchmark>.json and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.benchmark}.json"
        content = {"environment": environment(), **asdict(self)}
        path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        return path


def environment() -> dict[str, Any]:
    """Machine, versions, commit and command."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        # The sources in use, whatever version an editable installation was made of.
        "versions": {"hf-retrieval-assist": hf_retrieval_assist.__version__}
        | {name: version(name) for name in PACKAGES},
        "commit": _commit(),
        "command": _command(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, marked where files differ from it."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def _command() -> str | None:
    """What was typed, where this is a benchmark's process."""
    program = Path(sys.argv[0])
    if program.parent.name != "benchmarks":
        return None
    module = "benchmarks" if program.stem == "__main__" else f"benchmarks.{program.stem}"
    return shlex.join(["python", "-m", module, *sys.argv[1:]])
