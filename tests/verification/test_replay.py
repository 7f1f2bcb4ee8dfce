"""Computations that are recorded, compared and repeated."""

import torch

from hf_retrieval_assist.verification.replay import Replay, Shown
from tests.support.op_recorder import record


def as_it_is(shown):
    return shown


def computation(buffer, weight, baked=None):
    """A forward of a model that may have taken a number of the host for granted."""

    def compute():
        scale = 1.0 if baked is None else baked[0]
        return Shown((buffer @ weight * scale)[None], [], "outputs")

    return compute


def test_replays_compute_record_compare_and_repeat():
    buffer, weight = torch.randn(3, 4), torch.randn(4, 6)
    replay = Replay(record, 1e-5)
    compute = computation(buffer, weight)
    calls = [0]

    def counted():
        calls[0] += 1
        return compute()

    for round_ in range(5):
        buffer.copy_(torch.randn(3, 4))
        expected = (buffer @ weight)[None]
        assert torch.allclose(replay(counted, as_it_is).logits, expected)
        assert calls[0] == min(3, 2 + round_)
        assert replay.settled == (round_ > 0)
    assert replay.fault is None


def test_what_python_took_for_granted_is_found():
    buffer, weight, baked = torch.randn(3, 4), torch.randn(4, 6), [1.0]
    replay = Replay(record, 1e-5)
    compute = computation(buffer, weight, baked)
    for _ in range(4):
        baked[0] += 1
        assert torch.allclose(replay(compute, as_it_is).logits, (buffer @ weight)[None] * baked[0])
    assert "logits are off" in replay.fault


def test_what_waits_for_the_device_is_computed():
    buffer = torch.randn(3, 4)

    def compute():
        return Shown((buffer * float(buffer.sum()))[None], [], None)

    replay = Replay(record, 1e-5)
    for _ in range(3):
        buffer.add_(1)
        assert torch.allclose(replay(compute, as_it_is).logits, (buffer * buffer.sum())[None])
    assert "_local_scalar_dense" in replay.fault


def test_nothing_records_on_a_cpu():
    replay = Replay(None, 1e-5)
    compute = computation(torch.ones(2, 2), torch.ones(2, 2))
    assert replay.settled
    assert replay(compute, as_it_is).outputs == "outputs"
