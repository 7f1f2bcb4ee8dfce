"""Copies, events and captures under the rules of CUDA, without a card."""

import threading
from itertools import accumulate

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import LlamaForCausalLM

from hf_retrieval_assist.decoding.node_choices import NodeChoices
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.verification import fixed_verifier, packed_buffer, replay
from hf_retrieval_assist.verification.arena import Arena
from hf_retrieval_assist.verification.packed_buffer import PackedBuffer
from hf_retrieval_assist.verification.replay import CudaGraphs, NoWaits, Replay, Shown
from hf_retrieval_assist.verification.workspace import WORKSPACES
from tests.support.cuda_rules import Cuda
from tests.support.lossless import build
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import both, oracle_assistant

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()
    cuda.install(monkeypatch)
    return cuda


def shown(value=1.0):
    return Shown(torch.tensor([[[0.0, value]]]), [], None)


def test_an_event_follows_the_copies_of_its_own_device(cuda):
    buffer = PackedBuffer({"ids": (torch.int64, (3,))}, SECOND)
    buffer.fetch()
    assert cuda.on == [cuda.current_stream(SECOND)]
    with cuda.device(SECOND):
        buffer.send()
    assert [stream.device for stream in cuda.on] == [SECOND, SECOND]


def test_a_graph_is_captured_on_its_own_device(cuda):
    graphs = {device: CudaGraphs(device) for device in (FIRST, SECOND)}
    seen = []

    def compute():
        stream = cuda.current_stream()
        seen.append((stream.device, cuda.capturing))
        assert stream is not cuda._first[stream.device.index]
        return shown()

    for device in (SECOND, FIRST):
        graphs[device](compute)
        assert cuda.current_stream(device) is cuda._first[device.index]
        # The forward before it, and what reads its results, keep their order.
        assert cuda.current_stream(device) in graphs[device]._stream.waited_for
        assert graphs[device]._stream in cuda.current_stream(device).waited_for
    assert seen == [(SECOND, False), (SECOND, True), (FIRST, False), (FIRST, True)]


def test_two_threads_capture_one_after_the_other(cuda):
    inside, faults = threading.Event(), []

    def compute():
        inside.wait(0.05)
        return shown()

    def capture(device):
        try:
            CudaGraphs(device)(compute)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=capture, args=(device,)) for device in (FIRST, SECOND)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_a_capture_that_fails_leaves_nothing_behind(cuda):
    def compute():
        cuda.invalidate()
        return shown()

    step = Replay(CudaGraphs(FIRST), 1e-3)
    for _ in range(2):
        assert step(compute).logits[0, 0, 1] == 1
        assert cuda.current_stream() is cuda._first[0]
        assert cuda.underway is None
        cuda.draw()
    assert "previous error during capture" in step.fault


def test_a_forward_that_waits_is_not_captured(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "graph", None)
    step = Replay(CudaGraphs(FIRST), 1e-3)
    value = torch.ones(3)
    assert step(lambda: shown(float(value.max()))).logits[0, 0, 1] == 1
    assert "waits for the device" in step.fault


@pytest.mark.parametrize(("compiled", "looks"), [(False, [NoWaits]), (True, [])])
def test_compiled_code_runs_under_no_mode(cuda, compiled, looks):
    """Under one, torch runs it as if it were not compiled."""
    seen = []

    def compute():
        seen.append([type(mode) for mode in _get_current_dispatch_mode_stack()])
        return shown()

    replay.recorder(FIRST, compiled)(compute)
    assert seen == [looks, []]


WAITS = {
    "a number": lambda x: x.max().item(),
    "a branch": lambda x: bool((x > 0).any()),
    "places": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a mask written through": lambda x: x.index_put_((x > 0,), x.new_ones(())),
    "different values": lambda x: x.unique(),
    "a copy": lambda x: x.to("meta"),
    # As `torch.tensor` shows what it has copied.
    "numbers of the host": lambda x: torch.ops.aten.lift_fresh(torch.empty(2, device="meta")),
    "an index of the host": lambda x: torch.empty(4, device="meta")[torch.tensor([1, 2])],
}
WAITS_NOT = {
    "an index": lambda x: x[torch.arange(2)],
    "a mask": lambda x: x.masked_fill(x > 0, 2.0),
    "a flag written": lambda x: (x > 0).index_put_((torch.arange(2),), torch.tensor(True)),
    "another dtype": lambda x: x.to(torch.float16) * 2,
    "a number of the host": lambda x: torch.empty(4, device="meta") * torch.tensor(2.0),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_found(name):
    with NoWaits(), pytest.raises(RuntimeError, match="waits for the device"):
        WAITS[name](torch.ones(4))


@pytest.mark.parametrize("name", WAITS_NOT)
def test_what_does_not_wait_is_left_alone(name):
    with NoWaits():
        WAITS_NOT[name](torch.ones(4))


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

    repeat = Replay.__call__

    def repeated(step, compute):
        if step._trusted and step.fault is None:
            cuda.queued.append(step._repeat)
            return step._recorded
        return at_once(repeat)(step, compute)

    monkeypatch.setattr(PackedBuffer, "_copy", copied)
    choose = NodeChoices.__call__

    def chosen(choices, logits, trees, out):
        cuda.queued.append(lambda: choose(choices, logits, trees, out))
        ends = list(accumulate(1 + len(tree) for tree in trees))
        return [0, *ends[:-1]] if any(not row.finished for row in choices.rows) else None

    monkeypatch.setattr(NodeChoices, "__call__", chosen)
    monkeypatch.setattr(Arena, "move", queued(Arena.move))
    monkeypatch.setattr(Replay, "__call__", repeated)
    for name in ("_settle", "_compute"):
        whole = getattr(fixed_verifier.FixedVerifier, name)
        monkeypatch.setattr(fixed_verifier.FixedVerifier, name, at_once(whole))


def test_rows_that_catch_up_overwrite_nothing_on_its_way(cuda, monkeypatch):
    serve_in_place(monkeypatch)
    model = build(LlamaForCausalLM, max_position_embeddings=1024)
    torch.manual_seed(5)
    ids = torch.randint(2, 60, (2, 14))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"do_sample": False, "max_new_tokens": 300, "return_dict_in_generate": True}
    free = model.generate(**inputs, **options).sequences[:, 14:].tolist()
    early = next(token for token in free[0][3:] if token not in free[1][:280])
    options |= {"eos_token_id": early, "pad_token_id": 0}
    plain = model.generate(**inputs, **options)
    lag(cuda, monkeypatch)
    for _ in range(3):
        assistant = oracle_assistant(plain.sequences)
        assisted = model.generate(**inputs, **options, assistant=assistant)
        assert torch.equal(assisted.sequences, plain.sequences)
        pairs = zip(assisted[CACHE].layers, plain[CACHE].layers, strict=True)
        for layer, expected in pairs:
            torch.testing.assert_close(layer.keys, expected.keys, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("rows", [1, 3])
def test_sampled_tokens_are_read_once_they_have_come(rows, cuda, monkeypatch):
    serve_in_place(monkeypatch)
    model = build(LlamaForCausalLM)
    torch.manual_seed(5)
    ids = torch.randint(2, 60, (rows, 14))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"do_sample": True, "top_p": 0.9, "max_new_tokens": 40}
    lag(cuda, monkeypatch)
    for _ in range(3):
        plain, assisted, assistant = both(model, inputs, **options)
        assert torch.equal(plain, assisted)
        assert assistant.stats.last.accepted > 0
    assert not any(step.replay.fault for step in WORKSPACES._idle[model][-1]._steps.values())
