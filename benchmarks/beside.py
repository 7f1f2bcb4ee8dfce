"""Beside what users could choose instead: whole calls, and where the time of their tokens goes.

    npm install --prefix FOLDER --ignore-scripts node-llama-cpp
    python -m benchmarks beside --llama FOLDER --output benchmarks/results

Both demo models in bfloat16 over prompts that nothing was tuned on, greedy and at temperature 1, by
transformers' plain decoding, by a compiled static cache and prompt lookup; by this package's
kernels alone, without drafts, and by an assistant that is new in every call; by llama.cpp with the
same weights in bfloat16 and in eight bits. Its binding sorts the whole vocabulary before it draws
from all of it, so it decodes greedily alone. All take turns over each prompt, with the same random
numbers, and write the same number of tokens, whether or not a text ends.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hf_retrieval_assist import SamAssistant, reroute
from hf_retrieval_assist.engines.cpu.quantized import WEIGHTS
from hf_retrieval_assist.policy.cost_store import CostModels
from hf_retrieval_assist.tools.demo_model import MODELS

from . import model as parts
from .accelerator import weight_bytes
from .inputs import PROMPTS, UNTUNED, Prompt, dtype_name, first_of_each, load, read_prompts
from .llama_engine import NodeLlama, engines
from .machine import BUFFER, MEMORY, READS, read_bandwidth
from .methods import Method, Run, assisted, compiled, prompt_lookup
from .model import KERNELS, PLAIN
from .report import Report
from .timing import lock_memory

NO_DRAFTS, DRAFTS = "no drafts", "SamAssistant"
STATIC = 256  # slots of the static cache, so that it is compiled once
WEIGHTS_OF_LLAMA = ("bfloat16", "Q8_0")
TIME = {
    "model": "model",
    "method": "decoded by",
    "prompt": "the prompt, ms a token",
    "read": "reading the weights",
    "rest": "rest of the forwards",
    "draft": "drafting",
    "host": "between forwards",
    "total": "all",
}

Calls = dict[str, Callable[..., Run]]


def our_methods(backend: str) -> list[Method]:
    """transformers' own ways, and this package's."""
    drafting = partial(SamAssistant, costs=CostModels())
    return [
        Method(PLAIN, dict),
        compiled(backend, max_cache_len=STATIC),
        prompt_lookup(),
        Method(KERNELS, dict, scope=reroute),
        assisted(NO_DRAFTS, partial(drafting, budget=0)),
        assisted(DRAFTS, drafting),
    ]


def llama_name(kind: str) -> str:
    return f"llama.cpp, {kind}"


def by_engine(engine: NodeLlama, tokenizer: Any, new_tokens: int, prompt: Prompt) -> Run:
    return engine.generate(prompt.inputs(tokenizer)["input_ids"][0].tolist(), new_tokens)


def warmed_up(calls: Calls, report: Report, progress: Callable[[str], None]) -> Calls:
    """Those calls that run here: compiled, with kernels, costs and copies that are known. The
    report says why others do not."""
    prompt, able = min(read_prompts(PROMPTS), key=lambda one: len(one.text)), dict(calls)
    for name, call in calls.items():
        progress(f"warming up: {name}")
        try:
            for _ in range(2):
                call(prompt)
        except RuntimeError as error:
            report.note(f"left out: {name}: {type(error).__name__}: {str(error).strip()[:200]}")
            del able[name]
    return able


def bytes_read(model: Any, theirs: Mapping[str, NodeLlama]) -> dict[str, int]:
    """Bytes of weights that a greedy forward over few tokens reads, by method: assistants read a
    copy of the output layer, where there is one."""
    weight, whole = model.get_output_embeddings().weight, weight_bytes(model)
    kept = WEIGHTS.find(weight)
    copied = whole - (weight.nbytes - kept.copy.nbytes if kept else 0)
    ours = {PLAIN: whole, KERNELS: whole, NO_DRAFTS: copied, DRAFTS: copied}
    return ours | {llama_name(kind): engine.nbytes for kind, engine in theirs.items()}


def spent(runs: Sequence[Run], read_seconds: float) -> dict[str, float]:
    """Milliseconds a token of what calls consist of.

    Args:
        runs: that know their phases.
        read_seconds: of the weights, once.
    """
    # What is done once for a model or a call is done about the prompt.
    before = [sum(run.split.get(p, 0.0) for p in ("prefill", "test", "pack")) for run in runs]
    draft = sum(run.split.get("draft", 0.0) for run in runs)
    behind = sum(run.seconds for run in runs) - sum(before)
    # An engine of which no forward is timed is all forwards.
    forward = sum(run.split["forward"] for run in runs) if "forward" in runs[0].split else behind
    read = read_seconds * sum(run.forwards - 1 for run in runs)
    seconds = {"prompt": sum(before), "read": read, "rest": forward - read, "draft": draft}
    seconds |= {"host": behind - forward - draft, "total": sum(before) + behind}
    tokens = sum(run.tokens for run in runs)
    return {part: 1e3 * found / tokens for part, found in seconds.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = list(MODELS)
    parser.add_argument("--beside-models", nargs="+", choices=MODELS, default=models)
    parser.add_argument("--beside-each", type=int, default=1, help="prompts of each kind")
    parser.add_argument("--beside-tokens", type=int, default=48, help="to generate per prompt")
    parser.add_argument("--beside-repeats", type=int, default=2)
    parser.add_argument("--llama", type=Path, help="folder of node-llama-cpp, and for its weights")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    tokens, repeats, backend = arguments.beside_tokens, arguments.beside_repeats, arguments.backend
    models, buffer, reads = arguments.beside_models, BUFFER, READS
    prompts = first_of_each(read_prompts(UNTUNED), arguments.beside_each)
    if arguments.quick:
        models, prompts, tokens, repeats, backend = models[:1], prompts[:2], 8, 1, "eager"
        buffer, reads = 1 << 20, 1
    names = {"prompts": len(prompts), "new_tokens": tokens, "repeats": repeats}
    report = Report("beside", names | {"seed": arguments.seed, "backend": backend})
    if not arguments.quick:
        lock_memory(report)
    report.settings |= parts.settle(arguments, progress)
    if arguments.llama is None:
        report.note("left out: llama.cpp: no folder of node-llama-cpp was given (--llama)")
    over = {kind: f"x {llama_name(kind)}" for kind in WEIGHTS_OF_LLAMA}
    whole = report.table("Unseen prompts", parts.COLUMNS | over)
    report.table("By kind of prompt", parts.KINDS)
    times = report.table("Where a token's time goes, greedy", TIME)
    memory = report.table("What memory gives", MEMORY)
    bandwidth = read_bandwidth(memory, buffer, reads, progress)
    arguments.dtype = "bfloat16"
    for arguments.model in models:
        name, theirs = arguments.model, dict[str, NodeLlama]()
        model, tokenizer = load(arguments)
        # Texts of several precisions would end at several places.
        model.generation_config.eos_token_id = None
        if arguments.llama is not None:
            theirs = engines(arguments.llama, name, WEIGHTS_OF_LLAMA, report.settings)
        methods = our_methods(backend)
        for decoding in ("greedy", "temperature 1"):
            show = partial(parts.titled, f"{name}, {decoding}", progress)
            options = parts.DECODINGS[decoding] | {"max_new_tokens": tokens, "pad_token_id": 0}
            call = partial(parts.answer, model, tokenizer, options, arguments.seed)
            calls: Calls = {method.name: partial(call, method) for method in methods}
            if decoding == "greedy":
                for kind, engine in theirs.items():
                    calls[llama_name(kind)] = partial(by_engine, engine, tokenizer, tokens)
            calls = warmed_up(calls, report, show)
            turns = parts.take_turns(prompts, calls, repeats, show)
            place = {"model": name, "dtype": dtype_name(model), "decoding": decoding}
            parts.fill(report, place, turns)
            rates = {row["method"]: row["rate"] for row in whole.rows[-len(calls) :]}
            for row in whole.rows[-len(calls) :]:
                beside = {k: rates.get(llama_name(k)) for k in WEIGHTS_OF_LLAMA}
                row |= {kind: row["rate"] / rate for kind, rate in beside.items() if rate}
            if decoding == "greedy":
                read = {m: n for m, n in bytes_read(model, theirs).items() if m in calls}
                for method, nbytes in read.items():
                    runs = [run for turn in turns for run in turn.runs[method]]
                    if method in (PLAIN, KERNELS):
                        show(f"the clock of {method}")
                        runs = [calls[method](prompt, clocked=True) for prompt in prompts]
                    times.add(model=name, method=method, **spent(runs, nbytes / bandwidth))
            # A run that is cut off leaves the ways of decoding before.
            report.save(arguments.output)
        del model, tokenizer, call, calls
        gc.collect()
    return report
