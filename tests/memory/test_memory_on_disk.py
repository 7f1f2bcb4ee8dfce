"""The log of an output memory: several processes, damage."""

import os
import shutil
import sqlite3
import stat
import threading
import warnings
from contextlib import contextmanager

import numpy as np
import pytest

from hf_retrieval_assist.memory import log
from hf_retrieval_assist.memory.log import Output, OutputLog
from hf_retrieval_assist.memory.output_memory import OutputMemory
from tests.support.memories import count, logged, wait_until

needs_posix = pytest.mark.skipif(os.name == "nt", reason="links, modes and limits are POSIX's")
SECRET = [777777] * 8


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log"


def execute(path, *statement):
    with sqlite3.connect(path) as database:
        database.execute(*statement)
    database.close()


def on_disk(path, tokens=SECRET):
    """Whether the bytes of token ids are in any file of the folder of a log."""
    wanted = np.array(tokens, "<i4").tobytes()
    files = [file for file in path.parent.iterdir() if file.is_file()]
    return any(wanted in file.read_bytes() for file in files)


def test_only_the_newest_outputs_are_kept(path):
    """What made room leaves no byte."""
    reader, writer = OutputLog(path, 20_000), OutputLog(path, 20_000)
    seen = []
    for view in (reader, writer):
        assert view.read() == (False, [])
    assert writer.append(Output("m", np.array(SECRET, np.int32)))
    for i in range(300):
        assert writer.append(Output("m", np.full(100, i, np.int32)))
        assert path.stat().st_size <= 2 * 20_000 + 4 * 4096
        if i % 7 == 0:
            seen += [int(output.token_ids[0]) for output in reader.read().outputs]
    seen += [int(output.token_ids[0]) for output in reader.read().outputs]
    assert seen == [SECRET[0], *range(300)]
    assert writer.read() == (False, [])
    assert not on_disk(path)
    kept = [tokens[0] for tokens in logged(path)]
    assert kept == list(range(300 - len(kept), 300))
    assert 15 <= len(kept) <= 100


# Forgetting.


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", [0, 20, 30, 100, 5000])
def test_a_damaged_log_can_be_forgotten(path, place):
    memory, other = OutputMemory(path=path), OutputMemory(path=path)
    memory.add(SECRET)
    running = other.start()
    running.extend([*SECRET, 888888])
    data = bytearray(path.read_bytes())
    data[place : place + 9] = b"\xff" * 9
    path.write_bytes(data)
    memory.forget()
    assert not on_disk(path)
    running.close()
    other.add([3, 4])
    memory.add([1, 2])
    assert logged(path) == [[3, 4], [1, 2]]
    assert not on_disk(path)


def exchanged(path):
    os.replace(path.with_name("copy"), path)


def deleted(path):
    path.unlink()


@pytest.mark.parametrize("change", [exchanged, deleted])
def test_a_log_that_changes_under_running_processes_goes_on(path, change):
    first, second = OutputMemory(path=path), OutputMemory(path=path)
    first.add([1, 2])
    shutil.copy(path, path.with_name("copy"))
    first.add([8, 9])
    change(path)
    for memory, text in ((OutputMemory(path=path), [3, 4]), (first, [5, 6])):
        memory.add(text)
    second.refresh()
    assert [count(second, text) for text in ([3, 4], [5, 6])] == [1, 1]
    assert logged(path) == [*([] if change is deleted else [[1, 2]]), [3, 4], [5, 6]]


def test_forgetting_that_fails_says_so(path, monkeypatch):
    memory = OutputMemory(path=path)
    memory.add([1, 2])
    monkeypatch.setattr(log, "_FORGETTING", 0.05)
    with holding(path), pytest.raises(OSError, match="log: database is locked; where its file"):
        memory.forget()
    assert len(memory) == 0


@pytest.mark.parametrize("name", ["SQLITE_IOERR_LOCK", "SQLITE_IOERR_RDLOCK", "SQLITE_PERM"])
def test_a_file_system_without_locks_is_named_with_what_to_do(tmp_path, monkeypatch, name):
    def without_locks(*arguments, **options):
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = name
        raise error

    monkeypatch.setattr(sqlite3, "connect", without_locks)
    with pytest.raises(OSError, match=r"log: disk I/O error; .* no locks, choose a local path"):
        OutputMemory(path=tmp_path / "log")


# Other processes.


@contextmanager
def holding(path, kind="EXCLUSIVE"):
    """Another connection has the log for itself, or is about to write to it."""
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute(f"BEGIN {kind}")
    yield
    database.close()


@pytest.fixture
def waits(monkeypatch):
    """Seconds that connections to a log waited for others at most, the test's own left out."""
    found, connect = [], sqlite3.connect

    def connected(*arguments, **options):
        found.extend(options[name] for name in ("timeout",) if name in options)
        return connect(*arguments, **options)

    monkeypatch.setattr(sqlite3, "connect", connected)
    return found


def test_a_log_that_is_held_is_waited_for_once_and_nobody_who_drafts_waits(
    path, monkeypatch, waits
):
    monkeypatch.setattr(log, "_PATIENCE", 0.5)
    memory = OutputMemory(path=path)
    memory.add([1, 2])
    waits.clear()
    with holding(path), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        waiting = threading.Thread(target=memory.add, args=([3, 4],))
        waiting.start()
        wait_until(lambda: 0.5 in waits)
        running = memory.start()
        assert count(memory, [1, 2]) == 1
        assert waiting.is_alive()
        waiting.join()
        for i in range(10):
            memory.add([i, i])
    (warning,) = found
    assert "not kept on disk for now" in str(warning.message)
    assert "database is locked" in str(warning.message)
    assert [wait for wait in waits if wait] == [0.5]
    running.extend([5, 6])
    running.close()
    assert len(memory) == 13
    assert logged(path) == [[1, 2], [5, 6]]


# Files that are damaged.


@pytest.mark.filterwarnings("error")
def test_a_log_that_is_damaged_in_use_ends_nothing(path):
    memory = OutputMemory(path=path)
    memory.add([1, 2])
    good = path.read_bytes()
    path.write_bytes(b"something" * 1_000)
    with pytest.warns(UserWarning, match="expected a log of outputs, .* got file is not a datab"):
        running = memory.start()
    running.extend([3, 4])
    running.close()
    memory.refresh()
    assert count(memory, [1, 2]) == count(memory, [3, 4]) == 1
    path.write_bytes(good)
    memory.add([5])
    assert logged(path) == [[1, 2], [5]]
    path.write_bytes(b"something" * 1_000)
    with pytest.warns(UserWarning, match="not kept on disk for now"):
        memory.add([6])


def test_other_kinds_of_files_are_refused(tmp_path):
    (tmp_path / "text").write_bytes(b"something else altogether, long enough")
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT x FROM c"
    execute(tmp_path / "other", f"CREATE VIEW forgotten AS {endless}")
    OutputMemory(path=tmp_path / "newer").add([1])
    execute(tmp_path / "newer", "ALTER TABLE outputs ADD COLUMN more")
    for name, message in (
        ("text", "file is not a database"),
        ("other", "a database with other tables"),
        ("newer", "a database with other tables"),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected a log of outputs, .*{message}"):
            OutputMemory(path=tmp_path / name)
    with pytest.raises(OSError, match="unable to open database file"):
        OutputMemory(path=tmp_path)


@pytest.mark.parametrize(
    "row",
    [
        ("m", b"odd"),
        ("m", np.array([1, -1], "<i4").tobytes()),
        ("m", "text"),
        (b"m", b"\1\0\0\0"),
        (None, None),
        ("m", bytes(1 << 25)),
    ],
)
def test_rows_that_nobody_wrote_are_refused_and_can_be_forgotten(path, row):
    memory = OutputMemory(path=path)
    memory.add([1, 2])
    execute(path, "INSERT INTO outputs (model, ids) VALUES (?, ?)", row)
    with pytest.raises(ValueError, match=r"log: expected a log of outputs, .*, got"):
        OutputMemory(path=path)
    memory.forget()
    assert len(OutputMemory(path=path)) == 0
    assert logged(path) == []


# Links and modes.


@needs_posix
def test_a_link_to_a_log_is_the_log(tmp_path):
    """Forgetting empties other links too and leaves no byte."""
    (tmp_path / "data").mkdir()
    real, link = tmp_path / "data" / "log", tmp_path / "link"
    link.symlink_to(real)
    OutputMemory(path=link).add(SECRET)
    assert logged(real) == [SECRET]
    os.link(real, tmp_path / "data" / "other")
    assert on_disk(real)
    OutputMemory(path=link).forget()
    assert link.is_symlink()
    assert logged(real) == []
    assert not on_disk(real)


@needs_posix
@pytest.mark.parametrize("use", [lambda memory: memory.refresh(), lambda memory: memory.add([3])])
def test_a_log_is_closed_to_others_from_the_beginning_and_where_it_was_not(path, use):
    memory = OutputMemory(path=path)
    memory.add([1, 2])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    use(memory)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
