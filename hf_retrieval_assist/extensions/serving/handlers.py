"""The routes for texts: transformers' own, which name the field that they cannot serve."""

from __future__ import annotations

import copy
import inspect
import json
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import pydantic
import torch
from fastapi import HTTPException, Request
from jinja2 import TemplateError
from openai.types.completion_usage import CompletionTokensDetails, CompletionUsage
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, Json, create_model
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import BaseHandler, _StreamError

from ...drafters.expected import ExpectedTexts, expected_ids
from ...hook import why_not
from .managers import Items, Parser, serving

# What a request can make the code raise that reads it.
_BY_A_REQUEST = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError),
    *(TemplateError, TypeError, ValueError),
)

_MAX_LENGTH = 20  # prompt and answer, where a configuration names none


def _bounded(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of `generate`, none of which takes all memory or all time."""
    for name, value in settings.items():
        # Beams and their like take memory each; of others a tensor has to hold the number.
        most = 1000 if name.startswith("num_") else 2**63 - 1
        if isinstance(value, (int, float)) and not abs(value) <= most:
            raise ValueError(f"{name}: expected at most {most}")
    # An answer has no place for the one; the other outlives a call that fails.
    for name, only in (("num_return_sequences", 1), ("assistant_early_exit", None)):
        if settings.get(name) not in (None, only):
            raise ValueError(f"{name}: not served")
    return settings


def _begun(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of a conversation that does not begin with one that transformers takes for content."""
    kind = items[0].get("type") if items and "role" not in items[0] else None
    if kind in ("function_call", "function_call_output", "reasoning", "item_reference"):
        raise ValueError(f"expected a message or content first, got {kind!r}")
    return items


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Prediction(BaseModel):
    type: Literal["content"]
    content: str | list[_Part]


_Object = dict[str, Any]
_Some = Annotated[str, Field(min_length=1)]

_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

# Bounds of the numbers that a request may hold.
_NUMBERS: dict[str, Any] = {
    "temperature": Annotated[float, Field(ge=0, allow_inf_nan=False)],
    "top_p": Annotated[float, Field(gt=0, le=1)],
    "frequency_penalty": Annotated[float, Field(gt=-1, le=2)],
    "logit_bias": dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]],
    "seed": Annotated[int, Field(ge=-(2**63), lt=2**64)],
    **dict.fromkeys(_LENGTHS, Annotated[int, Field(ge=1)]),
}

# Further fields whose wrong values nothing else would refuse by name.
_OTHERS: dict[str, Any] = {
    **dict.fromkeys(("model", "instructions", "suffix"), str),
    **dict.fromkeys(("stream", "parallel_tool_calls"), bool),
    "messages": Annotated[list[_Object], Field(min_length=1)],
    "input": str | Annotated[list[_Object], AfterValidator(_begun)],
    "prompt": _Some,
    "prediction": _Prediction,
    "tools": list[_Object],
    "chat_template_kwargs": _Object,
    "generation_config": Json[Annotated[_Object, AfterValidator(_bounded)]],
    "stop": Annotated[
        list[_Some] | None, BeforeValidator(lambda s: [s] if isinstance(s, str) else s or None)
    ],
}

_ALL: dict[str, Any] = {n: (kind | None, None) for n, kind in (_NUMBERS | _OTHERS).items()}
_FIELDS: Any = create_model("_Fields", __config__={"extra": "allow"}, **_ALL)

# Fields that transformers drops, and the values that ask for nothing.
_DROPPED: dict[str, Any] = {
    **dict.fromkeys(("n", "best_of"), 1),
    **dict.fromkeys(("logprobs", "echo", "background"), False),
    **dict.fromkeys(("presence_penalty", "top_logprobs"), 0),
    "functions": [],
    "include": [],
    **dict.fromkeys(("audio", "function_call", "web_search_options", "conversation"), None),
    **dict.fromkeys(("max_tool_calls", "previous_response_id"), None),
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "truncation": "disabled",
}

# Arguments of `apply_chat_template` that are no variables of a template.
_OF_THE_SERVER = inspect.signature(
    PreTrainedTokenizerBase.apply_chat_template
).parameters.keys() - {"documents"}

# Fields that are settings of `generate`, and those of its settings that are each request's own
# where requests are decoded side by side.
_SETTINGS = _NUMBERS.keys() - {*_LENGTHS} | {"generation_config", "stop"}
_OF_A_REQUEST = {"max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "bos_token_id"}
_OF_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "typical_p"}


def _checked(body: dict[str, Any], text_field: str) -> dict[str, Any]:
    """A request's body, in which fields that say nothing are left out.

    Raises:
        HTTPException: a field at fault, with its name.
    """
    for name, value in body.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError) as error:
            raise HTTPException(422, f"{name!a}: {type(error).__name__}") from None
    try:
        asked = _FIELDS.model_validate(body).model_dump(exclude_unset=True, round_trip=True)
    except pydantic.ValidationError as error:
        raise HTTPException(422, "; ".join(map(_named, error.errors()))) from None
    asked = {name: value for name, value in asked.items() if value is not None}
    if text_field not in asked:
        raise HTTPException(422, f"{text_field}: Field required")
    for name in asked.keys() & _DROPPED.keys():
        if asked[name] != _DROPPED[name]:
            raise HTTPException(422, f"{name}: not served, got {asked[name]!r}")
    if taken := asked.get("chat_template_kwargs", {}).keys() & _OF_THE_SERVER:
        raise HTTPException(422, f"chat_template_kwargs: expected a template's, got {min(taken)}")
    if asked.get("temperature", 1) < 1e-5:
        asked["temperature"] = 0  # logits are not divided by more than this
    return asked


def _named(fault: Any) -> str:
    """A field at fault, less the types that it might have had, and what is wrong with it."""
    place = ".".join(str(part) for part in fault["loc"] if "[" not in str(part))
    return f"{place}: {fault['msg']}"


class _Texts(BaseHandler):
    """What the routes for texts have in common. A copy handles each request.

    Attributes:
        text_field: with the prompt.
        body: of the request.
        decoding: whether its text is being generated; what fails then is the fault of few fields.
        common: the settings of all requests, where they are decoded side by side.
        expected: its prediction, and how much of it came.
        items: of its stream.
        parser: of its stream, where the model's answers have parts.
    """

    text_field: str
    body: dict[str, Any]
    decoding = False
    common: Any = None
    expected: ExpectedTexts | None = None
    tokenizer: Any = None
    items: Items | None = None
    parser: Parser | None = None

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        handler = copy.copy(self)
        handler.body = _checked(body, self.text_field)
        serving.set(handler)
        try:
            answer = await super(_Texts, handler).handle_request({**handler.body}, request_id)
            first = await handler.items.first() if handler.items else None
            if isinstance(first, _StreamError):
                raise RuntimeError(first.msg)
        except HTTPException as error:
            raise HTTPException(error.status_code, told(error.detail)) from error
        except Exception as error:
            if not (suspects := await handler._suspects(error)):
                raise
            found = f"{' or '.join(suspects)}: {type(error).__name__}: {error}"
            raise HTTPException(422, found) from error
        return answer

    async def _suspects(self, error: Exception) -> list[str]:
        """The fields of the request by which it may have failed; none: others fail as well."""
        fields: tuple[str, ...] = ()
        if self.decoding:
            fields = "generation_config", "logit_bias", "stop"
        elif isinstance(error, _BY_A_REQUEST):
            fields = self.text_field, "instructions", "tools", "chat_template_kwargs"
        found = [name for name in fields if name in self.body]
        if not (found and self.decoding):
            return found
        if self.common is not None:
            return []
        model, _ = self.model_manager.served()
        manager = self.generation_state.get_manager(self.model_manager.name)
        prompt = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        try:
            await manager.async_submit(model.generate, prompt, max_new_tokens=2)
        except Exception:
            return []
        return found

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: Any, use_cb: bool = False
    ) -> Any:
        options = {"model_generation_config": model_generation_config, "use_cb": use_cb}
        build = partial(super()._build_generation_config, **options)
        try:
            config = build(body)
        except _BY_A_REQUEST as error:
            raise HTTPException(422, f"generation_config: {error}") from error
        if use_cb:
            self.common = build({})
            for name in _SETTINGS & body.keys():
                alone = build({name: body[name]})
                seeded = name == "seed" and alone.do_sample
                if seeded or _shared(alone) != _shared(self.common):
                    raise HTTPException(
                        422, f"{name}: expected the server's, where requests are decoded together"
                    )
        config.return_dict_in_generate = False
        return config

    def begin(
        self, model: Any, processor: Any, inputs: Any, config: Any, most_tokens: int
    ) -> dict[str, Any]:
        """The inputs, and what the request has for `generate` besides.

        Raises:
            HTTPException: a prompt that leaves nothing of `most_tokens`.
        """
        ids = inputs["input_ids"]
        length = len(ids) if isinstance(ids, list) else ids.shape[-1]
        # The last token is not fed.
        most = min(most_tokens, self.model_manager.positions)
        if not 1 <= length <= most:
            raise HTTPException(
                422, f"{self.text_field}: expected 1 to {most} tokens, got {length}"
            )
        wanted = config.max_new_tokens
        if wanted is None:
            wanted = max(1, (config.max_length or _MAX_LENGTH) - length)
        config.max_new_tokens = min(wanted, most + 1 - length)
        self.decoding = True
        inputs = {**inputs}
        if prediction := self.body.get("prediction"):
            self.tokenizer = getattr(processor, "tokenizer", processor)
            text = prediction["content"]
            if not isinstance(text, str):
                text = "".join(part["text"] for part in text)
            ids = expected_ids(text, self.tokenizer)
            self.expected = ExpectedTexts([ids])
            if why_not(model, {"generation_config": config, "tokenizer": processor}) is None:
                inputs["assistant"] = self.model_manager.assistant.expecting(ids)
        return inputs


class _Chats(_Texts, ChatCompletionHandler):
    """Chats, whose usage tells how much of their `prediction` was written."""

    text_field = "messages"
    _written = ""

    def _build_completion(self, *answer: Any, usage: Any = None, **options: Any) -> Any:
        return super()._build_completion(*answer, usage=self._detailed(usage), **options)

    def _build_chunk_sse(self, *chunk: Any, usage: Any = None, **options: Any) -> str:
        self._written += options.get("content") or ""
        if usage is not None and self.expected is not None:
            written = self._written if self.parser is None else self.parser.written
            self.expected.follow(expected_ids(written, self.tokenizer) if written else [])
        return super()._build_chunk_sse(*chunk, usage=self._detailed(usage), **options)

    def _detailed(self, usage: CompletionUsage | None) -> CompletionUsage | None:
        if usage is not None and self.expected is not None:
            usage.completion_tokens_details = CompletionTokensDetails(
                accepted_prediction_tokens=self.expected.accepted,
                rejected_prediction_tokens=self.expected.rejected,
            )
        return usage


class _Transcriptions(TranscriptionHandler):
    async def handle_request(self, request: Request) -> Any:
        model, processor = self.model_manager.served()
        if not hasattr(processor, "feature_extractor"):
            raise HTTPException(422, f"model: {type(model).__name__} transcribes nothing")
        try:
            return await super().handle_request(request)
        except KeyError as error:
            raise HTTPException(422, f"{error}: Field required") from error

    def _prepare_audio_inputs(self, *audio: Any) -> Any:
        try:
            return super()._prepare_audio_inputs(*audio)
        except Exception as error:
            raise HTTPException(422, f"file: {type(error).__name__}: {error}") from error


def handlers_of(models: Any, state: Any) -> dict[str, Any]:
    """The handlers that transformers' `build_server` asks for."""

    def texts(theirs: Any, field: str) -> Any:
        return type(theirs.__name__, (_Texts, theirs), {"text_field": field})(models, state)

    handlers: dict[str, Any] = {
        "chat_handler": _Chats(models, state),
        "completion_handler": texts(CompletionHandler, "prompt"),
        "response_handler": texts(ResponseHandler, "input"),
        "transcription_handler": _Transcriptions(models, state),
    }
    if find_spec("transformers.cli.serving.systemone"):  # not in earlier releases
        from transformers.cli.serving.systemone import SystemOneHandler

        handlers["systemone_handler"] = texts(SystemOneHandler, "questions")
    return handlers


def told(detail: Any) -> Any:
    """An error's detail, without the values, which no JSON may be able to hold."""
    if not isinstance(detail, (list, tuple)):
        return detail
    return [{name: fault[name] for name in ("loc", "msg", "type")} for fault in detail]


def _shared(config: Any) -> dict[str, Any]:
    """The settings of a configuration that all requests share."""
    of_one = _OF_A_REQUEST if config.do_sample else _OF_A_REQUEST | _OF_SAMPLING
    settings = config.to_dict().items()
    return {name: value for name, value in settings if value and name not in of_one}
