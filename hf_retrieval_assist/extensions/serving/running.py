"""The answers to one request while they are generated, and the client that waits for them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from fastapi import Request
from fastapi.responses import StreamingResponse

from ...system.log import get_logger
from .answers import Answer, event_of
from .refusals import FAILED, RefusedError
from .workers import Job, Worker
from .written import End, Failed, Form, Piece, Written

logger = get_logger(__name__)

LIGHT = 1 << 16  # bytes of a body that takes milliseconds to read

T = TypeVar("T")


class Running:
    """The answers to one request while they are generated.

    Args:
        worker: that generates them.
        seconds: that they may take, reading the request included.
        tenant: whose request it is; None: everybody's.
        assistant: drafts for them; None: the model's own.
        answers: how many there are to be.

    Attributes:
        jobs: one of each, as far as the request is read.
        open: how many go on.
        left: whether nobody waits for them any more.
    """

    def __init__(
        self,
        worker: Worker,
        seconds: float,
        tenant: str | None = None,
        assistant: Any = None,
        answers: int = 1,
    ) -> None:
        self.tenant, self.assistant, self._answers = tenant, assistant, answers
        self._worker, self._loop = worker, asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._ends = self._loop.time() + seconds
        self._seconds = seconds
        self.jobs: list[Job] = []
        self.open = 0
        self.left = False

    @property
    def waiting(self) -> int:
        """Answers that are not begun."""
        return 0 if self.left else self._answers - sum(job.begun for job in [*self.jobs])

    @property
    def assistants(self) -> list[Any]:
        """Those that draft for its answers."""
        own = [job.assistant for job in [*self.jobs] if job.assistant is not None]
        return own if self.assistant is None else [self.assistant, *own]

    def add(self, form: Form, inputs: dict[str, Any], config: Any) -> Job:
        """One more answer, to be generated from `begin` on."""
        number = len(self.jobs)

        def deliver(piece: Piece) -> None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, piece))

        job = Job(inputs, config, Written(form, deliver), self, self.tenant)
        self.jobs.append(job)
        return job

    def begin(self) -> None:
        """RefusedError where the server ends."""
        self._worker.submit(self.jobs)
        self.open = len(self.jobs)

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """What some work comes to; RefusedError where it takes more than is left of the seconds."""
        try:
            async with asyncio.timeout_at(None if self._ends == math.inf else self._ends):
                return await work
        except TimeoutError:
            said = f"expected an answer within {self._seconds:g} s, which it would have exceeded"
            raise RefusedError(said, code="timeout", status=504) from None

    async def next(self) -> list[tuple[int, Piece]]:
        """What has come since the last time, at least one piece; raises why it failed."""
        found = [await self.within(self._queue.get())]
        while not self._queue.empty():
            found.append(self._queue.get_nowait())
        for _, piece in found:
            if isinstance(piece, Failed):
                raise piece.error
            self.open -= isinstance(piece, End)
        return found

    async def rest(self) -> None:
        """Wait until everything is written."""
        while self.open:
            await self.next()

    def leave(self) -> None:
        """Nobody waits any more."""
        self.left = True
        if self.open:
            self.open = 0
            for job in self.jobs:
                self._worker.leave(job)


class Readers:
    """Two threads: one reads requests that take milliseconds, the other one those that may take
    seconds, which so hold each other alone. In either the tenants have their turns."""

    def __init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1, f"reading {kind}") for kind in ("light", "heavy")]
        self._turns: WeakValueDictionary[Any, asyncio.Lock] = WeakValueDictionary()
        self._work: set[Future[None]] = set()

    async def read(self, tenant: str | None, heavy: bool, function: Callable[[], None]) -> None:
        """Run a function in its turn; not at all where the caller is cancelled before."""
        # A tenant has one request in a thread's queue, behind at most one of each other's.
        async with self._turns.setdefault((tenant, heavy), asyncio.Lock()):
            work = self._threads[heavy].submit(function)
            self._work.add(work)
            work.add_done_callback(self._work.discard)
            await asyncio.wrap_future(work)

    @property
    def is_idle(self) -> bool:
        """Whether no thread reads."""
        return not any(work.running() for work in [*self._work])


class Stream(StreamingResponse):
    """Is left with its client, even before its first event."""

    def __init__(self, running: Running, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._running = running

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self._running.leave()


async def events(running: Running, answer: Answer) -> AsyncIterator[str]:
    try:
        yield "".join(map(event_of, answer.begin()))
        while running.open:
            found = await running.next()
            yield "".join(event_of(one) for came in found for one in answer.go_on(*came))
        return
    except RefusedError as error:
        refusal = error
    except Exception as error:
        logger.error("an answer failed", exc_info=error)
        refusal = FAILED
    yield "".join(map(event_of, answer.fail(refusal)))


class GoneError(Exception):
    """The client has left."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What some work comes to; GoneError as soon as the client leaves."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise GoneError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
