"""Linear layers with weights in eight bits: a quarter of the bytes of float32, half of bfloat16.

A forward of few rows is a read of the weights. A product with :class:`QuantizedWeight` reads 8.5
bits for each weight, and rounding takes about half a percent of the weights' norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .skinny import INT8_GROUP, int8_linear, pack_int8

__all__ = ["QuantizedWeight", "quantized_linear"]


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix in eight bits, with a scale for each row and a factor for each 32 weights of a row.

    Attributes:
        values: int8 [outputs, groups * 32], padded with zeros behind `depth`.
        factors: bfloat16, one for each group, then padding.
        scales: float32, one for each row, then padding; NaN for a row that is not finite.
        left_out: float32 [outputs], the norm of what rounding takes from a row, rounded up.
        norms: float32 [outputs], the norm of the row, rounded up.
        depth: the matrix's columns.
    """

    values: torch.Tensor
    factors: torch.Tensor
    scales: torch.Tensor
    left_out: torch.Tensor
    norms: torch.Tensor
    depth: int

    @classmethod
    def pack(cls, weight: torch.Tensor, bits: int = 8) -> QuantizedWeight:
        """Round a dense CPU matrix, float32, bfloat16 or float16, on PyTorch's number of threads.

        Raises:
            TypeError: another dtype.
            ValueError: not a dense CPU matrix with adjacent columns, or `bits` is not 8.
        """
        if bits != 8:
            raise ValueError(f"bits: expected 8, got {bits}")
        values, factors, scales, left_out, norms = pack_int8(weight.detach())
        return cls(values, factors, scales, left_out, norms, weight.shape[1])

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.values.shape[0], self.depth))

    @property
    def nbytes(self) -> int:
        """The memory it takes, in bytes."""
        parts = (self.values, self.factors, self.scales, self.left_out, self.norms)
        return sum(part.nbytes for part in parts)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See :func:`quantized_linear`."""
        return quantized_linear(x, self, bias)

    def is_of(self, rows: torch.Tensor, first: int) -> bool:
        """Whether rows of a weight from `first` on are those that were packed."""
        again, end = QuantizedWeight.pack(rows), first + len(rows)
        groups = self.values.shape[1] // INT8_GROUP
        parts = (
            (again.values, self.values[first:end]),
            (again.factors[: len(rows) * groups], self.factors[first * groups : end * groups]),
            (again.scales[: len(rows)], self.scales[first:end]),
            (again.left_out, self.left_out[first:end]),
            (again.norms, self.norms[first:end]),
        )
        # As bytes, in which what is not a number equals itself.
        return all(torch.equal(one.view(torch.int8), own.view(torch.int8)) for one, own in parts)

    def dequantized(self) -> torch.Tensor:
        """The matrix that its products are of, float32 [outputs, depth]."""
        outputs = len(self.values)
        groups = self.values.view(outputs, -1, INT8_GROUP).float()
        factors = self.factors[: groups.shape[0] * groups.shape[1]].view(*groups.shape[:2], 1)
        scaled = groups * (factors.float() * self.scales[:outputs, None, None])
        return scaled.view(outputs, -1)[:, : self.depth]


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T + bias`, made for 1 to 64 rows; more read the weights again per 64.

    A row of x, rounded to 16 bits with one scale, gives the same bits whatever rows stand beside
    it. A row that is not finite gives NaN. Not differentiable.

    Args:
        x: [..., depth], float32, bfloat16 or float16.
        bias: [outputs] of x's dtype, or None.

    Returns:
        [..., outputs] of x's dtype.

    Raises:
        TypeError, ValueError: dtypes or shapes do not fit, or x is not dense on the CPU.
    """
    if x.shape[-1:] != (weight.depth,):
        raise ValueError(f"x: expected shape [..., {weight.depth}], got {list(x.shape)}")
    return int8_linear(x, weight.values, weight.factors, weight.scales, bias)
