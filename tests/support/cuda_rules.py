"""The rules of CUDA devices, streams, events, captures and cuBLAS, asserted without a card.

Tensors lie on the CPU. What PyTorch's classes would refuse or leave behind, these do: an event
belongs to one device; streams are handed out in turns; a capture runs on a stream of the current
device, one at a time. One that fails leaves its stream current and, up to torch 2.12, the allocator
waiting; whoever draws from a state that a capture holds fails, and whoever waits for a device that
captures breaks the capture. cuBLAS allocates once for a stream, in the pool of a capture that is
underway, graphs go on using that memory, and the end of a graph frees what its stream had. A pool
ends with the last of its graphs.
"""

import threading
import warnings
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .watching import a_librarys

_zeros = torch.zeros
_STREAMS = 32


def _zeros_here(*shape, device=None, pin_memory=False, **rest):
    placed = device is not None and torch.device(device).type == "cuda"
    return _zeros(*shape, device="cpu" if placed else device, **rest)


@dataclass(unsafe_hash=True)
class Stream:
    """One of those that are handed out in turns.

    Attributes:
        waited_for: events that what is queued from then on follows.
    """

    device: Any
    place: tuple[int, int] = (0, -1)
    waited_for: list[Any] = field(default_factory=list, compare=False)

    def __post_init__(self):
        self.device = torch.device(self.device)

    def wait_event(self, event):
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
        waiting: pools of captures for whose end the allocator waits.
        default_generators: of each card.
        on: the stream that each piece of queued work and each event went to.
        mode: of PyTorch's look at what waits.
    """

    def __init__(self):
        self._local = threading.local()
        self._first = {index: Stream(f"cuda:{index}") for index in range(2)}
        self._turns, self._allocations = Counter(), {}
        self._random_of_inference = self.underway = None
        self._known_to_pinned, self._pools = [], {}
        self.queued, self.on, self.waiting, self.mode = [], [], [], 0
        self.default_generators = [Random(RandomState(), self) for _ in range(2)]

    def install(self, monkeypatch):
        patched = {
            "current_stream": self.current_stream,
            "default_stream": lambda device: self._first[torch.device(device).index],
            "default_generators": self.default_generators,
            "synchronize": self.wait,
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
        monkeypatch.setattr(torch, "zeros", a_librarys(_zeros_here))
        ended = "_cuda_endAllocateToPool"
        monkeypatch.setattr(torch._C, ended, self._end_allocations, raising=False)

    def set_mode(self, mode):
        self.mode = {"default": 0, "warn": 1, "error": 2}.get(str(mode), mode)

    @property
    def current(self):
        return getattr(self._local, "device", 0)

    def _streams(self):
        if not hasattr(self._local, "streams"):
            self._local.streams = dict(self._first)
        return self._local.streams

    def new_stream(self, device, priority=0):
        key = str(device), priority
        self._turns[key] += 1
        return Stream(device, (priority, self._turns[key] % _STREAMS))

    def current_stream(self, device=None):
        index = self.current if device is None else torch.device(device).index
        return self._streams()[index]

    @contextmanager
    def device(self, device):
        before, self._local.device = self.current, torch.device(device).index
        try:
            yield
        finally:
            self._local.device = before

    @contextmanager
    def stream(self, stream):
        index = stream.device.index
        before = self._streams()[index]
        with self.device(stream.device):
            self._streams()[index] = stream
            try:
                yield
            finally:
                self._streams()[index] = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        assert self.underway is None, "another capture is underway"
        assert stream.device.index == self.current, "captured on another device's stream"
        # Memory is given back before a capture.
        assert not self.waiting, "captures_underway.empty()"
        assert pool not in self._known_to_pinned, "already recording to mempool_id"
        assert pool not in self._pools or self._pools[pool], "use_count > 0"
        inference = torch.is_inference_mode_enabled()
        if self._random_of_inference is None:
            self._random_of_inference = inference
        if self._random_of_inference and not inference:
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode")
        before = self._streams()[self.current]
        self._streams()[self.current] = stream
        self.underway, graph.pool, graph.stream = graph, pool, stream
        random = self.default_generators[self.current].state
        random.captured = True
        self._pools.setdefault(pool, weakref.WeakSet()).add(graph)
        self.waiting.append(pool)
        self._known_to_pinned.append(pool)
        try:
            yield
        finally:
            self.underway = None
            if graph.invalid:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.waiting.clear()
            self._known_to_pinned.remove(pool)
            random.captured = False
            self._streams()[self.current] = before

    def _end_allocations(self, index, pool):
        self.waiting.remove(pool)

    def draw(self, index=0):
        return self.default_generators[index].draw()

    def wait(self):
        """What a call that waits for the device does."""
        if self.underway is not None:
            self.underway.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.mode == 1:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    def multiply(self):
        """What a product of matrices does."""
        stream, pool = self.current_stream(), None if self.underway is None else self.underway.pool
        used = self._allocations.setdefault(stream, Allocation(pool))
        if self.underway is not None:
            self.underway.uses.append(used)

    def clear(self, stream=None):
        """Free what cuBLAS holds for a stream; None: for all, as `reduce-overhead` does."""
        for one in [stream] if stream is not None else list(self._allocations):
            if one in self._allocations:
                self._allocations.pop(one).held = False


@dataclass
class RandomState:
    """A generator's: how many numbers were drawn, and whether a capture holds it."""

    drawn: int = 0
    captured: bool = False


@dataclass
class Random:
    """A generator of random numbers, whose state can be exchanged."""

    state: RandomState
    cuda: Cuda

    def draw(self):
        """The number of this draw."""
        if self.state.captured:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.state.drawn += 1
        return self.state.drawn

    def manual_seed(self, seed):
        self.state.drawn = 0

    def clone_state(self):
        return Random(RandomState(self.state.drawn), self.cuda)

    def graphsafe_get_state(self):
        return Random(self.state, self.cuda)

    def graphsafe_set_state(self, other):
        self.state = other.state

    def get_state(self):
        self._on_no_capturing_stream()
        return self.state.drawn

    def set_state(self, drawn):
        self._on_no_capturing_stream()
        self.state.drawn = drawn

    def _on_no_capturing_stream(self):
        underway = self.cuda.underway
        assert underway is None or self.cuda.current_stream() is not underway.stream


@dataclass(eq=False)
class Graph:
    """Attributes:
    uses: memory of cuBLAS that it writes to.
    """

    cuda: Cuda
    invalid: bool = False
    pool: Any = None
    stream: Stream | None = None
    uses: list[Allocation] = field(default_factory=list)

    def replay(self):
        # What was freed in its own pool is nobody else's while it lives.
        assert all(used.held or used.pool is self.pool for used in self.uses), "overwrites others"

    def __del__(self):
        if self.stream is not None:
            self.cuda.clear(self.stream)


class Event:
    """Synchronising does what was queued before it was recorded."""

    def __init__(self, cuda):
        self._cuda = cuda
        self._device = None
        self._done = []

    def record(self, stream=None):
        stream = stream or self._cuda.current_stream()
        assert self._device in (None, stream.device), "an event of another device"
        self._device = stream.device
        self._cuda.on.append(stream)
        last = []
        self._cuda.queued.append(lambda: last.append(True))
        self._done = last

    def synchronize(self):
        while self._device is not None and not self._done:
            self._cuda.queued.pop(0)()
