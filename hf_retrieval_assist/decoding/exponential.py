"""The exponentially distributed numbers that torch draws on a CPU, in a third of its time.

For each number torch takes a uniform double u from the generator, then the logarithm of 1 - u, one
after another. Here the logarithms are taken many at a time.
"""

from __future__ import annotations

from functools import cache

import torch

# Logarithms taken many at a time may differ by so much, relative, from those taken alone.
_ERROR = 2.0**-50

_TRIALS, _TRIED = 3, 1 << 16


def exponential(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """What `torch.empty(shape).exponential_(generator=generator)` gives on a CPU, to the bit, the
    state of the generator after it too."""
    if is_fast():
        before = generator.get_state()
        if (drawn := _by_many(shape, generator)) is not None:
            return drawn
        generator.set_state(before)
    return torch.empty(shape, device="cpu").exponential_(generator=generator)


@cache
def is_fast() -> bool:
    """Whether this torch draws as said above; MKL's generators do not."""
    for seed in range(_TRIALS):
        own, twin = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
        drawn = torch.empty(_TRIED, device="cpu").exponential_(generator=own)
        many = _by_many((_TRIED,), twin)
        if many is not None:
            return torch.equal(many, drawn) and torch.equal(own.get_state(), twin.get_state())
    return False


def _by_many(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor | None:
    """None where rounding to float32 hangs on a logarithm's last bits: of one in 50 million."""
    exact = torch.empty(shape, dtype=torch.float64, device="cpu")
    exact.uniform_(generator=generator).neg_().log1p_().neg_()
    drawn = (exact * (1 - _ERROR)).float()
    return drawn if torch.equal(drawn, exact.mul_(1 + _ERROR).float()) else None
