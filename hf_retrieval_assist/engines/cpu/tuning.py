"""Which of several equal methods is fastest on this machine: measured once, then remembered."""

from __future__ import annotations

import math
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...system.files import read_kept, user_cache_directory, write_kept
from ...system.locks import Lock
from . import skinny

TUNING_REPEATS = 7
TUNING_SECONDS = 0.1  # one case's, after which repeating stops
# The kernel keeps its place unless another method is so many times faster: what it promises about
# bits is worth something, and a choice that is remembered should not hang on a moment's noise.
KERNEL_MARGIN = 1.1
# Threads that make the kernel so many times slower are waiting for their turn on a busy machine.
CONTENTION = 1.5

Candidates = Mapping[str, Callable[[], object]]


def _seconds(method: Callable[[], object]) -> float:
    start = time.perf_counter()
    method()
    return time.perf_counter() - start


def _best_seconds(candidates: Candidates) -> dict[str, float]:
    """The least time of each, which other work on the machine distorts least. They take turns, the
    first of which warms up.
    """
    turns: list[dict[str, float]] = []
    end = time.perf_counter() + TUNING_SECONDS
    while len(turns) < 2 or (len(turns) <= TUNING_REPEATS and time.perf_counter() < end):
        turns.append({name: _seconds(method) for name, method in candidates.items()})
    return {name: min(turn[name] for turn in turns[1:]) for name in candidates}


def fastest(cases: Iterable[Candidates]) -> str | None:
    """The method with the lowest geometric mean of times over the cases, the kernel's divided by
    KERNEL_MARGIN; None where the machine is too busy to tell.

    Args:
        cases: each holds the same methods, "kernel" among them, and "serial", the kernel on one
            thread, which is not for choice.
    """
    scores: dict[str, float] = {}
    for candidates in cases:
        seconds = _best_seconds(candidates)
        if seconds["kernel"] > CONTENTION * seconds.pop("serial"):
            return None
        seconds["kernel"] /= KERNEL_MARGIN
        scores = {name: scores.get(name, 0.0) + math.log(seconds[name]) for name in seconds}
    return min(scores, key=scores.__getitem__)


# The lines of /proc/cpuinfo that name a CPU, on x86 and on Arm.
_CPU_FACTS = (
    *("vendor_id", "cpu family", "model", "model name"),
    *("CPU implementer", "CPU variant", "CPU part"),
)


def cpu_name() -> str:
    """The CPU's model as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    named = [facts[key] for key in _CPU_FACTS if key in facts]
    return " ".join(named) or platform.processor() or platform.machine()


def _environment() -> dict[str, str]:
    """What a choice depends on besides its key."""
    return {
        "cpu": cpu_name(),
        "paths": " ".join(skinny.PATHS),
        "kernels": sha256(Path(skinny.__file__).read_bytes()).hexdigest(),
        "torch": torch.__version__,
        "package": __version__,
    }


class Tuning:
    """The choices made on this machine, kept in a file of the user's cache directory, if any.

    The file holds one environment (CPU, instruction sets, compiled kernels, torch and package
    version); another one's choices are replaced. A file that cannot be read, or is not what this
    class writes, counts as empty and is reported by one warning; so is a directory that cannot be
    written to.

    Args:
        methods: the names there are, "kernel" among them.
        kind: of choices, which names the file.
        path: another file.
    """

    def __init__(self, methods: Iterable[str], kind: str, path: Path | None = None) -> None:
        self.methods = frozenset(methods)
        self._kind = kind
        self._given = path
        self._lock = Lock()
        self._choices: dict[str, str] | None = None
        self._writable = True

    @property
    def path(self) -> Path | None:
        """The file; None where the user has no cache directory."""
        return self._given or tuning_file(self._kind)

    def name(self, key: str, measure: Callable[[], str | None]) -> str:
        """The name chosen for a key; `measure` is asked where none is remembered. The kernel,
        without remembering it, where that finds the machine too busy to tell.
        """
        with self._lock:
            if self._choices is None:
                kept = self.path and read_kept(self.path, "what was fastest", self._parsed)
                self._choices = kept or {}
            if key not in self._choices:
                measured = measure()
                if measured is None:
                    return "kernel"
                self._choices[key] = measured
                self._save(self._choices)
            return self._choices[key]

    def _parsed(self, stored: Any) -> dict[str, str]:
        if stored["environment"] != _environment():
            return {}
        choices = {str(key): str(name) for key, name in stored["choices"].items()}
        if unknown := set(choices.values()) - self.methods:
            raise ValueError(f"unknown methods {sorted(unknown)}")
        return choices

    def _save(self, choices: dict[str, str]) -> None:
        if self.path is None:
            return
        try:
            write_kept(self.path, {"environment": _environment(), "choices": choices})
        except OSError as error:
            if self._writable:
                warnings.warn(
                    f"cannot remember what is fastest in {self.path}: {error!r}; set "
                    "XDG_CACHE_HOME to a folder that can be written to",
                    stacklevel=3,
                )
            self._writable = False


def tuning_file(kind: str) -> Path | None:
    """Where the choices of one kind are kept by default; None: nowhere."""
    folder = user_cache_directory()
    return folder and folder / f"{kind}_tuning.json"
