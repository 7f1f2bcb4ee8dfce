"""A computation on tensors that stay where they are, recorded once and then repeated.

On a CUDA device the recording is a graph (:class:`torch.cuda.CUDAGraph`): the kernels of a whole
forward are launched at once, and no Python of the model runs. Such a recording repeats what Python
decided while it was made, so it is taken only after it has given, at other inputs, what the
computation itself gives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..system.locks import Lock

aten = torch.ops.aten

# Operators whose results have a shape or a value that the host needs.
_WAITING = {
    *(aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive),
    *(aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.repeat_interleave),
}
_COPYING = {aten.copy_, aten._to_copy}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_MASKS = (torch.bool, torch.uint8)

Record = Callable[[Callable[[], "Shown"]], tuple[Callable[[], Any], "Shown"]]
"""Records a computation: returns what repeats it, and the tensors in which its results lie."""


@dataclass
class Shown:
    """What a forward left on the device.

    Attributes:
        logits: [batch, width, vocab_size].
        features: hidden states by boundary, of each tap.
        outputs: all that the model returned.
    """

    logits: torch.Tensor
    features: list[dict[int, torch.Tensor]]
    outputs: Any


def recorder(device: torch.device, compiled: bool) -> Record | None:
    """What records forwards on a device, compiled ones or the model's own; None: nothing does."""
    return CudaGraphs(device, watched=not compiled) if device.type == "cuda" else None


class NoWaits(TorchDispatchMode):
    """Scope in which an operator of this thread that waits for a device raises.

    PyTorch's own mode for it (`torch.cuda.set_sync_debug_mode`) would raise in all threads.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        # The value of a tensor without dimensions goes with the launch.
        crosses = len({x.device.type for x in tensors if x.dim() or packet in _COPYING}) > 1
        masked = packet in _INDEXING and any(
            isinstance(x, torch.Tensor) and x.dtype in _MASKS for x in args[1]
        )
        # PyTorch copies the host's numbers before it shows the tensor that it makes of them.
        made = packet is aten.lift_fresh and out.device.type != "cpu"
        if packet in _WAITING or crosses or masked or made:
            raise RuntimeError(f"{func} waits for the device")
        return out


class CudaGraphs:
    """Captures CUDA graphs of one device that share one pool of memory.

    PyTorch captures one graph at a time in a process. A capture that fails leaves streams and
    random states as it found them.

    Args:
        watched: whether what waits is looked for before anything is captured. Under a mode that
            looks, torch runs what it has compiled as if it had not, and goes on so.
    """

    _lock = Lock()

    def __init__(self, device: torch.device, watched: bool = True):
        self._device = device
        self._watch = NoWaits if watched else nullcontext
        self._pool = torch.cuda.graph_pool_handle()
        # PyTorch's own stream for captures is one of the device on which it captured first.
        self._stream = torch.cuda.Stream(device)
        self._spot = torch.zeros(1, device=device)

    def __call__(self, compute: Callable[[], Shown]) -> tuple[Callable[[], Any], Shown]:
        with self._lock, torch.cuda.device(self._device):
            caller = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(caller)
            # PyTorch goes back to the caller's stream after a capture that ended well only.
            with torch.cuda.stream(self._stream):
                # Libraries make what they need of a stream, and what cannot be captured shows.
                with self._watch():
                    compute()
                try:
                    recording = self._capture(compute, self._pool)
                except BaseException:
                    # Up to torch 2.11 random numbers wait for the end of the capture that failed;
                    # they take the end of another one for it.
                    self._capture(self._spot.zero_, torch.cuda.graph_pool_handle())
                    raise
            caller.wait_stream(self._stream)
        return recording

    def _capture(self, compute: Callable[[], Any], pool: Any) -> tuple[Callable[[], Any], Any]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        scope = torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local")
        with scope:
            shown = compute()
        return graph.replay, shown


class Replay:
    """Computes, recording on the first call, comparing on the second, repeating from then on.

    Args:
        record: what records; None: every call computes.
        tolerance: the largest error of repeated logits, relative to their spread.

    Attributes:
        fault: why the computation is not repeated, in words; None while nothing speaks against it.
    """

    def __init__(self, record: Record | None, tolerance: float):
        self._record = record
        self._tolerance = tolerance
        self._repeat: Callable[[], Any] | None = None
        self._recorded: Shown | None = None
        self._trusted = False
        self.fault: str | None = None

    @property
    def new(self) -> bool:
        """Whether nothing was recorded yet."""
        return self._repeat is None

    @property
    def settled(self) -> bool:
        """Whether nothing remains to be recorded or compared."""
        return self._record is None or self._trusted or self.fault is not None

    def __call__(self, compute: Callable[[], Shown]) -> Shown:
        if self._record is None or self.fault is not None:
            return compute()
        if self._repeat is None:
            shown = compute()
            self._try(compute)
            return shown
        assert self._recorded is not None
        self._repeat()
        if not self._trusted:
            return self._compare(compute)
        return self._recorded

    def _try(self, compute: Callable[[], Shown]) -> None:
        assert self._record is not None
        try:
            self._repeat, self._recorded = self._record(compute)
        except Exception as error:  # whatever a forward does that cannot be recorded
            self._refuse(f"{type(error).__name__}: {error}".splitlines()[0][:200])

    def _compare(self, compute: Callable[[], Shown]) -> Shown:
        assert self._recorded is not None
        repeated = self._recorded.logits.clone()
        shown = compute()
        error = (repeated - shown.logits).abs().amax() / shown.logits.std()
        # NaN, which compares as no error, is one.
        if float(error) <= self._tolerance:
            self._trusted = True
        else:
            self._refuse(f"repeated logits are off by {float(error):.2g} of their spread")
        return shown

    def _refuse(self, fault: str) -> None:
        self.fault = fault
        self._repeat = self._recorded = None
