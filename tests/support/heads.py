"""Heads of random weights for any target."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.modeling_layers import MtpModel

from hf_retrieval_assist import EagleHead
from hf_retrieval_assist.draft_models.draft_model import DraftModelDrafter
from hf_retrieval_assist.extensions.heads import mtp
from hf_retrieval_assist.extensions.heads.dflash import DFlashDrafter
from hf_retrieval_assist.extensions.heads.eagle import EagleDrafter
from hf_retrieval_assist.extensions.heads.mtp import MtpDrafter, MtpLayers
from hf_retrieval_assist.extensions.heads.published import PublishedHead

from .lossless import build
from .mtp_models import FAMILIES, with_mtp
from .tiny_models import VOCAB, randomise

EVERY_SECOND = torch.arange(1, VOCAB, 2)


@torch.no_grad()
def eagle_head(target, draft_ids=None):
    """An EAGLE-3 head, whose output layer is the target's for the ids that it may draft."""
    config = target.config.get_text_config(decoder=True)
    rows = len(target.get_input_embeddings().weight)
    ids = torch.arange(rows) if draft_ids is None else draft_ids
    names = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
    settings = {name: getattr(config, name) for name in names}
    settings |= {"norm_before_residual": True, "norm_before_fc": True}
    settings["max_position_embeddings"] = 512
    tensors = dict.fromkeys(("layers.0.hidden_norm.weight", "lm_head.weight"), torch.empty(0))
    if len(ids) < rows:
        tensors["d2t"] = ids
    head = EagleHead(PublishedHead("eagle3", False, settings, None, tensors), target)
    head.requires_grad_(False).eval()
    for layer in head.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.normal_(std=0.02)
    head.lm_head.weight.copy_(target.get_output_embeddings().weight[ids.to(target.device)])
    if len(ids) < rows:
        head.d2t.copy_(ids - torch.arange(len(ids)))
        head.t2d[ids] = True
    return head.to(target.device)


def _mtp(target):
    """The drafter of an MTP layer, given to the model as if its checkpoint had brought it."""
    owner = mtp.WithMtpConfig(target, 1)
    # A new `MtpModel` initialises all that it holds, so what is the model's comes in afterwards.
    owner.lm_head, owner.get_input_embeddings = None, lambda: None
    module = MtpModel(owner, 1)
    module.tie_with_main_model(target)
    layers = mtp._loaded[target] = MtpLayers(module)
    randomise(layers.to(target.device).layers)
    return MtpDrafter()


def _eagle(target):
    """The drafter of a head for every second id."""
    head = eagle_head(target, EVERY_SECOND)
    randomise(head)
    return EagleDrafter(head)


def _model(kind, **options):
    return lambda target: DraftModelDrafter(build(kind), **options)


DRAFTERS = {
    "DFlash": lambda target: DFlashDrafter(block_drafter(window=6)),
    "EAGLE": _eagle,
    "MTP": _mtp,
    "draft model": _model("LlamaForCausalLM"),
    "windows": _model("Gemma3ForCausalLM"),
    "draws": _model("LlamaForCausalLM", temperature=1.0),
}
"""Drafters of every kind by what drafts, each made for a target."""


def assisted(name):
    """A target and its drafter: one of `DRAFTERS`, or the target's own MTP layers."""
    if name in FAMILIES:
        return with_mtp(name), MtpDrafter()
    if not name.startswith("MTP of"):
        target = build(transformers.LlamaForCausalLM)
        return target, DRAFTERS[name](target)
    if Version(transformers.__version__) < Version("5.20"):
        pytest.skip("before transformers 5.20 MTP layers share one rotary embedding")
    # Windows that trees are deeper than.
    layers = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 2}
    target = build(transformers.Gemma3ForCausalLM, **(layers if name == "MTP of windows" else {}))
    return target, _mtp(target)


def layers_of(drafter, target):
    """What drafts: the target's MTP layers, the head, or the model."""
    if isinstance(drafter, MtpDrafter):
        return mtp.mtp_layers(target)
    return drafter.head if isinstance(drafter, EagleDrafter) else drafter.model


BLOCK = 5


def block_drafter(window=64, **changes):
    """A random DFlash model for the tiny targets."""
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    sizes |= {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"]}
    sizes |= {"block_size": BLOCK, "mask_token_id": 2, "target_layer_ids": [0, 1]}
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    torch.manual_seed(0)
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**(sizes | changes))).eval()
    randomise(model)
    return model
