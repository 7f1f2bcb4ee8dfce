"""Answers of each route, whole and streamed, as OpenAI's API shapes them."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...drafters.expected import came_out
from .fields import ChatFields, CompletionFields, Fields, ResponseFields
from .refusals import RefusedError
from .written import Call, End, Likely, Piece, Text, Written

_Object = dict[str, Any]


class Answer(ABC):
    """An answer to one request.

    Args:
        fields: of the request.
        written: each of the texts that were asked for, as far as they are written.
        request_id: the client's, or one that was made for it.
        model: its name.
    """

    def __init__(self, fields: Any, written: Sequence[Written], request_id: str, model: str):
        self.fields, self.written, self.id, self.model = fields, written, request_id, model
        self.created = int(time.time())
        self.ended = 0

    @abstractmethod
    def whole(self) -> _Object:
        """The answer, once everything is written."""

    @abstractmethod
    def begin(self) -> Iterable[str]:
        """What a stream begins with."""

    @abstractmethod
    def go_on(self, number: int, piece: Piece) -> Iterable[str]:
        """What a piece of a text adds to a stream."""

    @abstractmethod
    def fail(self, refusal: RefusedError) -> Iterable[str]:
        """What a stream ends with that cannot go on."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        forms = {id(one.form.prompt_ids): len(one.form.prompt_ids) for one in self.written}
        return sum(forms.values())

    @property
    def cached_tokens(self) -> int:
        """Those among them that no answer had to read, since earlier ones had."""
        read: dict[int, int] = {}
        for one in self.written:
            known = read.get(id(one.form.prompt_ids), one.read_before)
            read[id(one.form.prompt_ids)] = min(known, one.read_before)
        return sum(read.values())

    @property
    def tokens(self) -> int:
        """Tokens that were generated."""
        return sum(len(one.token_ids) for one in self.written)


class _Choices(Answer):
    """Answers with several choices."""

    kind: str
    chunk_kind: str

    def usage(self) -> _Object:
        prompt, own = self.prompt_tokens, self.tokens
        usage: _Object = {"prompt_tokens": prompt, "completion_tokens": own}
        usage["total_tokens"] = prompt + own
        if cached := self.cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.fields.prediction is not None:
            came = left = 0
            for one in self.written:
                counts = came_out(one.form.expected, one.token_ids)
                came, left = came + counts[0], left + counts[1]
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": came,
                "rejected_prediction_tokens": left,
            }
        return usage

    def _of(self, kind: str, choices: list[_Object]) -> _Object:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def whole(self) -> _Object:
        choices = [self.choice(number, one) for number, one in enumerate(self.written)]
        return self._of(self.kind, choices) | {"usage": self.usage()}

    def begin(self) -> Iterable[str]:
        return ()

    def go_on(self, number: int, piece: Piece) -> Iterator[str]:
        if not isinstance(piece, End):
            yield self._chunk(number, self.delta(number, piece), getattr(piece, "logprobs", ()))
            return
        self.ended += 1
        last = self.ended == len(self.written)
        apart = self._asks("include_usage")
        usage = self.usage() if last and not apart else None
        yield self._chunk(number, self.delta(number, Text("")), (), piece.reason, usage)
        if last:
            if apart:
                yield _event(self._of(self.chunk_kind, []) | {"usage": self.usage()})
            yield "data: [DONE]\n\n"

    def fail(self, refusal: RefusedError) -> Iterable[str]:
        return [_event(refusal.body)]

    def _asks(self, option: str) -> bool:
        return bool(getattr(self.fields.stream_options, option, None))

    def _chunk(
        self,
        number: int,
        delta: _Object,
        likely: Sequence[Likely] = (),
        reason: str | None = None,
        usage: _Object | None = None,
    ) -> str:
        told = self.probabilities(number, likely) if likely else None
        choice = {"index": number, **delta, "logprobs": told, "finish_reason": reason}
        chunk = self._of(self.chunk_kind, [choice])
        if usage is None and self._asks("continuous_usage_stats"):
            usage = self.usage()
        return _event(chunk if usage is None else chunk | {"usage": usage})

    @abstractmethod
    def choice(self, number: int, written: Written) -> _Object:
        """A whole one."""

    @abstractmethod
    def delta(self, number: int, piece: Any) -> _Object:
        """What a piece adds to one."""

    @abstractmethod
    def probabilities(self, number: int, likely: Sequence[Likely]) -> _Object:
        """Those of a choice's next tokens."""


class ChatAnswer(_Choices):
    """An answer of `/v1/chat/completions`."""

    fields: ChatFields
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def begin(self) -> Iterator[str]:
        for number in range(len(self.written)):
            yield self._chunk(number, {"delta": {"role": "assistant", "content": ""}})
        self._called = [0] * len(self.written)

    def choice(self, number: int, written: Written) -> _Object:
        found = written.message()
        message: _Object = {"role": "assistant", "content": found.content, "refusal": None}
        if found.reasoning is not None:
            message["reasoning_content"] = found.reasoning
        if found.calls:
            message["tool_calls"] = [
                self._call(number, place, call) for place, call in enumerate(found.calls)
            ]
        likely = written.likely
        return {
            "index": number,
            "message": message,
            "logprobs": None if likely is None else self.probabilities(number, likely),
            "finish_reason": "tool_calls" if found.calls else written.reason,
        }

    def delta(self, number: int, piece: Any) -> _Object:
        if isinstance(piece, Call):
            place = self._called[number]
            self._called[number] += 1
            return {"delta": {"tool_calls": [{"index": place, **self._call(number, place, piece)}]}}
        if not piece.text and not piece.logprobs:
            return {"delta": {}}
        name = "reasoning_content" if piece.is_reasoning else "content"
        return {"delta": {name: piece.text}}

    def _call(self, number: int, place: int, call: Call) -> _Object:
        name = f"call_{self.id}_{number}_{place}"
        return {"id": name, "type": "function", "function": _spelt(call)}

    def probabilities(self, number: int, likely: Sequence[Likely]) -> _Object:
        return {"content": [_told(one) for one in likely], "refusal": None}


class CompletionAnswer(_Choices):
    """An answer of `/v1/completions`."""

    fields: CompletionFields
    kind = chunk_kind = "text_completion"

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._offsets = [0] * len(self.written)  # where the next token of each begins

    def choice(self, number: int, written: Written) -> _Object:
        likely = written.likely
        return {
            "index": number,
            "text": written.text,
            "logprobs": None if likely is None else self.probabilities(number, likely),
            "finish_reason": written.reason,
        }

    def delta(self, number: int, piece: Any) -> _Object:
        return {"text": piece.text}

    def probabilities(self, number: int, likely: Sequence[Likely]) -> _Object:
        offsets = []
        for one in likely:
            offsets.append(self._offsets[number])
            self._offsets[number] += len(one.text)
        return {
            "tokens": [one.text for one in likely],
            "token_logprobs": [one.logprob for one in likely],
            "top_logprobs": [
                None if one.logprob is None else {top.text: top.logprob for top in one.top}
                for one in likely
            ],
            "text_offset": offsets,
        }


class ResponseAnswer(Answer):
    """An answer of `/v1/responses`: items, one of text and one of each call."""

    fields: ResponseFields

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        (self._text,) = self.written
        self._events = 0
        self._items: list[_Object] = []
        self._open: _Object | None = None  # the item that grows
        self._likely: list[Likely] = []

    def whole(self) -> _Object:
        found = self._text.message()
        if found.reasoning:
            self._add("reasoning", found.reasoning)
        if found.content or not found.calls:
            self._likely = [*(self._text.likely or ())]
            self._add("message", found.content)
        for call in found.calls:
            self._items.append(self._call(call))
        return self._response(*self._status())

    def _add(self, kind: str, text: str) -> None:
        self._open = self._item(kind)
        self._open["content"] = [self._part(kind, text)]
        self._items.append(self._open | {"status": "completed"})
        self._open = None

    def _status(self) -> tuple[str, _Object | None]:
        if self._text.reason == "length":
            return "incomplete", {"reason": "max_output_tokens"}
        return "completed", None

    def _response(self, status: str, details: _Object | None = None, **more: Any) -> _Object:
        fields = self.fields
        ended = status in ("completed", "incomplete")
        usage = {
            "input_tokens": self.prompt_tokens,
            "output_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": self._items if ended else [],
            "error": None,
            "incomplete_details": details,
            "instructions": fields.instructions,
            "metadata": fields.metadata or {},
            "temperature": fields.temperature,
            "top_p": fields.top_p,
            "max_output_tokens": fields.max_output_tokens,
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "tool_choice": self._choice,
            "tools": [{"type": "function", **one["function"]} for one in fields.tools or ()],
            "usage": usage if ended else None,
            **more,
        }

    @property
    def _choice(self) -> Any:
        choice = self.fields.tool_choice or "auto"
        return {"type": "function", "name": choice[0]} if isinstance(choice, tuple) else choice

    def _item(self, kind: str) -> _Object:
        number = len(self._items)
        if kind == "reasoning":
            return {"id": f"rs_{self.id}_{number}", "type": kind, "summary": [], "content": []}
        name = f"msg_{self.id}_{number}"
        return {
            "id": name,
            "type": kind,
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }

    def _part(self, kind: str, text: str) -> _Object:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        likely = [_told(one) for one in self._likely]
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": likely}

    def _call(self, call: Call) -> _Object:
        name = f"call_{self.id}_{len(self._items)}"
        kind = {"id": f"fc_{name}", "call_id": name, "type": "function_call"}
        return {**kind, **_spelt(call), "status": "completed"}

    def begin(self) -> Iterator[str]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def go_on(self, number: int, piece: Piece) -> Iterator[str]:
        if isinstance(piece, Text):
            yield from self._grow("reasoning" if piece.is_reasoning else "message", piece)
        elif isinstance(piece, Call):
            yield from self._done()
            item = self._call(piece)
            at = {"output_index": len(self._items)}
            pending = item | {"status": "in_progress", "arguments": ""}
            yield self._event("response.output_item.added", item=pending, **at)
            about = {"item_id": item["id"], **at}
            kind = "response.function_call_arguments"
            yield self._event(f"{kind}.delta", delta=piece.arguments, **about)
            told = {"arguments": piece.arguments, "name": piece.name}
            yield self._event(f"{kind}.done", **told, **about)
            yield self._event("response.output_item.done", item=item, **at)
            self._items.append(item)
        elif isinstance(piece, End):
            if not self._items and self._open is None:
                yield from self._grow("message", Text(""))
            yield from self._done()
            status, details = self._status()
            yield self._event(f"response.{status}", response=self._response(status, details))

    def _grow(self, kind: str, piece: Text) -> Iterator[str]:
        """More of an item, which begins with it where the last one was another."""
        if self._open is None or self._open["type"] != kind:
            yield from self._done()
            self._open, self._came, self._likely = self._item(kind), "", []
            added = {"output_index": len(self._items), "item": self._open}
            yield self._event("response.output_item.added", **added)
            yield self._event(
                "response.content_part.added", part=self._part(kind, ""), **self._place()
            )
        self._came += piece.text
        self._likely += piece.logprobs
        more: _Object = {"delta": piece.text, **self._place()}
        if kind == "message":
            more["logprobs"] = [_told(one) for one in piece.logprobs]
        if piece.text or piece.logprobs:
            yield self._event(f"response.{_PART_OF[kind]}.delta", **more)

    def _place(self) -> _Object:
        assert self._open is not None
        item = self._open["id"]
        return {"item_id": item, "output_index": len(self._items), "content_index": 0}

    def _done(self) -> Iterator[str]:
        """The end of the item that grows."""
        if self._open is None:
            return
        kind, text = self._open["type"], self._came
        part = self._part(kind, text)
        told: _Object = {"text": text, **self._place()}
        if kind == "message":
            told["logprobs"] = part["logprobs"]
        yield self._event(f"response.{_PART_OF[kind]}.done", **told)
        yield self._event("response.content_part.done", part=part, **self._place())
        item = self._open | {"content": [part], "status": "completed"}
        yield self._event("response.output_item.done", item=item, output_index=len(self._items))
        self._items.append(item)
        self._open = None

    def fail(self, refusal: RefusedError) -> Iterator[str]:
        error = refusal.body["error"]
        told = {name: error[name] for name in ("message", "param", "code")}
        yield self._event("error", **told)
        about = {"code": "server_error", "message": refusal.message}
        yield self._event("response.failed", response=self._response("failed", error=about))

    def _event(self, kind: str, **held: Any) -> str:
        event = {"type": kind, "sequence_number": self._events, **held}
        self._events += 1
        return f"event: {kind}\n{_event(event)}"


_PART_OF = {"reasoning": "reasoning_text", "message": "output_text"}
ANSWERS: dict[type[Fields], type[Answer]] = {
    ChatFields: ChatAnswer,
    CompletionFields: CompletionAnswer,
    ResponseFields: ResponseAnswer,
}
"""What answers a request with these fields."""


def _spelt(call: Call) -> _Object:
    return {"name": call.name, "arguments": call.arguments}


def _told(one: Likely) -> _Object:
    """A token as chats and responses tell its probability."""
    told: _Object = {"token": one.text, "bytes": one.bytes, "logprob": one.logprob}
    return told | {"top_logprobs": [_bare(top) for top in one.top]}


def _bare(one: Likely) -> _Object:
    return {"token": one.text, "bytes": one.bytes, "logprob": one.logprob}


def _event(held: _Object) -> str:
    return f"data: {json.dumps(held)}\n\n"
