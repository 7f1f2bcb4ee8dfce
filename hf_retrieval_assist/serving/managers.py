"""What generates for the server: one request after another, or requests side by side."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBGenerateManager,
    GenerateManager,
    GenerationState,
    _StreamError,
)

from ..host.continuous_batching import DraftingManager, adding_for
from ..system.log import get_logger

logger = get_logger(__name__)


class Served(Protocol):
    """A request, as far as a manager knows it.

    Attributes:
        items: of its stream.
        written: what was streamed, special tokens included.
    """

    items: Items | None
    written: str

    def begin(
        self, model: Any, processor: Any, inputs: Any, config: Any, most_tokens: int
    ) -> dict[str, Any]:
        """The inputs, and what the request has for `generate` besides.

        Raises:
            HTTPException: a prompt that leaves nothing of `most_tokens`.
        """

    def end(self, ids: Any) -> None:
        """These tokens were generated."""


# What the running task serves.
serving: ContextVar[Served] = ContextVar("a request")


class State(GenerationState):
    """transformers' own, which replaces a worker that has died."""

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        if use_cb and not self.is_cb_alive():
            self.shutdown()
        manager: Any = super().get_manager(model_id, use_cb)
        manager.__class__ = _SideBySide if use_cb else _OneByOne
        return manager


class _Manager(BaseGenerateManager):
    """Begins a request, and watches how it ends."""

    most_tokens = 2**31 - 1  # of prompt and answer
    _numbers = itertools.count()

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> Any:
        served = serving.get()
        inputs = served.begin(model, processor, inputs, gen_config, self.most_tokens)
        parser = None if response_parser is None else Parser(response_parser, served)
        name = self._name(request_id)
        with self._adding(inputs, name):
            queue, streamer = super().generate_streaming(
                model, processor, inputs, gen_config, name, parser
            )
        served.items = Items(queue, served if parser is None else None)
        return served.items, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        served = serving.get()
        inputs = served.begin(model, processor, inputs, gen_config, self.most_tokens)
        name = self._name(request_id)
        with self._adding(inputs, name):
            answer = await super().generate_non_streaming(
                model, processor, inputs, gen_config, name
            )
        served.end(answer[2])
        return answer

    def _name(self, request_id: str) -> str:
        """An id of one request alone: clients give theirs to several."""
        return f"{request_id} {next(self._numbers)}"

    @contextmanager
    def _adding(self, inputs: dict[str, Any], name: str) -> Iterator[None]:
        yield


class _OneByOne(_Manager, GenerateManager):
    pass


class _SideBySide(_Manager, CBGenerateManager):
    def init_cb(self, model: Any, gen_config: Any) -> None:
        super().init_cb(model, gen_config)
        # The worker makes the cache, which says how long a request may become.
        while self._cb.batch_processor is None and self._cb.is_running():
            time.sleep(0.01)
        scheduler = getattr(self._cb.batch_processor, "scheduler", None)
        self.most_tokens = getattr(scheduler, "most_tokens", self.most_tokens)

    @contextmanager
    def _adding(self, inputs: dict[str, Any], name: str) -> Iterator[None]:
        assistant = inputs.pop("assistant", None)
        if not isinstance(self._cb, DraftingManager):
            assistant = None
        # transformers listens to a stream after it has sent the request. What comes before is
        # handed on by the event loop, which gets to it when somebody listens.
        handlers = self._cb.output_router.result_handlers
        self._cb.register_result_handler(name, lambda output: handlers[name][0](output))
        with adding_for(assistant):
            yield


class Items:
    """The items of a stream, as its route reads them. What failed is logged, and not told.

    Args:
        queue: transformers' own.
        served: is told what is written; None: it knows.
    """

    def __init__(self, queue: Any, served: Served | None):
        self._queue = queue
        self._served = served
        self._first: list[Any] = []

    async def first(self) -> Any:
        """The first item, which is still to be read."""
        self._first = [await self._queue.get()]
        return self._first[0]

    async def get(self) -> Any:
        return self._shown(self._first.pop() if self._first else await self._queue.get())

    def get_nowait(self) -> Any:
        return self._shown(self._first.pop() if self._first else self._queue.get_nowait())

    def _shown(self, item: Any) -> Any:
        if isinstance(item, _StreamError):
            logger.error("a streamed answer failed: %s", item.msg)
            return _StreamError("the answer could not be completed")
        if self._served is not None and isinstance(item, str):
            self._served.written += item
        return item


class Parser:
    """transformers' parser of a stream, for which a call of a tool that is none is text."""

    def __init__(self, parser: Any, served: Served):
        self._parser = parser
        self._served = served
        self._held = ""  # of a call that goes on

    @property
    def initial_events(self) -> Any:
        return self._parser.initial_events

    def feed(self, text: str) -> list[dict[str, Any]]:
        self._served.written += text
        if self._parser is None:
            return [_content(text)]
        try:
            return [self._seen(event) for event in self._parser.feed(text)]
        except (LookupError, TypeError, ValueError):
            self._parser = None
            return [_content(self._held + text)]

    def finalize(self) -> Any:
        try:
            message, events = ({}, []) if self._parser is None else self._parser.finalize()
            return message, [self._seen(event) for event in events]
        except (LookupError, TypeError, ValueError):
            return {}, [_content(self._held)]

    def _seen(self, event: dict[str, Any]) -> dict[str, Any]:
        if event.get("dirty"):
            self._held += event["text"]
        if event["type"] != "region_close":
            return event
        held, self._held = self._held, ""
        is_text = event["field"] == "tool_calls" and not _is_call(event["value"])
        return _content(held) if is_text else event


def parsed(tokenizer: Any, ids: Any, template: Any, **options: Any) -> dict[str, Any]:
    """transformers' `parse_response`, for which a call of a tool that is none is text: one that
    was cut by the length, or one that the model got wrong."""
    try:
        message = type(tokenizer).parse_response(tokenizer, ids, template, **options)
        if all(map(_is_call, message.get("tool_calls") or ())):
            return message
    except (LookupError, TypeError, ValueError):
        pass
    return {"content": tokenizer.decode(ids, skip_special_tokens=True)}


def _is_call(found: Any) -> bool:
    function = found.get("function") if isinstance(found, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and "arguments" in function
    )


def _content(text: str) -> dict[str, Any]:
    return {"type": "region_chunk", "field": "content", "text": text}
