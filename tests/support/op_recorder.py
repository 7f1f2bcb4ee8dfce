"""A CPU stand-in for CUDA graphs: a computation's operators, recorded and executed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hf_retrieval_assist.decoding import call, loop
from hf_retrieval_assist.draft_models import draft_model
from hf_retrieval_assist.kernels.scopes import innermost
from hf_retrieval_assist.verification import replay, service

from .accelerator import _NO_KERNEL, _WAITING, aten


class _Tape(TorchDispatchMode):
    """Attributes:
    running: those that record, the innermost last.
    """

    running: ClassVar[list[_Tape]] = []

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, Any]] = []

    def __enter__(self) -> _Tape:
        self.running.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.running.pop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _WAITING:
            raise RuntimeError(f"{func} waits for the device while it is captured")
        out = func(*args, **(kwargs or {}))
        self.operators.append((func, args, kwargs or {}, out))
        return out


def record(compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Records as :class:`hf_retrieval_assist.verification.replay.CudaGraphs` does.

    Repeating runs no Python of the model, on the memory that the recording used.
    """
    tape = _Tape()
    with tape:
        shown = compute()

    def repeat() -> None:
        for func, args, kwargs, out in tape.operators:
            packet = getattr(func, "overloadpacket", None)
            if packet in _NO_KERNEL or packet is aten.empty:
                continue
            again = func(*args, **kwargs)
            if packet is not None and func._schema.is_mutable:
                continue
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    return repeat, shown


class Compiler:
    """A backend of `torch.compile` that runs graphs as they are; a tape records each as one
    operator. What it counts is no attribute of its own, which would be one of models.
    """

    @property
    def graphs(self) -> int:
        """How many were compiled."""
        return int(counters["stats"]["unique_graphs"])

    @property
    def called(self) -> int:
        """How often Python has called one of them: what a recording repeats calls none."""
        return int(counters["stats"]["called"])

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*tensors: Any) -> Any:
            counters["stats"]["called"] += 1
            out = graph.forward(*tensors)
            scope = innermost()

            def again(*tensors: Any) -> Any:
                # Its kernels would be those that were recorded, whoever is in which scope.
                with scope or nullcontext():
                    return graph.forward(*tensors)

            for tape in _Tape.running[-1:]:
                tape.operators.append((again, tensors, {}, out))
            return out

        return run

    def __deepcopy__(self, memo: Any) -> Compiler:
        # transformers compiles with a copy of a call's options.
        return self


@contextmanager
def compiler() -> Iterator[Compiler]:
    """Scope of code that was compiled in it, whose counts begin at 0."""
    torch._dynamo.reset()
    counters.clear()
    yield Compiler()
    torch._dynamo.reset()


def outside_of_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Under a mode such as a tape torch runs compiled code as if it were not."""

    def compiled(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return compiled


def serve_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve calls on the CPU as on an accelerator that records."""
    for module in (loop, service, draft_model):
        monkeypatch.setattr(module, "stays_in_place", lambda device: True)
    monkeypatch.setattr(replay, "recorder", lambda device, compiled: record)
    made = call.compiled_forward

    def recordable(*arguments: Any) -> Any:
        found = made(*arguments)
        if found is None or found.recordable is None:
            return found
        return replace(found, recordable=outside_of_modes(found.recordable))

    monkeypatch.setattr(call, "compiled_forward", recordable)
