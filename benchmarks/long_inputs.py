"""Tokens per forward of long inputs: a program's sources, and then the change that a commit made.

    python -m benchmarks long-inputs --repository . --output benchmarks/results

A prompt holds files of a repository as they were before a commit, those that it changes last, and
the commit's subject; the output, which nothing has seen, is the commit's diff, as coding agents
write them. A perfect verifier stands in for the model, so that tokens are counts; what a step costs
the host is timed.

    python -m benchmarks long-inputs --long-clock --repository . --output benchmarks/results

times both demo models in bfloat16 instead, made to write such diffs, without the forward over the
prompt, which takes all methods as long; what prompt lookup gains in that one counts for it. Drafts
of the model itself do not agree with what it would not have written.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch

from hf_retrieval_assist import Assistant, SamAssistant, reroute
from hf_retrieval_assist.papers import SamDecoding, SuffixDecoding
from hf_retrieval_assist.policy.cost_store import CostModels
from hf_retrieval_assist.tools.demo_model import MODELS

from . import methods
from .baselines import prompt_lookup
from .edits import encoded
from .forced import choosing, forcing
from .inputs import load, model_name
from .methods import Method, Run, assisted, run_method, tokens_per_forward
from .model import KERNELS, settle, take_turns, titled
from .report import Report
from .simulation import simulate
from .timing import lock_memory

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
}

CLOCK = {
    "model": "model",
    "length": "tokens of the text",
    "method": "decoded by",
    "prompt": "its prompt's forward, s",
    "rate": "tokens/s behind it",
    "kernels": "x kernels",
    "worst": "worst text, x kernels",
    "per_forward": "tokens/forward",
    "same": "recorded texts",
}
CLOCKED = (4096, 8192, 16_384)
FEW = 8192  # tokens, over which one text has to do
WARMING = 512  # tokens

Request = tuple[list[int], list[int]]


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
) -> Iterator[Request]:
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


def clocked_methods() -> list[Method]:
    lookup, drafting = methods.prompt_lookup(), partial(SamAssistant, costs=CostModels())
    return [
        Method(KERNELS, dict, scope=reroute),
        Method("prompt lookup in reroute", lookup.options, 1, reroute),
        assisted("no drafts", partial(drafting, budget=0)),
        assisted("SamAssistant", drafting),
    ]


def write(model: Any, new_tokens: int, method: Method, request: Request) -> Run:
    """One call that writes the beginning of a request's output; its seconds, tokens and forwards
    are those behind the forward over the prompt."""
    prompt, output = torch.tensor([request[0]]), request[1][:new_tokens]
    text = torch.cat([prompt, torch.tensor([[*output, 0]])], dim=1)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    options = {"max_new_tokens": len(output), "do_sample": False, "pad_token_id": 0}
    is_ours = "assistant" in method.options()
    with choosing(output) if is_ours else forcing(model, text):
        run = run_method(method, model, inputs, not is_ours, eos_token_id=None, **options)
    run.seconds -= run.split["prefill"]
    run.tokens, run.forwards = run.tokens - 1, run.forwards - 1
    return run


def run_clock(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    """The demo models' own forwards, by the clock."""
    models, lengths = list(MODELS), arguments.long_clock_lengths
    count, new_tokens = arguments.long_clock_texts, arguments.long_new_tokens
    if arguments.quick:
        models, lengths, count, new_tokens = models[:1], arguments.long_lengths[:1], 1, 16
    report = Report("long_clock", {"texts": count, "new_tokens": new_tokens})
    if not arguments.quick:
        lock_memory(report)
    report.settings |= settle(arguments, progress)
    table = report.table("Long inputs by the clock", CLOCK)
    arguments.dtype = "bfloat16"
    for arguments.model in models:
        model, tokenizer = load(arguments)
        encode = partial(encoded, tokenizer)
        calls = {m.name: partial(write, model, new_tokens, m) for m in clocked_methods()}
        for length in lengths:
            if length > model.config.max_position_embeddings:
                continue
            show = partial(titled, f"{arguments.model}, {length} tokens", progress)
            many = count if length <= FEW else 1
            requests = list(texts(arguments.repository, encode, length - new_tokens, many))
            if length == lengths[0]:  # kernels, costs and copies that are known
                take_turns(
                    [(ids[-WARMING:], output) for ids, output in requests[:1]], calls, 2, show
                )
            turns = take_turns(requests, calls, 1, show)
            for method in calls:
                runs = [turn.runs[method][0] for turn in turns]
                written = zip(runs, requests, strict=True)
                same = [r.ids[0].tolist() == output[:new_tokens] for r, (_, output) in written]
                table.add(
                    model=arguments.model,
                    length=length,
                    method=method,
                    prompt=median(run.split["prefill"] for run in runs),
                    rate=sum(run.tokens for run in runs) / sum(run.seconds for run in runs),
                    kernels=geometric_mean(turn.ratio(method, KERNELS) for turn in turns),
                    worst=min(turn.ratio(method, KERNELS) for turn in turns),
                    per_forward=tokens_per_forward(runs),
                    same=f"{sum(same)} of {len(same)}",
                )
            report.save(arguments.output)
        del model, calls
        gc.collect()
    return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repository", type=Path, default=Path(), help="with its history")
    lengths = [1024, 4096, 8192, 16_384, 32_768]
    parser.add_argument("--long-lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--long-texts", type=int, default=12, help="of each length")
    parser.add_argument("--long-nodes", type=int, default=32, help="verified at most")
    parser.add_argument("--long-clock", action="store_true", help="time both demo models")
    parser.add_argument("--long-clock-lengths", type=int, nargs="+", default=CLOCKED)
    parser.add_argument("--long-clock-texts", type=int, default=2, help="of each length to 8,192")
    parser.add_argument("--long-new-tokens", type=int, default=128, help="that are timed")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    if arguments.long_clock:
        return run_clock(arguments, progress)
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
