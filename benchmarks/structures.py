"""How fast structures grow and answer, and how much memory they take, from 1k to 10M tokens.

Then a bounded memory of outputs that many times more tokens pass through than it holds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.memory.output_memory import OutputMemory
from hf_retrieval_assist.structures.suffix_array import SuffixMatcher
from hf_retrieval_assist.structures.suffix_automaton import SuffixAutomaton
from hf_retrieval_assist.structures.suffix_tree import SuffixTree

from . import texts
from .report import Report
from .texts import Int32Array
from .timing import orders, typical_us
from .traces import SHIPPED

VOCAB_SIZE = 262_144  # more than every id of every text
DRAFT = 32
DEPTH = 64  # longest context plus draft of suffix trees
QUERIES = 1_000
QUERY_SECONDS = 1.0
REPEATS = 3
REPEATED = 1_000_000  # tokens; larger texts are indexed once
OUTPUT_TOKENS = 500
# A token takes about 75 bytes there: a million are more than what fits.
MEMORY_BYTES_PER_TOKEN = 64
MEMORY_PARTS = 10


class Index(ABC):
    """A text that can be drafted from.

    Attributes:
        builds: whether indexing is more than keeping the text.
    """

    builds = True

    @abstractmethod
    def __init__(self, text: Int32Array) -> None:
        """Index a whole text."""

    @property
    @abstractmethod
    def nbytes(self) -> int | None:
        """Bytes in use; None where that cannot be known."""

    def append(self, token: int) -> None:
        """One more token of the text that is being written."""
        raise NotImplementedError

    def draft(self) -> None:
        """What may follow the text so far, at most DRAFT tokens."""
        raise NotImplementedError


class AutomatonIndex(Index):
    """Suffix automaton, online (SAM-Decoding)."""

    def __init__(self, text: Int32Array) -> None:
        self._automaton = SuffixAutomaton()
        self._cursor = self._automaton.cursor()
        self._automaton.extend(text, self._cursor)

    @property
    def nbytes(self) -> int:
        return self._automaton.nbytes

    def append(self, token: int) -> None:
        self._automaton.extend(np.array([token], np.int32), self._cursor)

    def draft(self) -> None:
        self._cursor.draft(DRAFT)


class TreeIndex(Index):
    """Suffix tree of bounded depth with counts, online (SuffixDecoding)."""

    def __init__(self, text: Int32Array) -> None:
        self._tree = SuffixTree(DEPTH)
        self._sequence = self._tree.add_sequence()
        self._tree.extend(self._sequence, text)

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    def append(self, token: int) -> None:
        self._tree.extend(self._sequence, np.array([token], np.int32))

    def draft(self) -> None:
        self._tree.speculate(None, DRAFT, sequence=self._sequence)


class ArrayIndex(Index):
    """Suffix array on disk with a trie of continuations (REST); a static corpus.

    Appending moves the query, not the corpus.
    """

    def __init__(self, text: Int32Array) -> None:
        self._folder = tempfile.TemporaryDirectory()
        documents = np.array_split(text, max(1, len(text) // 1000))
        self._store = Datastore.build(
            documents, Path(self._folder.name) / "corpus", vocab_size=VOCAB_SIZE, progress=False
        )
        self._matcher = SuffixMatcher(self._store.index, 16, DRAFT)

    @property
    def nbytes(self) -> int:
        return self._store.bytes_on_disk

    def append(self, token: int) -> None:
        self._matcher.extend([token])

    def draft(self) -> None:
        self._matcher.select(DRAFT, 16)


class PromptLookupIndex(Index):
    """transformers' prompt lookup: searches the text anew for every draft."""

    builds = False

    def __init__(self, text: Int32Array) -> None:
        self._length = len(text)
        self._ids = torch.zeros(1, len(text) + QUERIES, dtype=torch.int64)
        self._ids[0, : len(text)] = torch.from_numpy(text)
        self._generator = PromptLookupCandidateGenerator(
            num_output_tokens=DRAFT, max_matching_ngram_size=2, max_length=2**31
        )

    @property
    def nbytes(self) -> int:
        return 8 * self._length

    def append(self, token: int) -> None:
        self._ids[0, self._length] = token
        self._length += 1

    def draft(self) -> None:
        self._generator.get_candidates(self._ids[:, : self._length])


class DivsufsortIndex(Index):
    """pydivsufsort: sorting alone, as a yardstick for the suffix array."""

    def __init__(self, text: Int32Array) -> None:
        from pydivsufsort import divsufsort

        self._suffixes = divsufsort(text)

    @property
    def nbytes(self) -> int:
        return self._suffixes.nbytes


class ArcticIndex(Index):
    """ArcticInference's suffix cache, of one request: its other tree is switched off."""

    def __init__(self, text: Int32Array) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=DEPTH, max_cached_requests=0)
        self._cache.start_request(0, text)
        self._context = text[-DEPTH:].tolist()

    @property
    def nbytes(self) -> None:
        return None

    def append(self, token: int) -> None:
        self._cache.add_active_response(0, [token])
        self._context.append(token)

    def draft(self) -> None:
        context = self._context[-DEPTH:]
        self._cache.speculate(0, context, max_spec_tokens=DRAFT, use_tree_spec=True)


class ArcticTreeIndex(Index):
    """The compiled tree inside ArcticInference's suffix cache, without the Python around it."""

    def __init__(self, text: Int32Array) -> None:
        from arctic_inference.suffix_decoding._C import SuffixTree as ArcticTree

        self._tree = ArcticTree(DEPTH)
        self._tree.extend_ndarray(0, text)
        self._context = text[-DEPTH:].tolist()

    @property
    def nbytes(self) -> None:
        return None

    def append(self, token: int) -> None:
        self._tree.extend(0, [token])
        self._context.append(token)

    def draft(self) -> None:
        self._tree.speculate(self._context[-DEPTH:], DRAFT, 1.0, 0.0, 0.1, True)


INDEXES: dict[str, type[Index]] = {
    "suffix automaton": AutomatonIndex,
    "suffix tree": TreeIndex,
    "suffix array": ArrayIndex,
    "prompt lookup": PromptLookupIndex,
    "pydivsufsort": DivsufsortIndex,
    "ArcticInference cache": ArcticIndex,
    "ArcticInference tree": ArcticTreeIndex,
}

COLUMNS = {
    "structure": "structure",
    "text": "text",
    "tokens": "tokens",
    "build": "build tokens/s",
    "bytes": "bytes/token",
    "update": "us/update",
    "draft": "us/draft",
}


Figures = dict[str, float | None]


def measure(index: type[Index], text: Int32Array, queries: Int32Array) -> Figures:
    """Figures of one structure over one text, then asked along `queries`."""
    started = time.perf_counter()
    built = index(text)
    seconds = time.perf_counter() - started
    nbytes = built.nbytes
    figures: Figures = {
        "build": len(text) / seconds if index.builds else None,
        "bytes": None if nbytes is None else nbytes / len(text),
    }
    if index.append is not Index.append:
        calls = [(lambda t=int(token): built.append(t)) for token in queries]
        half = len(calls) // 2
        figures["update"] = typical_us(calls[:half], QUERY_SECONDS)
        figures["draft"] = typical_us(_after_each(calls[half:], built.draft), QUERY_SECONDS)
    return figures


def medians(repeats: list[Figures]) -> Figures:
    """The median of every figure; None stays None."""
    return {
        key: None if value is None else median(figures[key] for figures in repeats)
        for key, value in repeats[0].items()
    }


def _after_each(
    calls: list[Callable[[], object]], timed: Callable[[], object]
) -> Iterator[Callable[[], object]]:
    """`timed` once after each of the calls, which are not timed themselves."""
    for call in calls:
        call()
        yield timed


def available(report: Report) -> dict[str, type[Index]]:
    """The indexes whose packages are installed; a note for each other."""
    found = {}
    for name, index in INDEXES.items():
        try:
            index(np.arange(8, dtype=np.int32))
        except ImportError as error:
            report.note(f"{name} is left out: {error}")
        else:
            found[name] = index
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, help="largest text (default: 1M, quick: 100k)")
    parser.add_argument(
        "--text", type=Path, default=SHIPPED, help="folder of recordings, for text that is real"
    )


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    largest = arguments.max_tokens or (100_000 if arguments.quick else 1_000_000)
    sizes = [10**e for e in range(3, 9) if 10**e <= largest]
    report = Report("structures", {"sizes": sizes, "draft": DRAFT, "seed": arguments.seed})
    queries = QUERIES // 10 if arguments.quick else QUERIES
    table = report.table(f"Structures, drafting {DRAFT} tokens", COLUMNS)
    indexes = available(report)
    for stream, text in _texts(sizes, queries, arguments):
        size = len(text) - queries
        repeats = 1 if arguments.quick or size > REPEATED else REPEATS
        found: dict[str, list[Figures]] = {name: [] for name in indexes}
        for order in orders(list(indexes), repeats):
            for name in order:
                progress(f"{name}: {size:,} tokens, {stream}")
                found[name].append(measure(indexes[name], text[:size], text[size:]))
        for name, figures in found.items():
            table.add(structure=name, text=stream, tokens=size, **medians(figures))
    progress("a bounded memory")
    passing = texts.natural(min(max(sizes), REPEATED), seed=arguments.seed)
    measure_memory(report, passing)
    return report


def measure_memory(report: Report, text: Int32Array) -> None:
    """Throughput and size of a bounded memory while a text passes through it as outputs."""
    limit = max(MEMORY_BYTES_PER_TOKEN * len(text), 1 << 18)
    table = report.table(
        f"Outputs through a memory of at most {limit / 2**20:.3g} MiB",
        {"tokens": "tokens", "speed": "tokens/s", "largest": "largest MiB", "kept": "tokens kept"},
    )
    memory = OutputMemory(max_bytes=limit)
    learnt = 0
    for part in np.array_split(text, MEMORY_PARTS):
        largest = 0
        started = time.perf_counter()
        for start in range(0, len(part), OUTPUT_TOKENS):
            memory.add(part[start : start + OUTPUT_TOKENS])
            largest = max(largest, memory.nbytes)
        speed = len(part) / (time.perf_counter() - started)
        learnt += len(part)
        table.add(tokens=learnt, speed=speed, largest=largest / 2**20, kept=memory.token_count)


def _texts(
    sizes: list[int], queries: int, arguments: argparse.Namespace
) -> Iterator[tuple[str, Int32Array]]:
    """Every text with its name: `queries` tokens longer than what is indexed of it."""
    for size in sizes:
        yield "natural", texts.natural(size + queries, seed=arguments.seed)
    for size in sizes:
        recorded = texts.recorded(arguments.text, size + queries)
        if len(recorded) == size + queries:
            yield "recorded", recorded
    # A million tokens of the hard ones are enough to tell linear time from worse.
    for size in [size for size in sizes if size <= 10**6][-1:]:
        for name, stream in texts.HARD.items():
            yield name, stream(size + queries)
