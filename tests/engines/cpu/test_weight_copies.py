"""Copies stand for their weights as long as these are what was packed."""

import gc

import pytest
import torch
from torch import nn

from hf_retrieval_assist.engines.cpu.compact import CompactWeight
from hf_retrieval_assist.engines.cpu.quantized import FourBitWeight, QuantizedWeight
from hf_retrieval_assist.engines.cpu.weight_copies import WeightCopies
from tests.support.products import dequantized, from_four_bits
from tests.support.quick import crossed

KINDS = (QuantizedWeight, FourBitWeight, CompactWeight)
SHAPE = (300, 64)


def copies(kind=QuantizedWeight):
    return WeightCopies(kind.pack, lambda weight: 2 * weight.numel())


def weight_of(rows=SHAPE[0], columns=SHAPE[1]):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return nn.Parameter(weight.bfloat16().float(), requires_grad=False)


@pytest.mark.parametrize("place", [(0, 0), (1, 3), (4, 31)])
def test_values_that_are_not_bfloat16s_have_no_copy(place):
    weight = torch.randn(5, 32).bfloat16().float()
    packed = CompactWeight.pack(weight)
    assert torch.equal(packed.values.float(), weight)
    assert packed.nbytes == 5 * 32 * 2
    for other in (1 + 2.0**-12, torch.nan):
        weight[place] = other
        assert CompactWeight.pack(weight).values is None


def test_a_weight_is_packed_once_for_all_who_share_it_and_goes_with_them():
    weights, layer = copies(), nn.Linear(32, 20)
    weight, kept = weight_of(), weights.of(layer.weight).copy.nbytes
    other = nn.Parameter(weight.detach(), requires_grad=False)
    first = weights.of(weight)
    assert weights.of(weight) is first
    assert weights.of(other) is first
    assert weights.nbytes() == first.copy.nbytes + kept
    del weight, other, first
    gc.collect()
    assert weights.nbytes() == kept


def trained(layer):
    layer.weight.requires_grad_()
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    layer.weight.requires_grad_(False)


COUNTED = {
    "one element": lambda layer: layer.weight[7, 3].add_(1),
    "another dtype": lambda layer: layer.to(torch.bfloat16),
    "optimiser": trained,
    "replaced": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(SHAPE), False)),
    "moved": lambda layer: setattr(layer.weight, "data", torch.randn(SHAPE)),
    "shortened": lambda layer: setattr(layer.weight, "data", layer.weight.data[:-1]),
}
NOT_COUNTED = {
    "signs": lambda layer: layer.weight.data.neg_(),
    "rows in another order": lambda layer: layer.weight.data.copy_(layer.weight.flip(0)),
    "one row": lambda layer: layer.weight.data[123].copy_(torch.randn(SHAPE[1])),
    "one column": lambda layer: layer.weight.data[:, 9].zero_(),
    "numpy": lambda layer: layer.weight.detach().numpy().__setitem__(299, 1.0),
}


WRITES = {f"counted-{name}": write for name, write in COUNTED.items()}
WRITES |= {f"data-{name}": write for name, write in NOT_COUNTED.items()}


@pytest.mark.parametrize(("name", "kind"), crossed(WRITES, KINDS))
@torch.no_grad()
def test_a_weight_that_was_written_to_is_packed_anew(name, kind):
    write, counted = WRITES[name], name.startswith("counted")
    weights, layer = copies(kind), nn.Linear(*SHAPE[::-1])
    layer.weight = weight_of()
    before = weights.of(layer.weight)
    assert before.stands_for(layer.weight)
    write(layer)
    assert before.stands_for(layer.weight) != counted
    assert weights.find(layer.weight) is None
    after = weights.of(layer.weight)
    assert weights.of(layer.weight) is after is not before
    assert after.stands_for(layer.weight)
    expected, found = layer.weight.float(), after.copy
    if kind is QuantizedWeight:
        torch.testing.assert_close(dequantized(found), expected, rtol=0, atol=0.05)
    if kind is FourBitWeight:
        rest = from_four_bits(found.values, found.shape) - expected
        assert rest.norm() < 0.1 * expected.norm()
    before = None
    gc.collect()
    assert weights.nbytes() == after.copy.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_columns_show_where_there_are_more_than_rows(kind):
    weights, weight = copies(kind), weight_of(40, 3000)
    for column in (0, 1500, 2999):
        weights.of(weight)
        weight.data[:, column].neg_()
        assert weights.find(weight) is None


@pytest.mark.parametrize("kind", KINDS[:2])
def test_values_that_are_not_finite_are_what_was_packed(kind):
    """Inference tensors are such, whose writes PyTorch does not count."""
    weights, weight = copies(kind), weight_of()
    weight.data[5, 5], weight.data[6, 6] = torch.nan, torch.inf
    first = weights.of(weight)
    assert weights.find(weight) is first
    with torch.inference_mode():
        weight = torch.randn(SHAPE)
        assert weights.of(weight).copy.shape == SHAPE
        weight[9] = 0
        assert weights.find(weight) is None
