"""A computation on tensors that stay where they are, recorded once and then repeated.

On a CUDA device the recording is a graph (:class:`torch.cuda.CUDAGraph`): the kernels of a whole
forward are launched at once, and no Python of the model runs. Such a recording repeats what Python
decided while it was made, so it is taken only after it has given, at other inputs, what the
computation itself gives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

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


def recorder(device: torch.device) -> Record | None:
    """What records on a device; None: nothing does."""
    return CudaGraphs(device) if device.type == "cuda" else None


class CudaGraphs:
    """Captures CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Shown]) -> tuple[Callable[[], Any], Shown]:
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
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
