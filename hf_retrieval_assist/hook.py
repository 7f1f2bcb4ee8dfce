"""The one reversible wrapper round `GenerationMixin.generate`.

It gives `generate` its `assistant=` keyword, and finds the assistant that is attached to a model.
`generate_batch`, which takes no assistant and would ignore one, gets a wrapper that says so.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, QuantizedCache
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from .assistants import Assistant
from .attachment import attached_to
from .decoding.call import refused_mode
from .decoding.decode import decode
from .target.host import shards_need_company

logger = logging.getLogger(__name__)

_ORIGINAL = "_generate_without_assistant"

# Settings for which `generate` needs the tokenizer, and which are dealt with here.
_TOKENIZER_SETTINGS = ("stop_strings", "token_healing")


def install() -> None:
    """Give `generate` its `assistant=` keyword and its eye for attached assistants.

    Done when the package is imported; idempotent.
    """
    if not hasattr(GenerationMixin.generate, _ORIGINAL):
        original = GenerationMixin.generate
        wrapper = _wrap(original)
        setattr(wrapper, _ORIGINAL, original)
        GenerationMixin.generate = wrapper
        GenerationMixin.generate_batch = _refusing(GenerationMixin.generate_batch)


def uninstall() -> None:
    """Put transformers' own `generate` and `generate_batch` back."""
    for name in ("generate", "generate_batch"):
        wrapper = getattr(GenerationMixin, name)
        setattr(GenerationMixin, name, getattr(wrapper, _ORIGINAL, wrapper))


def _refusing(original: Any) -> Any:
    @functools.wraps(original)
    def generate_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("assistant") is not None:
            raise ValueError("assistant: expected none in generate_batch, which does not draft")
        return original(self, *args, **kwargs)

    setattr(generate_batch, _ORIGINAL, original)
    return generate_batch


def _wrap(original: Any) -> Any:
    names = tuple(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def generate(self: Any, *args: Any, assistant: Any = None, **kwargs: Any) -> Any:
        attached = attached_to(self) if assistant is None else None
        if assistant is None and attached is None:
            if isinstance(kwargs.get("custom_generate"), Assistant):
                _check_cache(self, kwargs)
            return original(self, *args, **kwargs)
        kwargs.update(zip(names, args, strict=False))
        if attached is None:
            _check(assistant, kwargs)
            _check_cache(self, kwargs)
            return _generate(original, self, assistant, kwargs)
        if (why := _why_not(self, kwargs)) is not None:
            attached.tell(f"{type(self).__name__}: decoding without the assistant ({why})")
            return original(self, **kwargs)
        return _generate(original, self, attached.assistant, kwargs)

    return generate


def _generate(original: Any, model: Any, assistant: Any, kwargs: dict[str, Any]) -> Any:
    if (why := _left_to_transformers(model, kwargs)) is not None:
        logger.warning("%s: decoding without the assistant", why)
        return original(model, **kwargs)
    tokenizer = kwargs.pop("tokenizer", None)
    _heal_tokens(model, tokenizer, kwargs)
    _stop_at_strings(tokenizer, kwargs)
    synced_gpus = kwargs.pop("synced_gpus", None)
    if synced_gpus is None:
        synced_gpus = shards_need_company(model)
    streamer = kwargs.get("streamer")

    # transformers hands a callable neither the streamer nor synced_gpus, so the closure does.
    def custom_generate(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        return decode(
            model,
            assistant,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    return original(model, custom_generate=custom_generate, **kwargs)


def _check(assistant: Any, kwargs: dict[str, Any]) -> None:
    if not isinstance(assistant, Assistant):
        raise TypeError(f"assistant: expected an Assistant, got {type(assistant).__name__}")
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
    if isinstance(kwargs.get("past_key_values"), QuantizedCache):
        return (
            "past_key_values: expected a cache whose tokens can be dropped one by one, got a "
            f"{type(kwargs['past_key_values']).__name__}"
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
    """What of a call `generate` sees to without an assistant in any case."""
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
