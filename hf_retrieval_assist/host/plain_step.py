"""transformers' own loop: whether it is what decodes a model, as transformers wrote it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList, cache_utils

from .callers_code import TRUST, names_in
from .transformers_private import loop, loop_of
from .written import PACKAGE, is_librarys, name_of, strangers_part, written_in

LOOP_METHODS = (
    *("_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"),
    *("_has_unfinished_sequences", "_optimize_model_for_decode"),
)
"""What the loop asks of a model besides its forward."""

# Functions that choose a token, and where the loop finds them.
_CHOOSERS = ((torch, "argmax"), (torch, "multinomial"), (torch.nn.functional, "softmax"))

STREAMS_FIRST = "put" in {*names_in(loop().__code__)}
"""Whether streamers get a token before the criteria are asked; since 5.24 behind them."""


def is_known_streamer(streamer: Any) -> bool:
    """Whether a streamer is one of transformers' or of this package, as either wrote it."""
    methods = (getattr(streamer, name, None) for name in ("put", "end", "on_finalized_text"))
    written = (written_in(method).partition(".")[0] for method in methods if method is not None)
    return all(root in ("transformers", PACKAGE) for root in written)


def has_own_loop(model: Any) -> bool:
    """Whether a model decodes by another loop than transformers' own."""
    return loop_of(model) is not loop_of(GenerationMixin) or not is_librarys(loop_of(model))


def why_other_loop(model: Any, trusts: bool) -> str | None:
    """What plain decoding of a model would ask in a step that nobody knows; None: all is known.

    Args:
        trusts: whether its owner says that a token is computed from those before it.
    """
    if has_own_loop(model):
        return "it decodes by another loop than transformers' own"
    for name in () if trusts else LOOP_METHODS:
        if (part := strangers_part(getattr(model, name))) is not None:
            return (
                f"nobody knows what its {name}, {name_of(part)}, does in later steps, and {TRUST}"
            )
    for space, name in _CHOOSERS:
        if not is_librarys(found := getattr(space, name)) or found.__name__ != name:
            return f"{space.__name__}.{name}, which chooses tokens, is {name_of(found)}"
    for where, found in (*_of_loop(), *_of_caches()):
        if not is_librarys(found):
            return f"{where} is {name_of(found)}, another one than transformers wrote"
    return None


def _of_loop() -> Iterator[tuple[str, Any]]:
    names = {*names_in(loop().__code__)}
    for name, value in loop().__globals__.items():
        if name in names and callable(value):
            yield f"{name} of transformers' loop", value
    for kind in (LogitsProcessorList, StoppingCriteriaList):
        yield f"{kind.__name__}.__call__", kind.__call__


def _of_caches() -> Iterator[tuple[str, Any]]:
    """The methods of transformers' caches and of their layers."""
    for kind in vars(cache_utils).values():
        if isinstance(kind, type) and kind.__module__ == cache_utils.__name__:
            for name, value in vars(kind).items():
                if inspect.isfunction(value):
                    yield f"{kind.__name__}.{name} of transformers' caches", value


def own_methods_of(cache: Any) -> list[str]:
    """Names of methods that stand on a cache, a cache within or a layer itself, and of classes of
    these that no known library has written."""
    caches = [cache, *(x for x in vars(cache).values() if isinstance(x, cache_utils.Cache))]
    found = []
    for part in [*caches, *(layer for one in caches for layer in getattr(one, "layers", ()))]:
        kind = type(part)
        own = [(n, x) for n, x in vars(part).items() if callable(x)]
        found += [name for name, x in own if hasattr(kind, name) or not is_librarys(x)]
        found += [base.__name__ for base in kind.__mro__ if not is_librarys(base)]
    return found
