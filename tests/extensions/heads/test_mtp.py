"""Drafts of a model's own MTP layers: transformers' candidates, and trees of the same."""

import functools

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.generation.candidate_generator import MTPCandidateGenerator

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.extensions.heads.mtp import MtpDrafter, mtp_layers
from hf_retrieval_assist.verification.service import choose_service
from tests.support.feature_following import TEXT, chains_of, features_of, seen
from tests.support.heads import assisted
from tests.support.lossless import PHRASE, build, knowing, run, same
from tests.support.mtp_models import FAMILIES, saved_with_mtp
from tests.support.one_text import OneText
from tests.support.parts import since
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


@pytest.mark.parametrize("name", cases([n for n, tier in TIERS.items() if tier != "replay"], 2))
def test_the_chain_is_transformers_own(name, models, monkeypatch):
    model = models(name)
    candidates, drafts = chains_of(monkeypatch, MTPCandidateGenerator)
    expected = run(model, IDS, use_mtp=True, max_new_tokens=NEW)
    # Drafts what `use_mtp` does: the likeliest token of each layer.
    count = len(mtp_layers(model))
    assistant = Assistant([MtpDrafter(top_k=1, depth=count - 1, min_prob=0.0)], budget=count)
    found = run(model, IDS, assistant=assistant, max_new_tokens=NEW)
    assert found.tolist() == expected.tolist()
    assert len(candidates) >= NEW // 2
    for text, chain in candidates.items():
        # transformers drafts one last time when a single token is left.
        assert drafts[text] == chain or len(text) == IDS.shape[1] + NEW - 1


QUICK = ["Glm4MoeForCausalLM", "Qwen3NextForCausalLM", "a layer of LlamaForCausalLM"]


@pytest.mark.parametrize("name", cases([*FAMILIES, QUICK[-1]], QUICK))
def test_every_node_has_the_probability_that_the_layers_give_it(name, models):
    """Also in the families that transformers refuses to assist, against its layers run afresh."""
    model = models(name) if name in FAMILIES else assisted("MTP")[0]
    if name in FAMILIES:
        assert choose_service(model, {}).tier.value == TIERS[name]
    layers, features = mtp_layers(model), features_of(model)
    depth = len(layers) + 1
    for length in (2, 30):
        text = TEXT[:length]
        tree = draft_at_once(model, text, top_k=2, depth=depth, total=30, min_prob=0.0)
        assert tree.fault(1 << 30, 1 << 30) is None
        assert tree.depths.max() == depth + 1
        assert tree.token_ids[0] == reference_logits(layers, features, text, []).argmax()
        for node in range(len(tree)):
            path = tree.path(node)[:-1]
            logits = reference_logits(layers, features, text, tree.token_ids[path].tolist())
            above = tree.probs[path[-1]] if len(path) else 1.0
            given = float(logits.softmax(-1)[tree.token_ids[node]])
            assert tree.probs[node] / above == pytest.approx(given, rel=2e-3)


@pytest.mark.parametrize("name", ["InklingForCausalLM", "Qwen3_5ForCausalLM"])
def test_output_is_plain_in_lower_tiers(name, models):
    beside = functools.partial(knowing, fallback="mtp")
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
