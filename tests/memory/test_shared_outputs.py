"""Outputs that several processes share, in a file or on a server: each learnt once, none lost."""

import os
import time
from collections import Counter

import numpy as np
import pytest

from tests.support.memories import WAIT, check_memory, known, output, random_output
from tests.support.redis_process import needs_redis
from tests.support.stores import OnDisk, OnServer, start_writer, sync


def keeping_server(folder):
    """Which keeps what it acknowledged through its own death."""
    return OnServer(folder, appendonly="yes")


@pytest.fixture(params=[OnDisk, pytest.param(keeping_server, marks=needs_redis)])
def store(request, tmp_path):
    made = request.param(tmp_path)
    yield made
    made.close()


def test_memories_share_outputs_and_each_learns_them_once(store):
    memories = [store.view() for _ in range(3)]
    for i in range(30):
        memories[i % 3].add(output(i), "m")
    sync(*memories)
    for memory in [*memories, late := store.view()]:
        sync(late)
        assert known(memory) == Counter(range(30))
        check_memory(memory)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_writes_outputs_of_its_own(store):
    memory = store.view()
    memory.add(output(0), "m")
    sync(memory)
    child = os.fork()
    if not child:
        memory.add(output(1), "m")
        os._exit(0 if memory.sync(WAIT) and known(memory) >= Counter([0, 1]) else 1)
    memory.add(output(2), "m")
    assert os.waitpid(child, 0) == (child, 0)
    sync(memory)
    assert known(memory) == Counter(range(3))


def test_starting_an_output_learns_a_part_of_what_others_have_finished(store):
    rng, writer, reader = np.random.default_rng(0), store.view(), store.view()
    for _ in range(50):
        writer.add(random_output(rng, 1_000))
    sync(writer)
    assert reader._log.sync(30)
    reader.start()
    assert 16 <= len(reader) <= 17
    reader.refresh()
    assert len(reader) == 50


@pytest.mark.slow
def test_two_processes_write_and_nothing_is_lost(store):
    """The end of a process waits for its outputs."""
    writers = [start_writer(store, first, 200, say=False) for first in (0, 1_000)]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    sync(reader := store.view())
    assert known(reader) == Counter([*range(200), *range(1_000, 1_200)])
    numbers = [int(reader.tree("m").tokens(o.sequence)[0]) // 1_000 for o in reader._outputs]
    assert [n for n in numbers if n < 1_000] == [*range(200)]


@pytest.mark.slow
def test_processes_that_are_killed_lose_nothing_that_others_could_read(store):
    rng = np.random.default_rng(3)
    said, forgotten = [], set()
    for kill in range(20):
        writer = start_writer(store, 10_000 * kill, 10_000)
        said.append(int(writer.stdout.readline()))
        time.sleep(rng.uniform(0, 0.1))
        if kill % 5 == 3 and isinstance(store, OnServer):
            store.process.kill()
            writer.kill()
            store.process.start()
        writer.kill()
        said += map(int, writer.stdout.read().split())
        writer.wait()
        if kill % 7 == 1:
            store.view().forget()
            forgotten |= set(said)
    reader = store.view(max_bytes=1 << 30)
    sync(reader)
    times = known(reader)
    assert times.keys() >= set(said) - forgotten
    assert not times.keys() & forgotten
    assert set(times.values()) == {1}
    for made in reader._outputs:
        tokens = reader.tree("m").tokens(made.sequence).tolist()
        number = tokens[0] // 1_000
        assert tokens == [*range(1_000 * number, 1_000 * number + 30 + number % 100)]
    assert len(said) > 20
