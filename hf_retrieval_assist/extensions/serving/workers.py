"""What generates for the server: one answer after another, or several side by side."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer

from ...decoding.prompt_parts import prompts_in_parts
from ...host.positions import position_limit
from .batching import DraftingManager, adding_for
from .refusals import RefusedError
from .written import Alphabet, Failed, Likely, Written

# Tokens of a prompt that are fed at once: a second or so of a small model on a CPU. A GPU feeds
# more in that time, and what parts leave has to move into static buffers.
PART, _PART_OF_GPU = 1024, 8192

_LONGEST_WAIT = 60  # seconds that a client is asked to wait at most
_BY_TOKENS = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE
_ENDING = 1.0  # seconds that a worker may take to notice that it is to end


class _LeftError(Exception):
    """Nobody waits for the answer any more."""


class _EndedError(Exception):
    """The answer is whole; transformers has no criterion that says so."""


@dataclass(eq=False)
class Job:
    """One answer that is to be generated.

    Attributes:
        inputs: of the model, a batch of one.
        config: the `GenerationConfig`.
        written: takes the tokens.
        request: of which it is one; as many as it has wait as one.
        assistant: drafts for it; None: the model's own.
        seed: of its draws; None: any.
        processors: further ones of its logits.
        suspects: fields of the request that may be what generating fails by.
        left: whether nobody waits for it any more.
        begun: whether its first token has come, side by side with others.
    """

    inputs: dict[str, Any]
    config: Any
    written: Written
    request: object
    assistant: Any = None
    seed: int | None = None
    processors: Sequence[LogitsProcessor] = ()
    suspects: Sequence[str] = ()
    left: bool = False
    begun: bool = False

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.written.form.prompt_ids)


class Worker(Protocol):
    """Generates answers, in a thread of its own.

    Attributes:
        most_tokens: of prompt and answer.
    """

    most_tokens: int

    def submit(self, jobs: Sequence[Job]) -> None:
        """Generate these answers of one request; RefusedError where too many wait."""

    def leave(self, job: Job) -> None:
        """Nobody waits for an answer any more."""

    @property
    def is_alive(self) -> bool:
        """Whether it serves requests."""

    def close(self) -> bool:
        """End all answers; whether the thread has ended."""


_CLOSING = RefusedError("the server ends", code="server_error", status=503, retry_after=5)


def _refuse_more(waiting: int, most: int, seconds: float) -> None:
    if waiting >= most:
        after = min(_LONGEST_WAIT, max(1, math.ceil(seconds * waiting)))
        raise RefusedError(
            f"expected at most {most} requests waiting, got one more",
            code="rate_limit_exceeded",
            status=429,
            retry_after=after,
        )


class OneByOne:
    """Generates one answer after another. While it feeds a long prompt in parts, it serves short
    ones that have come meanwhile.

    Args:
        model: with an assistant attached.
        tokenizer: the model's.
        most_waiting: requests that may wait.
    """

    def __init__(self, model: Any, tokenizer: Any, most_waiting: int):
        self._model, self._tokenizer, self._most = model, tokenizer, most_waiting
        self.most_tokens = position_limit(model)
        self._part = PART if model.device.type == "cpu" else _PART_OF_GPU
        self._alphabet = Alphabet(tokenizer)
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running: set[Job] = set()
        self._closed = False
        self._seconds = 0.0  # that an answer takes, the later ones the more
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            if self._closed:
                raise _CLOSING
            # The answers of one request are one that waits, until the first is begun.
            begun = {id(job.request) for job in self._running}
            waiting = {id(job.request) for job in self._waiting} - begun
            _refuse_more(len(waiting), self._most, self._seconds)
            self._waiting += jobs
            self._changed.notify()

    def leave(self, job: Job) -> None:
        job.left = True
        with self._changed, suppress(ValueError):
            self._waiting.remove(job)

    def close(self) -> bool:
        with self._changed:
            self._closed = True
            for job in [*self._waiting, *self._running]:
                job.left = True
                job.written.deliver(Failed(_CLOSING))
            self._waiting.clear()
            self._changed.notify()
        self._thread.join(_ENDING)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                self._running.add(job := self._waiting.popleft())
            began = time.perf_counter()
            self._serve(job)
            self._seconds += (time.perf_counter() - began - self._seconds) / 8

    def _serve(self, job: Job) -> None:
        """Generate an answer that is among the running ones, until it has ended."""
        try:
            if not job.left:
                with suppress(_EndedError):
                    self._generate(job)
                job.written.end()
        except _LeftError:
            pass
        except Exception as error:
            job.written.deliver(Failed(self._blamed(job, error)))
        finally:
            with self._changed:
                self._running.discard(job)

    def _generate(self, job: Job) -> None:
        model, written, config = self._model, job.written, job.config
        written.begin()
        own: dict[str, Any] = {"assistant": job.assistant} if job.assistant is not None else {}
        streamer: _Streamer | None = _Streamer(job)
        if config.get_generation_mode() not in _BY_TOKENS:
            streamer = None  # which such ways of decoding have none of
        processors = LogitsProcessorList(job.processors)
        if written.form.top is not None and streamer is not None:
            streamer.likely = _Likely(self._alphabet, written.form.top)
            processors.insert(0, streamer.likely)
        if hasattr(model, "has_talker"):
            own["generation_mode"] = "text"
        with _numbers_of(job.seed, model.device), self._in_parts(job):
            ids = model.generate(
                **job.inputs,
                generation_config=config,
                streamer=streamer,
                tokenizer=self._tokenizer,
                logits_processor=processors,
                **own,
            )
        if streamer is None:
            written.put(ids[0, job.inputs["input_ids"].shape[1] :].tolist())

    @contextmanager
    def _in_parts(self, job: Job) -> Iterator[None]:
        """A scope in which a long prompt lets short ones pass."""

        def between() -> None:
            with self._changed:
                passing = [one for one in self._waiting if one.length <= self._part]
                for one in passing:
                    self._waiting.remove(one)
                self._running.update(passing)
            for one in passing:
                self._serve(one)
            if job.left:
                raise _LeftError

        with prompts_in_parts(self._part, between):
            yield

    def _blamed(self, job: Job, error: Exception) -> Exception:
        """What an answer failed by: its own fields, where one without them does not fail."""
        if isinstance(error, RefusedError):
            return error
        if job.suspects:
            prompt = torch.zeros((1, 1), dtype=torch.long, device=self._model.device)
            try:
                self._model.generate(prompt, assistant=None, max_new_tokens=2, do_sample=False)
            except Exception:
                return error
            found = f"{' or '.join(job.suspects)}: {type(error).__name__}: {error}"
            return RefusedError(found, job.suspects[0])
        return error


@contextmanager
def _numbers_of(seed: int | None, device: torch.device) -> Iterator[None]:
    """A scope in which random numbers are those behind a seed, and no other request's go on."""
    cards = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cards):
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        yield


class _Streamer(BaseStreamer):
    """Hands tokens on as they are generated.

    Attributes:
        likely: knows their probabilities, where these are asked for.
    """

    likely: _Likely | None = None

    def __init__(self, job: Job) -> None:
        self._job, self._began = job, False

    def put(self, value: torch.Tensor) -> None:
        """One token, or first of all the prompt."""
        if self._job.left:
            raise _LeftError
        if not self._began:
            self._began = True
            return
        if self._job.written.ended:
            raise _EndedError
        (token,) = value.tolist()
        self._job.written.put([token], [] if self.likely is None else [self.likely.of(token)])

    def end(self) -> None:
        """Nothing follows."""


class _Likely(LogitsProcessor):
    """Notes the probabilities at the place of the next token.

    Args:
        top: how many of the most likely tokens are told.
    """

    def __init__(self, alphabet: Alphabet, top: int) -> None:
        self._alphabet, self._top = alphabet, top

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._logprobs = scores[0].float().log_softmax(-1)
        return scores

    def of(self, token: int) -> Likely:
        """The chosen token's."""
        best = self._logprobs.topk(self._top)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        top = [self._alphabet.likely(*pair) for pair in pairs]
        return self._alphabet.likely(token, self._logprobs[token].item(), top)


class SideBySide:
    """Generates answers side by side, by transformers' continuous batching.

    Args:
        model: with an assistant attached.
        config: the `GenerationConfig` that all answers share.
        batching: transformers' `ContinuousBatchingConfig`; None: its defaults.
        most_waiting: requests that may wait for their first token.
    """

    _numbers = itertools.count()

    def __init__(self, model: Any, config: Any, batching: Any, most_waiting: int):
        self._model, self._config, self._batching = model, config, batching
        self._most = most_waiting
        self._open: dict[str, Job] = {}
        self._seconds = 0.0
        self._manager: Any = None
        self._start()

    def _start(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True, timeout=2)
        self._manager = self._model.init_continuous_batching(
            generation_config=self._config, continuous_batching_config=self._batching
        )
        # A thread is a daemon where the one is that starts it; any other would keep a process that
        # does not close this worker.
        starting = threading.Thread(target=self._manager.start, daemon=True)
        starting.start()
        starting.join()
        # It makes the cache, which says how long a request may become.
        while self._manager.batch_processor is None and self._manager.is_running():
            time.sleep(0.01)
        scheduler = getattr(self._manager.batch_processor, "scheduler", None)
        positions = position_limit(self._model)
        self.most_tokens: int = getattr(scheduler, "most_tokens", positions)

    @property
    def is_alive(self) -> bool:
        return self._manager.background_thread_status.fatal_error is None

    def submit(self, jobs: Sequence[Job]) -> None:
        waiting = len({id(job.request) for job in self._open.values() if not job.begun})
        _refuse_more(waiting, self._most, self._seconds)
        if not self.is_alive:
            self._start()
        for job in jobs:
            # An id of one answer alone: clients give theirs to several.
            name = f"answer {next(self._numbers)}"
            self._open[name] = job
            handler = self._handler(name, job, time.perf_counter())
            self._manager.register_result_handler(name, handler)
            drafts = isinstance(self._manager, DraftingManager)
            job.written.begin()
            with adding_for(job.assistant if drafts else None):
                self._manager.add_request(
                    [*job.written.form.prompt_ids],
                    request_id=name,
                    max_new_tokens=job.config.max_new_tokens,
                    streaming=True,
                    eos_token_id=job.config.eos_token_id,
                )

    def _handler(self, name: str, job: Job, began: float) -> Callable[[Any], None]:
        """What is told of an answer, by the event loop that asks for it."""
        written = job.written

        def handle(output: Any) -> None:
            if name not in self._open:
                return
            job.begun = True
            try:
                written.put(output.generated_tokens[len(written.token_ids) :])
                if output.error is not None:
                    raise RuntimeError(output.error)
                if output.is_finished() or written.ended:
                    self._seconds += (time.perf_counter() - began - self._seconds) / 8
                    self._close(name, not output.is_finished())
                    written.end()
            except Exception as error:
                self._close(name, True)
                written.deliver(Failed(error))
                # Requests that came while the worker died are nobody's.
                asyncio.get_running_loop().call_later(_ENDING, self._fail_if_dead)

        return handle

    def _fail_if_dead(self) -> None:
        if not self.is_alive:
            for name, job in [*self._open.items()]:
                self._close(name, False)
                job.written.deliver(Failed(RuntimeError("the worker has died")))

    def _close(self, name: str, goes_on: bool) -> None:
        del self._open[name]
        if goes_on:
            self._manager.cancel_request(name)
            self._manager.output_router.result_handlers.pop(name, None)

    def leave(self, job: Job) -> None:
        job.left = True
        for name in [name for name, one in self._open.items() if one is job]:
            self._close(name, True)

    def close(self) -> bool:
        for job in [*self._open.values()]:
            self.leave(job)
            job.written.deliver(Failed(_CLOSING))
        self._manager.stop(block=True, timeout=_ENDING)
        return not self._manager.is_running()
