"""Which head drafts, of those that a preset's `fallback=` is given as objects or as folders."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from ...drafters.base import Drafter, DraftSession, FeedbackNeeds, Target
from ...system.locks import Lock
from .block_head import BlockHead
from .dflash import DFlashDrafter
from .eagle import EagleDrafter, EagleHead
from .features import FeatureDrafter, is_dflash
from .published import BLOCKS, read_published


def drafter_of(given: nn.Module | Path) -> Drafter | None:
    """What drafts with a head that was given as a fallback; None: it is none of ours.

    Raises:
        ValueError: the folder holds no head that is known.
    """
    if isinstance(given, Path):
        return FolderDrafter(given)
    if isinstance(given, PreTrainedModel):
        # The configuration tells what the model is fed.
        return DFlashDrafter(given) if is_dflash(given) else None
    return EagleDrafter(given) if isinstance(given, EagleHead) else None


class FolderDrafter(FeatureDrafter):
    """Drafts with the head in a folder, which is fitted to each target once.

    Args:
        folder: of a published head; see `read_published`.

    Raises:
        ValueError: it holds no head that is known; from `start`, it is for another target.
    """

    def __init__(self, folder: Path) -> None:
        self._published = published = read_published(folder)
        self._drafters: weakref.WeakKeyDictionary[Any, FeatureDrafter] = weakref.WeakKeyDictionary()
        self._lock = Lock()
        self.name = published.kind if published.kind in BLOCKS else "eagle"
        self.needs = FeedbackNeeds(hidden_layers=published.hidden_layers)

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> DraftSession:
        model, head = target.require_model("the head in a folder"), self._published
        with self._lock:
            if model not in self._drafters and head.kind in BLOCKS:
                self._drafters[model] = DFlashDrafter(BlockHead.of(head, model))
            elif model not in self._drafters:
                self._drafters[model] = EagleDrafter(EagleHead.of(head, model))
            drafter = self._drafters[model]
        return drafter.start(prompt_ids, target)
