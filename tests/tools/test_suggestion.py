"""Measured advice on which assistant to use."""

import pytest
from transformers import LlamaForCausalLM

from hf_retrieval_assist import SamAssistant, suggest
from hf_retrieval_assist.tools import suggestion as module
from hf_retrieval_assist.tools.suggestion import COPIES, KERNELS, LOOKUP, PLAIN, Suggestion, Trial
from tests.support.byte_model import small_model
from tests.support.lossless import PROMPT, build
from tests.support.memories import remembering
from tests.support.watching import calls_of


def test_every_way_sees_all_prompts_in_turn_and_writes_what_plain_does(monkeypatch, capsys):
    model = build(LlamaForCausalLM)
    calls = calls_of(monkeypatch, module, "_call")
    candidates = {"sam": SamAssistant, "suffix": lambda: remembering(fallback=None)}
    found = suggest(
        model, [PROMPT, PROMPT.flip(1)], candidates=candidates, max_new_tokens=8, repeats=2
    )
    assert {trial.name for trial in found.trials} == {"sam", "suffix"}
    assert [trial.name for trial in found.baselines] == [PLAIN, KERNELS, COPIES, LOOKUP]
    for trial in (*found.baselines, *found.trials):
        assert trial.identical == {0, 1}
        assert len(trial.seconds) == 2
        assert trial.stats.calls == (2 if trial.make else 0)
    names = [PLAIN, KERNELS, COPIES, LOOKUP, "sam", "suffix"]
    asked = [name for _, _, name, *_ in calls[1:]]
    rounds = [asked[i : i + 6] for i in range(0, 36, 6)]
    assert rounds == [names[k:] + names[:k] for k in (0, 1, 1, 2, 2, 3)]
    assert found.best.name in str(found)
    assert isinstance(found.best.make(), SamAssistant)
    assert "| 36/36 [" in capsys.readouterr().err


def test_prompts_may_be_texts_and_sampled_and_a_model_be_without_prompt_lookup(monkeypatch, capsys):
    def refuse(generate, inputs, name, assistant):
        if name == LOOKUP:
            raise ValueError("not this model")
        return call(generate, inputs, name, assistant)

    call, (model, tokenizer) = module._call, small_model()
    monkeypatch.setattr(module, "_call", refuse)
    candidates = {"mine": lambda: SamAssistant(budget=8)}
    options = {"candidates": candidates, "max_new_tokens": 12, "repeats": 1, "do_sample": True}
    found = suggest(model, ["one two one two"], tokenizer=tokenizer, progress=False, **options)
    assert [trial.name for trial in found.trials] == ["mine"]
    assert [trial.name for trial in found.baselines] == [PLAIN, KERNELS, COPIES]
    assert found.best.identical == {0}
    assert "measuring" not in capsys.readouterr().err


def test_the_table_compares_the_quickest_repeats():
    plain = Trial(PLAIN, seconds=[5.0, 4.0], identical={0, 1})
    mine = Trial("mine", SamAssistant, [4.5, 2.0], identical={1})
    found = Suggestion([plain], [mine])
    assert found.best is mine
    figures = "mine 2.00 1.11 to 2.00 1 of 2"
    assert " ".join(str(found).splitlines()[-1].split()) == figures


def test_wrong_arguments():
    model = build(LlamaForCausalLM)
    for prompts, options, said in (
        ([], {}, "prompts: expected at least 1"),
        ([PROMPT], {"candidates": {}}, "candidates: expected at least 1"),
        ([PROMPT], {"repeats": 0}, "repeats: expected at least 1"),
        (["text"], {}, "tokenizer: expected one"),
    ):
        with pytest.raises(ValueError, match=said):
            suggest(model, prompts, **options)
    for one in ("text", PROMPT[0], {"input_ids": PROMPT}, 3, [[1, 2]]):
        with pytest.raises((TypeError, ValueError), match=r"^prompts: expected"):
            suggest(model, one)
    with pytest.raises(TypeError, match=r"^candidates: expected name -> function, got list"):
        suggest(model, [PROMPT], candidates=[SamAssistant])
    with pytest.raises(TypeError, match="expected a function that makes mine, got SamAssistant"):
        suggest(model, [PROMPT], candidates={"mine": SamAssistant()})
