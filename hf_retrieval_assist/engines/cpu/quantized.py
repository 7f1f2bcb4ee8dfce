"""Linear layers with weights in eight bits: a quarter of the bytes of float32, half of bfloat16.

A forward of few rows is a read of the weights. A product with :class:`QuantizedWeight` reads
eight bits for each weight, and rounding takes about one percent of the weights' norm.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import nn

from . import skinny
from .skinny import INT8_MULTIPLE, int8_linear, pack_int8
from .weight_copies import WeightCopies, packable

__all__ = ["WEIGHTS", "QuantizedWeight", "quantized_model"]

logger = logging.getLogger(__name__)


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

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        peaks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x @ weight.T + bias`, made for 1 to 64 rows; more read the weights again per 64.

        A row of x, rounded to 14 bits with one scale, gives the same bits whatever rows stand
        beside it. A row that is not finite gives NaN. Not differentiable.

        Args:
            x: [..., depth], float32, bfloat16 or float16.
            bias: [outputs] of x's dtype, or None.
            peaks: float32 [rows, parts], which is given the largest of every `PEAK_COLUMNS`
                outputs of a row of float32; None: nobody wants them.

        Returns:
            [..., outputs] of x's dtype.

        Raises:
            TypeError, ValueError: dtypes or shapes do not fit, or x is not dense on the CPU.
        """
        if x.shape[-1:] != (self.depth,):
            raise ValueError(f"x: expected shape [..., {self.depth}], got {list(x.shape)}")
        return int8_linear(x, self.values, self.scales, bias, peaks=peaks)

    def is_of(self, rows: torch.Tensor, first: int) -> bool:
        """Whether rows of a weight from `first` on are those that were packed."""
        again, end = QuantizedWeight.pack(rows), first + len(rows)
        pairs = ((one, own[first:end]) for one, own in zip(again._parts, self._parts, strict=True))
        # Bytes are compared, in which what is not a number equals itself.
        return all(torch.equal(one.view(torch.int8), own.view(torch.int8)) for one, own in pairs)


WEIGHTS = WeightCopies(QuantizedWeight.pack, QuantizedWeight.size_of)
"""Copies for all models in this process."""


def quantized_model(model: nn.Module) -> dict[int, QuantizedWeight]:
    """The weights of a model's linear layers in eight bits, packed where they are not yet, by the
    identity of the parameter that each stands for.

    A weight that layers share is packed once. Layers that are no linears stay as they are, and so
    do small ones: adapters keep their precision. The log says what was packed.

    Raises:
        ValueError: there are no kernels for this CPU.
    """
    if not skinny.PATHS:
        raise ValueError("QuantizedSelf: expected a CPU with AVX2 or NEON, got another one")
    started = time.perf_counter()
    known = WEIGHTS.nbytes()
    found = {id(weight): weight for weight in map(packable, model.modules()) if weight is not None}
    packed = {key: WEIGHTS.of(weight).copy for key, weight in found.items()}
    if WEIGHTS.nbytes() != known:
        share = sum(weight.nbytes for weight in found.values())
        total = sum(parameter.nbytes for parameter in model.parameters())
        logger.info(
            "%s: %d linear layers in eight bits, %.0f%% of its weights, %.0f MB, %.1f s",
            *(type(model).__name__, len(found), 100 * share / max(1, total)),
            *(WEIGHTS.nbytes() / 1e6, time.perf_counter() - started),
        )
    return packed
