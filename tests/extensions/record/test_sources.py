"""Where drafted tokens stand: in which document, and where in it."""

import numpy as np
import pytest

from hf_retrieval_assist import Assistant, OutputMemory, SamAssistant
from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.extensions.record.steps import MODEL
from hf_retrieval_assist.host.fingerprint import fingerprint
from hf_retrieval_assist.papers import Rest, SuffixDecoding
from hf_retrieval_assist.types.passages import BESIDE, LONGEST, OwnText
from hf_retrieval_assist.types.token_tree import NamedIds
from tests.support.byte_model import small_model
from tests.support.lossless import PROMPT, run

TOKENS = 60
NOISE = [1, 2, 1, 3] * 5


@pytest.fixture(scope="module")
def text(llama):
    """What the model writes behind the prompt."""
    return run(llama, max_new_tokens=TOKENS)[0, PROMPT.shape[1] :].tolist()


def documents_of(text):
    """Two documents, each with a part of the text."""
    return [
        NamedIds("guide.md", NOISE + text[5:25] + NOISE),
        NamedIds("terms.txt", NOISE + text[15:45]),
    ]


def recorded(llama, assistant, **options):
    with assistant.record() as record:
        run(llama, assistant=assistant, max_new_tokens=TOKENS, **options)
    return record


def spelt(passage, documents, prompt, text):
    """The tokens that stand at a passage's place."""
    known = {document.name: document.token_ids for document in documents}
    whole = {**known, "prompt": prompt, "this answer": text, "earlier output 1": text}[passage.name]
    return [*whole][passage.place : passage.place + passage.stop - passage.start]


def test_each_drafted_token_names_its_places(llama, text):
    """A token that several sources named stands in all of them."""
    documents, memory = documents_of(text), OutputMemory()
    memory.add(text, fingerprint(llama))
    record = recorded(llama, SamAssistant(documents, None, memory, budget=16))
    passages, (call,) = record.sources(), record.calls
    assert {"guide.md", "terms.txt", "earlier output 1"} <= {x.name for x in passages}
    prompt = PROMPT[0].tolist()
    for passage in passages:
        assert spelt(passage, documents, prompt, text) == text[passage.start : passage.stop]
    named = [{x.origin for x in passages if x.start <= i < x.stop} for i in range(TOKENS)]
    drafted = [credit != MODEL for credit in call.credits(0)]
    assert any(len(origins) > 1 for origins in named)
    for place, (origins, is_drafted) in enumerate(zip(named, drafted, strict=True)):
        assert ("memory" in origins) == is_drafted
        assert ("corpus" in origins) == (is_drafted and 5 <= place < 45)


@pytest.mark.parametrize("seed", range(20))
def test_no_passage_round_a_token_is_longer(seed):
    """Beside all places of all documents, tried one by one."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 3, 60).astype(np.int32)
    expected = [rng.integers(0, 3, n).astype(np.int32) for n in (1, 25, 40)]
    own = OwnText(expected, 20)
    tokens = [*range(20, 60)]

    def round_it(document, at, token):
        before = after = 0
        while min(at, token) - before > 0 and document[at - before - 1] == text[token - before - 1]:
            before += 1
        while at + after + 1 < len(document) and token + after + 1 < 60:
            if document[at + after + 1] != text[token + after + 1]:
                break
            after += 1
        return before + after + 1

    for token, place in zip(tokens, own.places(text, tokens), strict=True):
        found = [
            round_it(document, at, token)
            for document, end in [*((x, len(x)) for x in expected), (text[:20], 20)]
            for at in range(end)
            if document[at] == text[token]
        ]
        found += [
            _in_answer(text, at, token) for at in range(token - 20) if text[20 + at] == text[token]
        ]
        longest = max(found, default=0)
        if place is None:
            assert longest < 2
        else:
            assert len(place.token_ids) == longest
            assert place.count == found.count(longest)


def _in_answer(text, at, token):
    """Tokens round one of the answer that are those round a later one."""
    before = after = 0
    while at - before > 0 and text[20 + at - before - 1] == text[token - before - 1]:
        before += 1
    while token + after + 1 < len(text) and text[20 + at + after + 1] == text[token + after + 1]:
        after += 1
    return before + after + 1


def test_long_passages_are_looked_up_so_far():
    document = np.arange(1000, dtype=np.int32)
    own = OwnText([document], 0)
    (place,) = own.places(document, [500])
    assert (place.token, len(place.token_ids)) == (500, 2 * LONGEST + 1)
    assert len(place.before) == len(place.after) == BESIDE


@pytest.mark.parametrize("kind", ["rest", "suffix decoding", "datastore beside"])
def test_other_assistants_tell_places_too(llama, text, kind, tmp_path):
    documents = documents_of(text)
    if kind == "suffix decoding":
        assistant = SuffixDecoding()
        run(llama, assistant=assistant, max_new_tokens=TOKENS)
    else:
        vocab_size = llama.config.vocab_size
        store = Datastore.build(documents, tmp_path / "s", vocab_size=vocab_size, progress=False)
        make = {"rest": Rest, "datastore beside": SamAssistant}[kind]
        assistant = make(store, **({"budget": 8} if make is SamAssistant else {}))
    record = recorded(llama, assistant)
    passages = record.sources()
    names = {"suffix decoding": {"earlier output 1"}}.get(kind, {"guide.md", "terms.txt"})
    assert names <= {passage.name for passage in passages}
    for passage in passages:
        prompt = PROMPT[0].tolist()
        assert spelt(passage, documents, prompt, text) == text[passage.start : passage.stop]


def test_what_was_forgotten_is_not_found(llama, text):
    memory = OutputMemory()
    memory.add(text, fingerprint(llama))
    record = recorded(llama, SamAssistant(None, None, memory, budget=16))
    assert "memory" in {passage.origin for passage in record.sources()}
    memory.forget()
    assert "memory" not in {passage.origin for passage in record.sources()}


def test_where_no_token_was_drafted_a_sentence_says_so(llama):
    record = recorded(llama, Assistant([], budget=0))
    assert record.sources() == []
    assert str(record.sources()).startswith("No drafted token stands in the prompt, this answer,")


def test_passages_are_texts_where_there_is_a_tokenizer():
    model, tokenizer = small_model()
    inputs = tokenizer("one two three", return_tensors="pt")
    phrase = tokenizer("<b>four five", add_special_tokens=False).input_ids
    notes = NamedIds("<notes>", [*inputs.input_ids[0].tolist(), *phrase, *phrase[::-1]])
    begin = inputs.input_ids.shape[1]
    assistant = SamAssistant([notes], None, budget=16)
    with assistant.record(tokenizer) as record:
        model.generate(
            **inputs,
            assistant=assistant,
            prefix_allowed_tokens_fn=lambda row, ids: [phrase[len(ids) - begin]],
            max_new_tokens=len(phrase),
            do_sample=False,
        )
    (passage,) = [passage for passage in record.sources() if passage.origin == "corpus"]
    # The last token is the model's own, as the first one is.
    assert (passage.start, passage.stop) == (1, len(phrase) - 1)
    assert passage.place == len("one two three") + 1
    assert passage.text == "one two three<b>four five"
    assert (passage.before, passage.after) == ("", "evif ruof>b<")
    there = "in the corpus, document <notes>, token 14: [one two three<b>four five]evif ruof>b<"
    assert str(passage) == there
    assert there in str(record.sources()).splitlines()
    shown = record._repr_html_()
    assert "in the corpus, document &lt;notes&gt;, token 14" in shown
    assert "<b>four" not in shown
