"""Keys and values in static buffers."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from hf_retrieval_assist.cache.kv_cache import SlotCache
from hf_retrieval_assist.engines.cuda.arena import Arena, Shape, capacity_bucket
from hf_retrieval_assist.verification.tree_attention import LayerMask
from tests.support.tiny_models import tiny_config


@given(st.integers(1, 1 << 20))
def test_capacities_are_few_and_close(slots):
    capacity = capacity_bucket(slots)
    assert slots <= capacity < slots + max(256, slots / 4)
    assert capacity % 64 == 0
    assert capacity_bucket(capacity) == capacity


def highest(work):
    """Bytes at once, at most, of what is allocated meanwhile."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    live = [event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())]
    return max(np.cumsum(live))


def test_a_cache_moves_into_an_arena_without_twice_its_memory(monkeypatch):
    layers, slots = 6, 512
    cache = SlotCache(tiny_config(LlamaConfig, num_hidden_layers=layers))
    for i in range(layers):
        cache.update(torch.randn(2, 2, slots, 16), torch.randn(2, 2, slots, 16), i)
    cache.begin(2)
    whole = layers * 2 * (2 * 2 * slots * 16 * 4)
    # Two layers to a tensor.
    monkeypatch.setattr("hf_retrieval_assist.engines.cuda.arena.MOST_BYTES", whole // 3)
    # Whose memory stays taken, so that nothing is freed that was not counted.
    before = [(layer.keys, layer.values) for layer in cache.slot_layers]
    arena = Arena(Shape(2, slots, LayerMask(), torch.float32, torch.device("cpu")))

    def move():
        for layer in cache.slot_layers:
            layer.detach()
        arena.hold(cache.slot_layers)

    assert whole <= highest(move) <= whole + whole // 3 + 4096
    refs = [ref for layer in cache.slot_layers for ref in layer.store.block_refs]
    assert len({block.states.untyped_storage() for block, _ in refs}) == 3
    assert arena.nbytes == whole
    rows, last = torch.arange(2)[:, None], torch.full((2, 1), slots - 1)
    arena.move(rows, last, torch.zeros_like(last))
    for layer, (keys, values) in zip(cache.slot_layers, before, strict=True):
        for shown, held in ((layer.keys, keys), (layer.values, values)):
            assert torch.equal(shown[:, :, 1:], held[:, :, 1:])
            assert torch.equal(shown[:, :, 0], held[:, :, -1])
