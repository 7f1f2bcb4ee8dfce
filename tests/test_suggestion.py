"""Measured advice on which assistant to use."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

from hf_retrieval_assist import SamAssistant, suggest
from hf_retrieval_assist import suggestion as module
from hf_retrieval_assist.record.record import Record
from hf_retrieval_assist.suggestion import Suggestion, Trial

from .lossless import PROMPT, build
from .test_examples import small_model


def test_all_candidates_see_all_prompts_and_write_what_plain_does():
    model = build(LlamaForCausalLM)
    prompts = [PROMPT, PROMPT.flip(1)]
    found = suggest(model, prompts, max_new_tokens=12)
    assert {trial.name for trial in found.trials} == set(module.default_candidates())
    for trial in found.trials:
        assert trial.identical == len(trial.seconds) == len(trial.plain_seconds) == 2
        assert len(trial.record.calls) == 2
        assert isinstance(trial.make(), type(module.default_candidates()[trial.name]()))
    ratios = [trial.ratio for trial in found.trials]
    assert ratios == sorted(ratios, reverse=True)
    assert found.best.name in str(found)


def test_prompts_may_be_texts_and_sampled():
    model, tokenizer = small_model()
    candidates = {"mine": lambda: SamAssistant(budget=8)}
    found = suggest(
        model,
        ["one two one two"],
        tokenizer=tokenizer,
        candidates=candidates,
        max_new_tokens=12,
        do_sample=True,
    )
    assert [trial.name for trial in found.trials] == ["mine"]
    assert found.best.identical == 1
    assert "text" in found.best.sources


def trial(name, seconds, plain):
    return Trial(name, SamAssistant, Record(), seconds=seconds, plain_seconds=plain, identical=2)


def test_advice_follows_the_figures():
    good = Suggestion(
        [trial("good<b>", [1.0, 1.0], [3.0, 1.5]), trial("bad", [2.0, 2.0], [3, 1.5])]
    )
    assert good.best.ratio == 2.25
    assert good.best.worst_ratio == 1.5
    assert good.advice.startswith("Use good<b>: 2.25 times")
    assert "good&lt;b&gt;" in good._repr_html_()
    assert Suggestion([trial("bad", [2.0], [2.0])]).advice.startswith("Nothing tried here pays")


def test_wrong_arguments():
    model = build(LlamaForCausalLM)
    with pytest.raises(ValueError, match="prompts: expected at least one"):
        suggest(model, [])
    with pytest.raises(ValueError, match="tokenizer: expected one"):
        suggest(model, ["text"])
