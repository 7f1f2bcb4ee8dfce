"""What an accelerator makes of it: plain's texts, what is recorded, and what a step costs.

    python -m benchmarks accelerator --shape 0.6b

Whether tokens are plain's is seen where nothing forces them (:mod:`benchmarks.unforced`). Then a
randomly initialised model of a real shape emits recorded text (:mod:`benchmarks.forced`) behind
prompts of given lengths, by plain decoding as it comes, with a static cache and compiled, by prompt
lookup, and by an assistant whose forwards run one kernel at a time or as CUDA graphs. A table gives
the cost of a step at equal width, for token trees and chains; the last one says what was recorded,
or why not.

Times are those of steps: a call less one that ends with its first token, over the forwards between.
They stand beside the time in which the bytes that a step has to read, weights, keys and values, can
be read. Every repeat has prompts of its own, of other lengths, so that no plan of a kernel library
is warm because a call was repeated; the first call of each method, which compiles and captures, is
told apart. It runs on a CPU too, where nothing is recorded.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from hf_retrieval_assist import Assistant, OutputMemory, SamAssistant, TokenTree
from hf_retrieval_assist.drafters.base import Drafter, DraftSession, Target
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES
from hf_retrieval_assist.policy.cost_store import CostModels

from .baselines import LOOKUP_TOKENS
from .forced import forcing
from .methods import Method, compiled, run_method
from .replay import SHAPES, build, copy_bandwidth, dense_ids, settle_model
from .report import PACKAGES, Report, Table, version
from .timing import orders
from .traces import Ids, Trace, read_traces
from .unforced import judge

# The share of free memory that keys and values may take: they exist twice while a call begins.
_CACHE_SHARE = 0.45

# How much shorter than the longest a prompt may be.
_VARIATION = 64

CALLS = {
    "context": "context",
    "batch": "batch",
    "method": "method",
    "rate": "tokens/s",
    "ratio": "x plain",
    "per_forward": "tokens/row/step",
    "step": "ms/step",
    "roofline": "bytes: ms/step",
    "over": "x bytes",
    "first": "first call s",
    "repeated": "recorded",
    "held": "MiB held",
    "same": "forced text",
}
STEPS = {
    "context": "context",
    "batch": "batch",
    "method": "forwards",
    "shape": "drafts",
    "width": "width",
    "step": "ms/step",
    "roofline": "bytes: ms/step",
    "over": "x bytes",
}
RECORDINGS = {"capacity": "capacity", "width": "width", "state": "is", "fault": "because"}

Options = Callable[[], dict[str, Any]]


class Filler(Drafter):
    """Drafts as many tokens as it is asked for, none of which is ever right.

    Args:
        branching: children of every node: 1 is a chain.
    """

    name = "filler"

    def __init__(self, branching: int) -> None:
        self.branching = branching

    def start(self, prompt_ids: Any, target: Target) -> DraftSession:
        self._vocab_size = target.vocab_size
        return DraftSession()

    def propose(self, sessions: Sequence[Any], budgets: Sequence[int]) -> Sequence[TokenTree]:
        return [self._tree(np.arange(budget)) for budget in budgets]

    def _tree(self, nodes: Any) -> TokenTree:
        # Recorded ids are renumbered from 0 on.
        ids, parents = self._vocab_size - 1 - nodes, nodes // self.branching - 1
        return TokenTree.build(ids, parents, np.full(len(nodes), 0.5))

    def commit(self, sessions: Sequence[Any], tokens: Any, feedbacks: Any) -> None:
        """None of it is ever right."""


@dataclass
class Setting:
    """One batch of one context length, behind which every method decodes.

    Attributes:
        texts: int64 [batch, length]; what the model says, overwritten for every repeat.
        prompts: for each repeat int64 [batch, length] and the tokens that follow.
    """

    context: int
    batch: int
    texts: torch.Tensor
    prompts: list[tuple[torch.Tensor, torch.Tensor]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--contexts", type=int, nargs="+", help="default: 1024 8192 32768")
    parser.add_argument("--rows", type=int, nargs="+", help="batch sizes (default: 1 8 32)")
    parser.add_argument("--widths", type=int, nargs="+", help="of equal steps (default: 1 16 64)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--steps", type=int, help="tokens to generate per row")
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing is begun after these")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    return Bench(arguments, progress).run()


class Bench:
    """One run of the benchmark."""

    def __init__(self, arguments: argparse.Namespace, progress: Callable[[str], None]):
        settle_model(arguments)
        quick, on_cpu = arguments.quick, arguments.device == "cpu"
        self.arguments, self.progress = arguments, progress
        self.contexts = arguments.contexts or ([96] if quick else [1024, 8192, 32768])
        self.rows = arguments.rows or ([1, 2] if quick else [1, 8, 32])
        self.widths = arguments.widths or ([1, 16] if quick else [1, 16, 64])
        self.new_tokens = arguments.steps or (10 if quick else 24 if on_cpu else 64)
        self.backend = "eager" if quick else arguments.backend
        self.started = time.perf_counter()
        self.costs = CostModels()
        settings = vars(self) | {n: getattr(arguments, n) for n in ("shape", "device", "dtype")}
        named = ("shape", "device", "dtype", "contexts", "rows", "widths", "new_tokens", "backend")
        self.report = Report("accelerator", {name: settings[name] for name in named})
        self.report.settings |= software(arguments.device) | clocks()

    def run(self) -> Report:
        judge(self.report, self.arguments, self.progress)
        config = SHAPES[self.arguments.shape]
        config.max_position_embeddings = max(self.contexts) + self.new_tokens + 1
        self.progress(f"building the {self.arguments.shape} model")
        self.model = build(config, self.arguments)
        self.bandwidth = copy_bandwidth(self.model.device)
        self.report.settings["copy_bytes_per_s"] = self.bandwidth
        self.report.settings["weight_bytes"] = weight_bytes(self.model)
        calls = self.report.table("Forced text", CALLS)
        steps = self.report.table("Steps at equal width", STEPS)
        trace = dense_ids(
            read_traces(self.arguments.replay_traces)[0], config.vocab_size - max(self.widths)
        )
        for setting in self._settings(trace):
            with forcing(self.model, setting.texts):
                self._calls(calls, setting)
                self._steps(steps, setting)
        tell_recordings(self.report, self.model)
        self.report.settings |= {f"{name}_after": value for name, value in clocks().items()}
        return self.report

    def _settings(self, trace: Trace) -> Iterator[Setting]:
        """Short contexts and small batches first, so that a limit of time cuts the rarest."""
        pairs = sorted(
            ((c, b) for c in self.contexts for b in self.rows), key=lambda x: x[0] * x[1]
        )
        for context, batch in pairs:
            if self._fits(context, batch):
                yield prompts_of(
                    trace,
                    context,
                    batch,
                    self.new_tokens,
                    self.arguments.repeats + 1,
                    self.arguments.seed,
                    self.model.device,
                )

    def _fits(self, context: int, batch: int) -> bool:
        needed = batch * (context + self.new_tokens) * token_bytes(self.model)
        if self.model.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self.model.device)
        fits = needed < _CACHE_SHARE * free
        if not fits:
            self.report.note(f"context {context}, batch {batch}: {needed / 1e9:.0f} GB do not fit")
        return fits

    def _methods(self, batch: int) -> dict[str, Options]:
        """What a caller of `generate` may choose from, by name."""
        methods: dict[str, Options] = {"plain": dict}
        if batch == 1:
            methods["prompt lookup"] = lambda: {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        methods |= self._variants(
            lambda graphs: SamAssistant(memory=OutputMemory(), graphs=graphs, costs=self.costs)
        )
        return methods | {"plain, static and compiled": self._compiled}

    def _variants(self, make: Callable[[bool], Assistant]) -> dict[str, Options]:
        """An assistant in each way of running forwards."""
        variants: dict[str, Options] = {"ours, eager": lambda: {"assistant": make(False)}}
        if self.model.device.type == "cuda":
            variants["ours, graphs"] = lambda: {"assistant": make(True)}
        return variants

    def _compiled(self) -> dict[str, Any]:
        mode = "reduce-overhead" if self.backend == "inductor" else None
        return compiled(self.backend, mode).options()

    def _calls(self, table: Table, setting: Setting) -> None:
        timed = self._timed(setting, self._methods(setting.batch), self.new_tokens)
        plain = timed["plain"].step if "plain" in timed else None
        for name, found in timed.items():
            per_token = found.step / found.per_forward
            table.add(
                **self._row(setting, name, found),
                rate=setting.batch / per_token,
                ratio=None if plain is None else plain / per_token,
                per_forward=found.per_forward,
                first=found.first,
                repeated=found.repeated,
                held=found.held,
                same="yes" if found.same else "NO",
            )

    def _steps(self, table: Table, setting: Setting) -> None:
        for width in self.widths:
            for shape, branching in {"chain": 1, "tree": 2}.items():
                if width == 1 and shape == "tree":
                    continue
                variants = self._variants(
                    lambda graphs, n=width - 1, k=branching: Assistant(  # type: ignore[misc]
                        [Filler(k)], budget=n, graphs=graphs, costs=self.costs
                    )
                )
                for name, found in self._timed(setting, variants, self.new_tokens // 2).items():
                    table.add(**self._row(setting, name, found), shape=shape, width=width)

    def _row(self, setting: Setting, name: str, found: Timed) -> dict[str, Any]:
        """Columns that both tables have."""
        length = setting.context + self.new_tokens // 2
        read = weight_bytes(self.model) + setting.batch * length * token_bytes(self.model)
        return {
            "context": setting.context,
            "batch": setting.batch,
            "method": name,
            "step": 1e3 * found.step,
            "roofline": 1e3 * read / self.bandwidth,
            "over": found.step / (read / self.bandwidth),
        }

    def _timed(
        self, setting: Setting, methods: dict[str, Options], new_tokens: int
    ) -> dict[str, Timed]:
        """Every method that there is time for, each with a first call and alternating repeats."""
        where = f"context {setting.context}, batch {setting.batch}"
        # A static cache is as long as the longest of earlier calls.
        vars(self.model).pop("_previous_max_cache_length", None)
        timed: dict[str, Timed] = {}
        for name, options in methods.items():
            if time.perf_counter() - self.started > 60 * self.arguments.minutes:
                self.report.note(f"{where}: no time left for {name}")
                continue
            self.progress(f"{where}: warming up {name}")
            began = time.perf_counter()
            self._call(setting, 0, options, new_tokens)
            timed[name] = Timed(time.perf_counter() - began)
        for repeat, order in enumerate(orders(list(timed), self.arguments.repeats)):
            for name in order:
                self.progress(f"{where}: {name}, run {repeat + 1} of {self.arguments.repeats}")
                call = self._call(setting, 1 + repeat, methods[name], new_tokens)
                prefill = self._call(setting, 1 + repeat, methods[name], 1)
                timed[name].add(call, prefill.seconds)
        return timed

    def _call(self, setting: Setting, repeat: int, options: Options, new_tokens: int) -> Call:
        prompt, following = setting.prompts[repeat]
        setting.texts[:, : prompt.shape[1]] = prompt
        end = prompt.shape[1] + following.shape[1]
        setting.texts[:, prompt.shape[1] : end] = following
        own = options()
        run = run_method(
            Method("", lambda: own),
            self.model,
            {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)},
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        repeated = held = None
        if "assistant" in own:
            last = own["assistant"].stats.last
            repeated = f"{last.repeated} of {last.forwards}"
        if self.model.device.type == "cuda":
            held = torch.cuda.memory_allocated(self.model.device) / 2**20
        same = torch.equal(run.ids, following[:, :new_tokens].cpu())
        return Call(run.seconds, run.forwards - 1, new_tokens, same, repeated, held)


@dataclass
class Call:
    """One call of one method.

    Attributes:
        forwards: after the prefill.
        tokens: per row.
        same: whether they are the forced ones.
        repeated: how many of an assistant's forwards were repeated from a recording.
        held: MiB of a GPU that are held after it.
    """

    seconds: float
    forwards: int
    tokens: int
    same: bool
    repeated: str | None
    held: float | None


class Timed:
    """Figures of one method in one setting.

    Attributes:
        first: seconds of the first call.
        step: seconds of a forward after the prefill, and of what belongs to it: a median.
        per_forward: tokens per row that such a forward brought.
        same: whether all calls gave the forced text.
        repeated, held: of the last call.
    """

    def __init__(self, first: float):
        self.first = first
        self.same = True
        self.repeated: str | None = None
        self.held: float | None = None
        self._steps: list[float] = []
        self._forwards = self._tokens = 0

    def add(self, call: Call, prefill: float) -> None:
        """Count a call; one of the same prompt that ended with its first token took `prefill`."""
        self._steps.append((call.seconds - prefill) / max(1, call.forwards))
        self._forwards += call.forwards
        self._tokens += call.tokens - 1
        self.same = self.same and call.same
        self.repeated, self.held = call.repeated, call.held

    @property
    def step(self) -> float:
        return median(self._steps)

    @property
    def per_forward(self) -> float:
        return self._tokens / max(1, self._forwards)


def tell_recordings(report: Report, model: Any) -> None:
    """What a model's forwards are repeated from, or why they are not."""
    table = report.table("Recordings", RECORDINGS)
    there = WORKSPACES.report(model)
    for workspace in there.idle:
        for step in workspace.kinds.values():
            state = "repeated" if step.trusted else "computed" if step.fault else "new"
            capacity, (width, *_) = workspace.shape.capacity, step.key
            table.add(capacity=capacity, width=width, state=state, fault=step.fault or "")
    for key, fault in there.faults.items():
        report.note(f"not recorded: {key}: {fault}")
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
        report.note(f"random numbers afterwards: {torch.rand(2, device=model.device).tolist()}")


def prompts_of(
    trace: Trace,
    context: int,
    batch: int,
    new_tokens: int,
    count: int,
    seed: int,
    device: torch.device,
) -> Setting:
    """Prompts of about `context` tokens, all rows equally long, the longest of them first.

    A recorded prompt stands at the end, other requests in front of it.
    """
    rng = np.random.default_rng(seed)
    usable = [r for r in trace.requests if len(r[1]) >= new_tokens and len(r[0]) < context]
    if not usable:
        raise ValueError(f"{trace.name}: expected outputs of {new_tokens} tokens or more, got none")
    varied = min(_VARIATION, context // 4)
    prompts = []
    for number in range(count):
        length = context - (int(rng.integers(1, varied)) if number else 0)
        rows = [_row(trace, usable, length, new_tokens, rng) for _ in range(batch)]
        whole = torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)
        prompts.append((whole[:, :length], whole[:, length:]))
    texts = torch.zeros(batch, context + new_tokens + 1, dtype=torch.int64, device=device)
    return Setting(context, batch, texts, prompts)


def _row(
    trace: Trace,
    usable: Sequence[tuple[Ids, Ids]],
    length: int,
    new_tokens: int,
    rng: np.random.Generator,
) -> Ids:
    prompt, output = usable[int(rng.integers(len(usable)))]
    parts, missing = [prompt[-length:], output[:new_tokens]], length - len(prompt)
    while missing > 0:
        other = trace.requests[int(rng.integers(len(trace.requests)))]
        text = np.concatenate(other)[:missing]
        parts.insert(0, text)
        missing -= len(text)
    return np.concatenate(parts)


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a forward reads: all but a table in which single rows are looked up."""
    read = sum(p.numel() * p.element_size() for p in model.parameters())
    table = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is not table:
        read -= table.numel() * table.element_size()
    return read


def token_bytes(model: Any) -> int:
    """Bytes of keys and values of one token, in all layers."""
    config = model.config
    depth = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_key_value_heads
    return 2 * config.num_hidden_layers * heads * depth * model.dtype.itemsize


def software(device: str) -> dict[str, Any]:
    """What decides which kernels run."""
    found = {name: version(name) for name in (*PACKAGES, "triton")}
    if device.startswith("cuda"):
        found["card"] = torch.cuda.get_device_name(device)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return found | {
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "sdpa": {
            name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
            for name in ("flash", "mem_efficient", "cudnn", "math")
        },
    }


def clocks() -> dict[str, str]:
    """Clocks and power of the GPU as its driver tells them; nothing without one."""
    names = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw")
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names, map(str.strip, told.stdout.split(",")), strict=True))
