"""A corpus on disk that drafts are retrieved from: token ids of documents and suffix arrays."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..structures.suffix_array import SuffixArray
from ..types.token_tree import Ids, NamedIds
from .build import BuildOptions, build_shards, publish, remove_others, staging_directory
from .format import MANIFEST, Manifest, MappedShard, read_manifest

# Models pad the rows of their output layer beyond the tokenizer's ids by less than this.
_MAX_PADDING = 1024


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over the pieces of a tokenizer of transformers in the order of their ids."""
    pieces = sorted((index, piece) for piece, index in tokenizer.get_vocab().items())
    return hashlib.sha256(repr(pieces).encode()).hexdigest()


def tokenizer_name(tokenizer: Any) -> str | None:
    """What people call a tokenizer: its id on the Hub, or its folder's or file's name, without the
    path to it, which is nobody else's business."""
    name = getattr(tokenizer, "name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    return Path(name).resolve().name if Path(name).exists() else name


class Datastore:
    """An immutable, memory-mapped corpus and its suffix arrays (REST, He et al. 2023, section 3.2).

    Read-only, and shared by any number of threads and processes. Opening maps the files and checks
    the manifest and all sizes; the contents are read only where a lookup goes. Of altered contents
    any draft may come, but no id outside the vocabulary; :meth:`verify` compares them with their
    checksums. A file that is cut short while it is mapped ends the processes that read there
    (SIGBUS): replace files by renaming, as this class does, never in place.

    Attributes:
        path: its directory.
        manifest: what the directory says it holds.
        index: the compiled :class:`SuffixArray` over all shards.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest, self._shards = _mapped(self.path)
        arrays = [(shard.tokens, shard.suffixes) for shard in self._shards]
        self.index = SuffixArray(arrays, self.vocab_size)

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
        shards = sum(shard.size for shard in self.manifest.shards)
        return shards + (self.path / MANIFEST).stat().st_size

    @classmethod
    def open(cls, path: str | os.PathLike[str], tokenizer: Any = None) -> Datastore:
        """Map the datastore at `path`, in a time that does not depend on its size.

        Args:
            path: the directory.
            tokenizer: if given, must be the one the datastore was built with.

        Raises:
            FileNotFoundError: there is no such directory.
            ValueError: it is not a datastore, of another version, altered, truncated, or of another
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
        what was there, and one that is killed may leave a directory beside it, whose name ends in
        `.partial`. O(tokens log tokens) time.

        Args:
            documents: sequences of token ids, or `NamedIds`, read once. Empty ones are skipped. No
                draft crosses from one to the next. One with more tokens than fit a shard is cut;
                one that follows another of its name goes on with it.
            path: the directory to make.
            vocab_size: ids lie below it; the rows of the model's output layer.
            tokenizer: what made the ids; its fingerprint and its name are kept.
            memory: bytes for sorting, shared by the workers. A shard takes 32 bytes per token, and
                fewer shards answer faster.
            workers: shards that are sorted at the same time.
            progress: show a progress bar.
            overwrite: replace a datastore that is already there.
            executor: where shards are sorted: of processes, or of a cluster's machines (dask's
                `client.get_executor()`), which must all see `path`; None: threads of this process.

        Raises:
            FileExistsError: `path` exists and is not to be overwritten, or is not a datastore.
            ValueError: no documents, an id outside the vocabulary, or a setting out of range.
            TypeError: a document is not made of integers.
            OSError: the disk is full or not writable.
        """
        path = Path(path)
        options = BuildOptions(vocab_size, memory, workers, progress, executor)
        if path.exists() and not (path / MANIFEST).is_file():
            raise FileExistsError(f"{path} exists and is not a datastore")
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists; `append` adds to it, overwrite=True replaces it")
        identity = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
        name = tokenizer_name(tokenizer)
        with staging_directory(path.resolve()) as staging:
            staged = build_shards(documents, staging, options)
            shards = tuple(one.shard for one in staged)
            publish(staged, path.resolve(), Manifest(vocab_size, identity, name, shards))
        remove_others(path, shards)
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
        since stays in the new one. Only one process at a time should add to a store. Arguments and
        errors are those of :meth:`build`.
        """
        options = BuildOptions(self.vocab_size, memory, workers, progress, executor)
        path = self.path.resolve()
        with staging_directory(path) as staging:
            staged = build_shards(documents, staging, options)
            now = read_manifest(path)
            if replace(now, shards=()) != replace(self.manifest, shards=()):
                raise ValueError(f"{path}: expected the datastore that was opened, got another")
            shards = now.shards + tuple(one.shard for one in staged)
            publish(staged, path, replace(now, shards=shards))
        return Datastore(self.path)

    def documents(self) -> Iterator[NamedIds]:
        """Every document's name and token ids, int32 [n], in the order in which they were added;
        the pieces of one that was cut come one after another."""
        for shard in self._shards:
            for document, start in zip(shard.documents, shard.starts.tolist(), strict=False):
                yield NamedIds(document.name, shard.tokens[start : start + document.tokens])

    def document_sizes(self) -> dict[str, int]:
        """Tokens of each document by its name, in the order in which they were added; all documents
        of one name together."""
        sizes: dict[str, int] = {}
        for shard in self._shards:
            for name, tokens in shard.documents:
                sizes[name] = sizes.get(name, 0) + tokens
        return sizes

    def count(self, token_ids: Ids) -> int:
        """How often a token string occurs inside documents. O(len(token_ids) log(tokens)).

        Raises:
            ValueError: it is empty.
        """
        return self.index.count(token_ids)

    def verify(self) -> None:
        """Read all files and compare their checksums; ValueError for the first that is altered.
        O(size)."""
        for shard in self._shards:
            shard.verify()

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


def _mapped(path: Path) -> tuple[Manifest, list[MappedShard]]:
    """The manifest at `path` and the files of its shards.

    A writer may delete them in between: then there is another manifest by now.
    """
    manifest = read_manifest(path)
    while True:
        try:
            return manifest, [MappedShard(path, shard) for shard in manifest.shards]
        except (ValueError, FileNotFoundError):
            before, manifest = manifest, read_manifest(path)
            if manifest == before:
                raise
