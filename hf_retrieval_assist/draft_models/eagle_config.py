"""What an EAGLE head looks like, read off its tensors first and its config second."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers.activations import ACT2FN

from ..host.borrowed import TargetShape
from .eagle_settings import checked_rope, count, number, rope_parameters

Shapes = Mapping[str, tuple[int, ...]]

DEFAULT_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


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
        feature_norm: RMS norm of the target features before `fc`: none, one over the
            concatenation, or one for each boundary.
        norm_before_residual: EAGLE-3's first residual is the normed hidden state.
        norm_output: the next drafting step is fed the normed output. With one `feature_norm` for
            each boundary, this is EAGLE-3.1 (arXiv:2605.09992).
        embedding_norm, input_norm: EAGLE-1 variants that norm what the original leaves as it is.
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
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_ROPE))
    trained_positions: int = 2048
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    fc_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    feature_norm: Literal["none", "joint", "each"] = "none"
    norm_before_residual: bool = False
    norm_output: bool = False
    embedding_norm: bool = False
    input_norm: bool = False
    final_norm: bool = True
    own_embeddings: bool = False
    own_lm_head: bool = True

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        checked_rope(self.rope_parameters)
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act: expected one of transformers', got {self.hidden_act!r}")
        if not self.own_embeddings and self.hidden_size != self.target_width:
            raise ValueError(
                f"embed_tokens.weight: expected in the checkpoint, because the head's width "
                f"{self.hidden_size} differs from the target's {self.target_width}; not found"
            )

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


def infer_config(shapes: Shapes, raw: Mapping[str, Any], target: TargetShape) -> HeadConfig:
    """The config of a checkpoint with these tensors (named as `EagleHead` names them).

    Args:
        shapes: shape of every tensor in the file.
        raw: the checkpoint's config.json.
        target: the model that the head is to assist.

    Raises:
        ValueError: a tensor that tells the architecture is missing, or does not fit the target.
    """
    raw = _flat(raw)
    _refuse_other_kinds(shapes, raw)
    layer = raw.get("transformer_layer_config", raw)
    hidden = _shape(shapes, "layers.0.self_attn.o_proj.weight")[0]
    activation = layer.get("hidden_act", "silu")
    is_eagle3 = _shape(shapes, "layers.0.self_attn.q_proj.weight")[1] == 2 * hidden
    boundaries = _boundaries(shapes, raw, target) if is_eagle3 else _final_boundary(shapes, target)
    vocab, draft_vocab = _vocabularies(shapes, layer, target)
    return HeadConfig(
        generation=3 if is_eagle3 else 1,
        hidden_size=hidden,
        num_layers=_num_layers(shapes),
        intermediate_size=_shape(shapes, "layers.0.mlp.gate_proj.weight")[0],
        **_attention_heads(shapes, layer),
        target_width=target.hidden_size,
        boundaries=boundaries,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        rope_parameters=rope_parameters(layer),
        trained_positions=count(layer, "max_position_embeddings", 2048),
        rms_norm_eps=float(number(layer, "rms_norm_eps", 0, 1, default=1e-6)),
        hidden_act=activation if isinstance(activation, str) else repr(activation),
        **_tensor_flags(shapes),
        final_norm=is_eagle3 or "norm.weight" in shapes,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_output=bool(raw.get("norm_output", not is_eagle3 and "norm.weight" in shapes)),
    )


def _flat(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with what some publishers keep in an `eagle_config` of its own."""
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"eagle_config: expected an object, got {nested!r}")
    return {**raw, **nested}


def _refuse_other_kinds(shapes: Shapes, raw: Mapping[str, Any]) -> None:
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


def _shape(shapes: Shapes, name: str) -> tuple[int, ...]:
    shape = shapes.get(name)
    if shape is None or len(shape) != 2 or 0 in shape:
        raise ValueError(f"not an EAGLE head: expected a matrix {name}, found {shape}")
    return shape


def _num_layers(shapes: Shapes) -> int:
    numbers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    if numbers != set(map(str, range(len(numbers)))):
        raise ValueError(f"layers: expected them numbered from 0 on, found {sorted(numbers)}")
    return len(numbers)


def _attention_heads(shapes: Shapes, layer: Mapping[str, Any]) -> dict[str, Any]:
    """The number of heads stands in the config; their sizes follow from the matrices."""
    prefix = "layers.0.self_attn."
    heads = count(layer, "num_attention_heads")
    width = _shape(shapes, prefix + "q_proj.weight")[0]
    if width % (2 * heads):
        raise ValueError(f"num_attention_heads: expected even parts of {width}, got {heads} heads")
    head_dim = width // heads
    kv_heads = max(_shape(shapes, prefix + "k_proj.weight")[0] // head_dim, 1)
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def _vocabularies(shapes: Shapes, layer: Mapping[str, Any], target: TargetShape) -> tuple[int, int]:
    """Ids that may be fed, and ids that may be drafted."""
    stated = count(layer, "vocab_size", target.vocab_size)
    if "lm_head.weight" not in shapes:
        return target.vocab_size, target.vocab_size
    draft_vocab = _shape(shapes, "lm_head.weight")[0]
    if stated < draft_vocab:
        raise ValueError(
            f"vocab_size: expected at least {draft_vocab}, the rows of lm_head.weight, got {stated}"
        )
    if "d2t" not in shapes and draft_vocab != target.vocab_size:
        raise ValueError(
            f"lm_head.weight: expected {target.vocab_size} rows, one for each id of the target "
            f"(the checkpoint has no d2t), found {draft_vocab}"
        )
    return target.vocab_size, draft_vocab


def _boundaries(shapes: Shapes, raw: Mapping[str, Any], target: TargetShape) -> tuple[int, ...]:
    """The boundaries the config names, or the papers'; as many as `fc` has room for."""
    rows, width = _shape(shapes, "fc.weight")
    named = raw.get("eagle_aux_hidden_state_layer_ids") or default_boundaries(target.num_layers)
    allowed = range(-1, target.num_layers + 1)
    if not isinstance(named, list | tuple) or not all(
        type(k) is int and k in allowed for k in named
    ):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids: expected a list of numbers from -1 to "
            f"{target.num_layers}, got {named!r}"
        )
    boundaries = tuple(named)
    if width != len(boundaries) * target.hidden_size:
        raise ValueError(
            f"fc.weight: expected ({rows}, {len(boundaries) * target.hidden_size}) for the "
            f"target's boundaries {list(boundaries)} of width {target.hidden_size} each, found "
            f"({rows}, {width})"
        )
    return boundaries


def _final_boundary(shapes: Shapes, target: TargetShape) -> tuple[int, ...]:
    """EAGLE-1 is fed what the target's output layer is fed, so it is as wide as the target."""
    expected = (target.hidden_size, 2 * target.hidden_size)
    if _shape(shapes, "fc.weight") != expected:
        raise ValueError(f"fc.weight: expected {expected}, found {shapes['fc.weight']}")
    return (-1,)


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """The residual stream before blocks 2, n//2 and n−3, in ascending order.

    Targets of fewer than 7 blocks have fewer distinct ones among these (n = 5 has one, n = 6 has
    two); the reference captures each once and in the order of the forward, and so does this.
    """
    wanted = {2, num_layers // 2, num_layers - 3}
    return tuple(sorted(k for k in wanted if 0 <= k < num_layers))


def _tensor_flags(shapes: Shapes) -> dict[str, Any]:
    """Everything that the presence of a tensor decides."""
    each = "fc_norm.0.weight" in shapes
    joint = "input_norm.weight" in shapes
    first = "layers.0.self_attn."
    return {
        "fc_bias": "fc.bias" in shapes,
        "qkv_bias": first + "q_proj.bias" in shapes,
        "output_bias": first + "o_proj.bias" in shapes,
        "mlp_bias": "layers.0.mlp.up_proj.bias" in shapes,
        "qk_norm": first + "q_norm.weight" in shapes,
        "feature_norm": "each" if each else "joint" if joint else "none",
        "embedding_norm": "embed_norm.weight" in shapes,
        "input_norm": "layers.0.input_layernorm.weight" in shapes,
        "own_embeddings": "embed_tokens.weight" in shapes,
        "own_lm_head": "lm_head.weight" in shapes,
    }
