"""Where drafted tokens stand: in which document, and where in it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.extensions.record.passages import LONGEST, Texts
from hf_retrieval_assist.extensions.record.steps import MODEL
from hf_retrieval_assist.types.token_tree import NamedIds
from tests.support.byte_model import small_model
from tests.support.lossless import PROMPT, run
from tests.support.trees import array

TOKENS = 60
NOISE = [1, 2, 1, 3] * 5
FEW = st.lists(st.integers(0, 2), min_size=1, max_size=20)


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
        places = [*texts.places([token])]
        assert len(places) == (longest >= 2)
        for start, stop, name, place in places:
            assert (start, stop) == (token, token + 1)
            ids = dict(zip(texts._names, documents, strict=True))[name]
            assert round_it(ids, place, here) == longest


def test_tokens_of_one_passage_are_one_run():
    prompt, document = array(range(10, 30)), array(range(50, 60))
    answer = array([15, 16, 17, 52, 53, 54, 18])
    texts = Texts(prompt, answer, [NamedIds("notes", document)])
    # The last token stands in no passage.
    assert [*texts.places([1, 2, 3, 4, 5, 6])] == [(1, 3, "prompt", 6), (3, 6, "notes", 2)]
    # What the model wrote between them is left out.
    assert [*texts.places([3, 5])] == [(3, 4, "notes", 2), (5, 6, "notes", 4)]


def test_long_passages_are_looked_up_so_far():
    """Of two that are as long as is looked at, the last one."""
    answer = np.arange(1000, dtype=np.int32)
    part = answer[500 - LONGEST : 501 + LONGEST]
    texts = Texts(array([]), answer, [NamedIds("whole", answer), NamedIds("part", part)])
    assert [*texts.places([500])] == [(500, 501, "part", LONGEST)]
    assert [*texts.places([501])] == [(501, 502, "whole", 501)]


def test_passages_are_texts_where_there_is_a_tokenizer():
    model, tokenizer = small_model()
    inputs = tokenizer("one two three", return_tensors="pt")
    phrase = tokenizer("<b>four five", add_special_tokens=False).input_ids
    prompt = inputs.input_ids[0].tolist()
    written = phrase + prompt + phrase
    notes = NamedIds("<notes>", [*prompt, *phrase, *phrase[::-1]])

    def write(row, ids):
        """The phrase, and once more behind the prompt."""
        return [written[len(ids) - len(prompt)]]

    assistant = SamAssistant([notes], budget=16)
    with assistant.record(tokenizer) as record:
        model.generate(
            **inputs,
            assistant=assistant,
            prefix_allowed_tokens_fn=write,
            max_new_tokens=len(written),
            do_sample=False,
        )
    first = record.passages([notes])[0]
    # The first token is the model's own.
    assert (first.start, first.place) == (1, len("one two three") + 1)
    assert str(first) == "in <notes>, token 14: b>four five"
    assert "<b>four" not in record._repr_html_()
