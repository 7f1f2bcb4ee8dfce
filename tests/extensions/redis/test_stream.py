"""Outputs exchanged in the background, with a server that does as it is told."""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from hf_retrieval_assist.extensions.redis import stream
from hf_retrieval_assist.extensions.redis.redis_server import Answer, RedisServer
from hf_retrieval_assist.extensions.redis.stream import OutputStream
from hf_retrieval_assist.memory.outputs import Output
from tests.support.memories import WAIT, output, wait_until
from tests.support.redis_process import OddServer, needs_redis
from tests.support.stores import sync


class Keeper:
    """A server in this process, which can be slow, or answer nobody."""

    place = "nowhere"

    def __init__(self):
        self.epoch, self.entries, self.forgotten = 0, [], {}
        self.answers, self.sends = threading.Event(), threading.Event()
        self.answers.set()
        self.sends.set()
        self.held = 0  # answers on their way
        self.lose_answers = 0

    def exchange(self, epoch, after, most, keep_bytes, outputs):
        self.answers.wait()
        if epoch != self.epoch:
            return Answer(self.epoch, 1e3 * time.monotonic(), dict(self.forgotten))
        self.entries += outputs
        if self.lose_answers:
            self.lose_answers -= 1
            raise OSError("timed out")
        first = int(after)
        found = self.entries[first : first + most]
        answer = Answer(epoch, entries=[(b"%d" % i, o) for i, o in enumerate(found, first + 1)])
        self.held += 1
        self.sends.wait()
        self.held -= 1
        return answer

    def forget(self, epoch, forgettings):
        if not self.answers.is_set():
            raise OSError("timed out")
        self.epoch = max(int(1e3 * time.monotonic()), self.epoch, epoch or 0) + 1
        self.forgotten |= {name or self.epoch: prefix for name, prefix in forgettings}
        self.entries = [None] * len(self.entries)
        return self.epoch


def numbers(view):
    """The first tokens, over 1000, of the outputs that arrived at a view."""
    return [int(output.token_ids[0]) // 1000 for output in view.read()[1]]


@pytest.fixture
def shared():
    """A server and two views of what it has."""
    keeper = Keeper()
    return keeper, OutputStream(keeper, 1 << 20), OutputStream(keeper, 1 << 20)


def test_nothing_waits_for_a_server_that_does_not_answer(shared):
    keeper, view, other = shared
    keeper.answers.clear()
    for i in range(100):
        assert view.append("m", output(i))
        assert view.read() == ([], [])
    assert not view.sync(0.01)
    keeper.answers.set()
    sync(view, other)
    assert numbers(other) == [*range(100)]
    assert numbers(view) == []


def test_what_waits_is_bounded_and_the_oldest_goes_first():
    keeper = Keeper()
    keeper.answers.clear()
    view, other = OutputStream(keeper, 2_000), OutputStream(keeper, 1 << 20)
    for i in range(50):
        view.append("m", output(i))
        assert view._pending.nbytes <= 2_000
    view.append("m", output(50, 1_000))
    keeper.answers.set()
    sync(view, other)
    assert numbers(other) == []
    for i in range(50):
        other.append("m", output(i))
    sync(other, view)
    assert view._arrived.nbytes <= 2_000
    arrived = numbers(view)
    assert arrived == [*range(50 - len(arrived), 50)]
    assert 5 < len(arrived) < 20


def test_forgetting_reaches_what_others_had_finished_but_not_delivered(shared):
    keeper, view, other = shared
    view.append("m", output(0))
    sync(view, other)
    keeper.answers.clear()
    other.append("m", output(1))
    with pytest.raises(OSError, match="forgotten here, but the server at nowhere could not"):
        view.forget("")
    keeper.answers.set()
    keeper.forget(0, [(None, "")])  # a third process is heard
    sync(other, view)
    assert not other.append("m", output(3))
    assert other.read() == ([""], [])
    assert keeper.entries == [None]
    assert other.append("m", output(2))
    sync(other, view)
    assert numbers(view) == [2]


def test_an_old_forgetting_that_comes_back_after_an_own_one_is_heard():
    """Another process has told a restored server of it before this one's next exchange."""
    keeper = Keeper()
    view = OutputStream(keeper, 1 << 20)
    assert view.sync(WAIT)
    keeper.forgotten[1] = "a:"  # long before this process began
    view.forget("b:")
    assert view.sync(WAIT)
    assert view.read() == (["a:"], [])


def test_an_answer_from_before_the_own_forgetting_is_not_taken():
    keeper = Keeper()
    view = OutputStream(keeper, 1 << 20)
    assert view.sync(WAIT)
    keeper.sends.clear()
    wait_until(lambda: keeper.held)
    keeper.sends.set()
    wait_until(lambda: not keeper.held)
    keeper.sends.clear()
    keeper.entries.append(Output(b"x" * 16, 0, "m", output(7)))
    wait_until(lambda: keeper.held)
    view.forget("")
    keeper.sends.set()
    assert view.sync(WAIT)
    assert view.read() == ([], [])
    keeper.entries.append(Output(b"x" * 16, 1, "m", output(8)))
    assert view.sync(WAIT)
    assert numbers(view) == [8]


def test_a_view_that_nobody_holds_ends_its_thread():
    view = OutputStream(Keeper(), 1 << 20)
    thread = view._thread
    del view
    thread.join(WAIT)
    assert not thread.is_alive()


BULK = b"$1000\r\nabc"
GOOD = b"*4\r\n$1\r\n0\r\n*2\r\n:0\r\n:0\r\n*0\r\n*0\r\n"
ODD = {
    "OOM": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "LOADING": b"-LOADING Redis is loading the dataset in memory\r\n",
    "NOAUTH": b"-NOAUTH Authentication required.\r\n",
    "MOVED": b"-MOVED 5474 127.0.0.1:1\r\n",
    "READONLY": b"-READONLY You can't write against a read only replica.\r\n",
    "WRONGTYPE": b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
    "NOSCRIPT": b"-NOSCRIPT No matching script.\r\n",
    "text": b"+OK\r\n",
    "a number": b":5\r\n",
    "nothing": b"$-1\r\n",
    "no array": b"*-1\r\n",
    "too few parts": b"*1\r\n:1\r\n",
    "no number": GOOD.replace(b"$1\r\n0", b"$1\r\nx", 1),
    "no table": b"*4\r\n:1\r\n:1\r\n:1\r\n*0\r\n",
    "an odd table": b"*4\r\n:1\r\n:1\r\n*1\r\n$1\r\n7\r\n*0\r\n",
    "odd entries": b"*4\r\n$1\r\n0\r\n$1\r\n0\r\n*0\r\n*1\r\n:5\r\n",
    "a name that is none": GOOD[:-4] + b"*1\r\n*2\r\n:1\r\n*0\r\n",
    "cut short": BULK,
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "deep": b"*1\r\n" * 100_000,
    "bytes of no kind": bytes(range(256)),
    "more than was asked": b":1\r\n:2\r\n:3\r\n",
}


@needs_redis
@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
def test_no_answer_ends_the_exchange(answer, caplog):
    """A server that answers rightly later is served, and what it was called is logged once."""
    server = OddServer(answer)
    view = OutputStream(RedisServer(server.url), 1 << 20)
    view.append("m", output(0))
    wait_until(lambda: server.tries > 3)
    thread = view._thread
    assert thread.is_alive()
    assert view.read() == ([], [])
    if not answer.startswith(b":"):  # the number of a forgetting
        with pytest.raises(OSError, match="forgotten here, but the server at"):
            view.forget("nobody:")
    server.answer = GOOD
    assert view.sync(WAIT)
    assert view._thread is thread
    assert [r.levelname for r in caplog.records if server.place in r.message].count("WARNING") == 1
    server.close()


@needs_redis
def test_a_server_that_refuses_is_asked_ever_less_often(monkeypatch):
    """Whatever is written meanwhile, and with one output each time."""
    server, pauses = OddServer(ODD["OOM"]), []

    class Pause(threading.Event):
        def wait(self, seconds):
            woken = super().wait(0.02)
            pauses.append((seconds, woken))

    own = vars(threading) | {"Event": Pause}
    monkeypatch.setattr(stream, "threading", SimpleNamespace(**own))
    view = OutputStream(RedisServer(server.url), 1 << 20)
    wait_until(lambda: pauses and view.append("m", output(0, 1000)) and len(pauses) > 8)
    for failures, (seconds, woken) in enumerate(pauses[:8], 1):
        longest = min(stream._PERIOD * 2**failures, stream._LONGEST_PAUSE)
        assert longest / 2 <= seconds <= longest
        assert not woken
    assert server.bytes_received < server.tries * (4_000 + 500) + 10_000
    server.close()


def test_faults_are_told_and_the_processs_own_random_numbers_are_left_to_its_caller(caplog):
    """Such as epochs that never stay."""
    keeper, before = Keeper(), random.getstate()
    keeper.lose_answers = 3
    view = OutputStream(keeper, 1 << 20)
    view.append("m", output(0))
    assert view.sync(WAIT)
    assert random.getstate() == before
    keeper.exchange = lambda *_: Answer(time.monotonic_ns(), 0.0, {})
    wait_until(lambda: view._failures > 2)
    assert "got another one in every answer" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_though_another_thread_held_the_view():
    view = OutputStream(Keeper(), 1 << 20)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(view._changed.acquire).result()
        child = os.fork()
        if not child:
            os._exit(0 if view.read() == ([], []) else 1)
        # The child would wait for a thread that it does not have.
        deadline = time.monotonic() + WAIT
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
        assert ended == (child, 0)
        pool.submit(view._changed.release).result()
