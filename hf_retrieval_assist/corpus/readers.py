"""Corpora in the forms that users have them in, as streams of texts and of token ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..system.arguments import encodable, require_several
from ..system.files import read_json_lines
from ..system.versions import of_extra
from ..types.token_tree import Ids, NamedIds, checked_ids
from .datastore import Datastore
from .format import HOW_TO_BUILD, MANIFEST

Document: TypeAlias = "str | NamedText | Mapping[str, Any] | Ids | NamedIds"
Corpus: TypeAlias = "Iterable[Document] | Datastore | str | os.PathLike[str]"
_DATASET = "datasets:"
_SHOWN = 80  # characters of what is no path, or of a row without a text
_PIECE = 1 << 20  # characters of text that are held, and tokenised, at a time


class NamedText(NamedTuple):
    """A text of a corpus.

    Attributes:
        name: of the file that it is, or the file and number of its row.
        text: itself.
    """

    name: str
    text: str


def read_texts(
    sources: Iterable[str], field: str = "text", split: str = "train"
) -> Iterator[NamedText]:
    """The texts of all sources, one after another, as a stream; those of files by their paths, of
    rows by these and their numbers.

    Args:
        sources: files (`.txt`, `.py`, `.md`: one text each, in pieces of about a million
            characters; `.jsonl`, `.parquet`: one text per row), directories (all such files below
            them, hidden ones left out), and `datasets:` followed by a Hub id, or by a file or
            folder, that the `datasets` library reads.
        field: the column that holds the text of a row.
        split: of a data set that has several.

    Raises:
        FileNotFoundError: there is no such source.
        ValueError: a file of another kind, one that cannot be read, or a row without text in
            `field`. It names the file, and the line or row.
        ImportError: a Parquet file or data set without the `datasets` extra.
    """
    require_several("sources", sources, "a list of files, folders and data sets")
    for source in sources:
        if source.startswith(_DATASET):
            yield from _read_dataset(source.removeprefix(_DATASET), field, split)
            continue
        for path in _files(Path(source)):
            yield from _READERS[path.suffix](path, field)


def _files(source: Path) -> list[Path]:
    """A file, or every readable one below a directory, in a fixed order."""
    suffixes = ", ".join(_READERS)
    if source.is_dir():
        files = sorted(
            path
            for path in source.rglob("*")
            if path.suffix in _READERS
            and path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(source).parts)
        )
        if not files:
            raise ValueError(f"{source}: expected files ending in {suffixes}, got none")
        return files
    if not source.exists():
        raise FileNotFoundError(f"no file or directory {source}")
    if source.suffix not in _READERS:
        others = f"{_DATASET}{source} reads other kinds"
        raise ValueError(f"{source}: expected a name ending in {suffixes}; {others}")
    return [source]


def _read_lines(path: Path, field: str) -> Iterator[NamedText]:
    with path.open(encoding="utf-8") as file:
        try:
            # Whole lines; of one that is longer than a piece, its parts.
            lines = (NamedText(str(path), x) for x in iter(partial(file.readline, _PIECE), ""))
            for batch in text_batches(lines):
                yield NamedText(str(path), "".join([text for _, text in batch]))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: expected UTF-8, got {error}") from error


def _read_jsonl(path: Path, field: str) -> Iterator[NamedText]:
    for place, row in read_json_lines(path):
        if isinstance(row, ValueError):
            raise row
        yield _text_of(row, field, place)


def _read_parquet(path: Path, field: str) -> Iterator[NamedText]:
    return _read_dataset(str(path), field, "train")


def _read_dataset(name: str, field: str, split: str) -> Iterator[NamedText]:
    if not name:
        raise ValueError(f"{_DATASET}: expected a Hub id, file or folder behind it, got nothing")
    for number, row in enumerate(_rows(name, split), 1):
        yield _text_of(row, field, f"{name}:{number}")


def _rows(name: str, split: str) -> Iterator[Any]:
    datasets = of_extra("datasets", "Parquet files and data sets need")
    path, options = Path(name), {"split": split, "streaming": True}
    try:
        if (path / "dataset_info.json").is_file():
            yield from datasets.load_from_disk(name)
        elif (path / "dataset_dict.json").is_file():
            yield from datasets.load_from_disk(name)[split]
        elif path.is_file():
            files = {split: path.name}
            yield from datasets.load_dataset(str(path.parent), data_files=files, **options)
        else:
            yield from datasets.load_dataset(name, **options)
    except Exception as error:  # any, of damaged files
        if not path.is_file():
            raise
        raise ValueError(f"{path}: expected a file that datasets reads, got {error}") from error


def _text_of(row: Any, field: str, place: str) -> NamedText:
    text = row.get(field) if isinstance(row, Mapping) else None
    if not isinstance(text, str):
        kind = f"a row of {[*row]!r:.{_SHOWN}}" if isinstance(row, Mapping) else type(row).__name__
        found = f"{type(text).__name__} in {kind}"
        raise ValueError(f"{place}: expected text in field {field!r}, got {found}")
    return NamedText(place, encodable(f"{place}: field {field!r}", text))


_READERS: dict[str, Callable[[Path, str], Iterator[NamedText]]] = {
    ".txt": _read_lines,
    ".py": _read_lines,
    ".md": _read_lines,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer as far as building a datastore needs it.

    Attributes:
        tokenizer: the object that fingerprints are taken of.
        vocab_size: rows of the output layer of the model it belongs to where that is known, else
            the tokenizer's size.
        encode: token ids of a batch of texts, without special tokens.
    """

    tokenizer: Any
    vocab_size: int
    encode: Callable[[list[str]], list[list[int]]]

    def encode_stream(self, texts: Iterable[NamedText]) -> Iterator[NamedIds]:
        """Token ids of each text, tokenised in batches of about a million characters."""
        for batch in text_batches(texts):
            yield from self.encode_batch(batch)

    def encode_batch(self, texts: Sequence[NamedText]) -> list[NamedIds]:
        """Token ids of each text."""
        ids = self.encode([text for _, text in texts])
        return [NamedIds(name, found) for (name, _), found in zip(texts, ids, strict=True)]


def text_batches(texts: Iterable[NamedText]) -> Iterator[list[NamedText]]:
    """The texts in batches of about a million characters, to be tokenised at a time."""
    batch: list[NamedText] = []
    size = 0
    for named in texts:
        batch.append(named)
        size += len(named.text)
        if size >= _PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def load_encoder(source: str) -> TextEncoder:
    """A tokenizer of transformers by its folder or Hub id; OSError where there is none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    return TextEncoder(tokenizer, _model_vocab_size(source) or len(tokenizer), encode)


def _model_vocab_size(source: str) -> int | None:
    """Rows of the output layer of the model beside a tokenizer; None where none is described."""
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(source)
    except OSError:
        return None
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")


def tokenised(corpus: Corpus, tokenizer: Any = None) -> Iterable[NamedIds] | Datastore:
    """Documents as token ids, or the datastore that a corpus is.

    Args:
        corpus: documents, each a text, a row with a "text" and maybe a "name", or token ids, named
            or not; the path of a file or
            folder that `read_texts` reads, or "datasets:NAME"; a datastore, or its path.
        tokenizer: for texts; of a datastore's path, the one it has to be of.

    Raises:
        TypeError: none of these; ids that are no integers.
        FileNotFoundError: there is nothing at the path.
        ValueError: a text that is no path; a text without a tokenizer, or one that cannot be
            encoded; a row without text; a document that is none; a file that cannot be read.
    """
    if isinstance(corpus, (str, os.PathLike)):
        place = os.fspath(corpus)
        if not place.startswith(_DATASET) and (_existing(place) / MANIFEST).is_file():
            return Datastore.open(corpus, tokenizer)
        corpus = read_texts([place])
    if isinstance(corpus, Datastore):
        return corpus
    require_several("corpus", corpus, "documents, a path or a Datastore")
    return _ids(corpus, tokenizer)


def _existing(place: str) -> Path:
    path, shown, single = Path(place), repr(place[:_SHOWN]), "a single text stands in a list"
    try:
        path.stat()
    except FileNotFoundError:
        none = f"corpus: no file, folder or datastore at {shown}"
        raise FileNotFoundError(f"{none}; {HOW_TO_BUILD}; {single}") from None
    except (OSError, ValueError) as error:
        expected = f"corpus: expected a path ({error.args[-1]:.80})"
        raise ValueError(f"{expected}, got {shown}; {single}") from None
    return path


def _ids(documents: Iterable[Document], tokenizer: Any) -> Iterator[NamedIds]:
    for number, document in enumerate(documents):
        place = f"corpus: document {number}"
        name, text = "", document
        if isinstance(document, Mapping):
            name, text = str(document.get("name", "")), _text_of(document, "text", place).text
        elif isinstance(document, (NamedText, NamedIds)):
            name, text = document
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError("tokenizer: expected one, since the corpus is text, got None")
            text = tokenizer(encodable(place, text), add_special_tokens=False).input_ids
        yield NamedIds(name, checked_ids(place, text))
