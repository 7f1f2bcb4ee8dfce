"""What of a model scopes compute in fewer operations; see :mod:`.fusions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .fusions import fuse
from .norm import norm_of

__all__ = ["learn_fusions"]


def learn_fusions(model: nn.Module, attention_of: Callable[[Any], str]) -> None:
    """Let the scopes of all threads fuse the modules of a model, as it is now, that can be.

    Args:
        attention_of: the name of the attention implementation that a configuration asks for.
    """
    # A module of attention is told by its norms, so children come first.
    for module in reversed(list(model.modules())):
        fuse(module, norm_of(module))
