"""The rules of CUDA devices, streams, events, captures and cuBLAS, asserted without a card.

Tensors lie on the CPU. What PyTorch's classes would refuse or leave behind, these do: an event
belongs to one device; streams are handed out in turns; a capture runs on a stream of the current
device, one at a time. One that fails leaves its stream current and, up to torch 2.12, the allocator
and the generator waiting. cuBLAS allocates once for a stream, in the pool of a capture that is
underway, graphs go on using that memory, and the end of a graph frees what its stream had.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

_zeros = torch.zeros
_STREAMS = 32


class Stream:
    """One of those that are handed out in turns.

    Attributes:
        waited_for: events that what is queued from then on follows.
    """

    def __init__(self, device: Any, place: tuple[int, int] = (0, -1)):
        self.device = torch.device(device)
        self.place = place
        self.waited_for: list[Event] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device, self.place) == (
            other.device,
            other.place,
        )

    def __hash__(self) -> int:
        return hash((self.device, self.place))

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event)


@dataclass
class Allocation:
    """What cuBLAS holds for a stream."""

    pool: Any
    held: bool = True


class Cuda:
    """Two cards, and what of them is current in the running thread.

    Attributes:
        queued: work that the device has not done yet, oldest first.
        waiting: whether allocator and generator wait for the end of a capture.
        on: the stream that each piece of queued work and each event went to.
        mode: of PyTorch's look at what waits.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._first = {index: Stream(f"cuda:{index}") for index in range(2)}
        self._turns: Counter[Any] = Counter()
        self._allocations: dict[Stream, Allocation] = {}
        self._random_of_inference: bool | None = None
        self.queued: list[Callable[[], Any]] = []
        self.waiting: set[str] = set()
        self.underway: Graph | None = None
        self.on: list[Stream] = []
        self.mode = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        patched = {
            "current_stream": self.current_stream,
            "stream": self.stream,
            "device": self.device,
            "Stream": self.new_stream,
            "Event": lambda: Event(self),
            "CUDAGraph": lambda: Graph(self),
            "graph": self.graph,
            "graph_pool_handle": object,
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": self.set_mode,
        }
        for name, value in patched.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "zeros", self._zeros)
        ended = "_cuda_endAllocateToPool"
        monkeypatch.setattr(torch._C, ended, self._end_allocations, raising=False)

    def _zeros(self, *shape: Any, device: Any = None, pin_memory: bool = False, **rest: Any) -> Any:
        placed = device is not None and torch.device(device).type == "cuda"
        return _zeros(*shape, device="cpu" if placed else device, **rest)

    def set_mode(self, mode: str | int) -> None:
        self.mode = {"default": 0, "warn": 1, "error": 2}.get(str(mode), mode)  # type: ignore[assignment]

    @property
    def current(self) -> int:
        return getattr(self._local, "device", 0)

    def _streams(self) -> dict[int, Stream]:
        if not hasattr(self._local, "streams"):
            self._local.streams = dict(self._first)
        return self._local.streams

    def new_stream(self, device: Any, priority: int = 0) -> Stream:
        key = str(device), priority
        self._turns[key] += 1
        return Stream(device, (priority, self._turns[key] % _STREAMS))

    def current_stream(self, device: Any = None) -> Stream:
        index = self.current if device is None else torch.device(device).index
        return self._streams()[index]

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self._local.device = self.current, torch.device(device).index
        try:
            yield
        finally:
            self._local.device = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        index = stream.device.index
        before = self._streams()[index]
        with self.device(stream.device):
            self._streams()[index] = stream
            try:
                yield
            finally:
                self._streams()[index] = before

    @contextmanager
    def graph(self, graph: Graph, pool: Any, stream: Stream, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local"
        assert self.underway is None, "another capture is underway"
        assert stream.device.index == self.current, "captured on another device's stream"
        # Memory is given back before a capture.
        assert "allocator" not in self.waiting, "captures_underway.empty()"
        inference = torch.is_inference_mode_enabled()
        if self._random_of_inference is None:
            self._random_of_inference = inference
        if self._random_of_inference and not inference:
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode")
        before = self._streams()[self.current]
        self._streams()[self.current] = stream
        self.underway, graph.pool, graph.stream = graph, pool, stream
        self.waiting |= {"allocator", "generator"}
        try:
            yield
        finally:
            self.underway = None
            if graph.invalid:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.waiting.clear()
            self._streams()[self.current] = before

    def _end_allocations(self, index: int, pool: Any) -> None:
        self.waiting.discard("allocator")

    def draw(self) -> None:
        if "generator" in self.waiting:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def wait(self) -> None:
        """What a call that waits for the device does."""
        if self.underway is not None:
            self.underway.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.mode == 1:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    def multiply(self) -> None:
        """What a product of matrices does."""
        stream, pool = self.current_stream(), None if self.underway is None else self.underway.pool
        used = self._allocations.setdefault(stream, Allocation(pool))
        if self.underway is not None:
            self.underway.uses.append(used)

    def clear(self, stream: Stream | None = None) -> None:
        """Free what cuBLAS holds for a stream; None: for all, as `reduce-overhead` does."""
        for one in [stream] if stream is not None else list(self._allocations):
            if one in self._allocations:
                self._allocations.pop(one).held = False


class Graph:
    """Attributes:
    uses: memory of cuBLAS that it writes to.
    """

    def __init__(self, cuda: Cuda):
        self._cuda = cuda
        self.invalid = False
        self.pool: Any = None
        self.stream: Stream | None = None
        self.uses: list[Allocation] = []

    def replay(self) -> None:
        # What was freed in its own pool is nobody else's while it lives.
        assert all(used.held or used.pool is self.pool for used in self.uses), "overwrites others"

    def __del__(self) -> None:
        if self.stream is not None:
            self._cuda.clear(self.stream)


class Event:
    """Synchronising does what was queued before it was recorded."""

    def __init__(self, cuda: Cuda):
        self._cuda = cuda
        self._device: torch.device | None = None
        self._done: list[bool] = []

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._cuda.current_stream()
        assert self._device in (None, stream.device), "an event of another device"
        self._device = stream.device
        self._cuda.on.append(stream)
        last: list[bool] = []
        self._cuda.queued.append(lambda: last.append(True))
        self._done = last

    def synchronize(self) -> None:
        while self._device is not None and not self._done:
            self._cuda.queued.pop(0)()
