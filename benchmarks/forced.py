"""Models that say what was recorded, whatever their weights are.

The recorded next token of every position gets the largest logit inside the model's own forward, in
a subclass, so that the forward can be compiled and captured as any other; it goes by the package's
name, since code of others is decoded plainly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

from hf_retrieval_assist.host.written import PACKAGE

FORCE = 1e4


@contextmanager
def forcing(model: torch.nn.Module, texts: torch.Tensor) -> Iterator[None]:
    """Make the likeliest token at position p of row b `texts[b, p + 1]` (int64 [b, length]).

    Every forward must say where its tokens stand (`position_ids`), as `generate`'s and ours do;
    nodes of a tree at equal depth share a position, hence a forced token. What follows a draft off
    the recorded text is never looked at. What is written to `texts` later on counts.
    """
    own: Any = type(model)
    model.__class__ = _forced(own)
    model.forced_texts = texts  # type: ignore[assignment]
    try:
        yield
    finally:
        model.__class__ = own
        del model.forced_texts


def _forced(own: type) -> type:
    """The subclass of a model's class that forces `forced_texts`."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        if kwargs.get("position_ids") is None:
            raise RuntimeError("expected position_ids in every forward of the replayed model")
        _force(self.forced_texts, kwargs["position_ids"], output.logits)
        return output

    space = globals() | {"__name__": PACKAGE}
    packages = FunctionType(forward.__code__, space, closure=forward.__closure__)
    named = functools.wraps(own.forward)(packages)  # type: ignore[attr-defined]
    return type(own.__name__, (own,), {"forward": named, "__module__": own.__module__})


def _force(texts: torch.Tensor, position_ids: torch.Tensor, logits: torch.Tensor) -> None:
    # Forwards may return logits of their last tokens only.
    positions = position_ids[..., -logits.shape[1] :].reshape(-1, logits.shape[1])
    positions = positions.expand(len(logits), -1)
    following = texts.gather(1, (positions + 1).clamp(0, texts.shape[1] - 1))
    logits.scatter_(2, following[..., None], FORCE)
