"""A model that answers requests of OpenAI's API, within bounds."""

from __future__ import annotations

import asyncio
import copy
import math
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers.cli.serving.utils import Modality

from ...drafters.expected import ExpectedTexts, expected_ids
from ...hook import why_not
from ...system.log import get_logger
from .answers import ANSWERS, Answer
from .fields import ChatFields, Conversation, Fields
from .held import Held, Penalties
from .prompts import Prompts
from .refusals import FAILED, RefusedError
from .tenants import Tenants
from .workers import Job, OneByOne, SideBySide, Worker
from .written import End, Failed, Form, Piece, Written

logger = get_logger(__name__)

T = TypeVar("T")

REQUEST_ID = "x-request-id"
_DEFAULT = 1024  # tokens of an answer, where nobody says how many, as transformers' server has it
_GREEDY = 1e-5  # a temperature that logits are divided by is above this
_WARM_UP = 8  # tokens
_COUNTING = 100  # looks whether that answer was counted, as side by side the next step does
# Where answers are decoded together, they share how tokens are chosen.
_ALONE = ("logit_bias", "presence_penalty", "frequency_penalty", "min_tokens")
# Fields that say what tokens are drawn from, and what continuous batching draws from where neither
# a request nor the model's configuration says anything.
_OF_DRAWS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(frozen=True)
class Limits:
    """What requests may take.

    Attributes:
        prompt_tokens: of a prompt; None: as many as the model was trained with positions for.
        answer_tokens: of an answer; None: the same.
        waiting: requests that may wait for their turn.
        seconds: that a request may take, waiting included.
    """

    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    waiting: int = 128
    seconds: float = 600.0


class Service:
    """Answers requests with one model.

    Args:
        model: with an assistant attached.
        processor: its tokenizer, or what has one.
        name: of the model, by which it is asked for.
        modality: what it reads.
        assistant: that is attached.
        limits: what requests may take.
        batching: transformers' `ContinuousBatchingConfig` with which answers are generated side by
            side; None: one after another.
        tenants: whose requests it answers; None: everybody's.

    Raises:
        ValueError: its tokenizer is not one of the `tokenizers` library.

    Attributes:
        is_ready: whether the model has been tested.
        is_sound: whether it can be, as far as is known.
        on_ready: is called then.
    """

    on_ready: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        model: Any,
        processor: Any,
        name: str,
        modality: Modality,
        assistant: Any,
        limits: Limits,
        batching: Any = None,
        tenants: Tenants | None = None,
    ) -> None:
        self.model, self.name, self.assistant, self.tenants = model, name, assistant, tenants
        self.limits = limits
        self.tokenizer = getattr(processor, "tokenizer", processor)
        if not hasattr(self.tokenizer, "backend_tokenizer"):
            kind = type(self.tokenizer).__name__
            raise ValueError(f"{name}: expected a tokenizer of the tokenizers library, got {kind}")
        self._together = batching is not None
        self._shared = self._configured(None)
        self._ends = _ids(self._shared.eos_token_id)
        self.worker: Worker
        if self._together:
            self.worker = SideBySide(model, self._shared, batching, limits.waiting)
        else:
            self.worker = OneByOne(model, self.tokenizer, limits.waiting)
        config = model.config.get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", None) or self.worker.most_tokens
        self.most_prompt = min(limits.prompt_tokens or positions, self.worker.most_tokens)
        self.most_answer = limits.answer_tokens or positions
        # Bounds above the model's positions are their owner's wish.
        whole = positions if self.most_prompt <= positions else self.most_prompt + self.most_answer
        self.most_tokens = min(whole, self.worker.most_tokens)
        self._prompts = Prompts(model, processor, modality, self.most_prompt)
        self._held = Held(model, self.tokenizer, self._ends)
        self.is_ready, self.is_sound = False, True

    async def warm_up(self) -> None:
        """Have the model tested, by an answer that nobody learns from."""
        try:
            await self._warm_up()
        except Exception as error:
            logger.error("the model could not be tested", exc_info=error)
            self.is_sound = False
        else:
            self.is_ready = True
            self.on_ready()

    async def _warm_up(self) -> None:
        ids = self.tokenizer("a", return_tensors="pt")["input_ids"][:, :1]
        ids = ids if ids.numel() else ids.new_zeros(1, 1)
        config = self._configured(None)
        config.max_new_tokens = _WARM_UP
        running = _Running(self.worker, math.inf)
        form = Form(self.tokenizer, self.model, ids[0].tolist(), self._ends, _WARM_UP)
        inputs = {"input_ids": ids.to(self.model.device)}
        job = running.add(form, inputs, config, None)
        self._draft_for(job, self.assistant.private())
        total = self.assistant.stats.total
        before = total.calls
        running.begin()
        await running.rest()
        for _ in range(_COUNTING):
            if total.calls > before:
                break
            await asyncio.sleep(0.01)

    @property
    def told(self) -> dict[str, Any]:
        """What it serves, by name, to be told when it begins."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        limits = self.limits
        return {
            "model": f"{self.name} ({type(self.model).__name__}, {dtype}, {self.model.device})",
            "answers": "side by side" if self._together else "one after another",
            "limits": (
                f"{self.most_prompt:,} tokens of a prompt, {self.most_answer:,} of an answer, "
                f"{self.most_tokens:,} of both; {limits.waiting:,} requests waiting, "
                f"{limits.seconds:g} s each"
            ),
        }

    def close(self) -> bool:
        """End all answers; whether nothing is generated any more."""
        self.is_ready = False
        return self.worker.close()

    async def answer(self, fields: Fields, request: Request) -> Response:
        """The answer to a request.

        Raises:
            RefusedError: it is not served.
        """
        if fields.model not in (None, self.name):
            raise RefusedError(
                f"model: expected {self.name!r}, the only one that is served, got {fields.model!r}",
                "model",
                "model_not_found",
                404,
            )
        assistant = self.assistant
        if self.tenants is not None:
            assistant = self.tenants.assistant(self.tenants.of(request.headers))
        running = _Running(self.worker, self.limits.seconds)
        request_id = request.headers.get(REQUEST_ID) or str(uuid.uuid4())
        headers = {REQUEST_ID: request_id}
        try:
            await asyncio.to_thread(self._read, fields, running, assistant)
            written = [job.written for job in running.jobs]
            answer = ANSWERS[type(fields)](fields, written, request_id, self.name)
            running.begin()
            if fields.stream:
                first = await _unless_gone(request, running.next())
                events = _events(running, answer, first)
                return _Stream(running, events, media_type="text/event-stream", headers=headers)
            await _unless_gone(request, running.rest())
            return JSONResponse(answer.whole(), headers=headers)
        except _GoneError:
            running.leave()
            return Response(status_code=499)  # which nobody reads
        except BaseException:
            running.leave()
            raise

    def _read(self, fields: Fields, running: _Running, assistant: Any) -> None:
        """Make the jobs of a request."""
        if self._together:
            self._refuse_alone(fields)
        prompts = self._prompts.of(fields)
        config = self._configured(fields)
        choice = getattr(fields, "tool_choice", None)
        name = choice[0] if isinstance(choice, tuple) else None
        for inputs in prompts:
            prompt_ids = inputs["input_ids"][0].tolist()
            most = self._most(fields, len(prompt_ids))
            for _ in range(getattr(fields, "n", None) or 1):
                own = copy.copy(config)
                own.max_new_tokens = most
                form = Form(
                    self.tokenizer, self.model, prompt_ids, self._ends, most, top=fields.top
                )
                form.stops = getattr(fields, "stop", None) or ()
                form.least, form.ignores_ends = fields.min_tokens or 0, bool(fields.ignore_eos)
                form.parts = isinstance(fields, Conversation)
                form.tools = (getattr(fields, "tools", None) or ()) if choice != "none" else ()
                form.single = getattr(fields, "parallel_tool_calls", None) is False
                processors = self._processors(fields, len(prompt_ids))
                if name is not None or choice == "required":
                    self._refuse_longer(fields, "tool_choice")
                    held, form.forced = self._held.to_call(form.tools, name)
                    processors.append(held)
                elif fields.schema_in_json is not None:
                    field, schema = _schema_field(fields), fields.schema_in_json
                    self._refuse_longer(fields, field)
                    processors.append(self._held.to_schema(field, schema))
                job = running.add(form, inputs, own, None)
                job.processors = processors
                if fields.seed is not None:
                    seed = fields.seed + len(running.jobs) - 1
                    job.seed = seed if seed < 2**64 else seed - 2**64
                job.suspects = ["stop"] if form.stops else ()
                self._give(job, fields, assistant)

    def _give(self, job: Job, fields: Fields, assistant: Any) -> None:
        """Give an answer the assistant of its request."""
        if fields.prediction is not None:
            ids = expected_ids(fields.prediction.text, self.tokenizer)
            job.written.form.expected = ExpectedTexts([ids])
            assistant = assistant.expecting(ids)
        if assistant is not self.assistant:
            self._draft_for(job, assistant)

    def _draft_for(self, job: Job, assistant: Any) -> None:
        """Let an assistant draft for an answer, where the way of decoding leaves room for it."""
        call = {"generation_config": job.config, "tokenizer": self.tokenizer}
        if why_not(self.model, call) is None:
            job.assistant = assistant

    def _processors(self, fields: Fields, length: int) -> list[Any]:
        presence = getattr(fields, "presence_penalty", None) or 0.0
        frequency = getattr(fields, "frequency_penalty", None) or 0.0
        return [Penalties(presence, frequency, length)] if presence or frequency else []

    def _refuse_longer(self, fields: Fields, field: str) -> None:
        """Refuse what would let an answer go on that ends with what it is held to."""
        for name in ("min_tokens", "ignore_eos"):
            if getattr(fields, name):
                message = f"{name}: expected none beside {field}, by which the answer ends, got one"
                raise RefusedError(message, name)

    def _refuse_alone(self, fields: Fields) -> None:
        """Refuse what answers that are decoded together cannot have each for itself."""
        asked = [name for name in _ALONE if getattr(fields, name, None)]
        if fields.top is not None:
            told = ("logprobs", "top_logprobs", "include")
            asked += [name for name in told if getattr(fields, name, None) is not None]
        if fields.schema_in_json is not None:
            asked.append(_schema_field(fields))
        if (tools := getattr(fields, "tool_choice", None)) not in (None, "none", "auto"):
            asked.append("tool_choice")
        if fields.repetition_penalty not in (None, 1):
            asked.append("repetition_penalty")
        asked += self._draws_alone(fields)
        if asked:
            raise RefusedError(
                f"{asked[0]}: expected none, since this server decodes answers together "
                "(--continuous-batching), all by the settings of the model's generation "
                f"configuration, got {tools if asked[0] == 'tool_choice' else 'one'}",
                asked[0],
                "unsupported_parameter",
            )

    def _draws_alone(self, fields: Fields) -> Iterator[str]:
        """The fields by which a text would be drawn in another way than those beside it."""
        config, shared = self._configured(fields), self._shared
        if config.do_sample != shared.do_sample and fields.temperature is not None:
            yield "temperature"
        if not config.do_sample:
            return
        for name, usual in _OF_DRAWS.items():
            common = getattr(shared, name) if shared.do_sample else None
            differs = (getattr(config, name) or usual) != (common or usual)
            if differs and getattr(fields, name) is not None:
                yield name
        if fields.seed is not None:
            yield "seed"

    def _configured(self, fields: Fields | None) -> Any:
        """The settings of `generate` for a request; None: of one that says nothing."""
        config = copy.deepcopy(self.model.generation_config)
        # Any setting may be None, which asks for nothing.
        config.do_sample = bool(config.do_sample)
        config.return_dict_in_generate = False
        config.num_return_sequences = 1  # an answer has no place for more
        if self._together:
            config.use_cache = False  # it has one of its own
        if fields is None:
            return config
        if fields.temperature is not None:
            config.do_sample = fields.temperature >= _GREEDY
            config.temperature = fields.temperature if config.do_sample else None
        elif (fields.top_p or 1) < 1 or (fields.top_k or 0) > 0 or fields.min_p:
            # Texts are drawn where nobody says anything, as the API has it.
            config.do_sample = True
        for name in ("top_p", "min_p", "repetition_penalty"):
            if (given := getattr(fields, name)) is not None:
                setattr(config, name, given)
        if fields.top_k is not None:
            config.top_k = max(fields.top_k, 0)
        if fields.min_tokens is not None:
            config.min_new_tokens = fields.min_tokens
        if fields.ignore_eos and self._ends:
            if config.pad_token_id is None:
                config.pad_token_id = min(self._ends)  # transformers takes it from those that end
            config.eos_token_id = []
        if biases := getattr(fields, "logit_bias", None):
            last = len(self.model.get_output_embeddings().weight) - 1
            if max(biases) > last:
                message = f"logit_bias: expected ids up to {last}, got {max(biases)}"
                raise RefusedError(message, "logit_bias")
            config.sequence_bias = {(token,): bias for token, bias in biases.items()}
        stops = getattr(fields, "stop", None)
        if stops and not self._together and not fields.min_tokens:
            config.stop_strings = stops
        return config

    def _most(self, fields: Fields, length: int) -> int:
        """Tokens that an answer behind a prompt may have."""
        # The last one is not fed.
        room = min(self.most_answer, self.most_tokens + 1 - length)
        field, wanted = fields.length_field, getattr(fields, fields.length_field)
        if wanted is not None and not 1 <= wanted <= room:
            raise RefusedError(
                f"{field}: expected 1 to {room} tokens behind {length} of the prompt, "
                f"got {wanted!s:.40}",
                field,
                "context_length_exceeded",
            )
        least = fields.min_tokens or 0
        usual = max(_DEFAULT, self.model.generation_config.max_new_tokens or 0, least)
        most = min(usual, room) if wanted is None else int(wanted)
        if least > most:
            message = f"min_tokens: expected at most {most}, which the answer may have, got {least}"
            raise RefusedError(message, "min_tokens")
        return most


class _Running:
    """The answers to one request while they are generated.

    Args:
        worker: that generates them.
        seconds: that they may take.

    Attributes:
        jobs: one of each.
        open: how many go on.
    """

    def __init__(self, worker: Worker, seconds: float) -> None:
        self._worker, self._loop = worker, asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._ends = self._loop.time() + seconds
        self._seconds = seconds
        self.jobs: list[Job] = []
        self.open = 0

    def add(self, form: Form, inputs: dict[str, Any], config: Any, assistant: Any) -> Job:
        """One more answer, to be generated from `begin` on."""
        number = len(self.jobs)

        def deliver(piece: Piece) -> None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, piece))

        job = Job(inputs, config, Written(form, deliver), self, assistant)
        self.jobs.append(job)
        return job

    def begin(self) -> None:
        """RefusedError where too many others wait."""
        self._worker.submit(self.jobs)
        self.open = len(self.jobs)

    async def next(self) -> list[tuple[int, Piece]]:
        """What has come since the last time, at least one piece; RefusedError where it failed."""
        try:
            limit = None if self._ends == math.inf else self._ends
            async with asyncio.timeout_at(limit):
                found = [await self._queue.get()]
        except TimeoutError:
            said = f"expected an answer within {self._seconds:g} s, which it would have exceeded"
            raise RefusedError(said, code="timeout", status=504) from None
        while not self._queue.empty():
            found.append(self._queue.get_nowait())
        for _, piece in found:
            if isinstance(piece, Failed):
                if isinstance(piece.error, RefusedError):
                    raise piece.error
                logger.error("an answer failed", exc_info=piece.error)
                raise FAILED
            self.open -= isinstance(piece, End)
        return found

    async def rest(self) -> None:
        """Wait until everything is written."""
        while self.open:
            await self.next()

    def leave(self) -> None:
        """Nobody waits any more."""
        if self.open:
            self.open = 0
            for job in self.jobs:
                self._worker.leave(job)


class _Stream(StreamingResponse):
    """Is left with its client, even before its first event."""

    def __init__(self, running: _Running, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._running = running

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self._running.leave()


async def _events(
    running: _Running, answer: Answer, first: list[tuple[int, Piece]]
) -> AsyncIterator[str]:
    found = first
    try:
        yield "".join(answer.begin())
        while True:
            yield "".join(text for came in found for text in answer.go_on(*came))
            if not running.open:
                return
            found = await running.next()
    except RefusedError as error:
        refusal = error
    except Exception as error:
        logger.error("an answer failed", exc_info=error)
        refusal = FAILED
    yield "".join(answer.fail(refusal))


class _GoneError(Exception):
    """The client has left."""


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What some work comes to; _GoneError as soon as the client leaves."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _GoneError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def _schema_field(fields: Fields) -> str:
    return "response_format" if isinstance(fields, ChatFields) else "text"


def _ids(ends: Any) -> frozenset[int]:
    """Ids of tokens that end an answer."""
    return frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))
