"""Documents and files that lie."""

import hashlib
import json
import os
import random

import numpy as np
import pytest

from hf_retrieval_assist.corpus import datastore
from hf_retrieval_assist.corpus import format as datastore_format
from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.structures.suffix_array import SuffixMatcher
from hf_retrieval_assist.types.token_tree import NamedIds
from tests.support.damage import damaged
from tests.support.documents import VOCAB, build, contents, make_documents


@pytest.fixture
def store(tmp_path):
    return build(make_documents(), tmp_path / "store")


@pytest.mark.parametrize(
    ("documents", "error", "message"),
    [
        ([], ValueError, "empty corpus"),
        ([[]], ValueError, "empty corpus"),
        ([[1], [VOCAB]], ValueError, "got 262144"),
        ([[1, -1]], ValueError, "got -1"),
        ([np.array([2**64 - 1], np.uint64)], ValueError, f"got {2**64 - 1}"),
        ([[1.5]], TypeError, "integer ids"),
        (["text"], ValueError, "flat"),
    ],
)
def test_bad_documents_leave_nothing(tmp_path, documents, error, message):
    with pytest.raises(error, match=message):
        build(documents, tmp_path / "store")
    assert not list(tmp_path.iterdir())


def test_truncated_and_missing_files_do_not_open_and_altered_ones_are_named(store):
    (file,) = store.path.glob("*.shard")
    data = file.read_bytes()
    for altered in (data[:-1], data + b"\0", b""):
        file.write_bytes(altered)
        with pytest.raises(ValueError, match=f"{file}: expected {len(data)} bytes"):
            Datastore.open(store.path)
    for place in (0, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match=f"{file} is altered"):
            Datastore.open(store.path).verify()
    build(make_documents(), store.path, overwrite=True).verify()
    file.unlink()
    with pytest.raises(ValueError, match="is missing"):
        Datastore.open(store.path)
    if hasattr(os, "mkfifo"):  # which is not waited for
        os.mkfifo(file)
        with pytest.raises(ValueError, match="is missing, or no file"):
            Datastore.open(store.path)


def test_a_store_that_is_replaced_between_manifest_and_shards_opens(store, monkeypatch):
    manifest, shards = datastore_format.read_manifest, []

    def slowly(path):
        found = manifest(path)
        if len(shards) < 3:  # each time another writer is quicker
            shards.append(found.shards[0].sha256)
            build([[len(shards), 5, 6]], path, overwrite=True)
        return found

    monkeypatch.setattr(datastore, "read_manifest", slowly)
    assert Datastore.open(store.path).count([3, 5, 6]) == 1
    assert len(set(shards)) == 3


SHARD = "contents", "shards", 0
MANIFESTS = [
    (("version",), 3, "expected version 5, got 3; build it again"),
    (("format",), "somebody else's", "expected an object of format"),
    (("sha256",), "0" * 64, "expected an unaltered manifest"),
    (("contents", "shards"), [], "expected at least one shard"),
    (("contents", "vocab_size"), 0, "vocab_size"),
    (("contents", "tokenizer"), 3, "tokenizer: expected a text"),
    ((*SHARD, "documents"), 0, "documents"),
    ((*SHARD, "documents"), 10**9, "documents"),
    ((*SHARD, "documents"), 40.0, "unaltered"),
    ((*SHARD, "tokens"), -1, "tokens"),
    ((*SHARD, "tokens"), 10**400, "too large"),
    ((*SHARD, "size"), 9, "size"),
    ((*SHARD, "sha256"), "../../etc/passwd", "sha256"),
    ((*SHARD, "papers"), 1, "papers"),
]


@pytest.mark.parametrize(("place", "value", "message"), MANIFESTS, ids=range(len(MANIFESTS)))
def test_altered_manifests_do_not_open(store, place, value, message):
    manifest = store.path / datastore_format.MANIFEST
    found = changed = json.loads(manifest.read_text())
    for key in place[:-1]:
        changed = changed[key]
    changed[place[-1]] = value
    if place != ("sha256",):
        found["sha256"] = datastore_format._digest(found["contents"])
    manifest.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=f"^{manifest}: .*{message}"):
        Datastore.open(store.path)


@pytest.mark.parametrize("text", ["[" * 100_000, ""], ids=len)
def test_a_manifest_that_is_no_json_does_not_open(store, text):
    (store.path / datastore_format.MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=r"manifest.json: "):
        Datastore.open(store.path)


ROWS = [
    b'["one", 3]',
    b'["one",-2]',
    b"[ 12345,2]",
    b'["o",true]',
    b"[" * 10,
    b'   "\xff    "',
]


@pytest.mark.parametrize("row", ROWS, ids=range(6))
def test_a_damaged_list_of_documents_is_one_error(tmp_path, row):
    documents = [NamedIds("one", [1, 2]), NamedIds("two", [1, 2, 3])]
    store = build(documents, tmp_path / "store")
    (file,) = store.path.glob("*.shard")
    file.write_bytes(file.read_bytes().replace(b'["one", 2]', row))
    opened = Datastore.open(store.path)
    assert opened.count([1, 2]) == 2
    for read in (opened.document_sizes, lambda: [*opened.documents()]):
        with pytest.raises(ValueError, match=f"{file}: its list of documents is damaged; build"):
            read()


def mutated_store(original, path, rng):
    """Files of a store with some altered; half of the manifests are made to agree with them."""
    files = dict(original)
    for name in rng.choice(sorted(files), rng.integers(1, 3), replace=False):
        files[name] = damaged(files[name], random.Random(int(rng.integers(1 << 30))))
    if rng.random() < 0.5:
        name = next(name for name in files if name.endswith(".shard"))
        found = json.loads(original[datastore_format.MANIFEST])
        (shard,) = found["contents"]["shards"]
        shard["sha256"] = hashlib.sha256(files[name]).hexdigest()
        shard["size"] = len(files[name])
        if rng.random() < 0.2:
            shard["tokens"] = int(rng.integers(40, 2 * shard["tokens"]))
        found["sha256"] = datastore_format._digest(found["contents"])
        files[datastore_format.MANIFEST] = json.dumps(found).encode()
        files[f"{shard['sha256'][:16]}.shard"] = files.pop(name)
    for name, data in files.items():
        (path / name).write_bytes(data)


def search_everywhere(datastore):
    matcher = SuffixMatcher(datastore.index, 8, 16)
    for token in make_documents(seed=5, documents=1)[0].tolist():
        matcher.extend([token])
        tokens, parents, counts, parent_counts, _ = matcher.select(16, 4, 3)
        assert ((tokens >= 0) & (tokens < VOCAB)).all()
        assert (parents < np.arange(len(parents))).all()
        assert ((counts > 0) & (counts <= parent_counts)).all()


@pytest.mark.parametrize("cases", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_files_open_or_raise_one_error(store, tmp_path, cases):
    """Contents are not read on opening, so whatever opens must also be safe to search."""
    path, rng = tmp_path / "mutated", np.random.default_rng(cases)
    original = contents(store.path)
    path.mkdir()
    opened = verified = 0
    for _ in range(cases):
        mutated_store(original, path, rng)
        try:
            datastore = Datastore.open(path)
            opened += 1
            search_everywhere(datastore)
            datastore.verify()
            verified += 1
        except ValueError:
            pass
        for file in path.iterdir():
            file.unlink()
    assert cases > opened > verified > cases // 30
