"""The rules of CUDA devices, streams, events and captures, asserted without a card.

Tensors lie on the CPU. What PyTorch's classes would refuse or leave behind, these do: an event
belongs to one device, a capture runs on a stream of the current device, one at a time, and one that
fails leaves its stream current and the generator waiting, as in torch 2.11 and older.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

_zeros = torch.zeros


class Stream:
    def __init__(self, device: Any = None):
        self.device = torch.device(device)
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Cuda:
    """Two cards, and what of them is current in the running thread.

    Attributes:
        queued: work that the device has not done yet, oldest first.
        capturing: whether the generator waits for the end of a capture.
        on: the stream that each piece of queued work and each event went to.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._first = {index: Stream(f"cuda:{index}") for index in range(2)}
        self.queued: list[Callable[[], Any]] = []
        self.capturing = False
        self.underway: Stream | None = None
        self.on: list[Stream] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        patched = {
            "current_stream": self.current_stream,
            "stream": self.stream,
            "device": self.device,
            "Stream": Stream,
            "Event": lambda: Event(self),
            "CUDAGraph": lambda: Graph(self),
            "graph": self.graph,
            "graph_pool_handle": object,
        }
        for name, value in patched.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "zeros", self._zeros)

    def _zeros(self, *shape: Any, device: Any = None, pin_memory: bool = False, **rest: Any) -> Any:
        placed = device is not None and torch.device(device).type == "cuda"
        return _zeros(*shape, device="cpu" if placed else device, **rest)

    @property
    def current(self) -> int:
        return getattr(self._local, "device", 0)

    def _streams(self) -> dict[int, Stream]:
        if not hasattr(self._local, "streams"):
            self._local.streams = dict(self._first)
        return self._local.streams

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
        before = self._streams()[self.current]
        self._streams()[self.current] = self.underway = stream
        self.capturing = True
        try:
            yield
        finally:
            self.underway = None
            if graph.invalid:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.capturing = False
            self._streams()[self.current] = before

    def draw(self) -> None:
        if self.capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def invalidate(self) -> None:
        """What a call that may not be captured does."""
        if self.underway is not None:
            Graph.latest.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")


class Graph:
    latest: Graph

    def __init__(self, cuda: Cuda):
        self.invalid = False
        Graph.latest = self

    def replay(self) -> None: ...


class Event:
    """Synchronising does what was queued before it was recorded."""

    def __init__(self, cuda: Cuda):
        self._cuda = cuda
        self._device: torch.device | None = None
        self._behind = 0

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
