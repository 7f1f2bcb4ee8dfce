"""Private texts: drafted from what was learnt, and leaving no trace in it."""

import numpy as np
import pytest

from hf_retrieval_assist import OutputMemory, SamAssistant, SuffixAssistant, simulate

from .support.lossless import NEW_TOKENS, run, same

TEXT = np.random.default_rng(0).integers(1, 60, 60).tolist()


@pytest.mark.parametrize("preset", [SamAssistant, SuffixAssistant])
def test_a_private_text_teaches_nothing(preset):
    assistant = preset(memory=OutputMemory())
    private = assistant.private()
    requests = [(TEXT[:1], TEXT[1:])]
    first, second = simulate(private, requests), simulate(private, requests)
    assert first.steps == second.steps
    assert len(assistant.memory) == 0
    simulate(assistant, requests)
    assert assistant.memory.token_count == len(TEXT) - 1
    assert simulate(private, requests).steps < first.steps / 2
    assert assistant.memory.token_count == len(TEXT) - 1


def test_generate_with_a_private_assistant(model, tmp_path):
    assistant = SuffixAssistant(memory=OutputMemory(path=tmp_path / "log"))
    private = assistant.private()
    same(model, assistant=private)
    assert len(assistant.memory) == 0
    assert len(OutputMemory(path=tmp_path / "log")) == 0
    assert assistant.stats.total.calls == 1
    run(model, assistant=assistant)
    assert assistant.memory.token_count == NEW_TOKENS
