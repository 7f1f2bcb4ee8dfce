"""The server's application."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from transformers import __version__
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server

from ...assistants import Assistant
from ...attachment import attach, attached_to
from ...host.positions import position_limit

try:
    from .handlers import handlers_of, told
    from .managers import State, parsed
except ImportError as error:
    raise ImportError(
        "the server: expected transformers 5.20 or a later release that has what it extends, got "
        f"{__version__} ({error})"
    ) from error

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
    state = State(continuous_batching=continuous_batching, cb_config=cb_config)
    if "continuous_batching" in inspect.signature(ModelManager).parameters:  # 5.23 and later
        loading["continuous_batching"] = continuous_batching
    models = _Models(assistant, state, force_model=model, **loading)
    handlers = handlers_of(models, state)
    app = build_server(models, generation_state=state, enable_cors=enable_cors, **handlers)
    app.router.routes[:] = [r for r in app.routes if getattr(r, "path", None) != "/load_model"]
    registry = CollectorRegistry()
    registry.register(_Figures(assistant))

    @app.exception_handler(RequestValidationError)
    async def refuse(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": told(error.errors())}, 422)

    @app.post("/load_model")
    async def load_model(body: dict[str, Any]) -> StreamingResponse:
        if body.get("model") != model:
            raise HTTPException(422, f"model: expected {model!r}")
        return StreamingResponse(
            models.load_model_streaming(models.name), media_type="text/event-stream"
        )

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


class _Models(ModelManager):
    """Loads one model, with an assistant at it.

    Attributes:
        name: of the model.
        positions: the most tokens of a text that it has positions for.
    """

    name = ""
    positions: int

    def __init__(self, assistant: Assistant, state: State, **options: Any):
        self.assistant, self._state = assistant, state
        super().__init__(**options)

    def load_model_and_processor(self, name: str, *args: Any, **options: Any) -> tuple[Any, Any]:
        if name != (self.name or name):
            raise HTTPException(400, f"model: expected {self.force_model!r}, got {name!r}")
        model, processor = super().load_model_and_processor(name, *args, **options)
        if attached_to(model) is None:
            self.name, self.positions = name, position_limit(model)
            attach(model, self.assistant)
            tokenizer = getattr(processor, "tokenizer", processor)
            tokenizer.parse_response = functools.partial(parsed, tokenizer)
        return model, processor

    def shutdown(self) -> None:
        """Forget the model, and what decodes requests side by side with it."""
        self._state.shutdown()
        super().shutdown()

    def served(self) -> tuple[Any, Any]:
        """The model and its processor."""
        return self.load_model_and_processor(self.name)


class _Figures(Collector):
    """What the assistant did since the server began."""

    def __init__(self, assistant: Assistant):
        self.assistant = assistant

    def collect(self) -> Iterator[CounterMetricFamily]:
        stats = self.assistant.stats
        for name, (field, about) in _COUNTED.items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", about, getattr(stats.total, field))
        for name, about, label, counts in (
            ("source_tokens", "Accepted tokens that each source drafted.", "source", stats.sources),
            ("seconds", "By phase.", "phase", stats.total.seconds),
        ):
            family = CounterMetricFamily(f"{_PREFIX}_{name}", about, labels=[label])
            for key, value in [*counts.items()]:
                family.add_metric([key], value)
            yield family


# Names of counters: their fields of `CallStats`, and what they count.
_COUNTED = {
    "requests": ("calls", "Requests that have ended."),
    "tokens": ("tokens", "Generated tokens."),
    "forwards": ("forwards", "Forwards behind the prefills, of each request."),
    "drafted_tokens": ("drafted", "Drafted tokens that were verified."),
    "accepted_tokens": ("accepted", "Drafted tokens that were accepted."),
}
