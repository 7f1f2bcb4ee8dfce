"""The one reversible wrapper round `GenerationMixin.generate`.

It gives `generate` its `assistant=` keyword, and finds the assistant that is attached to a model.
`generate_batch` and what else makes managers of continuous batching get theirs.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, QuantizedCache
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from .assistants import Assistant
from .attachment import attached_to
from .continuous_batching import draft_for, objection
from .decoding.call import refused_mode
from .host.private_names import why_plain
from .host.transformers_private import given_cache, has_own_loop, shards_need_company
from .system.arguments import kind_of
from .system.log import get_logger

logger = get_logger(__name__)

# The value of `assistant=` in a call that does not name it. None leaves an attached assistant out.
_UNNAMED: Any = object()

# Settings for which `generate` needs the tokenizer, and which are dealt with here.
_TOKENIZER_SETTINGS = ("stop_strings", "token_healing")


@dataclass
class _Installation:
    """The wrappers that stand for methods of `GenerationMixin`, by name, and whether they serve."""

    wrappers: dict[str, Any] = field(default_factory=dict)
    serves: bool = False


_installation = _Installation()


# The assistant of the call that is about to make its manager.
_of_manager: ContextVar[Any] = ContextVar("assistant of a manager", default=_UNNAMED)


def install() -> None:
    """Give `generate` its `assistant=` keyword and its eye for attached assistants.

    The first use of a name of the package does this; idempotent.
    """
    for name, serve in _SERVED.items():
        current = getattr(GenerationMixin, name)
        known = _installation.wrappers.get(name)
        if known is None or known.__wrapped__ is current:
            _installation.wrappers[name] = _wrap(current, serve)
            setattr(GenerationMixin, name, _installation.wrappers[name])
    _installation.serves = True


def uninstall() -> None:
    """Take `assistant=` away again.

    transformers' own methods are put back. Where somebody has wrapped ours since, their wrapper
    stays, and ours below it hands every call through.
    """
    _installation.serves = False
    for name, wrapper in [*_installation.wrappers.items()]:
        if getattr(GenerationMixin, name) is wrapper:
            setattr(GenerationMixin, name, wrapper.__wrapped__)
            del _installation.wrappers[name]


@contextmanager
def _naming(assistant: Any) -> Iterator[None]:
    """A scope in which managers are made for an assistant, where one is named."""
    if assistant is _UNNAMED:
        yield
        return
    token = _of_manager.set(assistant)
    try:
        yield
    finally:
        _of_manager.reset(token)


def _wrap(original: Any, serve: Any) -> Any:
    """A method that hands its calls to `serve` while the package is installed."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, assistant: Any = _UNNAMED, **kwargs: Any) -> Any:
        if _installation.serves:
            return serve(original, self, assistant, args, kwargs)
        # As the caller gave it, for transformers to judge.
        named = {} if assistant is _UNNAMED else {"assistant": assistant}
        return original(self, *args, **named, **kwargs)

    return method


def _serve_batch(original: Any, model: Any, assistant: Any, args: Any, kwargs: Any) -> Any:
    with _naming(assistant):
        return original(model, *args, **kwargs)


@contextmanager
def _serve_scope(
    original: Any, model: Any, assistant: Any, args: Any, kwargs: Any
) -> Iterator[Any]:
    with ExitStack() as scope:
        with _naming(assistant):
            manager = scope.enter_context(original(model, *args, **kwargs))
        yield manager


def _serve_manager(original: Any, model: Any, assistant: Any, args: Any, kwargs: Any) -> Any:
    if assistant is _UNNAMED:
        assistant = _of_manager.get()
    attached = attached_to(model) if assistant is _UNNAMED else None
    if assistant is _UNNAMED:
        assistant = None if attached is None else attached.assistant
    if assistant is not None:
        _check_kind(assistant)
        if (why := objection(assistant)) is not None:
            if attached is None:
                raise ValueError(why)
            attached.tell(f"{type(model).__name__}: decoding without the assistant ({why})")
            assistant = None
    manager = original(model, *args, **kwargs)
    draft_for(manager, assistant)
    return manager


def _serve(original: Any, model: Any, assistant: Any, args: Any, kwargs: Any) -> Any:
    attached = attached_to(model) if assistant is _UNNAMED else None
    _check_configurations(model, kwargs, args)
    if attached is None and (assistant is None or assistant is _UNNAMED):
        if isinstance(kwargs.get("custom_generate"), Assistant):
            _check_cache(model, kwargs)
        return original(model, *args, **kwargs)
    if args:
        names = [*inspect.signature(original).parameters][1:]
        kwargs.update(zip(names, args, strict=False))
    if attached is None:
        _check(assistant, kwargs)
        _check_cache(model, kwargs)
        return _generate(original, model, assistant, kwargs)
    if (why := _why_not(model, kwargs)) is not None:
        attached.tell(f"{type(model).__name__}: decoding without the assistant ({why})")
        return original(model, **kwargs)
    return _generate(original, model, attached.assistant, kwargs)


def _check_configurations(model: Any, kwargs: dict[str, Any], args: Sequence[Any]) -> None:
    """Refuse an assistant in a generation configuration, which `generate` would ignore."""
    for config in (kwargs.get("generation_config"), model.generation_config, *args):
        if isinstance(config, GenerationConfig) and getattr(config, "assistant", None) is not None:
            raise ValueError(
                "assistant: expected none in a generation configuration, got a "
                f"{type(config.assistant).__name__}; pass it to generate, or attach it to the model"
            )


def _generate(original: Any, model: Any, assistant: Any, kwargs: dict[str, Any]) -> Any:
    if (why := _left_to_transformers(model, kwargs)) is not None:
        logger.warning_once(f"{why}: decoding without the assistant")
        return original(model, **kwargs)
    tokenizer = kwargs.pop("tokenizer", None)
    _heal_tokens(model, tokenizer, kwargs)
    _stop_at_strings(tokenizer, kwargs)
    synced_gpus = kwargs.pop("synced_gpus", None)
    if synced_gpus is None:
        synced_gpus = shards_need_company(model)
    # transformers hands a callable neither of these two.
    own = functools.partial(assistant, synced_gpus=synced_gpus, streamer=kwargs.get("streamer"))
    return original(model, custom_generate=own, **kwargs)


def _check_kind(assistant: Any) -> None:
    if not isinstance(assistant, Assistant):
        raise TypeError(f"assistant: expected an Assistant, got {kind_of(assistant)}")


def _check(assistant: Any, kwargs: dict[str, Any]) -> None:
    _check_kind(assistant)
    if (objection := _objection(kwargs)) is not None:
        raise ValueError(objection)
    # Checked here as well as in the engine because `generate` repeats the batch for every beam.
    beams = _setting(kwargs, "num_beams") or 1
    if beams > 1:
        raise ValueError(f"num_beams: expected 1 with an assistant, got {beams}")


# Caches that an assistant cannot draft into.
_NO_CACHES = {
    "quantized": "whose tokens cannot be dropped one by one",
    "paged": "with which generate decodes as generate_batch does, without drafts",
}


def _check_cache(model: Any, kwargs: dict[str, Any]) -> None:
    """Refuse caches with which `generate` would leave an assistant out."""
    own = {"generation_config": model.generation_config}
    if (objection := _cache_objection(kwargs) or _cache_objection(own)) is not None:
        raise ValueError(objection)


def _cache_objection(kwargs: dict[str, Any]) -> str | None:
    kind = _setting(kwargs, "cache_implementation")
    if kind in _NO_CACHES:
        return (
            'cache_implementation: expected "dynamic", "static" or none with an assistant, got '
            f'"{kind}", {_NO_CACHES[kind]}'
        )
    name, cache = given_cache(kwargs)
    if isinstance(cache, QuantizedCache):
        return (
            f"{name}: expected a cache whose tokens can be dropped one by one, got a "
            f"{type(cache).__name__}"
        )
    return None


def _objection(kwargs: dict[str, Any]) -> str | None:
    """What an assistant cannot serve of the arguments of a call."""
    for name in ("assistant_model", "prompt_lookup_num_tokens", "custom_generate"):
        if _setting(kwargs, name) is not None:
            return f"{name}: expected no other way of decoding beside assistant="
    if (objection := _cache_objection(kwargs)) is not None:
        return objection
    if kwargs.get("tokenizer") is None:
        for name in _TOKENIZER_SETTINGS:
            if _setting(kwargs, name):
                return f"{name}: expected the model's tokenizer as tokenizer=, got none"
    return None


def _left_to_transformers(model: Any, kwargs: dict[str, Any]) -> str | None:
    """What of a call, or of the release, makes `generate` do without an assistant."""
    if (why := why_plain()) is not None:
        return why
    if has_own_loop(model):
        return f"{type(model).__name__} decodes by a loop of its own"
    for name in _TOKENIZER_SETTINGS:
        if getattr(model.generation_config, name, None):
            # transformers fills it in again and then misses the tokenizer, which it has dropped.
            return f"{name} in model.generation_config"
    return None


def _why_not(model: Any, kwargs: dict[str, Any]) -> str | None:
    """Why an attached assistant does not serve a call, whose maker never asked for it."""
    config = _merged(model, kwargs)
    merged = kwargs | {"generation_config": config}
    return _left_to_transformers(model, merged) or _objection(merged) or refused_mode(config)


def _merged(model: Any, kwargs: dict[str, Any]) -> GenerationConfig:
    """The configuration that `generate` will make of the call's and the model's own."""
    config = copy.copy(kwargs.get("generation_config") or GenerationConfig())
    config.update(**model.generation_config.to_dict(), defaults_only=True)
    config.update(**kwargs)
    return config


def _setting(kwargs: dict[str, Any], name: str) -> Any:
    """A setting from where the call gives it."""
    if kwargs.get(name) is not None:
        return kwargs[name]
    return getattr(kwargs.get("generation_config"), name, None)


def _without(kwargs: dict[str, Any], name: str, value: Any) -> None:
    """Take a setting out of a call, without changing the caller's configuration object."""
    kwargs.pop(name, None)
    if getattr(kwargs.get("generation_config"), name, None):
        kwargs["generation_config"] = copy.deepcopy(kwargs["generation_config"])
        setattr(kwargs["generation_config"], name, value)


def _stop_at_strings(tokenizer: Any, kwargs: dict[str, Any]) -> None:
    """Turn stop strings into the criterion that `generate` would make of them."""
    strings = _setting(kwargs, "stop_strings")
    if strings is None:
        return
    criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
    given = kwargs.get("stopping_criteria") or []
    kwargs["stopping_criteria"] = StoppingCriteriaList([criterion, *given])
    _without(kwargs, "stop_strings", None)


def _heal_tokens(model: Any, tokenizer: Any, kwargs: dict[str, Any]) -> None:
    """Heal the prompt's last token here, since `generate` would miss the tokenizer."""
    if not _setting(kwargs, "token_healing"):
        return
    name = "inputs" if kwargs.get("inputs") is not None else "input_ids"
    ids = kwargs[name]
    if kwargs.get("attention_mask") is None:
        # Of the prompt as it was: healing puts padding in the place of its first token.
        kwargs["attention_mask"] = torch.ones_like(ids)
    kwargs[name] = model.heal_tokens(ids, tokenizer)
    _without(kwargs, "token_healing", False)


_SERVED = {
    "generate": _serve,
    "generate_batch": _serve_batch,
    "continuous_batching_context_manager": _serve_scope,
    "init_continuous_batching": _serve_manager,
}
