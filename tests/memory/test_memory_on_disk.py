"""The log of an output memory: several processes, damage, full disks, sudden death."""

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from hf_retrieval_assist.memory import log
from hf_retrieval_assist.memory.log import OutputLog
from hf_retrieval_assist.memory.output_memory import OutputMemory
from tests.support.memories import count, logged

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
    wanted = np.array(tokens, "<u4").tobytes()
    files = [file for file in path.parent.iterdir() if file.is_file()]
    return any(wanted in file.read_bytes() for file in files)


def test_only_the_newest_outputs_are_kept(path):
    """What made room leaves no byte."""
    reader, writer = OutputLog(path, 20_000), OutputLog(path, 20_000)
    writer.append("m", np.array(SECRET, np.int32))
    seen = []
    for i in range(1_000):
        assert writer.append("m", np.full(100, i, np.int32))
        assert path.stat().st_size <= 2 * 20_000 + 4 * 4096
        if i % 7 == 0:
            seen += [int(output.token_ids[0]) for output in reader.read()[1]]
    seen += [int(output.token_ids[0]) for output in reader.read()[1]]
    assert seen == [SECRET[0], *range(1_000)]
    assert not on_disk(path)
    kept = [tokens[0] for tokens in logged(path)]
    assert kept == list(range(1_000 - len(kept), 1_000))
    assert 30 <= len(kept) <= 100


# Forgetting.


# Byte 18 of the header says that the file must not be written to, 43 that no table ever changed.
DAMAGE = [*((place, b"\xff" * 9) for place in (0, 20, 30, 100, 5000)), (18, b"\xff"), (43, b"\0")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("place", "damage"), DAMAGE)
@pytest.mark.parametrize("begun", ["before", "after", "with an older copy"])
def test_a_damaged_log_can_be_forgotten(path, place, damage, begun):
    memory, other = OutputMemory(path=path), OutputMemory(path=path)
    memory.add(SECRET)
    running = other.start()
    running.extend([*SECRET, 888888])
    data = bytearray(path.read_bytes())
    data[place : place + len(damage)] = damage
    if begun == "with an older copy":
        memory.forget()
    path.write_bytes(data)
    if begun == "after":
        with suppress(ValueError):
            memory = OutputMemory(path=path)
            memory.add([1, 2])
    memory.forget()
    assert not on_disk(path)
    running.close()
    other.add([3, 4])
    memory.add([1, 2])
    assert logged(path) == [[3, 4], [1, 2]]
    assert not on_disk(path)


@pytest.mark.parametrize("damaged", [False, True])
def test_running_outputs_stay_forgotten_though_they_end_while_the_log_is_emptied(
    path, monkeypatch, damaged
):
    first, second = OutputMemory(path=path), OutputMemory(path=path)
    running = second.start()
    running.extend(SECRET)
    if damaged:
        path.write_bytes(b"something" * 1_000)
    transaction, begun = first._log._transaction, []

    def after_emptying():
        begun.append(True)
        if len(begun) == 2:
            running.close()
        return transaction()

    monkeypatch.setattr(first._log, "_transaction", after_emptying)
    first.forget()
    assert running.finished
    second.add([1, 2])
    assert logged(path) == [[1, 2]]
    assert not on_disk(path)


def restored(path):
    """A log becomes an older copy of itself under running processes."""
    shutil.copy(path.with_name("copy"), path)


def exchanged(path):
    os.replace(path.with_name("copy"), path)


def deleted(path):
    for file in path.parent.iterdir():
        file.unlink()


@pytest.mark.parametrize("change", [restored, exchanged, deleted])
def test_a_log_that_changes_under_running_processes_is_read_anew(path, change):
    first, second = OutputMemory(path=path), OutputMemory(path=path)
    first.add([1, 2])
    shutil.copy(path, path.with_name("copy"))
    for i in range(10, 30):
        first.add([i, i])
    second.refresh()
    change(path)
    third = OutputMemory(path=path)
    third.add([3, 4])
    first.add([5, 6])
    kept = [] if change is deleted else [[1, 2]]
    for memory in (first, second, third):
        memory.refresh()
        assert [count(memory, t) for t in ([3, 4], [5, 6])] == [1, 1]
        assert len(memory) == (len(kept) + 2 if memory is third else 23)
    assert logged(path) == [*kept, [3, 4], [5, 6]]
    # An older copy with as many changes.
    shutil.copy(path, path.with_name("copy"))
    second.add([7, 8])
    restored(path)
    first.add([9, 9])
    second.add([6, 6])
    assert logged(path) == [*kept, [3, 4], [5, 6], [9, 9], [6, 6]]


def test_a_log_that_is_replaced_while_an_output_is_written_has_it(tmp_path, monkeypatch):
    path, insert = tmp_path / "log", OutputLog._insert

    def slowly(*arguments):
        insert(*arguments)
        monkeypatch.undo()
        path.unlink()

    view = OutputLog(path, 1 << 20)
    monkeypatch.setattr(OutputLog, "_insert", slowly)
    assert view.append("m", np.array([1, 2], np.int32))
    assert logged(path) == [[1, 2]]


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
def holding(path):
    """Another connection has the log for itself."""
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute("BEGIN EXCLUSIVE")
    yield
    database.close()


def test_a_log_that_is_held_is_waited_for_once_and_nobody_who_drafts_waits(path, monkeypatch):
    monkeypatch.setattr(log, "_PATIENCE", 0.5)
    memory = OutputMemory(path=path)
    memory.add([1, 2])
    with holding(path):
        waiting = threading.Thread(target=memory.add, args=([3, 4],))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            waiting.start()
            time.sleep(0.1)
            started = time.monotonic()
            assert count(memory, [1, 2]) == 1
            assert time.monotonic() - started < 0.2
            assert waiting.is_alive()
            waiting.join()
        assert "not kept on disk for now" in str(found[0].message)
        assert "database is locked" in str(found[0].message)
        started = time.monotonic()
        for i in range(10):
            memory.add([i, i])
        assert time.monotonic() - started < 0.4
    memory.add([5, 6])
    assert len(logged(path)) == 13


TAKE = """
import sqlite3, sys
try:
    sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute("BEGIN EXCLUSIVE")
except sqlite3.OperationalError as error:
    print(error)
"""


@needs_posix
def test_who_opens_a_log_that_is_held_leaves_it_held(path, monkeypatch):
    monkeypatch.setattr(log, "_PATIENCE", 0.0)
    OutputMemory(path=path)
    with holding(path):
        with pytest.raises(OSError, match="database is locked"):
            OutputMemory(path=path)
        taken = subprocess.run([sys.executable, "-c", TAKE, str(path)], stdout=-1, text=True)
    assert taken.stdout == "database is locked\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_writes_outputs_of_its_own(tmp_path):
    memory = OutputMemory(path=tmp_path / "log")
    memory.add([1, 2])
    child = os.fork()
    if not child:
        memory.add([3, 4])
        os._exit(0 if count(memory, [1, 2]) == count(memory, [3, 4]) == 1 else 1)
    memory.add([5, 6])
    assert os.waitpid(child, 0) == (child, 0)
    memory.refresh()
    assert sorted(logged(tmp_path / "log")) == [[1, 2], [3, 4], [5, 6]]
    assert len(memory) == 3


# Disks that are full, files that are damaged.


FULL_DISK = """
import resource, signal, sys, warnings
from pathlib import Path
import numpy as np
from hf_retrieval_assist.memory.output_memory import OutputMemory

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
memory = OutputMemory(path=sys.argv[1])
memory.add([7, 7], "m")
size = Path(sys.argv[1]).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    for i in range(1, 5):
        memory.add(np.full(2_000, i), "m")
(warning,) = found
assert f"not kept on disk for now: {sys.argv[1]}: " in str(warning.message)
assert len(memory) == 5
assert repr(memory).endswith(" MiB, in memory only by now)")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
memory.add([6, 6], "m")
assert repr(memory).endswith(" MiB, on disk)")
"""


@needs_posix
def test_a_disk_that_is_full_for_a_while_costs_no_output_and_one_warning(path):
    subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], check=True)
    assert logged(path) == [[7, 7], *([i] * 2_000 for i in range(1, 5)), [6, 6]]


@pytest.mark.filterwarnings("error")
def test_a_log_that_is_damaged_in_use_costs_no_output(path):
    memory = OutputMemory(path=path)
    memory.add([1, 2])
    good = path.read_bytes()
    path.write_bytes(b"something" * 1_000)
    with pytest.warns(UserWarning, match="expected a log of outputs, got file is not a database"):
        running = memory.start()
    running.extend([3, 4])
    running.close()
    memory.refresh()
    assert count(memory, [1, 2]) == count(memory, [3, 4]) == 1
    with pytest.raises(ValueError, match="file is not a database"):
        OutputMemory(path=path)
    path.write_bytes(good)
    memory.add([5])
    assert logged(path) == [[1, 2], [3, 4], [5]]
    path.write_bytes(b"something" * 1_000)
    with pytest.warns(UserWarning, match="not kept on disk for now"):
        memory.add([6])


def test_other_kinds_of_files_are_refused(tmp_path):
    (tmp_path / "text").write_bytes(b"something else altogether, long enough")
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT x FROM c"
    execute(tmp_path / "other", f"CREATE VIEW outputs AS {endless}")
    OutputMemory(path=tmp_path / "newer").add([1])
    execute(tmp_path / "newer", "PRAGMA user_version = 4")
    for name, error, message in (
        ("text", ValueError, "text: expected a log of outputs, got file is not a"),
        ("other", ValueError, "other: expected a log of outputs, got another database"),
        ("newer", ValueError, "expected version 3, got 4"),
        (".", OSError, "unable to open database file"),
    ):
        with pytest.raises(error, match=message):
            OutputMemory(path=tmp_path / name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "row",
    [
        (2**63 - 1, b"x" * 16, 0, "m", b"\1\0\0\0", 0),
        (2**62, b"x" * 16, 0, "m", b"\1\0\0\0", 0),
        (1, "x", 0, "m", b"\1\0\0\0", 0),
        (1, b"x" * 16, "place", "m", b"\1\0\0\0", 0),
        (1, b"x" * 16, 0, 5, b"\1\0\0\0", "crc"),
        (1, b"x" * 16, 0, "m", b"odd", None),
        (-1, None, None, None, None, None),
    ],
)
def test_rows_that_nobody_wrote_are_refused_or_skipped(path, row):
    OutputMemory(path=path).add([1, 2])
    execute(path, "INSERT INTO outputs VALUES (?, ?, ?, ?, ?, ?)", row)
    memory = OutputMemory(path=path)
    memory.add([3])
    other = OutputMemory(path=path)
    other.add([4])
    memory.refresh()
    assert len(memory) == len(other) == 3
    memory.forget()
    assert logged(path) == []


@pytest.mark.parametrize("row", [(2**63 - 1, ""), (-1, ""), ("text", ""), (1, b"\xff")])
def test_a_forgetting_that_nobody_wrote_is_refused_and_can_be_forgotten(path, row):
    memory = OutputMemory(path=path)
    memory.add([1, 2])
    execute(path, "INSERT INTO forgotten VALUES (?, ?)", row)
    with pytest.raises(ValueError, match="in place of"):
        OutputMemory(path=path)
    memory.forget()
    assert len(OutputMemory(path=path)) == 0


def test_a_database_that_was_lengthened_opens_at_once(path):
    memory = OutputMemory(path=path)
    memory.add([1, 2])
    os.truncate(path, 100 << 30)
    assert logged(path) == [[1, 2]]
    memory.add([3])
    assert logged(path) == [[1, 2], [3]]
    memory.forget()
    assert path.stat().st_size < 1 << 20


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
