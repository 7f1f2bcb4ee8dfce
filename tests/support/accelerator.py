"""A stand-in for an accelerator: what a step would launch and copy on one, counted on a CPU.

Inside `with Accelerator() as device:` tensors on its device say that they are on `meta` but hold
data of the CPU, so that what runs on devices other than the CPU runs here; every kernel, every copy
between the host and the device and every wait for the device is counted, apart for what happens in
forwards of a model (:meth:`Accelerator.watch`) and outside of them.
"""

from collections import Counter
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from hf_retrieval_assist.engines.cuda import fixed_memory
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES

from .watching import of_library

aten = torch.ops.aten

DEVICE = torch.device("meta")

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
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class DeviceTensor(torch.Tensor):
    """A tensor on the stand-in; `held` has its data."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        kind = {"dtype": held.dtype, "device": DEVICE}
        return torch.Tensor._make_wrapper_subclass(cls, held.size(), **layout, **kind)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} on a device tensor outside of `with Accelerator()`")

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.held.data_ptr()

    def item(self):
        return self.cpu().item()

    def __repr__(self, **_):
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def __getitem__(self, index):
        return torch.Tensor.__getitem__(self, _placed(index))

    def __setitem__(self, index, value):
        torch.Tensor.__setitem__(self, _placed(index), value)

    def new_tensor(self, data, dtype=None, device=None):
        host = _tensor(data, dtype=dtype or self.dtype)
        return host.to(self.device if device is None else device)


def _placed(index):
    """An index whose lists are on the device: PyTorch would make meta tensors of them."""
    if isinstance(index, tuple):
        return tuple(map(_placed, index))
    if isinstance(index, list) or (type(index).__module__ == "numpy" and index.ndim):
        return torch.as_tensor(index).to(DEVICE)
    return index


_tensor, _sdpa = torch.tensor, F.scaled_dot_product_attention


def _tensor_on_devices(data, *args, device=None, **kwargs):
    host = _tensor(data, *args, **kwargs)
    return host if device is None else host.to(device)


def _held(x):
    return x.held if isinstance(x, DeviceTensor) else x


def _wrapped(x):
    return DeviceTensor(x) if isinstance(x, torch.Tensor) else x


class Accelerator(TorchDispatchMode):
    """See the module's docstring.

    Attributes:
        counts: by ("model" or "loop", "kernel", "to device", "to host" or "wait").
        calls: the same, with the operator's name.
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.calls = Counter()
        self._forwards = 0

    def __enter__(self):
        torch.tensor, F.scaled_dot_product_attention = _tensor_on_devices, self._attention
        fixed_memory._STAYING = (DEVICE.type,)
        # Steps are as they are where they are recorded, whoever watches them.
        WORKSPACES.records = lambda *_: True
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.tensor, F.scaled_dot_product_attention = _tensor, _sdpa
        fixed_memory._STAYING = ("cuda",)
        del WORKSPACES.records

    def reset(self):
        self.counts.clear()
        self.calls.clear()

    @contextmanager
    def watch(self, model):
        """Scope in which the model's forwards are told from what surrounds them."""

        def enter(module, *_):
            self._forwards += module is model

        def leave(module, *_):
            self._forwards -= module is model

        handles = (
            register_module_forward_pre_hook(of_library(enter)),
            register_module_forward_hook(of_library(leave)),
        )
        yield
        for handle in handles:
            handle.remove()

    def put(self, module):
        """Move a model here."""
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and not isinstance(tensor, DeviceTensor):
                        tensors[name] = DeviceTensor(tensor.detach())
                        tensors[name]._is_param = tensors is part._parameters
        return module

    def count(self, kind, operator):
        where = "model" if self._forwards else "loop"
        self.counts[where, kind] += 1
        self.calls[where, kind, str(operator)] += 1

    def _attention(self, query, *args, **kwargs):
        """One kernel, as a fused implementation is."""
        if not isinstance(query, DeviceTensor):
            return _sdpa(query, *args, **kwargs)
        with _disable_current_modes():
            out = _sdpa(query.held, *map(_held, args), **tree_map(_held, kwargs))
        self.count("kernel", "scaled_dot_product_attention")
        return DeviceTensor(out)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = any(isinstance(x, DeviceTensor) for x in tensors)
        wanted = kwargs.get("device")
        placed = here if wanted is None else torch.device(wanted).type == DEVICE.type
        if not here and not placed:
            return func(*args, **kwargs)
        inner = tree_map(_held, kwargs)
        if wanted is not None:
            inner["device"] = torch.device("cpu")
        if func.overloadpacket is aten.copy_:
            return self._copy(func, args, inner)
        given = tree_map(_held, args)
        if func.overloadpacket is aten.histc:  # CPUs do not count integers
            given = [given[0].float(), *given[1:]]
        out = func(*given, **inner)
        if func.overloadpacket is aten._to_copy and here != placed:
            self.count("to device" if placed else "to host", func)
            # A host tensor of the same dtype would be handed through.
            return DeviceTensor(out) if placed else out.clone()
        self.count(self._kind(func, args, tensors), func)
        if func._schema.is_mutable and (target := _written(func, args, kwargs)) is not None:
            return target
        return tree_map(_wrapped, out)

    def _copy(self, func, args, kwargs):
        sides = tuple(isinstance(x, DeviceTensor) for x in args[:2])
        kinds = {(True, True): "kernel", (True, False): "to device", (False, True): "to host"}
        self.count(kinds[sides], func)
        func(*map(_held, args), **kwargs)
        return args[0]

    def _kind(self, func, args, tensors):
        packet = func.overloadpacket
        strangers = [x for x in tensors if not isinstance(x, DeviceTensor) and x.dim()]
        if strangers and packet not in _INDEXING:
            raise RuntimeError(f"{func}: a tensor of the host among tensors of the device")
        for _ in strangers:
            self.count("to device", func)
        if packet in _INDEXING and any(
            isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        ):
            return "wait"
        return "view" if packet in _NO_KERNEL else "wait" if packet in _WAITING else "kernel"


def _written(func, args, kwargs):
    """What an operator with one result writes to and hands back."""
    written = [
        kwargs[argument.name] if argument.name in kwargs else args[i]
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return written[0] if len(func._schema.returns) == 1 else tuple(written) or None
