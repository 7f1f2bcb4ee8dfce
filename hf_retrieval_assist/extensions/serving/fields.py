"""The fields of requests: what they may hold, and what of OpenAI's API is not served."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ...system.log import get_logger
from .refusals import RefusedError

logger = get_logger(__name__)

MOST_ANSWERS = 128
"""The answers to a request: its choices behind each of its prompts."""
_MOST_STOPS, _LONGEST_STOP = 16, 1000  # characters
_MOST_BIASES, _MOST_TOOLS = 1024, 128
_LOGPROBS = "message.output_text.logprobs"
# What else may be included is of tools that a model never sees, or is in the answer as plain text.
_INCLUDED = frozenset(
    (
        *(_LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url"),
        *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("code_interpreter_call.outputs", "computer_call_output.output.image_url"),
    )
)
# Tools that other servers run themselves, and groups of tools that may be found later.
_UNSEEN = re.compile(
    "(web_search|computer)\\w*|file_search|code_interpreter|image_generation|local_shell|shell|"
    "apply_patch|mcp|tool_search|namespace"
)
_Object = dict[str, Any]


def _unserved(expected: Any) -> PydanticCustomError:
    told = {"expected": json.dumps(expected)}
    return PydanticCustomError("not_served", "not served, expected {expected}", told)


def _only(expected: Any) -> AfterValidator:
    """A field with which one thing alone may be asked for; null asks for nothing."""

    def check(value: Any) -> Any:
        if value is not None and (value != expected or type(value) is not type(expected)):
            raise _unserved(expected)
        return value

    return AfterValidator(check)


def _read(check: Callable[[Any], Any]) -> AfterValidator:
    """A field that is read by a function; null asks for nothing."""
    return AfterValidator(lambda value: None if value is None else check(value))


def _expect(condition: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"expected {expected}")


def _prompts(value: Any) -> list[Any]:
    """One or several prompts; token ids alone are one."""
    several = value if isinstance(value, list) else [value]
    ids = value == several and several and all(type(one) is int for one in several)
    return [several] if ids else several


def _prompt(value: Any) -> str | list[int]:
    ids = isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
    _expect(value and (ids or isinstance(value, str)), "a text or token ids, at least one")
    return value


def _items(value: Any) -> Any:
    """What a response goes on from: a text, or items of a conversation."""
    _expect(value and isinstance(value, (str, list)), "a text, or a list of items")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _begun(value: list[_Object]) -> list[_Object]:
    kind = value[0].get("type") if "role" not in value[0] else None
    begins = kind not in ("function_call", "function_call_output", "reasoning")
    _expect(begins, "a message or content first")
    return value


def _schema(value: Any) -> _Object | None:
    """A format's JSON schema; None: free text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object", "additionalProperties": True}
    _expect(kind == "json_schema", "a type of text, json_object or json_schema")
    # Chats have it one deeper than responses.
    schema = value.get("json_schema", value).get("schema")
    _expect(isinstance(schema, dict), "an object under schema")
    return dict(schema)


def _tool(value: Any) -> _Object | None:
    """A function, as chat templates take it; None: what no model sees here."""
    _expect(isinstance(value, dict), "an object for each tool")
    if (kind := value.get("type", "function")) != "function":
        if not _UNSEEN.fullmatch(str(kind)):
            raise _unserved("function")
        logger.warning_once(f"tools of type {kind}: left out, since no model sees them here")
        return None
    inner = {name: held for name, held in value.items() if name != "type"}
    function = value.get("function", inner)
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    _expect(named and function["name"], "a function with a name")
    _expect(isinstance(function.get("parameters"), dict | None), "an object under parameters")
    return {"type": "function", "function": function}


def _choice(value: Any) -> str | tuple[str]:
    """none, auto, required, or the one function that is to be called."""
    if value in ("none", "auto", "required"):
        return str(value)
    named = value.get("function", value) if isinstance(value, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    _expect(isinstance(name, str) and name, "none, auto, required or a function by its name")
    return (str(name),)


def _text_format(value: Any) -> _Object | None:
    _expect(isinstance(value, dict), "an object")
    _expect(value.get("verbosity") in (None, *get_args(_Verbosity)), "a verbosity that is known")
    return None if value.get("format") is None else _schema(value["format"])


def _included(value: Any) -> list[str] | None:
    if not isinstance(value, list) or not {*map(str, value)} <= _INCLUDED:
        raise _unserved(sorted(_INCLUDED))
    return [_LOGPROBS] if _LOGPROBS in value else None


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with each piece, what came so far
    include_obfuscation: bool | None = None  # hides lengths from who reads along: nothing is added


_Verbosity = Literal["low", "medium", "high"]  # no model is told of it
_Summary = Literal["auto", "concise", "detailed", "none"] | None


class _Reasoning(BaseModel):
    """How much a model is to reason; it is shown whole, and no summary is made."""

    model_config = ConfigDict(extra="forbid", strict=True)

    effort: str | None = None
    summary: _Summary = None
    generate_summary: _Summary = None


class _Part(BaseModel):
    text: str


class _Prediction(BaseModel):
    """What an answer is expected to resemble."""

    type: Literal["content"]
    content: Annotated[
        list[_Part], BeforeValidator(lambda one: [{"text": one}] if isinstance(one, str) else one)
    ]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


# JSON does not tell 8 from 8.0.
_WHOLE = BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)
_Count = Annotated[int, Field(ge=1), _WHOLE]
_Few = Annotated[int, Field(ge=0, le=20), _WHOLE]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
# The names of JSON's objects are texts.
_Token = Annotated[int, Field(ge=0, strict=False)]
_Biases = Annotated[
    dict[_Token, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=_MOST_BIASES)
]
_Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]],
    Field(max_length=_MOST_STOPS),
    BeforeValidator(lambda one: [one] if isinstance(one, str) else one),
    AfterValidator(lambda several: list(dict.fromkeys(several))),
]


class Fields(BaseModel):
    """What a request for texts may hold; a field of null says nothing.

    Attributes:
        text_field: the name of the field with the prompt.
        length_fields: the names of those that bound the answer, of which the first one that says
            something counts.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    text_field: ClassVar[str]
    length_fields: ClassVar[tuple[str, ...]] = ("max_tokens",)

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), _WHOLE] | None = None
    # Further ones of vLLM's and llama.cpp's servers; -1 stands for all tokens, as 0 does.
    top_k: Annotated[int, Field(ge=-1, lt=2**31), _WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # Logits that are divided by less, or multiplied by more, may be numbers no longer.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0), _WHOLE] | None = None
    ignore_eos: bool | None = None
    prediction: _Prediction | None = None
    # Nothing is kept of a client, so that these say nothing here.
    user: str | None = None
    metadata: _Object | None = None
    client_metadata: _Object | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, body: Any) -> Any:
        """Refuse halves of characters, which no prompt and no answer can hold."""
        for name, value in body.items() if isinstance(body, dict) else ():
            try:
                json.dumps([name, value], ensure_ascii=False).encode()
            except (UnicodeEncodeError, RecursionError) as error:
                said = f"{name!a}: expected text, got {type(error).__name__}: {error}"
                raise RefusedError(said, name) from None
        return body

    @property
    def top(self) -> int | None:
        """How many likely tokens are told at each place besides the one that came; None: no
        probabilities are."""
        raise NotImplementedError

    @property
    def schema_in_json(self) -> _Object | None:
        """What the answer is held to; None: nothing."""
        return None

    @property
    def answers(self) -> int:
        """How many are asked for."""
        return 1


class Conversation(Fields):
    """Requests that a chat template renders."""

    tools: (
        Annotated[
            list[Annotated[Any, AfterValidator(_tool)]],
            Field(max_length=_MOST_TOOLS),
            AfterValidator(lambda several: [one for one in several if one is not None]),
        ]
        | None
    ) = None
    tool_choice: Annotated[Any, _read(_choice)] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: _Object | None = None


class _Choices(Fields):
    """Requests that may ask for several answers."""

    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS), _WHOLE] | None = None
    max_tokens: _Count | None = None
    stop: _Stops | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: _Biases | None = None

    @property
    def answers(self) -> int:
        return self.n or 1


class ChatFields(Conversation, _Choices):
    """Those of `/v1/chat/completions`."""

    text_field: ClassVar[str] = "messages"
    length_fields: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")

    messages: Annotated[list[_Object], Field(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: _Few | None = None
    response_format: Annotated[Any, _read(_schema)] = None
    reasoning_effort: str | None = None
    modalities: Annotated[Any, _only(["text"])] = None
    functions: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only("none")] = None
    audio: Annotated[Any, _only(None)] = None
    verbosity: _Verbosity | None = None
    web_search_options: Annotated[Any, _only(None)] = None

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, top: int | None, info: ValidationInfo) -> int | None:
        _expect(not top or info.data.get("logprobs"), "logprobs beside it")
        return top

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def schema_in_json(self) -> _Object | None:
        return self.response_format


class CompletionFields(_Choices):
    """Those of `/v1/completions`."""

    text_field: ClassVar[str] = "prompt"

    prompt: Annotated[
        list[Annotated[Any, AfterValidator(_prompt)]],
        Field(min_length=1, max_length=MOST_ANSWERS),
        BeforeValidator(_prompts),
    ]
    suffix: Annotated[Any, _only("")] = None
    max_tokens: Annotated[int, Field(ge=0), _WHOLE] | None = None
    logprobs: _Few | None = None
    best_of: Annotated[Any, _only(1)] = None
    echo: bool | None = None

    @property
    def answers(self) -> int:
        return super().answers * len(self.prompt)

    @property
    def top(self) -> int | None:
        return self.logprobs


class ResponseFields(Conversation):
    """Those of `/v1/responses`."""

    text_field: ClassVar[str] = "input"
    length_fields: ClassVar[tuple[str, ...]] = ("max_output_tokens",)

    input: Annotated[list[_Object], BeforeValidator(_items), AfterValidator(_begun)]
    instructions: str | None = None
    max_output_tokens: _Count | None = None
    text: Annotated[Any, _read(_text_format)] = None
    reasoning: Annotated[
        _Reasoning | None, AfterValidator(lambda asked: asked and asked.effort)
    ] = None
    include: Annotated[Any, _read(_included)] = None
    top_logprobs: _Few | None = None
    # No prompt is cut: one that is too long is refused.
    truncation: Literal["auto", "disabled"] | None = None
    background: Annotated[Any, _only(False)] = None
    conversation: Annotated[Any, _only(None)] = None
    previous_response_id: Annotated[Any, _only(None)] = None
    prompt: Annotated[Any, _only(None)] = None
    max_tool_calls: Annotated[Any, _only(None)] = None

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.include or self.top_logprobs else None

    @property
    def schema_in_json(self) -> _Object | None:
        return self.text
