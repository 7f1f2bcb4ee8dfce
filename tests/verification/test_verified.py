"""The largest logits, against torch.topk."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_retrieval_assist.verification import verified
from hf_retrieval_assist.verification.verified import TopLogits, Verified


def test_both_ways_leave_out_what_fills_the_vocabulary_up(monkeypatch):
    monkeypatch.setattr(verified, "_CHUNK_CELLS", 20)
    logits = torch.randn(5, 12)
    logits[:, 9:] = 100
    nodes = np.array([0, 2, 4])
    expected = logits[nodes, :9].topk(3)
    ids, values = TopLogits(logits).of(nodes, 3, 9)
    assert (ids == expected.indices.numpy()).all()
    assert (values == expected.values.numpy()).all()
    best = logits[:, :9].topk(4)
    found = TopLogits(best.values.numpy(), ids=best.indices.numpy())
    assert len(found) == len(TopLogits(logits)) == 5
    for one, other in zip(found.of(nodes, 3, 9), (ids, values), strict=True):
        assert (one == other).all()


def test_tokens_of_several_rows_are_looked_at_as_one():
    logits = torch.randn(9, 30)
    parts = [np.arange(1, 3), np.arange(4, 5), np.arange(5, 9)]
    first, *others = (TopLogits(logits, part) for part in parts)
    best = logits.topk(4)
    on_host = best.values.numpy(), best.indices.numpy()
    found = [TopLogits(on_host[0], part, on_host[1]) for part in parts]
    nodes = np.array([0, 2, 3, 6])
    expected = logits[np.array([1, 4, 5, 8])].topk(3)
    for top in (first.joined(others), found[0].joined(found[1:])):
        assert len(top) == 7
        ids, values = top.of(nodes, 3, 30)
        assert (ids == expected.indices.numpy()).all()
        assert (values == expected.values.numpy()).all()
    with pytest.raises(ValueError, match="one forward"):
        first.joined([TopLogits(logits.clone())])


def test_nothing_is_found_behind_nothing():
    ids, values = TopLogits(torch.randn(2, 9)).of(np.empty(0, np.int64), 3, 9)
    assert ids.shape == values.shape == (0, 3)


@pytest.mark.parametrize("screened", [False, True])
def test_a_forward_tells_those_of_a_rows_tokens_in_their_order(screened):
    """Of two rows of five tokens, the second one's root stands behind a pending token; a screen's
    logits have not been rounded to the model's dtype."""
    logits = torch.stack([torch.randperm(30) for _ in range(10)]).view(2, 5, 30).bfloat16()
    near = torch.randn(10, 30)
    verified = Verified(logits, [0, 1], None)
    if screened:
        verified.screened = SimpleNamespace(near=near)
    expected = (near[6:9] if screened else logits[1, 1:4].float()).topk(3)
    ids, values = verified.top(1, 2).of(np.arange(3), 3, 30)
    assert (ids == expected.indices.numpy()).all()
    assert (values == expected.values.numpy()).all()
