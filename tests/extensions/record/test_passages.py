"""Where drafted tokens stand: in which document, and where in it."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.extensions.record.passages import BESIDE, LONGEST, Passage, Texts
from hf_retrieval_assist.extensions.record.steps import MODEL
from hf_retrieval_assist.types.token_tree import NamedIds
from tests.support.byte_model import small_model
from tests.support.lossless import PROMPT, run

TOKENS = 60
NOISE = [1, 2, 1, 3] * 5
FEW = st.lists(st.integers(0, 2), min_size=1, max_size=20)


def array(ids):
    return np.array(ids, np.int32)


def recorded(llama, assistant, **options):
    with assistant.record() as record:
        run(llama, assistant=assistant, max_new_tokens=TOKENS, **options)
    return record


def test_drafted_tokens_stand_at_their_places(llama):
    text = run(llama, max_new_tokens=TOKENS)[0, PROMPT.shape[1] :].tolist()
    documents = [
        NamedIds("guide.md", NOISE + text[5:25] + NOISE),
        NamedIds("", NOISE + text[15:45]),
    ]
    record = recorded(llama, SamAssistant(documents, budget=16))
    passages, (call,) = record.passages(documents), record.calls
    known = {"prompt": PROMPT[0].tolist(), "this answer": text}
    known |= {"guide.md": documents[0].token_ids, "document 1": documents[1].token_ids}
    assert {"guide.md", "document 1"} <= {x.name for x in passages}
    for x in passages:
        assert known[x.name][x.place : x.place + x.stop - x.start] == text[x.start : x.stop]
    found = {i for x in passages for i in range(x.start, x.stop)}
    drafted = {i for i, credit in enumerate(call.credits(0)) if credit != MODEL}
    assert found <= drafted
    assert {i for i in drafted if 5 <= i < 45} <= found
    assert {x.name for x in record.passages()} <= {"prompt", "this answer"}


@given(FEW, FEW, st.lists(FEW, max_size=3))
def test_no_passage_round_a_token_is_longer(prompt, answer, others):
    """Beside all places of all documents, tried one by one."""
    texts = Texts(array(prompt), array(answer), [NamedIds("", array(ids)) for ids in others])
    text, documents = prompt + answer, [prompt, answer, *others]

    def round_it(ids, at, token):
        before = after = 0
        while min(at, token) > before and ids[at - before - 1] == text[token - before - 1]:
            before += 1
        while at + after + 1 < len(ids) and token + after + 1 < len(text):
            if ids[at + after + 1] != text[token + after + 1]:
                break
            after += 1
        return before + after + 1

    for token in range(len(answer)):
        here = len(prompt) + token
        # The answer is known up to the token.
        ends = [len(prompt), token, *map(len, others)]
        found = [
            round_it(ids, at, here)
            for ids, end in zip(documents, ends, strict=True)
            for at in range(end)
            if ids[at] == text[here]
        ]
        longest = max(found, default=0)
        runs = [*texts.runs([token])]
        assert len(runs) == (longest >= 2)
        for one in runs:
            before, passage, after = texts.beside(one)
            assert (one.length, one.count) == (longest, found.count(longest))
            assert len(passage) == longest
            ids, (start, stop) = documents[one.document], one.span
            assert ids[start:stop] == passage.tolist()
            assert [*before, *passage, *after] == ids[max(0, start - BESIDE) : stop + BESIDE]


def test_tokens_of_one_passage_are_one_run():
    prompt, document = array(range(10, 30)), array(range(50, 60))
    answer = array([15, 16, 17, 52, 53, 54, 18])
    texts = Texts(prompt, answer, [NamedIds("notes", document)])
    first, second = texts.runs([1, 2, 3, 4, 5, 6])
    assert (first.start, first.stop, first.document, first.apart) == (1, 3, 0, 5)
    # What the model wrote between them is left out, and the last token stands in no passage.
    assert (second.start, second.stop, second.document, second.span) == (3, 6, 2, (2, 5))


def test_long_passages_are_looked_up_so_far():
    document = np.arange(1000, dtype=np.int32)
    (run,) = Texts(array([]), document, [NamedIds("notes", document)]).runs([500])
    assert run.length == 2 * LONGEST + 1


def test_a_passage_says_in_words_where_it_stands():
    one = Passage(0, 0, 1, 3, "prompt", 1400, "two", "one ", " three", 1)
    assert str(one) == "in the prompt, token 1,400: one [two] three"
    other = replace(one, name="a.md", count=2)
    assert str(other) == "in a.md, token 1,400, one of 2: one [two] three"


def test_passages_are_texts_where_there_is_a_tokenizer():
    model, tokenizer = small_model()
    inputs = tokenizer("one two three", return_tensors="pt")
    phrase = tokenizer("<b>four five", add_special_tokens=False).input_ids
    prompt = inputs.input_ids[0].tolist()
    written = phrase + prompt + phrase
    notes = NamedIds("<notes>", [*prompt, *phrase, *phrase[::-1]])

    class Forcing(LogitsProcessor):
        """Lets the model write the phrase, and once more behind the prompt."""

        def __call__(self, input_ids, scores):
            token = written[input_ids.shape[1] - len(prompt)]
            return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token]), 0.0)

    assistant = SamAssistant([notes], budget=16)
    with assistant.record(tokenizer) as record:
        model.generate(
            **inputs,
            assistant=assistant,
            logits_processor=LogitsProcessorList([Forcing()]),
            max_new_tokens=len(written),
            do_sample=False,
        )
    first = record.passages([notes])[0]
    # The first token is the model's own.
    assert (first.start, first.place) == (1, len("one two three") + 1)
    there = "in <notes>, token 14: [one two three<b>four five]evif ruof>b<"
    assert str(first) == there
    assert "<b>four" not in record._repr_html_()
