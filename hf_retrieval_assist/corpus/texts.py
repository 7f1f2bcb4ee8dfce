"""A corpus in the forms that users have it in."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ..system.arguments import encodable
from ..token_tree import Ids, checked_ids
from .build import require_documents
from .datastore import Datastore
from .format import MANIFEST
from .readers import DATASET_PREFIX, read_texts

Document: TypeAlias = "str | Mapping[str, Any] | Ids"
Corpus: TypeAlias = "Iterable[Document] | Datastore | str | os.PathLike[str]"
_SHOWN = 80  # characters of what is no path


def tokenised(corpus: Corpus, tokenizer: Any = None) -> Iterable[Ids] | Datastore:
    """Documents as token ids, or the datastore that a corpus is.

    Args:
        corpus: documents, each a text, a row with a "text", or token ids; the path of a file or
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
        if not place.startswith(DATASET_PREFIX) and (_existing(place) / MANIFEST).is_file():
            return Datastore.open(corpus, tokenizer)
        corpus = read_texts([place])
    if isinstance(corpus, Datastore):
        return corpus
    require_documents("corpus", corpus)
    return _ids(corpus, tokenizer)


def _existing(place: str) -> Path:
    path, shown = Path(place), f"got {place[:_SHOWN]!r}; a single text stands in a list"
    try:
        path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"corpus: expected a path, {shown}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"corpus: expected a path ({error.args[-1]:.80}), {shown}") from None
    return path


def _ids(documents: Iterable[Document], tokenizer: Any) -> Iterator[Ids]:
    for number, document in enumerate(documents):
        name = f"corpus: document {number}"
        text: Any = document
        if isinstance(document, Mapping):
            text = document.get("text")
            if not isinstance(text, str):
                found = f"{type(text).__name__} in a row of {[*document]!r:.{_SHOWN}}"
                raise ValueError(f"{name}: expected text in field 'text', got {found}")
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError("tokenizer: expected one, since the corpus is text, got None")
            text = tokenizer(encodable(name, text), add_special_tokens=False).input_ids
        yield checked_ids(name, text)
