"""Answers of each route, whole and streamed, as OpenAI's API shapes them."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from ...drafters.expected import came_out
from .fields import ChatFields, CompletionFields, Fields, ResponseFields
from .refusals import RefusedError
from .written import Call, End, Likely, Piece, Text, Written

_Object = dict[str, Any]


class Answer(ABC):
    """An answer to one request, as a whole or as the events of a stream.

    Args:
        fields: of the request.
        written: each of the texts that were asked for, as far as they are written.
        request_id: the client's, or one that was made for it.
        model: its name.
    """

    def __init__(self, fields: Any, written: Sequence[Written], request_id: str, model: str):
        self.fields, self.written, self.id, self.model = fields, written, request_id, model
        self.created = int(time.time())

    @abstractmethod
    def whole(self) -> _Object:
        """The answer, once everything is written."""

    @abstractmethod
    def begin(self) -> Iterator[_Object]:
        """What a stream begins with."""

    @abstractmethod
    def go_on(self, number: int, piece: Piece) -> Iterator[_Object | str]:
        """What a piece of a text adds to a stream."""

    @abstractmethod
    def fail(self, refusal: RefusedError) -> Iterator[_Object]:
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
    ended = 0

    def usage(self) -> _Object:
        prompt, own = self.prompt_tokens, self.tokens
        usage: _Object = {"prompt_tokens": prompt, "completion_tokens": own}
        usage["total_tokens"] = prompt + own
        if cached := self.cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.fields.prediction is not None:
            counts = [came_out(one.form.expected, one.token_ids) for one in self.written]
            came, left = map(sum, zip(*counts, strict=True))
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": came,
                "rejected_prediction_tokens": left,
            }
        return usage

    def whole(self) -> _Object:
        choices = [
            self._choice(number, self.body(number, one), one.likely, one.reason)
            for number, one in enumerate(self.written)
        ]
        return self._of(self.kind, choices, self.usage())

    def begin(self) -> Iterator[_Object]:
        yield from ()

    def go_on(self, number: int, piece: Piece) -> Iterator[_Object | str]:
        if not isinstance(piece, End):
            likely = getattr(piece, "logprobs", ())
            yield self._chunk(self._choice(number, self.delta(number, piece), likely or None))
            return
        self.ended += 1
        last = self.ended == len(self.written)
        apart = self._asks("include_usage")
        end = self._choice(number, self.delta(number, Text("")), None, piece.reason)
        yield self._chunk(end, last and not apart)
        if last:
            if apart:
                yield self._of(self.chunk_kind, [], self.usage())
            yield "[DONE]"

    def fail(self, refusal: RefusedError) -> Iterator[_Object]:
        yield refusal.body

    def _asks(self, option: str) -> bool:
        return bool(getattr(self.fields.stream_options, option, None))

    def _chunk(self, choice: _Object, counts: bool = False) -> _Object:
        counts |= self._asks("continuous_usage_stats")
        return self._of(self.chunk_kind, [choice], self.usage() if counts else None)

    def _of(self, kind: str, choices: list[_Object], usage: _Object | None) -> _Object:
        held = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        held["choices"] = choices
        return held if usage is None else held | {"usage": usage}

    def _choice(
        self,
        number: int,
        body: _Object,
        likely: Sequence[Likely] | None,
        reason: str | None = None,
    ) -> _Object:
        told = None if likely is None else self.probabilities(number, likely)
        return {"index": number, **body, "logprobs": told, "finish_reason": reason}

    @abstractmethod
    def body(self, number: int, written: Written) -> _Object:
        """What a whole choice says."""

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

    def begin(self) -> Iterator[_Object]:
        self._called = [0] * len(self.written)
        for number in range(len(self.written)):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk(self._choice(number, {"delta": delta}, None))

    def body(self, number: int, written: Written) -> _Object:
        message: _Object = {"role": "assistant", "content": written.text(), "refusal": None}
        if reasoning := written.text(is_reasoning=True):
            message["reasoning_content"] = reasoning
        if calls := written.calls:
            message["tool_calls"] = [
                self._call(number, place, call) for place, call in enumerate(calls)
            ]
        return {"message": message}

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
        return {"id": name, "type": "function", "function": call._asdict()}

    def probabilities(self, number: int, likely: Sequence[Likely]) -> _Object:
        return {"content": [_told(one) for one in likely], "refusal": None}


class CompletionAnswer(_Choices):
    """An answer of `/v1/completions`."""

    fields: CompletionFields
    kind = chunk_kind = "text_completion"

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._offsets = [0] * len(self.written)  # where the next token of each begins

    def body(self, number: int, written: Written) -> _Object:
        return {"text": written.text()}

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
        self._part: _Object = {}  # its only one, as far as it is

    def whole(self) -> _Object:
        *_, last = (event for piece in self._text.parts for event in self.go_on(0, piece))
        return last["response"]

    def _response(self, status: str, **more: Any) -> _Object:
        fields, ended = self.fields, status in ("completed", "incomplete")
        choice: Any = fields.tool_choice or "auto"
        if isinstance(choice, tuple):
            choice = {"type": "function", "name": choice[0]}
        usage = {
            "input_tokens": self.prompt_tokens,
            "output_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": self._items if ended else [],
            "error": None,
            "incomplete_details": cut,
            "instructions": fields.instructions,
            "metadata": fields.metadata or {},
            "temperature": fields.temperature,
            "top_p": fields.top_p,
            "max_output_tokens": fields.max_output_tokens,
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "tool_choice": choice,
            "tools": [{"type": "function", **one["function"]} for one in fields.tools or ()],
            "usage": usage if ended else None,
            **more,
        }

    def begin(self) -> Iterator[_Object]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def go_on(self, number: int, piece: Piece) -> Iterator[_Object]:
        if isinstance(piece, Text):
            yield from self._grow("reasoning" if piece.is_reasoning else "message", piece)
        elif isinstance(piece, Call):
            yield from self._done()
            yield from self._call(piece)
        elif isinstance(piece, End):
            if not self._items and self._open is None:
                yield from self._grow("message", Text(""))
            yield from self._done()
            status = "incomplete" if piece.reason == "length" else "completed"
            yield self._event(f"response.{status}", response=self._response(status))

    def _call(self, call: Call) -> Iterator[_Object]:
        """An item of its own."""
        name, at = f"call_{self.id}_{len(self._items)}", {"output_index": len(self._items)}
        item = {"id": f"fc_{name}", "call_id": name, "type": "function_call", **call._asdict()}
        about = {"item_id": item["id"], **at}
        begun = item | {"status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", item=begun, **at)
        kind = "response.function_call_arguments"
        yield self._event(f"{kind}.delta", delta=call.arguments, **about)
        yield self._event(f"{kind}.done", **call._asdict(), **about)
        self._items.append(item | {"status": "completed"})
        yield self._event("response.output_item.done", item=self._items[-1], **at)

    def _grow(self, kind: str, piece: Text) -> Iterator[_Object]:
        """More of an item, which begins with it where the last one was another."""
        if self._open is None or self._open["type"] != kind:
            yield from self._done()
            self._open, self._part = self._begun(kind)
            added = {"output_index": len(self._items), "item": self._open}
            yield self._event("response.output_item.added", **added)
            yield self._event("response.content_part.added", part=self._part, **self._place())
        grown: _Object = {"text": self._part["text"] + piece.text}
        more: _Object = {"delta": piece.text, **self._place()}
        if kind == "message":
            more["logprobs"] = [_told(one) for one in piece.logprobs]
            grown["logprobs"] = self._part["logprobs"] + more["logprobs"]
        self._part = self._part | grown
        if piece.text or piece.logprobs:
            yield self._event(f"response.{self._part['type']}.delta", **more)

    def _begun(self, kind: str) -> tuple[_Object, _Object]:
        """An item, and its only part, which says nothing yet."""
        number = len(self._items)
        if kind == "reasoning":
            item = {"id": f"rs_{self.id}_{number}", "type": kind, "summary": [], "content": []}
            return item, {"type": "reasoning_text", "text": ""}
        item = {"id": f"msg_{self.id}_{number}", "type": kind, "role": "assistant"}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return item | {"status": "in_progress", "content": []}, part

    def _place(self) -> _Object:
        assert self._open is not None
        item = self._open["id"]
        return {"item_id": item, "output_index": len(self._items), "content_index": 0}

    def _done(self) -> Iterator[_Object]:
        """The end of the item that grows."""
        if self._open is None:
            return
        part, place = self._part, self._place()
        told = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield self._event(f"response.{part['type']}.done", **told, **place)
        yield self._event("response.content_part.done", part=part, **place)
        item = self._open | {"content": [part], "status": "completed"}
        yield self._event("response.output_item.done", item=item, output_index=len(self._items))
        self._items.append(item)
        self._open = None

    def fail(self, refusal: RefusedError) -> Iterator[_Object]:
        error = refusal.body["error"]
        told = {name: error[name] for name in ("message", "param", "code")}
        yield self._event("error", **told)
        about = {"code": "server_error", "message": refusal.message}
        yield self._event("response.failed", response=self._response("failed", error=about))

    def _event(self, kind: str, **held: Any) -> _Object:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **held}


ANSWERS: dict[type[Fields], type[Answer]] = {
    ChatFields: ChatAnswer,
    CompletionFields: CompletionAnswer,
    ResponseFields: ResponseAnswer,
}
"""What answers a request with these fields."""


def _told(one: Likely) -> _Object:
    """A token as chats and responses tell its probability."""
    return _bare(one) | {"top_logprobs": [_bare(top) for top in one.top]}


def _bare(one: Likely) -> _Object:
    return {"token": one.text, "bytes": one.bytes, "logprob": one.logprob}


def event_of(held: _Object | str) -> str:
    """What a stream sends, as an event of a server's."""
    if isinstance(held, str):
        return f"data: {held}\n\n"
    kind = f"event: {held['type']}\n" if "type" in held else ""
    return f"{kind}data: {json.dumps(held)}\n\n"
