"""Linear layers with weights in few bits.

A forward of few rows is a read of the weights. A product with :class:`QuantizedWeight` reads
eight bits for each weight, a quarter of float32 and half of bfloat16, and rounding takes about one
percent of the weights' norm; with :class:`FourBitWeight` four and a half, for seven percent, and
less of the columns that matter most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .skinny import (
    INT4_BLOCK,
    INT4_COLUMNS,
    INT4_OUTPUTS,
    INT8_MULTIPLE,
    int8_linear,
    pack_int4,
    pack_int8,
)
from .weight_copies import WeightCopies


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
        """Round a dense CPU matrix, float32, bfloat16 or float16, on PyTorch's number of threads.

        Raises:
            TypeError: another dtype.
            ValueError: not a dense CPU matrix with adjacent columns.
        """
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
        return sum(part.nbytes for part in self._parts)

    @property
    def _parts(self) -> tuple[torch.Tensor, ...]:
        return self.values, self.scales, self.left_out, self.norms

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ weight.T + bias`, made for 1 to 64 rows; more read the weights again per 64.

        A row of x, rounded to 14 bits with one scale, gives the same bits whatever rows stand
        beside it. A row that is not finite gives NaN. Not differentiable.

        Args:
            x: [..., depth], float32, bfloat16 or float16.
            bias: [outputs] of x's dtype, or None.

        Returns:
            [..., outputs] of x's dtype.

        Raises:
            TypeError, ValueError: dtypes or shapes do not fit, or x is not dense on the CPU.
        """
        if x.shape[-1:] != (self.depth,):
            raise ValueError(f"x: expected shape [..., {self.depth}], got {list(x.shape)}")
        return int8_linear(x, self.values, self.scales, bias)

    def is_of(self, rows: torch.Tensor, first: int) -> bool:
        """Whether rows of a weight from `first` on are those that were packed."""
        again, end = QuantizedWeight.pack(rows), first + len(rows)
        pairs = ((one, own[first:end]) for one, own in zip(again._parts, self._parts, strict=True))
        # Bytes are compared, in which what is not a number equals itself.
        return all(torch.equal(one.view(torch.int8), own.view(torch.int8)) for one, own in pairs)


@dataclass(frozen=True, eq=False)
class FourBitWeight:
    """A matrix in four bits, with a scale for every 32 neighbours of a row.

    Attributes:
        values: uint8 [blocks, bytes], see :func:`~.skinny.pack_int4`.
        shape: of the matrix.
        column_weights: float32 [columns], how much each counted when it was rounded; None: all the
            same.
    """

    scales = None

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

    @property
    def nbytes(self) -> int:
        """The memory that the matrix takes, in bytes."""
        return self.values.nbytes

    def is_of(self, rows: torch.Tensor, first: int) -> bool:
        """Whether rows of a weight from `first` on are those that were packed."""
        end, begin = first + len(rows), first // INT4_OUTPUTS
        own = _by_output(self.values[begin : -(-end // INT4_OUTPUTS)])
        first -= begin * INT4_OUTPUTS
        again = _by_output(pack_int4(rows.detach(), self.column_weights))[: len(rows)]
        return torch.equal(again, own[first : first + len(rows)])


def _by_output(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [outputs, bytes], what blocks hold of each."""
    groups = blocks.view(len(blocks), -1, INT4_BLOCK)
    scales = groups[..., : 2 * INT4_OUTPUTS].unflatten(2, (INT4_OUTPUTS, 2))
    values = groups[..., 2 * INT4_OUTPUTS :].unflatten(2, (-1, INT4_OUTPUTS, 4)).transpose(2, 3)
    parts = scales.transpose(1, 2).flatten(2), values.flatten(3).transpose(1, 2).flatten(2)
    return torch.cat(parts, dim=2).flatten(0, 1)


WEIGHTS = WeightCopies(QuantizedWeight.pack, QuantizedWeight.size_of)
"""Copies in eight bits for all models in this process."""

IN_FOUR_BITS = WeightCopies(FourBitWeight.pack, FourBitWeight.size_of)
"""The same in four."""
