"""Texts that the caller expects: drafted from, joined again after changes, and counted."""

from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.simulation import simulate
from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.drafters.expected import Expected, came_out
from hf_retrieval_assist.papers import SamDecoding, SuffixDecoding
from tests.support.memories import remembering

FILE = np.random.default_rng(0).integers(1, 900, 300).tolist()
EDITED = [*FILE[:100], 901, 902, *FILE[104:200], *FILE[230:]]


def counted(texts, output):
    return came_out([np.array(text, np.int32) for text in texts], output)


def test_what_came_out_is_counted_across_changes():
    kept = len(EDITED) - 2
    assert counted([FILE], EDITED) == (kept, len(FILE) - kept)
    assert counted([FILE, [950, 951, 952]], EDITED) == (kept, len(FILE) - kept + 3)
    assert counted([FILE], [950] * 20) == (0, len(FILE))
    assert counted([], EDITED) == (0, 0)


def test_no_run_crosses_from_one_text_to_the_next():
    assert counted([[1, 2, 3], [4, 5, 6]], [1, 2, 3, 4, 5]) == (3, 3)


def test_what_an_output_repeats_less_often_has_come_so_often():
    line = [1, 2, 3, 4]
    assert counted([line * 3], line) == (4, 8)
    assert counted([line * 3], [*line, 9, *line]) == (8, 4)
    assert counted([line], line * 3) == (4, 0)
    assert counted([line, line], line) == (4, 4)


@pytest.mark.parametrize("output", [[], [1], [1, 2]])
def test_fewer_than_three_tokens_are_within_nothing(output):
    assert counted([[1, 2], [1, 2, 3]], output) == (0, 5)
    assert counted([[1, 2], [1]], [1, 2, 3]) == (0, 3)


DRAFTING = [partial(preset, budget=32) for preset in (SamAssistant, remembering)]


@pytest.mark.parametrize("make", [*DRAFTING, SamDecoding, SuffixDecoding])
def test_an_expected_text_is_drafted_as_from_within_the_prompt(make):
    prompt = [950, 951, 952]
    without = simulate(make(), [(prompt, EDITED)])
    expecting = simulate(make().expecting(FILE), [(prompt, EDITED)])
    within = simulate(make(), [(FILE + prompt, EDITED)])
    assert expecting.steps <= 1.05 * within.steps + 1
    assert expecting.steps < without.steps / 4


PROMPTS = torch.tensor([[5, 6, 7], [9, 8, 4]])
OPTIONS = {"max_new_tokens": 24, "do_sample": False}


def generated(llama, assistant):
    """How many expected tokens came; the texts are plain's."""
    plain = llama.generate(PROMPTS, **OPTIONS)
    assert torch.equal(llama.generate(PROMPTS, assistant=assistant, **OPTIONS), plain)
    return assistant.stats.last.expected_accepted


@pytest.mark.parametrize("preset", [SamAssistant, remembering])
def test_generate_with_an_expected_text(llama, preset):
    """The first row comes out as expected, the second does not; both are plain's."""
    first = llama.generate(PROMPTS, **OPTIONS)[0, 3:].tolist()
    assistant = preset(budget=8, reroute=False)
    accepted = generated(llama, assistant.expecting(first))
    assert accepted >= len(first)
    last = assistant.stats.last
    assert accepted + last.expected_rejected == 2 * len(first)
    assert f"{accepted} of {2 * len(first)} expected tokens came" in str(last)
    assert not assistant.expected


def test_every_row_of_a_batch_may_expect_texts_of_its_own(llama):
    first, second = llama.generate(PROMPTS, **OPTIONS)[:, 3:].tolist()
    assistant = SamAssistant(budget=8, reroute=False)
    for rows, came in (([[first], [second]], 48), ([[first], []], 24)):
        assert generated(llama, assistant.expecting([65, 66], rows=rows)) == came
    assert generated(llama, assistant.expecting([65, 66], rows=[[second], [first]])) < 24
    with pytest.raises(ValueError, match="expected a multiple of 3 rows, got 2"):
        generated(llama, assistant.expecting(rows=[[first]] * 3))


def test_rows_of_one_prompt_expect_the_same():
    expected = Expected.of([[1]], [[[2]], [[3], [4]]], None)
    found = [[text.tolist() for text in expected.of_row(row, 4)] for row in range(4)]
    assert found == [[[1], [2]]] * 2 + [[[1], [3], [4]]] * 2


def test_ids_outside_the_vocabulary_are_not_drafted():
    assistant = SamDecoding(fallback=None).expecting([1, 2, 3, 4, 5, 6, 2000, 7])
    report = simulate(assistant, [([9, 1, 2, 3, 4], [5, 6, 7])], vocab_size=1000)
    assert (report.nodes, report.tokens, report.steps) == (1, 2, 1)


def test_text_needs_a_tokenizer():
    class Tokenizer:
        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return type("Encoding", (), {"input_ids": [ord(c) for c in text]})

    assistant = remembering().expecting("ab", tokenizer=Tokenizer())
    assert assistant.expected.texts[0].tolist() == [97, 98]
    with pytest.raises(TypeError, match="expected a tokenizer with it, got None"):
        remembering().expecting("ab")
    with pytest.raises(ValueError, match=r"expected text: .* surrogates not allowed"):
        remembering().expecting("a \ud83d", tokenizer=Tokenizer())
    with pytest.raises(TypeError, match="expected integer ids, got float64"):
        remembering().expecting([0.5])
    with pytest.raises(ValueError, match="expected ids from 0 to"):
        remembering().expecting([-1])
