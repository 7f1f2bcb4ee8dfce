"""Reading EAGLE checkpoints as published, and writing heads in the `speculators` layout.

Understood: repositories of SafeAILab (EAGLE-1, -2, -3) and of tools that follow them, EAGLE-3.1
among them, and the `speculators` format of vLLM. Files are untrusted input: every shape is compared
with what the target needs.
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..system.checkpoints import (
    Tensors,
    check_fit,
    local_folder,
    read_json,
    read_tensors,
    write_checkpoint,
)
from ..target.borrowed import BorrowedLayers, TargetShape, float_weight
from .config import HeadConfig, default_boundaries, infer_config
from .head import EagleHead, build_head

# Other names of the tensors that `EagleHead.state_dict` names as `speculators` does.
RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^(midlayer|transformer)\."), "layers.0."),
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^embedding_layernorm\."), "embed_norm."),
    (re.compile(r"^pre_lm_head_layernorm\."), "norm."),
)
# Constants, and copies of the target's layers that were kept for training.
IGNORED = re.compile(r"(rotary_emb\.inv_freq|^verifier_(norm|lm_head)\.weight)$")


def load_head(
    path_or_hub_id: str | PathLike[str],
    target: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **overrides: Any,
) -> EagleHead:
    """A head from a folder or a hub repository, fitted to `target`.

    What the architecture is, the tensors decide before the config does. Embeddings and output
    layer are the target's where the checkpoint has none.

    Args:
        path_or_hub_id: folder with `config.json` and the weights, or a hub repository id.
        target: the transformers model that the head drafts for.
        dtype: of the head; the target's by default.
        device: of the head; where the target's embeddings are computed by default.
        overrides: fields of :class:`HeadConfig` the checkpoint is wrong or silent about,
            and `rope_theta`.

    Raises:
        ValueError: the files are damaged, or are no head for this target: the message names the
            first tensor that disagrees, with the expected and the found shape.
        TypeError: an override is not a field of :class:`HeadConfig`.
    """
    folder = local_folder(path_or_hub_id)
    raw, tensors = _read_config(folder), _canonical_names(read_tensors(folder))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    config = infer_config(shapes, raw, TargetShape.of(target)).override(**overrides)
    if config.draft_vocab_size == config.vocab_size:
        tensors = {k: v for k, v in tensors.items() if k not in ("d2t", "t2d")}
    head = _build_on_meta(config, BorrowedLayers(target))
    check_fit(head.state_dict(), tensors)
    if "d2t" in tensors:
        _check_draft_vocabulary(tensors["d2t"], tensors["t2d"])
    head.load_state_dict(tensors, assign=True)
    head.to(device or head.borrowed.device, dtype or target.dtype)
    return head.requires_grad_(False).eval()


def new_head(
    target: Any,
    *,
    draft_ids: Tensor | None = None,
    num_layers: int = 1,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> EagleHead:
    """A fresh EAGLE-3 head as wide as `target`, on its device, ready to be trained.

    The output layer starts as the target's rows of the draft vocabulary; everything else is
    random (`torch.manual_seed` makes it reproducible).

    Args:
        target: the transformers model that the head is to draft for.
        draft_ids: int64 [Vd], ids that may be drafted; None: all.
        num_layers: blocks of the head.
        dtype: of the weights.
        overrides: fields of :class:`HeadConfig`, and `rope_theta`.
    """
    shape = TargetShape.of(target)
    ids = torch.arange(shape.vocab_size) if draft_ids is None else draft_ids.unique().cpu()
    if len(ids) == 0 or ids[0] < 0 or ids[-1] >= shape.vocab_size:
        raise ValueError(f"draft_ids: expected ids in [0, {shape.vocab_size}), got {ids}")
    config = _fresh_config(target, shape, num_layers, len(ids)).override(**overrides)
    head = build_head(config, BorrowedLayers(target))
    _initialise(head, target.get_output_embeddings(), ids)
    return head.to(head.borrowed.device, dtype)


def save_head(head: EagleHead, folder: str | PathLike[str]) -> None:
    """Write a head; see `write_checkpoint`.

    The layout is that of `speculators` 'eagle3' models, which vLLM loads too; embeddings shared
    with the target are not written.

    Args:
        head: an EAGLE-3 head.
        folder: made if missing.

    Raises:
        ValueError: the head is an EAGLE-1 head, for which that format has no place.
    """
    if head.config.generation != 3:
        raise ValueError("head: expected an EAGLE-3 head, got one of EAGLE-1/2")
    write_checkpoint(folder, _speculators_config(head), head.state_dict())


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    layer = config.get("transformer_layer_config", config)
    if not isinstance(layer, dict):
        raise ValueError(f"{folder / 'config.json'}: expected an object, found {layer!r}")
    return config


def _canonical_names(tensors: Tensors) -> Tensors:
    """The tensors under the names of `EagleHead.state_dict`."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in RENAMED:
            name = pattern.sub(replacement, name)
        if not IGNORED.search(name):
            renamed[name] = tensor
    return renamed


def _build_on_meta(config: HeadConfig, borrowed: BorrowedLayers) -> EagleHead:
    """The modules without storage, except the RoPE frequencies, which no file holds."""
    with torch.device("meta"):
        head = build_head(config, borrowed)
    head.rotary_emb = type(head.rotary_emb)(head.rotary_emb.config)
    if not head.rotary_emb.inv_freq.isfinite().all():
        raise ValueError(
            f"rope_parameters: expected finite frequencies, got {dict(config.rope_parameters)}"
        )
    return head


def _check_draft_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
    """d2t holds offsets: draft id i stands for the target id i + d2t[i], a member of t2d."""
    if d2t.is_floating_point() or t2d.is_floating_point():
        raise ValueError(f"d2t: expected integers, found {d2t.dtype} (t2d: {t2d.dtype})")
    ids = torch.arange(len(d2t)) + d2t
    inside = (ids >= 0) & (ids < len(t2d))
    if not inside.all():
        raise ValueError(
            f"d2t: expected offsets to ids in [0, {len(t2d)}), found the id {int(ids[~inside][0])}"
        )
    if not torch.equal(ids, t2d.nonzero().flatten()):
        raise ValueError("d2t: expected offsets to the ids that t2d marks, found others")


def _fresh_config(
    target: Any, shape: TargetShape, num_layers: int, draft_vocab_size: int
) -> HeadConfig:
    """Attention shaped like the target's. Its features are normed before `fc`: at the start of
    training their scale, which differs by orders of magnitude between models, must not matter.
    """
    config = target.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    return HeadConfig(
        generation=3,
        hidden_size=shape.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 3 * shape.hidden_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or shape.hidden_size // heads,
        target_width=shape.hidden_size,
        boundaries=default_boundaries(shape.num_layers),
        vocab_size=shape.vocab_size,
        draft_vocab_size=draft_vocab_size,
        feature_norm="joint",
        norm_before_residual=True,
        input_norm=True,
    )


@torch.no_grad()
def _initialise(head: EagleHead, output: Any, ids: Tensor) -> None:
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if output is not None and head.config.hidden_size == head.config.target_width:
        rows = float_weight(output, torch.device("cpu"))[ids]
        head.lm_head.weight.copy_(rows)
    if head.config.draft_vocab_size < head.config.vocab_size:
        head.d2t.copy_(ids - torch.arange(len(ids)))
        head.t2d[ids] = True


def _speculators_config(head: EagleHead) -> dict[str, Any]:
    config = head.config
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": (
            None if config.target_width == config.hidden_size else config.target_width
        ),
        "eagle_aux_hidden_state_layer_ids": list(config.boundaries),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.feature_norm == "joint",
        "fc_norm": config.feature_norm == "each",
        "norm_output": config.norm_output,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": head.borrowed.identity,
        },
        "transformer_layer_config": _layer_config(config),
    }


def _layer_config(config: HeadConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "max_position_embeddings": config.trained_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_parameters": dict(config.rope_parameters),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
    }
