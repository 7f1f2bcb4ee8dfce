"""Drafting models whose logits are not finite now and then: what comes of them is no draft."""

import itertools

import pytest
import torch

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.draft_models import dflash, draft_model, layers_follower
from tests.support.heads import DRAFTERS
from tests.support.lossless import PROMPT, run

LEVELS = layers_follower.LayerNodes, "_logits"
# What computes logits, but those of draft models.
LOGITS = {"DFlash": (dflash.BlockFollower, "_logits"), "EAGLE": LEVELS, "MTP": LEVELS}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", DRAFTERS)
def test_text_is_plain(llama, name, rows, value, every, monkeypatch):
    owner, method = LOGITS.get(name, (draft_model._Nodes, "_feed"))
    compute, calls = getattr(owner, method), itertools.count(1)

    def spoilt(*args, **kwargs):
        logits = compute(*args, **kwargs)
        if next(calls) % every == 0:
            logits[..., ::2] = value
        return logits

    monkeypatch.setattr(owner, method, spoilt)
    ids = PROMPT.repeat(rows, 1) + torch.arange(rows)[:, None]
    assistant = Assistant([DRAFTERS[name](llama)], budget=8, residual=name == "draws")
    assert torch.equal(run(llama, ids), run(llama, ids, assistant=assistant))
    assert next(calls) > 2
    assert assistant.stats.last.drafted or every == 1
    if name == "draws":
        sampled = run(llama, ids, assistant=assistant, do_sample=True)
        assert sampled.shape == (rows, PROMPT.shape[1] + 20)
