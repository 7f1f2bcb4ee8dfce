"""Kernels that multiply rows by a matrix, and what their products are measured against."""

import pytest
import torch

from hf_retrieval_assist.kernels.quantized import QuantizedWeight
from hf_retrieval_assist.kernels.skinny import (
    PATHS,
    int8_linear,
    pack_int8,
    scaled_linear,
    skinny_linear,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a unit in the last place, relative, of each dtype, and its smallest number.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}

paths = pytest.mark.parametrize("path", PATHS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(weight, path):
    return QuantizedWeight(*pack_int8(weight, path=path), depth=weight.shape[1])


def dequantized(weight):
    """The matrix that its products are of, float32 [outputs, depth]."""
    return (weight.values.float() * weight.scales[:, None])[:, : weight.depth]


class Whole:
    """The weight as it is."""

    def __init__(self, weight, path):
        self.exact, self.path = weight, path

    def __call__(self, x, bias=None, **options):
        return skinny_linear(x, self.exact, bias, path=self.path, **options)

    def rounding_of(self, x):
        """What the kernel's rounding of the rows takes, at most."""
        return 0.0


class Packed(Whole):
    """In eight bits, by which rows are rounded to fourteen."""

    def __init__(self, weight, path):
        self.weight = packed(weight, path)
        super().__init__(dequantized(self.weight) if len(weight) else weight, path)

    def __call__(self, x, bias=None, **options):
        parts = (self.weight.values, self.weight.scales)
        return int8_linear(x, *parts, bias, path=self.path, **options)

    def rounding_of(self, x):
        step = x.double().abs().amax(-1, keepdim=True) / 8191 / 2
        return 1.01 * step * self.exact.double().abs().sum(-1)


class Scaled(Whole):
    """Integers and a scale for each output, as quantisation libraries keep them."""

    def __init__(self, weight, path):
        amax = weight.float().abs().amax(1) if weight.shape[1] else weight.new_ones(len(weight))
        self.scales = (amax.float() / 127).to(DTYPES[len(weight) % 3])
        self.values = (weight.float() / self.scales.float()[:, None]).round().clamp(-128, 127)
        self.values = self.values.nan_to_num().to(torch.int8)
        super().__init__(self.values.double() * self.scales.double()[:, None], path)

    def __call__(self, x, bias=None, **options):
        return scaled_linear(x, self.values, self.scales, bias, path=self.path, **options)


KERNELS = (Whole, Packed, Scaled)


def assert_close(y, x, weight, bias=None):
    """Within the textbook bound of a float32 sum of k products, plus one rounding to the dtype."""
    exact = x.double() @ weight.exact.double().T
    size = x.double().abs() @ weight.exact.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    bound = (x.shape[-1] + 8) * 2.0**-24 * size + weight.rounding_of(x)
    bound = bound + ROUNDING[y.dtype] * (exact.abs() + bound) + SMALLEST[y.dtype]
    if type(weight) is not Whole:
        bound = bound + 2.0**-24
    assert y.dtype == x.dtype
    assert y.shape == exact.shape
    assert ((y.double() - exact).abs() <= bound).all()
