"""A corpus in the forms that users have it in."""

import sys

import pytest

from hf_retrieval_assist import RestAssistant, SamAssistant
from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.corpus.readers import tokenised
from tests.support.byte_model import small_model

TEXTS = ["one two three", "two three one"]


@pytest.fixture(scope="module")
def tokenizer():
    return small_model()[1]


@pytest.fixture(scope="module")
def ids(tokenizer):
    return [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]


def as_lists(documents):
    return [[*document] for document in documents]


def test_texts_rows_and_ids_are_documents(tokenizer, ids):
    rows = [{"text": text, "id": 3} for text in TEXTS]
    for corpus in (TEXTS, rows, ids, iter(TEXTS)):
        assert as_lists(tokenised(corpus, tokenizer)) == ids
    assert as_lists(tokenised(ids)) == ids


def test_paths_of_texts_and_of_datastores(tokenizer, ids, tmp_path):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    assert as_lists(tokenised(tmp_path / "texts", tokenizer)) == ids
    assert as_lists(tokenised(str(tmp_path / "texts" / "1.txt"), tokenizer)) == ids[1:]
    store = tmp_path / "store"
    Datastore.build(ids, store, vocab_size=len(tokenizer))
    found = tokenised(store)
    assert isinstance(found, Datastore)
    assert RestAssistant(str(store)).datastore.token_count == found.token_count
    with pytest.raises(FileNotFoundError, match="a single text stands in a list"):
        tokenised("some words", tokenizer)


def test_an_assistant_drafts_from_texts(tokenizer, ids):
    assistant = SamAssistant(corpus=TEXTS, tokenizer=tokenizer)
    assert assistant.drafters[0].corpus.token_count == sum(map(len, ids))


def test_what_is_no_corpus(tokenizer):
    with pytest.raises(ValueError, match=r"^tokenizer: expected one, since the corpus is text"):
        SamAssistant(corpus=TEXTS)
    with pytest.raises(TypeError, match=r"^corpus: .*the class Datastore instead of an object"):
        SamAssistant(corpus=Datastore)
    with pytest.raises(TypeError, match=r"^corpus: expected documents, .*got int"):
        SamAssistant(corpus=3)
    with pytest.raises(TypeError, match=r"^corpus: .*got BatchEncoding"):
        tokenised(tokenizer(TEXTS), tokenizer)


@pytest.mark.parametrize(
    ("corpus", "error", "message"),
    [
        ({"text": TEXTS}, TypeError, "got dict; of a table, its column"),
        (b"words", TypeError, "got bytes"),
        ("words " * 2000, ValueError, "a single text stands in a list"),
        ("words\0", ValueError, "a single text stands in a list"),
        ([{"text": "fine"}, {"content": "x"}], ValueError, r"document 1: .*NoneType in .*content"),
        ([{"text": None}], ValueError, "document 0: expected text in field 'text', got NoneType"),
        (["half a pair \ud83d"], ValueError, "document 0: expected text, got one with surrogates"),
        ([[[1, 2], [3]]], ValueError, "document 0: expected a flat sequence of ids"),
        ([3], ValueError, "document 0: expected a flat sequence of ids, got 3"),
        ([[0.5]], TypeError, "document 0: expected integer ids, got float64"),
    ],
)
def test_what_would_be_taken_for_documents_is_named(tokenizer, corpus, error, message):
    with pytest.raises(error, match=f"^corpus: .*{message}"):
        list(tokenised(corpus, tokenizer))


def test_building_without_the_extra_says_what_to_install(ids, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    with pytest.raises(ImportError, match=r"pip install pydivsufsort"):
        Datastore.build(ids, tmp_path / "store", vocab_size=300)
