"""A model that answers requests of OpenAI's API, within bounds."""

from __future__ import annotations

import asyncio
import copy
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from transformers.cli.serving.utils import Modality

from ...drafters.expected import expected_ids
from ...hook import why_not
from ...system.log import get_logger
from .answers import ANSWERS
from .fields import MOST_ANSWERS, ChatFields, CompletionFields, Conversation, Fields
from .held import Held, Holding, Penalties
from .prompts import Prompts, bound_text
from .refusals import RefusedError
from .running import LIGHT, GoneError, Readers, Running, Stream, events, unless_gone
from .tenants import Tenants
from .workers import OneByOne, SideBySide, Worker
from .written import Call, Form

logger = get_logger(__name__)

REQUEST_ID = "x-request-id"
_DEFAULT = 1024  # tokens of an answer, where nobody says how many, as transformers' server has it
_GREEDY = 1e-5  # a temperature that logits are divided by is above this
_WARM_UP = 8  # tokens
LONGEST_STEP = 60.0
"""Seconds that any step may take, of a CPU or a GPU that compiles something first."""
_WAIT = 5  # seconds after which a client that is one too many is asked to come again
# Where answers are decoded together, they share how tokens are chosen.
_ALONE = ("logit_bias", "presence_penalty", "frequency_penalty", "min_tokens")
_TOLD = ("logprobs", "top_logprobs", "include")
# Settings that all share, and what continuous batching takes where the model's say nothing.
_SHARED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Limits:
    """What requests may take.

    Attributes:
        prompt_tokens: of a prompt; None: as many as the model was trained with positions for.
        answer_tokens: of an answer; None: the same.
        waiting: answers that may wait for their turn, of each tenant; a request asks for one, or
            for several choices behind each of its prompts.
        seconds: that a request may take, reading it and waiting included.
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
        queued: is told how many seconds each answer waited until it began.
    """

    on_ready: Callable[[], None] = staticmethod(lambda: None)
    queued: Callable[[float], None] = staticmethod(lambda seconds: None)

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
        self.limits, self.modality = limits, modality
        self.tokenizer = getattr(processor, "tokenizer", processor)
        if not hasattr(self.tokenizer, "backend_tokenizer"):
            kind = type(self.tokenizer).__name__
            raise ValueError(f"{name}: expected a tokenizer of the tokenizers library, got {kind}")
        self._together = batching is not None
        self._shared = self._configured(None)
        ends = self._shared.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))
        self.worker: Worker
        if self._together:
            self.worker = SideBySide(model, self._shared, batching)
        else:
            self.worker = OneByOne(model, self.tokenizer, assistant)
        config = model.config.get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", None) or self.worker.most_tokens
        self.most_prompt = min(limits.prompt_tokens or positions, self.worker.most_tokens)
        self.most_answer = limits.answer_tokens or positions
        # Bounds above the model's positions are their owner's wish.
        whole = positions if self.most_prompt <= positions else self.most_prompt + self.most_answer
        self.most_tokens = min(whole, self.worker.most_tokens)
        self._prompts = Prompts(model, processor, modality, self.most_prompt)
        self._held = Held(model, self.tokenizer, self._ends)
        self._readers = Readers()
        self._open: WeakSet[Running] = WeakSet()
        self.is_ready, self.is_sound = False, True

    async def warm_up(self) -> None:
        """Have the model tested, by an answer that nobody learns from."""
        running = Running(self.worker, math.inf, assistant=self.assistant.private())
        most = min(_WARM_UP, self.most_answer)
        try:
            self._read(CompletionFields(prompt=[[0]], max_tokens=most), running)
            running.begin()
            await running.rest()
        except Exception as error:
            logger.error("the model could not be tested", exc_info=error)
            self.is_sound = False
        else:
            self.is_ready = True
            self.on_ready()

    @property
    def told(self) -> dict[str, Any]:
        """What it serves, by name, to be told when it begins."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        limits, of_each = self.limits, "" if self.tenants is None else ", of each tenant"
        return {
            "model": f"{self.name} ({type(self.model).__name__}, {dtype}, {self.model.device})",
            "answers": "side by side" if self._together else "one after another",
            "limits": (
                f"{self.most_prompt:,} tokens of a prompt, {self.most_answer:,} of an answer, "
                f"{self.most_tokens:,} of both; {limits.waiting:,} answers waiting{of_each}; "
                f"{limits.seconds:g} s a request"
            ),
        }

    @property
    def health(self) -> dict[str, Any]:
        """Whether it goes on: how many answers are generated and wait, and how many seconds ago
        the last step was; None: nothing is generated. It is not alive where the model, once it is
        tested, has been in a step for longer than a request may take, and for a minute."""
        going_on = self.worker.going_on
        steps = [job.stepped for job in going_on]
        since = time.monotonic() - max(steps) if steps else None
        stuck = self.is_ready and (since or 0) > max(self.limits.seconds, LONGEST_STEP)
        alive = self.worker.is_alive and self.is_sound and not stuck
        return {
            "status": "alive" if alive else "not alive",
            "running": len(going_on),
            "waiting": sum(one.waiting for one in [*self._open]),
            "seconds_since_step": since and round(since, 3),
        }

    def close(self) -> bool:
        """End all answers; whether nothing is generated any more."""
        self.is_ready = False
        self._held.close()
        return self.worker.close() and self._readers.is_idle

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
        running = self._admitted(fields, request)
        request_id = request.headers.get(REQUEST_ID) or str(uuid.uuid4())
        headers = {REQUEST_ID: request_id}
        try:
            # The body is here as a whole, and each answer takes its prompt apart anew.
            size = len(await request.body()) * fields.answers
            # A grammar is compiled for what an answer is held to.
            heavy = size > LIGHT or bool(_held_by(fields))
            reading = self._readers.read(running.tenant, heavy, lambda: self._read(fields, running))
            await unless_gone(request, running.within(reading))
            written = [job.written for job in running.jobs]
            answer = ANSWERS[type(fields)](fields, written, request_id, self.name)
            running.begin()
            if fields.stream:
                told = events(running, answer)
                return Stream(running, told, media_type="text/event-stream", headers=headers)
            await unless_gone(request, running.rest())
            return JSONResponse(answer.whole(), headers=headers)
        except GoneError:
            running.leave()
            return Response(status_code=499)  # which nobody reads
        except BaseException:
            running.leave()
            raise

    def _admitted(self, fields: Fields, request: Request) -> Running:
        """A request that may wait for its turn; RefusedError where too many answers would."""
        tenant, assistant = None, self.assistant
        if self.tenants is not None:
            tenant = self.tenants.of(request.headers)
            assistant = self.tenants.assistant(tenant)
        most, answers = min(self.limits.waiting, MOST_ANSWERS), fields.answers
        if answers > most:
            field = "n" if getattr(fields, "n", None) not in (None, 1) else fields.text_field
            message = f"{field}: expected at most {most} answers to a request, got {answers}"
            raise RefusedError(message, field)
        waiting = sum(one.waiting for one in self._open if one.tenant == tenant)
        if waiting + answers > self.limits.waiting:
            raise RefusedError(
                f"expected at most {self.limits.waiting} answers waiting, got more",
                code="rate_limit_exceeded",
                status=429,
                retry_after=_WAIT,
            )
        running = Running(self.worker, self.limits.seconds, tenant, assistant, answers)
        self._open.add(running)
        return running

    async def erase(self, tenant: str, headers: Mapping[str, str]) -> int:
        """Erase a tenant; how many outputs of its were remembered.

        Raises:
            RefusedError: see :meth:`Tenants.erase`, or there are no tenants.
        """
        if self.tenants is None:
            raise RefusedError("this server has no tenants", code="not_found", status=404)
        going_on = [
            one for running in self._open if running.tenant == tenant for one in running.assistants
        ]
        count = await asyncio.to_thread(self.tenants.erase, tenant, headers, going_on)
        self._held.forget()
        return count

    def _read(self, fields: Fields, running: Running) -> None:
        """Make the jobs of a request."""
        if self._together:
            self._refuse_alone(fields)
        expected = None
        if fields.prediction is not None:
            bound_text("prediction", fields.prediction.text, self.most_answer)
            expected = expected_ids(fields.prediction.text, self.tokenizer)
        prompts = self._prompts.of(fields)
        config = self._configured(fields)
        hold, read = self._holding(fields, running.tenant)
        texts: Sequence[Any] = [None] * len(prompts)
        if isinstance(fields, CompletionFields) and fields.echo:
            texts = fields.prompt
        for text, inputs in zip(texts, prompts, strict=True):
            prompt_ids = inputs["input_ids"][0].tolist()
            most = self._most(fields, len(prompt_ids))
            for _ in range(getattr(fields, "n", None) or 1):
                if running.left:
                    return
                settings = copy.copy(config)
                settings.max_new_tokens = most
                form = Form(
                    self.tokenizer, self.model, prompt_ids, self._ends, most, top=fields.top
                )
                form.stops = getattr(fields, "stop", None) or ()
                form.least, form.ignores_ends = fields.min_tokens or 0, bool(fields.ignore_eos)
                form.parts = isinstance(fields, Conversation)
                form.tools = _tools(fields)
                form.single = getattr(fields, "parallel_tool_calls", None) is False
                form.forced = read
                form.echo = self.tokenizer.decode(text) if isinstance(text, list) else text
                form.expected = () if expected is None else (expected,)
                job = running.add(form, inputs, settings)
                job.queued = self.queued
                job.processors = self._processors(fields, len(prompt_ids))
                if hold is not None:
                    job.processors.append(hold())
                if fields.seed is not None:
                    seed = fields.seed + len(running.jobs) - 1
                    job.seed = seed if seed < 2**64 else seed - 2**64
                if expected is not None or running.assistant is not self.assistant:
                    own = running.assistant
                    call = {"generation_config": settings, "tokenizer": self.tokenizer}
                    # The way of decoding may leave no room for drafts.
                    if why_not(self.model, call) is None:
                        job.assistant = own if expected is None else own.expecting(expected)

    def _holding(
        self, fields: Fields, tenant: str | None
    ) -> tuple[Holding | None, Callable[[str], Call | None] | None]:
        """What holds an answer, and what gives the call that one spells which is held to one."""
        choice, tools = getattr(fields, "tool_choice", None), _tools(fields)
        self._held.check_tools(tools)
        if not (held := _held_by(fields)):
            return None, None
        # An answer ends with what it is held to.
        for name in ("min_tokens", "ignore_eos"):
            if getattr(fields, name):
                said = f"{name}: expected none beside {held[0]}, by which the answer ends, got one"
                raise RefusedError(said, name)
        if held[0] == "tool_choice":
            called = choice[0] if isinstance(choice, tuple) else None
            return self._held.to_call(tools, called, tenant)
        assert fields.schema_in_json is not None
        return self._held.to_schema(held[0], fields.schema_in_json, tenant), None

    def _processors(self, fields: Fields, length: int) -> list[Any]:
        presence = getattr(fields, "presence_penalty", None) or 0.0
        frequency = getattr(fields, "frequency_penalty", None) or 0.0
        return [Penalties(presence, frequency, length)] if presence or frequency else []

    def _refuse_alone(self, fields: Fields) -> None:
        """Refuse what answers that are decoded together cannot have each for itself."""
        config, shared = self._configured(fields), self._shared
        asked = [name for name in _ALONE if getattr(fields, name, None)]
        if fields.top is not None:
            asked += [name for name in _TOLD if getattr(fields, name, None) is not None]
        asked += _held_by(fields)[-1:]
        for name in _SHARED:
            differs = _setting(config, name) != _setting(shared, name)
            if differs and getattr(fields, name) is not None:
                asked.append(name)
        if config.do_sample and fields.seed is not None:
            asked.append("seed")
        if asked:
            raise RefusedError(
                f"{asked[0]}: expected none, since this server decodes answers together "
                "(--continuous-batching), all by the settings of the model's generation "
                "configuration, got one",
                asked[0],
                "unsupported_parameter",
            )

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
        return config

    def _most(self, fields: Fields, length: int) -> int:
        """Tokens that an answer behind a prompt may have."""
        # The last one is not fed.
        room = min(self.most_answer, self.most_tokens + 1 - length)
        given = {name: getattr(fields, name) for name in fields.length_fields}
        field, wanted = next((one for one in given.items() if one[1] is not None), ("", None))
        if wanted is not None and wanted > room:
            raise RefusedError(
                f"{field}: expected at most {room} tokens behind {length} of the prompt, "
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


def _setting(config: Any, name: str) -> Any:
    """A setting by which tokens are chosen; None: a greedy choice has no such one."""
    if name != "repetition_penalty" and not config.do_sample:
        return None
    return getattr(config, name) or _SHARED[name]


def _held_by(fields: Fields) -> list[str]:
    """The fields that hold answers to something, of which the first counts."""
    free = getattr(fields, "tool_choice", None) in (None, "none", "auto")
    held = [] if free else ["tool_choice"]
    if fields.schema_in_json is not None:
        held.append("response_format" if isinstance(fields, ChatFields) else "text")
    return held


def _tools(fields: Fields) -> Sequence[Any]:
    """The tools that may be called."""
    tools: Sequence[Any] = getattr(fields, "tools", None) or ()
    return tools if getattr(fields, "tool_choice", None) != "none" else ()
