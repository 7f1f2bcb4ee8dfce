"""Drafts of the target's own multi-token-prediction layers, as a tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..target.kv_cache import SlotCache
from ..target.mtp_head import MtpHead
from ..target.mtp_layers import MtpLayers, mtp_layers
from ..target.ranks import require_whole
from ..target.tree_attention import FedTrees, TreeAttention
from ..target.verifiers import state_of
from ..token_tree import Float32Array
from .base import Drafter, FeedbackNeeds, Target
from .feature_session import FeatureSession
from .growing_stream import GrowingStream
from .tree_growth import PRIORS, GrowthLimits

# Levels drafted by feeding the last layer its own output, unless a caller says otherwise.
_RECURSIONS = 3


class MtpDrafter(Drafter):
    """Drafts with the multi-token-prediction layers that a checkpoint brings along.

    Layer k drafts level k + 1 of the tree (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2); below
    the last layer's level that layer goes on with its own output. A layer with a convolution
    state expands only the likeliest node of each level, since it reads tokens in a row.

    Args:
        top_k: children of a node, and nodes expanded in a level.
        depth: levels below the first; None: one for each further layer, and three more.
        total: nodes of the tree with its root, so at most `total - 1` are proposed.
        min_prob: nodes held less likely than this to be reached are not expanded.
        head: trained for a target that has none; None: the target's own, from its checkpoint.

    Raises:
        ValueError: a size is out of range; from `start`, the target has no such layers, or the
            head is for another target.
    """

    name = "mtp"
    needs = FeedbackNeeds(hidden_layers=(-1,))
    costly = True

    def __init__(
        self,
        top_k: int = 8,
        depth: int | None = None,
        total: int = 60,
        min_prob: float = 0.01,
        head: MtpHead | None = None,
    ) -> None:
        self.limits = GrowthLimits(top_k, top_k, 0 if depth is None else depth, total, min_prob)
        self.depth = depth
        self.head = head

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> FeatureSession:
        layers = self._layers_for(target)
        stream = MtpStream(layers, self._limits_for(layers))
        return FeatureSession(stream, prompt_ids, self.limits.total - 1)

    def _layers_for(self, target: Target) -> MtpLayers:
        if self.head is not None:
            target.require_ids("MTP head", self.head.vocab_size)
            target.require_width("MTP head", self.head.hidden_size)
            return self.head
        model = target.require_model("fallback 'mtp'")
        require_whole(model, "fallback 'mtp'")
        return mtp_layers(model)

    def _limits_for(self, layers: MtpLayers) -> GrowthLimits:
        depth = len(layers) - 1 + _RECURSIONS if self.depth is None else self.depth
        sizes = self.limits
        width = sizes.width if layers.takes_trees else 1
        return GrowthLimits(sizes.top_k, width, depth, sizes.total, sizes.min_prob)

    def priors(self) -> Float32Array:
        """The layers' own probabilities, as if they were right about them."""
        return PRIORS


class _LayerCache(SlotCache):
    """The entries of one layer over one text, from the first token that the layer can read.

    Attributes:
        first: position of that token.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.begin(1)
        self.first = 0

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self.slots.longest

    # Layers that count positions themselves ask for the first one.

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return super().get_query_offset(layer_idx) + self.first

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length, offset + self.first


class MtpStream(GrowingStream):
    """The layers, a cache for each, and how far they have followed one text.

    A layer has read every token of the text whose chain of hidden states begins at a feature: layer
    k starts k tokens after the first.

    Args:
        layers: shared with other streams.
        limits: of a draft.
        chunk: most tokens run at once when following a text.
    """

    def __init__(self, layers: MtpLayers, limits: GrowthLimits, chunk: int = 512) -> None:
        super().__init__(layers, layers.hidden_size, limits, chunk)
        self.layers = layers
        self._caches = [_LayerCache(layers.config) for _ in range(len(layers))]
        self._attention = [
            TreeAttention(layers.mask_rule(k), None, layers.dtype) for k in range(len(layers))
        ]
        # Of each layer [1, hidden_size] at the last token; none where it has read no token.
        self._last: list[Tensor | None] = [None] * len(layers)
        # Of each layer [f, hidden_size] at the nodes of the level above.
        self._above: list[Tensor | None] = []
        self._next_position = 0
        # Depth of each node run since the draft began, and how many of them each layer has read.
        self._depths = np.empty(0, np.int64)
        self._nodes_read = [0] * len(layers)
        # Of each cache, what a draft may overwrite and `keep` does not bring back.
        self._states: list[list[dict[str, Any]]] = []

    def _follow(self, features: Tensor, token_ids: Tensor, position: int) -> None:
        """Run all layers, given the target's hidden states before each token."""
        hidden, first = features, position + 1
        if first != self._next_position:
            self._last = [None] * len(self.layers)
        self._next_position = first + len(token_ids)
        for k in range(len(self.layers)):
            if not len(hidden):
                return
            output = self._read(k, token_ids[-len(hidden) :], hidden)
            before = self._last[k]
            self._last[k] = output[-1:]
            # The next layer lacks the hidden state before the first of all tokens.
            hidden = output[:-1] if before is None else torch.cat([before, output[:-1]])

    def _read(self, k: int, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Run a layer over the newest tokens of the text and keep their entries."""
        count, cache = len(token_ids), self._caches[k]
        if not cache.length:
            cache.first = self._next_position - count
        depths = np.arange(count)
        chain = torch.ones((count, count), dtype=torch.bool, device=hidden.device).tril()
        positions = torch.arange(
            self._next_position - count, self._next_position, device=hidden.device
        )
        output = self._run(k, token_ids, hidden, positions, depths, depths, chain)
        cache.keep([range(count)])
        return output

    def _run(
        self,
        k: int,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        depths: NDArray[np.int64],
        column_depths: NDArray[np.int64],
        attends: Tensor,
    ) -> Tensor:
        """Run a layer behind its text; depths are counted from there."""
        device, cache = hidden.device, self._caches[k]
        fed = FedTrees(
            token_ids=token_ids[None],
            depths=torch.from_numpy(depths[None]).to(device),
            attends=attends[None],
            max_depth=int(depths[-1]),
            column_depths=torch.from_numpy(column_depths[None]).to(device),
        )
        mask = self._attention[k].masks(fed, cache.slots)
        inputs = (token_ids[None], hidden[None], positions[None])
        return self.layers.run(k, *inputs, mask, cache)[0]

    def _begin_draft(self) -> None:
        self._states = [[state_of(layer) for layer in cache.layers] for cache in self._caches]
        self._depths = np.empty(0, np.int64)
        self._nodes_read = [0] * len(self.layers)

    def _forget_draft(self) -> None:
        for cache, states in zip(self._caches, self._states, strict=True):
            cache.keep([[]])
            for layer, state in zip(cache.layers, states, strict=True):
                layer.__dict__.update(state)

    def root_logits(self) -> Tensor:
        assert self._last[0] is not None
        self._above = self._last
        return self.layers.logits(self._last[0])

    def run(self, parent_rows: Tensor, token_ids: Tensor, depth: int, visible: Tensor) -> Tensor:
        """See `NodeRunner`.

        Layer `depth` gives the logits. The further layers read the nodes as well, because deeper
        nodes attend to them there.
        """
        last = len(self.layers) - 1
        self._depths = np.append(self._depths, np.full(len(token_ids), depth - 1))
        below: list[Tensor | None] = [None] * len(self.layers)
        for k in range(min(depth, last), last + 1):
            # Past its own level the last layer goes on with its own output.
            hidden = self._above[k - 1 if depth <= last else k]
            if hidden is None:
                # The text is so short that the layer cannot read these nodes yet.
                break
            below[k] = self._read_nodes(k, token_ids, hidden[parent_rows], visible)
        self._above = below
        output = below[min(depth, last)]
        assert output is not None
        return self.layers.logits(output)

    def _read_nodes(self, k: int, token_ids: Tensor, hidden: Tensor, visible: Tensor) -> Tensor:
        """Run a layer over a level behind the nodes that it has read."""
        self._nodes_read[k] += len(token_ids)
        columns = self._depths[-self._nodes_read[k] :]
        depths = columns[-len(token_ids) :]
        positions = torch.full_like(token_ids, self._next_position + int(depths[0]))
        attends = visible[:, -len(columns) :]
        return self._run(k, token_ids, hidden, positions, depths, columns, attends)
