"""The largest logits, against torch.topk."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_retrieval_assist.engines.cpu.screened import ScreenedVerified
from hf_retrieval_assist.verification import verified
from hf_retrieval_assist.verification.verified import TopLogits, Verified


@pytest.mark.parametrize("on_host", [False, True])
def test_tokens_of_several_rows_are_looked_at_as_one(on_host, monkeypatch):
    """And without what fills the vocabulary up."""
    monkeypatch.setattr(verified, "_CHUNK_CELLS", 60)
    logits = torch.randn(9, 30)
    logits[:, 25:] = 100
    best = logits[:, :25].topk(4)
    given, ids = (best.values.numpy(), best.indices.numpy()) if on_host else (logits, None)
    parts = (np.arange(1, 3), np.arange(4, 5), np.arange(5, 9))
    first, *others = (TopLogits(given, part, ids) for part in parts)
    top = first.joined(others)
    assert (len(top), len(TopLogits(given, ids=ids))) == (7, 9)
    for nodes, places in (([0, 2, 3, 6], [1, 4, 5, 8]), ([], [])):
        expected = logits[places, :25].topk(3)
        found = top.of(np.array(nodes, np.int64), 3, 25)
        np.testing.assert_array_equal(found[0], expected.indices)
        np.testing.assert_array_equal(found[1], expected.values)
    with pytest.raises(ValueError, match="one forward"):
        first.joined([TopLogits(logits.clone())])


@pytest.mark.parametrize("screened", [False, True])
def test_a_forward_tells_those_of_a_rows_tokens_in_their_order(screened):
    """Of two rows of five tokens, the second one's root stands behind a pending token; a screen's
    logits have not been rounded to the model's dtype."""
    logits = torch.stack([torch.randperm(30) for _ in range(10)]).view(2, 5, 30).bfloat16()
    near = torch.randn(10, 30)
    verified = Verified(logits, [0, 1], None)
    if screened:
        verified = ScreenedVerified(verified, SimpleNamespace(near=near))
    expected = (near[6:9] if screened else logits[1, 1:4].float()).topk(3)
    ids, values = verified.top(1, 2).of(np.arange(3), 3, 30)
    assert (ids == expected.indices.numpy()).all()
    assert (values == expected.values.numpy()).all()
