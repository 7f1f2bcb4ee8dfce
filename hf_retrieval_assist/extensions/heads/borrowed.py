"""What a head needs to know of, and borrows from, the model it drafts for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...host.ranks import require_whole
from ...host.transformers_private import compute_device, is_offloaded, onloaded


class BorrowedLayers:
    """The target's embedding matrix and output layer, used by a head that has none of its own.

    Not an `nn.Module`: moving or saving the head must not move or save the target. What lies in
    the target's memory is shared; of an offloaded embedding matrix a copy is kept on the device
    that the target computes on.

    Raises:
        ValueError: the matrix is quantised, or spread over processes.

    Attributes:
        device: where the target looks up embeddings.
        embedding_weight: [V, Ht].
    """

    def __init__(self, target: Any) -> None:
        require_whole(target, "target")
        embeddings = target.get_input_embeddings()
        self.device = compute_device(embeddings)
        self.embedding_weight = float_weight(embeddings, self.device)
        self._output = target.get_output_embeddings()
        self._dtype = target.dtype

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the matrix as stored, without any factor the target's own layer applies."""
        return F.embedding(token_ids.to(self.device), self.embedding_weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's output layer. hidden: [..., Ht]; returns [..., V] on the same device."""
        if self._output is None:
            raise ValueError("lm_head.weight: the checkpoint has none and neither has the target")
        inputs = hidden.to(compute_device(self._output, hidden.device), self._dtype)
        return self._output(inputs).to(hidden.device)


def float_weight(layer: Any, device: torch.device) -> Tensor:
    """The weight matrix of a layer, without gradient; fetched if accelerate has offloaded it.

    Raises:
        ValueError: the matrix is stored in a quantised form.
    """
    with onloaded(layer):
        weight = layer.weight.detach()
        if not weight.is_floating_point() or weight.dtype.itemsize < 2:
            raise ValueError(
                f"expected the target's {type(layer).__name__} in 16 bits or more, got "
                f"{weight.dtype}: keep it out of the quantisation, or use a head with its own"
            )
        return weight.to(device, copy=is_offloaded(layer))
