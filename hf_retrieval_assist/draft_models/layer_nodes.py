"""The drafting layers of a head, and how a tree's levels go through them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from .eagle_head import EagleHead
from .growth import Level
from .mtp_layers import MtpLayers

Layers = MtpLayers | EagleHead
"""An EAGLE head counts as one layer."""


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
