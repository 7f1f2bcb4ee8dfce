"""Drafts of a model that attends to the target's own keys and values, as Gemma 4's assistants do.

Such a model has no keys of its own and so no cache: it is fed the last token's embedding and the
target's hidden state before it, looks at the text through the last keys and values that the target
computes of each kind of layer, and goes on with its own hidden state, at the same position. Nodes
of a tree therefore see the text and, through the hidden state, their ancestors, never each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..eagle.cache import HeadCache
from ..target.key_layer import KeyLayer
from ..target.ranks import require_whole
from ..token_tree import Float32Array, TokenTree
from .base import Drafter, FeedbackNeeds, Target
from .feature_session import FeatureSession
from .tree_growth import PRIORS, GrowthLimits, grow

_KINDS = ("full_attention", "sliding_attention")


def reads_shared_keys(model: Any) -> bool:
    """Whether a model drafts from a target's keys and values, by what it is configured."""
    return getattr(model.config, "backbone_hidden_size", None) is not None


class SharedKeysDrafter(Drafter):
    """Drafts with an assistant that reads the target's keys and values.

    Args:
        model: `Gemma4AssistantForCausalLM` or one built like it, with eager or SDPA attention;
            shared by all sessions.
        top_k: children of a node, and nodes expanded in a level.
        depth: levels below the first; the tree is `depth + 1` deep.
        total: nodes of the tree with its root, so at most `total - 1` are proposed.
        min_prob: nodes held less likely than this to be reached are not expanded.

    Raises:
        ValueError: a size is out of range, or the model is no such assistant; from `start`, it is
            not one for this target.
    """

    name = "shared keys"
    needs = FeedbackNeeds(hidden_layers=(*_KINDS, -1))
    costly = True

    def __init__(
        self,
        model: Any,
        top_k: int = 8,
        depth: int = 5,
        total: int = 60,
        min_prob: float = 0.01,
    ) -> None:
        if not reads_shared_keys(model):
            raise ValueError(
                f"model: expected an assistant whose configuration names backbone_hidden_size, got "
                f"{type(model).__name__}"
            )
        self.model = model
        self.limits = GrowthLimits(top_k, top_k, depth, total, min_prob)

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> FeatureSession:
        model = target.require_model("SharedKeysDrafter")
        require_whole(model, "assistant that reads the target's keys")
        target.require_width(type(self.model).__name__, self.model.config.backbone_hidden_size)
        self._check_keys(model)
        stream = SharedKeysStream(self.model, target, self.limits)
        return FeatureSession(stream, prompt_ids, self.limits.total - 1)

    def _check_keys(self, target: Any) -> None:
        for kind, wanted in _shapes(self.model).items():
            layer = KeyLayer(target, kind)
            found = _KeyShape(layer.num_kv_heads, layer.head_dim)
            if found != wanted:
                raise ValueError(
                    f"{type(self.model).__name__}: expected one for the target's {kind} keys of "
                    f"{found}, got one for {wanted}"
                )

    def priors(self) -> Float32Array:
        """The model's own probabilities, as if it were right about them at any rank and depth."""
        return PRIORS


@dataclass(frozen=True)
class _KeyShape:
    """Of the keys and values of one kind of layer."""

    num_kv_heads: int
    head_dim: int
    num_layers: int = 1

    def __str__(self) -> str:
        return f"{self.num_kv_heads} heads of {self.head_dim}"


def _shapes(model: Any) -> dict[str, _KeyShape]:
    """What keys an assistant's layers attend to, by kind."""
    config = model.config.get_text_config()
    shapes = {}
    for kind, layer in zip(config.layer_types, model.model.layers, strict=True):
        attention = layer.self_attn
        heads = config.num_attention_heads // attention.num_key_value_groups
        shapes[kind] = _KeyShape(heads, attention.head_dim)
    return shapes


class SharedKeysStream:
    """The target's keys and values over one text, and an assistant that stands behind it.

    Args:
        model: shared with other streams.
        target: whose embeddings and layers it reads.
        limits: of a draft.
    """

    chunk = 512

    def __init__(self, model: Any, target: Target, limits: GrowthLimits) -> None:
        self._model, self._limits = model, limits
        self._vocab_size = target.vocab_size
        self._embeddings = target.model.get_input_embeddings()
        self._width = model.config.backbone_hidden_size
        self.feature_width = (len(_KINDS) + 1) * self._width
        self._window = model.config.get_text_config().sliding_window
        self._layers = [KeyLayer(target.model, kind) for kind in _KINDS]
        self._caches = [
            HeadCache(_KeyShape(layer.num_kv_heads, layer.head_dim), model.device, model.dtype)
            for layer in self._layers
        ]
        self._shared: dict[str, tuple[Tensor, Tensor]] = {}
        # [1, hidden size of the target] before the text's last token, that token and its position.
        self._hidden = torch.empty(0)
        self._last_token = torch.empty(0, dtype=torch.long)
        self._position = 0
        self._above = torch.empty(0)

    @torch.inference_mode()
    def extend(self, features: Tensor, token_ids: Tensor, first_position: int) -> None:
        """Follow the text by m tokens; see `FeatureStream`."""
        *inputs, final = features.split(self._width, dim=-1)
        for layer, cache, hidden in zip(self._layers, self._caches, inputs, strict=True):
            keys, values = layer.entries(hidden, first_position)
            cache.update(keys.to(self._model.device), values.to(self._model.device), 0)
            cache.advance(len(hidden))
        self._hidden, self._last_token = final[-1:], token_ids[-1:]
        self._position = first_position + len(features)

    @torch.inference_mode()
    def draft(self, keep: int) -> TokenTree:
        """The best-first tree below the last token of the text."""
        full, sliding = (cache.entries(0) for cache in self._caches)
        # The window counts the distance to the last key, and the last token has none yet.
        newest = slice(-self._window - 1, None)
        self._shared = {
            "full_attention": full,
            "sliding_attention": (sliding[0][:, :, newest], sliding[1][:, :, newest]),
        }
        return grow(self, self._limits, keep).tree()

    def root_logits(self) -> Tensor:
        return self._run(self._last_token, self._hidden)

    def run(self, parent_rows: Tensor, token_ids: Tensor, depth: int, visible: Tensor) -> Tensor:
        """See `NodeRunner`; the model is fed its own output, at one position for all depths."""
        return self._run(token_ids, self._above[parent_rows])

    def _run(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """[n, ids] behind each of n tokens, given the hidden state before it."""
        model, device = self._model, self._model.device
        embedded = self._embeddings(token_ids.to(self._embeddings.weight.device))
        inputs = torch.cat([embedded.to(hidden.device, hidden.dtype), hidden], dim=-1)[None]
        output = model(
            inputs_embeds=inputs.to(device, model.dtype),
            position_ids=torch.full((1, len(token_ids)), self._position, device=device),
            # Every token sees all keys of both kinds, however many: one entry for all of them.
            attention_mask=torch.zeros((1, 1, 1, 1), device=device, dtype=model.dtype),
            shared_kv_states=self._shared,
            # Layers that reuse keys are otherwise cut to the positions whose logits are wanted,
            # with per-layer inputs that this model does not have.
            output_hidden_states=True,
        )
        self._above = output.last_hidden_state[0]
        return output.logits[0, :, : self._vocab_size]

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids
