"""A CPU stand-in for CUDA graphs: a computation's operators, recorded and executed again."""

from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_retrieval_assist.engines.cuda import engine as cuda_engine
from hf_retrieval_assist.engines.cuda import fixed_memory, fixed_verifier, replay
from hf_retrieval_assist.engines.cuda.fixed_memory import FixedMemory
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES

from .watching import a_librarys

aten = torch.ops.aten

# Operators that launch nothing: they make views, or memory without content.
_NO_KERNEL = {
    *(aten.view, aten.t, aten.transpose, aten.permute, aten.slice, aten.select, aten.unsqueeze),
    *(aten.squeeze, aten.expand, aten._unsafe_view, aten.alias, aten.detach, aten.split),
    *(aten.split_with_sizes, aten.chunk, aten.unbind, aten.as_strided, aten._reshape_alias),
    *(aten.unfold, aten.diagonal, aten.lift_fresh, aten.lift, aten.set_, aten.narrow),
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided),
    *(aten.is_same_size,),
}
# Operators whose results have a shape that only the device knows.
_WAITING = {
    *(aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.equal),
    *(aten._local_scalar_dense, aten.is_nonzero, aten.repeat_interleave),
}


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
    """Records as :class:`hf_retrieval_assist.engines.cuda.replay.CudaGraphs` does.

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
    monkeypatch.setattr(cuda_engine, "has_triton", lambda device: False)
    monkeypatch.setattr(replay, "recorder", lambda *_: record)


@contextmanager
@a_librarys
def few_tokens(model):
    """transformers' scope of decoding steps, as on an accelerator."""
    before = model.get_experts_implementation()
    copying = {k: "batched_mm" if v == "grouped_mm" else v for k, v in before.items()}
    model.set_experts_implementation(copying)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def idle(model):
    """The workspace that was used last."""
    return WORKSPACES.report(model).idle[-1]


def growing(monkeypatch, slots):
    """The capacities that memory takes, by so many slots, as if no text's length were known."""
    monkeypatch.setattr(fixed_memory, "capacity_bucket", lambda wanted: -(-wanted // slots) * slots)
    monkeypatch.setattr(fixed_memory, "with_room", lambda capacity, slot_bytes: capacity)
    monkeypatch.setattr(fixed_verifier, "WIDTHS", (1, 2, 4, 8))
    grow, capacities = FixedMemory.grow, []

    def noted(memory, wanted, reserved=None):
        memory._shape = replace(memory._shape, capacity=0)
        grow(memory, wanted, reserved)
        capacities.append(memory.workspace.shape.capacity)

    monkeypatch.setattr(FixedMemory, "grow", noted)
    return capacities
