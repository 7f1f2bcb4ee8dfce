"""Drafts of the target's own multi-token-prediction layers, as transformers loads them.

Layer k reads the embedding of a token and the hidden state that layer k − 1 (for k = 0 the model
itself) has at the token before it, and predicts the token k + 2 places behind that hidden state's
(DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from itertools import compress
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache

from ...cache.kv_cache import SLOT_LAYERS
from ...draft_models.growth import GrowthLimits
from ...draft_models.rows import DraftCache
from ...drafters.base import FeedbackNeeds, Target
from ...host.ranks import require_whole
from ...host.transformers_private import attention_of, mtp_logits, unloaded_patterns, with_cache
from ...system.locks import Lock
from ...verification.tree_attention import LayerMask, layer_masks, single_mask
from .checkpoints import check_numbers
from .features import FeatureDrafter, FeatureSession
from .layers_follower import Layers, LayersFollower

# Levels drafted by feeding the last layer its own output, unless a caller says otherwise.
_RECURSIONS = 3


class MtpDrafter(FeatureDrafter):
    """Drafts with the multi-token-prediction layers that a checkpoint brings along.

    Layer k drafts level k + 1 of the tree (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2); below
    the last layer's level that layer goes on with its own output. A layer with a convolution
    state expands only the likeliest node of each level, since it reads tokens in a row.

    Args:
        top_k: children of a node, and nodes expanded in a level.
        depth: levels below the first; None: one for each further layer, and three more.
        total: nodes of the tree with its root, so at most `total - 1` are proposed.
        min_prob: nodes held less likely than this to be reached are not expanded.

    Raises:
        ValueError: a size is out of range; from `start`, the target has no such layers.
    """

    name = "mtp"
    needs = FeedbackNeeds(hidden_layers=(-1,))

    def __init__(
        self, top_k: int = 8, depth: int | None = None, total: int = 60, min_prob: float = 0.01
    ) -> None:
        self.limits = GrowthLimits(top_k, top_k, 0 if depth is None else depth, total, min_prob)
        self.depth = depth

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> FeatureSession:
        model = target.require_model("fallback 'mtp'")
        require_whole(model, "fallback 'mtp'")
        layers = mtp_layers(model)
        depth = len(layers) - 1 + _RECURSIONS if self.depth is None else self.depth
        width = self.limits.width if layers.takes_trees else 1
        limits = replace(self.limits, width=width, depth=depth)
        follower = LayersFollower(layers, limits, layers.config.hidden_size, target.call.graphs)
        return FeatureSession(self, follower, prompt_ids, limits.total - 1)


class MtpLayers(Layers):
    """The layers, with the embeddings, rotary embedding and output layer of the model they are of.

    Args:
        module: transformers' `MtpModel`.

    Attributes:
        config: of the layers, counted from 0, as their caches want it.
    """

    module: Any

    def __init__(self, module: Any) -> None:
        super().__init__()
        # Hidden from nn.Module: moving, saving or freezing the layers must not do it to what they
        # share with the model.
        self.__dict__["module"] = module
        self.layers = module.layers
        if module.use_shared_post_norm:
            self.shared_post_norm = module.shared_post_norm
        self.config = module.config
        caches = DynamicCache(config=self.config).layers
        self.takes_trees = all(type(cache) in SLOT_LAYERS for cache in caches)
        self.requires_grad_(False).eval()

    def __len__(self) -> int:
        return len(self.layers)

    def cache(self, layer: int) -> DraftCache:
        kinds = getattr(self.config, "layer_types", None)
        rule = LayerMask()
        if kinds is not None:
            # Hybrid layers are of no kind that has a mask of its own.
            hybrid = kinds[layer] == "hybrid_sliding"
            rule = single_mask(self.config) if hybrid else layer_masks(self.config)[kinds[layer]]
        return DraftCache(self.config, rule, self.dtype)

    def forward(
        self, layer: int, ids: Tensor, hidden: Tensor, positions: Tensor, mask: Any, cache: Any
    ) -> Tensor:
        module = self.module
        embeddings = module.embed_tokens(ids.to(module.embed_tokens.weight.device))
        embeddings = embeddings.to(self.device, self.dtype)
        rotary = None
        if module.rotary_emb is not None:
            # All layers share one rotary embedding before 5.20.
            by_layer = getattr(module, "has_per_layer_rope", False)
            kind = {"layer_type": self.config.layer_types[layer]} if by_layer else {}
            rotary = module.rotary_emb(embeddings, position_ids=positions, **kind)
        output = module.layers[layer](
            embeddings,
            hidden,
            position_embeddings=rotary,
            attention_mask=mask,
            position_ids=positions,
            **with_cache(module.layers[layer], cache),
        )
        return module.shared_post_norm(output) if module.use_shared_post_norm else output

    def logits(self, hidden: Tensor) -> Tensor:
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
    kind = type(model).__name__
    owner = loadable(model)
    if owner is None:
        raise ValueError(
            "fallback 'mtp': expected a model whose configuration counts num_mtp_layers, or whose "
            f"checkpoints hold mtp.* tensors, got {kind}"
        )
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise ValueError("fallback 'mtp': expected transformers 5.20 or later") from error
    try:
        device = next(owner.get_decoder().layers[-1].parameters()).device
        module = MtpModel.from_pretrained(owner, device_map={"": device})
        for name, tensor in MtpLayers(module).state_dict().items():
            check_numbers(name, tensor)
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
        return WithMtpConfig(model, getattr(config, "mtp_num_hidden_layers", 1))
    return None


class WithMtpConfig:
    """A model with a configuration that counts MTP layers, of full attention where it has any.

    Qwen3-Next and Qwen3.5 hold one in their checkpoints without counting it: a block between two
    norms, a projection and a final norm, in the layout that transformers' loader knows from Mellum.

    Args:
        model: which is only read.
        count: of the layers.
    """

    def __init__(self, model: Any, count: int) -> None:
        self._model = model
        self.config = copy.deepcopy(model.config)
        config = self.config.get_text_config(decoder=True)
        self._kinds: list[str] = getattr(config, "layer_types", None) or []
        full = not self._kinds or "full_attention" in self._kinds
        self._kind = "full_attention" if full else self._kinds[-1]
        config.num_mtp_layers = count
        config.mtp_layer_types = [self._kind] * count
        if kinds := getattr(config, "mlp_layer_types", None):
            config.mtp_mlp_layer_types = kinds[-1:] * count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_decoder(self) -> Any:
        """Its last layer is one whose class and norms the MTP layer shares."""
        decoder = self._model.get_decoder()
        layers = list(decoder.layers)
        alike = [kind == self._kind for kind in self._kinds]
        return SimpleNamespace(
            layers=list(compress(layers, alike)) or layers,
            rotary_emb=copy.deepcopy(getattr(decoder, "rotary_emb", None)),
        )
