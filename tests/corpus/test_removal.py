"""Documents that are taken out of a datastore, and others in their place, beside a rebuild."""

import os
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_retrieval_assist.corpus import build as corpus_build
from hf_retrieval_assist.corpus.build import clean
from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.types.token_tree import NamedIds
from tests.support.documents import SMALL, assert_holds, build, contents, drafts, make_documents

IDS = 4  # so few that nearly every suffix stands elsewhere too

NAMED = st.lists(
    st.builds(
        NamedIds,
        st.sampled_from(["a", "b", "", "ç\n"]),
        st.lists(st.integers(0, IDS - 1), min_size=1, max_size=90),
    ),
    min_size=1,
    max_size=9,
)


def assert_places_are_there(store, texts, documents):
    for text in texts:
        ids = np.array(text, np.int32)
        for place in filter(None, store.places(ids, range(len(ids)))):
            passage = place.token_ids.tolist()
            assert place.count == store.count(passage)
            # Documents of one name may stand apart, with places of their own.
            begins = [
                list(d.token_ids)[i : i + len(passage)] == passage
                for d in documents
                if not d.name or d.name == place.name
                for i in range(len(d.token_ids))
            ]
            assert any(begins)


def same_as_rebuilt(store, documents, path, texts):
    """Whatever the shards are, since counts decide."""
    rebuilt = build(documents, path, vocab_size=IDS, overwrite=True)
    assert store.token_count == rebuilt.token_count
    store.verify()
    assert drafts(store, texts) == drafts(rebuilt, texts)
    assert_places_are_there(store, texts, documents)


@settings(max_examples=20, deadline=None)
@given(
    documents=NAMED,
    added=NAMED,
    texts=st.lists(st.lists(st.integers(0, IDS - 1), min_size=1, max_size=20), max_size=4),
    memory=st.sampled_from([64 * 10, 200 * 10, 1 << 20]),
)
def test_what_is_left_drafts_as_a_rebuild_does(tmp_path_factory, documents, added, texts, memory):
    folder = tmp_path_factory.mktemp("removal")
    options = {"memory": memory, "progress": False}
    store = Datastore.build(documents, folder / "store", vocab_size=IDS, **options)
    store, documents = store.append(added, **options), documents + added
    texts += [list(documents[0].token_ids), list(added[-1].token_ids)]
    for name in ("a", "ç\n"):
        sizes = store.document_sizes()
        left = [document for document in documents if document.name != name]
        if name not in sizes or not left:
            with pytest.raises(ValueError, match=r"^name: expected"):
                store.remove(name)
            continue
        assert sizes[name] == sum(len(d.token_ids) for d in documents if d.name == name)
        store, documents = store.remove(name), left
        same_as_rebuilt(store, documents, folder / "rebuilt", texts)
    if "b" in store.document_sizes():
        store = store.replace("b", [[3, 2, 1], NamedIds("ignored", [0, 3, 2])], **options)
        left = [document for document in documents if document.name != "b"]
        left += [NamedIds("b", [3, 2, 1]), NamedIds("b", [0, 3, 2])]
        same_as_rebuilt(store, left, folder / "rebuilt", texts)
        assert store.document_sizes()["b"] == 6
    assert drafts(store.compact(**options), texts) == drafts(store, texts)


def replace(store, name):
    return store.replace(name, [[1]], progress=False)


@pytest.mark.parametrize("change", [Datastore.remove, replace])
def test_nothing_of_a_removed_document_is_left_in_any_file(tmp_path, change):
    """Shards without it are the same files as before."""
    secret = NamedIds("secret.txt", [200_001, 200_002, 200_003])
    documents = [NamedIds(f"{i}.txt", ids) for i, ids in enumerate(make_documents())]
    documents.insert(20, secret)
    store = build(documents, tmp_path / "store", memory=8 * SMALL)
    before, written = (
        contents(store.path),
        [code.to_bytes(3, "big") for code in range(200_002, 200_005)],
    )
    assert any(b"".join(written) in data for data in before.values())
    change(store, "secret.txt")
    after = contents(store.path)
    assert not any(code in data for code in written for data in after.values())
    assert change is replace or not any(b"secret" in data for data in after.values())
    assert len(before) > len(before.keys() - after.keys()) > 0
    assert all(
        before[name] == after[name] for name in before.keys() & after.keys() - {"manifest.json"}
    )
    with pytest.raises(ValueError, match=r"^name: expected the name of a document, .* got 'none'"):
        change(store, "none")


class KilledError(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("change", [Datastore.remove, replace])
def test_a_change_that_is_killed_leaves_the_old_or_the_new_store(tmp_path, monkeypatch, change):
    """Whatever it was about to do; what it leaves is swept, and nothing of the document with it."""
    documents = [NamedIds(f"{i}.txt", ids) for i, ids in enumerate(make_documents(documents=9))]
    documents.append(NamedIds("9.txt", [200_001]))
    path, ends = tmp_path / "store", set()
    for step in count():
        build(documents, path, memory=8 * SMALL, overwrite=True)
        left = iter(range(step))

        def dying(function, left=left):
            def instead(*arguments, **options):
                if next(left, None) is None:
                    raise KilledError
                return function(*arguments, **options)

            return instead

        with monkeypatch.context() as patched:
            patched.setattr(corpus_build, "sweep", lambda path: [])
            for name in ("_write", "sync", "write_manifest", "remove_unlisted"):
                patched.setattr(corpus_build, name, dying(getattr(corpus_build, name)))
            for where, name in ((os, "replace"), (Path, "unlink")):
                patched.setattr(where, name, dying(getattr(where, name)))
            try:
                change(Datastore.open(path), "9.txt")
            except KilledError:
                pass
            else:
                break
        store = Datastore.open(path)
        store.verify()
        ends.add(changed := store.count([200_001]) == 0)
        clean(tmp_path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["store"]
        listed = {file for shard in store.manifest.shards for file in shard.files()}
        assert contents(path).keys() == listed | {"manifest.json"}
        code = (200_002).to_bytes(3, "big")
        assert changed != any(code in data for data in contents(path).values())
    assert ends == {False, True}
    assert step > 10


def test_a_document_alone_is_replaced_but_not_removed(tmp_path):
    store = build([NamedIds("a", [1, 2])], tmp_path / "store")
    with pytest.raises(ValueError, match="with 'a' alone; replace it, or delete the directory"):
        store.remove("a")
    assert_holds(replace(store, "a"), [[1]])
    with pytest.raises(ValueError, match="empty corpus"):
        store.replace("a", [])
    assert_holds(Datastore.open(store.path), [[1]])


def test_equal_shards_stay_two_whatever_was_removed_before_them(tmp_path):
    store = build([NamedIds("a", [1])], tmp_path / "store")
    for name in "bc":
        store = store.append([NamedIds(name, [2, 3])], progress=False)
    store = store.remove("a").append([NamedIds("c", [2, 3])], progress=False)
    assert_holds(store, [[2, 3]] * 3)
