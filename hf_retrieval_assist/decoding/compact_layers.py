"""The float32 layers of a model within a call, read as bfloat16 where their values are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..kernels.compact import COMPACT, compactable, stand_in
from ..kernels.linear import StandIn
from ..kernels.reroute import standing_in
from .output_layer import PATIENCE


class CompactLayers:
    """Stand for a model's linear layers in forwards of a call; see :mod:`~..kernels.compact`."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self._weights = weights
        self._stand_ins: dict[int, StandIn] = {}
        self._scope: AbstractContextManager[None] = nullcontext()

    @classmethod
    def of(cls, model: Any) -> CompactLayers | None:
        """The model's; None where it has none whose values seem to be bfloat16's."""
        weights = compactable(model)
        return cls(weights) if weights else None

    @property
    def extra_bytes(self) -> int:
        """What copies will take, at most; 0 where there are all already."""
        return sum(0 if COMPACT.knows(weight) else weight.nbytes // 2 for weight in self._weights)

    def pack(self) -> None:
        """Read copies from the next forward on."""
        found = {id(weight): stand_in(weight) for weight in self._weights}
        self._stand_ins = {key: other for key, other in found.items() if other is not None}

    @property
    def serves(self) -> bool:
        """Whether there are copies for this call."""
        return bool(self._stand_ins)

    def is_worth_packing(self) -> bool:
        """Whether so many forwards went without that the time they would have saved is that of
        packing; to be called once for each."""
        return COMPACT.count_use(self._weights[0]) == PATIENCE

    def __enter__(self) -> CompactLayers:
        """Begin the scope of one forward."""
        if self._stand_ins:
            self._scope = standing_in(self._stand_ins)
            self._scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        scope, self._scope = self._scope, nullcontext()
        scope.__exit__(*error)
