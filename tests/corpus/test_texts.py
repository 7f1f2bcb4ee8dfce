"""A corpus in the forms that users have it in."""

from __future__ import annotations

import sys

import pytest

from hf_retrieval_assist import RestAssistant, SamAssistant
from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.corpus.texts import tokenised
from tests.test_examples import small_model

TEXTS = ["one two three", "two three one"]


@pytest.fixture(scope="module")
def tokenizer():
    return small_model()[1]


@pytest.fixture(scope="module")
def ids(tokenizer):
    return [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]


def test_texts_rows_and_ids_are_documents(tokenizer, ids):
    rows = [{"text": text, "id": 3} for text in TEXTS]
    for corpus in (TEXTS, rows, ids, iter(TEXTS)):
        assert list(tokenised(corpus, tokenizer)) == ids
    assert list(tokenised(ids)) == ids


def test_paths_of_texts_and_of_datastores(tokenizer, ids, tmp_path):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    assert list(tokenised(tmp_path / "texts", tokenizer)) == ids
    assert list(tokenised(str(tmp_path / "texts" / "1.txt"), tokenizer)) == ids[1:]
    store = tmp_path / "store"
    Datastore.build(ids, store, vocab_size=len(tokenizer))
    found = tokenised(store)
    assert isinstance(found, Datastore)
    assert RestAssistant(str(store)).datastore.token_count == found.token_count
    with pytest.raises(FileNotFoundError, match="a single text stands in a list"):
        tokenised("some words", tokenizer)


def test_an_assistant_drafts_from_texts(tokenizer, ids):
    assistant = SamAssistant(corpus=TEXTS, tokenizer=tokenizer)
    assert assistant.drafters[0].corpus.tree.token_count == sum(map(len, ids))


def test_what_is_no_corpus(tokenizer):
    with pytest.raises(ValueError, match=r"^tokenizer: expected one, since the corpus is text"):
        SamAssistant(corpus=TEXTS)
    with pytest.raises(TypeError, match=r"^corpus: .*the class Datastore instead of an object"):
        SamAssistant(corpus=Datastore)
    with pytest.raises(TypeError, match=r"^corpus: expected documents, .*got int"):
        SamAssistant(corpus=3)


def test_building_without_the_extra_says_what_to_install(ids, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-retrieval-assist\[corpus\]'"):
        Datastore.build(ids, tmp_path / "store", vocab_size=300)
