"""Recorded requests: what was asked and what was answered, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_retrieval_assist.system.files import read_json_lines

Ids = NDArray[np.int32]
SHIPPED = Path(__file__).parent / "traces"


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they were served.

    Attributes:
        name: of the file it comes from.
        requests: (prompt, output) pairs.
        corpus: texts that may be indexed beforehand.
    """

    name: str
    requests: list[tuple[Ids, Ids]]
    corpus: list[Ids] = field(default_factory=list)

    def head(self, count: int | None) -> Trace:
        """The first requests only, and the whole corpus."""
        return Trace(self.name, self.requests[:count], self.corpus)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        texts = [ids for pair in self.requests for ids in pair] + self.corpus
        return 1 + max((int(ids.max()) for ids in texts if len(ids)), default=0)


def read_traces(folder: Path, tokenizer: Any = None) -> list[Trace]:
    """Every trace of a folder, by name.

    A `.npz` file holds, for each of `prompt`, `output` and (optionally) `corpus`, the arrays
    `*_tokens` (ids) and `*_offsets`; item i is `tokens[offsets[i]:offsets[i + 1]]`. A `.jsonl` file
    holds one object per line, `{"prompt": text, "output": text}` or `{"corpus": text}`.

    Raises:
        ValueError: there are none, a file is not laid out like this, or text comes without a
            tokenizer.
    """
    readers: dict[str, Callable[[Path], Trace]] = {
        ".npz": _read_npz,
        ".jsonl": lambda path: _read_jsonl(path, tokenizer),
    }
    paths = sorted(path for path in folder.glob("*") if path.suffix in readers)
    if not paths:
        raise ValueError(f"no .npz or .jsonl files in {folder}")
    return [readers[path.suffix](path) for path in paths]


def write_npz(path: Path, trace: Trace) -> None:
    """Write a trace in the layout that `read_traces` reads."""
    prompts, outputs = [p for p, _ in trace.requests], [o for _, o in trace.requests]
    arrays = {}
    for kind, texts in (("prompt", prompts), ("output", outputs), ("corpus", trace.corpus)):
        arrays[f"{kind}_tokens"] = np.concatenate([np.empty(0), *texts]).astype(np.uint32)
        arrays[f"{kind}_offsets"] = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)


def _read_npz(path: Path) -> Trace:
    with np.load(path, allow_pickle=False) as arrays:
        prompts, outputs, corpus = (
            list(_items(path, arrays, kind)) for kind in ("prompt", "output", "corpus")
        )
    if len(prompts) != len(outputs):
        raise ValueError(f"{path}: {len(prompts)} prompts but {len(outputs)} outputs")
    return Trace(path.stem, list(zip(prompts, outputs, strict=True)), corpus)


def _items(path: Path, arrays: Any, kind: str) -> Iterator[Ids]:
    if kind == "corpus" and "corpus_tokens" not in arrays:
        return
    for key in (f"{kind}_tokens", f"{kind}_offsets"):
        if key not in arrays:
            raise ValueError(f"{path}: expected an array {key}")
    tokens, offsets = arrays[f"{kind}_tokens"], arrays[f"{kind}_offsets"]
    if not len(offsets) or (np.diff(offsets) < 0).any() or offsets[-1] > len(tokens):
        raise ValueError(f"{path}: {kind}_offsets do not divide {kind}_tokens")
    for start, end in pairwise(offsets.tolist()):
        yield tokens[start:end].astype(np.int32)


def _read_jsonl(path: Path, tokenizer: Any) -> Trace:
    if tokenizer is None:
        raise ValueError(f"{path}: expected a tokenizer for text")

    def ids(text: str) -> Ids:
        return np.array(tokenizer(text, add_special_tokens=False).input_ids, dtype=np.int32)

    trace = Trace(path.stem, [])
    for place, record in read_json_lines(path):
        if isinstance(record, ValueError):
            raise record
        if record.keys() >= {"prompt", "output"}:
            trace.requests.append((ids(record["prompt"]), ids(record["output"])))
        elif "corpus" in record:
            trace.corpus.append(ids(record["corpus"]))
        else:
            raise ValueError(f"{place}: expected prompt and output, or corpus")
    return trace
