"""The parts of a step in fixed memory: buffers, arena, masks and replays, each by itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from hf_retrieval_assist.token_tree import TokenTree
from hf_retrieval_assist.verification.arena import Arena, capacity_bucket
from hf_retrieval_assist.verification.fed_tokens import FedTokens
from hf_retrieval_assist.verification.fixed_masks import FixedMasks
from hf_retrieval_assist.verification.kv_cache import RowSlots, SlotCache
from hf_retrieval_assist.verification.packed_buffer import PackedBuffer
from hf_retrieval_assist.verification.replay import Replay, Shown
from hf_retrieval_assist.verification.tree_attention import (
    LayerMask,
    TreeAttention,
)
from tests.support.op_recorder import record
from tests.support.tiny_models import tiny_config

CPU = torch.device("cpu")


def test_a_packed_buffer_crosses_in_one_copy():
    fields = {
        "flags": (torch.bool, (3,)),
        "ids": (torch.int64, (2, 3)),
        "logits": (torch.bfloat16, (2, 2, 5)),
    }
    buffer = PackedBuffer(fields, CPU)
    buffer.host["ids"].numpy()[:] = np.arange(6).reshape(2, 3)
    buffer.host["flags"].numpy()[:] = [True, False, True]
    buffer.send()
    assert buffer.device["ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert buffer.device["flags"].tolist() == [True, False, True]
    buffer.device["logits"].fill_(2.5)
    buffer.device["ids"].add_(1)
    buffer.fetch()
    buffer.wait()
    assert (buffer.host["logits"] == 2.5).all()
    assert buffer.host["ids"].tolist() == [[1, 2, 3], [4, 5, 6]]


@given(st.integers(1, 1 << 20))
def test_capacities_are_few_and_close(slots):
    capacity = capacity_bucket(slots)
    assert slots <= capacity < slots + max(256, slots / 4)
    assert capacity % 64 == 0
    assert capacity_bucket(capacity) == capacity


def filled_cache(lengths, heads=2, depth=4):
    config = tiny_config(LlamaConfig)
    cache = SlotCache(config)
    for i in range(config.num_hidden_layers):
        keys = torch.randn(len(lengths), heads, max(lengths), depth)
        cache.update(keys, -keys, i)
    cache.begin(len(lengths))
    cache.slots.set_lengths(lengths)
    return cache


@pytest.mark.parametrize(("apart", "by_slot"), [(False, False), (True, False), (False, True)])
def test_an_arena_holds_what_layers_had_and_moves_paths(apart, by_slot):
    lengths = [7, 5]
    one, other = filled_cache(lengths), None
    torch.manual_seed(0)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in one.slot_layers]
    arena = Arena(2, 16, apart, by_slot)
    arena.hold(one.slot_layers)
    for layer, (keys, values) in zip(one.slot_layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    fed = torch.arange(5) + torch.tensor(lengths)[:, None]
    rows = torch.arange(2)[:, None]
    one.slots.places = rows, fed
    new = torch.randn(2, 2, 5, 4)
    for i, layer in enumerate(one.slot_layers):
        keys, values = layer.update(new + i, new - i)
        assert keys.shape[2] == values.shape[2] == 16
        # Models may flatten heads into rows; attention in parts flattens slots into them.
        assert all((x.transpose(1, 2) if by_slot else x).is_contiguous() for x in (keys, values))
    # Row 0 keeps what it was fed at 0, 2 and 4, row 1 at 0 alone.
    arena.move(rows, fed[:, :3].gather(1, torch.tensor([[0, 2, 2], [0, 1, 2]])), fed[:, :3])
    one.slots.places = None
    for i, (layer, (keys, values)) in enumerate(zip(one.slot_layers, before, strict=True)):
        layer.show(12)
        assert torch.equal(layer.keys[0, :, :7], keys[0])
        assert torch.equal(layer.values[1, :, :5], values[1, :, :5])
        assert torch.equal(layer.keys[0, :, 8], new[0, :, 2] + i)
        assert torch.equal(layer.values[1, :, 5], new[1, :, 0] - i)
        layer.move_out()
    kept = [layer.keys.clone() for layer in one.slot_layers]
    # Another cache in the same memory finds it empty and disturbs nobody.
    other = filled_cache([3, 3])
    arena.hold(other.slot_layers)
    for layer, keys in zip(one.slot_layers, kept, strict=True):
        assert torch.equal(layer.keys, keys)
    assert not other.slot_layers[0]._buffers[0][:, :, 3:].any()


def highest(work):
    """Bytes at once, at most, of what is allocated meanwhile."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    live = [event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())]
    return max(np.cumsum(live))


@pytest.mark.parametrize("apart", [True, False])
def test_a_cache_moves_into_an_arena_without_twice_its_memory(apart, monkeypatch):
    layers, slots = 6, 512
    cache = SlotCache(tiny_config(LlamaConfig, num_hidden_layers=layers))
    for i in range(layers):
        cache.update(torch.randn(2, 2, slots, 16), torch.randn(2, 2, slots, 16), i)
    cache.begin(2)
    whole = layers * 2 * (2 * 2 * slots * 16 * 4)
    # Two layers to a tensor.
    monkeypatch.setattr("hf_retrieval_assist.verification.arena.MOST_BYTES", whole // 3)
    # Whose memory stays taken, so that nothing is freed that was not counted.
    before = [(layer.keys, layer.values) for layer in cache.slot_layers]
    arena = Arena(2, slots, apart)

    def move():
        for layer in cache.slot_layers:
            layer.move_out()
        arena.hold(cache.slot_layers)

    assert whole <= highest(move) <= whole + whole // 3 + 4096
    assert len(arena._groups) == 3
    storages = {x.untyped_storage() for y in cache.slot_layers for x in y._buffers}
    assert len(storages) == (2 * layers if apart else 3)
    assert arena.nbytes == whole
    rows, last = torch.arange(2)[:, None], torch.full((2, 1), slots - 1)
    arena.move(rows, last, torch.zeros_like(last))
    for layer, (keys, values) in zip(cache.slot_layers, before, strict=True):
        for shown, held in ((layer.keys, keys), (layer.values, values)):
            assert torch.equal(shown[:, :, 1:], held[:, :, 1:])
            assert torch.equal(shown[:, :, 0], held[:, :, -1])


RULES = [
    LayerMask(),
    LayerMask(window=4),
    LayerMask(chunk=5),
    {"full": LayerMask(), "sliding": LayerMask(window=3), "chunked": LayerMask(chunk=6)},
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RULES), st.integers(1, 3), st.integers(0, 2**32 - 1), st.booleans())
def test_masks_are_those_of_views(rules, batch, seed, padded):
    rng = np.random.default_rng(seed)
    prompt = 9
    lengths = [prompt + int(n) for n in rng.integers(0, 6, batch)]
    trees = []
    for _ in range(batch):
        n = int(rng.integers(0, 6))
        parents = [int(rng.integers(-1, i)) if i else -1 for i in range(n)]
        trees.append(TokenTree.build(rng.permutation(50)[:n], parents, np.full(n, 0.5)))
    mask = None
    if padded:
        mask = torch.ones(batch, prompt, dtype=torch.bool)
        for row in range(batch):
            mask[row, : int(rng.integers(0, 5))] = False
    slots = RowSlots(lengths)
    fed = FedTokens.of([1] * batch, trees, lengths).lines(CPU)
    expected = TreeAttention(rules, mask, torch.float32).masks(fed, slots)
    width, capacity = fed.width + int(rng.integers(0, 3)), 32
    fixed = FixedMasks(rules, batch, capacity, torch.float32, CPU)
    fixed.start(mask)
    buffer = PackedBuffer(fixed.fields(width, width), CPU)
    fixed.write(buffer.host, FedTokens.of([1] * batch, trees, lengths, width=width))
    buffer.send()
    actual = fixed.build(buffer.device)
    if not isinstance(rules, dict):
        expected, actual = {"all": expected}, {"all": actual}
    first = slots.view_from or 0
    for kind, whole in expected.items():
        got = actual[kind]
        assert got.shape == (batch, 1, width, capacity)
        rule = rules[kind] if isinstance(rules, dict) else rules
        shown = first if rule.reach is not None and isinstance(rules, dict) else 0
        stop = slots.longest + fed.width
        if whole is None:
            whole = torch.zeros(batch, 1, fed.width, stop - shown)
        for row, tree in enumerate(trees):
            for node in range(1 + len(tree)):
                assert torch.equal(got[row, 0, node, shown:stop], whole[row, 0, node])
                hidden = torch.cat([got[row, 0, node, :shown], got[row, 0, node, stop:]])
                assert (hidden == torch.finfo(torch.float32).min).all()


def built(fixed, fed, columns):
    """Masks by kind of layer."""
    buffer = PackedBuffer(fixed.fields(fed.width, columns), CPU)
    fixed.write(buffer.host, fed)
    buffer.send()
    masks = fixed.build(buffer.device)
    return masks if isinstance(masks, dict) else {"all": masks}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(RULES), st.integers(1, 7), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_tokens_fed_one_after_another_see_what_they_would_together(rules, before, spare, seed):
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(max(-1, i - 2), i)) if i else -1 for i in range(8)]
    trees = [TokenTree.build(rng.permutation(50)[:8], parents, np.full(8, 0.5))] * 2
    fixed = FixedMasks(rules, 2, 32, torch.float32, CPU)
    together = FedTokens.of([1, 1], trees, [9, 12])
    later = replace(
        together,
        token_ids=together.token_ids[:, before:],
        depths=together.depths[:, before:],
        sees=together.sees[:, before:],
        earlier=together.depths[:, :before],
    )
    assert np.array_equal(later.slots, together.slots[:, before:])
    whole, part = built(fixed, together, together.width), built(fixed, later, 9 + spare)
    for kind in whole:
        assert torch.equal(part[kind], whole[kind][:, :, before:])


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
        assert torch.allclose(replay(counted).logits, expected)
        assert calls[0] == min(3, 2 + round_)
        assert replay.settled == (round_ > 0)
    assert replay.fault is None


def test_what_python_took_for_granted_is_found():
    buffer, weight, baked = torch.randn(3, 4), torch.randn(4, 6), [1.0]
    replay = Replay(record, 1e-5)
    compute = computation(buffer, weight, baked)
    for _ in range(4):
        baked[0] += 1
        assert torch.allclose(replay(compute).logits, (buffer @ weight)[None] * baked[0])
    assert "logits are off" in replay.fault


def test_what_waits_for_the_device_is_computed():
    buffer = torch.randn(3, 4)

    def compute():
        return Shown((buffer * float(buffer.sum()))[None], [], None)

    replay = Replay(record, 1e-5)
    for _ in range(3):
        buffer.add_(1)
        assert torch.allclose(replay(compute).logits, (buffer * buffer.sum())[None])
    assert "_local_scalar_dense" in replay.fault


def test_nothing_records_on_a_cpu():
    replay = Replay(None, 1e-5)
    compute = computation(torch.ones(2, 2), torch.ones(2, 2))
    assert replay.settled
    assert replay(compute).outputs == "outputs"
