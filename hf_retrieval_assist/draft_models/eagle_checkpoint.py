"""Reading EAGLE checkpoints as published, and the config of heads in the `speculators` layout.

Understood: repositories of SafeAILab (EAGLE-1, -2, -3) and of tools that follow them, EAGLE-3.1
among them, and the `speculators` format of vLLM. Files are untrusted input: every shape is compared
with what the target needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..host.borrowed import TargetShape
from ..system.checkpoints import Tensors, read_json, read_tensors
from .eagle_config import HeadConfig, infer_config

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


def read_head(
    folder: Path, target: TargetShape, overrides: Mapping[str, Any]
) -> tuple[HeadConfig, Tensors]:
    """The config of a head in a folder and its tensors, named as `EagleHead.state_dict` does.

    What the architecture is, the tensors decide before the config does.

    Raises:
        ValueError: the files are damaged, or are no head for this target: the message names the
            first tensor that disagrees, with the expected and the found shape.
        TypeError: an override is not a field of :class:`HeadConfig`.
    """
    raw, tensors = _read_config(folder), _canonical_names(read_tensors(folder))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    config = infer_config(shapes, raw, target).override(**overrides)
    if config.draft_vocab_size == config.vocab_size:
        tensors = {k: v for k, v in tensors.items() if k not in ("d2t", "t2d")}
    return config, tensors


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


def check_draft_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
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
