"""A corpus on disk that drafts are retrieved from: token ids of documents and suffix arrays."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..structures.suffix_array import SuffixArray, SuffixMatcher
from ..system.arguments import require_several
from ..types.passages import BESIDE, FEWEST, LONGEST, Place, Source, place_in
from ..types.token_tree import Ids, Int32Array, NamedIds, named_ids
from .build import (
    BuildOptions,
    build_shards,
    publish,
    staging_directory,
    without_document,
)
from .format import (
    MANIFEST,
    Manifest,
    MappedShard,
    Shard,
    code_width,
    map_shard,
    read_manifest,
    verify_files,
)

# Models pad the rows of their output layer beyond the tokenizer's ids by less than this.
_MAX_PADDING = 1024


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over the pieces of a tokenizer in the order of their ids.

    Args:
        tokenizer: one of transformers, or a `sentencepiece.SentencePieceProcessor`.
    """
    if hasattr(tokenizer, "get_vocab"):
        pieces = sorted((index, piece) for piece, index in tokenizer.get_vocab().items())
    else:
        pieces = [(i, tokenizer.id_to_piece(i)) for i in range(tokenizer.get_piece_size())]
    return hashlib.sha256(repr(pieces).encode()).hexdigest()


def tokenizer_name(tokenizer: Any) -> str | None:
    """What people call a tokenizer: its id on the Hub, or its folder's or file's name, without the
    path to it, which is nobody else's business."""
    name = getattr(tokenizer, "name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    return Path(name).resolve().name if Path(name).exists() else name


class Datastore(Source):
    """An immutable, memory-mapped corpus and its suffix arrays (REST, He et al. 2023, section 3.2).

    Read-only, and shared by any number of threads and processes. Opening maps the files and checks
    the manifest and all sizes; the contents are read only where a lookup goes, which compares each
    block with its checksum first. Once one is damaged, all lookups raise a ValueError that names
    it, and drafters go on without the corpus. :meth:`verify` reads everything. A file that is cut
    short while it is mapped ends the processes that read there (SIGBUS): replace files by renaming,
    as this class does, never in place.

    Attributes:
        path: its directory.
        manifest: what the directory says it holds.
        index: the compiled :class:`SuffixArray` over all shards.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest, self._shards = _mapped(self.path)
        indices = [shard.index for shard in self._shards]
        files = [(str(shard.path), shard.sums) for shard in self._shards]
        width, size = code_width(self.vocab_size), self.vocab_size
        self.index = SuffixArray(indices, width, size, files)

    def __repr__(self) -> str:
        return (
            f"Datastore({str(self.path)!r}: {self.token_count:,} tokens in {self.document_count:,} "
            f"documents, {len(self.manifest.shards)} shards, vocabulary {self.vocab_size:,})"
        )

    @property
    def vocab_size(self) -> int:
        """Every id lies below it."""
        return self.manifest.vocab_size

    @property
    def token_count(self) -> int:
        """Tokens in all documents."""
        return sum(shard.tokens for shard in self.manifest.shards)

    @property
    def document_count(self) -> int:
        """Documents; one that was too long for a shard counts once for each of its pieces."""
        return sum(shard.documents for shard in self.manifest.shards)

    @property
    def bytes_on_disk(self) -> int:
        """Size of all files."""
        shards = sum(sum(shard.sizes(self.vocab_size)) for shard in self.manifest.shards)
        return shards + (self.path / MANIFEST).stat().st_size

    @classmethod
    def open(cls, path: str | os.PathLike[str], tokenizer: Any = None) -> Datastore:
        """Map the datastore at `path`, in a time that does not depend on its size.

        Args:
            path: the directory.
            tokenizer: if given, must be the one the datastore was built with.

        Raises:
            FileNotFoundError: there is no such directory.
            ValueError: it is not a datastore, of a newer format, altered, truncated, or of another
                tokenizer.
        """
        datastore = cls(path)
        if tokenizer is not None:
            datastore.check_tokenizer(tokenizer)
        return datastore

    @classmethod
    def build(
        cls,
        documents: Iterable[Ids | NamedIds],
        path: str | os.PathLike[str],
        *,
        vocab_size: int,
        tokenizer: Any = None,
        memory: int = 1 << 32,
        workers: int = 1,
        progress: bool = True,
        overwrite: bool = False,
        executor: Executor | None = None,
    ) -> Datastore:
        """Index documents and open the result.

        The store appears at `path` in one step at the end; a build that fails or is killed leaves
        what was there. O(tokens log tokens) time.

        Args:
            documents: sequences of token ids, or `NamedIds`, read once. Empty ones are skipped. No
                draft crosses from one to the next. One with more tokens than fit a shard is cut;
                one that follows another of its name goes on with it.
            path: the directory to make.
            vocab_size: ids lie below it; the rows of the model's output layer.
            tokenizer: what made the ids; its fingerprint and its name are kept.
            memory: bytes for sorting, shared by the workers. A shard takes 22 bytes per token at
                three bytes per id, and fewer shards answer faster.
            workers: shards that are sorted at the same time.
            progress: show a progress bar.
            overwrite: replace a datastore that is already there.
            executor: where shards are sorted, such as a
                :class:`~..extensions.ray.cluster.RayExecutor`, whose machines must all see `path`;
                None: threads of this process.

        Raises:
            FileExistsError: `path` exists and is not to be overwritten, or is not a datastore.
            ValueError: no documents, an id outside the vocabulary, or a setting out of range.
            TypeError: a document is not made of integers.
            OSError: the disk is full or not writable, or another process is building this store.
        """
        path = Path(path)
        options = BuildOptions(vocab_size, memory, workers, progress)
        if path.exists() and not (path / MANIFEST).is_file():
            raise FileExistsError(f"{path} exists and is not a datastore")
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists; `append` adds to it, overwrite=True replaces it")
        identity = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
        with staging_directory(path.resolve()) as staging:
            empty = Manifest(vocab_size, identity, tokenizer_name(tokenizer), ())
            _add(documents, staging, path.resolve(), empty, options, executor)
        return cls(path)

    def append(
        self,
        documents: Iterable[Ids | NamedIds],
        *,
        memory: int = 1 << 32,
        workers: int = 1,
        progress: bool = True,
        executor: Executor | None = None,
    ) -> Datastore:
        """Add documents as further shards, in one step, and open the result.

        This object goes on showing the store as it was when it was opened; what others have added
        since stays in the new one. Arguments and errors are those of :meth:`build`.
        """
        options = BuildOptions(self.vocab_size, memory, workers, progress)
        path = self.path.resolve()
        with staging_directory(path) as staging:
            base = self._checked_successor(read_manifest(path))
            _add(documents, staging, path, base, options, executor)
        return Datastore(self.path)

    def remove(self, name: str) -> Datastore:
        """Take out all documents of a name, in one step, and open the result.

        Nothing of them is left in the store's files. The shards that held them are written anew
        without being sorted again, in O(their size); others stay. Where a reader on Windows has an
        old file mapped, the next change deletes it.

        Raises:
            ValueError: there is no such document, or no other one; a file is altered.
            OSError: as of :meth:`build`.
        """
        path = self.path.resolve()
        with staging_directory(path) as staging:
            base = self._checked_successor(read_manifest(path))
            shards = without_document(path, base, name, staging)
            if not shards:
                raise ValueError(
                    f"name: expected a datastore with other documents, got {path} with {name!r} "
                    "alone; replace it, or delete the directory"
                )
            publish(staging, path, replace(base, shards=shards))
        return Datastore(self.path)

    def replace(
        self,
        name: str,
        documents: Iterable[Ids | NamedIds],
        *,
        memory: int = 1 << 32,
        workers: int = 1,
        progress: bool = True,
        executor: Executor | None = None,
    ) -> Datastore:
        """Put documents in the place of all of a name, in one step, and open the result.

        They get this name, whatever theirs were, and follow all others. Arguments and errors are
        those of :meth:`build` and :meth:`remove`.
        """
        require_several("documents", documents, "documents of token ids")
        options = BuildOptions(self.vocab_size, memory, workers, progress)
        path = self.path.resolve()
        with staging_directory(path) as staging:
            base = self._checked_successor(read_manifest(path))
            base = replace(base, shards=without_document(path, base, name, staging))
            ids = (named_ids(f"documents: document {n}", d)[1] for n, d in enumerate(documents))
            _add((NamedIds(name, one) for one in ids), staging, path, base, options, executor)
        return Datastore(self.path)

    def compact(
        self, *, memory: int = 1 << 32, workers: int = 1, progress: bool = True
    ) -> Datastore:
        """Merge the shards into as few as `memory` allows, in one step, and open the result.

        Arguments and errors are those of :meth:`build` and :meth:`verify`.
        """
        options = BuildOptions(self.vocab_size, memory, workers, progress)
        path = self.path.resolve()
        with staging_directory(path) as staging:
            now = Datastore(path)
            base = self._checked_successor(now.manifest)
            now.verify()
            _add(now.documents(), staging, path, replace(base, shards=()), options)
        return Datastore(self.path)

    def _checked_successor(self, manifest: Manifest) -> Manifest:
        """The manifest that stands in this one's place by now."""
        if replace(manifest, shards=()) != replace(self.manifest, shards=()):
            raise ValueError(f"{self.path}: expected the datastore that was opened, got another")
        return manifest

    def documents(self) -> Iterator[NamedIds]:
        """Every document's name and token ids, uint32 [n], in the order in which they were added;
        the pieces of one that was cut come one after another."""
        for place, shard in enumerate(self._shards):
            start = 0
            for number, end in enumerate(shard.ends[:, 0].tolist()):
                yield NamedIds(shard.name(number), self.index.tokens(place, start, end))
                start = end + 1

    def document_sizes(self) -> dict[str, int]:
        """Tokens of each document by its name, in the order in which they were added; all documents
        of one name together."""
        sizes: dict[str, int] = {}
        for shard in self._shards:
            tokens = np.diff(shard.ends[:, 0].astype(np.int64), prepend=-1) - 1
            for number, count in enumerate(tokens.tolist()):
                name = shard.name(number)
                sizes[name] = sizes.get(name, 0) + count
        return sizes

    def places(self, text: Int32Array, tokens: Sequence[int]) -> list[Place | None]:
        """See `Source.places`. Of documents without a name, the number is told."""
        if not len(tokens):
            return []
        first = max(0, tokens[0] - LONGEST)
        matcher = SuffixMatcher(self.index, LONGEST)
        lengths = []  # the longest match's that ends with each token from `first` on
        for token in text[first : tokens[-1] + LONGEST].tolist():
            matcher.extend([token])
            lengths.append(matcher.match_length)
        return [self._place(text, first, lengths, token) for token in tokens]

    def _place(self, text: Int32Array, first: int, lengths: list[int], token: int) -> Place | None:
        ends = range(token, min(token + LONGEST, first + len(lengths)))
        spans = [(end - lengths[end - first] + 1, end + 1) for end in ends]
        round_it = [span for span in spans if span[0] <= token]
        start, stop = max(round_it, key=lambda span: span[1] - span[0], default=(0, 0))
        if stop - start < FEWEST:
            return None
        found, count = self.index.find(text[start:stop].tolist(), 1), stop - start
        (number, at), *_ = found
        shard = self._shards[number]
        document = int(np.searchsorted(shard.ends[:, 0], at, side="right"))
        if document == len(shard.ends):  # an altered table, as below
            return None
        begin = 0 if document == 0 else int(shard.ends[document - 1, 0]) + 1
        shown = max(begin, at - BESIDE), min(at + count + BESIDE, int(shard.ends[document, 0]))
        own = at - shown[0], at - shown[0] + count
        others = sum(other.documents for other in self.manifest.shards[:number])
        name = shard.name(document) or f"document {others + document}"
        ids = self.index.tokens(number, *shown).astype(np.int32)
        if not ((ids >= 0) & (ids < self.vocab_size)).all():
            return None
        before = shown[0] - begin + int(shard.ends[document, 2])
        return place_in(
            NamedIds(name, ids),
            others + document,
            own[0] + token - start,
            own,
            self.index.count(text[start:stop].tolist()),
            before,
        )

    def count(self, token_ids: Ids) -> int:
        """How often a token string occurs inside documents. O(len(token_ids) log(tokens)).

        Raises:
            ValueError: it is empty.
        """
        return self.index.count(token_ids)

    def verify(self) -> None:
        """Read all files and compare their checksums. O(size).

        Raises:
            ValueError: a file is missing, truncated or altered.
        """
        verify_files(self.path, self.manifest)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise ValueError unless the ids come from this tokenizer, or from one not recorded."""
        expected = self.manifest.tokenizer
        if expected is not None and tokenizer_fingerprint(tokenizer) != expected:
            named = self.manifest.tokenizer_name
            other = "another tokenizer" + (f" ({named})" if named else "")
            raise ValueError(f"{self.path} was built with {other} than the one given")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError unless a model with an output layer of `vocab_size` rows fits.

        The model may have up to 1024 rows more: many pad them to a round number.
        """
        if not self.vocab_size <= vocab_size <= self.vocab_size + _MAX_PADDING:
            raise ValueError(
                f"{self.path}: expected a model with a vocabulary of {self.vocab_size} tokens, "
                f"got {vocab_size}"
            )

    @classmethod
    def from_pretrained(
        cls, path_or_hub_id: str | os.PathLike[str], tokenizer: Any = None, **hub_options: Any
    ) -> Datastore:
        """Open a local datastore, or download one from the Hugging Face Hub (a dataset repository).

        Args:
            path_or_hub_id: a directory, or `owner/name`.
            tokenizer: if given, must be the one the datastore was built with.
            hub_options: passed to `huggingface_hub.snapshot_download`, such as `revision`, `token`.

        Raises:
            ValueError: what was found does not open; see :meth:`open`.
        """
        if Path(path_or_hub_id).is_dir():
            return cls.open(path_or_hub_id, tokenizer)
        import huggingface_hub

        options = {"repo_type": "dataset", **hub_options}
        return cls.open(
            huggingface_hub.snapshot_download(str(path_or_hub_id), **options), tokenizer
        )

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, **hub_options: Any) -> str:
        """Upload the datastore to a dataset repository of the Hub, made if it does not exist.

        Args:
            repo_id: `owner/name`.
            private: whether a new repository is private.
            hub_options: passed to `huggingface_hub.HfApi`, such as `token`, `endpoint`.

        Returns:
            The address of the commit.
        """
        import huggingface_hub

        api = huggingface_hub.HfApi(**hub_options)
        api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
        listed = [name for shard in self.manifest.shards for name in shard.files()]
        commit = api.upload_folder(
            repo_id=repo_id,
            repo_type="dataset",
            folder_path=self.path,
            allow_patterns=[MANIFEST, *listed],
            commit_message="Upload datastore",
        )
        return str(commit)


def _mapped(path: Path) -> tuple[Manifest, list[MappedShard]]:
    """The manifest at `path` and the files of its shards.

    A writer may delete them in between: then there is another manifest by now.
    """
    manifest = read_manifest(path)
    while True:
        try:
            return manifest, [map_shard(path, s, manifest.vocab_size) for s in manifest.shards]
        except ValueError:
            before, manifest = manifest, read_manifest(path)
            if manifest == before:
                raise


def _add(
    documents: Iterable[Ids | NamedIds],
    staging: Path,
    path: Path,
    base: Manifest,
    options: BuildOptions,
    executor: Executor | None = None,
) -> None:
    """Publish at `path` the shards of `base` and those of the documents."""
    known = base.shards
    taken = [shard.name for shard in known]
    shards: tuple[Shard, ...] = build_shards(documents, staging, options, executor, taken)
    if not shards:
        raise ValueError("documents: expected at least one token, got an empty corpus")
    publish(staging, path, replace(base, shards=known + shards))
