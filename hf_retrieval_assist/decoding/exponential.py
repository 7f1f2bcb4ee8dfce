"""The exponentially distributed numbers that torch draws on a CPU, in a third of its time.

For each number torch takes a uniform double u from the generator, then the logarithm of 1 - u, one
after another. Here the logarithms are taken many at a time; or, where nothing but the token is
wanted that is drawn with them, a few of them alone.
"""

from __future__ import annotations

from functools import cache

import torch

from ..structures import draws

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
            same = torch.equal(many, drawn) and torch.equal(own.get_state(), twin.get_state())
            return same and _is_compiled()
    return False


def state_after(state: torch.Tensor, count: int) -> torch.Tensor:
    """A generator's state behind so many numbers. Where it is fast."""
    return torch.from_numpy(draws.skipped(state.numpy(), count))


def _is_compiled() -> bool:
    """Whether compiled code draws as this torch does."""
    own = torch.Generator().manual_seed(_TRIALS)
    for _ in range(_TRIALS):
        probs, state = torch.rand(_TRIED, generator=own, device="cpu"), own.get_state()
        drawn = torch.multinomial(probs, 1, generator=own)
        numbers = draws.Numbers(_TRIED)
        try:
            after = torch.from_numpy(numbers.begin(state.numpy()))
        except ValueError:  # another generator
            return False
        token, skipped = numbers.token(probs.numpy()), state_after(state, _TRIED)
        if (
            token != drawn
            or not torch.equal(after, own.get_state())
            or not torch.equal(after, skipped)
        ):
            return False
        torch.rand(1, generator=own, device="cpu")
    return True


def _by_many(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor | None:
    """None where rounding to float32 hangs on a logarithm's last bits: of one in 50 million."""
    exact = torch.empty(shape, dtype=torch.float64, device="cpu")
    exact.uniform_(generator=generator).neg_().log1p_().neg_()
    drawn = (exact * (1 - _ERROR)).float()
    return drawn if torch.equal(drawn, exact.mul_(1 + _ERROR).float()) else None
