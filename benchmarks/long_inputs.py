"""Tokens per forward of long inputs: a program's sources, and then the change that a commit made.

    python -m benchmarks long-inputs --repository . --output benchmarks/results

A prompt holds files of a repository as they were before a commit, those that it changes last, and
the commit's subject; the output, which nothing has seen, is the commit's diff, as coding agents
write them. A perfect verifier stands in for the model, so that tokens are counts; what a step costs
the host is timed.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hf_retrieval_assist import Assistant, SamAssistant, SuffixAssistant, simulate
from hf_retrieval_assist.papers import SamDecoding, SuffixDecoding

from .baselines import prompt_lookup
from .edits import encoded
from .inputs import load, model_name
from .report import Report

SHORTEST, LONGEST = 150, 1500  # tokens of a diff
COLUMNS = {
    "length": "tokens of the prompt",
    "method": "method",
    "texts": "texts",
    "per_forward": "tokens/forward",
    "nodes": "nodes/forward",
    "host_us": "host, us a step",
}

METHODS: dict[str, Callable[[int], Assistant]] = {
    "prompt lookup": prompt_lookup,
    "SamDecoding": lambda nodes: SamDecoding(fallback=None, max_draft=nodes),
    "SuffixDecoding": lambda nodes: SuffixDecoding(fallback=None),
    "SamAssistant": lambda nodes: SamAssistant(fallback=None, budget=nodes),
    "SuffixAssistant": lambda nodes: SuffixAssistant(fallback=None, budget=nodes),
}


def git(repository: Path, *arguments: str) -> str:
    """What a command of git prints."""
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def changes(repository: Path) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Commits that change Python alone, the newest first: subject, diff, the files as they were
    before, and others that the repository had."""
    for line in git(repository, "log", "--no-merges", "--format=%H %s", "--", "*.py").splitlines():
        commit, _, subject = line.partition(" ")
        status = git(repository, "show", "--format=", "--name-status", commit).split("\n")
        touched = [entry.split("\t") for entry in status if entry]
        if not all(kind == "M" and name.endswith(".py") for kind, name, *_ in touched):
            continue
        before = [git(repository, "show", f"{commit}~:{name}") for _, name in touched]
        names = git(repository, "ls-tree", "-r", "--name-only", f"{commit}~").splitlines()
        others = sorted({name for name in names if name.endswith(".py")} - {t[1] for t in touched})
        diff = git(repository, "show", "--format=", commit)
        yield subject, diff, before, [f"{commit}~:{name}" for name in others]


def texts(
    repository: Path, encode: Callable[[str], list[int]], length: int, count: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts of so many tokens, and outputs."""
    for subject, diff, before, others in changes(repository):
        output = encode(diff)
        last = encode("\n".join([*before, f"\n{subject}\n\n"]))
        if not SHORTEST <= len(output) <= LONGEST or len(last) > length:
            continue
        first: list[int] = []
        for place in others:
            if len(first) + len(last) >= length:
                break
            first += encode(git(repository, "show", place))
        yield [*first[: length - len(last)], *last], output
        count -= 1
        if not count:
            return


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repository", type=Path, default=Path(), help="with its history")
    lengths = [1024, 4096, 8192, 16_384, 32_768]
    parser.add_argument("--long-lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--long-texts", type=int, default=12, help="of each length")
    parser.add_argument("--long-nodes", type=int, default=32, help="verified at most")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    progress("loading the tokenizer")
    _, tokenizer = load(arguments)
    lengths, count, nodes = arguments.long_lengths, arguments.long_texts, arguments.long_nodes
    if arguments.quick:
        lengths, count = lengths[:1], 1
    settings = {"tokenizer": model_name(arguments), "nodes": nodes, "texts": count}
    report = Report("long_inputs", settings)
    table = report.table("Long inputs", COLUMNS)
    for length in lengths:
        requests = list(texts(arguments.repository, partial(encoded, tokenizer), length, count))
        for name, make in METHODS.items():
            progress(f"{length} tokens: {name}")
            found = [simulate(make(nodes), [request]) for request in requests]
            tokens, steps = (sum(getattr(f, key) for f in found) for key in ("tokens", "steps"))
            table.add(
                length=length,
                method=name,
                texts=len(requests),
                per_forward=tokens / steps,
                nodes=sum(f.nodes for f in found) / steps,
                host_us=1e6 * sum(f.draft_seconds + f.update_seconds for f in found) / steps,
            )
    return report
