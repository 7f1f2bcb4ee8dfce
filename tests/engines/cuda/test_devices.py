"""Copies, events and captures under the rules of CUDA, without a card."""

import threading
import warnings
from contextlib import nullcontext
from itertools import accumulate

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from hf_retrieval_assist.engines.cuda import packed_buffer, replay
from hf_retrieval_assist.engines.cuda import workspace as module
from hf_retrieval_assist.engines.cuda.arena import Arena, Shape
from hf_retrieval_assist.engines.cuda.fixed_memory import FixedMemory
from hf_retrieval_assist.engines.cuda.fixed_verifier import FixedVerifier
from hf_retrieval_assist.engines.cuda.node_choices import NodeChoices
from hf_retrieval_assist.engines.cuda.packed_buffer import PackedBuffer
from hf_retrieval_assist.engines.cuda.replay import Replay, Shown
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES, Workspace, Workspaces
from hf_retrieval_assist.verification import recordings
from hf_retrieval_assist.verification.tree_attention import LayerMask
from tests.support.cuda_rules import Cuda
from tests.support.lossless import build, padded
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import agreeing
from tests.support.quick import cases
from tests.support.threads import in_threads

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()
    cuda.install(monkeypatch)
    return cuda


def shown():
    return Shown(torch.tensor([[[0.0, 1.0]]]), {})


def shape_of(slots):
    return Shape(1, slots, LayerMask(), torch.float32, torch.device("cpu"))


def test_an_event_follows_the_copies_of_its_own_device(cuda):
    buffer = PackedBuffer({"ids": (torch.int64, (3,))}, SECOND)
    buffer.fetch()
    assert cuda.on == [cuda.current_stream(SECOND)]
    with cuda.device(SECOND):
        buffer.send()
    assert [stream.device for stream in cuda.on] == [SECOND, SECOND]


def test_a_graph_is_captured_on_its_own_device(cuda):
    seen = []

    def compute():
        stream = cuda.current_stream()
        seen.append((stream.device, cuda.underway is not None, stream is cuda._first[cuda.current]))
        return shown()

    for device in (SECOND, FIRST):
        replay.recorder(device)(compute)
        assert cuda.current_stream(device) is cuda._first[device.index]
    # What finds out whether it waits runs behind the caller's work, on the caller's stream.
    assert seen == [
        *((SECOND, False, True), (SECOND, True, False)),
        *((FIRST, False, True), (FIRST, True, False)),
    ]


def test_graphs_outlive_what_others_free_of_cublas(cuda):
    """However streams come round, whoever records on them, and whatever is freed meanwhile."""

    def compute():
        cuda.multiply()
        return shown()

    living = []
    for number in range(100):
        with cuda.stream(cuda.new_stream(FIRST)) if number % 3 else nullcontext():
            record = replay.recorder(FIRST)
            living.append((record, [record(compute)[0] for _ in range(3)]))
        if number % 2:
            del living[len(living) // 2]
        if number % 5 == 0:
            cuda.clear()
        if len(living) > 20:
            del living[5], living[6]  # the first ones stay
        for _, repeats in living:
            for repeat in repeats:
                repeat()
    streams = [record.stream for record, _ in living]
    assert len(set(streams)) == len(streams) > 10
    # Nothing records where no stream is left.
    while (record := replay.recorder(FIRST)) is not None:
        living.append((record, []))
    assert len(living) == 32
    assert replay.recorder(SECOND) is not None


def test_two_threads_capture_one_after_the_other_in_whatever_mode(cuda):
    inside = threading.Event()

    def compute():
        inside.wait(0.05)
        return shown()

    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            replay.recorder(FIRST)(shown)
    in_threads(lambda device: replay.recorder(device)(compute), (FIRST, SECOND))


@pytest.mark.parametrize("ends", [False, True])
def test_a_capture_that_fails_leaves_nothing_behind(ends, cuda, monkeypatch):
    """Torch up to 2.12 does so too, where allocator and generator would wait for its end."""
    monkeypatch.setattr(replay, "_ENDS_BROKEN_CAPTURES", ends)

    def compute():
        if cuda.underway is not None:
            cuda.wait()
        return shown()

    step = Replay(replay.recorder(FIRST), 1e-3)
    for _ in range(2):
        assert step(compute).logits[0, 0, 1] == 1
        assert cuda.current_stream() is cuda._first[0]
        assert cuda.underway is None
        if ends:
            cuda.waiting.clear()
            cuda._known_to_pinned.clear()
        cuda.draw()
    assert "previous error during capture" in step.fault
    replay.recorder(FIRST)(shown)


def test_other_threads_draw_and_wait_while_one_captures(cuda, monkeypatch):
    """What they draw is what they would have drawn, while a capture begins, too."""
    numbers, waited, graph = [cuda.draw()], [], cuda.graph

    def slowly(*args, **kwargs):
        numbers.append(cuda.draw())
        return graph(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "graph", slowly)

    def others():
        numbers.append(cuda.draw())
        waiting = threading.Thread(target=lambda: waited.append(torch.cuda.synchronize()))
        waiting.start()
        waiting.join(0.05)
        assert not waited  # it waits for the capture first
        return waiting

    def compute():
        if cuda.underway is not None:
            threads.append(others())
        return shown()

    threads, plain = [], torch.cuda.synchronize
    for _ in range(2):
        replay.recorder(FIRST)(compute)
        threads[-1].join()
        waited.clear()
        numbers.append(cuda.draw())
    assert torch.cuda.synchronize == plain
    assert numbers == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("broken", [3, 100])
def test_a_capture_that_another_thread_breaks_is_tried_again(broken, cuda, monkeypatch):
    """One that always breaks is given up."""
    monkeypatch.setattr(replay, "_ENDS_BROKEN_CAPTURES", False)
    step, breaks, tried = Replay(replay.recorder(FIRST), 1e-3), iter([True] * broken), []

    def compute():
        if cuda.underway is not None:
            tried.append(True)
            cuda.underway.invalid = next(breaks, cuda.underway.invalid)
        return shown()

    for _ in range(3):
        step(compute)
        assert step.content is None
        assert not step.computes
        cuda.draw()
    for _ in range(20):
        assert step(compute).logits[0, 0, 1] == 1
    assert step.trusted is (broken == 3)
    if broken > 3:
        assert len(tried) == recordings.MOST_BROKEN
        assert "previous error during capture" in step.fault


def test_a_forward_that_waits_inside_of_an_operator_is_not_captured(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "graph", None)
    before = warnings.showwarning, list(warnings.filters)
    step = Replay(replay.recorder(FIRST), 1e-3)

    with warnings.catch_warnings(record=True) as found, replay.noting_waits() as waits:
        in_threads(lambda _: cuda.wait(), [0])  # others' waits are none of this thread's
        warnings.warn("something else", stacklevel=1)
    assert not waits
    assert [str(warning.message) for warning in found] == ["something else"]

    def compute():
        cuda.wait()
        return shown()

    assert step(compute).logits[0, 0, 1] == 1
    assert "waits for the device" in step.fault
    assert cuda.mode == 0
    assert (warnings.showwarning, list(warnings.filters)) == before


# Whether their operators may wait where nobody sees it.
NAMESPACES = {
    **dict.fromkeys(("hf_retrieval_assist_tests", "_activation", "_megablocks_cuda_0a1b2c3"), True),
    **dict.fromkeys(("torchao", "_activation_0a1b2c3", "_rotary_cuda_0a1b2c3_dirty"), False),
    **dict.fromkeys(("_vllm_flash_attn3_rocm_0a1b2c3", "_first_20260617124232"), False),
}


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_other_libraries_operators_are_captured_where_they_are_known_or_a_broken_capture_ends(
    namespace, ends, cuda, monkeypatch
):
    monkeypatch.setattr(replay, "_ENDS_BROKEN_CAPTURES", ends)
    monkeypatch.setattr(replay, "_SAFE_BUILDS", replay._SAFE_BUILDS | {"first"})

    @torch.library.custom_op(f"{namespace}::hf_retrieval_assist_double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with replay.noting_waits() as waits:
        double(torch.ones(3))
    assert bool(waits) is (NAMESPACES[namespace] and not ends)


def test_a_call_on_another_stream_follows_what_the_last_one_did(cuda, monkeypatch):
    monkeypatch.setattr(module, "runs_behind", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: cuda._streams()[0])
    workspace = Workspace(shape_of(256), replay.recorder(FIRST))
    known, model = Workspaces(), nn.Linear(2, 2)
    workspace.turn_to("as it was", model)
    workspace.step(1, 1)(shown)
    known.give_back(model, workspace)
    other = cuda.new_stream(FIRST)
    with cuda.stream(other):
        assert known.workspace(model, workspace.shape, "as it was") is workspace
    assert cuda.on[-1] is cuda._first[0]
    assert other.waited_for == [workspace._left]


def test_what_cannot_be_recorded_in_one_state_may_be_in_others(cuda, monkeypatch):
    """It is known in whichever memory; of a few states."""
    monkeypatch.setattr(recordings, "MOST_STATES", 2)
    shapes = [shape_of(256), shape_of(512)]
    known, model = Workspaces(), nn.Linear(2, 2)
    known.workspace(model, shapes[0], "one").faults["width"] = "it does not work"
    assert not known.workspace(model, shapes[0], "other").faults
    assert known.workspace(model, shapes[1], "one").faults == known.report(model).faults != {}
    assert [known.skips(model) for _ in range(3)] == [True] * 3
    for state in ("other", "another", "one"):
        assert not known.workspace(model, shapes[0], state).faults
    assert not known.skips(model)


WAITS = {
    "different values": lambda x: x.unique(),
    "a copy": lambda x: x.to("meta"),
    "an index of the host": lambda x: torch.empty(4, device="meta")[torch.tensor([1, 2])],
}
WAITS_NOT = {
    "an index": lambda x: x[torch.arange(2)],
    "a mask": lambda x: x.masked_fill(x > 0, 2.0),
    "another dtype": lambda x: x.to(torch.float16) * 2,
    "a number of the host": lambda x: torch.empty(4, device="meta") * torch.tensor(2.0),
}


@pytest.mark.parametrize("name", [*WAITS, *WAITS_NOT])
def test_operators_that_wait_and_say_nothing_are_found(name, cuda):
    with replay.noting_waits() as waits:
        (WAITS | WAITS_NOT)[name](torch.ones(4))
    assert bool(waits) is (name in WAITS)


def lag(cuda, monkeypatch):
    """A CPU whose copies, moves and repeated forwards are done when an event is waited for."""
    monkeypatch.setattr(packed_buffer, "runs_behind", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: cuda._first[0])

    def flush():
        while cuda.queued:
            cuda.queued.pop(0)()

    def queued(function):
        return lambda *arguments: cuda.queued.append(lambda: function(*arguments))

    def at_once(function):
        def settled(*arguments):
            flush()
            out = function(*arguments)
            flush()
            return out

        return settled

    copy = PackedBuffer._copy

    def copied(buffer, target, source):
        cuda.queued.append(lambda: target.copy_(source))
        copy(buffer, torch.empty(0), torch.empty(0))

    call = Replay.__call__

    def repeated(step, compute, at=None):
        if step.trusted and step.fault is None:
            repeat, recorded = step.content
            cuda.queued.append(repeat)
            return recorded
        return at_once(call)(step, compute)

    monkeypatch.setattr(PackedBuffer, "_copy", copied)
    choose = NodeChoices.__call__

    def chosen(choices, logits, trees, out):
        cuda.queued.append(lambda: choose(choices, logits, trees, out))
        ends = list(accumulate(1 + len(tree) for tree in trees))
        return [0, *ends[:-1]] if any(not row.finished for row in choices.select.rows) else None

    monkeypatch.setattr(NodeChoices, "__call__", chosen)
    monkeypatch.setattr(Arena, "move", queued(Arena.move))
    monkeypatch.setattr(Replay, "__call__", repeated)
    for owner, name in ((FixedMemory, "show"), (FixedVerifier, "_compute")):
        monkeypatch.setattr(owner, name, at_once(getattr(owner, name)))


@pytest.mark.parametrize("rows", cases([3, 1]))
def test_sampled_tokens_are_read_once_they_have_come(rows, cuda, monkeypatch):
    serve_in_place(monkeypatch)
    model, options = build(LlamaForCausalLM), {"do_sample": True, "top_p": 0.9}
    lag(cuda, monkeypatch)
    for _ in range(3):
        agreeing(model, padded(rows), "tree", max_new_tokens=40, **options)
    assert not any(step.fault for step in WORKSPACES.report(model).idle[-1].kinds.values())
