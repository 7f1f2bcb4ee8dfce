"""Texts that the caller expects: drafted from, joined again after changes, and counted."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_retrieval_assist import SamAssistant, SuffixAssistant, simulate
from hf_retrieval_assist.drafters.expected import Expected, ExpectedTexts

from ..support.tiny_models import tiny_config, tiny_model

FILE = np.random.default_rng(0).integers(1, 900, 300).tolist()
EDITED = [*FILE[:100], 901, 902, *FILE[104:200], *FILE[230:]]


def followed(texts, output):
    found = ExpectedTexts([np.array(text, np.int32) for text in texts])
    for token in output:
        found.follow([token])
    return found.accepted, found.rejected


def test_what_came_out_is_counted_across_changes():
    kept = len(EDITED) - 2
    assert followed([FILE], EDITED) == (kept, len(FILE) - kept)
    assert followed([FILE, [950, 951, 952]], EDITED) == (kept, len(FILE) - kept + 3)
    assert followed([FILE], [950] * 20) == (0, len(FILE))
    assert followed([], EDITED) == (0, 0)


def test_no_run_crosses_from_one_text_to_the_next():
    assert followed([[1, 2, 3], [4, 5, 6]], [1, 2, 3, 4, 5]) == (3, 3)


@pytest.mark.parametrize("preset", [SamAssistant, SuffixAssistant])
@pytest.mark.parametrize("budget", [32, "paper"])
def test_an_expected_text_is_drafted_as_from_within_the_prompt(preset, budget):
    prompt = [950, 951, 952]
    without = simulate(preset(budget=budget), [(prompt, EDITED)])
    expecting = simulate(preset(budget=budget).expecting(FILE), [(prompt, EDITED)])
    within = simulate(preset(budget=budget), [(FILE + prompt, EDITED)])
    assert expecting.steps <= 1.05 * within.steps + 1
    assert expecting.steps < without.steps / 4


@pytest.mark.parametrize("preset", [SamAssistant, SuffixAssistant])
def test_generate_with_an_expected_text(preset):
    """The first row comes out as expected, the second does not; both are plain's."""
    model = tiny_model(LlamaForCausalLM, tiny_config(LlamaConfig))
    prompts = torch.tensor([[5, 6, 7], [9, 8, 4]])
    plain = model.generate(prompts, max_new_tokens=24, do_sample=False)
    first = plain[0, 3:].tolist()
    assistant = preset(budget=8, reroute=False)
    assisted = model.generate(
        prompts, max_new_tokens=24, do_sample=False, assistant=assistant.expecting(first)
    )
    assert torch.equal(plain, assisted)
    last = assistant.stats.last
    assert last.expected_accepted >= len(first)
    assert last.expected_accepted + last.expected_rejected == 2 * len(first)
    assert f"{last.expected_accepted} of {2 * len(first)} expected tokens came" in str(last)
    assert not assistant.expected


def test_every_row_of_a_batch_may_expect_texts_of_its_own():
    model = tiny_model(LlamaForCausalLM, tiny_config(LlamaConfig))
    prompts = torch.tensor([[5, 6, 7], [9, 8, 4]])
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = model.generate(prompts, **options)
    first, second = plain[:, 3:].tolist()
    assistant = SamAssistant(budget=8, reroute=False)

    def expected_tokens(inputs, *rows):
        expecting = assistant.expecting([65, 66], rows=rows)
        assert torch.equal(model.generate(inputs, assistant=expecting, **options)[:2], plain)
        return assistant.stats.last.expected_accepted

    assert expected_tokens(prompts, [first], [second]) == 48
    assert expected_tokens(prompts, [first], []) == 24
    assert expected_tokens(prompts, [second], [first]) < 24
    with pytest.raises(ValueError, match="expected a multiple of 3 rows, got 2"):
        model.generate(prompts, assistant=assistant.expecting(rows=[[first]] * 3), **options)


def test_rows_of_one_prompt_expect_the_same():
    expected = Expected.of([[1]], [[[2]], [[3], [4]]], None)
    found = [[text.tolist() for text in expected.of_row(row, 4)] for row in range(4)]
    assert found == [[[1], [2]]] * 2 + [[[1], [3], [4]]] * 2


def test_ids_outside_the_vocabulary_are_not_drafted():
    assistant = SamAssistant(budget="paper", fallback=None).expecting([1, 2, 3, 4, 5, 6, 2000, 7])
    report = simulate(assistant, [([9, 1, 2, 3, 4], [5, 6, 7])], vocab_size=1000)
    assert (report.nodes, report.tokens, report.steps) == (1, 2, 1)


def test_text_needs_a_tokenizer():
    class Tokenizer:
        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return type("Encoding", (), {"input_ids": [ord(c) for c in text]})

    assistant = SuffixAssistant().expecting("ab", tokenizer=Tokenizer())
    assert assistant.expected.texts[0].tolist() == [97, 98]
    with pytest.raises(TypeError, match="expected a tokenizer with it, got None"):
        SuffixAssistant().expecting("ab")
    with pytest.raises(ValueError, match=r"expected text: .* surrogates not allowed"):
        SuffixAssistant().expecting("a \ud83d", tokenizer=Tokenizer())
    with pytest.raises(TypeError, match="expected integer ids, got float64"):
        SuffixAssistant().expecting([0.5])
    with pytest.raises(ValueError, match="expected ids from 0 to"):
        SuffixAssistant().expecting([-1])
