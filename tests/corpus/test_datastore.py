"""Datastores on disk: round trips, atomic builds, and files that lie."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from hf_retrieval_assist.corpus import format as datastore_format
from hf_retrieval_assist.corpus.build import BuildOptions
from hf_retrieval_assist.corpus.datastore import Datastore, tokenizer_fingerprint
from hf_retrieval_assist.structures.suffix_array import SuffixMatcher

VOCAB = 262_144
SMALL = 64 * 22  # bytes of memory for the smallest shard: 64 codes of three bytes


def make_documents(seed=0, documents=40, tokens=30, ids=12):
    rng = np.random.default_rng(seed)
    choices = np.append(rng.integers(0, VOCAB, ids - 2), [0, VOCAB - 1])
    return [rng.choice(choices, rng.integers(1, tokens)) for _ in range(documents)]


def build(documents, path, **options):
    return Datastore.build(documents, path, **{"vocab_size": VOCAB, "progress": False, **options})


def brute_count(documents, query):
    n = len(query)
    windows = (d[i : i + n] for d in map(list, documents) for i in range(len(d) - n + 1))
    return sum(window == list(query) for window in windows)


def assert_holds(datastore, documents):
    found = list(datastore.documents())
    assert [d.tolist() for d in found] == [list(d) for d in documents]
    assert datastore.token_count == sum(map(len, documents))
    assert datastore.document_count == len(documents)
    datastore.verify()


def shards_of(datastore):
    """What the files of all shards hold; their names are random."""
    files = (file for file in datastore.path.iterdir() if file.suffix != ".json")
    return sorted((file.suffix, file.read_bytes()) for file in files)


@pytest.fixture
def store(tmp_path):
    return build(make_documents(), tmp_path / "store")


# ------------------------------------------------------------------------------ round trips


def test_round_trip_up_to_the_largest_id(tmp_path):
    documents = [[0, 262_143, 70_000], [262_143], [65_535, 65_536]]
    datastore = build(documents, tmp_path / "store")
    assert_holds(Datastore.open(tmp_path / "store"), documents)
    assert datastore.count([262_143, 70_000]) == 1
    assert datastore.count([70_000, 262_143]) == 0
    assert datastore.count([262_143]) == 2


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 65_535, 65_536, 1 << 24, 1 << 26])
def test_round_trip_at_every_width(tmp_path, vocab_size):
    documents = [[vocab_size - 1, 0, vocab_size - 1], [0]]
    datastore = build(documents, tmp_path / "store", vocab_size=vocab_size)
    assert_holds(datastore, documents)
    assert datastore.count([0, vocab_size - 1]) == brute_count(documents, [0, vocab_size - 1])


@pytest.mark.parametrize("memory", [1 << 32, SMALL * 4, SMALL])
def test_counts_equal_brute_force_for_any_number_of_shards(tmp_path, memory):
    documents = make_documents()
    datastore = build(documents, tmp_path / "store", memory=memory, workers=1)
    assert (len(datastore.manifest.shards) > 1) == (memory < 1 << 32)
    assert_holds(datastore, documents)
    rng = np.random.default_rng(1)
    for _ in range(60):
        document = documents[rng.integers(len(documents))]
        start = rng.integers(len(document))
        query = document[start : start + rng.integers(1, 5)]
        assert datastore.count(query) == brute_count(documents, query)


def test_several_shards_select_what_one_selects(tmp_path):
    documents = make_documents(documents=80)
    one = build(documents, tmp_path / "one")
    many = build(documents, tmp_path / "many", memory=SMALL * 8, workers=2)
    assert len(many.manifest.shards) > 3
    matchers = [SuffixMatcher(store.index, 8, 64) for store in (one, many)]
    for token in np.concatenate(make_documents(seed=3)).tolist():
        drafts = []
        for matcher in matchers:
            matcher.extend([token])
            drafts.append([column.tolist() for column in matcher.select(16, 4, 2)])
        assert drafts[0] == drafts[1]


def test_what_is_built_again_is_the_same_to_its_names_and_equal_shards_are_two(tmp_path):
    documents = make_documents()
    stores = [build(documents, tmp_path / name, memory=SMALL) for name in ("one", "other")]
    for store in stores:
        store.append(documents, memory=SMALL, progress=False)
    one, other = ({f.name: f.read_bytes() for f in s.path.iterdir()} for s in stores)
    assert one == other
    assert_holds(Datastore.open(tmp_path / "one"), documents * 2)
    build(documents[:20], tmp_path / "less", memory=SMALL)
    assert one.keys() - {f.name for f in (tmp_path / "less").iterdir()}


def test_empty_documents_are_skipped_and_long_ones_cut(tmp_path):
    datastore = build([[], list(range(100)), []], tmp_path / "store", memory=SMALL)
    assert [len(d) for d in datastore.documents()] == [63, 37]
    assert datastore.count([5, 6]) == 1
    assert datastore.count([62, 63]) == 0


def test_append_and_compact_keep_the_documents(tmp_path):
    documents = make_documents()
    first = build(documents[:10], tmp_path / "store")
    second = first.append(documents[10:], progress=False)
    assert (len(first.manifest.shards), len(second.manifest.shards)) == (1, 2)
    assert_holds(second, documents)
    assert first.document_count == 10
    third = second.compact(progress=False)
    assert len(third.manifest.shards) == 1
    assert_holds(third, documents)
    assert second.count(documents[0][:1]) == third.count(documents[0][:1])
    assert len(list(third.path.iterdir())) == 4


def test_overwrite_replaces_the_store_in_place(tmp_path):
    build(make_documents(), tmp_path / "store")
    with pytest.raises(FileExistsError):
        build([[1]], tmp_path / "store")
    assert_holds(build([[1]], tmp_path / "store", overwrite=True), [[1]])
    assert len(list((tmp_path / "store").iterdir())) == 4


def test_no_other_directory_is_overwritten(tmp_path):
    (tmp_path / "thesis").mkdir()
    with pytest.raises(FileExistsError, match="not a datastore"):
        build([[1]], tmp_path / "thesis", overwrite=True)


def test_size_is_below_eight_bytes_per_token(tmp_path):
    rng = np.random.default_rng(0)
    documents = rng.integers(0, VOCAB, (100, 500))
    datastore = build(documents, tmp_path / "store")
    on_disk = sum(file.stat().st_size for file in datastore.path.iterdir())
    assert on_disk == datastore.bytes_on_disk <= 8 * datastore.token_count


# ------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("documents", "error", "message"),
    [
        ([], ValueError, "empty corpus"),
        ([[]], ValueError, "empty corpus"),
        ([[1], [VOCAB]], ValueError, "got 262144"),
        ([[1, -1]], ValueError, "got -1"),
        ([np.array([2**64 - 1], np.uint64)], ValueError, "got -1"),
        ([[1.5]], TypeError, "integer ids"),
        (["text"], ValueError, "flat"),
        ([[[1]]], ValueError, "flat"),
    ],
)
def test_bad_documents_leave_nothing(tmp_path, documents, error, message):
    with pytest.raises(error, match=message):
        build(documents, tmp_path / "store")
    assert not list(tmp_path.iterdir())


def test_a_failing_build_leaves_the_old_store(tmp_path):
    documents = make_documents()
    datastore = build(documents, tmp_path / "store")
    with pytest.raises(ValueError, match="got 262144"):
        datastore.append([[1, 2], [VOCAB]], progress=False, memory=SMALL)
    assert_holds(Datastore.open(tmp_path / "store"), documents)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [("vocab_size", 0), ("vocab_size", (1 << 26) + 1), ("workers", 0), ("memory", SMALL - 1)],
)
def test_options_out_of_range(setting, value):
    with pytest.raises(ValueError, match=setting):
        BuildOptions(**{"vocab_size": VOCAB, setting: value})


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
    assert "OSError" in run.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_opening_what_is_no_datastore(tmp_path):
    with pytest.raises(FileNotFoundError, match="no datastore at"):
        Datastore.open(tmp_path / "missing")
    with pytest.raises(ValueError, match="is not a datastore"):
        Datastore.open(tmp_path)


@pytest.mark.parametrize("part", datastore_format.PARTS)
def test_truncated_and_missing_files_do_not_open(store, part):
    (file,) = store.path.glob(f"*.{part}")
    data = file.read_bytes()
    for altered in (data[:-1], data + b"\0", b""):
        file.write_bytes(altered)
        with pytest.raises(ValueError, match=f"expected {len(data)} bytes"):
            Datastore.open(store.path)
    file.unlink()
    with pytest.raises(ValueError, match="is missing"):
        Datastore.open(store.path)


@pytest.mark.parametrize("part", datastore_format.PARTS)
def test_verify_names_the_altered_file(store, part):
    (file,) = store.path.glob(f"*.{part}")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=f"{file.name} is altered"):
        store.verify()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version": 1', '"version": 2', "version 1"),
        ("hf-retrieval-assist", "somebody-elses", "format"),
        ('"vocab_size": 262144', '"vocab_size": 262143', "unaltered"),
        ('"documents": 40', '"documents": "40"', "documents of type"),
        ('"documents"', '"papers"', "the fields of"),
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


def mutate(data, rng):
    """Other bytes: cut short, a bit flipped, a stretch overwritten or lengthened."""
    data = bytearray(data)
    start = int(rng.integers(len(data)))
    kind = rng.integers(4)
    if kind == 0:
        return data[:start]
    if kind == 1:
        data[start] ^= 1 << rng.integers(8)
        return data
    length = int(rng.integers(1, 64))
    filling = [rng.bytes(length), b"\0" * length, b"\xff" * length][rng.integers(3)]
    data[start : start + (length if kind == 2 else 0)] = filling
    return data[: max(len(data), start)]


def resized_shard(shard, path, rng):
    """A manifest's shard made to fit its files again, where a number of tokens allows it."""
    sizes = {
        part: (path / f"{shard.name}.{part}").stat().st_size for part in ("tokens", "suffixes")
    }
    tokens = sizes["suffixes"] // 4
    documents = sizes["tokens"] // 3 - tokens
    checksums = tuple(datastore_format.checksum(path / name) for name in shard.files())
    shift = int(rng.choice([shard.bucket_shift, shard.bucket_shift, rng.integers(31)]))
    return replace(
        shard, documents=documents, tokens=tokens, bucket_shift=shift, checksums=checksums
    )


def mutated_store(original, path, rng):
    """Files of a store with some altered; half of the manifests are made to agree with them."""
    files = dict(original)
    for name in rng.choice(sorted(files), rng.integers(1, 4), replace=False):
        files[name] = mutate(files[name], rng)
    for name, data in files.items():
        (path / name).write_bytes(data)
    if rng.random() < 0.5:
        (path / datastore_format.MANIFEST).write_bytes(original[datastore_format.MANIFEST])
        manifest = datastore_format.read_manifest(path)
        shards = tuple(resized_shard(shard, path, rng) for shard in manifest.shards)
        datastore_format.write_manifest(path, replace(manifest, shards=shards))


def check_mutations(store, path, cases, seed):
    """Contents are not read on opening, so whatever opens must also be safe to search."""
    rng = np.random.default_rng(seed)
    original = {file.name: file.read_bytes() for file in store.path.iterdir()}
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
            datastore.compact(progress=False)
        except ValueError:
            pass
        for file in path.iterdir():
            file.unlink()
    assert cases > opened > verified > cases // 20


def search_everywhere(datastore):
    matcher = SuffixMatcher(datastore.index, 8, 16)
    for token in make_documents(seed=5, documents=1)[0].tolist():
        matcher.extend([token])
        tokens, parents, counts, _, _ = matcher.select(16, 4, 3)
        assert ((tokens >= 0) & (tokens < VOCAB)).all()
        assert (parents < np.arange(len(parents))).all()
        assert (counts > 0).all()


def test_mutated_files_open_or_raise_one_error(store, tmp_path):
    check_mutations(store, tmp_path / "mutated", 200, seed=0)


@pytest.mark.slow
def test_ten_thousand_mutated_stores(store, tmp_path):
    check_mutations(store, tmp_path / "mutated", 10_000, seed=1)


# ------------------------------------------------------------------------------ atomicity


ENDLESS_BUILD = """
import sys
from itertools import repeat
from hf_retrieval_assist.corpus.datastore import Datastore

path, documents = sys.argv[1], repeat(range(100))
options = {"memory": 64 * 22 * 100, "progress": False}
if sys.argv[2:] == ["append"]:
    Datastore.open(path).append(documents, **options)
else:
    Datastore.build(documents, path, vocab_size=262_144, **options)
"""


def kill_while_building(path, *arguments):
    """SIGKILL a build of documents without end once it has indexed a shard."""
    process = subprocess.Popen([sys.executable, "-c", ENDLESS_BUILD, str(path), *arguments])
    try:
        end = time.monotonic() + 60
        while not any(path.parent.glob(f".{path.name}.*.partial/*.suffixes")):
            assert process.poll() is None, "the build ended by itself"
            assert time.monotonic() < end, "the build wrote nothing"
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX")
def test_killed_build_leaves_nothing_that_opens(tmp_path):
    path = tmp_path / "store"
    kill_while_building(path)
    with pytest.raises(FileNotFoundError):
        Datastore.open(path)
    lock, leftover = sorted(tmp_path.iterdir(), key=lambda entry: entry.is_dir())
    assert lock.name == ".store.lock"
    with pytest.raises(ValueError, match="not a datastore"):
        Datastore.open(leftover)
    rebuilt = build(make_documents(), path)
    assert_holds(rebuilt, make_documents())
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]
    assert shards_of(rebuilt) == shards_of(build(make_documents(), tmp_path / "undisturbed"))


def test_only_what_killed_builds_of_the_same_path_left_is_removed(tmp_path):
    kept = [".other.01234567.partial", ".store.0123456.partial", "store.01234567.partial"]
    for name in [*kept, ".store.01234567.partial"]:
        (tmp_path / name).mkdir()
    build([[1, 2]], tmp_path / "store")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([*kept, "store"])


def test_one_process_at_a_time_writes_to_a_store(tmp_path):
    """By any path that leads there."""
    (tmp_path / "inner").mkdir()

    def documents():
        yield [1, 2]
        with pytest.raises(BlockingIOError, match="store: another process is writing to it"):
            build([[3]], tmp_path / "inner" / ".." / "store")

    datastore = build(documents(), tmp_path / "store")
    assert_holds(datastore, [[1, 2]])

    def more():
        yield [5]
        with pytest.raises(BlockingIOError):
            datastore.append([[6]], progress=False)
        with pytest.raises(BlockingIOError):
            datastore.compact(progress=False)

    assert_holds(datastore.append(more(), progress=False), [[1, 2], [5]])


def test_what_others_added_meanwhile_stays(tmp_path):
    first = build([[1, 2]], tmp_path / "store")
    second = Datastore.open(tmp_path / "store")
    first.append([[3]], progress=False)
    assert_holds(second.append([[4]], progress=False), [[1, 2], [3], [4]])
    assert_holds(first.compact(progress=False), [[1, 2], [3], [4]])


def test_another_store_in_the_place_of_the_opened_one_is_not_added_to(tmp_path):
    opened = build([[1, 2]], tmp_path / "store")
    Datastore.build([[1]], tmp_path / "store", vocab_size=9, overwrite=True, progress=False)
    for change in (lambda: opened.append([[3]], progress=False), lambda: opened.compact()):
        with pytest.raises(ValueError, match="expected the datastore that was opened"):
            change()


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX")
def test_killed_append_leaves_the_old_store(store):
    kill_while_building(store.path, "append")
    assert_holds(Datastore.open(store.path), make_documents())


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
    assert len(list(grown.path.iterdir())) == 7


# ------------------------------------------------------------------------------ models, hub


class Tokenizer:
    def __init__(self, pieces):
        self.pieces = pieces

    def get_vocab(self):
        return {piece: i for i, piece in enumerate(self.pieces)}


class Processor(Tokenizer):
    """What a SentencePiece processor offers, and no `get_vocab`."""

    get_vocab = property()

    def get_piece_size(self):
        return len(self.pieces)

    def id_to_piece(self, i):
        return self.pieces[i]


def test_fingerprints_tell_tokenizers_apart():
    assert tokenizer_fingerprint(Tokenizer("abc")) == tokenizer_fingerprint(Processor("abc"))
    assert tokenizer_fingerprint(Tokenizer("abc")) != tokenizer_fingerprint(Tokenizer("acb"))


def test_another_tokenizer_is_refused(tmp_path):
    path = tmp_path / "store"
    build([[1, 2]], path, vocab_size=3, tokenizer=Tokenizer("abc"))
    Datastore.open(path, tokenizer=Tokenizer("abc"))
    with pytest.raises(ValueError, match="another tokenizer"):
        Datastore.open(path, tokenizer=Tokenizer("abd"))
    build([[1, 2]], tmp_path / "unknown", vocab_size=3).check_tokenizer(Tokenizer("abd"))


def test_another_vocabulary_is_refused(store):
    store.check_vocabulary(VOCAB)
    store.check_vocabulary(VOCAB + 64)
    for vocab_size in (VOCAB - 1, 2 * VOCAB):
        with pytest.raises(ValueError, match=f"got {vocab_size}"):
            store.check_vocabulary(vocab_size)


class Hub:
    """Stands in for the Hub: a folder per repository."""

    def __init__(self, root):
        self.root = root

    def create_repo(self, repo_id, *, repo_type, private, exist_ok):
        assert (repo_type, exist_ok) == ("dataset", True)
        (self.root / repo_id).mkdir(parents=True)

    def upload_folder(self, *, repo_id, repo_type, folder_path, allow_patterns, commit_message):
        for name in allow_patterns:
            shutil.copy(folder_path / name, self.root / repo_id)
        return f"https://hub/{repo_id}/commit/1"

    def snapshot_download(self, repo_id, *, repo_type, revision=None):
        assert (repo_type, revision) == ("dataset", "main")
        return str(self.root / repo_id)


def test_push_and_pull_through_the_hub(store, tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **options: hub)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    (store.path / "notes.txt").write_text("private")
    assert store.push_to_hub("me/corpus") == "https://hub/me/corpus/commit/1"
    pulled = Datastore.from_pretrained("me/corpus", revision="main")
    assert_holds(pulled, make_documents())
    assert len(list(pulled.path.iterdir())) == 4
    assert_holds(Datastore.from_pretrained(store.path), make_documents())
