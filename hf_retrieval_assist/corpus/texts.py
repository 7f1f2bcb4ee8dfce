"""A corpus in the forms that users have it in."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ..system.arguments import kind_of
from .build import Ids
from .datastore import Datastore
from .format import MANIFEST
from .readers import DATASET_PREFIX, read_texts

Document: TypeAlias = "str | Mapping[str, Any] | Ids"
Corpus: TypeAlias = "Iterable[Document] | Datastore | str | os.PathLike[str]"


def tokenised(corpus: Corpus, tokenizer: Any = None) -> Iterable[Ids] | Datastore:
    """Documents as token ids, or the datastore that a corpus is.

    Args:
        corpus: documents, each a text, a row with a "text", or token ids; the path of a file or
            folder that `read_texts` reads, or "datasets:NAME"; a datastore, or its path.
        tokenizer: for texts; of a datastore's path, the one it has to be of.

    Raises:
        TypeError: none of these.
        FileNotFoundError: there is nothing at the path.
        ValueError: a text without a tokenizer; a file that cannot be read.
    """
    if isinstance(corpus, (str, os.PathLike)):
        if (Path(corpus) / MANIFEST).is_file():
            return Datastore.open(corpus, tokenizer)
        place = os.fspath(corpus)
        if not place.startswith(DATASET_PREFIX) and not Path(place).exists():
            raise FileNotFoundError(
                f"corpus: expected a path, got {place!r}; a single text stands in a list"
            )
        corpus = read_texts([place])
    if isinstance(corpus, Datastore):
        return corpus
    if isinstance(corpus, type) or not isinstance(corpus, Iterable):
        raise TypeError(f"corpus: expected documents, a path or a Datastore, got {kind_of(corpus)}")
    return _ids(corpus, tokenizer)


def _ids(documents: Iterable[Document], tokenizer: Any) -> Iterator[Ids]:
    for document in documents:
        text: Any = document.get("text") if isinstance(document, Mapping) else document
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError("tokenizer: expected one, since the corpus is text, got None")
            text = tokenizer(text, add_special_tokens=False).input_ids
        yield text
