"""Hundreds of calls with one assistant: none takes more work or memory than those before."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.cache.kv_cache import SlotCache
from tests.support.lossless import build
from tests.support.watching import profiled, results_of

pytestmark = pytest.mark.slow

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


def piece(model, assistant, numbers):
    """The figures of some calls, per call."""
    figures = SimpleNamespace(steps=0, drafted=0)
    for number in numbers:
        generate(model, number, assistant)
        figures.steps += assistant.stats.last.steps / len(numbers)
        figures.drafted += assistant.stats.last.drafted / len(numbers)
    # What learns is not counted, so that the same texts may be probed again and again.
    private = assistant.private()
    probes = [calls_made(lambda n=n: generate(model, n, private)) for n in PROBES]
    figures.functions = sum(probes) / len(probes)
    gc.collect()
    figures.objects, figures.outputs = len(gc.get_objects()), len(assistant.memory)
    figures.nbytes = assistant.memory.nbytes
    return figures


def later(pieces, name):
    """A figure of the later half over that of the earlier one; pieces differ by what they drew."""
    figures = [getattr(found, name) for found in pieces]
    half = len(figures) // 2
    return sum(figures[-half:]) / sum(figures[:half])


@pytest.mark.parametrize("count", [200, 5000])
def test_work_and_memory_stay_level(count):
    model = build(num_hidden_layers=1)
    assistant = SamAssistant(memory=OutputMemory(SMALL), budget=8)
    per_piece = count // PIECES
    numbers = [range(i * per_piece, (i + 1) * per_piece) for i in range(PIECES)]
    pieces = [piece(model, assistant, some) for some in numbers]
    early, late = pieces[PIECES // 2 - 1], pieces[-1]
    assert late.drafted > 0
    assert later(pieces, "steps") <= 1.1
    assert later(pieces, "functions") <= 1.05
    # Two objects for each output that is remembered, until the memory is full.
    assert late.objects - early.objects <= 2 * (late.outputs - early.outputs) + 50
    if count > 1000:
        assert late.outputs < 500
        assert late.nbytes > 0.9 * SMALL


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
