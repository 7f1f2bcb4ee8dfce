"""How many functions of the package a step calls, and in how many files they stand: a count of the
host's own work, and of what there is to read."""

from pathlib import Path
from statistics import median

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_retrieval_assist
from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.decoding.loop import Generation
from tests.support.lossless import build
from tests.support.quick import cases
from tests.support.watching import profiled

PACKAGE = str(Path(hf_retrieval_assist.__file__).parent)


COUNTED = [
    *[(1, 8, False, (284, 172, 30)), (16, 8, False, (910, 228, 35))],
    *[(1, 0, False, (175, 130, 30)), (16, 0, False, (317, 131, 30))],
    (208, 0, True, (2380, 183, 35)),
]


@pytest.mark.parametrize(("rows", "budget", "sampled", "most"), cases(COUNTED, 2))
def test_a_step_calls_no_more_functions(rows, budget, sampled, most, monkeypatch):
    """Of a batch of texts that repeat themselves; budget 0: no step has a draft."""
    options = {"do_sample": sampled, "max_new_tokens": 40}
    model = build(LlamaForCausalLM)
    once = torch.randint(3, 60, (rows, 12), generator=torch.Generator().manual_seed(3))
    inputs = {"input_ids": once.repeat(1, 3), "attention_mask": torch.ones(rows, 36).long()}
    assistant, step, counts = SamAssistant(budget=budget), Generation.step, []
    model.generate(**inputs, **options, assistant=assistant)  # tests the model, chooses kernels

    def counted(generation):
        def see(frame, event, argument):
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                counts[-1].append((frame.f_code.co_filename, frame.f_code.co_qualname))

        counts.append([])
        with profiled(see):
            step(generation)

    monkeypatch.setattr(Generation, "step", counted)
    model.generate(**inputs, **options, assistant=assistant)
    assert len(counts) == assistant.stats.last.forwards
    assert (assistant.stats.last.drafted > 0) == (budget > 0)
    found = (
        median(map(len, counts)),
        median(len({*calls}) for calls in counts),
        median(len({file for file, _ in calls}) for calls in counts),
    )
    print(f"{rows} rows, budget {budget}: calls, functions, files {found}, at most {most}")
    assert all(one <= bound for one, bound in zip(found, most, strict=True))
