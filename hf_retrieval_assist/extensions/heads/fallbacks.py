"""Which head drafts, of those that a preset's `fallback=` is given as objects."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from ...drafters.base import Drafter
from .features import is_dflash


def drafter_of(module: nn.Module) -> Drafter | None:
    """What drafts with a head that was given as a fallback; None: it is none of ours."""
    if isinstance(module, PreTrainedModel):
        # The configuration tells what the model is fed.
        if not is_dflash(module):
            return None
        from .dflash import DFlashDrafter

        return DFlashDrafter(module)
    from .eagle import EagleDrafter, EagleHead

    return EagleDrafter(module) if isinstance(module, EagleHead) else None
