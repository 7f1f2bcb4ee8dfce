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

from hf_retrieval_assist import Assistant, OutputMemory, SuffixAssistant
from hf_retrieval_assist.drafters.mixture import Mixture
from hf_retrieval_assist.drafters.suffix import SuffixDrafter
from hf_retrieval_assist.simulation import simulate

from .acceptance import cpu_time, gpu_time
from .report import Report
from .traces import Trace, read_traces
from .variants import warmed

ROUNDS = 20
TOKENS = 500  # of outputs, per trace and round
BUDGET = 32
FIRST_RATE, LAST_RATE = 0.02, 0.003

SIZES = (16, 32, 64)
CURVES = {"CPU": cpu_time, "GPU": gpu_time}


def train(traces: Sequence[Trace], rounds: int = ROUNDS) -> Mixture:
    """What drafting learns from `traces`, each having the same say."""
    mixture = Mixture.untrained()
    drafters = [drafter for trace in traces for drafter in _drafters(trace)]
    served = [portions(trace) for trace in traces for _ in _sources(trace)]
    vocab_sizes = [trace.vocab_size for trace in traces for _ in _sources(trace)]
    for number in range(rounds):
        rate = max(LAST_RATE, FIRST_RATE / (1 + number) ** 0.5)
        for drafter, portion, vocab_size in zip(drafters, served, vocab_sizes, strict=True):
            drafter.mixer = replace(mixture, rate=rate).mixer()
            requests = next(portion, [])
            simulate(Assistant([drafter], budget=BUDGET), requests, vocab_size=vocab_size)
            mixer = drafter.mixer
            mixture = Mixture(mixer.cells, mixer.copy_cells, mixer.weights)
    return mixture.doubted()


def _sources(trace: Trace) -> list[str]:
    return ["text", "memory", "corpus"] if trace.corpus else ["text", "memory"]


def _drafters(trace: Trace) -> Iterator[SuffixDrafter]:
    for source in _sources(trace):
        memory = warmed(trace.corpus) if source == "memory" else OutputMemory()
        corpus = trace.corpus if source == "corpus" else None
        learn = source != "text"
        yield SuffixDrafter(memory, learn=learn, corpus=corpus, mixture=Mixture.untrained())


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
    """`SuffixAssistant` on each trace, the corpus in its memory, with weights of the others."""
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
            assistant = SuffixAssistant(warmed(trace.corpus), budget=budget)
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
    parser.add_argument("--requests", type=int, help="of each trace that are judged; default: all")
    arguments = parser.parse_args()
    if arguments.judge:
        judge(read_traces(arguments.traces), arguments.requests).save(arguments.out)
        return
    traces = [t for t in read_traces(arguments.traces) if t.name != arguments.without]
    train(traces).save(arguments.out)


if __name__ == "__main__":
    main()
