"""The methods of `GenerationMixin` that make managers of continuous batching, with an assistant.

Each is found by its name: it is called with transformers' own method, the model, the assistant that
the call names, and the call's arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import transformers

from ... import hook
from ...assistants import Assistant
from ...host.private_names import absent
from ...system.log import get_logger
from .drafts import RequestDrafts
from .private_names import CONTINUOUS_BATCHING

logger = get_logger(__name__)

# The assistant of the call that is about to make its manager.
_of_manager: ContextVar[Any] = ContextVar("assistant of a manager", default=hook.UNNAMED)


def generate_batch(original: Any, model: Any, named: Any, args: Any, kwargs: Any) -> Any:
    with _naming(named):
        return original(model, *args, **kwargs)


@contextmanager
def continuous_batching_context_manager(
    original: Any, model: Any, named: Any, args: Any, kwargs: Any
) -> Iterator[Any]:
    with ExitStack() as scope:
        with _naming(named):
            manager = scope.enter_context(original(model, *args, **kwargs))
        yield manager


@contextmanager
def _naming(assistant: Any) -> Iterator[None]:
    """A scope in which managers are made for an assistant, where one is named."""
    token = _of_manager.set(_of_manager.get() if assistant is hook.UNNAMED else assistant)
    try:
        yield
    finally:
        _of_manager.reset(token)


def init_continuous_batching(original: Any, model: Any, named: Any, args: Any, kwargs: Any) -> Any:
    named = _of_manager.get() if named is hook.UNNAMED else named
    assistant = hook.usable(model, named, objection)
    manager = original(model, *args, **kwargs)
    if lacking := absent(CONTINUOUS_BATCHING):
        if assistant is not None:
            logger.warning_once(
                f"continuous batching without the assistant: transformers "
                f"{transformers.__version__} lacks what it drafts with: {', '.join(lacking)}"
            )
        return manager
    # Only here: releases that lack something may not have its classes.
    from .batching import drafting

    return drafting(manager, None if assistant is None else RequestDrafts(assistant, model))


def objection(assistant: Assistant) -> str | None:
    """Why an assistant's drafters cannot draft here; None: they can."""
    policy = assistant.policy
    if policy.hidden_layers or policy.residual or policy.expected.rows:
        return (
            "assistant: expected drafters that need no hidden states, no residual sampling and no "
            "texts by row in continuous batching"
        )
    return None
