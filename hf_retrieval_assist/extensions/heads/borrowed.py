"""What a head needs to know of, and borrows from, the model it drafts for."""

from __future__ import annotations

from typing import Any

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
        embedding_weight: [V, Ht], without gradient; fetched if accelerate has offloaded it.
    """

    def __init__(self, target: Any) -> None:
        require_whole(target, "target")
        embeddings = target.get_input_embeddings()
        self.device = compute_device(embeddings)
        with onloaded(embeddings):
            weight = embeddings.weight.detach()
            if not weight.is_floating_point() or weight.dtype.itemsize < 2:
                raise ValueError(
                    f"expected the target's {type(embeddings).__name__} in 16 bits or more, got "
                    f"{weight.dtype}: keep it out of the quantisation, or use a head with its own"
                )
            self.embedding_weight = weight.to(self.device, copy=is_offloaded(embeddings))
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
