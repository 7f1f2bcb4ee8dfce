"""Datastores on disk: round trips, atomic builds, models and the hub."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.types.token_tree import NamedIds
from tests.support.documents import (
    SMALL,
    VOCAB,
    assert_holds,
    build,
    contents,
    make_documents,
)


@pytest.mark.parametrize("vocab_size", [1, 255, 65_536, 1 << 24])
def test_round_trip_in_vocabularies_of_all_sizes(tmp_path, vocab_size):
    documents = [[vocab_size - 1, 0, vocab_size - 1], [0]]
    datastore = build(documents, tmp_path / "store", vocab_size=vocab_size)
    assert_holds(datastore, documents)
    assert datastore.count([0, vocab_size - 1]) == 1 + (vocab_size == 1)


def test_shards_are_sorted_where_an_executor_runs(tmp_path):
    documents = make_documents()
    build(documents, tmp_path / "near", memory=2 * SMALL, workers=2)
    processes = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))
    build(documents, tmp_path / "far", memory=2 * SMALL, workers=2, executor=processes)
    assert len(contents(tmp_path / "near")) > 2  # more than one shard
    assert contents(tmp_path / "far") == contents(tmp_path / "near")


def test_what_is_built_again_is_the_same_to_its_names(tmp_path):
    documents = make_documents()
    stores = [build(documents, tmp_path / name, memory=SMALL) for name in ("one", "other")]
    for store in stores:  # equal shards are one file, which is searched twice
        store.append(documents, memory=SMALL, progress=False)
    one, other = (contents(store.path) for store in stores)
    assert one == other
    twice = Datastore.open(tmp_path / "one")
    assert_holds(twice, documents * 2)
    query = documents[0][:1].tolist()
    assert twice.count(query) == 2 * stores[0].count(query)


def test_empty_documents_are_skipped_long_ones_cut_and_a_token_takes_eight_bytes(tmp_path):
    datastore = build([[], list(range(100)), []], tmp_path / "store", memory=SMALL)
    assert [len(ids) for _, ids in datastore.documents()] == [63, 37]
    assert datastore.count([5, 6]) == 1
    assert datastore.count([62, 63]) == 0
    documents = np.random.default_rng(0).integers(0, VOCAB, (100, 500))
    datastore = build(documents, tmp_path / "large")
    on_disk = sum(file.stat().st_size for file in datastore.path.iterdir())
    assert on_disk == datastore.bytes_on_disk <= 8.1 * datastore.token_count


def as_ids(documents):
    """The ids of each name, its documents behind one another."""
    found = {}
    for name, ids in documents:
        found[name] = found.get(name, []) + ids.tolist()
    return found


@pytest.mark.parametrize("memory", [1 << 32, SMALL * 4, SMALL])
def test_documents_keep_their_names_and_order(tmp_path, memory):
    """Whatever shards they are cut into, and added to."""
    texts = {f"the é/{i}.txt": ids.tolist() for i, ids in enumerate(make_documents(tokens=200))}
    named = [NamedIds(name, ids) for name, ids in texts.items()]
    store = build(named[:30], tmp_path / "store", memory=memory)
    store = store.append(named[30:], memory=memory, progress=False)
    assert as_ids(store.documents()) == texts
    assert store.document_sizes() == {name: len(ids) for name, ids in texts.items()}


def test_overwrite_replaces_the_store_in_place_and_no_other_directory(tmp_path):
    store = build(make_documents(), tmp_path / "store")
    with pytest.raises(FileExistsError, match="`append` adds to it, overwrite=True replaces it"):
        build([[1]], store.path)
    left = ("0123456789abcdef.shard", "0123456789abcdef.suffixes")  # by killed and older writers
    for name in (*left, "notes.txt"):
        (store.path / name).touch()
    assert_holds(build([[1]], store.path, overwrite=True), [[1]])
    assert len(list(store.path.iterdir())) == 3
    assert (store.path / "notes.txt").exists()
    (tmp_path / "thesis").mkdir()
    with pytest.raises(FileExistsError, match="not a datastore"):
        build([[1]], tmp_path / "thesis", overwrite=True)


def test_what_others_added_meanwhile_stays(tmp_path):
    """But nothing is added to another store in the place of the opened one."""
    first = build([[1, 2]], tmp_path / "store")
    second = Datastore.open(tmp_path / "store")

    def slow_documents():
        first.append([[3]], progress=False)
        yield [4]

    assert_holds(second.append(slow_documents(), progress=False), [[1, 2], [3], [4]])
    Datastore.build([[1]], tmp_path / "store", vocab_size=9, overwrite=True, progress=False)
    with pytest.raises(ValueError, match="expected the datastore that was opened"):
        first.append([[3]], progress=False)


def test_interrupted_publication_leaves_the_old_store(tmp_path, monkeypatch):
    """Shards have moved in, but the manifest that names them was not written."""
    documents = make_documents()
    datastore = build(documents, tmp_path / "store")

    def fail(path, manifest):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_retrieval_assist.corpus.build.write_manifest", fail)
    with pytest.raises(OSError, match="No space left"):
        datastore.append([[1]], progress=False)
    monkeypatch.undo()
    assert_holds(Datastore.open(tmp_path / "store"), documents)
    grown = datastore.append([[1]], progress=False)
    assert len(list(grown.path.iterdir())) == 3


class Tokenizer:
    def __init__(self, pieces):
        self.pieces = pieces

    def get_vocab(self):
        return {piece: i for i, piece in enumerate(self.pieces)}


def test_another_tokenizer_is_refused(tmp_path):
    path = tmp_path / "store"
    build([[1, 2]], path, vocab_size=3, tokenizer=Tokenizer("abc"))
    Datastore.open(path, tokenizer=Tokenizer("abc"))
    for other in ("abd", "acb"):
        with pytest.raises(ValueError, match="another tokenizer than the one given"):
            Datastore.open(path, tokenizer=Tokenizer(other))
    for name, known in (("org/name", "org/name"), (str(tmp_path), tmp_path.name), ("", None)):
        named = Tokenizer("abc")
        named.name_or_path = name
        store = build([[1, 2]], path, vocab_size=3, tokenizer=named, overwrite=True)
        assert store.manifest.tokenizer_name == known
    build([[1, 2]], tmp_path / "unknown", vocab_size=3).check_tokenizer(Tokenizer("abd"))


def test_a_datastore_of_the_hub(tmp_path, monkeypatch):
    store = build(make_documents(), tmp_path / "hub" / "me" / "corpus")
    asked = []

    def snapshot_download(repo_id, **options):
        asked.append(options)
        return str(tmp_path / "hub" / repo_id)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert_holds(Datastore.from_pretrained("me/corpus", revision="main"), make_documents())
    assert asked == [{"repo_type": "dataset", "revision": "main"}]
    assert_holds(Datastore.from_pretrained(store.path), make_documents())
