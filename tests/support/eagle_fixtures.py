"""The recorded heads of tests/fixtures/eagle, and tiny targets to load them for."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

FIXTURES = Path(__file__).parents[1] / "fixtures" / "eagle"
CASES = (
    "eagle1_fcbias",
    "eagle1_nobias_qkvbias_theta1e6",
    "eagle3_d2t",
    "eagle3_fullvocab",
    "eagle3_target_hidden48_theta5e5",
)


def tiny_target(hidden_size=64, num_layers=10, vocab_size=128, **config):
    """A random float32 Llama, the same at every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": num_layers, "vocab_size": vocab_size}
    sizes |= {"intermediate_size": 2 * hidden_size, "max_position_embeddings": 512}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes | {"bos_token_id": 1, "eos_token_id": 2} | config))
    return model.eval().requires_grad_(False)


@dataclass
class Case:
    """One recorded head: its checkpoint, and two rounds of inputs and outputs."""

    name: str
    config: dict[str, Any]
    tree: dict[str, int]
    weights: dict[str, torch.Tensor]
    io: dict[str, torch.Tensor]

    @property
    def is_eagle3(self):
        return self.name.startswith("eagle3")

    @property
    def carries_embeddings(self):
        """Whether published checkpoints of this kind carry their own embeddings."""
        return not self.is_eagle3 or "target_hidden_size" in self.config

    def target(self):
        """A target with the embeddings and the output layer that the head was recorded with."""
        target = tiny_target(self.config.get("target_hidden_size", 64))
        if not self.carries_embeddings:
            target.model.embed_tokens.weight.copy_(self.weights["embed_tokens.weight"])
        if not self.is_eagle3:
            target.lm_head.weight.copy_(self.io["target.lm_head.weight"])
        return target

    def published(self):
        """The tensors as a published checkpoint holds them."""
        left_out = () if self.carries_embeddings else ("embed_tokens.weight",)
        return {name: t for name, t in self.weights.items() if name not in left_out}

    def save(self, folder):
        """The checkpoint with its weights in safetensors."""
        write_config(folder, self.config)
        save_file(self.published(), folder / "model.safetensors")
        return folder


@lru_cache
def load_case(name):
    description = json.loads((FIXTURES / f"{name}.json").read_text())
    return Case(
        name,
        description["config"],
        description["tree"],
        load_file(FIXTURES / f"{name}.weights.safetensors"),
        load_file(FIXTURES / f"{name}.io.safetensors"),
    )


def write_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))


def outputs(head):
    """Logits of three tokens after each other, for fixed features."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, 3, head.feature_width, generator=generator)
    cache = DynamicCache()
    with torch.inference_mode():
        hidden = head.fuse(features.to(head.device, head.dtype))
        ids, mask = torch.tensor([[5, 6, 7]]), torch.ones(3, 3, dtype=torch.bool).tril()
        return head.logits(head(0, ids, hidden, torch.arange(1, 4)[None], mask, cache)).float()
