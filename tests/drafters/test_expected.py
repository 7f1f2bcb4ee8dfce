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


KEPT, LINE = len(EDITED) - 2, [1, 2, 3, 4]
CAME = [
    # Texts, an output, and how many of their tokens came and did not.
    ([FILE], EDITED, (KEPT, len(FILE) - KEPT)),
    ([FILE, [950, 951, 952]], EDITED, (KEPT, len(FILE) - KEPT + 3)),
    ([FILE], [950] * 20, (0, len(FILE))),
    ([], EDITED, (0, 0)),
    # No run crosses from one text to the next.
    ([[1, 2, 3], [4, 5, 6]], [1, 2, 3, 4, 5], (3, 3)),
    # What an output repeats less often has come so often.
    ([LINE * 3], LINE, (4, 8)),
    ([LINE * 3], [*LINE, 9, *LINE], (8, 4)),
    ([LINE], LINE * 3, (4, 0)),
    ([LINE, LINE], LINE, (4, 4)),
    # Fewer than three tokens are within nothing.
    ([[1, 2], [1, 2, 3]], [1, 2], (0, 5)),
    ([[1, 2], [1]], [1, 2, 3], (0, 3)),
]


@pytest.mark.parametrize(("texts", "output", "came"), CAME, ids=range(len(CAME)))
def test_what_came_out_is_counted_across_changes(texts, output, came):
    assert came_out([np.array(text, np.int32) for text in texts], output) == came


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


def test_rows_of_a_batch_expect_one_text_or_texts_of_their_own(llama):
    """Output is plain's; the second row does not come out as the first one, which both expect."""
    first, second = llama.generate(PROMPTS, **OPTIONS)[:, 3:].tolist()
    assistant = SamAssistant(budget=8, reroute=False)
    accepted = generated(llama, assistant.expecting(first))
    assert 24 <= accepted == 48 - assistant.stats.last.expected_rejected
    assert f"{accepted} of 48 expected tokens came" in str(assistant.stats.last)
    assert not assistant.expected
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
