"""Documents and files that lie, and disks that are full."""

import hashlib
import os
import random
import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest

from hf_retrieval_assist import RestAssistant, SamAssistant
from hf_retrieval_assist.corpus import datastore
from hf_retrieval_assist.corpus import format as datastore_format
from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.drafters.rest import RestDrafter
from hf_retrieval_assist.structures.suffix_array import BLOCK_ENTRIES, SuffixMatcher, block_sums
from hf_retrieval_assist.types.token_tree import NamedIds
from tests.support.byte_model import small_model
from tests.support.damage import damaged
from tests.support.documents import VOCAB, build, contents, drafts, make_documents
from tests.support.quick import cases


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
        ([[[1]]], ValueError, "flat"),
    ],
)
def test_bad_documents_leave_nothing(tmp_path, documents, error, message):
    with pytest.raises(error, match=message):
        build(documents, tmp_path / "store")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="file size limits are POSIX")
def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path):
    script = (
        "import resource, sys; from hf_retrieval_assist.corpus.datastore import Datastore\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "Datastore.build([range(i, i + 100) for i in range(300)], sys.argv[1], vocab_size=999,"
        " progress=False)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store")], capture_output=True, text=True
    )
    error = run.stderr.splitlines()[-1]
    assert error == f"OSError: [Errno 27] File too large: '{tmp_path / 'store'}'"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("part", datastore_format.PARTS)
def test_truncated_and_missing_files_do_not_open_and_altered_ones_are_named(store, part):
    (file,) = store.path.glob(f"*.{part}")
    data = file.read_bytes()
    for altered in (data[:-1], data + b"\0", b""):
        file.write_bytes(altered)
        with pytest.raises(ValueError, match=f"expected {len(data)} bytes"):
            Datastore.open(store.path)
    middle = len(data) // 2
    file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    with pytest.raises(ValueError, match=f"{file.name} is altered"):
        store.verify()
    file.unlink()
    with pytest.raises(ValueError, match="is missing"):
        Datastore.open(store.path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are POSIX")
def test_a_named_pipe_is_no_shard_and_is_not_waited_for(store):
    (file,) = store.path.glob("*.suffixes")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match="suffixes: expected a regular file"):
        Datastore.open(store.path)


def test_a_store_that_is_replaced_between_manifest_and_shards_opens(store, monkeypatch):
    manifest, shards = datastore_format.read_manifest, []

    def slowly(path):
        found = manifest(path)
        if len(shards) < 3:  # each time another writer is quicker
            shards.append(found.shards[0].name)
            build([[len(shards), 5, 6]], path, overwrite=True)
        return found

    monkeypatch.setattr(datastore, "read_manifest", slowly)
    assert Datastore.open(store.path).count([3, 5, 6]) == 1
    assert len(set(shards)) == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version": 3', '"version": 2', r"version 3 \(build it anew\), got 2"),
        ('"version": 3', '"version": 4', "version 3, got 4"),
        ("hf-retrieval-assist", "somebody-elses", "format"),
        ('"vocab_size": 262144', '"vocab_size": 262143', "unaltered"),
        ('"documents": 40', '"documents": "40"', "documents of type"),
        ('"documents"', '"papers"', "the fields name, documents"),
        ("{", "[" * 100_000, "manifest.json"),
        ("{", "", "manifest.json"),
    ],
)
def test_altered_manifests_do_not_open(store, old, new, message):
    manifest = store.path / datastore_format.MANIFEST
    manifest.write_text(manifest.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        Datastore.open(store.path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "../../etc/passwd"),
        ("documents", 0),
        ("documents", 10**9),
        ("tokens", -1),
        ("tokens", 10**30),
        ("bucket_shift", 31),
        ("checksums", ("0" * 64,)),
        ("checksums", ("x" * 64,) * 3),
    ],
)
def test_manifests_with_impossible_shards_do_not_open(store, field, value):
    (shard,) = store.manifest.shards
    altered = datastore_format.Shard(**{**vars(shard), field: value})
    contents = {**vars(store.manifest), "shards": (altered,)}
    datastore_format.write_manifest(store.path, datastore_format.Manifest(**contents))
    with pytest.raises(ValueError, match="expected"):
        Datastore.open(store.path)


def resized_shard(shard, path, rng):
    """A manifest's shard made to fit its files again, where a number of tokens allows it."""
    sizes = {
        part: (path / f"{shard.name}.{part}").stat().st_size for part in ("tokens", "suffixes")
    }
    tokens = sizes["suffixes"] // 4
    documents = sizes["tokens"] // 3 - tokens
    files = [path / name for name in shard.files()]
    widths = datastore_format.entry_widths(VOCAB)
    summed = (np.fromfile(file, np.uint8) for file in files)
    sums = [block_sums(data, width) for data, width in zip(summed, widths, strict=False)]
    files[-1].write_bytes(np.concatenate(sums).tobytes())
    checksums = tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    shift = int(rng.choice([shard.bucket_shift, shard.bucket_shift, rng.integers(31)]))
    return replace(
        shard, documents=documents, tokens=tokens, bucket_shift=shift, checksums=checksums
    )


def mutated_store(original, path, rng):
    """Files of a store with some altered; half of the manifests are made to agree with them."""
    files = dict(original)
    for name in rng.choice(sorted(files), rng.integers(1, 4), replace=False):
        files[name] = damaged(files[name], random.Random(int(rng.integers(1 << 30))))
    for name, data in files.items():
        (path / name).write_bytes(data)
    if rng.random() < 0.5:
        (path / datastore_format.MANIFEST).write_bytes(original[datastore_format.MANIFEST])
        manifest = datastore_format.read_manifest(path)
        shards = tuple(resized_shard(shard, path, rng) for shard in manifest.shards)
        datastore_format.write_manifest(path, replace(manifest, shards=shards))


def search_everywhere(datastore):
    matcher = SuffixMatcher(datastore.index, 8, 16)
    for token in make_documents(seed=5, documents=1)[0].tolist():
        matcher.extend([token])
        tokens, parents, counts, _, _ = matcher.select(16, 4, 3)
        assert ((tokens >= 0) & (tokens < VOCAB)).all()
        assert (parents < np.arange(len(parents))).all()
        assert (counts > 0).all()
    text = np.concatenate(make_documents(documents=4)).astype(np.int32)
    for place in filter(None, datastore.places(text, range(len(text)))):
        shown = np.concatenate([place.before, place.token_ids, place.after])
        assert ((shown >= 0) & (shown < VOCAB)).all()


@pytest.mark.parametrize("count", cases([200, 10_000]))
def test_mutated_files_open_or_raise_one_error(store, tmp_path, count):
    """Contents are not read on opening, so whatever opens must also be safe to search."""
    path, rng = tmp_path / "mutated", np.random.default_rng(count)
    original = contents(store.path)
    path.mkdir()
    opened = verified = 0
    for _ in range(count):
        mutated_store(original, path, rng)
        try:
            datastore = Datastore.open(path)
            opened += 1
            search_everywhere(datastore)
            datastore.verify()
            verified += 1
            datastore.compact(progress=False)
        except ValueError:
            pass
        for file in path.iterdir():
            file.unlink()
    assert count > opened > verified > count // 30


def flip(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << place % 8
    file.write_bytes(data)


@pytest.mark.parametrize("step", cases([7, 1]))
def test_no_draft_comes_from_a_flipped_bit(tmp_path, step):
    """Opening, the first lookup or `verify` finds it, or the manifest says the same as before."""
    documents = [NamedIds(f"{i}", ids) for i, ids in enumerate(make_documents(documents=9))]
    store = build(documents, tmp_path / "store").append(documents[:3], progress=False)
    texts = [ids.tolist() for _, ids in documents[::2]]

    def answers(store):
        ids = np.concatenate(texts).astype(np.int32)
        places = [
            place and (place.name, place.start) for place in store.places(ids, range(len(ids)))
        ]
        return drafts(store, texts), places, store.document_sizes()

    expected, found = answers(store), 0
    for file in sorted(store.path.iterdir()):
        intact = file.read_bytes()
        for place in range(0, len(intact), step):
            flip(file, place)
            try:
                opened = Datastore.open(store.path)
                assert answers(opened) == expected
                if file.name != datastore_format.MANIFEST:
                    with pytest.raises(ValueError, match=f"{file.name} is altered"):
                        opened.verify()
                assert opened.manifest == store.manifest
            except ValueError:
                found += 1
            file.write_bytes(intact)
    assert found > sum(file.stat().st_size for file in store.path.iterdir()) // step // 2


@pytest.mark.parametrize("part", datastore_format.SUMMED)
def test_a_damaged_block_beside_intact_ones_is_named(tmp_path, part):
    """What is read of the others is right until it is met; no answer comes afterwards."""
    rng = np.random.default_rng(0)
    documents = [NamedIds(f"a document {i}", rng.integers(0, 4000, 7)) for i in range(9000)]
    store = build(documents, tmp_path / "store", vocab_size=4000)
    texts = [ids.tolist() for _, ids in documents[::300]]
    intact, (file,) = drafts(store, texts), store.path.glob(f"*.{part}")
    width = datastore_format.entry_widths(4000)[datastore_format.SUMMED.index(part)]
    block = file.stat().st_size // width // BLOCK_ENTRIES // 2
    flip(file, block * BLOCK_ENTRIES * width + 5)
    damaged = Datastore.open(store.path)
    message = f"{file}: block {block} is damaged: expected the checksum"
    if part in ("documents", "names"):
        assert drafts(damaged, texts) == intact
        with pytest.raises(ValueError, match=message):
            damaged.document_sizes()
    else:
        found = []
        with pytest.raises(ValueError, match=message):
            found.extend(answer for text in texts for answer in drafts(damaged, [text]))
        assert found == intact[: len(found)]
        with pytest.raises(ValueError, match=message):
            damaged.count([1])
    with pytest.raises(ValueError, match=f"{file} is altered"):
        damaged.verify()
    with pytest.raises(ValueError, match=f"{file} is altered|{message}"):
        damaged.remove("a document 0")


@pytest.fixture
def without_corpus(recwarn):
    """The warnings that say so."""
    warnings.simplefilter("always")
    return lambda: [
        str(one.message) for one in recwarn if "on without the corpus" in str(one.message)
    ]


def test_a_text_goes_on_without_a_damaged_corpus_and_one_warning(tmp_path, without_corpus):
    store = build([[1, 2, 3, 4]] * 9, tmp_path / "store", vocab_size=50)
    drafter = RestDrafter(store)
    sessions = [drafter.start(np.array([40], np.int32), Target(50)) for _ in range(2)]
    (file,) = store.path.glob("*.suffixes")
    flip(file, 9)
    for session in sessions:
        for token in (1, 2):
            session.commit([token], None)
            assert session.match_length == len(session.propose(8)) == 0
    assert len(drafter.start(np.array([1, 2], np.int32), Target(50)).propose(8)) == 0
    (told,) = without_corpus()
    assert f"goes on without the corpus: {file}: block 0 is damaged" in told


def test_generate_goes_on_without_a_damaged_corpus(tmp_path, without_corpus):
    model, tokenizer = small_model()
    texts = ["one two three", "two three one"] * 9
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    store = build(ids, tmp_path / "store", vocab_size=model.config.vocab_size)
    (file,) = store.path.glob("*.tokens")
    flip(file, 3)
    inputs = tokenizer("one two", return_tensors="pt")
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**inputs, **options)
    for number, assistant in enumerate(
        (RestAssistant(Datastore.open(store.path)), SamAssistant(store.path)), 1
    ):
        for _ in range(2):
            assert model.generate(**inputs, assistant=assistant, **options).equal(plain)
        assert len(without_corpus()) == number
