"""The output layer within a call: which token it chooses, from a quarter of its bytes.

Half of a small model's weights, and more, are those of its output layer. Where a call needs of its
logits no more than the greatest, they are computed from eight bits, and those that may matter
exactly; see :mod:`~hf_retrieval_assist.kernels.screen`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..host.transformers_private import hooks_of
from ..kernels.linear import MAX_ROWS, is_kernel, stand_ins
from ..kernels.quantized_model import WEIGHTS
from ..kernels.reroute import standing_in
from ..kernels.screen import Screen, Screened
from ..kernels.skinny import routed_linear
from ..kernels.weight_copies import packable

# Forwards that cost as much by being computed in full as packing costs, on whatever machine: both
# go with the weight's bytes.
PATIENCE = 24


class OutputLayer:
    """Stands for a model's output layer in forwards of a call.

    A model may do more with what its layer returns. So the forward over the prompt is watched: only
    where its logits are the layer's own, untouched, are later forwards screened; and each of them
    is looked at again.

    Attributes:
        screened: what the last forward's rows looked like; None where all logits were computed.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.screened: Screened | None = None
        self._weight = weight
        self._screen: Screen | None = None
        self._returned: torch.Tensor | None = None
        self._version = 0
        self._copy: torch.Tensor | None = None
        self._scope: AbstractContextManager[None] = nullcontext()

    @classmethod
    def of(cls, model: Any) -> OutputLayer | None:
        """The model's; None where it has none whose products are known."""
        layer = model.get_output_embeddings()
        weight = None if layer is None else packable(layer)
        foreign = "forward" in vars(model) or layer is None or hooks_of(layer) or hooks_of(model)
        if weight is None or foreign or layer.bias is not None:
            return None
        # Only the kernel gives a row of half precision the same bits whatever stands beside it.
        if weight.dtype != torch.float32 and not is_kernel(weight):
            return None
        return cls(weight)

    @property
    def copy_bytes(self) -> int:
        """What its copy in eight bits takes, nearly."""
        return self._weight.numel() * 17 // 16

    @property
    def extra_bytes(self) -> int:
        """What that will take which is not there yet."""
        return 0 if self.is_packed else self.copy_bytes

    @property
    def is_packed(self) -> bool:
        """Whether there is a copy already."""
        return WEIGHTS.knows(self._weight)

    def pack(self) -> None:
        """Screen from the next forward on."""
        self._screen = Screen(self._weight, WEIGHTS.of(self._weight))

    @property
    def serves(self) -> bool:
        """Whether it has been packed for this call."""
        return self._screen is not None

    def is_worth_packing(self) -> bool:
        """Whether so many forwards were not screened by now that the time they would have saved is
        that of packing; to be called once for each."""
        return WEIGHTS.count_use(self._weight) >= PATIENCE

    def __enter__(self) -> OutputLayer:
        """Begin the scope of one forward."""
        self.screened = self._returned = self._copy = None
        stands = not torch.is_autocast_enabled("cpu")
        self._scope = standing_in({**stand_ins(), id(self._weight): self} if stands else {})
        self._scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if self._screen is None or rows > MAX_ROWS or x.dtype != self._weight.dtype:
            returned = routed_linear(x, self._weight, bias)
        else:
            self.screened = self._screen.look(x.reshape(rows, -1))
            near = self.screened.near
            # The screen goes on from what the model does not see.
            near = near.clone() if near.dtype == x.dtype else near.to(x.dtype)
            returned = near.view(*x.shape[:-1], -1)
        self._returned = returned
        if returned.is_inference():
            self._copy = returned.clone() if self._screen is None else None
        else:
            self._version = returned._version
        return returned

    def shows(self, logits: torch.Tensor) -> bool:
        """Whether the logits of the forward are what the layer has returned, untouched."""
        own, self._returned = self._returned, None
        if own is None or own.data_ptr() != logits.data_ptr() or own.shape != logits.shape:
            return False
        if own.is_inference():
            return self._copy is None or torch.equal(own, self._copy)
        return own._version == self._version
