"""Tiny models whose checkpoints hold multi-token-prediction layers, saved and loaded again."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from hf_retrieval_assist.extensions.heads.mtp import loadable, mtp_layers

from .tiny_models import randomise, tiny_config, tiny_model

_FULL = {"mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]}

# What each family's configuration needs to have such layers.
FAMILIES = {
    "DeepseekV3ForCausalLM": {"num_nextn_predict_layers": 2},
    "Glm4MoeForCausalLM": {"num_nextn_predict_layers": 3},
    "MellumForCausalLM": {"num_mtp_layers": 1},
    "Step3p7ForConditionalGeneration": {
        "num_nextn_predict_layers": 2,
        "mtp_layer_types": ["full_attention"] * 2,
        "mtp_mlp_layer_types": ["dense", "sparse"],
        "share_expert_dim": 16,
        "sliding_window": 6,
    },
    "InklingForCausalLM": {
        "num_mtp_layers": 2,
        "mtp_local_layer_ids": [0],
        "chain_hidden_post_norm": True,
        # Wider than the texts: transformers 5.23 masks these layers without their window.
        "sliding_window_size": 64,
    },
    "Qwen3NextForCausalLM": {},
    "Qwen3_5ForCausalLM": {},
    "Qwen3_5MoeForCausalLM": {},
    "BailingHybridForCausalLM": {
        "num_mtp_layers": 1,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        **_FULL,
    },
}


def _checkpoint_name(model, name):
    """The name that a published checkpoint has for a parameter of transformers' `MtpModel`."""
    kind = type(model).__name__
    first = model.config.get_text_config().num_hidden_layers
    name = name.replace(".post_norm.", ".shared_head.norm.")
    if kind.startswith(("Mellum", "Qwen")):
        outer = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
        outer["shared_head.norm"] = "norm"
        for ours, theirs in outer.items():
            if name.startswith(f"layers.0.{ours}."):
                return name.replace(f"layers.0.{ours}", f"mtp.{theirs}")
        return "mtp." + name.replace("mtp_block.", "")
    if kind.startswith("Inkling"):
        return "model.mtp." + name.replace("mtp_block", "transformer_block")
    name = name.replace("mtp_block.", "")
    return re.sub(r"layers\.(\d+)", lambda m: f"model.layers.{first + int(m[1])}", name)


def saved_with_mtp(model_class, folder, std=0.3, **overrides):
    """A tiny model loaded from a folder that holds its MTP layers too."""
    config = tiny_config(model_class.config_class)
    text = config.get_text_config(decoder=True)
    if text is config:
        config = tiny_config(model_class.config_class, **overrides)
    else:
        config.text_config = type(text)(**(text.to_dict() | overrides))
    model = tiny_model(model_class, config)
    owner = loadable(model)
    count = owner.config.get_text_config().num_mtp_layers
    mtp = MtpModel(owner, count)
    randomise(mtp.layers, std)
    for parameter in mtp.layers.parameters():
        if parameter.dim() == 1:
            # Norms that are not the identity.
            parameter.data += torch.linspace(-0.3, 0.3, len(parameter))
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in mtp.state_dict().items():
        if name.startswith(("layers.", "shared_post_norm")):
            tensors[_checkpoint_name(model, name)] = tensor.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    loaded = model_class.from_pretrained(folder).eval()
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 0
    if not type(model).__name__.startswith(("Mellum", "Inkling", "Qwen")):
        # The classes name the layers behind those of their published checkpoints.
        loaded._keys_to_ignore_on_load_unexpected = [
            rf"model\.layers\.{len(model.get_decoder().layers) + i}\..*" for i in range(count)
        ]
    return loaded


def with_mtp(name):
    """A tiny model of one of `FAMILIES` whose MTP layers are loaded."""
    with TemporaryDirectory() as folder:
        kind = getattr(transformers, name)
        model = saved_with_mtp(kind, Path(folder), **FAMILIES[name])
        mtp_layers(model)
    return model
