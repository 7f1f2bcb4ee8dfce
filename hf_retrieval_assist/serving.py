"""transformers' server with an assistant; what `hf-retrieval-assist serve` runs.

Loading, routes, streaming, tools and batching are those of `transformers serve`. Beside them a
model that is loaded gets the assistant attached; a chat's `prediction` is what the assistant
expects, and the answer's usage tells how much of it came; what a request asks for is checked before
a model sees it; and `/metrics` tells what the assistant did.

Needs the `serve` extra and transformers 5.17 or later.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from jinja2 import TemplateError
from openai.types.completion_usage import CompletionTokensDetails, CompletionUsage
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field, ValidationError, model_validator
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState

from .assistants import Assistant
from .attachment import attach
from .drafters.expected import ExpectedTexts, expected_ids
from .host.continuous_batching import DraftingManager
from .stats import CallStats

__all__ = ["build_app"]

_PREFIX = "hf_retrieval_assist"


def build_app(
    model: str,
    assistant: Assistant,
    *,
    continuous_batching: bool = False,
    cb_config: Any = None,
    enable_cors: bool = False,
    **loading: Any,
) -> FastAPI:
    """The server's application, with its model loaded.

    Args:
        model: path or hub id; the only one that is served.
        assistant: drafts for every request.
        continuous_batching: whether requests are decoded side by side.
        cb_config: transformers' `ContinuousBatchingConfig`; None: its defaults.
        enable_cors: whether pages of other origins may ask.
        loading: what transformers' `ModelManager` takes: device, dtype, attn_implementation,
            quantization, trust_remote_code.

    Raises:
        OSError, ValueError: the model cannot be loaded.
    """
    models = _Models(
        assistant, force_model=model, continuous_batching=continuous_batching, **loading
    )
    state = GenerationState(continuous_batching=continuous_batching, cb_config=cb_config)
    handlers: dict[str, Any] = {
        "completion_handler": _CompletionHandler(models, state),
        "response_handler": ResponseHandler(models, state),
        "transcription_handler": TranscriptionHandler(models, state),
    }
    handlers |= _decision_handler(models, state)
    chat = _ChatHandler(models, state)
    app = build_server(models, chat, generation_state=state, enable_cors=enable_cors, **handlers)
    _stop_at_the_end(app, state)
    registry = CollectorRegistry()
    registry.register(_Figures(assistant))

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(TemplateError)
    @app.exception_handler(ValueError)
    async def refuse(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=400)

    return app


def _stop_at_the_end(app: FastAPI, state: GenerationState) -> None:
    """Let the thread that decodes requests side by side end with the application."""
    theirs = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with theirs(app):
            yield
        state.shutdown()

    app.router.lifespan_context = lifespan


def _decision_handler(models: ModelManager, state: GenerationState) -> dict[str, Any]:
    """The handler that later releases ask for besides."""
    try:
        from transformers.cli.serving.systemone import SystemOneHandler
    except ImportError:
        return {}
    return {"systemone_handler": SystemOneHandler(models, state)}


class _Models(ModelManager):
    """Loads models with an assistant at them."""

    def __init__(self, assistant: Assistant, **options: Any):
        self.assistant = assistant
        super().__init__(**options)

    def load_model_and_processor(self, *args: Any, **options: Any) -> tuple[Any, Any]:
        model, processor = super().load_model_and_processor(*args, **options)
        attach(model, self.assistant)
        return model, processor


class _Sampling(BaseModel, extra="allow"):
    """What any request may ask for, as far as it could not be served otherwise."""

    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = Field(None, gt=-1, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None
    stream: bool | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logit_bias: dict[int, float] | None = None


class _Completion(_Sampling):
    prompt: str = Field(min_length=1)


class _Part(BaseModel, extra="allow"):
    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _has_text(self) -> _Part:
        if self.type.endswith("text") and self.text is None:
            raise ValueError("expected text")
        return self


class _Function(BaseModel, extra="allow"):
    name: str
    arguments: str | dict[str, Any]


class _Call(BaseModel, extra="allow"):
    function: _Function


class _Message(BaseModel, extra="allow"):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] = []


class _Prediction(BaseModel):
    type: Literal["content"]
    content: str | list[_Part]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content)


class _Chat(_Sampling):
    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    prediction: _Prediction | None = None


def _check(kind: type[BaseModel], body: dict[str, Any]) -> Any:
    """A request's body, of a known kind."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        faults = [(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors()]
        told = "; ".join(f"{place}: {message}" for place, message in faults)
        raise HTTPException(422, told) from None


class _CompletionHandler(CompletionHandler):
    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        _check(_Completion, body)
        return await super().handle_request(body, request_id)


class _ChatHandler(ChatCompletionHandler):
    """Chats whose `prediction` the assistant expects.

    Every request is handled by a copy, which knows what was predicted and what was written.
    """

    _unused_fields = ChatCompletionHandler._unused_fields - {"prediction"}

    prediction: _Prediction | None = None
    expected: ExpectedTexts | None = None
    tokenizer: Any = None
    written = ""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        handler = copy.copy(self)
        handler.prediction = _check(_Chat, body).prediction
        return await ChatCompletionHandler.handle_request(handler, body, request_id)

    def _streaming(self, *request: Any, **options: Any) -> Any:
        return super()._streaming(*self._expecting(*request, **options), **options)

    async def _non_streaming(self, *request: Any, **options: Any) -> Any:
        return await super()._non_streaming(*self._expecting(*request, **options), **options)

    def _expecting(
        self,
        request_id: str,
        model: Any,
        processor: Any,
        model_id: str,
        inputs: Any,
        *rest: Any,
        gen_manager: Any,
        **_: Any,
    ) -> tuple[Any, ...]:
        """A request whose output is expected to resemble its prediction."""
        if self.prediction is not None:
            self.tokenizer = getattr(processor, "tokenizer", processor)
            ids = expected_ids(self.prediction.text, self.tokenizer)
            self.expected = ExpectedTexts([ids])
            assistant = self.model_manager.assistant.expecting(ids)
            manager = getattr(gen_manager, "_cb", None)
            if isinstance(manager, DraftingManager):
                manager.drafts.assign(request_id, assistant)
            else:
                inputs = {**inputs, "assistant": assistant}
        return request_id, model, processor, model_id, inputs, *rest

    def _build_completion(
        self, request_id: str, content: str, *answer: Any, usage: Any = None, **options: Any
    ) -> Any:
        self.written = content
        usage = self._detailed(usage)
        return super()._build_completion(request_id, content, *answer, usage=usage, **options)

    def _build_chunk_sse(
        self, *chunk: Any, content: Any = None, usage: Any = None, **options: Any
    ) -> str:
        self.written += content or ""
        usage = self._detailed(usage)
        return super()._build_chunk_sse(*chunk, content=content, usage=usage, **options)

    def _detailed(self, usage: CompletionUsage | None) -> CompletionUsage | None:
        """A usage that tells how much of the prediction was written."""
        if usage is not None and self.expected is not None:
            self.expected.follow(expected_ids(self.written, self.tokenizer))
            usage.completion_tokens_details = CompletionTokensDetails(
                accepted_prediction_tokens=self.expected.accepted,
                rejected_prediction_tokens=self.expected.rejected,
            )
        return usage


class _Figures(Collector):
    """What the assistant did since the server began."""

    def __init__(self, assistant: Assistant):
        self.assistant = assistant

    def collect(self) -> Iterator[CounterMetricFamily]:
        total = self.assistant.stats.total
        for name, (about, value) in _COUNTED.items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", about, value(total))
        accepted = CounterMetricFamily(
            f"{_PREFIX}_source_tokens", "Tokens that each source had drafted.", labels=["source"]
        )
        for source, reliability in self.assistant.stats.reliability.items():
            accepted.add_metric([source], reliability.observed.sum())
        yield accepted
        seconds = CounterMetricFamily(f"{_PREFIX}_seconds", "By phase.", labels=["phase"])
        for phase, spent in total.seconds.items():
            seconds.add_metric([phase], spent)
        yield seconds


_COUNTED: dict[str, tuple[str, Callable[[CallStats], float]]] = {
    "requests": ("Requests that have ended.", lambda total: total.calls),
    "tokens": ("Generated tokens.", lambda total: total.tokens),
    "forwards": ("Forwards behind the prefills.", lambda total: total.forwards),
    "drafted_tokens": ("Drafted tokens that were verified.", lambda total: total.drafted),
    "accepted_tokens": ("Drafted tokens that were accepted.", lambda total: total.accepted),
}
