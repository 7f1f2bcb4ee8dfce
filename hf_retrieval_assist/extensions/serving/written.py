"""An answer as it is written: tokens become text, reasoning, calls of tools and probabilities."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    build_response_parser,
    response_events_to_chunks,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ...types.token_tree import Int32Array

# Parsers are told the tools from 5.23 on.
_WITH_TOOLS = "tools" in inspect.signature(build_response_parser).parameters
_LEAST = -9999.0  # stands for a probability of nothing, which JSON cannot hold as a logarithm

Reason: TypeAlias = Literal["stop", "length", "tool_calls"]


class Likely(NamedTuple):
    """A token at a place, by its text.

    Attributes:
        logprob: natural logarithm of its probability, as the model has it; None: nothing is before
            it.
        top: the most likely tokens there.
    """

    text: str
    bytes: list[int]
    logprob: float | None
    top: Sequence[Likely] = ()


class Text(NamedTuple):
    """A piece of an answer; `logprobs` are of its tokens, where they are asked for."""

    text: str
    logprobs: Sequence[Likely] = ()
    is_reasoning: bool = False


class Call(NamedTuple):
    """A whole call of a tool; `arguments` are JSON."""

    name: str
    arguments: str


class End(NamedTuple):
    """Nothing follows."""

    reason: Reason


class Failed(NamedTuple):
    """Nothing follows, and what came is not the answer."""

    error: Exception


Piece: TypeAlias = Text | Call | End | Failed


@dataclass
class Form:
    """What the text of an answer is made of.

    Attributes:
        tokenizer: of the model.
        model: whose answers may have parts of their own.
        prompt_ids: behind which the answer stands.
        tools: that may be called, as chat templates take them.
        parts: whether the answer is taken apart; else it is text alone.
        stops: texts before which it ends.
        top: likely tokens that are told at each place; None: no probabilities are.
        ends: ids of tokens that end it.
        most: tokens that it may have.
        least: tokens that it has at least; in their text nothing stops it.
        ignores_ends: whether it goes on behind tokens that end it, whose text it leaves out.
        forced: gives the call that a text spells which was held to be one; None: none was.
        single: whether it ends behind a call.
        expected: int32 [n] each, texts that it is expected to resemble.
        echo: the prompt's text, which it begins with; None: it does not.
    """

    tokenizer: Any
    model: Any
    prompt_ids: Sequence[int]
    ends: frozenset[int]
    most: int
    tools: Sequence[Any] = ()
    parts: bool = False
    stops: Sequence[str] = ()
    top: int | None = None
    forced: Callable[[str], Call | None] | None = None
    single: bool = False
    least: int = 0
    ignores_ends: bool = False
    expected: Sequence[Int32Array] = ()
    echo: str | None = None


@dataclass
class Written:
    """Makes pieces of an answer's tokens, in the thread that generates them.

    Args:
        form: of the answer.
        send: takes each piece.

    Attributes:
        token_ids: what was generated.
        pieces: what was sent.
        ended: whether nothing more is wanted: a text that stops it came, or the only call.
        read_before: tokens of the prompt that an earlier answer had read.
    """

    form: Form
    send: Callable[[Piece], None]
    token_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    ended: bool = False
    read_before: int = 0

    def __post_init__(self) -> None:
        form = self.form
        self._parser = None
        if form.parts and form.forced is None:
            # transformers' own events, and text where there are none.
            tools = {"tools": form.tools} if _WITH_TOOLS else {}
            found = build_response_parser(form.tokenizer, form.model, [*form.prompt_ids], **tools)
            self._parser = found and Parser(found)
        self._stream = DecodeStream([], skip_special_tokens=self._parser is None)
        self._raw = ""  # what is not delivered yet, since a stop may begin there
        self._whole = ""  # what is delivered
        self._likely: list[tuple[int, Likely]] = []  # and where each one's text ends
        self._shown: list[Likely] = []
        self._calls = 0

    def deliver(self, piece: Piece) -> None:
        """Send a piece, which may be one of a fault."""
        self.pieces.append(piece)
        self.send(piece)

    def begin(self, likely: Sequence[Likely] = ()) -> None:
        """Deliver what the prompt has begun, or the prompt with its tokens' probabilities."""
        if self.form.echo is not None:
            self._whole = self.form.echo
            self._shown += likely
            self.deliver(Text(self._whole, likely))
        elif self._parser is not None:
            self._show(self._parser.initial_events)

    def put(self, token_ids: Sequence[int], likely: Sequence[Likely] = ()) -> None:
        """Tokens came, with their probabilities where these are asked for."""
        for number, token in enumerate(token_ids):
            if self.ended:
                return
            self.token_ids.append(token)
            ends = token in self.form.ends
            text = ""
            if not (ends and self.form.ignores_ends):
                text = self._stream.step(self.form.tokenizer.backend_tokenizer, token) or ""
            self._raw += text
            if likely and not ends:
                self._likely.append((len(self._whole) + len(self._raw), likely[number]))
            if text:
                self._release()

    def _release(self) -> None:
        """Deliver what cannot be part of a stop."""
        raw, held = self._raw, 0
        stops = self.form.stops if len(self.token_ids) > self.form.least else ()
        if found := [at for stop in stops if (at := raw.find(stop)) >= 0]:
            self.ended, self._raw = True, raw[: min(found)]
        else:
            held = max((_overlap(raw, stop) for stop in stops), default=0)
        self._deliver(len(self._raw) - held)

    def _deliver(self, count: int) -> None:
        text, self._raw = self._raw[:count], self._raw[count:]
        self._whole += text
        shown = [one for end, one in self._likely if end <= len(self._whole)]
        del self._likely[: len(shown)]
        self._shown += shown
        if self._parser is not None:
            self._show(self._parser.feed(text), shown)
        elif self.form.forced is None and (text or shown):
            self.deliver(Text(text, shown))

    def _show(self, events: list[dict[str, Any]], likely: Sequence[Likely] = ()) -> None:
        for item in response_events_to_chunks(events):
            if self.ended and self.form.single and self._calls:
                return
            if isinstance(item, ToolCall):
                self._calls += 1
                self.ended |= self.form.single
                self.deliver(Call(item.name, item.arguments))
            else:
                self.deliver(Text(str(item), likely, isinstance(item, ReasoningText)))
                likely = ()
        if likely:
            self.deliver(Text("", likely))

    def end(self) -> None:
        """Deliver what is left, and the end."""
        if not self.ended:
            self._deliver(len(self._raw))
        if self._parser is not None:
            self._show(self._parser.finalize())
        elif self.form.forced is not None:
            call = self.form.forced(self._whole)
            self._calls += call is not None
            self.deliver(Text(self._whole) if call is None else call)
        self.deliver(End(self.reason))

    @property
    def reason(self) -> Reason:
        """Why it has ended."""
        if self._calls:
            return "tool_calls"
        last = self.token_ids[-1] if self.token_ids and not self.form.ignores_ends else None
        whole = self.ended or last in self.form.ends
        return "stop" if whole or len(self.token_ids) < self.form.most else "length"

    @property
    def calls(self) -> list[Call]:
        return [piece for piece in self.pieces if isinstance(piece, Call)]

    @property
    def likely(self) -> list[Likely] | None:
        """The probabilities of its tokens; None where they are not asked for."""
        return self._shown if self.form.top is not None else None

    @property
    def parts(self) -> Iterator[Piece]:
        """The pieces of the whole answer: what follows each other of a text is one, and begins and
        ends with no space where transformers takes it apart."""
        for (kind, is_reasoning), run in groupby(self.pieces, _kind_of):
            if kind is not Text:
                yield from run
                continue
            texts: list[Any] = [*run]
            whole = "".join(one.text for one in texts)
            likely = [one for text in texts for one in text.logprobs]
            text = whole if self._parser is None else whole.strip()
            if text or likely:
                yield Text(text, likely, is_reasoning)

    def text(self, is_reasoning: bool = False) -> str:
        """Its text, or its reasoning."""
        texts = (part for part in self.parts if _kind_of(part) == (Text, is_reasoning))
        return "".join(part.text for part in texts if isinstance(part, Text))


def _kind_of(piece: Piece) -> tuple[type[Piece], bool]:
    return type(piece), getattr(piece, "is_reasoning", False)


def _is_call(found: Any) -> bool:
    function = found.get("function") if isinstance(found, dict) else None
    if not isinstance(function, dict):
        return False
    return isinstance(function.get("name"), str) and "arguments" in function


def _overlap(text: str, stop: str) -> int:
    """How much of the text's end may be the beginning of a stop."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if stop.startswith(text[-n:])), 0)


class Parser:
    """transformers' parser of a stream, for which a call of a tool that is none is text."""

    def __init__(self, parser: Any) -> None:
        self._parser, self.initial_events = parser, parser.initial_events
        self._held = ""  # text of a call that goes on
        self._fed = ""  # what has brought no event yet

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The events that a piece of text brings."""
        if self._parser is None:
            return [_content(text)]
        self._fed += text
        try:
            if events := self._parser.feed(text):
                self._fed = ""
            return [self._seen(event) for event in events]
        except (LookupError, TypeError, ValueError):
            self._parser = None
            return [_content(self._held + self._fed)]

    def finalize(self) -> list[dict[str, Any]]:
        """The events that the end brings."""
        try:
            events = [] if self._parser is None else self._parser.finalize()[1]
            return [self._seen(event) for event in events]
        except (LookupError, TypeError, ValueError, RuntimeError):
            return [_content(self._held)]

    def _seen(self, event: dict[str, Any]) -> dict[str, Any]:
        if event.get("dirty"):
            self._held += event["text"]
        if event["type"] != "region_close":
            return event
        held, self._held = self._held, ""
        is_text = event["field"] == "tool_calls" and not _is_call(event["value"])
        return _content(held) if is_text else event


def _content(text: str) -> dict[str, Any]:
    return {"type": "region_chunk", "field": "content", "text": text}


class Alphabet:
    """What single tokens spell."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.spelt = cache(self._spelt)
        # The characters by which tokenizers of bytes write these.
        self._bytes = {letter: byte for byte, letter in bytes_to_unicode().items()}
        self._by_bytes = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)

    def _spelt(self, token: int) -> tuple[str, list[int]]:
        """A token's text, and its bytes, which may be no whole characters."""
        text = self._tokenizer.decode([token])
        written = self._tokenizer.convert_ids_to_tokens(token)
        if self._by_bytes and written and all(letter in self._bytes for letter in written):
            return text, [self._bytes[letter] for letter in written]
        if written and (found := _BYTE.fullmatch(written)):
            return text, [int(found[1], 16)]
        return text, [*text.encode(errors="replace")]

    def likely(self, token: int, logprob: float, top: Sequence[Likely] = ()) -> Likely:
        text, spelt = self.spelt(token)
        return Likely(text, spelt, max(logprob, _LEAST), top)


_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
