"""Outputs shared by a real server: lost by nobody's death, and forgotten."""

import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hf_retrieval_assist.extensions.redis.redis_server import RedisServer
from hf_retrieval_assist.memory.output_memory import OutputMemory
from hf_retrieval_assist.memory.outputs import Output
from tests.support.memories import WAIT, known, output, wait_until
from tests.support.redis_process import PASSWORD, RedisProcess, needs_redis
from tests.support.stores import sync

pytestmark = needs_redis


@pytest.fixture
def server(tmp_path, request):
    process = RedisProcess(tmp_path, **getattr(request, "param", {}))
    yield process
    process.close()


server_with = partial(pytest.mark.parametrize, "server", indirect=True)


def test_a_server_that_dies_loses_nothing_and_outputs_are_delivered_later(server, caplog):
    writer, reader = OutputMemory(url=server.url), OutputMemory(url=server.url)
    for round_ in range(3):
        for i in range(10):
            writer.add(output(20 * round_ + i), "m")
        assert writer.sync(WAIT)
        server.kill()
        for i in range(10, 20):
            writer.add(output(20 * round_ + i), "m")
        assert not writer.sync(0.1)
        server.start()
    sync(writer, reader)
    assert known(writer) == known(reader) == Counter(range(60))
    away = [r.message for r in caplog.records if "outputs are not shared while" in r.message]
    assert away
    assert f"127.0.0.1:{server.port}" in away[0]


def test_a_server_that_hangs_is_waited_for_by_nobody(server):
    writer, reader = OutputMemory(url=server.url), OutputMemory(url=server.url)
    assert writer.sync(WAIT)
    server.hang()
    for i in range(200):
        writer.add(output(i), "m")
    assert known(writer) == Counter(range(200))
    with pytest.raises(OSError, match="forgotten here, but the server at 127"):
        reader.forget()
    server.go_on()
    sync(writer, reader)
    # The order to forget was in the hung server's mail: whether it or the outputs came first is
    # its affair, but both sides agree.
    assert known(reader) == known(writer)


def test_an_exchange_that_fails_leaves_a_forgetting_on_its_way_alone(server, monkeypatch):
    memory = OutputMemory(url=server.url)
    assert memory.sync(WAIT)
    server.hang()
    with ThreadPoolExecutor(1) as pool:
        forgetting = pool.submit(memory.forget)
        pool_of_connections = memory._log.server._client.connection_pool
        wait_until(lambda: pool_of_connections._in_use_connections)
        monkeypatch.setattr(memory._log.server, "exchange", lambda *_: 1 / 0)
        wait_until(lambda: memory._log._failures)
        server.go_on()
        forgetting.result()


def test_forgetting_outlives_a_server_that_lost_everything(server):
    memory = OutputMemory(url=server.url)
    memory.add(output(0), "m")
    memory.forget()
    forgotten = server.client.hgetall("{hf-retrieval-assist}:2:forgotten")
    server.client.flushall()
    memory.add(output(1), "m")
    assert memory.sync(WAIT)
    assert server.client.hgetall("{hf-retrieval-assist}:2:forgotten") == forgotten
    other = OutputMemory(url=server.url)
    assert other.sync(WAIT)
    assert known(other) == known(memory) == Counter([1])


@pytest.mark.parametrize("away", [True, False])
def test_what_is_finished_before_the_first_exchange_is_delivered(server, away):
    OutputMemory(url=server.url).forget()  # once, long ago
    time.sleep(0.2)  # a process takes itself for somewhat older than it is
    if away:
        server.kill()
    for i in range(10):
        memory = OutputMemory(url=server.url)
        memory.add(output(i), "m")
        if away and not i:
            assert not memory.sync(0.05)
            server.start()
        assert memory.sync(WAIT)
        assert known(memory)[i] == 1
    assert known(memory) == Counter(range(10))


def test_what_was_forgotten_before_the_first_exchange_is_not_delivered(server):
    writer = OutputMemory(url=server.url)
    assert writer.sync(WAIT)
    server.hang()
    late = OutputMemory(url=server.url)
    late.add(output(5), "m")
    time.sleep(0.05)
    server.go_on()
    # The exchange that was under way may be answered first.
    writer.forget()
    assert late.sync(WAIT)
    assert known(late) == Counter()
    assert server.client.xlen("{hf-retrieval-assist}:2:outputs") == 0


@server_with([{"cluster": True}])
def test_who_was_on_its_way_while_all_was_forgotten_is_told(server):
    """A node of a cluster says so."""
    server.client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
    wait_until(lambda: server.client.cluster("info")["cluster_state"] == "ok")
    memories = [OutputMemory(url=server.url) for _ in range(2)]
    for i, memory in enumerate(memories):
        memory.add(output(i), "m")
    sync(*memories)
    assert [known(memory) for memory in memories] == [Counter([0, 1])] * 2
    memories[0].forget()
    assert memories[1].sync(WAIT)
    assert known(memories[1]) == Counter()
    late, other = RedisServer(server.url), RedisServer(server.url)
    epoch, send = late.exchange(None, b"0", 1, 1 << 20, []).epoch, late._exchange

    def send_late(**arguments):
        other.forget(None, [(None, "")])
        return send(**arguments)

    late._exchange = send_late
    found = late.exchange(epoch, b"0", 1, 1 << 20, [Output(b"x" * 16, 0, "m", output(7))])
    assert found.forgotten[found.epoch] == ""
    late._exchange = send
    assert late.exchange(found.epoch, b"0", 1, 1 << 20, []).entries == []


def test_new_outputs_show_though_the_servers_clock_was_set_back(server):
    writer, reader = OutputMemory(url=server.url), OutputMemory(url=server.url)
    name = "{hf-retrieval-assist}:2:outputs"
    good = {"by": b"x" * 16, "model": "m"}
    server.client.xadd(name, {**good, "seq": 0, "ids": output(0).tobytes()}, id="9" * 14)
    assert reader.sync(WAIT)
    assert known(reader) == Counter([0])
    server.client.flushall()
    writer.add(output(1), "m")  # named by a time that is earlier by far
    sync(writer, reader)
    assert known(reader) == Counter([0, 1])


def test_the_documented_permissions_suffice(server):
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text()
    (rule,) = re.findall(r"ACL SETUSER replica (.*)", page)
    server.client.execute_command(
        "ACL", "SETUSER", "replica", *rule.replace("PASSWORD", "pw").split()
    )
    memory = OutputMemory(url=f"redis://replica:pw@127.0.0.1:{server.port}/1")
    memory.add(output(1), "m")
    assert memory.sync(WAIT)
    memory.forget()
    assert memory.sync(WAIT)


@server_with([{"password": PASSWORD}])
def test_the_servers_stream_is_bounded_in_bytes(server):
    """A server that wants a password."""
    memory = OutputMemory(max_bytes=240_000, url=server.url)
    for i in range(100):
        memory.add(output(i, 100), "m")
    assert memory.sync(WAIT)
    kept = server.entries()
    assert 15_000 < int(server.client.hget("{hf-retrieval-assist}:2:state", "bytes")) <= 20_000
    assert np.frombuffer(kept[-1][b"ids"], "<u4").tolist() == output(99, 100).tolist()
    assert not OutputMemory(url=f"redis://127.0.0.1:{server.port}").sync(0.2)


def test_what_others_put_into_the_stream_is_skipped(server):
    memory = OutputMemory(url=server.url)
    name, good = "{hf-retrieval-assist}:2:outputs", output(1).tobytes()
    bad = [
        {"by": b"x" * 16, "seq": "one", "model": "m", "ids": good},
        {"by": b"x" * 16, "seq": 0, "model": "m", "ids": good[:-1]},
        {"by": b"x" * 16, "seq": 0, "ids": good},
        {"something": "else"},
    ]
    for fields in bad:
        server.client.xadd(name, fields)
    foreign = np.array([1, 2**31, 2, 2**32 - 1], "<u4").tobytes()
    server.client.xadd(name, {"by": b"y" * 16, "seq": 0, "model": b"m\xff", "ids": foreign})
    server.client.xadd(name, {"by": b"x" * 16, "seq": 1, "model": "m", "ids": good})
    assert memory.sync(WAIT)
    assert known(memory) == Counter([1])
    assert memory.tree("m\ufffd").token_count == 2


@pytest.mark.parametrize("key", ["outputs", "state", "forgotten"])
def test_a_key_of_another_kind_stops_sharing_and_nothing_else(server, key):
    memory = OutputMemory(url=server.url)
    assert memory.sync(WAIT)
    name = f"{{hf-retrieval-assist}}:2:{key}"
    server.client.delete(name)
    server.client.lpush(name, "something else")
    memory.add(output(1), "m")
    memory.namespace("a").add(output(2), "m")
    assert known(memory) == Counter([1])
    with pytest.raises(OSError, match="could not be told"):
        memory.namespace("a").forget()
    server.client.delete(name)
    assert memory.sync(WAIT)
    other = OutputMemory(url=server.url)
    assert other.sync(WAIT)
    assert known(other) == Counter([1])
    # Where forgettings alone cannot be kept, the tenant's output may have come before.
    assert len(other.namespace("a")) <= (key == "forgotten")


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
    assert {url: RedisServer(url).place for url in places} == places
