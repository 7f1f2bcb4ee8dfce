"""MTP layers for targets that have none: which can have one, and which files are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from hf_retrieval_assist import EagleHead, MtpHead, SamAssistant
from hf_retrieval_assist.draft_models.mtp import MtpDrafter
from tests.support.feature_following import TEXT, features_of, seen, session_of
from tests.support.lossless import build, knowing, run
from tests.support.tiny_models import VOCAB, randomise

FAMILIES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("Qwen3MoeForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM"),
    *("Phi3ForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM", "GptOssForCausalLM"),
    *("Gemma3ForConditionalGeneration", "Qwen3NextForCausalLM", "Glm4MoeForCausalLM"),
)
IDS = torch.arange(1, VOCAB, 3)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_of_the_targets_own_class_drafts_for_it(name: str) -> None:
    target = build(getattr(transformers, name))
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    head = MtpHead.for_target(target, IDS)
    kinds = {type(layer) for layer in target.get_decoder().layers}
    assert type(head.layers[0].mtp_block) in kinds
    randomise(head)
    expected = run(target)
    assistant = SamAssistant(fallback=head, budget=12)
    assert run(target, assistant=assistant).tolist() == expected.tolist()
    assert assistant.stats.total.drafted > 0
    assert all(torch.equal(before[name], t) for name, t in target.state_dict().items())


def test_it_drafts_its_vocabulary(llama: Any) -> None:
    head = MtpHead.for_target(llama, IDS)
    assert head.to_target_ids(torch.arange(len(IDS))).tolist() == IDS.tolist()
    hidden = torch.randn(3, head.hidden_size)
    torch.testing.assert_close(head.logits(hidden), llama.lm_head(hidden)[:, IDS])
    torch.testing.assert_close(MtpHead.for_target(llama).logits(hidden), llama.lm_head(hidden))


def test_nothing_of_the_target_is_moved_or_saved(llama: Any) -> None:
    head = MtpHead.for_target(llama, IDS)
    assert {name.split(".")[0] for name in head.state_dict()} == {"draft_ids", "layers"}
    head.to(torch.bfloat16).requires_grad_(False)
    assert llama.dtype == torch.float32
    assert head.rows.dtype == torch.bfloat16
    assert all(parameter.requires_grad for parameter in llama.parameters())


def test_layers_that_a_user_replaced_stay_as_they_are() -> None:
    """transformers knows of none of these that they are initialised."""
    target = build(transformers.LlamaForCausalLM)
    target.set_input_embeddings(torch.nn.Embedding(VOCAB, 32))
    target.lm_head = torch.nn.Linear(32, VOCAB, bias=False)
    target.model.rotary_emb = copy.deepcopy(target.model.rotary_emb)
    target.model.rotary_emb.inv_freq *= 2
    target.model.rotary_emb._is_hf_initialized = False
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    rates = target.model.rotary_emb.inv_freq.clone()
    head = MtpHead.for_target(target)
    assert all(torch.equal(before[name], t) for name, t in target.state_dict().items())
    assert target.model.rotary_emb.inv_freq.equal(rates)
    assert head.module.rotary_emb is target.model.rotary_emb
    assert head.module.embed_tokens is target.get_input_embeddings()


def test_the_final_norm_starts_as_the_targets() -> None:
    target = build(transformers.Gemma3ForCausalLM)
    torch.nn.init.normal_(target.model.norm.weight)
    assert MtpHead.for_target(target).layers[0].post_norm.weight.equal(target.model.norm.weight)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MambaForCausalLM"])
def test_a_target_of_another_build_is_refused(name: str) -> None:
    target = build(getattr(transformers, name))
    with pytest.raises(ValueError, match=f"decoder layer transformers can make .* got {name}"):
        MtpHead.for_target(target)


@pytest.mark.parametrize("ids", [[], [-1, 3], [5, VOCAB]])
def test_ids_out_of_range(llama: Any, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="draft_ids: expected ids in"):
        MtpHead.for_target(llama, torch.tensor(ids, dtype=torch.long))


DAMAGE: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "another format": (
        lambda config, _: config.update(architectures=["Eagle3Speculator"]),
        "architectures: expected .*MtpHead.* got .*Eagle3Speculator",
    ),
    "another vocabulary": (
        lambda config, _: config.update(vocab_size=VOCAB + 1),
        f"vocab_size: expected {VOCAB}, got {VOCAB + 1}",
    ),
    "ids out of order": (
        lambda _, tensors: tensors.update(draft_ids=IDS.flip(0)),
        "draft_ids: expected ascending int64",
    ),
    "ids of another type": (
        lambda _, tensors: tensors.update(draft_ids=IDS.float()),
        "draft_ids: expected ascending int64",
    ),
    "ids out of range": (
        lambda _, tensors: tensors.update(draft_ids=IDS + VOCAB),
        "draft_ids: expected ids in",
    ),
    "no ids": (
        lambda _, tensors: tensors.pop("draft_ids"),
        "draft_ids: expected .* found no such tensor",
    ),
    "a missing tensor": (
        lambda _, tensors: tensors.pop("layers.0.eh_proj.weight"),
        r"layers.0.eh_proj.weight: expected \(32, 64\), found no such tensor",
    ),
    "a tensor too many": (
        lambda _, tensors: tensors.update(extra=IDS.float()),
        "extra: expected no such tensor",
    ),
    "another width": (
        lambda _, tensors: tensors.update({"layers.0.enorm.weight": torch.ones(64)}),
        r"layers.0.enorm.weight: expected \(32,\), found \(64,\)",
    ),
    "no numbers": (
        lambda _, tensors: tensors["layers.0.enorm.weight"].fill_(torch.nan),
        "layers.0.enorm.weight: expected finite values",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_folder_that_does_not_fit_is_refused(llama: Any, name: str, tmp_path: Path) -> None:
    MtpHead.for_target(llama, IDS).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    change, message = DAMAGE[name]
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        MtpHead.from_pretrained(tmp_path, llama)


def test_it_is_no_eagle_head(llama: Any, tmp_path: Path) -> None:
    MtpHead.for_target(llama, IDS).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected"):
        EagleHead.from_pretrained(tmp_path, llama)


def test_beside_retrieval(llama: Any, tmp_path: Path) -> None:
    """Loaded in the target's type; retrieval drafts first."""
    torch.manual_seed(0)
    MtpHead.for_target(llama, IDS).save_pretrained(tmp_path)
    expected = run(llama)
    assistant = knowing(expected, fallback=MtpHead.from_pretrained(tmp_path, llama))
    assert run(llama, assistant=assistant).tolist() == expected.tolist()
    assert assistant.stats.last.accepted > 0


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_training_runs_the_layer_as_drafting_does(name: str) -> None:
    target = build(getattr(transformers, name))
    head = MtpHead.for_target(target, IDS)
    randomise(head)
    text = torch.tensor([TEXT])
    features = features_of(target)[None, :-1]
    known = torch.ones(39, 39, dtype=torch.bool).tril()
    with torch.no_grad():
        hidden = head(features, text[:, 1:], torch.arange(39)[None], known, DynamicCache())
        likeliest = head.logits(hidden[0, -1]).softmax(-1).topk(5)
    session = session_of(MtpDrafter(top_k=5, depth=0, min_prob=0.0, head=head), target, TEXT[:-1])
    session.commit(TEXT[-1:], seen(features[0]))
    tree = session.propose(5)
    assert tree.token_ids.tolist() == IDS[likeliest.indices].tolist()
    np.testing.assert_allclose(tree.probs, likeliest.values.numpy(), rtol=1e-3)
