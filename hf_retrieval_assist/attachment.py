"""Attaching an assistant to a model, for calls of `generate` that somebody else makes.

Trainers, evaluation harnesses and pipelines call `generate` themselves and cannot pass
`assistant=`. What is attached is looked up by the one wrapper of `generate` (:mod:`hook`), in a
table that knows models by weak reference: nothing is stored on the model, so that its copies,
pickles and checkpoints do not know of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from transformers import GenerationMixin

from .policy.policy import DraftingPolicy
from .system.arguments import kind_of
from .system.log import get_logger
from .system.reloads import is_of

logger = get_logger(__name__)


class HasPolicy(Protocol):
    """An assistant, as far as this module looks at it."""

    policy: DraftingPolicy


Attached = TypeVar("Attached", bound=HasPolicy)

# Those that were there before this module was loaded anew are among them.
_attachments: weakref.WeakKeyDictionary[Any, HasPolicy] = globals().setdefault(
    "_attachments", weakref.WeakKeyDictionary()
)


def attach(model: Any, assistant: HasPolicy) -> None:
    """Let every `model.generate(...)` without an `assistant=` of its own be assisted.

    A call that cannot be assisted (beams, a quantised cache, another way of decoding) decodes as if
    nothing were attached, and the log says so once. `generate(assistant=None)` leaves it out of one
    call. An assistant attached before is replaced, which the log says.

    Args:
        model: a transformers model, or what is wrapped round one: a PEFT model, a compiled or a
            data-parallel module. The calls of everything that ends at this model are assisted.
        assistant: any; it may be attached to several models.

    Raises:
        TypeError: another kind of model or assistant.
        ValueError: an assistant that expects texts row by row, of batches that others make.
    """
    if not is_of(DraftingPolicy, getattr(assistant, "policy", None)):
        raise TypeError(f"assistant: expected an Assistant, got {kind_of(assistant)}")
    if rows := assistant.policy.expected.rows:
        raise ValueError(
            "assistant: expected texts for all rows where others make the batches, got "
            f"{len(rows)} rows of them"
        )
    model = generating_model(model)
    if _attachments.get(model, assistant) is not assistant:
        logger.warning(
            "%s: another assistant was attached and is replaced; detach(model) first, or use "
            "`with assistant.attached(model)` for a scope",
            type(model).__name__,
        )
    _attachments[model] = assistant


def detach(model: Any) -> None:
    """Take back `attach`; nothing where nothing is attached."""
    _attachments.pop(generating_model(model), None)


@contextmanager
def attached(model: Any, assistant: Attached) -> Iterator[Attached]:
    """A scope in which `assistant` is attached; what was attached before returns after it."""
    model = generating_model(model)
    before = _attachments.pop(model, None)
    attach(model, assistant)
    try:
        yield assistant
    finally:
        detach(model)
        if before is not None:
            _attachments[model] = before


def attached_to(model: Any) -> HasPolicy | None:
    """The assistant that is attached to a model whose `generate` is called; None: none is."""
    # A runtime that is no module may have no hash.
    return _attachments.get(model) if isinstance(model, torch.nn.Module) else None


def generating_model(model: Any) -> Any:
    """The transformers model in `model` whose `generate` does the work."""
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(module, GenerationMixin):
            return module
    raise TypeError(
        "model: expected a transformers model that can generate, or a module round one, got "
        f"{type(model).__name__}"
    )
