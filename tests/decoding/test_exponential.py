"""Exponentially distributed numbers: torch's own, and the generator's state behind them."""

import pytest
import torch

from hf_retrieval_assist.decoding import exponential as module
from hf_retrieval_assist.decoding.exponential import exponential


@pytest.mark.parametrize("shape", [(1, 262_144), (3, 50), (7,), (0,)])
@pytest.mark.parametrize("fault", [None, "uncertain", "slow"])
def test_torch_draws_the_same(shape, fault, monkeypatch):
    module.is_fast()  # asked once in a process
    if fault == "uncertain":  # every number could be rounded to either side
        monkeypatch.setattr(module, "_ERROR", 0.5)
    if fault == "slow":
        monkeypatch.setattr(module, "is_fast", lambda: False)
    own, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for _ in range(3):
        expected = torch.empty(shape).exponential_(generator=own)
        assert torch.equal(exponential(shape, other), expected)
        assert torch.equal(other.get_state(), own.get_state())


def test_a_torch_that_draws_otherwise_is_noticed(monkeypatch):
    monkeypatch.setattr(module, "_by_many", lambda shape, generator: torch.zeros(shape))
    assert not module.is_fast.__wrapped__()
