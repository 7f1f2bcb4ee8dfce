"""What generates for the server: one answer after another, or several side by side."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer

from ...cache.kv_cache import has_slots
from ...decoding.prompt_parts import prompts_in_parts
from ...host.positions import position_limit
from ...host.transformers_private import cache_name, with_cache
from .batching import DraftingManager, adding_for
from .refusals import RefusedError
from .written import Alphabet, Failed, Likely, Written

# Tokens of a prompt that are fed at once: a second or so of a small model on a CPU. A GPU feeds
# more in that time, and what parts leave has to move into static buffers.
PART, _PART_OF_GPU = 1024, 8192

_BY_TOKENS = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE
_LOGITS = 1 << 25  # that are computed at once of a prompt whose probabilities are told
_ENDING = 1.0  # seconds that a worker may take to notice that it is to end


class _LeftError(Exception):
    """Nobody waits for the answer any more."""


@dataclass(eq=False)
class Job:
    """One answer that is to be generated.

    Attributes:
        inputs: of the model, a batch of one.
        config: the `GenerationConfig`.
        written: takes the tokens.
        request: of which it is one.
        tenant: whose request that is; None: everybody's.
        assistant: drafts for it; None: the model's own.
        seed: of its draws; None: any.
        processors: further ones of its logits.
        left: whether nobody waits for it any more.
        begun: whether it is generated; side by side with others, whether its first token has come.
        stepped: when it last went on, by the monotonic clock.
        queued: is told how many seconds it waited until it began.
    """

    inputs: dict[str, Any]
    config: Any
    written: Written
    request: Hashable
    tenant: str | None = None
    assistant: Any = None
    seed: int | None = None
    processors: Sequence[LogitsProcessor] = ()
    left: bool = False
    begun: bool = False
    stepped: float = field(default_factory=time.monotonic)
    queued: Callable[[float], None] = lambda seconds: None

    def begin(self) -> None:
        """It is begun, if it was not."""
        if not self.begun:
            self.queued(time.monotonic() - self.stepped)
        self.begun, self.stepped = True, time.monotonic()

    def step(self) -> None:
        """It goes on; _LeftError where nobody waits for it."""
        if self.left:
            raise _LeftError
        self.stepped = time.monotonic()


_CLOSING = RefusedError("the server ends", code="server_error", status=503, retry_after=5)


class OneByOne:
    """Generates one answer after another, of the tenants in turn, and of the requests of each.
    While it feeds a long prompt in parts, it serves short ones that have come meanwhile.

    Args:
        model: with an assistant attached.
        tokenizer: the model's.
        assistant: that is attached.

    Attributes:
        most_tokens: of prompt and answer.
    """

    def __init__(self, model: Any, tokenizer: Any, assistant: Any):
        self._model, self._tokenizer, self._assistant = model, tokenizer, assistant
        self.most_tokens = position_limit(model)
        self._part = PART if model.device.type == "cpu" else _PART_OF_GPU
        self._alphabet = Alphabet(tokenizer)
        self._waiting: list[Job] = []
        # How many had begun when each tenant and request that waits came, or last began.
        self._turns: dict[Hashable, tuple[int, bool]] = {}
        self._begun = 0
        self._changed = threading.Condition()
        self._running: set[Job] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it serves requests."""
        return self._thread.is_alive()

    @property
    def going_on(self) -> Collection[Job]:
        """The answers that are generated."""
        with self._changed:
            return [*self._running]

    def submit(self, jobs: Sequence[Job]) -> None:
        """Generate these answers of one request; RefusedError where the server ends."""
        with self._changed:
            if self._closed:
                raise _CLOSING
            self._waiting += jobs
            self._keep_turns()
            self._changed.notify()

    def leave(self, job: Job) -> None:
        """Nobody waits for an answer any more."""
        job.left = True
        with self._changed:
            self._waiting = [one for one in self._waiting if one is not job]
            self._keep_turns()

    def close(self) -> bool:
        """End all answers; whether the thread has ended."""
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
                job = self._by_turns()[0]
                self._begin(job)
            self._serve(job)

    def _keep_turns(self) -> None:
        """Know the turns of those that wait, and of no others."""
        waiting = {name for job in self._waiting for name in (job.tenant, job.request)}
        self._turns = {name: self._turns.get(name, (self._begun, False)) for name in waiting}

    def _by_turns(self) -> list[Job]:
        """Those that wait, first of all who came, or had a turn, the longest ago."""
        turns = self._turns
        return sorted(self._waiting, key=lambda job: (turns[job.tenant], turns[job.request]))

    def _begin(self, job: Job) -> None:
        """It has its turn."""
        self._waiting.remove(job)
        self._running.add(job)
        self._begun += 1
        self._turns[job.tenant] = self._turns[job.request] = self._begun, True
        self._keep_turns()
        job.begin()

    def _serve(self, job: Job) -> None:
        """Generate an answer that is among the running ones, until it has ended."""
        try:
            if not job.left:
                self._generate(job)
                job.written.end()
        except _LeftError:
            pass
        except Exception as error:
            job.written.deliver(Failed(error))
        finally:
            with self._changed:
                self._running.discard(job)

    def _generate(self, job: Job) -> None:
        model, written, config = self._model, job.written, job.config
        own: dict[str, Any] = {"assistant": job.assistant} if job.assistant is not None else {}
        processors, criteria = LogitsProcessorList(job.processors), StoppingCriteriaList()
        # Other ways of decoding have no streamer.
        by_tokens = config.get_generation_mode() in _BY_TOKENS
        likely = None
        if written.form.top is not None and by_tokens:
            likely = _Likely(self._alphabet, written.form.top)
            processors.insert(0, likely)
        tokens = _Tokens(job, likely, by_tokens)
        # A text that may be whole before a token ends it.
        if watched := written.form.stops or written.form.single or not by_tokens:
            criteria.append(tokens)
        if hasattr(model, "has_talker"):
            own["generation_mode"] = "text"
        with _numbers_of(job.seed, model.device), self._in_parts(job) as between:
            told, cache = self._prompt_told(job, between)
            written.begin(told)
            if not written.form.most:
                return
            if by_tokens and not config.cache_implementation:
                own |= cache
            ids = model.generate(
                **job.inputs,
                generation_config=config,
                streamer=None if watched else tokens,
                tokenizer=self._tokenizer,
                logits_processor=processors,
                stopping_criteria=criteria,
                **own,
            )
        written.read_before = (job.assistant or self._assistant).stats.last.read_before
        if not by_tokens:
            written.put(ids[0, job.inputs["input_ids"].shape[1] :].tolist())

    def _prompt_told(
        self, job: Job, between: Callable[[], None]
    ) -> tuple[list[Likely], dict[str, Any]]:
        """The probabilities of a prompt's tokens, where the answer begins with it and tells them,
        and the cache [all tokens but the last one] that this leaves."""
        form, model, ids = job.written.form, self._model, job.inputs["input_ids"]
        if form.echo is None or form.top is None:
            return [], {}
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        takes = has_slots(cache) and cache_name(model) is not None
        kept = with_cache(model, cache) if takes else {}
        most = max(1, _LOGITS // len(model.get_output_embeddings().weight))
        if not kept and ids.shape[1] > most + 1:
            raise RefusedError(
                f"echo: expected at most {most + 1} tokens of a prompt beside logprobs, since the "
                f"model's cache cannot be fed in parts, got {ids.shape[1]}",
                "echo",
            )
        told = [Likely(*self._alphabet.spelt(int(ids[0, 0])), None)]
        fed, behind = ids[:, :-1], ids[0, 1:]
        for at in range(0, len(behind), most):
            if at:
                between()
            with torch.no_grad():
                found = model(input_ids=fed[:, at : at + most], use_cache=bool(kept), **kept)
                logprobs = found.logits[0].float().log_softmax(-1)
            told += _told(self._alphabet, logprobs, behind[at : at + most], form.top)
        return told, kept

    @contextmanager
    def _in_parts(self, job: Job) -> Iterator[Callable[[], None]]:
        """A scope in which a long prompt lets short ones pass between two parts: one of each other
        tenant and of each request of its own, so that it goes on however many come."""

        def between() -> None:
            passing: dict[Hashable, Job] = {}
            with self._changed:
                for one in self._by_turns():
                    if len(one.written.form.prompt_ids) <= self._part:
                        own = one.tenant == job.tenant
                        passing.setdefault(one.request if own else one.tenant, one)
                for one in passing.values():
                    self._begin(one)
            for one in passing.values():
                self._serve(one)
            job.step()

        with prompts_in_parts(self._part, between):
            yield between


@contextmanager
def _numbers_of(seed: int | None, device: torch.device) -> Iterator[None]:
    """A scope in which random numbers are those behind a seed, and no other request's go on."""
    cards = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cards):
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        yield


class _Tokens(BaseStreamer, StoppingCriteria):
    """Hands tokens on as they are generated: as a streamer, or as a criterion, which also ends an
    answer whose text is whole. Either ends one that nobody waits for.

    Args:
        job: the answer.
        likely: knows the tokens' probabilities; None: they are not asked for.
        by_tokens: whether the text is made token by token.
    """

    def __init__(self, job: Job, likely: _Likely | None, by_tokens: bool) -> None:
        self._job, self._likely, self._by_tokens = job, likely, by_tokens
        self._began = False

    def put(self, value: torch.Tensor) -> None:
        """One token, or first of all the prompt."""
        self._job.step()
        if self._began:
            self._hand_on(value)
        self._began = True

    def end(self) -> None:
        """Nothing follows."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        self._job.step()
        if self._by_tokens:
            self._hand_on(input_ids[0, -1:])
        return input_ids.new_full((len(input_ids),), self._job.written.ended, dtype=torch.bool)

    def _hand_on(self, token: torch.Tensor) -> None:
        likely = [] if self._likely is None else [self._likely.of(token)]
        self._job.written.put(token.tolist(), likely)


class _Likely(LogitsProcessor):
    """Notes the probabilities at the place of the next token.

    Args:
        top: how many of the most likely tokens are told.
    """

    def __init__(self, alphabet: Alphabet, top: int) -> None:
        self._alphabet, self._top = alphabet, top

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._logprobs = scores.float().log_softmax(-1)
        return scores

    def of(self, token: torch.Tensor) -> Likely:
        """The chosen token's [1]."""
        return _told(self._alphabet, self._logprobs, token, self._top)[0]


def _told(
    alphabet: Alphabet, logprobs: torch.Tensor, tokens: torch.Tensor, top: int
) -> list[Likely]:
    """The tokens [places], and the most likely ones besides, by logprobs [places, vocab_size]."""
    own = logprobs.gather(1, tokens.to(logprobs.device)[:, None])[:, 0]
    best = logprobs.topk(top)
    rows = tokens, own, best.indices, best.values
    return [
        alphabet.likely(token, logprob, [*map(alphabet.likely, ids, values)])
        for token, logprob, ids, values in zip(*(row.tolist() for row in rows), strict=True)
    ]


class SideBySide:
    """Generates answers side by side, by transformers' continuous batching; as `OneByOne`.

    Args:
        model: with an assistant attached.
        config: the `GenerationConfig` that all answers share.
        batching: transformers' `ContinuousBatchingConfig`; None: its defaults.
    """

    _numbers = itertools.count()

    def __init__(self, model: Any, config: Any, batching: Any):
        self._model, self._config, self._batching = model, config, batching
        self._open: dict[str, Job] = {}
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

    @property
    def going_on(self) -> Collection[Job]:
        return [*self._open.values()]

    def submit(self, jobs: Sequence[Job]) -> None:
        if not self.is_alive:
            self._start()
        for job in jobs:
            job.written.begin()
            if not job.written.form.most:
                job.written.end()
                continue
            # An id of one answer alone: clients give theirs to several.
            name = f"answer {next(self._numbers)}"
            self._open[name], job.stepped = job, time.monotonic()
            handler = self._handler(name, job)
            self._manager.register_result_handler(name, handler)
            drafts = isinstance(self._manager, DraftingManager)
            with adding_for(job.assistant if drafts else None):
                self._manager.add_request(
                    [*job.written.form.prompt_ids],
                    request_id=name,
                    max_new_tokens=job.config.max_new_tokens,
                    streaming=True,
                    eos_token_id=job.config.eos_token_id,
                )

    def _handler(self, name: str, job: Job) -> Callable[[Any], None]:
        """What is told of an answer, by the event loop that asks for it."""
        written = job.written

        def handle(output: Any) -> None:
            if name not in self._open:
                return
            job.begin()
            try:
                written.put(output.generated_tokens[len(written.token_ids) :])
                if output.error is not None:
                    raise RuntimeError(output.error)
                if output.is_finished() or written.ended:
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


Worker: TypeAlias = OneByOne | SideBySide
