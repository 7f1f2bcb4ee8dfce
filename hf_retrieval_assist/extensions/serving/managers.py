"""What generates for the server: transformers' managers, as one request uses them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers.cli.serving.utils import GenerationState, _StreamError

from ...system.log import get_logger
from .batching import DraftingManager, adding_for

logger = get_logger(__name__)

# The handler of the request for a text that the running task serves, if any.
serving: ContextVar[Any] = ContextVar("a request", default=None)

_NO_LIMIT = 2**31 - 1  # tokens


class State(GenerationState):
    """transformers' own, which replaces a worker that has died."""

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        if use_cb and not self.is_cb_alive():
            self.shutdown()
        manager, request = super().get_manager(model_id, use_cb), serving.get()
        return manager if request is None else _Manager(manager, request)


class _Manager:
    """A manager of transformers' that begins a request, and watches how it ends.

    Args:
        manager: one request after another, or requests side by side.
        request: the handler of the request.
    """

    _numbers = itertools.count()

    def __init__(self, manager: Any, request: Any) -> None:
        self._manager, self._request = manager, request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def generate_streaming(self, *asked: Any, response_parser: Any = None, **named: Any) -> Any:
        request = self._request
        if response_parser is not None:
            request.parser = response_parser = Parser(response_parser)
        with self._begun(*asked, **named) as begun:
            queue, streamer = self._manager.generate_streaming(*begun, response_parser)
        request.items = Items(queue)
        return request.items, streamer

    async def generate_non_streaming(self, *asked: Any, **named: Any) -> Any:
        with self._begun(*asked, **named) as begun:
            answer = await self._manager.generate_non_streaming(*begun)
        if self._request.expected is not None:
            self._request.expected.follow(answer[2])
        return answer

    @contextmanager
    def _begun(
        self, model: Any, processor: Any, inputs: Any, config: Any, request_id: str
    ) -> Iterator[tuple[Any, ...]]:
        """The arguments for transformers' manager, while it adds the request."""
        # An id of one request alone: clients give theirs to several.
        name = f"{request_id} {next(self._numbers)}"
        batching = getattr(self._manager, "_cb", None)
        most = _NO_LIMIT if batching is None else _longest(batching)
        inputs = self._request.begin(model, processor, inputs, config, most)
        arguments = model, processor, inputs, config, name
        if batching is None:
            yield arguments
            return
        assistant = inputs.pop("assistant", None)
        # transformers listens to a stream after it has sent the request. What comes before is
        # handed on by the event loop, which gets to it when somebody listens.
        handlers = batching.output_router.result_handlers
        batching.register_result_handler(name, lambda output: handlers[name][0](output))
        with adding_for(assistant if isinstance(batching, DraftingManager) else None):
            yield arguments


def _longest(batching: Any) -> int:
    """The most tokens of prompt and answer that a worker has room for."""
    # It makes the cache, which says how long a request may become.
    while batching.batch_processor is None and batching.is_running():
        time.sleep(0.01)
    scheduler = getattr(batching.batch_processor, "scheduler", None)
    return getattr(scheduler, "most_tokens", _NO_LIMIT)


class Items:
    """The items of a stream, as its route reads them. What failed is logged, and not told."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._first: list[Any] = []

    async def first(self) -> Any:
        """The first item, which is still to be read."""
        self._first = [await self._queue.get()]
        return self._first[0]

    async def get(self) -> Any:
        return self._shown(self._first.pop() if self._first else await self._queue.get())

    def get_nowait(self) -> Any:
        return self._shown(self._queue.get_nowait())

    def _shown(self, item: Any) -> Any:
        if not isinstance(item, _StreamError):
            return item
        logger.error("a streamed answer failed: %s", item.msg)
        return _StreamError("the answer could not be completed")


class Parser:
    """transformers' parser of a stream, for which a call of a tool that is none is text.

    Attributes:
        written: what was streamed, special tokens included.
    """

    written = ""

    def __init__(self, parser: Any) -> None:
        self._parser, self.initial_events = parser, parser.initial_events
        self._held = ""  # text of a call that goes on

    def feed(self, text: str) -> list[dict[str, Any]]:
        self.written += text
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
    if not isinstance(function, dict):
        return False
    return isinstance(function.get("name"), str) and "arguments" in function


def _content(text: str) -> dict[str, Any]:
    return {"type": "region_chunk", "field": "content", "text": text}
