"""Training of tiny heads: what they learn is what they draft."""

import pytest
import torch

from benchmarks import heads

from ..support.lossless import build
from ..support.tiny_models import VOCAB


@pytest.fixture(scope="module")
def model():
    return build("LlamaForCausalLM", num_hidden_layers=3, head_dim=8, tie_word_embeddings=False)


@pytest.fixture
def texts(model, monkeypatch):
    """Greedy texts of a model of three layers."""
    monkeypatch.setattr(heads, "LAYERS", (1, 2, 3))
    monkeypatch.setattr(heads, "MASK", 1)
    prompts = torch.randint(3, VOCAB, (6, 8), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    return heads.read(model, [(text, 8) for text in written])


@pytest.mark.slow
def test_trained_heads_are_accepted_and_trees_more_than_chains(model, texts, tmp_path):
    ids = torch.arange(VOCAB)
    for name in heads.HEADS:
        heads.begin(tmp_path / name, model, ids, name == "dflash")
    before = heads.judge(tmp_path, model, {"own": texts}).tables[0].rows
    for name in heads.HEADS:
        heads.train(tmp_path / name, model, texts, ids, minutes=0.1)
    rows = heads.judge(tmp_path, model, {"own": texts}).tables[0].rows
    found = {row["drafts"]: row["own"] for row in rows}
    for row in before:
        if row["drafts"] in ("block head", "EAGLE-3"):
            assert found[row["drafts"]] > 1.3 * row["own"]
    assert found["block head, a tree"] >= found["block head, a chain"]
