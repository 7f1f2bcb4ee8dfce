"""Tokens from probabilities and noise, as `torch.multinomial` draws them: one draw divides the
probabilities by as many exponentially distributed numbers and takes the largest quotient."""

from __future__ import annotations

import torch

from ..system.locks import DRAWS
from ..verification.largest import argmax_rows


def drawn(probs: torch.Tensor) -> list[int]:
    """The tokens that the process's generator draws of float32 [rows, vocab_size]."""
    with DRAWS:
        tokens = torch.multinomial(probs, num_samples=1)
    return tokens[:, 0].tolist()


def argmax_quotients(quotients: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the tokens of the largest of float32 [rows, vocab_size] quotients, found
    without a wait; −1 where probabilities were no distribution."""
    tokens = argmax_rows(quotients)[:, None]
    return torch.where(quotients.gather(-1, tokens) > 0, tokens, -1)[:, 0]


def quotient_tokens(probs: torch.Tensor, noise: torch.Tensor) -> list[int]:
    """The tokens that are drawn of float32 [rows, vocab_size] probabilities with this noise."""
    tokens: list[int] = argmax_quotients(probs / noise).tolist()
    if min(tokens) < 0:
        # No distribution: as plain decoding, which raises.
        return [drawn(p[None])[0] if t < 0 else t for t, p in zip(tokens, probs, strict=True)]
    return tokens
