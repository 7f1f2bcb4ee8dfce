"""How many functions of the package a greedy step calls: a count of the host's own work."""

from pathlib import Path
from statistics import median

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_retrieval_assist
from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.decoding.loop import Generation
from tests.support.lossless import build
from tests.support.watching import profiled

PACKAGE = str(Path(hf_retrieval_assist.__file__).parent)
OPTIONS = {"do_sample": False, "max_new_tokens": 40}


def calls_of_steps(rows, budget, monkeypatch):
    """Of each step of a batch of texts that repeat themselves; budget 0: no step has a draft."""
    model = build(LlamaForCausalLM)
    once = torch.randint(3, 60, (rows, 12), generator=torch.Generator().manual_seed(3))
    inputs = {"input_ids": once.repeat(1, 3), "attention_mask": torch.ones(rows, 36).long()}
    assistant, step, counts = SamAssistant(budget=budget), Generation.step, []
    model.generate(**inputs, **OPTIONS, assistant=assistant)  # tests the model, chooses kernels

    def counted(generation):
        def see(frame, event, argument):
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                counts[-1] += 1

        counts.append(0)
        with profiled(see):
            step(generation)

    monkeypatch.setattr(Generation, "step", counted)
    model.generate(**inputs, **OPTIONS, assistant=assistant)
    assert len(counts) == assistant.stats.last.forwards
    assert (assistant.stats.last.drafted > 0) == (budget > 0)
    return counts


@pytest.mark.parametrize(
    ("rows", "budget", "most"), [(1, 0, 306), (1, 8, 424), (16, 0, 734), (16, 8, 1150)]
)
def test_a_step_calls_no_more_functions(rows, budget, most, monkeypatch):
    counts = calls_of_steps(rows, budget, monkeypatch)
    print(f"{rows} rows, budget {budget}: {median(counts):.0f} calls, at most {max(counts)}")
    assert median(counts) <= most
