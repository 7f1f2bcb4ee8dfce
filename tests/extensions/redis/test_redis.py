"""Outputs shared by a real server: lost by nobody's death, and forgotten."""

import re
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hf_retrieval_assist.extensions.redis import redis_server, stream
from hf_retrieval_assist.extensions.redis.redis_server import checked_place
from hf_retrieval_assist.extensions.redis.stream import OutputStream
from hf_retrieval_assist.memory.log import Output
from hf_retrieval_assist.memory.output_memory import OutputMemory
from tests.support.memories import WAIT, known, output, wait_until
from tests.support.redis_process import PASSWORD, OddServer, RedisProcess, needs_redis
from tests.support.stores import sync

pytestmark = needs_redis

OUTPUTS, STATE = (f"{{hf-retrieval-assist}}:3:{key}" for key in ("outputs", "state"))


@pytest.fixture(autouse=True)
def brisk(monkeypatch):
    monkeypatch.setattr(stream, "_PERIOD", 0.01)
    monkeypatch.setattr(stream, "_AWAY", 0.05)


@pytest.fixture
def server(tmp_path, request):
    process = RedisProcess(tmp_path, **getattr(request, "param", {}))
    yield process
    process.close()


server_with = partial(pytest.mark.parametrize, "server", indirect=True)


def test_a_server_that_dies_loses_nothing_and_outputs_are_delivered_later(server, caplog):
    writer, reader = OutputMemory(url=server.url), OutputMemory(url=server.url)
    for i in range(10):
        writer.add(output(i), "m")
    assert writer.sync(WAIT)
    server.kill()
    for i in range(10, 20):
        writer.add(output(i), "m")
    assert not writer.sync(0.1)
    server.start()
    sync(writer, reader)
    assert known(writer) == known(reader) == Counter(range(20))
    away = [r.message for r in caplog.records if "outputs are not shared while" in r.message]
    assert away
    assert f"127.0.0.1:{server.port}" in away[0]


def test_a_server_that_hangs_is_waited_for_by_nobody_but_who_forgets(server, monkeypatch):
    monkeypatch.setattr(redis_server, "_TIMEOUT", 0.5)
    writer, reader = OutputMemory(url=server.url), OutputMemory(url=server.url)
    assert writer.sync(WAIT)
    server.hang()
    for i in range(100):
        writer.add(output(i), "m")
    assert known(writer) == Counter(range(100))
    with pytest.raises(OSError, match="forgotten here, but the server at 127"):
        reader.forget()
    server.go_on()
    sync(writer, reader)
    # The order to forget was in the hung server's mail: whether it or the outputs came first is
    # its affair, but both sides agree.
    assert known(reader).keys() == known(writer).keys()  # some may have come twice


def test_what_was_forgotten_meanwhile_is_not_delivered(server):
    """By a process that has heard of nothing yet, and had the server's answer before."""
    memory, other = OutputMemory(url=server.url), OutputMemory(url=server.url)
    memory.namespace("a").add(output(1), "m")
    sync(memory, other)
    memory._log._network.acquire()  # its exchanges wait
    memory.namespace("a").add(output(2), "m")
    other.namespace("a").forget()
    memory._log._network.release()
    sync(memory, other)
    assert server.entries() == []
    assert len(memory) == len(other) == 0
    memory.add(output(3), "m")
    sync(memory, other)
    assert known(memory) == known(other) == Counter([3])


@pytest.mark.parametrize("last", ["0-1", "9" * 14])
def test_a_server_that_lost_everything_and_its_clock_is_read_from_the_beginning(server, last):
    writer, reader = OutputMemory(url=server.url), OutputMemory(url=server.url)
    sync(writer, reader)
    fields = {"by": b"x" * 16, "model": "m", "ids": output(0).tobytes()}
    server.client.xadd(OUTPUTS, fields, id=last)
    assert reader.sync(WAIT)
    assert known(reader) == Counter([0])
    server.client.flushall()
    sync(writer, reader)
    writer.add(output(1), "m")
    sync(writer, reader)
    assert known(reader) == Counter([1])


def test_the_documented_permissions_suffice(server):
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text()
    (rule,) = re.findall(r"ACL SETUSER replica (.*)", page)
    server.client.execute_command(
        "ACL", "SETUSER", "replica", *rule.replace("PASSWORD", "pw").split()
    )
    memory = OutputMemory(240_000, url=f"redis://replica:pw@127.0.0.1:{server.port}/1")
    for i in range(100):
        memory.add(output(i, 100), "m")
    assert memory.sync(WAIT)
    memory.forget()
    assert memory.sync(WAIT)


@server_with([{"cluster": True}])
def test_a_node_of_a_cluster_serves(server):
    server.client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
    wait_until(lambda: server.client.cluster("info")["cluster_state"] == "ok")
    memories = [OutputMemory(url=server.url) for _ in range(2)]
    for i, memory in enumerate(memories):
        memory.add(output(i), "m")
    sync(*memories)
    assert [known(memory) for memory in memories] == [Counter([0, 1])] * 2
    memories[0].forget()
    sync(*memories)
    assert known(memories[1]) == Counter()


@server_with([{"password": PASSWORD}])
def test_the_servers_stream_and_what_waits_are_bounded_in_bytes(server):
    """A server that wants a password."""
    memory = OutputMemory(max_bytes=240_000, url=server.url)
    assert memory.sync(WAIT)
    memory._log._network.acquire()
    for i in range(100):
        memory.add(output(i, 100), "m")
    waiting = len(memory._log._pending.outputs)
    assert 5 < waiting < 50
    memory._log._network.release()
    assert memory.sync(WAIT)
    assert len(server.entries()) == waiting
    for i in range(100, 160):
        memory.add(output(i, 100), "m")
        if i % 10 == 9:
            assert memory.sync(WAIT)
    kept = server.entries()
    assert 15_000 < int(server.client.hget(STATE, "bytes")) <= 20_000
    assert np.frombuffer(kept[-1][b"ids"], "<i4").tolist() == output(159, 100).tolist()
    assert memory.nbytes <= 240_000 * 5 // 6
    assert not OutputMemory(url=f"redis://127.0.0.1:{server.port}").sync(0.2)


def test_what_others_put_into_the_stream_is_skipped(server):
    memory, good = OutputMemory(url=server.url), output(1).tobytes()
    assert memory.sync(WAIT)
    bad = [
        {"by": b"x", "model": "m", "ids": good[:-1]},
        {"by": b"x", "model": "m", "ids": np.array([1, -1], "<i4").tobytes()},
        {"by": b"x", "model": b"m\xff", "ids": good},
        {"by": b"x", "ids": good},
        {"something": "else"},
    ]
    for fields in [*bad, {"by": b"x", "model": "m", "ids": good}]:
        server.client.xadd(OUTPUTS, fields)
    assert memory.sync(WAIT)
    assert known(memory) == Counter([1])
    assert len(memory) == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://example.org/0", "expected a password for a host other than this one, got exam"),
        ("rediss://user@10.0.0.1:99", "expected a password .* got 10.0.0.1"),
        ("http://localhost", "expected redis://, rediss:// or unix://, got http"),
        ("localhost:6379", "expected redis://"),
        ("redis:///0?host=example.org", "expected no options but .*, got host"),
        ("redis://localhost?nosuch=1", "expected no options but .*, got nosuch"),
        ("redis://localhost?decode_responses=True", "expected no options .* got decode_responses"),
        ("redis://example.org?password=", "expected a password .* got example.org"),
        ("redis://example%2Eorg", "expected a password .* got example.org"),
    ],
)
def test_urls_that_are_refused(url, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        OutputMemory(url=url)
    with pytest.raises(ValueError, match="path: expected none beside url"):
        OutputMemory(path=tmp_path / "log", url="redis://localhost")


def test_urls_that_are_taken():
    places = {
        "redis://:secret@example.org:1/2": "example.org:1",
        "rediss://user:secret@example.org": "example.org",
        "redis://example.org?password=secret": "example.org",
        "redis://[::1]:7": "::1:7",
        "unix://user:secret@/run/redis.sock": "/run/redis.sock",
    }
    assert {url: checked_place(url) for url in places} == places


# Servers that answer otherwise.

GOOD = b"*2\r\n$1\r\nm\r\n*0\r\n"
ODD = {
    "OOM": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "a number": b":5\r\n",
    "odd entries": b"*2\r\n$1\r\n0\r\n*1\r\n:5\r\n",
    "a mark that is none": b"*2\r\n:7\r\n*0\r\n",
    "cut short": b"$1000\r\nabc",
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "deep": b"*1\r\n" * 100_000,
}


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
def test_no_answer_ends_the_exchange(answer, caplog):
    """A server that answers rightly later is served, and what it was called is logged once."""
    server = OddServer(answer)
    view = OutputStream(server.url, 1 << 20)
    view.append(Output("m", output(0)))
    wait_until(lambda: server.tries > 2)
    thread = view._thread
    assert thread.is_alive()
    assert view.read() == (False, [])
    if not answer.startswith(b"+"):  # as a mark is
        with pytest.raises(OSError, match="forgotten here, but the server at"):
            view.forget("nobody:")
    server.answer = GOOD
    assert view.sync(WAIT)
    assert view._thread is thread
    assert [r.levelname for r in caplog.records if server.place in r.message].count("WARNING") == 1
    server.close()


def test_a_view_that_nobody_holds_ends_its_thread(server):
    view = OutputStream(server.url, 1 << 20)
    thread = view._thread
    del view
    thread.join(WAIT)
    assert not thread.is_alive()
