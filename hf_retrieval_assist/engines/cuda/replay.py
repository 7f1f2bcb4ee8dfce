"""A computation on tensors that stay where they are, recorded once and then repeated.

On a CUDA device the recording is a graph (:class:`torch.cuda.CUDAGraph`): the kernels of a whole
forward are launched at once, and no Python of the model runs. See
:mod:`...verification.recordings`.
"""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar

import torch
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...system.locks import DRAWS, Lock
from ...verification.recordings import BrokenRecordingError, Recording

aten = torch.ops.aten

# A capture that something broke ends like others since this release.
_ENDS_BROKEN_CAPTURES = Version("2.13.0.dev0") <= Version(torch.__version__)

# Whose operators may be captured before that release: they launch kernels, and compute with
# operators of PyTorch, which tells of their waits. Others may wait where nobody sees it.
_SAFE = {
    *("aten", "prims", "hf_retrieval_assist"),
    *("ao", "bitsandbytes", "flash_attn", "flash_attn_3", "torchao"),
}
# The same of the kernels that transformers loads, whose namespaces are those of a build.
_SAFE_BUILDS = {
    *("activation", "layer_norm", "liger_kernels", "relu", "rmsnorm", "rotary", "tinygrad_rms"),
    *("flash_attn2", "flash_attn3", "flash_attn_ops", "flash_mla", "sgl_flash_attn3"),
    *("vllm_flash_attn3", "causal_conv1d", "mamba_ssm", "finegrained_fp8", "scattermoe"),
    *("quantization_bitsandbytes", "quantization_eetq", "quantization_gptq"),
}
_BUILD = re.compile(r"_(\w+?)(?:_cuda|_rocm)?_[0-9a-z]{7,}(?:_dirty)?")

# PyTorch does not say that these wait.
_WAITING = {aten._unique2, aten.unique_dim, aten.unique_consecutive}
_COPYING = {aten.copy_, aten._to_copy}

# What CUDA says of a call that no capture allows, and of what follows one, whoever made it.
_REFUSED = "not permitted when stream is capturing"
_BROKEN = "previous error during capture"

# Streams that PyTorch has of one priority. It hands them out in turns.
_STREAMS = 32

Record = Callable[..., tuple[Callable[[], Any], "Shown"]]
"""Records a computation, `within` a scope where one is given: returns what repeats it, and the
tensors in which its results lie."""


@dataclass
class Shown:
    """What a computation left on the device.

    Attributes:
        logits: [batch, width, vocab_size], by which a recording is compared.
        features: hidden states by boundary.
        outputs: what else is wanted of it.
    """

    logits: torch.Tensor
    features: dict[int, torch.Tensor]
    outputs: Any = None


def recorder(device: torch.device) -> CudaGraphs | None:
    """What records forwards on a device, on a stream on which no living one captures; None: nothing
    does, or all streams are taken.

    Graphs go on using what cuBLAS has allocated for their stream, and the end of a graph frees it.
    Others seldom multiply matrices on streams of high priority.
    """
    for _ in range(_STREAMS if device.type == "cuda" else 0):
        stream = torch.cuda.Stream(device, priority=-1)
        if all(stream != living.stream for living in list(_recorders)):
            return CudaGraphs(device, stream)
    return None


class _Operators(TorchDispatchMode):
    """Scope that notes operators which wait for a device, or may, and which PyTorch does not name.

    Attributes:
        found: in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        # The value of a tensor without dimensions goes with the launch.
        crosses = len({x.device.type for x in tensors if x.dim() or packet in _COPYING}) > 1
        if packet in _WAITING or crosses:
            self.found.append(f"{func} waits for the device")
        elif not (_ENDS_BROKEN_CAPTURES or _is_safe(func.namespace)):
            self.found.append(f"{func} may wait for the device (torch before 2.13)")
        return out


def _is_safe(namespace: str) -> bool:
    """Whether operators of a namespace are known to wait where PyTorch tells of it, if at all."""
    if namespace in _SAFE:
        return True
    build = _BUILD.fullmatch(namespace)
    return build is not None and build[1] in _SAFE_BUILDS


@contextmanager
def noting_waits() -> Iterator[list[str]]:
    """Scope that notes what in this thread's work waits for a CUDA device.

    PyTorch warns of it in all threads, wherever in an operator it happens.
    """
    thread, show = threading.get_ident(), warnings.showwarning
    operators = _Operators()

    def noted(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if "synchronizing CUDA" not in str(message):
            show(message, category, filename, lineno, *rest)
        elif threading.get_ident() == thread:
            operators.found.append(f"what runs at {filename}:{lineno} waits for the device")

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message="called a synchronizing CUDA")
        warnings.showwarning = noted  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with operators:
                yield operators.found
        finally:
            torch.cuda.set_sync_debug_mode(before)


class CudaGraphs:
    """Captures CUDA graphs of one device that share one pool of memory.

    PyTorch captures one graph at a time in a process. Other threads go on meanwhile: they draw
    random numbers, and those that wait for the device by `torch.cuda.synchronize` do so when the
    capture has ended. A capture that fails leaves streams and random states as it found them.

    Args:
        stream: no other living recorder's.
    """

    _lock = Lock()
    # An allocator asks the graphs of captures that broke about its streams for ever.
    _asked: ClassVar[list[torch.cuda.CUDAGraph]] = []

    def __init__(self, device: torch.device, stream: torch.cuda.Stream):
        self.stream, self._device = stream, device
        self._pool: Any = None
        # The allocator refuses captures into a pool of which no graph is left: this one is.
        self._newest: torch.cuda.CUDAGraph | None = None
        _recorders.add(self)

    def __call__(
        self,
        compute: Callable[[], Shown],
        within: AbstractContextManager[Any] | None = None,
    ) -> tuple[Callable[[], Any], Shown]:
        """Record a computation, see :data:`Record`.

        Args:
            within: the scope of what is captured; None: none.
        """
        with self._lock, torch.cuda.device(self._device):
            if within is not None:
                # What is compiled there is compiled where that may wait.
                with within:
                    compute()
            # The caller's stream computes: what cuBLAS allocates for the other one while it
            # captures lies in the graphs' pool, and lives as long as they do.
            with noting_waits() as waits:
                compute()
            if waits:
                raise RuntimeError(waits[0])
            if self._newest is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # PyTorch goes back to the caller's stream after a capture that ended well only.
            with torch.cuda.stream(self.stream), _synchronizing_behind(self._lock):
                try:
                    shown = self._capture(graph, compute, within or nullcontext())
                except BaseException as error:
                    if not _ENDS_BROKEN_CAPTURES:
                        self._mend(graph)
                    said = [str(one) for one in _chain(error)]
                    if _BROKEN in said[0] and not any(_REFUSED in words for words in said):
                        raise BrokenRecordingError(said[0]) from error
                    raise
            self._newest = graph
            return graph.replay, shown

    def _capture(
        self,
        graph: torch.cuda.CUDAGraph,
        compute: Callable[[], Shown],
        within: AbstractContextManager[Any],
    ) -> Shown:
        with ExitStack() as capture:
            # Random states of captures to come would belong to the inference mode (torch 2.10).
            with torch.inference_mode(False), _random_state_apart(self._device):
                # Other threads may use the device meanwhile.
                scope = torch.cuda.graph(
                    graph, self._pool, self.stream, capture_error_mode="thread_local"
                )
                capture.enter_context(scope)
            with within:
                return compute()

    def _mend(self, graph: torch.cuda.CUDAGraph) -> None:
        """The allocators wait for the end of a broken capture: that of the device is told, that of
        pinned memory cannot be, so no capture to come shares its pool."""
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        self._asked.append(graph)
        self._newest = None


@contextmanager
def _random_state_apart(device: torch.device) -> Iterator[None]:
    """Scope in which captures begin that leave a device's random numbers to all threads.

    A capture keeps the state of the device's generator, and whoever draws from it meanwhile fails.
    Here it keeps a copy, and what is drawn of that before it does is taken over.
    """
    generator = torch.cuda.default_generators[device.index]
    with DRAWS:
        state, copy = generator.graphsafe_get_state(), generator.clone_state()
        generator.graphsafe_set_state(copy)
        try:
            yield
        finally:
            # No state is read or written on a stream that captures.
            with torch.cuda.stream(torch.cuda.default_stream(device)):
                state.set_state(copy.get_state())
            generator.graphsafe_set_state(state)


@contextmanager
def _synchronizing_behind(lock: Lock) -> Iterator[None]:
    """Scope in which other threads' waits for whole devices wait for a lock first: they would fail,
    and break the capture."""
    plain = torch.cuda.synchronize

    @wraps(plain)
    def synchronize(*args: Any, **kwargs: Any) -> None:
        with lock:
            plain(*args, **kwargs)

    torch.cuda.synchronize = synchronize
    try:
        yield
    finally:
        if torch.cuda.synchronize is synchronize:
            torch.cuda.synchronize = plain


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those during whose handling it came."""
    while error is not None:
        yield error
        error = error.__context__


_recorders: weakref.WeakSet[CudaGraphs] = weakref.WeakSet()


class Replay(Recording):
    """A computation that is recorded the first time that it is asked for.

    Args:
        record: what records; None: nothing does, and it is not to be called.
        tolerance: the largest error of repeated logits, relative to their spread.
    """

    content: tuple[Callable[[], Any], Shown] | None

    def __init__(self, record: Record | None, tolerance: float):
        super().__init__()
        self._record, self._tolerance = record, tolerance

    @property
    def decided(self) -> bool:
        """Whether nothing remains to be recorded or compared."""
        return self.computes or self.trusted

    def place(self, shown: Shown) -> Shown:
        """Put the results of a recording where they are to lie, and show them there."""
        return shown

    def compute(self, asked: Callable[[], Shown]) -> Shown:
        return asked()

    def record(self, asked: Callable[[], Shown]) -> Shown:
        shown = asked()
        with self.trying():
            assert self._record is not None
            self.content = self._record(lambda: self.place(asked()))
        return shown

    def repeat(self, asked: Callable[[], Shown], aside: bool) -> Shown:
        assert self.content is not None
        repeat, recorded = self.content
        repeat()
        return recorded

    def difference(self, repeated: Shown, computed: Shown) -> str | None:
        error = float((repeated.logits - computed.logits).abs().amax() / computed.logits.std())
        # NaN, which compares as no error, is one.
        near = error <= self._tolerance
        return None if near else f"repeated logits are off by {error:.2g} of their spread"
