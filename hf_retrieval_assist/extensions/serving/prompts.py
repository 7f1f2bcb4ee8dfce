"""What a request asks a model: its prompt as token ids, and everything in it that is read."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from fastapi import HTTPException
from jinja2 import TemplateError
from transformers import BatchFeature, PreTrainedTokenizerBase
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, Modality

from .fields import ChatFields, CompletionFields, Fields, ResponseFields
from .refusals import RefusedError

# What a request can make the code raise that reads it.
_BY_A_REQUEST = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError),
    *(TemplateError, TypeError, ValueError),
)

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXTS = ("text", "input_text", "output_text")
_OF_MESSAGES = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
# What answers hold besides that come back as part of a prompt: nothing, or the same once more.
_NOTHING = {"refusal", "audio", "function_call"}
_AGAIN = {"parsed", "provider_specific_fields", "annotations", "id"}
_RENAMED = {"reasoning": "reasoning_content"}
# Arguments of `apply_chat_template` that are no variables of a template.
_OF_THE_SERVER = inspect.signature(
    PreTrainedTokenizerBase.apply_chat_template
).parameters.keys() - {"documents"}
_MARKED = re.compile("\u2039(\\d+)\u203a")  # the number of a message
# Characters of a text for each token that it may have. Prose has four or five; of spaces there may
# be more in a token, and much time goes into finding that out.
_MOST_CHARACTERS = 8


class Prompts:
    """Makes prompts of requests.

    Args:
        model: whose prompts.
        processor: its tokenizer, or what has one.
        modality: what it reads.
        most: tokens of a prompt.
    """

    def __init__(self, model: Any, processor: Any, modality: Modality, most: int):
        self._model, self._processor, self._modality = model, processor, modality
        self._most = most
        self.tokenizer = getattr(processor, "tokenizer", processor)

    def of(self, fields: Fields) -> list[dict[str, Any]]:
        """The inputs of each prompt of a request, with `input_ids` among them.

        Raises:
            RefusedError: it cannot be read, or is too long.
        """
        try:
            if isinstance(fields, CompletionFields):
                found = [self._encoded(prompt) for prompt in fields.prompt]
            elif isinstance(fields, ChatFields):
                found = [self._rendered(fields, fields.messages)]
            else:
                assert isinstance(fields, ResponseFields)
                found = [self._rendered(fields, _messages(fields))]
        except _BY_A_REQUEST as error:
            said = f"{fields.text_field}: {type(error).__name__}: {error}"
            raise RefusedError(said, fields.text_field) from error
        for inputs in found:
            self._bound(fields.text_field, inputs["input_ids"].shape[1])
        return found

    def _bound(self, field: str, length: int, more: str = "") -> None:
        if not 1 <= length <= self._most:
            raise RefusedError(
                f"{field}: expected 1 to {self._most} tokens, got {more}{length}",
                field,
                "context_length_exceeded",
            )

    def _encoded(self, prompt: str | Sequence[int]) -> dict[str, Any]:
        if isinstance(prompt, str):
            bound_text("prompt", prompt, self._most)
            return self._moved(self.tokenizer(prompt, return_tensors="pt"))
        self._bound("prompt", len(prompt))
        last = self._model.get_input_embeddings().weight.shape[0] - 1
        if max(prompt) > last:
            raise RefusedError(f"prompt: expected ids up to {last}, got {max(prompt)}", "prompt")
        ids = torch.tensor([prompt])
        return self._moved({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def _moved(self, inputs: Any) -> dict[str, Any]:
        return dict(BatchFeature(inputs).to(self._model.device))

    def _rendered(self, fields: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """A conversation, as the chat template writes it."""
        field = fields.text_field
        if not getattr(self.tokenizer, "chat_template", None):
            raise RefusedError(
                f"{field}: expected a model with a chat template, which {self._model.name_or_path} "
                "has none of; ask /v1/completions",
                field,
                "unsupported_value",
            )
        if len(messages) > self._most:
            self._bound(field, len(messages), "more than ")
        messages = [
            {
                _RENAMED.get(name, name): value
                for name, value in one.items()
                if value is not None and name not in _AGAIN
            }
            for one in messages
        ]
        for number, message in enumerate(messages):
            self._check(f"{field}.{number}", field, message)
            if calls := message.get("tool_calls"):
                place = f"{field}.{number}.tool_calls"
                message["tool_calls"] = [
                    _called(f"{place}.{at}", field, call) for at, call in enumerate(calls)
                ]
        variables = self._variables(fields)
        read = BaseHandler.get_processor_inputs_from_messages(messages, self._modality)
        for one, given in zip(read, messages, strict=True):
            one |= {n: given[n] for n in ("name", "reasoning_content") if n in given}
            if one["role"] == "developer" and not self._names("developer"):
                one["role"] = "system"
        tools = None if fields.tool_choice == "none" else fields.tools
        common: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **variables}
        render = partial(self._processor.apply_chat_template, tools=tools, **common)
        text = render(read)
        bound_text(field, text, self._most)
        if tools and text == render(read, tools=None):
            raise RefusedError(
                "tools: expected a model whose chat template has a place for them",
                "tools",
                "unsupported_parameter",
            )
        if self._modality is Modality.LLM:
            self._find_all(field, read, render)
            # Its own beginning of a text is in the template.
            return self._moved(self.tokenizer(text, add_special_tokens=False, return_tensors="pt"))
        options = {"return_dict": True, "tokenize": True, "return_tensors": "pt"}
        return self._moved(render(read, **options))

    def _check(self, place: str, field: str, message: Mapping[str, Any]) -> None:
        """Refuse what would be left out of a message in silence."""
        if message.get("role") not in _ROLES:
            raise RefusedError(
                f"{place}.role: expected one of {', '.join(_ROLES)}, got {message.get('role')!r}",
                field,
            )
        for name, value in message.items():
            if name not in _OF_MESSAGES and not (name in _NOTHING and not value):
                known = ", ".join(sorted(_OF_MESSAGES))
                raise RefusedError(f"{place}: expected {known}, got {name!r}", field)
        content = message.get("content")
        if not isinstance(content, (str, list, type(None))):
            raise RefusedError(f"{place}.content: expected a text or parts, got {content!r}", field)
        for number, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in _TEXTS and not isinstance(part.get("text"), str):
                raise RefusedError(f"{place}.content.{number}.text: expected a text", field)
            if kind not in _TEXTS and (self._modality is Modality.LLM or not isinstance(kind, str)):
                raise RefusedError(
                    f"{place}.content.{number}.type: expected text, which is all that the model "
                    f"reads, got {kind!r}",
                    field,
                    "unsupported_value",
                )
            if kind not in _TEXTS and not _is_here(part):
                said = f"{place}.content.{number}: expected data: URLs, since nothing is fetched"
                raise RefusedError(said, field, "unsupported_value")

    def _names(self, variable: str) -> bool:
        return variable in str(self.tokenizer.chat_template)

    def _variables(self, fields: Any) -> dict[str, Any]:
        """A template's variables that the request sets."""
        variables = dict(fields.chat_template_kwargs or {})
        if taken := variables.keys() & _OF_THE_SERVER:
            raise RefusedError(
                f"chat_template_kwargs: expected a template's, got {min(taken)}",
                "chat_template_kwargs",
            )
        name = "reasoning_effort" if isinstance(fields, ChatFields) else "reasoning"
        effort = getattr(fields, name)
        if effort is not None and self._names("reasoning_effort"):
            variables["reasoning_effort"] = effort
        elif effort == "none" and self._names("enable_thinking"):
            variables["enable_thinking"] = False
        elif effort is not None and (effort != "none" or self._names("think")):
            raise RefusedError(
                f"{name}: expected none, since the model's chat template has no place for it, "
                f"got {effort!r}",
                name,
                "unsupported_parameter",
            )
        return variables

    def _find_all(
        self, field: str, messages: list[dict[str, Any]], render: Callable[[Any], str]
    ) -> None:
        """Refuse a message that the template leaves out."""
        marks = [f"\u2039{number}\u203a" for number in range(len(messages))]
        marked = [
            message | {"content": mark} if message.get("content") else message
            for message, mark in zip(messages, marks, strict=True)
        ]
        try:
            text = render(marked)
        except _BY_A_REQUEST:
            return  # it reads what it writes, and was content with what was there
        found = {*map(int, _MARKED.findall(text))}
        for number, message in enumerate(messages):
            if message.get("content") and number not in found:
                raise RefusedError(
                    f"{field}.{number}: expected what the model's chat template writes, which "
                    f"leaves out this message of role {message['role']}",
                    field,
                    "unsupported_value",
                )


def _called(place: str, field: str, call: Any) -> dict[str, Any]:
    """A call of a tool in a conversation, without what clients add to it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not {"name", "arguments"} <= function.keys():
        expected = "a function with a name and arguments"
        raise RefusedError(f"{place}: expected {expected}, got {call!r:.80}", field)
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except ValueError as error:
            said = f"{place}.function.arguments: expected JSON, got {arguments!r:.80}"
            raise RefusedError(said, field) from error
    # Clients write a call without arguments as an empty text, or as null.
    own = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return {name: call[name] for name in ("id", "type") if name in call} | {"function": own}


def _messages(fields: ResponseFields) -> list[dict[str, Any]]:
    """The conversation that a response goes on with."""
    body = {"input": fields.input, "instructions": fields.instructions}
    try:
        return ResponseHandler._normalize_input(body)
    except HTTPException as error:
        raise RefusedError(f"input: {error.detail}", "input") from error


def _is_here(part: Mapping[str, Any]) -> bool:
    """Whether an image, a video or a sound is in the request itself. Whatever else names one may be
    a file of this machine, or an address that never answers."""
    kind = part["type"]
    held = part.get("image_url" if kind == "input_image" else kind)
    if kind == "input_audio":
        return isinstance(held, dict) and bool(held.get("format"))
    url = held.get("url") if isinstance(held, dict) else held
    return isinstance(url, str) and url.startswith("data:")


def bound_text(field: str, text: str, tokens: int) -> None:
    """Refuse a text that is too long for so many tokens, before it is taken apart."""
    if len(text) > (most := _MOST_CHARACTERS * tokens):
        raise RefusedError(
            f"{field}: expected at most {tokens} tokens, and {most} characters, got {len(text)}",
            field,
            "context_length_exceeded",
        )
