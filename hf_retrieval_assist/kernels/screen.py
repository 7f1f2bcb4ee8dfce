"""The greatest of many logits, exactly, from a quarter of the bytes.

An output layer's weights are read in eight bits. What rounding has left out of a row of weights is
a vector of known norm, so that a logit lies within that norm times the norm of x of its
approximation (Cauchy-Schwarz). Only tokens whose upper bound reaches the greatest lower bound can
win; their logits alone are computed in full, by the kernel that would have computed them all.
"""

from __future__ import annotations

import math

import torch

from .quantized import QuantizedWeight, quantized_linear
from .skinny import skinny_linear

__all__ = ["Screen"]

# A row of weights or of x whose norm is greater, or a row of x whose norm is less, might overflow
# or underflow on the way; it is computed in full.
MOST_NORM = 2.0**60
LEAST_NORM = 1e-20
LEAST_MARGIN = 1e-30

# With more candidates than this share of all tokens, the whole layer is computed.
MOST_CANDIDATES = 1 / 16

# Two scores closer than this, as logarithms, may change places when probabilities are rounded. A
# probability that is less than the greatest by so much may be rounded to zero.
CERTAIN_LEAD = 1e-4
CERTAIN_DEPTH = 80.0


class Screen:
    """Finds which token an output layer without bias would choose, from its weights in eight bits.

    Results are those of :func:`skinny_linear` over all tokens, to the bit; the weights must be what
    was packed (see :class:`QuantizedWeights`).

    Args:
        weight: [tokens, depth], float32, bfloat16 or float16, dense on the CPU.
        packed: the same in eight bits.

    Raises:
        ValueError: the two have not the same shape.
    """

    def __init__(self, weight: torch.Tensor, packed: QuantizedWeight) -> None:
        if weight.shape != packed.shape:
            raise ValueError(f"packed: expected {list(weight.shape)}, got {list(packed.shape)}")
        self._weight = weight.detach()
        self._packed = packed
        # What rounding x to 16 bits adds to an approximation, and summing in float32 to both.
        depth = packed.depth
        rounding = 1.01 * math.sqrt(depth) / 65534 + (2 * depth + 64) * 2.0**-24
        norms, left_out = packed.norms, packed.left_out
        bounds = (left_out + rounding * (norms + left_out)) * (1 + 2.0**-20)
        self._bounds = bounds.masked_fill_(~(norms < MOST_NORM), math.inf)

    def logits(
        self, x: torch.Tensor, also: torch.Tensor | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tokens that may have the greatest logit, for each row of x.

        Args:
            x: [n, depth] of the weight's dtype.
            also: int64 [m], tokens whose logits somebody is going to change: they are among those
                returned, and the others are those that may be the greatest without them.

        Returns:
            for each row, token ids in ascending order, int64, and their logits in x's dtype.
        """
        approximate, norms = self._approximate(x)
        rows = zip(x, approximate, norms.tolist(), strict=True)
        return [self._reaching(row, near, norm, also) for row, near, norm in rows]

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """int64 [n]: the first token of the greatest logit for each row of x [n, depth].

        As `torch.argmax` of all logits would, it takes a NaN for the greatest.
        """
        chosen = [ids[logits.argmax()] for ids, logits in self.logits(x)]
        return torch.stack(chosen) if chosen else torch.empty(0, dtype=torch.int64)

    def draw(self, x: torch.Tensor, noise: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """int64 [n]: the token of the greatest p / noise, with p = softmax(logits / temperature).

        So `torch.multinomial` draws one token where `noise` is what it takes from the generator.
        Where rounding could decide between two tokens, the whole layer is computed.

        Args:
            x: [n, depth] of the weight's dtype.
            noise: float32 [n, tokens], positive, of the exponential distribution.
            temperature: positive.

        Raises:
            ValueError: the temperature is not positive.
        """
        if not temperature > 0:
            raise ValueError(f"temperature: expected a positive number, got {temperature}")
        approximate, norms = self._approximate(x)
        drawn = [
            self._draw_one(x[i], approximate[i], norms[i].item(), noise[i], temperature)
            for i in range(len(x))
        ]
        return torch.tensor(drawn, dtype=torch.int64)

    def _approximate(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits from eight bits, float32 [n, tokens], and the norms of x, rounded up."""
        norms = x.double().norm(dim=1) * (1 + 2.0**-20)
        return quantized_linear(x.float(), self._packed), norms

    def _margins(self, norm: float) -> torch.Tensor | None:
        """How far a logit may lie from its approximation, float32 [tokens]; None: anywhere."""
        if not LEAST_NORM < norm < MOST_NORM:
            return None
        return self._bounds * (norm * (1 + 2.0**-20)) + LEAST_MARGIN

    def _all(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(len(self._weight)), skinny_linear(row, self._weight)

    def _some(self, row: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(ids) > MOST_CANDIDATES * len(self._weight):
            return self._all(row)
        return ids, skinny_linear(row, self._weight[ids])

    def _reaching(
        self, row: torch.Tensor, near: torch.Tensor, norm: float, also: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        margins = self._margins(norm)
        if margins is None:
            return self._all(row)
        lower, upper = near - margins, near + margins
        if also is not None:
            lower[also], upper[also] = -math.inf, math.inf
        least = _rounded_down(lower.nan_to_num(nan=-math.inf).amax(), row.dtype)
        # What is not below is above, or NaN, which is not known to be below.
        return self._some(row, (upper < least).logical_not_().nonzero()[:, 0])

    def _draw_one(
        self,
        row: torch.Tensor,
        near: torch.Tensor,
        norm: float,
        noise: torch.Tensor,
        temperature: float,
    ) -> int:
        margins = self._margins(norm)
        if margins is not None:
            gains = noise.log().neg_()
            middle = near / temperature + gains
            # Rounding of the lines above, and of the logit to its dtype.
            spread = margins + near.abs() * torch.finfo(row.dtype).eps
            spread = spread / temperature + middle.abs() * 2.0**-20 + gains.abs() * 2.0**-20
            lower = (middle - spread).nan_to_num(nan=-math.inf)
            ids = (middle + spread < lower.amax()).logical_not_().nonzero()[:, 0]
            # The greatest logit tells how small a probability is.
            peak = (near - margins).nan_to_num(nan=-math.inf).amax().item() / temperature
            ids, logits = self._some(row, ids)
            scores = logits.double() / temperature + gains[ids].double()
            best = scores.topk(min(2, len(scores)))
            first = int(best.indices[0])
            lead = float(best.values[0] - best.values[1]) if len(scores) > 1 else math.inf
            # In float32, as softmax will take it: one that is not finite leaves no probability
            # what it would be without.
            logit = (logits[first].float() / temperature).item()
            deep = logit < peak - CERTAIN_DEPTH
            if lead > CERTAIN_LEAD and logit < math.inf and not deep:
                return int(ids[first])
        logits = skinny_linear(row, self._weight)
        return int((torch.softmax(logits.float() / temperature, -1) / noise).argmax())


def _rounded_down(value: torch.Tensor, dtype: torch.dtype) -> float:
    """A number that no number that rounds to less than the rounded value reaches."""
    info = torch.finfo(dtype)
    rounded = min(value.to(dtype).item(), info.max)
    return rounded - abs(rounded) * info.eps - info.smallest_normal
