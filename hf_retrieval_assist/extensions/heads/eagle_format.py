"""EAGLE checkpoints as published: what their tensors are called, and what head they make.

Understood: repositories of SafeAILab (EAGLE-1, -2, -3) and of tools that follow them, EAGLE-3.1
among them, and the `speculators` format of vLLM. The tensors decide what the architecture is, the
config says the rest. Files are untrusted input: every shape is compared with what the target needs,
and every value is checked before anything uses it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .borrowed import TargetShape
from .checkpoints import Tensors, read_json, read_tensors

Shapes = Mapping[str, tuple[int, ...]]
Settings = Mapping[str, Any]

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

# The kinds whose frequencies do not change with the length of the text.
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_DEFAULT_ROPE: Settings = {"rope_type": "default", "rope_theta": 10000.0}
_LARGEST = 1e12

ATTENTION = "layers.0.self_attn."


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a head.

    Attributes:
        generation: 1 for EAGLE-1 and EAGLE-2 (the same weights), 3 for EAGLE-3.
        hidden_size: width H of the head's own residual stream.
        target_width: width Ht of the target's.
        boundaries: residual-stream boundaries of the target that feed the head, counted as
            transformers counts `hidden_states`; −1: after the final norm.
        vocab_size: ids that may be fed (V); draft_vocab_size: ids that may be drafted (Vd).
        rope_parameters: as in a transformers 5 config.
        trained_positions: how far the head was trained; longer texts work, drafts get worse.
        norm_before_residual: EAGLE-3's first residual is the normed hidden state.
        norm_output: the next drafting step is fed the normed output. With a norm of the features of
            each boundary, this is EAGLE-3.1 (arXiv:2605.09992).
        tensors: names of the checkpoint's, which say what has a bias, what is normed, and whether
            embeddings and output layer are the head's own.
    """

    generation: Literal[1, 3]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_width: int
    boundaries: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    rope_parameters: Settings = field(default_factory=lambda: dict(_DEFAULT_ROPE))
    trained_positions: int = 2048
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    norm_before_residual: bool = False
    norm_output: bool = False
    tensors: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act: expected one of transformers', got {self.hidden_act!r}")
        own_embeddings = "embed_tokens.weight" in self.tensors
        if not own_embeddings and self.hidden_size != self.target_width:
            raise ValueError(
                f"embed_tokens.weight: expected in the checkpoint, because the head's width "
                f"{self.hidden_size} differs from the target's {self.target_width}; not found"
            )
        rotary_of(self)

    @property
    def feature_width(self) -> int:
        """Width of the concatenated target features."""
        return len(self.boundaries) * self.target_width

    def override(self, **changes: Any) -> HeadConfig:
        """A copy with some fields replaced; `rope_theta` may be given on its own.

        Raises:
            TypeError: a name is not a field.
        """
        if "rope_theta" in changes:
            theta = changes.pop("rope_theta")
            changes["rope_parameters"] = {**self.rope_parameters, "rope_theta": theta}
        if "boundaries" in changes:
            changes["boundaries"] = tuple(changes["boundaries"])
        return dataclasses.replace(self, **changes)


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """The residual stream before blocks 2, n//2 and n−3, in ascending order.

    Targets of fewer than 7 blocks have fewer distinct ones among these (n = 5 has one, n = 6 has
    two); the reference captures each once and in the order of the forward, and so does this.
    """
    wanted = {2, num_layers // 2, num_layers - 3}
    return tuple(sorted(k for k in wanted if 0 <= k < num_layers))


def read_head(folder: Path, target: TargetShape, overrides: Settings) -> tuple[HeadConfig, Tensors]:
    """The config of a head in a folder and its tensors, named as `EagleHead.state_dict` does.

    Raises:
        ValueError: the files are damaged, or are no head for this target: the message names the
            first tensor that disagrees, with the expected and the found shape.
        TypeError: an override is not a field of :class:`HeadConfig`.
    """
    raw, tensors = read_json(folder / "config.json"), {}
    if not isinstance(layer := raw.get("transformer_layer_config", raw), dict):
        raise ValueError(f"{folder / 'config.json'}: expected an object, found {layer!r}")
    for name, tensor in read_tensors(folder).items():
        for pattern, replacement in RENAMED:
            name = pattern.sub(replacement, name)
        if not IGNORED.search(name):
            tensors[name] = tensor
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    config = _config_of(shapes, raw, layer, target).override(**overrides)
    if config.draft_vocab_size == config.vocab_size:
        tensors = {k: v for k, v in tensors.items() if k not in ("d2t", "t2d")}
    return config, tensors


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


def _config_of(shapes: Shapes, raw: Settings, layer: Settings, target: TargetShape) -> HeadConfig:
    """A checkpoint's, from its tensors' shapes, its config and what that says of its layers."""
    # Some publishers keep a part of it apart.
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"eagle_config: expected an object, got {nested!r}")
    raw = {**raw, **nested}
    _refuse_other_kinds(shapes, raw)
    hidden = _matrix(shapes, ATTENTION + "o_proj.weight")[0]
    queries, fed = _matrix(shapes, ATTENTION + "q_proj.weight")
    heads = _count(layer, "num_attention_heads")
    if queries % (2 * heads):
        raise ValueError(
            f"num_attention_heads: expected even parts of {queries}, got {heads} heads"
        )
    head_dim = queries // heads
    numbers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    if numbers != set(map(str, range(len(numbers)))):
        raise ValueError(f"layers: expected them numbered from 0 on, found {sorted(numbers)}")
    is_eagle3 = fed == 2 * hidden
    activation = layer.get("hidden_act", "silu")
    return HeadConfig(
        generation=3 if is_eagle3 else 1,
        target_width=target.hidden_size,
        boundaries=_boundaries(shapes, raw, target, is_eagle3),
        vocab_size=target.vocab_size,
        draft_vocab_size=_draft_vocabulary(shapes, layer, target),
        rope_parameters=_rope_parameters(layer),
        trained_positions=_count(layer, "max_position_embeddings", 2048),
        rms_norm_eps=float(_number(layer, "rms_norm_eps", 0, 1, default=1e-6)),
        hidden_act=activation if isinstance(activation, str) else repr(activation),
        hidden_size=hidden,
        intermediate_size=_matrix(shapes, "layers.0.mlp.gate_proj.weight")[0],
        num_layers=len(numbers),
        num_heads=heads,
        num_kv_heads=max(_matrix(shapes, ATTENTION + "k_proj.weight")[0] // head_dim, 1),
        head_dim=head_dim,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_output=bool(raw.get("norm_output", not is_eagle3 and "norm.weight" in shapes)),
        tensors=frozenset(shapes),
    )


def _refuse_other_kinds(shapes: Shapes, raw: Settings) -> None:
    """ValueError for relatives of EAGLE-3 that draft in another way, or attend in another way."""
    if "mask_hidden" in shapes or raw.get("parallel_drafting"):
        raise ValueError(
            "P-EAGLE head (arXiv:2602.01469): expected an EAGLE head, which drafts a token from "
            "the one before it, got one that was trained to draft all positions at once "
            "(mask_hidden or parallel_drafting)"
        )
    if "layers.0.self_attn.kv_a_proj_with_mqa.weight" in shapes:
        raise ValueError(
            "EAGLE head with multi-head latent attention: expected one with q_proj, k_proj and "
            "v_proj, got kv_a_proj_with_mqa"
        )


def _matrix(shapes: Shapes, name: str) -> tuple[int, ...]:
    shape = shapes.get(name)
    if shape is None or len(shape) != 2 or 0 in shape:
        raise ValueError(f"not an EAGLE head: expected a matrix {name}, found {shape}")
    return shape


def _draft_vocabulary(shapes: Shapes, layer: Settings, target: TargetShape) -> int:
    stated = _count(layer, "vocab_size", target.vocab_size)
    if "lm_head.weight" not in shapes:
        return target.vocab_size
    found = _matrix(shapes, "lm_head.weight")[0]
    if stated < found:
        raise ValueError(
            f"vocab_size: expected at least {found}, the rows of lm_head.weight, got {stated}"
        )
    if "d2t" not in shapes and found != target.vocab_size:
        raise ValueError(
            f"lm_head.weight: expected {target.vocab_size} rows, one for each id of the target "
            f"(the checkpoint has no d2t), found {found}"
        )
    return found


def _boundaries(
    shapes: Shapes, raw: Settings, target: TargetShape, is_eagle3: bool
) -> tuple[int, ...]:
    """The boundaries the config names, or the papers'; as many as `fc` has room for.

    EAGLE-1 is fed what the target's output layer is fed, so it is as wide as the target.
    """
    (rows, width), each = _matrix(shapes, "fc.weight"), target.hidden_size
    if not is_eagle3:
        if (rows, width) != (each, 2 * each):
            raise ValueError(f"fc.weight: expected {(each, 2 * each)}, found {(rows, width)}")
        return (-1,)
    named = raw.get("eagle_aux_hidden_state_layer_ids") or default_boundaries(target.num_layers)
    allowed = range(-1, target.num_layers + 1)
    if not isinstance(named, list | tuple) or not all(
        type(k) is int and k in allowed for k in named
    ):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids: expected a list of numbers from -1 to "
            f"{target.num_layers}, got {named!r}"
        )
    if width != len(named) * each:
        raise ValueError(
            f"fc.weight: expected ({rows}, {len(named) * each}) for the target's boundaries "
            f"{[*named]} of width {each} each, found ({rows}, {width})"
        )
    return tuple(named)


def _number(
    settings: Settings, name: str, least: float, most: float = _LARGEST, default: Any = None
) -> Any:
    """A number, where it is stated; ValueError if it is none, out of range, or neither stated nor
    known by default."""
    value = settings.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name}: expected a number from {least:g} to {most:g}, got {value!r}")
    return value


def _count(settings: Settings, name: str, default: int | None = None) -> int:
    """A whole number from 1 on; otherwise as `_number`."""
    value = _number(settings, name, 1, default=default)
    if not isinstance(value, int):
        raise ValueError(f"{name}: expected a whole number, got {value!r}")
    return value


def _rope_parameters(layer: Settings) -> dict[str, Any]:
    """RoPE as the config of a head's layer states it, in the fields of transformers 5."""
    given = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise ValueError(f"rope_parameters: expected one set for all layers, got {given!r}")
    theta = given.get("rope_theta") or layer.get("rope_theta") or 10000.0
    kind = given.get("rope_type") or given.get("type") or "default"
    named = {name: value for name, value in given.items() if name != "type"}
    return {**named, "rope_theta": theta, "rope_type": kind}


def rotary_of(config: HeadConfig) -> LlamaRotaryEmbedding:
    """Turns positions as `rope_parameters` say.

    Raises:
        ValueError: they do not say it in finite numbers, or the kind is unknown.
    """
    given = dict(config.rope_parameters)
    if given.get("rope_type") not in ROPE_KINDS:
        raise ValueError(
            f"rope_parameters: expected rope_type to be one of {ROPE_KINDS}, got {given}"
        )
    # A base of 1 turns no position at all.
    _number(given, "rope_theta", 1 + 1e-6)
    try:
        rotary = LlamaRotaryEmbedding(layer_config(config))
        finite = bool(rotary.inv_freq.isfinite().all()) and math.isfinite(rotary.attention_scaling)
    except Exception as error:  # whatever values of another kind make of it
        raise ValueError(f"rope_parameters: expected numbers, got {given} ({error})") from error
    if not finite:
        raise ValueError(f"rope_parameters: expected finite frequencies, got {given}")
    return rotary


def layer_config(config: HeadConfig) -> LlamaConfig:
    """The configuration of a head's blocks."""
    alike = ("hidden_size", "intermediate_size", "head_dim", "hidden_act")
    return LlamaConfig(
        **{name: getattr(config, name) for name in alike},
        mlp_bias="layers.0.mlp.up_proj.bias" in config.tensors,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.trained_positions,
        rope_parameters=dict(config.rope_parameters),
    )
