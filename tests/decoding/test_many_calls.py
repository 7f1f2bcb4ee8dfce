"""Hundreds of calls with one assistant: none takes more work or memory than those before."""

import gc
import weakref

import pytest
import torch

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.cache.kv_cache import SlotCache
from tests.support.lossless import build
from tests.support.watching import profiled, results_of

PIECES = 10
PROBES = range(1_000_000, 1_000_006)
SMALL = 300_000  # bytes; full after some 200 outputs


def calls_made(work):
    """How many functions, of Python and of C, are called: a count of the host's work."""
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    with profiled(see):
        work()
    return count


def generate(model, number, assistant):
    torch.manual_seed(number)
    ids = torch.randint(3, 20, (1, 12))
    options = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.7}
    model.generate(ids, attention_mask=torch.ones_like(ids), assistant=assistant, **options)


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, 5000])
def test_work_and_memory_stay_level(count):
    model = build(num_hidden_layers=1)
    assistant = SamAssistant(memory=OutputMemory(SMALL), budget=8)
    # What learns is not counted, so that the same texts may be probed again and again.
    private, pieces = assistant.private(), []
    for first in range(0, count, count // PIECES):
        steps = []
        for number in range(first, first + count // PIECES):
            generate(model, number, assistant)
            steps.append(assistant.stats.last.steps)
        probes = [calls_made(lambda n=n: generate(model, n, private)) for n in PROBES]
        gc.collect()
        objects, outputs = len(gc.get_objects()), len(assistant.memory)
        pieces.append((sum(steps), sum(probes), objects, outputs))
    steps, functions, objects, outputs = zip(*pieces, strict=True)
    half = PIECES // 2
    assert assistant.stats.last.drafted > 0
    # Pieces differ by what they drew.
    assert sum(steps[half:]) <= 1.1 * sum(steps[:half])
    assert sum(functions[half:]) <= 1.05 * sum(functions[:half])
    # Two objects for each output that is remembered, until the memory is full.
    assert objects[-1] - objects[half - 1] <= 2 * (outputs[-1] - outputs[half - 1]) + 50
    if count > 1000:
        assert outputs[-1] < 500
        assert assistant.memory.nbytes > 0.9 * SMALL


def test_the_memory_of_a_call_is_free_when_it_ends(monkeypatch):
    """Not only when Python's collector comes round."""
    model, assistant = build(), SamAssistant(budget=4)
    generate(model, 0, assistant)  # tests the model
    caches = results_of(monkeypatch, SlotCache, "take", lambda result, own: weakref.ref(own))
    gc.disable()
    try:
        for number in range(4):
            generate(model, number, assistant)
        assert [found() for found in caches] == [None] * 4
    finally:
        gc.enable()
