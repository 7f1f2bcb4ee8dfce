"""A CPU stand-in for CUDA graphs: a computation's operators, recorded and executed again."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_retrieval_assist.verification import fixed_memory, replay, service

from .accelerator import _NO_KERNEL, _WAITING, aten


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in _WAITING:
            raise RuntimeError(f"{func} waits for the device while it is captured")
        out = func(*args, **(kwargs or {}))
        self.operators.append((func, args, kwargs or {}, out))
        return out


def record(compute):
    """Records as :class:`hf_retrieval_assist.verification.replay.CudaGraphs` does.

    Repeating runs no Python of the model, on the memory that the recording used.
    """
    tape = _Tape()
    with tape:
        shown = compute()

    def repeat():
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


def serve_in_place(monkeypatch):
    """Serve calls on the CPU as on an accelerator that records."""
    monkeypatch.setattr(fixed_memory, "_STAYING", ("cpu",))
    monkeypatch.setattr(service, "has_triton", lambda device: False)
    monkeypatch.setattr(replay, "recorder", lambda device: record)
