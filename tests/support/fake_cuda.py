"""FakeTensors that say they are on a card, and what PyTorch's attention kernels ask of them."""

from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

DEVICE = torch.device("cuda:0")


class _Indexing(TorchFunctionMode):
    """Indexing in Python asks for the device's guard, which a build for CPUs has not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__ and isinstance(args[0], FakeTensor):
            return _indexed(*args)
        return func(*args, **(kwargs or {}))


def _indexed(x, index):
    index = index if isinstance(index, tuple) else (index,)
    named = sum(part is not None and part is not Ellipsis for part in index)
    tensors = []
    dim = 0
    for part in index:
        if part is None:
            x = aten.unsqueeze(x, dim)
        elif part is Ellipsis:
            skipped = x.dim() - dim - (named - len([t for t in tensors if t is not None]))
            tensors += [None] * skipped
            dim += skipped
            continue
        elif isinstance(part, int):
            x = aten.select(x, dim, part)
            continue
        elif isinstance(part, slice) and part != slice(None):
            x = aten.slice(x, dim, part.start, part.stop, part.step or 1)
        tensors.append(part if isinstance(part, torch.Tensor) else None)
        dim += 1
    return aten.index(x, tensors) if any(t is not None for t in tensors) else x


class Kernels(TorchDispatchMode):
    """Asserts what the memory-efficient kernel asserts of its bias; counts kernels of attention."""

    def __init__(self):
        super().__init__()
        self.efficient = 0
        self.flash = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is aten._scaled_dot_product_efficient_attention:
            self.efficient += 1
            _check_bias(args[0], args[3])
        self.flash += "varlen_attn" in str(func)
        return func(*args, **(kwargs or {}))


def _check_bias(query, bias):
    assert bias.dtype is query.dtype
    assert bias.stride(3) == 1 or bias.shape[3] == 1
    aligned = 16 // query.element_size()
    for dim, size in enumerate(query.shape[:3]):
        assert size == 1 or bias.stride(dim) % aligned == 0, f"bias: stride {bias.stride()}"


@contextmanager
def on_a_card():
    """Scope in which tensors may be made on `DEVICE`."""
    kernels = Kernels()
    with FakeTensorMode(allow_non_fake_inputs=True), _Indexing(), kernels:
        yield kernels
