"""The one reversible wrapper round `GenerationMixin.generate`.

It gives `generate` its `assistant=` keyword, and finds the assistant that is attached to a model.
Methods that extensions serve, such as `generate_batch`, get theirs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, QuantizedCache
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from .assistants import Assistant
from .attachment import attached_to
from .decoding.call import refused_mode
from .host.plain_step import has_own_loop
from .host.private_names import why_plain
from .host.transformers_private import given_cache, shards_need_company
from .plugins import load, paths
from .policy.stats import CallStats
from .system.arguments import kind_of
from .system.log import get_logger
from .system.reloads import LOADED, is_of

logger = get_logger(__name__)

# The value of `assistant=` in a call that does not name it, the same after this module is loaded
# anew. None leaves an attached assistant out.
UNNAMED: Any = ...

# Settings for which `generate` needs the tokenizer, and which are dealt with here.
_TOKENIZER_SETTINGS = ("stop_strings", "token_healing")

# Caches that an assistant cannot draft into.
_NO_CACHES = {
    "quantized": "whose tokens cannot be dropped one by one",
    "paged": "with which generate decodes as generate_batch does, without drafts",
}


def install() -> None:
    """Give `generate` its `assistant=` keyword and its eye for attached assistants.

    The first use of a name of the package does this; idempotent.
    """
    global _installed
    _installed = True
    for name, serve in _SERVED.items():
        if _standing(name) is None:
            setattr(GenerationMixin, name, _wrap(_original(name), serve))


def uninstall() -> None:
    """Take `assistant=` away again.

    transformers' own methods are put back. Where somebody has wrapped ours since, their wrapper
    stays, and ours below it hands every call through.
    """
    global _installed
    _installed = False
    for name in _SERVED:
        setattr(GenerationMixin, name, _original(name))


def _original(name: str) -> Any:
    """The method of `GenerationMixin` without a wrapper that a module like this one put on last."""
    method = getattr(GenerationMixin, name)
    return method.stands_for if _is_wrapper(method) else method


def _standing(name: str) -> Any:
    """This module's wrapper, maybe below those of others; None where there is none."""
    method = getattr(GenerationMixin, name)
    while method is not None and not (_is_wrapper(method) and method.__globals__ is globals()):
        method = getattr(method, "__wrapped__", None)
    return method


def _is_wrapper(method: Any) -> bool:
    # Wrappers of others copy what stands on ours.
    return getattr(method, "wrapper", None) is method


def _wrap(original: Any, serve: Any) -> Any:
    """A method that hands its calls to `serve` while the package is installed.

    Callers find below it what they find without it: `__wrapped__`, where transformers' method has
    one, is the function below transformers' own decorator.
    """

    @functools.wraps(original)
    def method(self: Any, *args: Any, assistant: Any = UNNAMED, **kwargs: Any) -> Any:
        called = _as_from(sys._getframe(1), original)
        if _installed:
            return serve(called, self, assistant, args, kwargs)
        # Transformers judges it as the caller gave it.
        named = {} if assistant is UNNAMED else {"assistant": assistant}
        return called(self, *args, **named, **kwargs)

    wrapper: Any = method
    del wrapper.__wrapped__
    if not hasattr(original, "__wrapped__"):
        wrapper.__signature__ = inspect.signature(original)
    vars(wrapper).update(vars(original), wrapper=wrapper, stands_for=original, loaded=LOADED)
    return wrapper


def _as_from(frame: FrameType, function: Any) -> Any:
    """A function whose calls stand on the line that a frame is at, so that what transformers warns
    of in them names that line, instead of one of this module."""
    call = _call_of(function)
    place = {"co_filename": frame.f_code.co_filename, "co_firstlineno": frame.f_lineno}
    code = call.__code__.replace(**place, co_name=getattr(function, "__name__", "generate"))
    called = FunctionType(code, frame.f_globals, closure=call.__closure__)
    return functools.wraps(function)(called)


def _call_of(function: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs)


def _serve(original: Any, model: Any, named: Any, args: Any, kwargs: Any) -> Any:
    for config in (kwargs.get("generation_config"), model.generation_config, *args):
        given = getattr(config, "assistant", None)
        if isinstance(config, GenerationConfig) and given is not None:
            raise ValueError(
                "assistant: expected none in a generation configuration, got a "
                f"{type(given).__name__}; pass it to generate, or attach it to the model"
            )
    if named in (None, UNNAMED) and is_of(Assistant, kwargs.get("custom_generate")):
        named = kwargs.pop("custom_generate")
    assistant, asked = _chosen(model, named)
    if assistant is None:
        return original(model, *args, **kwargs)
    if args:
        names = [*inspect.signature(original).parameters][1:]
        kwargs.update(zip(names, args, strict=False))
    left = _why_stale(assistant) or _left_to_transformers(model)
    if (why := left or _objection(model, kwargs)) is not None:
        if asked and left is None:
            raise ValueError(why)
        _tell(model, why)
        result = original(model, **kwargs)
        assistant.policy.count(CallStats(tier="plain", reason=why, calls=1))
        return result
    _heal_tokens(model, kwargs)
    _stop_at_strings(kwargs)
    kwargs.pop("tokenizer", None)
    synced_gpus = kwargs.pop("synced_gpus", None)
    if synced_gpus is None:
        synced_gpus = shards_need_company(model)
    # transformers hands a callable neither of these two.
    own = functools.partial(assistant, synced_gpus=synced_gpus, streamer=kwargs.get("streamer"))
    return original(model, custom_generate=own, **kwargs)


def usable(model: Any, named: Any, objection: Callable[[Any], str | None]) -> Any:
    """The assistant of a call; None: it has none, or an attached one that meets an objection. Where
    one is named that does, ValueError."""
    assistant, asked = _chosen(model, named)
    if assistant is None or (why := _why_stale(assistant) or objection(assistant)) is None:
        return assistant
    if asked:
        raise ValueError(why)
    _tell(model, why)
    return None


def _chosen(model: Any, named: Any) -> tuple[Any, bool]:
    """The assistant of a call, None where it has none, and whether its maker asks for it."""
    if named is UNNAMED:
        return attached_to(model), False
    if named is not None and not is_of(Assistant, named):
        raise TypeError(f"assistant: expected an Assistant, got {kind_of(named)}")
    return named, True


def _why_stale(assistant: Any) -> str | None:
    """Why this module and an assistant are not of one copy of the package; None: they are."""
    if not isinstance(assistant, Assistant):
        return "the assistant is of a copy of the package that was replaced since; make a new one"
    return _loaded.why_stale()


def _tell(model: Any, why: str) -> None:
    name = type(model).__name__
    logger.warning_once("%s: decoding without the assistant (%s)", name, why)


def why_not(model: Any, kwargs: dict[str, Any]) -> str | None:
    """Why an assistant cannot serve a call with these arguments; None: it can."""
    return _left_to_transformers(model) or _objection(model, kwargs)


def _left_to_transformers(model: Any) -> str | None:
    """What of a model, or of the release, makes `generate` do without an assistant."""
    if (why := why_plain()) is not None:
        return why
    if has_own_loop(model):
        return f"{type(model).__name__} decodes by another loop than transformers' own"
    for name in _TOKENIZER_SETTINGS:
        if getattr(model.generation_config, name, None):
            # transformers fills it in again and then misses the tokenizer, which it has dropped.
            return f"{name} in model.generation_config"
    return None


def _objection(model: Any, kwargs: dict[str, Any]) -> str | None:
    """What an assistant cannot serve of the arguments of a call."""
    config = _merged(model, kwargs)
    for name in ("assistant_model", "prompt_lookup_num_tokens", "custom_generate"):
        if kwargs.get(name, getattr(config, name, None)) is not None:
            return f"{name}: expected no other way of decoding beside assistant="
    if kwargs.get("tokenizer") is None:
        for name in _TOKENIZER_SETTINGS:
            if getattr(config, name, None):
                return f"{name}: expected the model's tokenizer as tokenizer=, got none"
    # Asked here as well as in the engine because `generate` repeats the batch for every beam.
    return _cache_objection(config, kwargs) or refused_mode(config)


def _cache_objection(config: GenerationConfig, kwargs: dict[str, Any]) -> str | None:
    kind = config.cache_implementation
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


def _merged(model: Any, kwargs: dict[str, Any]) -> GenerationConfig:
    """The configuration that `generate` will make of the call's and the model's own."""
    config = copy.copy(kwargs.get("generation_config") or GenerationConfig())
    config.update(**model.generation_config.to_dict(), defaults_only=True)
    config.update(**kwargs)
    return config


def _taken(kwargs: dict[str, Any], name: str) -> Any:
    """A setting of a call, which loses it; the caller's configuration object does not."""
    config = kwargs.get("generation_config")
    value = kwargs.pop(name, None)
    if getattr(config, name, None) is None:
        return value
    kwargs["generation_config"] = copy.deepcopy(config)
    setattr(kwargs["generation_config"], name, None)
    return getattr(config, name) if value is None else value


def _stop_at_strings(kwargs: dict[str, Any]) -> None:
    """Turn stop strings into the criterion that `generate` would make of them."""
    if (strings := _taken(kwargs, "stop_strings")) is not None:
        criterion = StopStringCriteria(kwargs.get("tokenizer"), strings)
        given = kwargs.get("stopping_criteria") or []
        kwargs["stopping_criteria"] = StoppingCriteriaList([criterion, *given])


def _heal_tokens(model: Any, kwargs: dict[str, Any]) -> None:
    """Heal the prompt's last token here, since `generate` would miss the tokenizer."""
    if not _taken(kwargs, "token_healing"):
        return
    name = "inputs" if kwargs.get("inputs") is not None else "input_ids"
    ids = kwargs[name]
    if kwargs.get("attention_mask") is None:
        # The prompt's mask as it was: healing puts padding in the place of its first token.
        kwargs["attention_mask"] = torch.ones_like(ids)
    kwargs[name] = model.heal_tokens(ids, kwargs.get("tokenizer"))


# The extension that serves methods of these names by functions of the same names.
def _by_extension(name: str) -> Any:
    """What serves a method by an extension, which is loaded by the method's first call."""
    return lambda *call: load("methods", name)(*call)


_SERVED = {"generate": _serve, **{name: _by_extension(name) for name in paths("methods")}}

# A module that is loaded anew finds its wrapper, with what was known when that was made.
_of_before = _standing("generate")
_installed = _of_before is not None
_loaded = _of_before.loaded if _installed else LOADED
