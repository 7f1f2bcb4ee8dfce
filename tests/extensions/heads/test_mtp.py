"""Drafts of a model's own MTP layers: transformers' candidates, and trees of the same."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.generation.candidate_generator import MTPCandidateGenerator

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.extensions.heads.mtp import MtpDrafter, mtp_layers
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.verification.service import choose_service
from tests.support.drafted_texts import Texts
from tests.support.feature_following import TEXT, chains_of, features_of, seen
from tests.support.heads import assisted
from tests.support.lossless import PHRASE, build, knowing, run, same
from tests.support.mtp_models import FAMILIES, saved_with_mtp
from tests.support.one_text import OneText
from tests.support.parts import since
from tests.support.plain_layers import PlainLayers
from tests.support.quick import cases, crossed
from tests.support.tiny_models import VOCAB

pytestmark = since("5.20", "fallback='mtp'")

TIERS = {
    "DeepseekV3ForCausalLM": "tree",
    "Glm4MoeForCausalLM": "tree",
    "MellumForCausalLM": "tree",
    "Step3p7ForConditionalGeneration": "tree",
    "InklingForCausalLM": "chain",
    "Qwen3NextForCausalLM": "replay",
    "Qwen3_5ForCausalLM": "replay",
    "Qwen3_5MoeForCausalLM": "replay",
    "BailingHybridForCausalLM": "replay",
}
IDS = torch.tensor([[*PHRASE, 5, 9]])
NEW = 16


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One of a family, which is loaded from a checkpoint."""

    def saved(name):
        folder = tmp_path_factory.mktemp(name)
        return saved_with_mtp(getattr(transformers, name), folder, **FAMILIES[name])

    return functools.cache(saved)


def reference_logits(layers, features, text, path):
    """[ids], what follows `path` below `text`: transformers' layers run afresh, in columns.

    Column c of layer k holds the token k + 1 places behind the hidden state's. Levels below the
    last layer's are its continuation on its own output.
    """
    module = layers.module
    output = before = hidden = features[None, : len(text) - 1]
    tokens = torch.tensor([[*text, *path]])
    for level in range(len(path) + 1):
        layer = min(level, len(layers) - 1)
        first = 1 + min(level, layer)
        if level > layer:
            # The rows so far and one more, of the last layer's own output.
            hidden = torch.cat([before, output[:, -1:]], dim=1)
        count = hidden.shape[1]
        positions = torch.arange(first, first + count)[None]
        cache = transformers.cache_utils.MtpCache(config=layers.config)
        before = hidden
        with torch.no_grad():
            output = module.forward_layer(
                layer, hidden, positions, cache, input_ids=tokens[:, first : first + count]
            )
        if level < len(layers) - 1:
            hidden = output
    return layers.logits(output[0, -1]).detach()


def draft_at_once(model, text, **sizes):
    session = OneText(MtpDrafter(**sizes), text[:-1], Target(VOCAB, model=model))
    session.commit(text[-1:], seen(features_of(model, text=text)[: len(text) - 1]))
    return session.propose(100)


def chain_of(model):
    """Drafts what `use_mtp` does: the likeliest token of each layer."""
    count = len(mtp_layers(model))
    return Assistant([MtpDrafter(top_k=1, depth=count - 1, min_prob=0.0)], budget=count)


@pytest.mark.parametrize("name", cases([n for n, tier in TIERS.items() if tier != "replay"], 2))
def test_the_chain_is_transformers_own(name, models, monkeypatch):
    model = models(name)
    candidates, drafts = chains_of(monkeypatch, MTPCandidateGenerator)
    expected = run(model, IDS, use_mtp=True, max_new_tokens=NEW)
    found = run(model, IDS, assistant=chain_of(model), max_new_tokens=NEW)
    assert found.tolist() == expected.tolist()
    assert len(candidates) >= NEW // 2
    for text, chain in candidates.items():
        # transformers drafts one last time when a single token is left.
        assert drafts[text] == chain or len(text) == IDS.shape[1] + NEW - 1


@pytest.mark.parametrize("name", cases(FAMILIES, ["Glm4MoeForCausalLM", "Qwen3NextForCausalLM"]))
def test_every_family_drafts_what_its_layers_say(name, models):
    """Also the families that transformers refuses to assist, against its layers run afresh."""
    model = models(name)
    assert choose_service(model, {}).tier.value == TIERS[name]
    layers, features = mtp_layers(model), features_of(model)
    depth = len(layers) + 1
    for length in (2, 9, 30):
        text, path = TEXT[:length], []
        tree = draft_at_once(model, text, top_k=1, depth=depth, min_prob=0.0)
        assert len({*tree.depths}) == len(tree)
        assert len(tree) == depth + 1
        above = 1.0
        for token, prob in zip(tree.token_ids.tolist(), tree.probs.tolist(), strict=True):
            logits = reference_logits(layers, features, text, path)
            assert token == int(logits.argmax())
            assert prob / above == pytest.approx(float(logits.softmax(-1).max()), rel=1e-3)
            path, above = [*path, token], prob


@pytest.mark.parametrize("name", ["Glm4MoeForCausalLM", "a layer of LlamaForCausalLM"])
def test_every_node_of_a_tree_has_the_layers_probability(name, models):
    model = models(name) if name in FAMILIES else assisted("MTP")[0]
    layers, features = mtp_layers(model), features_of(model)
    tree = draft_at_once(model, TEXT, top_k=3, depth=4, total=40, min_prob=0.0)
    assert tree.fault(1 << 30, 1 << 30) is None
    assert tree.depths.max() == 5
    assert len({*tree.depths}) < len(tree)
    for node in range(len(tree)):
        path = tree.path(node)[:-1]
        logits = reference_logits(layers, features, TEXT, tree.token_ids[path].tolist())
        above = tree.probs[path[-1]] if len(path) else 1.0
        given = float(logits.softmax(-1)[tree.token_ids[node]])
        assert tree.probs[node] / above == pytest.approx(given, rel=2e-3)


def test_one_pass_catches_up_on_what_was_missed(models):
    glm = models("Glm4MoeForCausalLM")
    texts, passes = Texts(MtpDrafter(depth=0), glm), []
    texts.start(1)
    for _ in range(11):
        texts.grow(1, 1)
    hook = mtp_layers(glm).register_forward_hook(lambda _, args, __: passes.append(len(args[1][0])))
    texts.propose([1])
    hook.remove()
    # Each layer starts one token later than the one before.
    assert passes == [20, 19, 18]


def test_several_turns_and_lower_tiers(models):
    """A second turn's prefill shows the hidden states of its own tokens only."""
    glm, ids = models("Glm4MoeForCausalLM"), IDS
    assistant = Assistant([MtpDrafter(top_k=4)], budget=10)
    options = {"max_new_tokens": 6, "return_dict_in_generate": True}
    for _ in range(2):
        plain, cached, _ = same(glm, ids, assistant, **options)
        more = torch.cat([plain.sequences, torch.tensor([[3, 8, 2]])], dim=1)
        again = run(glm, more, **{CACHE: cached[CACHE]}, assistant=assistant, **options)
        ids = run(glm, more, max_new_tokens=6)
        assert again.sequences.tolist() == ids.tolist()
        assert assistant.stats.last.drafted > 0
    beside = functools.partial(knowing, fallback="mtp")
    for name in ("InklingForCausalLM", "Qwen3_5ForCausalLM"):
        _, _, assistant = same(models(name), IDS, beside, max_new_tokens=NEW)
        assert assistant.stats.last.accepted > 0


def test_a_checkpoint_without_such_layers_is_refused(tmp_path):
    build(transformers.Glm4MoeForCausalLM, num_mtp_layers=1).save_pretrained(tmp_path)
    model = transformers.Glm4MoeForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="fallback 'mtp': expected MTP layers"):
        model.generate(IDS, max_new_tokens=4, assistant=SamAssistant(fallback="mtp"))


SPOILT = crossed(["Glm4MoeForCausalLM", "Qwen3NextForCausalLM"], [torch.nan, torch.inf, 1e30])


@pytest.mark.parametrize(("name", "value"), cases(SPOILT, 2))
def test_layers_that_compute_no_numbers_are_refused(tmp_path, name, value):
    model = saved_with_mtp(getattr(transformers, name), tmp_path, **FAMILIES[name])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    (spoilt, *_) = (key for key in tensors.keys() - model.state_dict() if "q_proj" in key)
    tensors[spoilt][0, 0] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"fallback 'mtp': .*q_proj.weight: expected finite"):
        model.generate(IDS, max_new_tokens=4, assistant=SamAssistant(fallback="mtp"))


class PlainQwenMtp(PlainLayers):
    """The MTP layer of Qwen3-Next and Qwen3.5 written out, from a checkpoint's tensors.

    A norm each for the embedding and the hidden state, a projection of both, one block with gated
    full attention, a norm.
    """

    def __init__(self, folder, config):
        tensors = load_file(Path(folder) / "model.safetensors")
        own = {n[4:]: t for n, t in tensors.items() if n.startswith("mtp.")}
        super().__init__(own, config.rms_norm_eps, config.rope_parameters["rope_theta"], unit=1)
        self.embeddings = next(t for n, t in tensors.items() if n.endswith("embed_tokens.weight"))
        self.head = tensors["lm_head.weight"]
        self.config = config

    def logits(self, features, text):
        """[ids], of the token after the text, from the target's hidden states before its last."""
        embedded = self.norm(self.embeddings[torch.tensor(text[1:])], "pre_fc_norm_embedding")
        hidden = self.norm(features[: len(text) - 1], "pre_fc_norm_hidden")
        x = self.linear(torch.cat([embedded, hidden], dim=-1), "fc")
        x = x + self.mixed(self.norm(x, "layers.0.input_layernorm"))
        x = x + self.feed_forward(self.norm(x, "layers.0.post_attention_layernorm"))
        return self.norm(x, "norm")[-1] @ self.head.T

    def mixed(self, x):
        heads, width = self.config.num_attention_heads, self.config.head_dim
        share = self.config.rope_parameters.get("partial_rotary_factor", 1.0)
        q, gate = self.linear(x, "layers.0.self_attn.q_proj").view(len(x), heads, -1).chunk(2, -1)
        k = self.linear(x, "layers.0.self_attn.k_proj").view(len(x), -1, width)
        v = self.linear(x, "layers.0.self_attn.v_proj").view(len(x), -1, width)
        q = self.rotate(self.norm(q, "layers.0.self_attn.q_norm"), share)
        k = self.rotate(self.norm(k, "layers.0.self_attn.k_norm"), share)
        mixed = self.attention(q, k, v) * gate.sigmoid()
        return self.linear(mixed.flatten(1), "layers.0.self_attn.o_proj")

    def feed_forward(self, x):
        if "layers.0.mlp.gate_proj.weight" in self.tensors:
            return self.swiglu(x, "layers.0.mlp")
        routed = self.linear(x, "layers.0.mlp.gate").softmax(-1)
        best = routed.topk(self.config.num_experts_per_tok, dim=-1)
        shares = best.values / best.values.sum(-1, keepdim=True)
        gate = self.linear(x, "layers.0.mlp.shared_expert_gate").sigmoid()
        total = gate * self.swiglu(x, "layers.0.mlp.shared_expert")
        for row, (experts, weights) in enumerate(zip(best.indices, shares, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                total[row] += weight * self.expert(x[row], int(expert))
        return total

    def expert(self, x, number):
        gate, up = (self.tensors["layers.0.mlp.experts.gate_up_proj"][number] @ x).chunk(2)
        down = self.tensors["layers.0.mlp.experts.down_proj"][number]
        return down @ (torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(
    "name", ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"]
)
def test_qwen_layers_are_as_written_out(name, models):
    model = models(name)
    plain = PlainQwenMtp(model.config.name_or_path, model.config.get_text_config())
    features = features_of(model)
    for length in range(2, len(TEXT)):
        text = TEXT[:length]
        tree = draft_at_once(model, text, top_k=3, depth=0, min_prob=0.0)
        best = plain.logits(features, text).softmax(-1).topk(3)
        assert tree.token_ids.tolist() == best.indices.tolist()
        np.testing.assert_allclose(tree.probs, best.values.numpy(), rtol=1e-3, atol=0)
