"""What drafting costs inside an engine: `propose()` for many requests, with warm and cold caches.

A stand-in of vLLM's model runner writes recorded answers side by side, 12 tokens drafted for each
request, and a perfect verifier takes the drafts. "Cold" calls come after 32 MiB were written, as a
model's weights go through the processor's caches between two steps.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np

from hf_retrieval_assist.extensions.vllm.proposer import Proposer

from .report import Report
from .traces import Trace, read_traces

ROWS = (1, 8, 32, 64, 256)
LONGEST_DRAFT = 12
COLD_BYTES = 32 << 20
STEPS = 300
WARM_UP = 30  # steps
LONGEST_TEXT = 16_384
COLUMNS = {
    "rows": "requests",
    "caches": "caches",
    "median": "us a call, median",
    "p99": "99th percentile",
    "tokens": "tokens/request and step",
    "drafts": "drafts' digest",
}


class _Config(SimpleNamespace):
    name_or_path = "recorded"

    def to_diff_dict(self) -> dict[str, int]:
        return {}


def make_proposer(vocab_size: int) -> Proposer:
    model = SimpleNamespace(
        hf_config=_Config(),
        hf_text_config=SimpleNamespace(eos_token_id=None),
        max_model_len=LONGEST_TEXT,
        get_vocab_size=lambda: vocab_size,
        try_get_generation_config=dict,
    )
    config = SimpleNamespace(
        model_config=model,
        speculative_config=SimpleNamespace(num_speculative_tokens=LONGEST_DRAFT),
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
        device_config=SimpleNamespace(device_type="cuda"),
        # A fixed length: the plan would follow the time of steps, which are none here.
        additional_config={"hf_retrieval_assist": {"budget": LONGEST_DRAFT}},
    )
    return Proposer(config)


class Runner:
    """Keeps so many requests running; each that ends makes room for the next one."""

    def __init__(self, requests: Iterator[tuple[np.ndarray, np.ndarray]], rows: int, vocab: int):
        self._requests = requests
        self.proposer = make_proposer(vocab)
        self._tokens = np.zeros((rows, LONGEST_TEXT), np.int32)
        self._lengths = np.zeros(rows, np.int32)
        self._ends = np.zeros(rows, np.int64)
        self._texts: list[np.ndarray] = [np.empty(0, np.int32)] * rows
        self._drafts: list[list[int]] = [[] for _ in range(rows)]
        self.brought = 0
        self.digest = hashlib.blake2b(digest_size=6)

    def step(self) -> float:
        """One step of all requests; the seconds of its drafts."""
        sampled = [self._verify(row) for row in range(len(self._texts))]
        self.brought += sum(map(len, sampled))
        started = time.perf_counter()
        self._drafts = self.proposer.propose(sampled, self._lengths, self._tokens)
        seconds = time.perf_counter() - started
        for draft in self._drafts:
            self.digest.update(np.array([len(draft), *draft], np.int32).tobytes())
        return seconds

    def _verify(self, row: int) -> list[int]:
        place = int(self._lengths[row])
        if place >= self._ends[row]:
            self._begin(row)
            place = int(self._lengths[row])
        text, new = self._texts[row], [int(self._texts[row][place])]
        for token in self._drafts[row]:
            if token != new[-1] or place + len(new) >= len(text):
                break
            new.append(int(text[place + len(new)]))
        self._tokens[row, place : place + len(new)] = new
        self._lengths[row] += len(new)
        return new

    def _begin(self, row: int) -> None:
        prompt, output = next(self._requests)
        self._texts[row] = np.concatenate([prompt, output])[:LONGEST_TEXT]
        self._tokens[row, : len(prompt)] = prompt
        self._lengths[row], self._ends[row] = len(prompt), len(self._texts[row])
        self._drafts[row] = []


def in_turn(traces: list[Trace]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Requests of all traces in turn, again and again, but for those too short to draft for."""
    fitting = [
        [(p, o) for p, o in t.requests if len(o) > 1 and len(p) + len(o) < LONGEST_TEXT]
        for t in traces
    ]
    number = 0
    while True:
        requests = fitting[number % len(fitting)]
        yield requests[number // len(fitting) % len(requests)]
        number += 1


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--propose-rows", type=int, nargs="+", default=ROWS, help="requests")
    parser.add_argument("--propose-steps", type=int, default=STEPS)


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    traces = read_traces(arguments.traces)
    traces = [trace for trace in traces if trace.name in ("chat", "code")] or traces
    vocab = max(trace.vocab_size for trace in traces)
    steps = 20 if arguments.quick else arguments.propose_steps
    report = Report("propose", {"traces": [t.name for t in traces], "steps": steps})
    table = report.table("Drafts for requests side by side", COLUMNS)
    for rows in arguments.propose_rows:
        for caches in ("warm", "cold"):
            progress(f"{rows} requests, {caches} caches")
            table.add(rows=rows, caches=caches, **measure(traces, vocab, rows, caches, steps))
    return report


def measure(
    traces: list[Trace], vocab: int, rows: int, caches: str, steps: int
) -> dict[str, float | str]:
    runner = Runner(in_turn(traces), rows, vocab)
    written = np.zeros(COLD_BYTES, np.uint8)
    seconds = []
    for step in range(WARM_UP + steps):
        if caches == "cold":
            written.fill(step & 127)
        seconds.append(runner.step())
    us = 1e6 * np.array(seconds[WARM_UP:])
    return {
        "median": float(np.median(us)),
        "p99": float(np.quantile(us, 0.99)),
        "tokens": runner.brought / (rows * (WARM_UP + steps)),
        "drafts": runner.digest.hexdigest(),
    }
