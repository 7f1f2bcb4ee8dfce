"""Thousands of calls with one assistant: none takes more work or memory than those before."""

import gc
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_retrieval_assist import OutputMemory, SamAssistant
from tests.support.lossless import build

PIECES = 10
COUNTS = [300, pytest.param(5000, marks=pytest.mark.slow)]
PROBES = range(1_000_000, 1_000_008)
SMALL = 300_000  # bytes; full after some 200 outputs


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def calls_made(work):
    """How many functions, of Python and of C, are called: a count of the host's work."""
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def piece(model, assistant, numbers):
    """The figures of some calls, per call."""
    started, figures = time.process_time(), SimpleNamespace(steps=0, drafted=0)
    for number in numbers:
        generate(model, number, assistant)
        figures.steps += assistant.stats.last.steps / len(numbers)
        figures.drafted += assistant.stats.last.drafted / len(numbers)
    figures.milliseconds = 1e3 * (time.process_time() - started) / len(numbers)
    # What learns is not counted, so that the same texts may be probed again and again.
    private = assistant.private()
    probes = [calls_made(lambda n=n: generate(model, n, private)) for n in PROBES]
    figures.functions = sum(probes) / len(probes)
    gc.collect()
    figures.objects, figures.resident = len(gc.get_objects()), resident()
    figures.outputs, figures.nbytes = len(assistant.memory), assistant.memory.nbytes
    return figures


def generate(model, number, assistant):
    torch.manual_seed(number)
    prompt = torch.randint(3, 20, (1, 12))
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant=assistant,
        max_new_tokens=8,
        do_sample=True,
        temperature=0.7,
    )


def later(pieces, name):
    """A figure of the later half over that of the earlier one; pieces differ by what they drew."""
    figures = [getattr(found, name) for found in pieces]
    half = len(figures) // 2
    return sum(figures[-half:]) / sum(figures[:half])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it reads /proc")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("max_bytes", [SMALL, pytest.param(256 << 20, marks=pytest.mark.slow)])
def test_work_and_memory_stay_level(max_bytes, count):
    model = build(LlamaForCausalLM, num_hidden_layers=1)
    assistant = SamAssistant(memory=OutputMemory(max_bytes), budget=8)
    per_piece = count // PIECES
    pieces = []
    for i in range(PIECES):
        numbers = range(i * per_piece, (i + 1) * per_piece)
        pieces.append(found := piece(model, assistant, numbers))
        print(
            f"{numbers.stop:5d} calls  {found.milliseconds:6.2f} ms of CPU time, "
            f"{found.functions:7.0f} functions called, {found.steps:5.2f} steps, "
            f"{found.drafted:5.1f} drafted, {found.objects} objects, "
            f"{found.resident / 2**20:.1f} MB, {found.outputs} outputs of {found.nbytes} bytes"
        )
    early, late = pieces[PIECES // 2 - 1], pieces[-1]
    made = count - count // 2
    assert late.drafted > 0
    assert later(pieces, "steps") <= 1.1
    assert later(pieces, "functions") <= 1.05
    # Two objects for each output that is remembered, until the memory is full.
    assert late.objects - early.objects <= 2 * (late.outputs - early.outputs) + 50
    grown = late.nbytes - early.nbytes
    assert late.resident - early.resident <= 2 * grown + 1000 * made + (4 << 20)
    if max_bytes == SMALL and count > 1000:
        assert late.outputs < 500
        assert late.nbytes > 0.9 * max_bytes
