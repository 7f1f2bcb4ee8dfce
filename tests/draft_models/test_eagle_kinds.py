"""A relative of EAGLE-3 drafts as written out."""

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
BOUNDARIES = (2, 5, 7)
TEXT = torch.randint(3, 128, (14,), generator=torch.Generator().manual_seed(1)).tolist()
STEPS = 4


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
def test_eagle_3_1_drafts_as_written_out(nested, tmp_path):
    target, flags = tiny_target(), {"fc_norm": True, "norm_output": True}
    write_config(tmp_path, CONFIG | ({"eagle_config": flags} if nested else flags))
    save_file(tensors_of_3_1(), tmp_path / "model.safetensors")
    head = EagleHead.from_pretrained(tmp_path, target)
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
