"""What EAGLE head a checkpoint makes: the tensors decide what the architecture is, the settings say
the rest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .borrowed import TargetShape
from .published import PublishedHead, Settings, count, number, rope_parameters

Shapes = Mapping[str, tuple[int, ...]]

_DEFAULT_ROPE: Settings = {"rope_type": "default", "rope_theta": 10000.0}

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
        slots: tokens that a P-EAGLE head drafts at once, behind the last one's features and masks;
            mask_token_id: which the masks are.
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
    slots: int = 1
    mask_token_id: int = 0
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


def config_of(published: PublishedHead, target: TargetShape, overrides: Settings) -> HeadConfig:
    """A head's, from its tensors' shapes and its settings.

    Raises:
        ValueError: it is no EAGLE head for this target: the message names the first tensor that
            disagrees, with the expected and the found shape.
        TypeError: an override is not a field of :class:`HeadConfig`.
    """
    shapes, settings = published.shapes, published.settings
    _refuse_other_kinds(published)
    hidden = count(settings, "hidden_size", _matrix(shapes, ATTENTION + "o_proj.weight")[0])
    queries = _matrix(shapes, ATTENTION + "q_proj.weight")[0]
    inner = _matrix(shapes, "layers.0.mlp.gate_proj.weight")[0]
    heads = count(settings, "num_attention_heads")
    if queries % (2 * heads):
        raise ValueError(
            f"num_attention_heads: expected even parts of {queries}, the rows of "
            f"{ATTENTION}q_proj.weight, got {heads} heads"
        )
    head_dim = queries // heads
    activation = settings.get("hidden_act", "silu")
    generation = generation_of(published)
    # Some heads of EAGLE-1 have a last norm, which the original does without.
    parallel = published.kind == "peagle"
    normed = generation == 1 and "norm.weight" in shapes
    config = HeadConfig(
        generation=generation,
        target_width=target.hidden_size,
        boundaries=_boundaries(published, target),
        vocab_size=target.vocab_size,
        draft_vocab_size=_draft_vocabulary(shapes, settings, target),
        rope_parameters=rope_parameters(settings),
        trained_positions=count(settings, "max_position_embeddings", 2048),
        rms_norm_eps=float(number(settings, "rms_norm_eps", 0, 1, default=1e-6)),
        hidden_act=activation if isinstance(activation, str) else repr(activation),
        hidden_size=hidden,
        intermediate_size=count(settings, "intermediate_size", inner),
        num_layers=published.num_layers,
        num_heads=heads,
        num_kv_heads=max(_matrix(shapes, ATTENTION + "k_proj.weight")[0] // head_dim, 1),
        head_dim=head_dim,
        norm_before_residual=bool(settings.get("norm_before_residual", False)),
        norm_output=bool(settings.get("norm_output", normed)),
        slots=published.drafts or 8 if parallel else 1,
        mask_token_id=count(settings, "mask_token_id", least=0) if parallel else 0,
        tensors=frozenset(shapes),
    )
    return config.override(**overrides)


def generation_of(published: PublishedHead) -> Literal[1, 3]:
    """The first block of EAGLE-3 norms hidden states apart, and attends from twice its width."""
    fed = _matrix(published.shapes, ATTENTION + "q_proj.weight")[1]
    hidden = _matrix(published.shapes, ATTENTION + "o_proj.weight")[0]
    return 3 if fed == 2 * hidden or "layers.0.hidden_norm.weight" in published.tensors else 1


def _refuse_other_kinds(published: PublishedHead) -> None:
    """ValueError for relatives of EAGLE-3 that attend in another way, and for a head without the
    norms that its settings speak of."""
    if ATTENTION + "kv_a_proj_with_mqa.weight" in published.tensors:
        raise ValueError(
            "EAGLE head with multi-head latent attention: expected one with q_proj, k_proj and "
            "v_proj, got kv_a_proj_with_mqa"
        )
    for flag, name in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        if published.settings.get(flag) and name not in published.tensors:
            raise ValueError(f"{name}: expected where {flag} is set, found no such tensor")


def _matrix(shapes: Shapes, name: str) -> tuple[int, ...]:
    shape = shapes.get(name)
    if shape is None or len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"not an EAGLE head: expected a matrix {name}, found {shape} (a whole model is given "
            "as the model, not as its folder)"
        )
    return shape


def _draft_vocabulary(shapes: Shapes, settings: Settings, target: TargetShape) -> int:
    stated = count(settings, "vocab_size", target.vocab_size)
    if "lm_head.weight" not in shapes and "d2t" in shapes:
        raise ValueError("lm_head.weight: expected beside d2t, found no such tensor")
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
    return count(settings, "draft_vocab_size", found)


def _boundaries(published: PublishedHead, target: TargetShape) -> tuple[int, ...]:
    """The boundaries the config names, or the papers'; as many as `fc` has room for.

    EAGLE-1 is fed what the target's output layer is fed, so it is as wide as the target.
    """
    (rows, width), each = _matrix(published.shapes, "fc.weight"), target.hidden_size
    if generation_of(published) == 1:
        if (rows, width) != (each, 2 * each):
            raise ValueError(f"fc.weight: expected {(each, 2 * each)}, found {(rows, width)}")
        return (-1,)
    named = published.layers or default_boundaries(target.num_layers)
    if max(named) > target.num_layers:
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids: expected numbers from -1 to {target.num_layers}, "
            f"got {[*named]}"
        )
    if width != len(named) * each:
        raise ValueError(
            f"fc.weight: expected ({rows}, {len(named) * each}) for the target's boundaries "
            f"{[*named]} of width {each} each, found ({rows}, {width})"
        )
    return named


def rotary_of(config: HeadConfig) -> LlamaRotaryEmbedding:
    """Turns positions as `rope_parameters` say.

    Raises:
        ValueError: they do not say it in finite numbers.
    """
    given = dict(config.rope_parameters)
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
