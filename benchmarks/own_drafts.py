"""The model drafts for itself in few bits: what a level costs, and what such drafts bring.

    python -m benchmarks own-drafts --output benchmarks/results

In bfloat16: the median time of a level of a draft beside a forward of one token by an assistant
that never drafts; also of larger shapes with random weights. Then assistants that are new in every
call over prompts that nothing was tuned on, beside the same without drafts (`budget=0`): seconds
behind the first token, the better of two runs each, in turn. Columns of weights stand where
`inputs.SHIFT` says. The memory of the process is locked.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping
from statistics import geometric_mean, median
from typing import Any
from unittest import mock

import torch
from transformers import set_seed

from hf_retrieval_assist import Assistant, QuantizedSelf, SamAssistant
from hf_retrieval_assist.engines.cpu import quantized_self
from hf_retrieval_assist.tools.demo_model import MODELS

from .inputs import SHIFT, UNTUNED, Prompt, first_of_each, load_real, read_prompts
from .machine import ForwardClock, generate, prompt_of
from .model import DECODINGS
from .replay import SHAPES, build
from .report import Report
from .timing import lock_memory, orders

RANDOM = ("0.6b", "1b", "4b")
TOKENS, LEVELS, WARM = 48, 4, 8

LEVEL = {
    "model": "model",
    "forward": "forward of one, ms",
    "mbytes_4": "MB at 4 bits",
    "level_4": "level at 4, ms",
    "share_4": "at 4, of a forward",
}
BESIDE = {
    "model": "model",
    "decoding": "decoding",
    "method": "drafts",
    "ratio": "x without drafts",
    "worst": "worst kind",
    "kind": "which",
    "per_forward": "tokens/forward",
    "same": "same text",
}
METHODS: dict[str, Callable[[], Assistant]] = {
    "none": lambda: SamAssistant(budget=0),
    "logit n-grams": lambda: SamAssistant(fallback="logit_ngrams"),
    "auto": SamAssistant,
}


def level_seconds(model: Any, inputs: dict[str, Any]) -> tuple[float, int]:
    """Median seconds of a level of drafts, each the mean of its draft's, and the bytes of the
    copies."""
    seconds: list[float] = []
    assistant = Assistant([QuantizedSelf(max_levels=LEVELS)], budget=LEVELS)
    with mock.patch.object(
        quantized_self._Price, "observe", lambda _, spent: seconds.append(spent)
    ):
        for _ in range(2):
            generate(model, inputs, TOKENS, assistant=assistant)
    return median(seconds), quantized_self.FewBits.of(model).nbytes


def forward_seconds(model: Any, inputs: dict[str, Any]) -> float:
    """Median seconds of a repeated forward of one token, with copies of weights."""
    found, assistant = ForwardClock(), SamAssistant(budget=0)
    generate(model, inputs, TOKENS, assistant=assistant)
    with found.watching():
        generate(model, inputs, TOKENS, assistant=assistant)
    return median(found.repeated[1])


def run_one(
    model: Any, inputs: dict[str, Any], make: Callable[[], Assistant], options: Mapping[str, Any]
) -> tuple[float, float, torch.Tensor]:
    """Seconds behind the first token, tokens a forward, and the text."""
    assistant = make()
    set_seed(0)
    began = time.perf_counter()
    text = generate(model, inputs, TOKENS, assistant=assistant, **options)
    spent, last = time.perf_counter() - began, assistant.stats.last
    first = last.seconds["prefill"] + last.seconds["test"]
    return spent - first, last.tokens / last.forwards, text


def beside(
    model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    options: Mapping[str, Any],
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The rows of one way of decoding."""
    ratios: dict[str, dict[str, list[float]]] = {name: {} for name in METHODS}
    per_forward: dict[str, list[float]] = {name: [] for name in METHODS}
    same = dict.fromkeys(METHODS, 0)
    for number, prompt in enumerate([*prompts[:WARM], *prompts]):
        progress(f"prompt {number + 1} of {WARM + len(prompts)}")
        inputs = {**prompt.inputs(tokenizer), "pad_token_id": 0}
        runs: dict[str, list[Any]] = {name: [] for name in METHODS}
        for order in orders(list(METHODS), 2):
            for name in order:
                runs[name].append(run_one(model, inputs, METHODS[name], options))
        best = {name: min(run[0] for run in found) for name, found in runs.items()}
        for name, found in runs.items() if number >= WARM else ():
            ratios[name].setdefault(prompt.category, []).append(best["none"] / best[name])
            per_forward[name].append(found[0][1])
            same[name] += torch.equal(found[0][2], runs["none"][0][2])
    rows = []
    for name in [*METHODS][1:]:
        kinds = {kind: geometric_mean(found) for kind, found in ratios[name].items()}
        worst = min(kinds, key=kinds.__getitem__)
        rows.append(
            {
                "method": name,
                "ratio": geometric_mean([x for found in ratios[name].values() for x in found]),
                "worst": kinds[worst],
                "kind": worst,
                "per_forward": sum(per_forward[name]) / len(prompts),
                "same": f"{same[name]} of {len(prompts)}",
            }
        )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--of-each-kind", type=int, default=1, help="prompts")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    quick, count = arguments.quick, arguments.of_each_kind
    arguments.device, arguments.dtype = "cpu", "bfloat16"
    report = Report("own_drafts", {"shift": SHIFT, "tokens": TOKENS, "prompts_of_each_kind": count})
    if not quick:
        lock_memory(report)
    levels = report.table("A level of a draft", LEVEL)
    fresh = report.table("Beside no drafts", BESIDE)
    for name in ["tiny"] if quick else [*reversed(MODELS), *RANDOM]:
        real = name in MODELS
        model, tokenizer = load_real(torch.bfloat16, name) if real else (None, None)
        model = model or build(SHAPES[name], arguments)
        inputs = prompt_of(model, 1, arguments.seed)
        row: dict[str, Any] = {"forward": 1e3 * (forward := forward_seconds(model, inputs))}
        if not quick:
            seconds, nbytes = level_seconds(model, inputs)
            row |= {"level_4": 1e3 * seconds, "share_4": seconds / forward}
            row["mbytes_4"] = nbytes / 1e6
        levels.add(model=name, **row)
        report.save(arguments.output)
        prompts = first_of_each(read_prompts(UNTUNED), count) if real else []
        for decoding, options in DECODINGS.items() if real else ():
            for found in beside(model, tokenizer, prompts, options, progress):
                fresh.add(model=name, decoding=decoding, **found)
            report.save(arguments.output)
        del model
        gc.collect()
    return report
