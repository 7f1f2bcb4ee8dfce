"""The drafting layers of a head, and how a tree's levels go through them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .growth import Level
from .rows import DraftCache


class Layers(Protocol):
    """An EAGLE head, which counts as one layer, or a model's MTP layers.

    Attributes:
        device, dtype: of the layers.
        takes_trees: whether every layer keeps one entry per token and nothing else.
    """

    takes_trees: bool

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __len__(self) -> int: ...

    def cache(self, layer: int) -> DraftCache:
        """An empty cache of a layer over one text."""

    def fuse(self, features: Tensor) -> Tensor:
        """The target's hidden states to the first layer's inputs."""

    def run(
        self,
        layer: int,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Any,
        cache: Any,
    ) -> Tensor:
        """One pass of a layer; see :meth:`~.mtp_layers.MtpLayers.run`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, ids] from outputs [n, hidden_size] of any layer."""

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for columns of the logits; any shape."""


class LayerNodes(ABC):
    """The layers behind some texts and on the nodes of a level; a `NodeRunner`.

    Args:
        module: the layers.
        above: of each layer that has read something of the texts, [rows, 1, hidden_size] at their
            last tokens.
    """

    def __init__(self, module: Layers, above: Sequence[Tensor]) -> None:
        self._module = module
        # Of each layer [rows, f, hidden_size] at the nodes of the level above.
        self._above: list[Tensor | None] = [*above, *[None] * (len(module) - len(above))]

    @abstractmethod
    def read(self, k: int, level: Level, hidden: Tensor) -> Tensor:
        """Run layer k over a level behind the nodes that it has read, given the hidden states
        [rows, w, hidden_size] of the nodes' parents."""

    def root_logits(self) -> Tensor:
        return self._logits(self._above[0])

    def run(self, level: Level) -> Tensor:
        """See `NodeRunner`.

        Layer `depth` gives the logits. The further layers read the nodes as well, because deeper
        nodes attend to them there.
        """
        last = len(self._module) - 1
        below: list[Tensor | None] = [None] * len(self._module)
        for k in range(min(level.depth, last), last + 1):
            # Past its own level the last layer goes on with its own output.
            hidden = self._above[k - 1 if level.depth <= last else k]
            if hidden is None:
                # The texts are so short that the layer cannot read these nodes yet.
                break
            parents = level.parent_rows[..., None].expand(-1, -1, hidden.shape[2])
            below[k] = self.read(k, level, hidden.gather(1, parents))
        self._above = below
        return self._logits(below[min(level.depth, last)])

    def _logits(self, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        return self._module.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
