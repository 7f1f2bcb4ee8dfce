"""The server's application."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import fastapi
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import ContinuousBatchingConfig, __version__
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import Modality

from ... import __version__ as VERSION
from ...assistants import Assistant
from ...attachment import attach
from ...policy.stats import Stats
from ...system.log import get_logger

try:
    from .fields import ChatFields, CompletionFields, ResponseFields
    from .refusals import FAILED, RefusedError, of_faults
    from .service import Limits, Service
    from .tenants import Tenants
except ImportError as error:
    raise ImportError(
        "the server: expected transformers 5.20 or a later release that has what it extends, got "
        f"{__version__} ({error})"
    ) from error

logger = get_logger(__name__)

_PREFIX = "hf_retrieval_assist"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # bounds of what is counted
# Bytes of a body: this, and so many more for each token of a prompt, unless it holds images.
_BODY, _TOKEN, _LARGEST = 1 << 20, 32, 16 << 20
# What a refusal is called that no field is at fault of.
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def build_app(
    model: str,
    assistant: Assistant,
    *,
    limits: Limits | None = None,
    tenants: Tenants | None = None,
    continuous_batching: bool = False,
    cb_config: Any = None,
    enable_cors: bool = False,
    **loading: Any,
) -> FastAPI:
    """The server's application, with its model loaded.

    Its `state.service` is the :class:`~.service.Service` that answers.

    Args:
        model: path or hub id; the only one that is served.
        assistant: drafts for every request.
        limits: what requests may take; None: :class:`~.service.Limits`' defaults.
        tenants: whose requests are answered, each with an assistant of its own; None: everybody's.
        continuous_batching: whether requests are decoded side by side.
        cb_config: transformers' `ContinuousBatchingConfig`; None: its defaults.
        enable_cors: whether pages of other origins may ask.
        loading: what transformers' `ModelManager` takes: device, dtype, attn_implementation,
            quantization, trust_remote_code.

    Raises:
        OSError, ValueError: the model cannot be loaded, or tenants are asked for where requests
            are decoded side by side.
    """
    if continuous_batching and tenants is not None:
        raise ValueError("tenants: expected none beside continuous batching, which has one account")
    if "continuous_batching" in inspect.signature(ModelManager).parameters:  # 5.23 and later
        loading["continuous_batching"] = continuous_batching
    # A model that is forced is loaded at once, and is not unloaded when it is idle.
    manager = ModelManager(force_model=model, **loading)
    found, processor = manager.load_model_and_processor(manager.process_model_name(model))
    attach(found, assistant)
    modality = manager.get_model_modality(found, processor)
    batching = (cb_config or ContinuousBatchingConfig()) if continuous_batching else None
    bounds = limits or Limits()
    service = Service(found, processor, model, modality, assistant, bounds, batching, tenants)
    return _application(service, assistant.stats, enable_cors)


def _application(service: Service, stats: Stats, enable_cors: bool) -> FastAPI:
    registry = CollectorRegistry()
    registry.register(_Figures(stats))
    histogram = partial(Histogram, namespace=_PREFIX, registry=registry, buckets=_SECONDS)
    seconds = histogram("http_seconds", "Of requests.", ["route", "status"])
    about = "Of answers, until they begin; side by side, until their first token."
    service.queued = histogram("queue_seconds", about).observe
    for state in ("running", "waiting"):
        gauge = Gauge(state, f"Answers that are {state}.", namespace=_PREFIX, registry=registry)
        gauge.set_function(partial(lambda name: service.health[name], state))

    testing: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        test()
        yield
        testing[0].cancel()
        await asyncio.to_thread(service.close)

    def test() -> None:
        """Have the model tested, unless that was begun."""
        if not testing:
            testing.append(asyncio.ensure_future(service.warm_up()))

    app = FastAPI(
        title="hf-retrieval-assist",
        version=VERSION,
        lifespan=lifespan,
        responses={
            "4XX": {"description": "refused, with a reason"},
            "5XX": {"description": "failed, or not ready"},
        },
    )
    app.state.service = service
    texts = min(_LARGEST, _BODY + _TOKEN * service.most_prompt)
    app.add_middleware(_Bounded, most=texts if service.modality is Modality.LLM else _LARGEST)
    app.add_middleware(_Failing, seconds=seconds)
    if enable_cors:
        all_ = ["*"]
        app.add_middleware(
            CORSMiddleware, allow_origins=all_, allow_methods=all_, allow_headers=all_
        )
    _refuse(app)
    _answer(app, service, test)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _answer(app: FastAPI, service: Service, test: Callable[[], None]) -> None:
    """The routes that answer."""

    @app.post("/v1/chat/completions")
    async def chat_completions(fields: ChatFields, request: Request) -> Response:
        return await service.answer(fields, request)

    @app.post("/v1/completions")
    async def completions(fields: CompletionFields, request: Request) -> Response:
        return await service.answer(fields, request)

    @app.post("/v1/responses")
    async def responses(fields: ResponseFields, request: Request) -> Response:
        return await service.answer(fields, request)

    def told() -> dict[str, Any]:
        return {"id": service.name, "object": "model", "created": 0, "owned_by": "local"}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [told()]}

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        if name != service.name:
            message = f"model: expected {service.name!r}, got {name!r}"
            raise RefusedError(message, "model", "model_not_found", 404)
        return told()

    @app.get("/health")
    async def health() -> JSONResponse:
        told = service.health
        return JSONResponse(told, 200 if told["status"] == "alive" else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        test()  # an application that is mounted into another one has no lifespan
        good = service.is_ready and service.health["status"] == "alive"
        return JSONResponse({"status": "ready" if good else "not ready"}, 200 if good else 503)

    # A name may hold a slash.
    @app.delete("/tenants/{name:path}")
    async def erase(name: str, request: Request) -> dict[str, Any]:
        return {"tenant": name, "erased": await service.erase(name, request.headers)}


def _refuse(app: FastAPI) -> None:
    """Everything that is not served, in the form that OpenAI's clients read."""

    def told(refusal: RefusedError) -> JSONResponse:
        return JSONResponse(refusal.body, refusal.status, refusal.headers)

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> JSONResponse:
        return told(error)

    @app.exception_handler(RequestValidationError)
    async def misread(_: Request, error: RequestValidationError) -> JSONResponse:
        return told(of_faults(error.errors()))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = _CODES.get(error.status_code, "invalid_value")
        return told(RefusedError(message, code=code, status=error.status_code))


class _Failing:
    """Answers where a request fails. Starlette's own handler of exceptions raises them again behind
    its answer, by which the server would close the connection. Counts what each request takes."""

    def __init__(self, app: ASGIApp, seconds: Histogram) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), None

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if status is not None:
                raise
            logger.error("a request failed", exc_info=error)
            await JSONResponse(FAILED.body, FAILED.status)(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._seconds.labels(route, status or 499).observe(time.perf_counter() - began)


class _Bounded:
    """Refuses bodies that would take all memory, before they are read."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what comes."""
        came = 0

        async def counted() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > self._most:
                # A client that still sends would lose the answer with its connection.
                while message.get("more_body") and came <= _LARGEST:
                    message = await receive()
                    came += len(message.get("body", b""))
                raise fastapi.HTTPException(413, f"expected at most {self._most:,} bytes, got more")
            return message

        await self._app(scope, counted, send)


class _Figures(Collector):
    """What assistants have done."""

    def __init__(self, stats: Stats):
        self._stats = stats

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, (attribute, about) in _COUNTED.items():
            value = getattr(self._stats.total, attribute)
            yield CounterMetricFamily(f"{_PREFIX}_{name}", about, value)
        sources, seconds = self._stats.sources, self._stats.total.seconds
        labelled = (
            ("source_tokens", "Accepted tokens that each source drafted.", "source", sources),
            ("seconds", "By phase.", "phase", seconds),
        )
        for name, about, label, counts in labelled:
            family = CounterMetricFamily(f"{_PREFIX}_{name}", about, labels=[label])
            for key, value in [*counts.items()]:
                family.add_metric([key], value)
            yield family


# Names of counters: their fields of `CallStats`, and what they count.
_COUNTED = {
    "requests": ("calls", "Answers that have ended."),
    "tokens": ("tokens", "Generated tokens."),
    "prompt_tokens_read_before": ("read_before", "Tokens of prompts that answers had read before."),
    "forwards": ("forwards", "Forwards behind the prefills, of each answer."),
    "drafted_tokens": ("drafted", "Drafted tokens that were verified."),
    "accepted_tokens": ("accepted", "Drafted tokens that were accepted."),
}
