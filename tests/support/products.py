"""Kernels that multiply rows by a matrix, and what their products are measured against."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from hf_retrieval_assist.engines.cpu import attention
from hf_retrieval_assist.engines.cpu.quantized import QuantizedWeight
from hf_retrieval_assist.engines.cpu.reroute import reroute
from hf_retrieval_assist.engines.cpu.skinny import (
    PATHS,
    dense,
    int4,
    int8,
    pack_int4,
    pack_int8,
    product,
)

from .watching import results_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a unit in the last place, relative, of each dtype, and its smallest number.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}

paths = pytest.mark.parametrize("path", PATHS)


def everywhere(test):
    """Run a test for every dtype on every instruction set."""
    return paths(pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])(test))


@contextmanager
def attending_kernels():
    """Scope in which the numbers of queries are noted whose attention kernels compute."""
    with pytest.MonkeyPatch.context() as patch:
        yield results_of(patch, attention, "kernel_attention", lambda y, query, *_: query.shape[2])


@torch.no_grad()
def same_within_a_scope(compute, x):
    """What a function gives, within a scope of the kernels to the bit what it gives outside."""
    plain = compute(x)
    with reroute():
        assert torch.equal(compute(x), plain)
    return plain


def with_rounding(bound, exact, dtype):
    """How far from an exact result one may be that is rounded to a dtype besides."""
    return bound + ROUNDING[dtype] * (exact.abs() + bound) + SMALLEST[dtype]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(weight, path):
    return QuantizedWeight(*pack_int8(weight, path=path), depth=weight.shape[1])


def dequantized(weight):
    """The matrix that its products are of, float32 [outputs, depth]."""
    return (weight.values.float() * weight.scales[:, None])[:, : weight.depth]


def in_groups(matrix):
    """[rows, groups, 32] columns that share a scale in four bits."""
    return F.pad(matrix, (0, -matrix.shape[-1] % 32)).unflatten(-1, (-1, 32))


# What a weight in four bits may be, times its scale.
LEVELS = torch.tensor([-64, -51, -40, -32, -24, -17, -11, -5, 2, 8, 14, 21, 28, 36, 47, 62])


def from_four_bits(blocks, shape):
    """The matrix that products with blocks of `pack_int4` are of, float64; linear_kernels.h says
    how they lie."""
    outputs, depth = shape
    parts = blocks.view(len(blocks), -(-depth // 32), 288)
    scales = parts[..., :32].contiguous().view(torch.float16)
    eights = parts[..., 32:].unflatten(2, (4, 16, 4))
    numbers = torch.stack([eights & 15, eights >> 4], 4).transpose(2, 3).flatten(3)
    values = LEVELS[numbers.long()].double()
    weight = (values * scales[..., None]).transpose(1, 2).flatten(2).flatten(0, 1)
    return weight[:outputs, :depth]


class Whole:
    """The weight as it is."""

    def __init__(self, exact, path, matrix=None):
        self.exact, self.path, self.matrix = exact, path, matrix or dense(exact)

    def __call__(self, x, bias=None, **options):
        return product(x, self.matrix, bias, path=self.path, **options)

    def rounding_of(self, x):
        """What the kernel's rounding of the rows takes, at most."""
        return 0.0

    def check(self, x, bias=None):
        """Allow the textbook bound of a float32 sum of k products, plus one rounding to the
        dtype."""
        y, weight = self(x, bias), self.exact.double()
        exact, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
        if bias is not None:
            exact, size = exact + bias.double(), size + bias.double().abs()
        bound = (x.shape[-1] + 8) * 2.0**-24 * size + self.rounding_of(x)
        bound = with_rounding(bound, exact, y.dtype)
        if type(self) is not Whole:
            bound = bound + 2.0**-24
        assert y.dtype == x.dtype
        assert y.shape == exact.shape
        assert ((y.double() - exact).abs() <= bound).all()


class Packed(Whole):
    """The product in eight bits, by which rows are rounded to fourteen."""

    def __init__(self, weight, path):
        self.weight = packed(weight, path)
        exact = dequantized(self.weight) if len(weight) else weight
        super().__init__(exact, path, self.weight.matrix)

    def rounding_of(self, x):
        step = x.double().abs().amax(-1, keepdim=True) / 8191 / 2
        return 1.01 * step * self.exact.double().abs().sum(-1)


class PackedInFour(Whole):
    """The product in four bits, by which 32 neighbours of a row are rounded to eight."""

    def __init__(self, weight, path):
        blocks = pack_int4(weight, path=path)
        matrix = int4(blocks, *weight.shape)
        super().__init__(from_four_bits(blocks, weight.shape), path, matrix)

    def rounding_of(self, x):
        x, weight = (in_groups(part.double().abs()) for part in (x, self.exact))
        return 1.01 * (x.amax(-1) / 127 / 2) @ weight.sum(-1).T


class Scaled(Whole):
    """Integers and a scale for each output, as quantisation libraries keep them."""

    def __init__(self, weight, path):
        amax = weight.float().abs().amax(1) if weight.shape[1] else weight.new_ones(len(weight))
        scales = (amax.float() / 127).to(DTYPES[len(weight) % 3])
        values = (weight.float() / scales.float()[:, None]).round().clamp(-128, 127)
        values = values.nan_to_num().to(torch.int8)
        exact = values.double() * scales.double()[:, None]
        super().__init__(exact, path, int8(values, scales))


KERNELS = (Whole, Packed, PackedInFour, Scaled)
