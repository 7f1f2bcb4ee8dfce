"""The output memory: its bound, its log, several threads, several processes, sudden death."""

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
from hf_retrieval_assist.memory.output_memory import OutputMemory, prompt_group
from hf_retrieval_assist.structures.suffix_tree import SuffixTree
from hf_retrieval_assist.system.files import locked


def count(memory, tokens, fingerprint=""):
    tree = memory.tree(fingerprint)
    return 0 if tree is None else tree.count(np.array(tokens, dtype=np.int32))


def random_output(rng, length=200, vocabulary=500):
    return rng.integers(0, vocabulary, length).astype(np.int32)


def logged(path):
    return [record.token_ids.tolist() for record in OutputLog(path, 1 << 30).read()[1]]


def test_running_outputs_are_seen_before_they_finish():
    memory = OutputMemory()
    output = memory.start()
    output.extend([1, 2, 3])
    assert count(memory, [2, 3]) == 1
    output.extend([2, 3])
    assert count(memory, [2, 3]) == 2
    output.close()
    assert len(memory) == 1
    memory.check_invariants()


def test_models_are_kept_apart():
    memory = OutputMemory()
    memory.add([1, 2], "a")
    memory.add([1, 3], "b")
    assert [count(memory, [1, 2], f) for f in ("a", "b", "c")] == [1, 0, 0]


def test_the_oldest_outputs_make_room_and_the_bound_holds():
    rng = np.random.default_rng(0)
    memory = OutputMemory(max_bytes=150_000)
    outputs = [random_output(rng) for _ in range(60)]
    for i, output in enumerate(outputs):
        memory.add(output, "ab"[i // 30])
        assert memory.nbytes <= 150_000
        memory.check_invariants()
    kept = [count(memory, o[:8], "ab"[i // 30]) for i, o in enumerate(outputs)]
    assert kept == [0] * (60 - len(memory)) + [1] * len(memory)
    assert 5 < len(memory) < 60


@pytest.mark.slow
def test_a_million_tokens_pass_through_32_mb_at_one_speed():
    rng = np.random.default_rng(9)
    memory, seconds = OutputMemory(max_bytes=32 << 20), []
    for _ in range(10):
        started = time.process_time()
        for _ in range(200):
            memory.add((500 ** rng.random(500) * 60).astype(np.int32))
            assert memory.nbytes <= 32 << 20
        seconds.append(time.process_time() - started)
    assert len(memory) < 2000, "nothing had to go"
    assert seconds[-1] < 3 * min(seconds[7:])
    memory.check_invariants()


def test_an_output_larger_than_the_memory_is_cut_and_still_logged(tmp_path):
    rng = np.random.default_rng(1)
    memory = OutputMemory(max_bytes=100_000, path=tmp_path / "log")
    output = memory.start()
    text = random_output(rng, 4_000, 1 << 18)
    for i in range(0, len(text), 100):
        output.extend(text[i : i + 100])
        assert memory.nbytes <= 100_000
    assert 0 < memory.token_count < len(text)
    output.close()
    assert logged(tmp_path / "log") == [text.tolist()]


def test_an_evicted_running_output_is_learnt_no_further():
    rng = np.random.default_rng(2)
    memory = OutputMemory(max_bytes=100_000)
    output = memory.start()
    output.extend([1, 2, 3])
    for _ in range(20):
        memory.add(random_output(rng))
    output.extend([4, 5])
    output.close()
    assert count(memory, [4, 5]) == 0
    memory.check_invariants()


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


def test_threads_share_a_memory(tmp_path):
    memory = OutputMemory(max_bytes=1 << 20, path=tmp_path / "log")

    def write(worker):
        rng = np.random.default_rng(worker)
        for _ in range(15):
            output = memory.start("m")
            for _ in range(10):
                output.extend(random_output(rng, 20, 30))
                with memory.lock:
                    memory.tree("m").speculate(np.array([1, 2], np.int32), 8)
            output.close()

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory.check_invariants()
    assert len(memory) == 60
    assert len(logged(tmp_path / "log")) == 60


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


def test_outputs_of_no_named_model_go_to_the_first_that_asks(tmp_path):
    memory = OutputMemory(max_depth=8, path=tmp_path / "log")
    memory.add([1, 2, 3], "a")
    memory.add([1, 2, 4])
    running = memory.start()
    running.extend([1, 2, 5])
    assert count(memory, [1, 2], "a") == 2
    assert memory.tree("b") is None
    memory.check_invariants()
    running.extend([6])
    running.close()
    assert count(memory, [5, 6], "b") == 1
    memory.check_invariants()
    # What is on disk is still unnamed.
    again = OutputMemory(max_depth=8, path=tmp_path / "log")
    assert count(again, [1, 2], "b") == 2
    again.check_invariants()


@pytest.mark.parametrize("outputs", [15, 40])
def test_a_full_memory_of_no_named_model_goes_to_the_first_whole(outputs):
    rng = np.random.default_rng(3)
    memory = OutputMemory(max_bytes=100_000)
    for _ in range(outputs):
        memory.add(random_output(rng))
    kept, tokens = len(memory), memory.token_count
    assert memory.tree("model") is not None
    assert (len(memory), memory.token_count) == (kept, tokens)
    memory.check_invariants()


def test_outputs_that_make_room_while_others_change_hands_are_gone():
    rng = np.random.default_rng(3)
    memory = OutputMemory(max_bytes=100_000)
    memory.add(random_output(rng, 600), "model")
    for _ in range(40):
        memory.add(random_output(rng, 20))
    memory.tree("model")
    assert memory.tree("") is None
    assert len(memory) == len(memory.tree("model")) > 0
    memory.check_invariants()


def test_the_bound_holds_near_the_smallest_memory():
    rng = np.random.default_rng(4)
    smallest = 2 * SuffixTree(64).nbytes
    for _ in range(150):
        memory = OutputMemory(max_bytes=int(rng.integers(smallest, smallest + 48_000)))
        for _ in range(int(rng.integers(2, 20))):
            name = ("", "", "a", "b")[rng.integers(4)]
            memory.add(random_output(rng, int(rng.integers(1, 400)), 67), name)
            memory.check_invariants()


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


def test_outputs_of_a_prompt_are_kept_apart():
    prompts = [np.array(ids, np.int32) for ids in ([1, 2], [1, 2, 3])]
    names = [prompt_group("model", ids) for ids in prompts]
    assert len({*names, prompt_group("other", prompts[0])}) == 3
    memory = OutputMemory()
    memory.add([7, 8], names[0])
    memory.add([7, 9], names[1])
    memory.add([7, 5])
    assert [count(memory, [7, 8], name) for name in names] == [1, 0]
    # What belongs to nobody yet is the whole model's, not a prompt's.
    assert [count(memory, [7, 5], name) for name in (*names, "model")] == [0, 0, 1]
    memory.check_invariants()


@pytest.mark.parametrize("half_life", [2.0, 10.0])
def test_older_outputs_fade(half_life):
    ages = np.zeros(60)
    for trial in range(40):
        memory = OutputMemory(half_life=half_life)
        memory._chance.seed(trial)
        for i in range(60):
            memory.add([i, i, i], "a")
        memory.check_invariants()
        ages += [count(memory, [i, i], "a") > 0 for i in reversed(range(60))]
    survival = 0.5 ** (np.arange(60) / half_life)
    expected, spread = 40 * survival, np.sqrt(40 * survival * (1 - survival))
    assert (np.abs(ages - expected) <= 4 * spread + 1e-9).all()


def test_fading_leaves_other_prompts_and_running_outputs_alone():
    memory = OutputMemory(half_life=0.01)
    running = memory.start("a")
    running.extend([1, 2])
    memory.add([3, 4], "b")
    for _ in range(5):
        memory.add([5, 6], "a")
    assert [count(memory, [1, 2], "a"), count(memory, [3, 4], "b")] == [1, 1]
    assert count(memory, [5, 6], "a") == 1
    running.close()
    assert len(memory) == 2
    memory.check_invariants()


@pytest.mark.parametrize("half_life", [0, -1.0, float("nan")])
def test_refuses_half_lives(half_life):
    with pytest.raises(ValueError, match=r"^half_life: expected None or a number above 0"):
        OutputMemory(half_life=half_life)


def test_many_groups_under_a_bound():
    rng = np.random.default_rng(1)
    memory = OutputMemory(max_bytes=200_000, half_life=4.0)
    for i in range(200):
        memory.add(random_output(rng, 60), f"model/{i % 20}")
        assert memory.nbytes <= 200_000
    memory.check_invariants()
    memory.forget()
    memory.check_invariants()
    assert memory.nbytes == 0
