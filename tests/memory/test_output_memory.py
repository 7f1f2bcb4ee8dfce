"""The output memory: its bound, its prompts and models, several threads."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_retrieval_assist.memory.output_memory import OutputMemory
from hf_retrieval_assist.structures.suffix_tree import SuffixTree
from tests.support.memories import check_memory, count, logged, random_output
from tests.support.threads import in_threads


class Table:
    """What a drafter learns besides outputs."""

    def __init__(self, most):
        self.nbytes = min(most, 1_000)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "start", "extend", "close", "table"]),
        st.integers(0, 5),
        st.integers(1, 400),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(STEPS, st.integers(0, 100_000), st.sampled_from([None, 2.0]))
def test_the_bound_holds_whatever_is_done(steps, room, half_life):
    """Outputs of several models and tenants, at once and one after another, and tables."""
    memory = OutputMemory(2 * SuffixTree(64).nbytes + room, half_life=half_life)
    views = memory, memory.namespace("a"), memory.namespace("b")
    rng, running = np.random.default_rng(0), []
    for kind, which, size in steps:
        view, name = views[which // 2], ("", "m" * 5_000)[which % 2]
        if kind == "add":
            view.add(random_output(rng, size), name)
        elif kind == "start":
            running.append(view.start(name))
        elif kind == "table":
            view.table("learnt", name, Table).nbytes += 50 * size
            view.make_room()
        elif running and kind == "extend":
            running[which % len(running)].extend(random_output(rng, size))
        elif running:
            running.pop(which % len(running)).close()
        check_memory(memory)


def test_the_oldest_outputs_make_room():
    rng = np.random.default_rng(0)
    memory = OutputMemory(max_bytes=150_000)
    outputs = [random_output(rng) for _ in range(60)]
    for i, output in enumerate(outputs):
        memory.add(output, "ab"[i // 30])
    kept = [count(memory, o[:8], "ab"[i // 30]) for i, o in enumerate(outputs)]
    assert kept == [0] * (60 - len(memory)) + [1] * len(memory)
    assert 4 < len(memory) < 60


@pytest.mark.parametrize("kinds", [["a"], ["a", "b"]])
@pytest.mark.parametrize("max_bytes", [60_000, 1 << 20])
def test_outputs_that_grow_together_are_as_one_after_another(kinds, max_bytes):
    """Those of one model, whose tokens go into its tree in one call, and those of several."""
    rng = np.random.default_rng(0)
    together, each = (OutputMemory(max_bytes, max_depth=16) for _ in range(2))
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


@pytest.mark.parametrize("tenant", [None, "a customer", "\ud800:/\0"])
def test_outputs_of_no_named_model_go_to_the_first_that_asks(tmp_path, tenant):
    """A tenant's are its own, whatever it is called."""
    memory = whole = OutputMemory(max_depth=8, path=tmp_path / "log")
    if tenant:
        memory = whole.namespace(tenant)
        whole.add([1, 2, 4])
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
    assert count(again.namespace(tenant) if tenant else again, [1, 2], "b") == 2
    check_memory(again)
    # A log does not name tenants.
    assert not any(b"customer" in file.read_bytes() for file in tmp_path.iterdir())


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


def test_too_few_bytes_and_negative_ids_are_refused():
    with pytest.raises(ValueError, match="max_bytes: expected at least"):
        OutputMemory(max_bytes=100)
    with pytest.raises(ValueError, match="token_ids: expected ids from 0 to"):
        OutputMemory().add([1, -1])


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
