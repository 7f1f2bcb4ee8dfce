"""Train the initial weights of mixing on recorded requests.

    python -m benchmarks.mixture TRACES OUT [--without NAME]
    python -m benchmarks.mixture TRACES OUT --judge [--requests N]

The drafter replays the requests of every trace in turn, a few of each, and keeps what it learns.
Each trace is replayed from the text alone, with its corpus in the memory, and with it as a corpus.
`--without` leaves a trace out, for weights that are tried on that trace. `--judge` does so with
every trace, and writes into a folder how far drafts with these weights come.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hf_retrieval_assist import Assistant, OutputMemory, SamAssistant
from hf_retrieval_assist.drafters.suffix import Mixture, SuffixDrafter
from hf_retrieval_assist.structures.suffix_tree import CELL_SHAPE, COPY_SHAPE, WEIGHT_SHAPE
from hf_retrieval_assist.types.token_tree import Float32Array

from .acceptance import cpu_time, gpu_time
from .report import Report
from .simulation import simulate
from .traces import Trace, read_traces
from .variants import warmed

ROUNDS = 40
TOKENS = 500  # those of outputs, per trace and round
BUDGET = 32
FIRST_RATE, LAST_RATE = 0.02, 0.003

SIZES = (16, 32, 64)
CURVES = {"CPU": cpu_time, "GPU": gpu_time}

# Share of a context's continuations, at the middle of each bucket; no continuation is the first,
# and the last: no continuation, where the context always went on alike.
SHARES = (0.005, 0.01, 0.04, 0.1, 0.22, 0.4, 0.6, 0.85, 0.95, 0.005)

# That a copy goes on, by how long it has been going on.
COPIED = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)

TRIALS_KEPT = 20  # each cell's, from training to another text


def untrained() -> Mixture:
    """Every context counts alike, and is right as often as it was before."""
    cells = np.zeros((*CELL_SHAPE, 2), np.float32)
    trust = 0.5 + 0.08 * np.arange(CELL_SHAPE[2])
    cells[..., 0] = (trust[:, None] * SHARES)[..., None]
    copy_cells = np.zeros((*COPY_SHAPE, 2), np.float32)
    copy_cells[..., 0] = 0.05, 0.5
    going_on = np.repeat(COPIED, COPY_SHAPE[1] // len(COPIED))
    copy_cells[0, :, :, 0] = np.stack([(1 - going_on) / 10, going_on], 1)
    weights = np.zeros(WEIGHT_SHAPE, np.float32)
    weights[0, :-2] = 0.12
    return Mixture(cells, copy_cells, weights)


def doubted(mixture: Mixture) -> Mixture:
    """The same, tried so little that another kind of text soon moves it."""
    cells, copies = mixture.cells.copy(), mixture.copy_cells.copy()
    for found in (cells, copies):
        found[..., 1] = np.minimum(found[..., 1], TRIALS_KEPT)
    return replace(mixture, cells=cells, copy_cells=copies)


def train(traces: Sequence[Trace], rounds: int = ROUNDS) -> Mixture:
    """What drafting learns from `traces`, each having the same say while it lasts.

    The weights are the mean over the second half of the way that they took (Polyak and Juditsky,
    1992): where it ends they lean to the trace that came last.
    """
    mixture = untrained()
    weights: list[Float32Array] = [mixture.weights]
    drafters = [drafter for trace in traces for drafter in _drafters(trace)]
    served = [portions(trace) for trace in traces for _ in _sources(trace)]
    vocab_sizes = [trace.vocab_size for trace in traces for _ in _sources(trace)]
    for number in range(rounds):
        rate = max(LAST_RATE, FIRST_RATE / (1 + number) ** 0.5)
        for drafter, portion, vocab_size in zip(drafters, served, vocab_sizes, strict=True):
            requests = next(portion, None)
            if requests is None:
                continue
            drafter.mixer = replace(mixture, rate=rate).mixer()
            simulate(Assistant([drafter], budget=BUDGET), requests, vocab_size=vocab_size)
            mixer = drafter.mixer
            mixture = Mixture(mixer.cells, mixer.copy_cells, mixer.weights)
            weights.append(mixture.weights)
    return doubted(replace(mixture, weights=np.mean(weights[len(weights) // 2 :], axis=0)))


def save(mixture: Mixture, path: Path) -> None:
    """Write what `Mixture.load` reads."""
    arrays = {name: getattr(mixture, name) for name in ("cells", "copy_cells", "weights")}
    np.savez_compressed(path, **arrays)


def _sources(trace: Trace) -> list[str]:
    return ["text", "memory", "corpus"] if trace.corpus else ["text", "memory"]


def _drafters(trace: Trace) -> Iterator[SuffixDrafter]:
    for source in _sources(trace):
        memory = warmed(trace.corpus) if source == "memory" else OutputMemory()
        corpus = trace.corpus if source == "corpus" else None
        learn = source != "text"
        yield SuffixDrafter(memory, learn=learn, corpus=corpus, mixture=untrained())


def portions(trace: Trace) -> Iterator[list[tuple[object, object]]]:
    """The requests in order, about `TOKENS` of their outputs at a time."""
    portion: list[tuple[object, object]] = []
    tokens = 0
    for request in trace.requests:
        portion.append(request)
        tokens += len(request[1])
        if tokens >= TOKENS:
            yield portion
            portion, tokens = [], 0


def judge(traces: Sequence[Trace], requests: int | None) -> Report:
    """`SamAssistant` on each trace, the corpus in its memory, with weights of the others."""
    report = Report("mixture", {"requests": {t.name: len(t.requests[:requests]) for t in traces}})
    columns = {"trace": "trace", "variant": "variant", "nodes": "nodes"}
    columns |= {"accepted": "tokens/step", "speed": "x plain"}
    table = report.table("Mixing, weights from the other traces", columns)
    for trace in traces:
        mixture = train([other for other in traces if other.name != trace.name])
        served = trace.requests[:requests]
        for nodes in (*SIZES, *CURVES):
            cost = CURVES.get(str(nodes))
            budget = "auto" if cost else nodes
            assistant = SamAssistant(memory=warmed(trace.corpus), budget=budget)
            assistant.drafters[0].mixer = mixture.mixer()
            found = simulate(assistant, served, cost, trace.vocab_size)
            figures = {"accepted": found.mean_accepted_tokens, "speed": found.speedup}
            table.add(trace=trace.name, variant="now", nodes=str(nodes), **figures)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, help="folder of recorded requests")
    parser.add_argument("out", type=Path, help=".npz to write; a folder with --judge")
    parser.add_argument("--without", help="a trace to leave out")
    parser.add_argument("--judge", action="store_true", help="write a report instead of weights")
    parser.add_argument("--requests", type=int, help="of each trace, judged; default: all")
    arguments = parser.parse_args()
    if arguments.judge:
        judge(read_traces(arguments.traces), arguments.requests).save(arguments.out)
        return
    traces = [t for t in read_traces(arguments.traces) if t.name != arguments.without]
    save(train(traces), arguments.out)


if __name__ == "__main__":
    main()
