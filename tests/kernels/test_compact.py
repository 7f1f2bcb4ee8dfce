"""Float32 weights read as bfloat16: the same bits, or the weights themselves."""

import pytest
import torch

from hf_retrieval_assist.kernels.compact import CompactWeight
from hf_retrieval_assist.kernels.skinny import PATHS, skinny_linear


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (64, 33), (300, 640), (1000, 1024)])
def test_bits_are_those_of_the_weight_in_float32(shape, path):
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=random).bfloat16()
    bias = torch.randn(shape[0], generator=random)
    for rows in (1, 2, 5, 8, 65):
        x = torch.randn(rows, shape[1], generator=random)
        for added in (None, bias):
            expected = skinny_linear(x, weight.float(), added, path=path)
            assert torch.equal(skinny_linear(x, weight, added, path=path), expected)


def test_arguments():
    x, weight, bias = torch.ones(2, 8), torch.ones(3, 8).bfloat16(), torch.ones(3)
    with pytest.raises(TypeError, match=r"x: expected torch\.float16"):
        skinny_linear(x, weight.half())
    with pytest.raises(TypeError, match=r"bias: expected torch\.float32"):
        skinny_linear(x, weight, bias.bfloat16())
    with pytest.raises(ValueError, match=r"x: expected shape \[..., 8\]"):
        skinny_linear(x[:, :7], weight)


@pytest.mark.parametrize("place", [(0, 0), (1, 3), (4, 31)])
def test_other_values_have_no_copy(place):
    weight = torch.randn(5, 32).bfloat16().float()
    packed = CompactWeight.pack(weight)
    assert torch.equal(packed.values.float(), weight)
    assert packed.nbytes == 5 * 32 * 2
    weight[place] = 1 + 2.0**-12
    assert CompactWeight.pack(weight).values is None
    weight[place] = float("nan")
    assert CompactWeight.pack(weight).values is None
