"""Training of tiny heads: what they learn is what they draft."""

import json

import pytest
import torch

from benchmarks import heads
from hf_retrieval_assist import EagleHead

from ..support.lossless import build
from ..support.plain_heads import plain_head
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


@torch.no_grad()
def test_the_loss_of_an_unrolled_head_is_that_of_its_drafts(model, texts, tmp_path, monkeypatch):
    """The second step of training says behind a path of one token what drafting says there."""
    ids = torch.arange(VOCAB)
    heads.begin(tmp_path, model, ids, is_block=False)
    config = json.loads((tmp_path / "config.json").read_text())
    head = EagleHead.from_pretrained(tmp_path, model)
    plain = plain_head(dict(head.state_dict()), config, model)
    text = texts[0]
    wanted = torch.eye(len(ids))[text.ids.roll(-1)]
    losses = []
    for steps in (1, 2):
        monkeypatch.setattr(heads, "UNROLLED", steps)
        losses.append(steps * heads.eagle_loss(head, text.ids, text.features, wanted).item())
    places = range(2, len(text.ids) - 1)
    said = []
    for place in places:
        *known, drafted, wanted_id = text.ids[: place + 2].tolist()
        probs = plain.given(text.features[: place - 1], known, [drafted])
        said.append(probs[wanted_id].log())
    assert losses[1] - losses[0] == pytest.approx(-float(torch.stack(said).mean()), rel=0.02)
