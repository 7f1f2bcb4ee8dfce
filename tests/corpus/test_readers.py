"""Readers of corpora and tokenizers, and a corpus in the forms that users have it in."""

import json

import pytest

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.corpus import readers
from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.corpus.readers import (
    NamedText,
    load_encoder,
    read_texts,
    tokenised,
)
from hf_retrieval_assist.papers import Rest
from hf_retrieval_assist.types.token_tree import NamedIds
from tests.support.byte_model import byte_tokenizer, small_model


def texts(*sources, **options):
    return [text for _, text in read_texts([str(source) for source in sources], **options)]


@pytest.mark.parametrize("ends", [(), (100,), (63, 64, 65, 300), range(9, 500, 10)])
def test_long_text_files_come_in_pieces(tmp_path, monkeypatch, ends):
    """Pieces are whole lines where these are short."""
    monkeypatch.setattr(readers, "_PIECE", 64)
    text = "".join("\n" if i in ends else chr(97 + i % 26) for i in range(500))
    (tmp_path / "a.txt").write_text(text)
    pieces = texts(tmp_path / "a.txt")
    assert "".join(pieces) == text
    assert all(0 < len(piece) < 2 * 64 for piece in pieces)
    assert len(ends) < 9 or all(piece.endswith("\n") for piece in pieces)


def test_jsonl_reads_the_field_of_every_row(tmp_path):
    """And passes blank lines over."""
    rows = [{"text": "no", "body": "first"}, {"body": "second\n"}]
    (tmp_path / "a.jsonl").write_text("\n" + "\n \t\n".join(map(json.dumps, rows)) + "\n\n")
    assert texts(tmp_path / "a.jsonl", field="body") == ["first", "second\n"]


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 1}\n', ValueError, "a.jsonl:2: expected text"),
        ("a.jsonl", b'{"other": "x"}\n', ValueError, "in field 'text', got NoneType"),
        ("a.jsonl", b"[1]\n", ValueError, "a.jsonl:1: expected text"),
        ("a.jsonl", b'{"text"\n', ValueError, "a.jsonl:1: expected JSON"),
        ("a.jsonl", b"[" * 100_000, ValueError, "a.jsonl:1: expected JSON"),
        ("a.txt", b"\xff\xfe\xff", ValueError, "a.txt: expected UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', ValueError, "a.jsonl:1: .* surrogates not allowed"),
        ("a.docx", b"", ValueError, "in .txt.*; datasets:.*a.docx reads other kinds"),
        ("empty/a.docx", b"", ValueError, "expected a name ending in .txt"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, error, message):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        texts(tmp_path / name)


def test_directories_are_walked_in_order_without_hidden_files(tmp_path):
    """Missing sources are named."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        texts(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="got none"):
        texts(tmp_path)
    for name in ("b.py", "a/c.py", "a/d.txt", ".git/e.py", "a/.f.py", "a/g.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a/c.py", "a/d.txt", "b.py"]


def test_what_the_datasets_library_reads(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"text": "three"}\n')
    assert texts(f"datasets:{tmp_path / 'rows'}") == ["one", "two"]
    assert texts(f"datasets:{tmp_path / 'splits'}", split="test") == ["one", "two"]
    assert texts(f"datasets:{tmp_path / 'files'}") == ["three"]
    # Parquet files are known by their ending, others where they are called data sets.
    rows = datasets.Dataset.from_dict({"text": ["one", None], "n": [1, 2]})
    rows.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("text,n\none,1\n")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1PAR1")
    (named,) = read_texts([f"datasets:{tmp_path / 'rows.csv'}"])
    assert named == (f"{tmp_path / 'rows.csv'}:1", "one")
    for source, field, message in (
        (tmp_path / "rows.parquet", "text", r"rows\.parquet:2: expected text in field 'text'"),
        (tmp_path / "rows.parquet", "n", r"rows\.parquet:1: .* got int in a row of"),
        (tmp_path / "bad.parquet", "text", r"bad\.parquet: expected a file that datasets reads"),
    ):
        with pytest.raises(ValueError, match=message):
            texts(source, field=field)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a transformers tokenizer of single bytes."""
    made = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(special=["<s>"], bos_token="<s>").save_pretrained(made)
    return made


@pytest.mark.parametrize("config", [{"vocab_size": 64}, {"text_config": {"vocab_size": 64}}])
def test_vocabulary_comes_from_the_model_where_it_is_described(folder, config):
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    try:
        assert load_encoder(str(folder)).vocab_size == 64
    finally:
        path.unlink()


def test_texts_are_tokenised_in_bounded_batches(folder, monkeypatch):
    monkeypatch.setattr(readers, "_PIECE", 10)
    encoder = load_encoder(str(folder))
    sizes = []

    def encode(batch):
        sizes.append(len(batch))
        return encoder.encode(batch)

    counting = readers.TextEncoder(encoder.tokenizer, 5, encode)
    texts = [NamedText(str(number), "the cat") for number in range(5)]
    names, ids = zip(*counting.encode_stream(texts), strict=True)
    assert [*ids] == encoder.encode(["the cat"] * 5)
    assert [*map(int, names)] == [*range(5)]
    assert sizes == [2, 2, 1]


TEXTS = ["one two three", "two three one"]


@pytest.fixture(scope="module")
def tokenizer():
    return small_model()[1]


@pytest.fixture(scope="module")
def ids(tokenizer):
    return [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]


def as_lists(documents):
    return [[*token_ids] for _, token_ids in documents]


def test_documents_have_names(tokenizer, ids, tmp_path):
    """Those of files, of rows of files, and what callers call them."""
    (tmp_path / "a.txt").write_text(TEXTS[0])
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    assert [name for name, _ in tokenised(tmp_path, tokenizer)] == [
        str(tmp_path / "a.txt"),
        f"{rows}:1",
        f"{rows}:2",
    ]
    given = [{"text": TEXTS[0], "name": "one"}, NamedIds("two", ids[1]), TEXTS[0], ids[1]]
    found = [*tokenised(given, tokenizer)]
    assert [name for name, _ in found] == ["one", "two", "", ""]
    assert as_lists(found) == ids * 2


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
    assert Rest(str(store)).datastore.token_count == found.token_count
    none = "no file, folder or datastore at 'some words'; Datastore.build and .* make datastores; a"
    with pytest.raises(FileNotFoundError, match=f"^corpus: {none} single text stands in a list"):
        tokenised("some words", tokenizer)
    for open_at in (Rest, Datastore.open):
        with pytest.raises(FileNotFoundError, match=r"^no datastore at none; Datastore.build and"):
            open_at("none")
    with pytest.raises(
        TypeError, match=r"^sources: expected a list of files, .* got str; a single"
    ):
        next(read_texts("texts"))


@pytest.mark.parametrize(
    ("corpus", "error", "message"),
    [
        (3, TypeError, "expected documents, .*got int"),
        (Datastore, TypeError, "the class Datastore instead of an object"),
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


def test_texts_want_a_tokenizer(tokenizer):
    with pytest.raises(ValueError, match=r"^tokenizer: expected one, since the corpus is text"):
        SamAssistant(corpus=TEXTS)
    with pytest.raises(TypeError, match=r"^corpus: .*got BatchEncoding"):
        tokenised(tokenizer(TEXTS), tokenizer)
