"""What drafts where retrieval has nothing: the drafters that a preset's `fallback=` names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

from torch import nn
from transformers import PreTrainedModel

from ..drafters.base import Drafter
from ..drafters.token_recycling import TokenRecyclingDrafter
from ..engines.cpu.quantized_self import QuantizedSelf
from ..extensions.heads.features import is_dflash
from ..system.arguments import kind_of
from .draft_model import DraftModelDrafter

if TYPE_CHECKING:
    from ..extensions.heads.eagle import EagleHead

Source: TypeAlias = Union[
    Literal["token_recycling", "mtp", "quantized_self"], Drafter, "EagleHead", PreTrainedModel
]
Fallback: TypeAlias = Source | Sequence[Source] | None


_NAMES = "'token_recycling', 'mtp', 'quantized_self'"


def fallback_drafters(fallback: Any, paper: bool = False) -> list[Drafter]:
    """The drafters that a preset's `fallback=` names; cheap ones first, so that costly ones are
    asked for what the others lack.

    Args:
        fallback: see :class:`~hf_retrieval_assist.presets.SamAssistant`.
        paper: whether named ones draft as their papers do.

    Raises:
        ValueError: an unknown name.
        TypeError: something that cannot draft.
    """
    if fallback is None:
        return []
    several = list(fallback) if isinstance(fallback, (list, tuple)) else [fallback]
    if "quantized_self" in several:
        # Beside a table that costs nothing, it is asked for what that lacks.
        several = ["token_recycling", *(one for one in several if one != "token_recycling")]
    drafters = [_fallback_drafter(one, paper) for one in several]
    return sorted(drafters, key=lambda drafter: drafter.costly)


def _fallback_drafter(fallback: Any, paper: bool) -> Drafter:
    if isinstance(fallback, Drafter):
        return fallback
    if isinstance(fallback, PreTrainedModel):
        # By what the model is configured to be fed.
        if not is_dflash(fallback):
            return DraftModelDrafter(fallback)
        from ..extensions.heads.dflash import DFlashDrafter

        return DFlashDrafter(fallback)
    if isinstance(fallback, nn.Module):
        from ..extensions.heads.eagle import EagleDrafter, EagleHead

        if isinstance(fallback, EagleHead):
            return EagleDrafter(fallback)
    match fallback:
        case "token_recycling":
            return TokenRecyclingDrafter(last_logits=not paper)
        case "mtp":
            from ..extensions.heads.mtp import MtpDrafter

            return MtpDrafter()
        case "quantized_self":
            return QuantizedSelf()
        case str():
            raise ValueError(f"fallback: expected {_NAMES}, got {fallback!r}")
    raise TypeError(
        f"fallback: expected {_NAMES}, a draft model, an EagleHead, a drafter, a list of these or "
        f"None, got {kind_of(fallback)}"
    )
