"""A model's own multi-token-prediction layers, as transformers loads them.

Layer k reads the embedding of a token and the hidden state that layer k − 1 (for k = 0 the model
itself) has at the token before it, and predicts the token k + 2 places behind that hidden state's
(DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

import copy
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..system.locks import Lock
from .host import attention_of, mtp_logits, unloaded_patterns
from .kv_cache import SLOT_LAYERS
from .tree_attention import LayerMask, layer_masks, single_mask


class MtpLayers:
    """The layers, with the embeddings, rotary embedding and output layer of the model they are of.

    They are read-only, so any number of threads may use them.

    Args:
        module: transformers' `MtpModel`.

    Attributes:
        config: of the layers, counted from 0, as their caches want it.
        takes_trees: whether every layer keeps one entry per token and nothing else.
    """

    def __init__(self, module: Any) -> None:
        self.module = module.eval().requires_grad_(False)
        self.config = module.config
        layers = DynamicCache(config=self.config).layers
        self.takes_trees = all(type(layer) in SLOT_LAYERS for layer in layers)

    def __len__(self) -> int:
        return len(self.module.layers)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def device(self) -> torch.device:
        return next(self.module.layers.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.layers.parameters()).dtype

    def mask_rule(self, layer: int) -> LayerMask:
        """How far back a layer sees; without layer types, everything."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            return LayerMask()
        if kinds[layer] == "hybrid_sliding":
            return single_mask(self.config)
        return layer_masks(self.config)[kinds[layer]]

    def run(
        self,
        layer: int,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Any,
        cache: Any,
    ) -> Tensor:
        """One pass of one layer over n tokens.

        Args:
            layer: from 0.
            token_ids: int64 [n].
            hidden: [n, hidden_size], at the token before each, of the layer before.
            positions: int64 [n], of the tokens.
            mask: additive [1, 1, n, cached + n], or None where nothing is masked.
            cache: receives the n new entries.

        Returns:
            [n, hidden_size]
        """
        module, positions = self.module, positions[None]
        embeddings = module.embed_tokens(token_ids[None].to(module.embed_tokens.weight.device))
        embeddings = embeddings.to(self.device)
        rotary = None
        if module.rotary_emb is not None:
            kind = {"layer_type": self.config.layer_types[layer]} if self._rotary_by_kind else {}
            rotary = module.rotary_emb(embeddings, position_ids=positions, **kind)
        output = module.layers[layer](
            embeddings,
            hidden[None],
            position_embeddings=rotary,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
        )
        if module.use_shared_post_norm:
            output = module.shared_post_norm(output)
        return output[0]

    @property
    def _rotary_by_kind(self) -> bool:
        return self.module.has_per_layer_rope

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, ids] of the model's output layer, from outputs [n, hidden_size] of any layer."""
        return mtp_logits(self.module, hidden)


_loaded: weakref.WeakKeyDictionary[Any, MtpLayers] = weakref.WeakKeyDictionary()
_lock = Lock()


def mtp_layers(model: Any) -> MtpLayers:
    """The layers of a model, read from its checkpoint once.

    Raises:
        ValueError: the model has none, or its checkpoint is not at hand.
    """
    with _lock:
        if model not in _loaded:
            _loaded[model] = MtpLayers(_load(model))
        return _loaded[model]


def _load(model: Any) -> nn.Module:
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise ValueError("fallback 'mtp': expected transformers 5.23 or later") from error
    kind = type(model).__name__
    owner = loadable(model)
    if owner is None:
        raise ValueError(
            "fallback 'mtp': expected a model whose configuration counts num_mtp_layers, or whose "
            f"checkpoints hold mtp.* tensors, got {kind}"
        )
    try:
        device = next(owner.get_decoder().layers[-1].parameters()).device
        module = MtpModel.from_pretrained(owner, device_map={"": device})
    except Exception as error:  # whatever an unsuitable class or checkpoint raises
        raise ValueError(
            f"fallback 'mtp': expected MTP layers that transformers can load with {kind} from "
            f"{model.config.name_or_path!r}, got {type(error).__name__}: {error}"
        ) from error
    if "flash" in attention_of(module.config):
        # It takes no tree mask.
        module.set_attn_implementation("sdpa")
    return module


def loadable(model: Any) -> Any:
    """The model as transformers' loader wants it, or None where it has no such layers."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_mtp_layers", None):
        return model
    if any("mtp" in pattern for pattern in unloaded_patterns(model)):
        return _WithMtpConfig(model)
    return None


class _WithMtpConfig:
    """A model whose configuration does not count the MTP layer that its checkpoints hold.

    Qwen3-Next and Qwen3.5 have one block of full attention between two norms, a projection and a
    final norm, in the layout that transformers' loader knows from Mellum.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = copy.deepcopy(model.config)
        config = self.config.get_text_config(decoder=True)
        config.num_mtp_layers = getattr(config, "mtp_num_hidden_layers", 1)
        config.mtp_layer_types = ["full_attention"] * config.num_mtp_layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_decoder(self) -> Any:
        """Its last layer is one of full attention, whose class and norms the MTP layer shares."""
        decoder = self._model.get_decoder()
        kinds = self.config.get_text_config(decoder=True).layer_types
        full = [
            layer for layer, kind in zip(decoder.layers, kinds, strict=True) if kind[:4] == "full"
        ]
        return SimpleNamespace(layers=full, rotary_emb=getattr(decoder, "rotary_emb", None))
