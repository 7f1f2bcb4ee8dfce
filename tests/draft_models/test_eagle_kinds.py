"""Relatives of EAGLE-3: what is loaded drafts as written out, the rest is refused by name."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hf_retrieval_assist import EagleHead
from hf_retrieval_assist.draft_models.eagle import EagleDrafter
from hf_retrieval_assist.drafters.base import Target
from tests.support.eagle_fixtures import tiny_target, write_config
from tests.support.feature_following import features_of, seen
from tests.support.plain_layers import PlainLayers

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
DRAFT_IDS = torch.arange(3, 128, 2)
EPS, THETA = 1e-5, 1e4
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "vocab_size": 128,
    "draft_vocab_size": len(DRAFT_IDS),
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 512,
}
FLAGS = {"fc_norm": True, "norm_output": True}
BOUNDARIES = (2, 5, 7)
TEXT = torch.randint(3, 128, (14,), generator=torch.Generator().manual_seed(1)).tolist()
STEPS = 4


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def tensors_of_3_1():
    """A random EAGLE-3.1 checkpoint under its published names."""
    generator = torch.Generator().manual_seed(2)
    layer, width = "midlayer.", (WIDTH,)
    shapes = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        **{f"fc_norm.{i}.weight": width for i in range(3)},
        **{f"{layer}{name}.weight": width for name in ("hidden_norm", "input_layernorm")},
        layer + "post_attention_layernorm.weight": width,
        layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * WIDTH),
        layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * WIDTH),
        layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * WIDTH),
        layer + "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
        layer + "mlp.gate_proj.weight": (INNER, WIDTH),
        layer + "mlp.up_proj.weight": (INNER, WIDTH),
        layer + "mlp.down_proj.weight": (WIDTH, INNER),
        "norm.weight": width,
        "lm_head.weight": (len(DRAFT_IDS), WIDTH),
    }
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    learnt = torch.zeros(128, dtype=torch.bool)
    learnt[DRAFT_IDS] = True
    return tensors | {"d2t": DRAFT_IDS - torch.arange(len(DRAFT_IDS)), "t2d": learnt}


def save(folder, config, tensors):
    write_config(folder, config)
    save_file(tensors, folder / "model.safetensors")
    return folder


class Plain31(PlainLayers):
    """An EAGLE-3.1 head without a cache, written out from its tensors."""

    def __init__(self, target):
        tensors = {k.replace("midlayer.", ""): v for k, v in tensors_of_3_1().items()}
        super().__init__(tensors, EPS, THETA)
        self.embeddings = target.get_input_embeddings().weight

    def mixed(self, x):
        queries, keys, values = (
            self.linear(x, f"self_attn.{name}_proj").unflatten(-1, (-1, HEAD_DIM)) for name in "qkv"
        )
        mixed = self.attention(self.rotate(queries), self.rotate(keys), values)
        return self.linear(mixed.flatten(1), "self_attn.o_proj")

    def outputs(self, hidden, tokens):
        """[n, WIDTH], normed; each hidden state with the token one place later."""
        embedded = self.norm(self.embeddings[tokens], "input_layernorm")
        x = torch.cat([embedded, self.norm(hidden, "hidden_norm")], dim=-1)
        x = hidden + self.mixed(x)
        inner = self.norm(x, "post_attention_layernorm")
        return self.norm(x + self.swiglu(inner, "mlp"), "norm")

    def chain(self, features, text):
        """The likeliest token behind the text, and so on, with the products of their odds."""
        parts = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(features.chunk(3, -1))]
        hidden, tokens = self.linear(torch.cat(parts, dim=-1), "fc"), list(text[1:])
        odds = [1.0]
        for _ in range(STEPS):
            output = self.outputs(hidden, tokens)
            probs = self.linear(output[-1], "lm_head").softmax(-1)
            tokens.append(int(DRAFT_IDS[probs.argmax()]))
            odds.append(odds[-1] * float(probs.max()))
            hidden = torch.cat([hidden, output[-1:]])
        return tokens[len(text) - 1 :], odds[1:]


@pytest.mark.parametrize("nested", [False, True], ids=["top", "eagle_config"])
def test_eagle_3_1_drafts_as_written_out(target, nested, tmp_path):
    config = {**CONFIG, "eagle_config": FLAGS} if nested else {**CONFIG, **FLAGS}
    head = EagleHead.from_pretrained(save(tmp_path, config, tensors_of_3_1()), target)
    assert len(head.fc_norm) == len(BOUNDARIES)
    assert head.config.norm_output
    features = features_of(target, BOUNDARIES, TEXT)[:-1]
    drafter = EagleDrafter(head, top_k=1, depth=STEPS - 1, min_prob=0.0)
    session = drafter.start(np.array(TEXT[:-1], np.int32), Target(128, model=target))
    session.commit(TEXT[-1:], seen(features))
    tree = session.propose(STEPS)
    tokens, odds = Plain31(target).chain(features, TEXT)
    assert tree.token_ids.tolist() == tokens
    np.testing.assert_allclose(tree.probs, odds, rtol=1e-4)


def test_norms_that_the_file_lacks_are_named(target, tmp_path):
    tensors = tensors_of_3_1()
    del tensors["fc_norm.1.weight"]
    with pytest.raises(ValueError, match=r"fc_norm\.1\.weight: expected \(64,\), found no such"):
        EagleHead.from_pretrained(save(tmp_path, {**CONFIG, **FLAGS}, tensors), target)


@pytest.mark.parametrize(
    ("settings", "added"),
    [
        ({}, {"mask_hidden": torch.zeros(1, 3 * WIDTH)}),
        ({}, {"model.mask_hidden": torch.zeros(1, 3 * WIDTH)}),
        ({"parallel_drafting": True, "mask_token_id": 5}, {}),
        ({"eagle_config": {"parallel_drafting": True}}, {}),
    ],
)
def test_p_eagle_is_refused_by_name(target, settings, added, tmp_path):
    folder = save(tmp_path, CONFIG | settings, tensors_of_3_1() | added)
    with pytest.raises(ValueError, match=r"P-EAGLE head .*: expected an EAGLE head.*at once"):
        EagleHead.from_pretrained(folder, target)


def test_latent_attention_is_refused_by_name(target, tmp_path):
    tensors = tensors_of_3_1()
    for name in "qkv":
        del tensors[f"midlayer.self_attn.{name}_proj.weight"]
    tensors["midlayer.self_attn.kv_a_proj_with_mqa.weight"] = torch.zeros(24, 2 * WIDTH)
    with pytest.raises(ValueError, match="multi-head latent attention: expected one with q_proj"):
        EagleHead.from_pretrained(save(tmp_path, CONFIG | FLAGS, tensors), target)


def test_an_eagle_config_that_is_no_object(target, tmp_path):
    folder = save(tmp_path, CONFIG | {"eagle_config": [1]}, tensors_of_3_1())
    with pytest.raises(ValueError, match=r"eagle_config: expected an object, got \[1\]"):
        EagleHead.from_pretrained(folder, target)
