"""A weight that keeps int8 values and a scale for each row, as quantisation libraries' do."""

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


class Int8Weight(torch.Tensor):
    """What `linear` multiplies by widening all of it.

    Attributes:
        values: int8 [outputs, depth].
        scales: [outputs, 1].
        zeros: int8 [outputs, 1], taken from the values; None: nothing is.
        rounds_rows: whether `linear` rounds the rows that it multiplies to eight bits, too.
        products: how often this class multiplied.
    """

    products = 0

    @staticmethod
    def __new__(cls, values, scales, *_, **__):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scales.dtype)

    def __init__(self, values, scales, zeros=None, rounds_rows=False):
        self.values, self.scales, self.zeros, self.rounds_rows = values, scales, zeros, rounds_rows

    def __tensor_flatten__(self):
        return ["values", "scales"] + ["zeros"] * (self.zeros is not None), self.rounds_rows

    def widened(self):
        values = self.values.to(self.scales.dtype)
        return (values if self.zeros is None else values - self.zeros) * self.scales

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not torch._C._nn.linear:  # which `F.linear` is, outside of scopes of kernels
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        x, weight, *rest = args
        cls.products += 1
        if weight.rounds_rows:
            step = x.abs().amax(-1, keepdim=True) / 127
            x = (x / step).round() * step
        return func(x, weight.widened(), *rest, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            weight = args[0]
            return cls(weight.values, weight.scales, weight.zeros, weight.rounds_rows)
        args, kwargs = tree_map_only(Int8Weight, Int8Weight.widened, (args, kwargs or {}))
        return func(*args, **kwargs)


def rounded(weight, **options):
    """A matrix in eight bits."""
    scales = weight.detach().abs().amax(1, keepdim=True) / 127
    values = (weight.detach() / scales).round().to(torch.int8)
    return nn.Parameter(Int8Weight(values, scales, **options), requires_grad=False)


def in_eight_bits(model, **options):
    """A model whose linear layers, the output layer excepted, keep such weights."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and "lm_head" not in name:
            layer.weight = rounded(layer.weight, **options)
    return model
