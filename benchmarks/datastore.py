"""How fast a corpus on disk is built, opened and asked, and how much room it takes."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hf_retrieval_assist.corpus.datastore import Datastore
from hf_retrieval_assist.structures.suffix_array import SuffixMatcher

from .report import Report, Table
from .texts import Int32Array
from .traces import read_traces

VOCAB_SIZE = 262_144
SIZES = (200_000, 2_000_000, 20_000_000, 100_000_000)
MAX_MATCH, NODES, DEPTH, SOURCES = 16, 64, 10, 3  # RestDrafter's
REPLACED = 0.1
STEPS = 1_000
CACHE_BYTES = 1 << 26  # more than the caches of a processor hold

BUILD_COLUMNS = {
    "tokens": "tokens",
    "shards": "shards",
    "build": "tokens/s of a core",
    "bytes": "bytes/token",
    "open": "open ms",
    "growth": "RSS growth, MB",
    "before": "RSS before, MB",
}
STEP_COLUMNS = {
    "tokens": "tokens",
    "search": "search",
    "caches": "caches",
    "p50": "us/step p50",
    "p99": "us/step p99",
    "lookup": "lookup p50",
    "select": "selection p50",
    "nodes": "nodes/step",
}

# A process of its own, where nothing of the store is resident yet.
OPENING = """
import json, sys, time
from pathlib import Path
from hf_retrieval_assist.corpus.datastore import Datastore

NAN = float("nan")

def resident():
    # Megabytes, where Linux tells; not a number elsewhere.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS")), NAN)

before, started = resident(), time.perf_counter()
store = Datastore.open(sys.argv[1])
seconds = time.perf_counter() - started
print(json.dumps({"open": 1e3 * seconds, "before": before, "growth": resident() - before}))
"""

Step = Callable[[Int32Array, int], tuple[float, float, int]]


def library_documents() -> list[Int32Array]:
    """The sources of Python's standard library: words, signs and spaces, numbered as they come."""
    numbers: dict[str, int] = {}
    documents = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            words = re.findall(r"\w+|[^\w\s]|\s+", path.read_text("utf-8", "ignore"))
            ids = [numbers.setdefault(word, len(numbers)) for word in words]
            documents.append(np.array(ids, np.int32) % VOCAB_SIZE)
    return documents


def trace_documents(folder: Path) -> list[Int32Array]:
    """The corpora of recorded requests."""
    return [document for trace in read_traces(folder) for document in trace.corpus]


def hold_out(documents: list[Int32Array], seed: int) -> tuple[list[Int32Array], Int32Array]:
    """What to build from, and a twentieth of the documents, one after the other, to ask along."""
    order = np.random.default_rng(seed).permutation(len(documents))
    apart = max(len(documents) // 20, 1)
    asked = np.concatenate([documents[i] for i in order[:apart]])
    return [documents[i] for i in order[apart:]], asked[:STEPS]


def perturbed(documents: list[Int32Array], tokens: int, seed: int) -> list[Int32Array]:
    """`tokens` tokens: the documents again and again, in another order and with other tokens.

    From the second time on, a tenth of the tokens is replaced: one half by tokens drawn from the
    documents, the other by any of the vocabulary.
    """
    rng = np.random.default_rng(seed)
    found: list[Int32Array] = []
    room = tokens
    while room > 0:
        text = np.concatenate(documents)
        if found:
            places = np.flatnonzero(rng.random(len(text)) < REPLACED)
            drawn, invented = np.array_split(rng.permutation(places), 2)
            text[drawn] = text[rng.integers(0, len(text), len(drawn))]
            text[invented] = rng.integers(0, VOCAB_SIZE, len(invented))
        pieces = np.split(text[:room], np.cumsum([len(d) for d in documents])[:-1])
        found += [pieces[i] for i in rng.permutation(len(pieces)) if len(pieces[i])]
        room -= len(text)
    return found


def build(documents: list[Int32Array], path: Path, memory: int) -> dict[str, float]:
    """Index documents with one worker; figures of the store."""
    started = time.process_time()
    store = Datastore.build(documents, path, vocab_size=VOCAB_SIZE, memory=memory, progress=False)
    seconds = time.process_time() - started
    return {
        "tokens": store.token_count,
        "shards": len(store.manifest.shards),
        "build": store.token_count / seconds,
        "bytes": store.bytes_on_disk / store.token_count,
    }


def opening(path: Path) -> dict[str, float]:
    """Milliseconds of opening in a new process, and its resident memory."""
    command = [sys.executable, "-c", OPENING, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def incremental(store: Datastore) -> Step:
    """One matcher that follows the text."""
    matcher = SuffixMatcher(store.index, MAX_MATCH, NODES)

    def step(text: Int32Array, end: int) -> tuple[float, float, int]:
        return _timed(matcher, text[end - 1 : end].tolist())

    return step


def from_scratch(store: Datastore) -> Step:
    """A search for the last tokens at every step, as REST does it."""

    def step(text: Int32Array, end: int) -> tuple[float, float, int]:
        recent = text[max(end - MAX_MATCH, 0) : end].tolist()
        return _timed(SuffixMatcher(store.index, MAX_MATCH, NODES), recent)

    return step


def _timed(matcher: SuffixMatcher, tokens: list[int]) -> tuple[float, float, int]:
    """Microseconds of the lookup and of the selection, and the nodes selected."""
    started = time.thread_time()
    matcher.extend(tokens)
    found = time.thread_time()
    nodes = len(matcher.select(NODES, DEPTH, SOURCES)[0])
    return 1e6 * (found - started), 1e6 * (time.thread_time() - found), nodes


SEARCHES: dict[str, Callable[[Datastore], Step]] = {
    "incremental": incremental,
    "from scratch": from_scratch,
}


def measure_steps(table: Table, store: Datastore, text: Int32Array) -> None:
    """Both searches along the text: to warm up, then timed, then timed with cold caches."""
    searches = {name: make(store) for name, make in SEARCHES.items()}
    trash = np.ones(CACHE_BYTES, np.uint8)
    ends = list(range(1, len(text) + 1))
    _follow(searches, text, ends)
    _add_rows(table, store, "warm", _follow(searches, text, ends))
    # A forward of the model runs between two steps and leaves nothing in the caches.
    cold = _follow(searches, text, ends[: len(ends) // 4], trash.sum)
    _add_rows(table, store, "emptied", cold)


def _follow(
    searches: dict[str, Step],
    text: Int32Array,
    ends: list[int],
    between: Callable[[], object] = lambda: None,
) -> dict[str, NDArray[np.float64]]:
    """Figures of each step: float64 [steps, 3], those of :func:`_timed`."""
    figures: dict[str, list[tuple[float, float, int]]] = {name: [] for name in searches}
    for name, step in searches.items():
        for end in ends:
            between()
            figures[name].append(step(text, end))
    return {name: np.array(rows, np.float64) for name, rows in figures.items()}


def _add_rows(
    table: Table, store: Datastore, caches: str, found: dict[str, NDArray[np.float64]]
) -> None:
    for name, (lookup, select, nodes) in ((name, rows.T) for name, rows in found.items()):
        p50, p99 = np.percentile(lookup + select, [50, 99]).tolist()
        table.add(
            tokens=store.token_count,
            search=name,
            caches=caches,
            p50=p50,
            p99=p99,
            lookup=float(np.median(lookup)),
            select=float(np.median(select)),
            nodes=float(nodes.mean()),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, help="largest corpus (default: 2M, quick: 20k)")
    parser.add_argument("--shard-memory", type=int, default=1 << 33, help="bytes for sorting")
    parser.add_argument(
        "--corpora", type=Path, help="folder of recordings with corpora (default: Python's library)"
    )


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    tokens = arguments.tokens or (20_000 if arguments.quick else 2_000_000)
    steps = 100 if arguments.quick else STEPS
    settings = {"tokens": tokens, "steps": steps, "seed": arguments.seed, "replaced": REPLACED}
    report = Report("datastore", settings)
    stores = report.table("Datastore, vocabulary of 262,144", BUILD_COLUMNS)
    asked = report.table(f"A step: one more token and a draft of up to {NODES}", STEP_COLUMNS)
    real = trace_documents(arguments.corpora) if arguments.corpora else library_documents()
    documents, text = hold_out(real, arguments.seed)
    for size in sorted({*(size for size in SIZES if size < tokens), tokens}):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "store"
            progress(f"building of {size:,} tokens")
            corpus = perturbed(documents, size, arguments.seed)
            figures = build(corpus, path, arguments.shard_memory)
            progress(f"opening {size:,} tokens")
            stores.add(**figures, **opening(path))
            progress(f"asking {size:,} tokens")
            measure_steps(asked, Datastore.open(path), text[:steps])
    report.note("times are of the processor, not of the clock; only opening is timed by the clock")
    report.note("the page cache is warm, and the same text was asked before: no page faults")
    return report
