"""Wall clock at any size of model, without its weights.

A randomly initialised model of a real shape does the arithmetic, and gives the recorded next token
the largest logit at every position (:mod:`benchmarks.forced`). Plain decoding, prompt lookup and
our assistants so emit the same recorded text, each at the true cost of its forwards: dense
arithmetic takes the same time whatever the weights are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from hf_retrieval_assist import OutputMemory, SamAssistant, reroute
from hf_retrieval_assist.policy.cost_store import CostModels

from .forced import forcing
from .methods import Method, Run, assisted, baselines, run_method, wait
from .report import Report, Table
from .timing import alternate
from .traces import SHIPPED, Ids, Trace, read_traces


def _qwen3(layers: int, heads: int, **sizes: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        **sizes,
    )


SHAPES: dict[str, PreTrainedConfig] = {
    "tiny": LlamaConfig(
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    ),
    "270m": Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
    ),
    "1b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
    "0.6b": _qwen3(hidden_size=1024, intermediate_size=3072, layers=28, heads=16),
    "4b": _qwen3(hidden_size=2560, intermediate_size=9728, layers=36, heads=32),
    "8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    ),
}

COLUMNS = {
    "batch": "batch",
    "method": "method",
    "rate": "tokens/s",
    "ratio": "x plain",
    "steps": "forwards",
    "per_forward": "tokens/forward",
    "step": "ms/step",
    "forward": "forward ms",
    "draft": "draft ms",
    "walk": "walk ms",
    "cache": "cache ms",
    "same": "recorded text",
}


def build(config: PreTrainedConfig, arguments: argparse.Namespace) -> Any:
    """A model of a shape with random weights."""
    torch.manual_seed(arguments.seed)
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, arguments.dtype), attn_implementation=arguments.attention
        )
    return model.eval()


def dense_ids(trace: Trace, vocab_size: int) -> Trace:
    """The trace with its distinct ids renumbered from 0, so that it fits a smaller vocabulary.

    Raises:
        ValueError: it has more distinct ids than that.
    """
    texts = [ids for pair in trace.requests for ids in pair]
    known = np.unique(np.concatenate(texts))
    if len(known) > vocab_size:
        raise ValueError(f"{trace.name}: {len(known)} distinct ids, expected at most {vocab_size}")

    def renumber(ids: Ids) -> Ids:
        return np.searchsorted(known, ids).astype(np.int32)

    return Trace(trace.name, [(renumber(p), renumber(o)) for p, o in trace.requests])


def batch_of(
    requests: Sequence[tuple[Ids, Ids]], new_tokens: int, device: str
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Left-padded inputs and the texts to force, without padding, [batch, longest]."""
    prompts = [torch.from_numpy(prompt.astype(np.int64)) for prompt, _ in requests]
    texts = [np.concatenate([p, o[:new_tokens]]) for p, o in requests]
    forced = torch.zeros(len(requests), max(map(len, texts)) + 1, dtype=torch.int64)
    for row, text in enumerate(texts):
        forced[row, : len(text)] = torch.from_numpy(text.astype(np.int64))
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
    inputs = {
        "input_ids": pad(prompts),
        "attention_mask": pad([torch.ones_like(prompt) for prompt in prompts]),
    }
    return {name: x.to(device) for name, x in inputs.items()}, forced.to(device)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, help="default: 270m; 8b with --device cuda")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes (default: 1 4)")
    parser.add_argument("--new-tokens", type=int, help="tokens to generate per row")
    parser.add_argument("--replay-traces", type=Path, default=SHIPPED, help="recordings to replay")
    parser.add_argument("--repeats", type=int, default=3)


def settle_model(arguments: argparse.Namespace) -> None:
    """Fill in what of the model depends on the device and on `--quick`."""
    cuda = arguments.device.startswith("cuda")
    arguments.shape = arguments.shape or ("tiny" if arguments.quick else "8b" if cuda else "270m")
    arguments.dtype = arguments.dtype or ("bfloat16" if cuda else "float32")


def _settle(arguments: argparse.Namespace) -> None:
    """Fill in what depends on the device and on `--quick`."""
    cuda, quick = arguments.device.startswith("cuda"), arguments.quick
    settle_model(arguments)
    arguments.batch = arguments.batch or ([1, 2] if quick else [1, 4])
    arguments.new_tokens = arguments.new_tokens or (16 if quick else 256 if cuda else 48)


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    _settle(arguments)
    names = ("shape", "device", "dtype", "attention", "batch", "new_tokens", "repeats", "seed")
    report = Report("replay", {name: getattr(arguments, name) for name in names})
    progress(f"building the {arguments.shape} model")
    config = SHAPES[arguments.shape]
    model = build(config, arguments)
    _note_roofline(report, model)
    for trace in read_traces(arguments.replay_traces):
        trace = dense_ids(trace, config.vocab_size)
        table = report.table(f"Replaying {trace.name}", COLUMNS)
        # The longest outputs, so that a batch's shortest leaves enough to time.
        longest = sorted(trace.requests, key=lambda request: -len(request[1]))
        for size in arguments.batch:
            requests = longest[:size]
            if len(requests) == size:
                _compare(table, model, requests, arguments, progress)
    return report


def _compare(
    table: Table,
    model: Any,
    requests: Sequence[tuple[Ids, Ids]],
    arguments: argparse.Namespace,
    progress: Callable[[str], None],
) -> None:
    """One batch through every method that takes it."""
    new_tokens = min(arguments.new_tokens, *(len(output) for _, output in requests))
    inputs, texts = batch_of(requests, new_tokens, arguments.device)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    options["pad_token_id"] = 0
    methods = [m for m in _methods() if m.max_batch is None or len(requests) <= m.max_batch]
    with forcing(model, texts):
        calls = {m.name: partial(run_method, m, model, inputs, **options) for m in methods}
        for method in methods:
            progress(f"{table.title}, batch {len(requests)}: warming up {method.name}")
            calls[method.name]()
        seconds, runs = alternate(
            calls,
            arguments.repeats,
            lambda text: progress(f"{table.title}, batch {len(requests)}: {text}"),
        )
    recorded = torch.stack([_recorded(o, new_tokens) for _, o in requests])
    for name, last in runs.items():
        table.add(
            batch=len(requests),
            method=name,
            same="yes" if torch.equal(last.ids, recorded) else "NO",
            **_figures(last, seconds[name], seconds["plain"]),
        )


def _recorded(output: Ids, new_tokens: int) -> torch.Tensor:
    return torch.from_numpy(output[:new_tokens].astype(np.int64))


def _methods() -> list[Method]:
    costs = CostModels()
    return [
        *baselines(),
        Method("kernels", dict, scope=reroute),
        assisted("SamAssistant", partial(SamAssistant, costs=costs)),
        assisted("with a memory", lambda: SamAssistant(memory=OutputMemory(), costs=costs)),
    ]


def _figures(last: Run, seconds: float, plain: float) -> dict[str, Any]:
    phases = ("forward", "draft", "walk", "cache") if last.split else ()
    return {
        "rate": last.tokens / seconds,
        "ratio": plain / seconds,
        "steps": last.forwards,
        "per_forward": last.tokens / len(last.ids) / last.forwards,
        "step": 1e3 * seconds / last.forwards,
        **{phase: 1e3 * last.split[phase] for phase in phases},
    }


def _note_roofline(report: Report, model: Any) -> None:
    """The least time of a forward: every weight is read once."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    bandwidth = copy_bandwidth(model.device)
    report.settings["weight_bytes"] = weights
    report.settings["copy_bytes_per_s"] = bandwidth
    report.note(
        f"{weights / 1e9:.2f} GB of weights over a measured copy bandwidth of "
        f"{bandwidth / 1e9:.1f} GB/s (read and write): no forward in less than "
        f"{1e3 * weights / bandwidth:.2f} ms, no plain decoding above "
        f"{bandwidth / weights:.1f} steps/s"
    )


def copy_bandwidth(device: torch.device, nbytes: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes read and written per second by the best of a few large copies."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(repeats):
        wait(device)
        started = time.perf_counter()
        target.copy_(source)
        wait(device)
        best = min(best, time.perf_counter() - started)
    return 2 * nbytes / best
