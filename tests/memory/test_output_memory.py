"""The output memory: its bound, its prompts and models, several threads."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hf_retrieval_assist.memory.output_memory import OutputMemory
from hf_retrieval_assist.structures.suffix_tree import SuffixTree
from tests.support.memories import check_memory, count, logged, random_output
from tests.support.threads import in_threads


def test_the_oldest_outputs_make_room_and_the_bound_holds():
    rng = np.random.default_rng(0)
    memory = OutputMemory(max_bytes=150_000)
    outputs = [random_output(rng) for _ in range(60)]
    for i, output in enumerate(outputs):
        memory.add(output, "ab"[i // 30])
        assert memory.nbytes <= 150_000
        check_memory(memory)
    kept = [count(memory, o[:8], "ab"[i // 30]) for i, o in enumerate(outputs)]
    assert kept == [0] * (60 - len(memory)) + [1] * len(memory)
    assert 4 < len(memory) < 60


@pytest.mark.parametrize("kinds", [["a"], ["a", "b"]])
@pytest.mark.parametrize("max_bytes", [60_000, 1 << 20])
@pytest.mark.parametrize("on_disk", [False, True])
def test_outputs_that_grow_together_are_as_one_after_another(tmp_path, kinds, max_bytes, on_disk):
    """Those of one model, whose tokens go into its tree in one call, and those of several."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / name if on_disk else None for name in ("together", "each")]
    together, each = (OutputMemory(max_bytes, max_depth=16, path=path) for path in paths)
    outputs = [
        [memory.start(kinds[i % len(kinds)]) for i in range(6)] for memory in (together, each)
    ]
    for _ in range(40):
        tokens = [rng.integers(0, 30, rng.integers(1, 6)).astype(np.int32) for _ in range(6)]
        offsets = np.cumsum([0, *map(len, tokens)])
        together.extend(outputs[0], np.concatenate(tokens), offsets)
        for output, new in zip(outputs[1], tokens, strict=True):
            output.extend(new)
        check_memory(together)
        assert together.nbytes <= max_bytes
    assert together.token_count == each.token_count
    if max_bytes == 1 << 20:
        assert together.nbytes == each.nbytes
        for one, other in zip(*outputs, strict=True):
            kept = [
                memory.tree(output.fingerprint).tokens(output.live_sequence).tolist()
                for memory, output in ((together, one), (each, other))
            ]
            assert kept[0] == kept[1]
    else:
        assert any(output.full for output in outputs[0])


def test_an_output_that_is_not_learnt_is_no_hindrance_to_others():
    memory = OutputMemory()
    output = memory.start()
    memory.extend([None, output, None], np.array([1, 2, 3, 4], np.int32), np.array([0, 1, 3, 4]))
    assert memory.tree().tokens(output.live_sequence).tolist() == [2, 3]
    check_memory(memory)


def test_an_output_larger_than_the_memory_is_not_learnt_to_its_end(tmp_path):
    rng = np.random.default_rng(1)
    memory = OutputMemory(max_bytes=100_000, path=tmp_path / "log")
    output = memory.start()
    text = random_output(rng, 4_000, 1 << 18)
    for i in range(0, len(text), 100):
        output.extend(text[i : i + 100])
        assert memory.nbytes <= 100_000
    output.close()
    assert logged(tmp_path / "log") == []
    check_memory(memory)


@pytest.mark.parametrize("shared", [True, False])
def test_running_outputs_and_fingerprints_are_within_the_bound(tmp_path, shared):
    memory = OutputMemory(max_bytes=1 << 20, path=tmp_path / "log" if shared else None)
    rows = [memory.start("m") for _ in range(64)]
    for i in range(0, 400, 4):
        for row, output in enumerate(rows):
            output.extend((np.arange(4, dtype=np.int32) + i) * 31 + row)
        assert memory.nbytes <= 1 << 20
    check_memory(memory)
    for output in rows:
        output.close()
    for i in range(40):
        memory.add([1, 2, 3], f"{i}" * 100_000)
        assert memory.nbytes <= 1 << 20
    check_memory(memory)
    if shared:
        assert len(logged(tmp_path / "log")) > 0


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

    in_threads(write, range(4))
    check_memory(memory)
    assert len(memory) == 60
    assert len(logged(tmp_path / "log")) == 60


def test_outputs_of_no_named_model_go_to_the_first_that_asks(tmp_path):
    memory = OutputMemory(max_depth=8, path=tmp_path / "log")
    memory.add([1, 2, 3], "a")
    assert "1 outputs of 3 tokens" in str(memory)
    memory.add([1, 2, 4])
    running = memory.start()
    running.extend([1, 2, 5])
    assert count(memory, [1, 2], "a") == 2
    assert memory.tree("b") is None
    check_memory(memory)
    running.extend([6])
    running.close()
    assert count(memory, [5, 6], "b") == 1
    check_memory(memory)
    # What is on disk is still unnamed.
    again = OutputMemory(max_depth=8, path=tmp_path / "log")
    assert count(again, [1, 2], "b") == 2
    check_memory(again)


@pytest.mark.parametrize(("others", "outputs"), [(0, 15), (0, 40), (600, 40)])
def test_a_full_memory_of_no_named_model_goes_to_the_first(others, outputs):
    """Whole, but for what had to make room while it changed hands."""
    rng = np.random.default_rng(3)
    memory = OutputMemory(max_bytes=100_000)
    if others:
        memory.add(random_output(rng, others), "model")
    for _ in range(outputs):
        memory.add(random_output(rng, 20) if others else random_output(rng))
    kept, tokens = len(memory), memory.token_count
    assert memory.tree("model") is not None
    assert others or (len(memory), memory.token_count) == (kept, tokens)
    assert memory.tree("") is None
    assert len(memory) == len(memory.tree("model")) > 0
    check_memory(memory)


def test_the_bound_holds_near_the_smallest_memory():
    rng = np.random.default_rng(4)
    smallest = 2 * SuffixTree(64).nbytes
    for _ in range(150):
        memory = OutputMemory(max_bytes=int(rng.integers(smallest, smallest + 48_000)))
        for _ in range(int(rng.integers(2, 20))):
            name = ("", "", "a", "b")[rng.integers(4)]
            memory.add(random_output(rng, int(rng.integers(1, 400)), 67), name)
            check_memory(memory)


@pytest.mark.parametrize("half_life", [2.0, 10.0])
def test_older_outputs_fade(half_life):
    ages = np.zeros(60)
    for trial in range(40):
        memory, name = OutputMemory(half_life=half_life), f"model {trial}"
        for i in range(60):
            memory.add([i, i, i], name)
        check_memory(memory)
        ages += [count(memory, [i, i], name) > 0 for i in reversed(range(60))]
    survival = 0.5 ** (np.arange(60) / half_life)
    expected, spread = 40 * survival, np.sqrt(40 * survival * (1 - survival))
    assert (np.abs(ages - expected) <= 4 * spread + 1e-9).all()


@pytest.mark.parametrize("place", ["x.log", Path("x.log"), "redis://server", "4X"])
def test_a_file_or_server_in_the_bounds_place_is_named(place):
    match = rf"^max_bytes: expected bytes such as 750M or 4G, got '{place}'; path= keeps .* url="
    with pytest.raises(TypeError, match=match):
        OutputMemory(place)


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
    check_memory(memory)
    for half_life in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"^half_life: expected None or a number above 0"):
            OutputMemory(half_life=half_life)


MANY_RUNNING = """
import gc
import numpy as np
from hf_retrieval_assist import OutputMemory

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096

bound, rng = 32 << 20, np.random.default_rng(0)
OutputMemory(1 << 20).add([1, 2, 3])
memory = OutputMemory(bound)
before = peak = resident()
running = [memory.start("m") for _ in range(256)]
for _ in range(40):
    for _ in range(5):
        for output in running:
            output.extend(rng.integers(0, 50_000, 20).astype(np.int32))
    assert memory.nbytes <= bound
    peak = max(peak, resident())
assert len(memory) < 256, "nothing had to go"
print((peak - before) / bound)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it reads /proc")
def test_256_running_outputs_take_the_bound_of_the_process():
    command = [sys.executable, "-c", MANY_RUNNING]
    share = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"{share:.2f} of the bound")
    assert share < 1.1
