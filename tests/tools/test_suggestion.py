"""Measured advice on which assistant to use."""

import pytest
from transformers import LlamaForCausalLM

from hf_retrieval_assist import SamAssistant, suggest
from hf_retrieval_assist.tools import suggestion as module
from hf_retrieval_assist.tools.suggestion import COPIES, KERNELS, LOOKUP, PLAIN, Suggestion, Trial
from tests.support.byte_model import small_model
from tests.support.lossless import PROMPT, build
from tests.support.watching import calls_of


def test_every_way_sees_all_prompts_in_turn_and_writes_what_plain_does(monkeypatch, capsys):
    model = build(LlamaForCausalLM)
    calls = calls_of(monkeypatch, module, "_call")
    candidates = {"sam": SamAssistant, "alone": lambda: SamAssistant(fallback=None)}
    found = suggest(
        model, [PROMPT, PROMPT.flip(1)], candidates=candidates, max_new_tokens=8, repeats=2
    )
    names = [PLAIN, KERNELS, COPIES, LOOKUP, "sam", "alone"]
    assert [trial.name for trial in found.baselines] == names[:4]
    assert {trial.name for trial in found.trials} == {*candidates}
    for trial in (*found.baselines, *found.trials):
        assert (trial.identical, len(trial.seconds)) == ({0, 1}, 2)
        assert trial.stats.calls == (2 if trial.make else 0)
    asked = [name for _, _, name, *_ in calls[1:]]
    rounds = [asked[i : i + 6] for i in range(0, 36, 6)]
    assert rounds == [names[k:] + names[:k] for k in (0, 1, 1, 2, 2, 3)]
    assert isinstance(found.best.make(), SamAssistant)
    assert "| 36/36 [" in capsys.readouterr().err


def test_prompts_may_be_texts_and_a_model_be_without_prompt_lookup(monkeypatch, capsys):
    def refuse(generate, inputs, name, assistant):
        if name == LOOKUP:
            raise ValueError("not this model")
        return call(generate, inputs, name, assistant)

    call, (model, tokenizer) = module._call, small_model()
    monkeypatch.setattr(module, "_call", refuse)
    options = {"candidates": {"mine": SamAssistant}, "max_new_tokens": 12, "do_sample": True}
    found = suggest(model, ["one two"], tokenizer=tokenizer, progress=False, repeats=1, **options)
    assert [trial.name for trial in found.baselines] == [PLAIN, KERNELS, COPIES]
    assert found.best.identical == {0}
    assert "measuring" not in capsys.readouterr().err


def test_the_table_compares_the_quickest_repeats():
    plain = Trial(PLAIN, seconds=[5.0, 4.0], identical={0, 1})
    mine = Trial("mine", SamAssistant, [4.5, 2.0], identical={1})
    figures = "mine 2.00 1.11 to 2.00 1 of 2"
    assert " ".join(str(Suggestion([plain], [mine])).splitlines()[-1].split()) == figures


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([], {}, "prompts: expected at least 1"),
        ("text", {}, "prompts: expected a list"),
        ([[1, 2]], {}, "prompts: expected texts or tensors"),
        ([PROMPT[0]], {}, r"prompts: expected int64 \[1, length\]"),
        (["text"], {}, "tokenizer: expected one"),
        ([PROMPT], {"repeats": 0}, "repeats: expected at least 1"),
        ([PROMPT], {"candidates": {}}, "candidates: expected at least 1"),
        ([PROMPT], {"candidates": [SamAssistant]}, "candidates: expected name -> function"),
        ([PROMPT], {"candidates": {"a": SamAssistant()}}, "that makes a, got SamAssistant"),
    ],
)
def test_wrong_arguments(prompts, options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        suggest(build(LlamaForCausalLM), prompts, **options)
