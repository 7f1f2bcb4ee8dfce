"""Linear layers with weights in few bits.

A forward of few rows is a read of the weights. A product with a :class:`QuantizedWeight` reads
eight bits for each weight, a quarter of float32 and half of bfloat16, and rounding takes about one
percent of the weights' norm; with :class:`FourBitWeight` four and a half, for seven percent, and
less of the columns that matter most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...system.lazy import cached_property
from .skinny import (
    INT4_BLOCK,
    INT4_COLUMNS,
    INT4_OUTPUTS,
    INT8_MULTIPLE,
    Matrix,
    int4,
    int8,
    pack_int4,
    pack_int8,
)
from .weight_copies import WeightCopies

# A row of weights, or of what they are multiplied by, whose norm is greater might overflow on the
# way; it is computed in full.
MOST_NORM = 2.0**60


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix in eight bits, with a scale for each row.

    Attributes:
        values: int8 [outputs, steps * 64], filled up with zeros behind `depth`.
        scales: float32 [outputs]; NaN for a row that is not finite.
        left_out: float32 [outputs], the norm of what rounding takes from a row, rounded up.
        norms: float32 [outputs], the norm of the row, rounded up.
        depth: the matrix's columns.
    """

    values: torch.Tensor
    scales: torch.Tensor
    left_out: torch.Tensor
    norms: torch.Tensor
    depth: int

    @classmethod
    def pack(cls, weight: torch.Tensor) -> QuantizedWeight:
        """Round a dense CPU matrix with adjacent columns, float32, bfloat16 or float16."""
        values, scales, left_out, norms = pack_int8(weight.detach())
        return cls(values, scales, left_out, norms, weight.shape[1])

    @staticmethod
    def size_of(weight: torch.Tensor) -> int:
        """The bytes that a matrix takes in eight bits."""
        outputs, depth = weight.shape
        return outputs * (-(-depth // INT8_MULTIPLE) * INT8_MULTIPLE + 3 * 4)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.values.shape[0], self.depth))

    @property
    def nbytes(self) -> int:
        """The memory it takes, in bytes."""
        parts = self.values, self.scales, self.left_out, self.norms
        return sum(part.nbytes for part in parts)

    @cached_property
    def matrix(self) -> Matrix:
        """What products read."""
        return int8(self.values, self.scales, self.depth)

    @cached_property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """How far products with x of norm 1 may lie from those of the matrix, float32 [outputs];
        int64 [m], the outputs of which nothing is known, whose bounds are 0."""
        # What rounding x to 14 bits adds to a product, and summing in float32 to both.
        rounding = 1.01 * math.sqrt(self.depth) / 16382 + (2 * self.depth + 64) * 2.0**-24
        bounds = self.left_out + rounding * (self.norms + self.left_out)
        unfit = ~(self.norms < MOST_NORM)
        bounds = (bounds * (1 + 2.0**-20)).masked_fill_(unfit, 0.0)
        return bounds, unfit.nonzero()[:, 0]


@dataclass(frozen=True, eq=False)
class FourBitWeight:
    """A matrix in four bits, with a scale for every 32 neighbours of a row.

    Attributes:
        values: uint8 [blocks, bytes], see :func:`~.skinny.pack_int4`.
        shape: of the matrix.
        column_weights: float32 [columns], how much each counted when it was rounded; None: all the
            same.
    """

    values: torch.Tensor
    shape: torch.Size
    column_weights: torch.Tensor | None = None

    @classmethod
    def pack(
        cls, weight: torch.Tensor, column_weights: torch.Tensor | None = None
    ) -> FourBitWeight:
        """Round a dense CPU matrix; see :meth:`QuantizedWeight.pack`."""
        return cls(pack_int4(weight.detach(), column_weights), weight.shape, column_weights)

    @staticmethod
    def size_of(weight: torch.Tensor) -> int:
        """The bytes that a matrix takes in four bits."""
        outputs, depth = weight.shape
        return -(-outputs // INT4_OUTPUTS) * -(-depth // INT4_COLUMNS) * INT4_BLOCK

    @cached_property
    def matrix(self) -> Matrix:
        """What products read."""
        return int4(self.values, *self.shape)

    @property
    def nbytes(self) -> int:
        """The memory that the matrix takes, in bytes."""
        return self.values.nbytes


WEIGHTS = WeightCopies(QuantizedWeight.pack, QuantizedWeight.size_of)
"""Copies in eight bits for all models in this process."""

IN_FOUR_BITS = WeightCopies(FourBitWeight.pack, FourBitWeight.size_of)
"""The same in four."""
