"""Linear layers of few rows on a CPU, computed by whichever method is fastest on this machine.

Within :class:`linear_reroute` the running thread's `torch.nn.functional.linear` computes products
of 1 to 64 rows by one of

* `kernel`: :func:`skinny_linear`, which reads the weights once for all rows,
* `transposed`: `(W @ x.T).T`, for which BLAS libraries often have the better code,
* `pytorch`: what would have run anyway.

One method serves a weight shape, dtype and number of threads for every number of rows, chosen when
that shape is first met. Where it is the kernel (bits do not depend on rows there), a token's logits
do not depend on how many draft tokens are verified beside it; neither is promised of the others.

The function is exchanged in its module while any thread is in a scope, and put back after the last
one. Code outside of scopes, other threads among it, then reaches PyTorch's own through one extra
call. A mode (`torch.overrides.TorchFunctionMode`) would need no exchange, but it taxes every
operator of a forward, ten for each linear, and not only the linears.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import platformdirs
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from . import __version__
from .skinny_linear import (
    MAX_ROWS,
    PATHS,
    enter_route,
    kernel_linear,
    leave_route,
    routed_linear,
    set_chooser,
    skinny_linear,
)

if TYPE_CHECKING:
    from .skinny_linear import LinearMethod

__all__ = ["MAX_ROWS", "METHODS", "LinearTuning", "linear_reroute", "tune_linears"]

_plain_linear = torch._C._nn.linear

# Numbers of rows that a choice is made for, and what is timed for each: enough of the weight to
# leave the second-level cache, as it does between two forwards, and not more.
TUNING_ROWS = (1, 4, 16)
TUNING_BYTES = 4 << 20
TUNING_REPEATS = 7
TUNING_SECONDS = 0.1  # for one number of rows, after which repeating stops
# The kernel keeps its place unless another method is so many times faster: what it promises about
# bits is worth something, and a choice that is remembered should not hang on a moment's noise.
KERNEL_MARGIN = 1.1
# Threads that make the kernel so many times slower are waiting for their turn on a busy machine.
CONTENTION = 1.5


def transposed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ weight.T + bias` with the weight as the left factor. Returns [..., out_features]."""
    rows = x.reshape(-1, x.shape[-1])
    if bias is None:
        product = torch.mm(weight, rows.T)
    else:
        product = torch.addmm(bias[:, None], weight, rows.T)
    return product.T.reshape(*x.shape[:-1], weight.shape[0])


METHODS: dict[str, LinearMethod] = {
    "kernel": kernel_linear,
    "transposed": transposed_linear,
    "pytorch": _plain_linear,
}


def _seconds(method: LinearMethod, x: torch.Tensor, weight: torch.Tensor) -> float:
    start = time.perf_counter()
    method(x, weight, None)
    return time.perf_counter() - start


def _serial_kernel(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return skinny_linear(x, weight, bias, threads=1)


def _best_seconds(x: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """The least time of each of METHODS and of the kernel on one thread ("serial"), which other
    work on the machine distorts least. They take turns, the first of which warms up.
    """
    candidates = METHODS | {"serial": _serial_kernel}
    turns: list[dict[str, float]] = []
    end = time.perf_counter() + TUNING_SECONDS
    while len(turns) < 2 or (len(turns) <= TUNING_REPEATS and time.perf_counter() < end):
        turns.append({name: _seconds(method, x, weight) for name, method in candidates.items()})
    return {name: min(turn[name] for turn in turns[1:]) for name in candidates}


def fastest_method(weight: torch.Tensor) -> str | None:
    """The name in METHODS with the lowest geometric mean of times over TUNING_ROWS, the kernel's
    divided by KERNEL_MARGIN; None where the machine is too busy to tell.
    """
    rows = max(1, TUNING_BYTES // (weight.shape[1] * weight.element_size()))
    part = weight.detach()[:rows]
    scores = dict.fromkeys(METHODS, 0.0)
    scores["kernel"] -= len(TUNING_ROWS) * math.log(KERNEL_MARGIN)
    with torch.no_grad():
        for n in TUNING_ROWS:
            x = torch.ones(n, weight.shape[1], dtype=weight.dtype)
            seconds = _best_seconds(x, part)
            if seconds["kernel"] > CONTENTION * seconds["serial"]:
                return None
            for name in METHODS:
                scores[name] += math.log(seconds[name])
    return min(scores, key=scores.__getitem__)


# The lines of /proc/cpuinfo that name a CPU, on x86 and on Arm.
_CPU_FACTS = (
    *("vendor_id", "cpu family", "model", "model name"),
    *("CPU implementer", "CPU variant", "CPU part"),
)


def _cpu_name() -> str:
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
    """What a choice depends on besides shape, dtype and threads."""
    return {
        "cpu": _cpu_name(),
        "paths": " ".join(PATHS),
        "torch": torch.__version__,
        "package": __version__,
    }


def _replace_file(path: Path, text: str) -> None:
    """Write `text` to the file in one step, so that no reader meets half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


class LinearTuning:
    """The choices made on this machine, kept in a file of the user's cache directory.

    The file holds one environment (CPU, instruction sets, torch and package version); another one's
    choices are replaced. A file that cannot be read, or is not what this class writes, counts as
    empty and is reported by one RuntimeWarning; so is a directory that cannot be written to.

    Args:
        path: the file; by default `linear_tuning.json` in the user's cache directory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or Path(
            platformdirs.user_cache_dir("hf-retrieval-assist"), "linear_tuning.json"
        )
        self._lock = threading.Lock()
        self._choices: dict[str, str] | None = None
        self._warned = False

    def choose(self, weight: torch.Tensor) -> LinearMethod:
        """The method for weights of this shape and dtype at the present number of threads; the
        kernel, without remembering it, where the machine is too busy to tell.
        """
        rows, columns = weight.shape
        key = f"{weight.dtype} {rows}x{columns} threads={torch.get_num_threads()}"
        with self._lock:
            if self._choices is None:
                self._choices = self._load()
            if key not in self._choices:
                fastest = fastest_method(weight)
                if fastest is None:
                    return kernel_linear
                self._choices[key] = fastest
                self._save(self._choices)
            return METHODS[self._choices[key]]

    def _load(self) -> dict[str, str]:
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if stored["environment"] != _environment():
                return {}
            choices = {str(key): str(name) for key, name in stored["choices"].items()}
            unknown = set(choices.values()) - METHODS.keys()
            if unknown:
                raise ValueError(f"unknown methods {sorted(unknown)}")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._warn(f"ignoring {self.path}: {error!r}")
            return {}
        return choices

    def _save(self, choices: dict[str, str]) -> None:
        text = json.dumps({"environment": _environment(), "choices": choices}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _replace_file(self.path, text)
        except OSError as error:
            self._warn(f"cannot remember what is fastest in {self.path}: {error!r}")

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=2)


TUNING = LinearTuning()
set_chooser(TUNING.choose)


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What stands for `torch.nn.functional.linear`: plain Python, so that `torch.compile` can trace
    it, which then puts PyTorch's own into the graph.
    """
    if torch.compiler.is_compiling():
        return _plain_linear(input, weight, bias)
    return routed_linear(input, weight, bias)


_exchange_lock = threading.Lock()
_scopes = 0


def _enter_exchange() -> None:
    global _scopes
    with _exchange_lock:
        _scopes += 1
        if F.linear is _plain_linear:
            F.linear = _linear


def _leave_exchange() -> None:
    global _scopes
    with _exchange_lock:
        _scopes -= 1
        if _scopes == 0 and F.linear is _linear:
            F.linear = _plain_linear


def _is_observed() -> bool:
    """Whether something records or replaces the operators that run, and must see the linears."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or _get_current_dispatch_mode() is not None
        or torch._C._len_torch_function_stack() > 0
    )


class linear_reroute:  # noqa: N801, a context manager reads as a verb
    """Scope in which this thread's linears of 1 to 64 rows run by the fastest method.

    Only products of dense CPU tensors that are exactly `torch.Tensor` or `Parameter`, in float32,
    bfloat16 or float16, outside of autograd, autocast and function transforms are touched; all
    others (quantised, sparse, subclassed or offloaded weights, `torch.compile` graphs) run as
    always. Scopes nest and may be entered again. Inside a mode that watches operators, such as a
    FLOP counter, and where somebody else has replaced `torch.nn.functional.linear`, a scope does
    nothing.

    Args:
        enabled: False makes it a scope that does nothing.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._entered: list[bool] = []

    def __enter__(self) -> linear_reroute:
        active = self.enabled and not _is_observed()
        self._entered.append(active)
        if active:
            _enter_exchange()
            enter_route()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._entered.pop():
            leave_route()
            _leave_exchange()


def tune_linears(model: torch.nn.Module) -> None:
    """Choose for every linear layer of the model now, so that no timed step does.

    Takes well under a second for a model of a few hundred million parameters, and almost nothing
    where the cache knows the shapes.
    """
    weights = {
        (layer.weight.shape, layer.weight.dtype): layer.weight
        for layer in model.modules()
        if isinstance(layer, torch.nn.Linear)
    }
    with torch.no_grad(), linear_reroute():
        for weight in weights.values():
            F.linear(weight.new_zeros(1, weight.shape[1]), weight)
