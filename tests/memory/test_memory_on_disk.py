"""The log of an output memory: several processes, damage, full disks, sudden death."""

import errno
import os
import stat
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hf_retrieval_assist.memory import log
from hf_retrieval_assist.memory.log import OutputLog
from hf_retrieval_assist.memory.output_memory import OutputMemory
from hf_retrieval_assist.system.files import locked
from tests.memory.outputs import count, logged


def test_outputs_survive_a_restart(tmp_path):
    path = tmp_path / "log"
    memory = OutputMemory(path=path)
    memory.add([1, 2, 3], "model")
    memory.add([4, 5], "model")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(f"{path}.lock").st_mode) == 0o600
    again = OutputMemory(path=path)
    assert count(again, [1, 2, 3], "model") == count(again, [4, 5], "model") == 1
    assert len(again) == 2


def test_forgetting_reaches_the_log_and_other_views_of_it(tmp_path):
    path = tmp_path / "log"
    first, second = OutputMemory(path=path), OutputMemory(path=path)
    first.add([1, 2])
    running = first.start()
    running.extend([3, 4])
    second.refresh()
    assert count(second, [1, 2]) == 1
    first.forget()
    assert len(first) == 0
    running.extend([5])
    running.close()
    second.add([7, 8])
    assert (count(second, [1, 2]), len(second)) == (0, 1)
    first.refresh()
    assert [count(first, t) for t in ([1, 2], [3, 4], [5], [7, 8])] == [0, 0, 0, 1]
    assert logged(path) == [[7, 8]]


def test_views_of_one_log_learn_from_each_other(tmp_path):
    first, second = (OutputMemory(path=tmp_path / "log") for _ in range(2))
    for i in range(10):
        (first, second)[i % 2].add([i, i + 1])
    first.refresh()
    second.refresh()
    assert len(first) == len(second) == 10
    assert all(count(m, [i, i + 1]) == 1 for i in range(10) for m in (first, second))


def test_the_log_is_compacted_to_its_newest_records(tmp_path):
    path = tmp_path / "log"
    reader, writer = OutputLog(path, 2_000), OutputLog(path, 2_000)
    seen = []
    for i in range(300):
        writer.append("m", np.full(20, i, np.int32))
        assert path.stat().st_size <= 4_000 + 200
        if i % 7 == 0:
            seen += [int(record.token_ids[0]) for record in reader.read()[1]]
    seen += [int(record.token_ids[0]) for record in reader.read()[1]]
    assert seen == list(range(300))
    kept = [tokens[0] for tokens in logged(path)]
    assert kept == list(range(300 - len(kept), 300))
    assert len(kept) >= 15


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_last_record_is_skipped_and_overwritten(tmp_path, cut):
    path = tmp_path / "log"
    OutputMemory(path=path).add([1, 2, 3])
    OutputMemory(path=path).add([4, 5, 6])
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - cut)
    with pytest.warns(UserWarning, match="skipped .* bytes that are not a whole output"):
        memory = OutputMemory(path=path)
    assert (count(memory, [1, 2, 3]), count(memory, [4])) == (1, 0)
    with pytest.warns(UserWarning, match="skipped"):
        memory.add([7, 8])
    assert logged(path) == [[1, 2, 3], [7, 8]]


def test_any_flipped_byte_costs_one_record_or_is_a_clear_error(tmp_path):
    path = tmp_path / "log"
    outputs = [[1, 2, 3], [4, 5], [6]]
    for output in outputs:
        OutputMemory(path=path).add(output, "model")
    good = path.read_bytes()
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ 0x55]) + good[i + 1 :])
        if i < 32:
            with pytest.raises(ValueError, match=r"log: (expected|the header)"):
                OutputMemory(path=path)
        else:
            with pytest.warns(UserWarning, match="skipped"):
                kept = logged(path)
            assert len(kept) == 2
            assert all(output in outputs for output in kept)


def test_another_kind_of_file_is_refused(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"something else altogether, long enough")
    with pytest.raises(ValueError, match="expected a log of outputs, got another kind of file"):
        OutputMemory(path=path)
    with pytest.raises(ValueError, match="max_bytes: expected at least"):
        OutputMemory(max_bytes=100)
    with pytest.raises(ValueError, match="token_ids: expected 0 to"):
        OutputMemory().add([1, -1])


# The modules alone: importing the package would take most of a writer's life.
WRITER = """
import sys
import types
import numpy as np

package = types.ModuleType("hf_retrieval_assist")
package.__path__ = [sys.argv[4]]
sys.modules["hf_retrieval_assist"] = package
from hf_retrieval_assist.memory.log import OutputLog

log, first, count = OutputLog(sys.argv[1], 1 << 30), int(sys.argv[2]), int(sys.argv[3])
for i in range(first, first + count):
    log.append("m", np.full(300 + i % 100, i, np.int32))
    print(i, flush=True)
"""


def start_writer(path, first, outputs):
    folder = str(Path(log.__file__).parents[1])
    arguments = [sys.executable, "-c", WRITER, str(path), str(first), str(outputs), folder]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_two_processes_append_and_nothing_is_lost(tmp_path):
    writers = [start_writer(tmp_path / "log", first, 200) for first in (0, 1000)]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    numbers = [tokens[0] for tokens in logged(tmp_path / "log")]
    assert sorted(numbers) == [*range(200), *range(1000, 1200)]
    assert [n for n in numbers if n < 200] == list(range(200))


@pytest.mark.filterwarnings("ignore:.*skipped")
@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_every_flushed_output_outlives_a_kill(tmp_path, kills):
    rng = np.random.default_rng(7)
    path, flushed = tmp_path / "log", []
    for kill in range(kills):
        writer = start_writer(path, 10_000 * kill, 10_000)
        flushed.append(int(writer.stdout.readline()))
        time.sleep(rng.uniform(0, 0.05))
        writer.kill()
        flushed += map(int, writer.stdout.read().split())
        writer.wait()
        outputs = {tokens[0]: tokens for tokens in logged(path)}
        assert outputs.keys() >= set(flushed)
        assert all(tokens == [i] * (300 + i % 100) for i, tokens in outputs.items())
    assert len(flushed) > kills


class FullDisk:
    """Writing to a log fails while this is on."""

    def __init__(self, monkeypatch):
        self.on = False
        monkeypatch.setattr(OutputLog, "_opened", self.opened(OutputLog._opened))

    def opened(self, original):
        @contextmanager
        def opened(log, mode):
            with original(log, mode) as file:
                if self.on and mode == "r+b":
                    raise OSError(errno.ENOSPC, "No space left on device")
                yield file

        return opened


def test_a_full_disk_costs_no_output_and_one_warning(tmp_path, monkeypatch):
    path, disk = tmp_path / "log", FullDisk(monkeypatch)
    memory = OutputMemory(path=path)
    memory.add([1, 2])
    disk.on = True
    message = rf"not kept on disk for now: .*No space left on device: '{path}'"
    with pytest.warns(UserWarning, match=message):
        memory.add([3, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.add([5, 6])
        memory.add([7, 8])
    assert [count(memory, [t, t + 1]) for t in (1, 3, 5, 7)] == [1] * 4
    assert logged(path) == [[1, 2]]
    disk.on = False
    memory.add([9, 10])
    assert logged(path) == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    assert len(memory) == 5
    disk.on = True
    with pytest.warns(UserWarning, match="not kept on disk"):
        memory.add([11, 12])
    memory.check_invariants()


def test_a_log_that_is_damaged_in_use_costs_no_output(tmp_path):
    path = tmp_path / "log"
    memory = OutputMemory(path=path)
    memory.add([1, 2])
    good = path.read_bytes()
    path.write_bytes(good[:18] + bytes([good[18] ^ 1]) + good[19:])
    with pytest.warns(UserWarning, match="the header does not match its checksum"):
        running = memory.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running.extend([3, 4])
        running.close()
        memory.refresh()
    assert count(memory, [1, 2]) == count(memory, [3, 4]) == 1
    with pytest.raises(ValueError, match="the header"):
        OutputMemory(path=path)
    path.write_bytes(good)
    memory.add([5])
    assert logged(path) == [[1, 2], [3, 4], [5]]


def test_a_log_that_cannot_be_compacted_is_appended_to(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    small = OutputLog(tmp_path / "log", 120)
    monkeypatch.setattr(OutputLog, "_compact", refuse)
    for i in range(20):
        small.append("m", np.full(20, i, np.int32))
    monkeypatch.undo()
    assert [tokens[0] for tokens in logged(tmp_path / "log")] == list(range(20))
    small.append("m", np.full(20, 20, np.int32))
    assert [tokens[0] for tokens in logged(tmp_path / "log")] == [20]


def test_forgetting_that_fails_says_so(tmp_path, monkeypatch):
    memory = OutputMemory(path=tmp_path / "log")
    memory.add([1, 2])

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(OutputLog, "_rewrite", refuse)
    with pytest.raises(PermissionError, match="log"):
        memory.forget()
    assert len(memory) == 0


needs_posix = pytest.mark.skipif(os.name == "nt", reason="links and modes are POSIX's")


@needs_posix
def test_a_link_to_a_log_is_the_log(tmp_path):
    (tmp_path / "data").mkdir()
    real, link = tmp_path / "data" / "log", tmp_path / "link"
    link.symlink_to(real)
    OutputMemory(path=link).add([1, 2])
    assert logged(real) == [[1, 2]]
    memory = OutputMemory(path=link)
    with locked(Path(f"{real}.lock")):
        thread = threading.Thread(target=memory.forget)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive(), "a writer by the link took another lock"
    thread.join()
    assert link.is_symlink()
    assert logged(real) == []
    assert sorted(file.name for file in (tmp_path / "data").iterdir()) == ["log", "log.lock"]


@needs_posix
@pytest.mark.parametrize("use", [lambda memory: memory.refresh(), lambda memory: memory.add([3])])
def test_a_log_that_others_could_read_is_closed_to_them(tmp_path, use):
    path = tmp_path / "log"
    memory = OutputMemory(path=path)
    memory.add([1, 2])
    os.chmod(path, 0o644)
    use(memory)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


@needs_posix
def test_what_a_killed_compaction_left_goes_when_forgetting(tmp_path):
    memory = OutputMemory(path=tmp_path / "log")
    memory.add([1, 2])
    (tmp_path / ".log.0123456789abcdef.new").write_bytes(b"outputs")
    memory.forget()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "log.lock"]
