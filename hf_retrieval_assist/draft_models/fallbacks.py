"""What drafts where retrieval has nothing: the drafters that a preset's `fallback=` names."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from os.path import isdir
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import nn
from transformers import PreTrainedModel

from ..drafters.base import Drafter
from ..drafters.logit_ngrams import LogitNgramDrafter
from ..memory.output_memory import OutputMemory
from ..plugins import every, load, paths
from ..system.arguments import kind_of
from .draft_model import DraftModelDrafter

Name: TypeAlias = Literal["auto", "logit_ngrams", "mtp", "quantized_self"]
Source: TypeAlias = Name | str | PathLike[str] | Drafter | nn.Module
Fallback: TypeAlias = Source | Sequence[Source] | None


def fallback_drafters(fallback: Any, memory: OutputMemory | None = None) -> list[Drafter]:
    """The drafters that a preset's `fallback=` names; cheap ones first, so that costly ones are
    asked for what the others lack.

    Args:
        fallback: see :class:`~hf_retrieval_assist.presets.SamAssistant`.
        memory: of the preset, with which go the tables of what the model thought likely.

    Raises:
        ValueError: an unknown name.
        TypeError: something that cannot draft.
    """
    if fallback is None:
        return []
    several = list(fallback) if isinstance(fallback, (list, tuple)) else [fallback]
    automatic: list[Drafter] = []
    if "auto" in several:
        several = ["logit_ngrams", *(one for one in several if one not in ("auto", "logit_ngrams"))]
        automatic = [make() for make in every("automatic")]
    if "quantized_self" in several and "logit_ngrams" not in several:
        # A table costs nothing and comes first; this one is asked for what that lacks.
        several = ["logit_ngrams", *several]
    drafters = [*[_fallback_drafter(one, memory) for one in several], *automatic]
    return sorted(drafters, key=lambda drafter: drafter.costly)


def _fallback_drafter(fallback: Any, memory: OutputMemory | None) -> Drafter:
    if isinstance(fallback, Drafter):
        return fallback
    names = ["auto", "logit_ngrams", *paths("fallbacks")]
    expected = (
        f"{', '.join(map(repr, names))}, a draft model, an EagleHead (of "
        "EagleHead.from_pretrained(folder, model)), the folder of a head, a drafter, a list of "
        "these or None"
    )
    if fallback == "logit_ngrams":
        return LogitNgramDrafter(memory)
    if fallback == "token_recycling":
        raise ValueError(
            "fallback: expected 'logit_ngrams' where 'token_recycling' was, or "
            "hf_retrieval_assist.papers.TokenRecycling(), which drafts as its paper has it"
        )
    if isinstance(fallback, str) and fallback in names:
        drafter: Drafter = load("fallbacks", fallback)()
        return drafter
    is_path = isinstance(fallback, (str, PathLike))
    given = Path(fallback) if is_path and isdir(fallback) else fallback
    if isinstance(given, (nn.Module, Path)):
        for drafter_of in every("heads"):
            found: Drafter | None = drafter_of(given)
            if found is not None:
                return found
    if isinstance(fallback, PreTrainedModel):
        return DraftModelDrafter(fallback)
    if is_path:
        raise ValueError(f"fallback: expected {expected}, got {fallback!r}")
    raise TypeError(f"fallback: expected {expected}, got {kind_of(fallback)}")
