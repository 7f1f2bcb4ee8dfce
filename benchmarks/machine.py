"""How near forwards come to the machine: what memory gives, and the read of a model's weights.

    python -m benchmarks machine --output benchmarks/results

No forward of one token is faster than a read of the weights. Beside it, in bfloat16: the model's
linear layers alone, one behind the other; forwards of 1 to 16 rows, repeated from recordings; a
token by the clock, by an assistant that never drafts, without and with copies of weights; the first
token of a prompt, as a streamer is given it. And what a step takes beside its forward, on a model
whose numbers take no time. Products of a few rows stand beside the larger of the read of their
weights and of the arithmetic, at the pace of PyTorch's product of large squares. The memory of the
process is locked.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from hf_retrieval_assist import Assistant, SamAssistant, reroute
from hf_retrieval_assist.engines.cpu.repeated_forward import RepeatedForward
from hf_retrieval_assist.engines.cpu.skinny import RepeatedLinears, dense, skinny_linear
from hf_retrieval_assist.tools.demo_model import MODELS, load_demo_model
from hf_retrieval_assist.verification.verifier import Verifier

from .accelerator import Filler, weight_bytes
from .replay import SHAPES, build
from .report import Report, Table
from .timing import alternate, lock_memory, orders

BUFFER = 1 << 30  # bytes
READS = 10  # of each way
ROWS = (1, 4, 8, 16)
PROMPT, REPEATED = 16, 4  # tokens, of which drafts are made where they come again
SHORT, LONG = 20, 80  # tokens of the calls whose difference is the time of a token
FORWARDS = 24  # tokens of a call whose forwards are timed
SQUARE, CYCLED = 2048, 1 << 27  # side of large products; bytes that no cache holds
WEIGHTS = ((576, 576), (1536, 576), (2048, 2048), (8192, 2048))
PRODUCT_ROWS = (1, 2, 4, 8, 16, 32, 64)
RANDOM = ("0.6b", "1b", "4b")
SMALL = (64, 30, 256)  # hidden size, layers, vocabulary
DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 0},
}

MEMORY = {"way": "a read of one buffer by", "gbytes": "GB/s"}
PRODUCTS = {
    "weight": "weight",
    "rows": "rows",
    "read": "read, us",
    "arithmetic": "arithmetic, us",
    "kernel": "kernel, us",
    "over": "over the larger",
}
COLUMNS = {
    "model": "model",
    "mbytes": "MB read",
    "read": "read, ms",
    "products": "linear layers, ms",
    **{f"rows_{n}": f"forward of {n}, ms" for n in ROWS},
    "over_1": "of 1 over read",
    "over_8": "of 8 over read",
    "token": "a token, ms",
    "copies": "by copies, ms",
    "first_by_kernels": "first token by the kernels, ms",
    "first": "of an assistant, ms",
}
SMALL_FORWARDS = {"tokens": "tokens", "ms": "repeated forward, ms"}
BETWEEN = {
    "rows": "rows",
    "decoding": "decoding",
    "budget": "budget",
    "nodes": "nodes per row",
    "forward": "forward, ms",
    "between": "between two, ms",
    "calls": "Python calls of a step",
}

Show = Callable[[str], None]


class ForwardClock:
    """Times the forwards behind prompts.

    Attributes:
        repeated: seconds of those that were repeated from a recording, by the tokens fed.
        forwards: seconds of all.
        between: seconds from the end of each to the beginning of its call's next.
    """

    def __init__(self) -> None:
        self.repeated: dict[int, list[float]] = {}
        self.forwards: list[float] = []
        self.between: list[float] = []
        self._depth, self._computed, self._ended = 0, False, 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Scope of one call of `generate`."""
        self._ended = 0.0
        with ExitStack() as stack:
            for kind, name in ((RepeatedForward, "__call__"), (Verifier, "compute")):
                timed = self._timed(getattr(kind, name), kind is Verifier)
                stack.enter_context(mock.patch.object(kind, name, timed))
            yield

    def _timed(self, call: Callable[..., Any], computes: bool) -> Callable[..., Any]:
        def timed(forward: Any, **given: Any) -> Any:
            self._computed = computes or (self._computed and self._depth > 0)
            if self._depth:
                return call(forward, **given)
            self._depth, began = 1, time.perf_counter()
            try:
                outputs = call(forward, **given)
            finally:
                self._depth, ended = 0, time.perf_counter()
            if self._ended:
                self.between.append(began - self._ended)
            self._ended = ended
            self.forwards.append(ended - began)
            if not self._computed:
                self.repeated.setdefault(given["input_ids"].numel(), []).append(ended - began)
            return outputs

        return timed


def read_bandwidth(table: Table, nbytes: int, repeats: int, progress: Show) -> float:
    """Bytes per second of the fastest of several ways to read what no cache holds: products of
    several rows read it at several places at once."""
    # No zeros, for which systems have one page.
    numbers = torch.ones(nbytes // 4)
    ways: dict[str, Callable[[], object]] = {"a sum": numbers.sum}
    for rows in (1, 2, 4, 8):
        # The vector lies behind the rows, and is read with them.
        parts = numbers[: len(numbers) // (rows + 1) * (rows + 1)].view(rows + 1, -1)
        ways[f"a product of {rows} by 1"] = partial(torch.mv, parts[:-1], parts[-1])
    weight = numbers.view(torch.bfloat16).view(-1, 2048)
    ways["a linear layer"] = partial(F.linear, weight[:1].clone(), weight)
    with reroute(), torch.no_grad():
        seconds, _ = alternate(ways, repeats, progress, min)
    for way, spent in seconds.items():
        table.add(way=way, gbytes=nbytes / spent / 1e9)
    return nbytes / min(seconds.values())


def measure_products(
    table: Table,
    bandwidth: float,
    weights: Sequence[tuple[int, int]],
    nbytes: int,
    repeats: int,
    progress: Show,
) -> None:
    """Products in bfloat16, the least times: each has another copy of its weight than the last."""
    square = torch.randn(SQUARE, SQUARE).bfloat16()
    large = {"a large product": partial(torch.mm, square, square.T)}
    pace = 2 * SQUARE**3 / alternate(large, repeats, progress, min)[0]["a large product"]
    for outputs, depth in weights:
        copies = torch.randn(1 + nbytes // (2 * outputs * depth), outputs, depth).bfloat16()
        for rows in PRODUCT_ROWS:
            x, turns = torch.randn(rows, depth).bfloat16(), cycle(copies)
            name = f"{outputs} x {depth}, {rows} rows"
            calls = {name: lambda x=x, turns=turns: skinny_linear(x, next(turns))}
            spent = alternate(calls, 20 * repeats, progress, min)[0][name]
            read, arithmetic = copies[0].nbytes / bandwidth, 2 * rows * copies[0].numel() / pace
            table.add(
                weight=f"{outputs} x {depth}",
                rows=rows,
                read=1e6 * read,
                arithmetic=1e6 * arithmetic,
                kernel=1e6 * spent,
                over=spent / max(read, arithmetic),
            )


def prompt_of(model: Any, rows: int, seed: int) -> dict[str, Any]:
    """What `generate` takes: random phrases, each several times."""
    random = torch.Generator().manual_seed(seed)
    phrases = torch.randint(3, model.config.vocab_size, (rows, PROMPT), generator=random)
    ids = phrases.repeat(1, REPEATED)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}


def generate(model: Any, inputs: dict[str, Any], tokens: int, **options: Any) -> Any:
    """One call, which no end of text ends."""
    with mock.patch.object(model.generation_config, "eos_token_id", None):
        return model.generate(**inputs, **{"do_sample": False} | options, max_new_tokens=tokens)


def products_of(model: Any) -> Callable[[], None]:
    """What computes all linear layers of a model for one row, one layer behind the other."""
    layers = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight
            x, out = (weight.new_ones(1, width) for width in reversed(weight.shape))
            layers.append(RepeatedLinears(x, dense(weight), None, out))

    def compute() -> None:
        for layer in layers:
            layer()

    return compute


def forwards_of(
    model: Any, inputs: dict[str, Any], rows: Sequence[int], repeats: int, progress: Show
) -> dict[int, float]:
    """Median seconds of forwards of so many rows, of those that were repeated from recordings."""
    found = ForwardClock()
    for order in orders([str(n) for n in rows], repeats):
        for n in map(int, order):
            progress(f"forwards of {n} rows")
            with found.watching():
                assistant = Assistant([Filler(branching=1)], budget=n - 1, extra_memory=0)
                generate(model, inputs, FORWARDS, assistant=assistant)
    return {n: median(found.repeated[n]) for n in rows if n in found.repeated}


def token_seconds(
    model: Any, inputs: dict[str, Any], lengths: Sequence[int], repeats: int, progress: Show
) -> dict[str, float]:
    """Seconds of a token behind the first ones, without copies of weights and with them."""
    plain, copies = SamAssistant(budget=0, extra_memory=0), SamAssistant(budget=0)
    calls = {
        f"{name} {tokens}": partial(generate, model, inputs, tokens, assistant=assistant)
        for name, assistant in {"token": plain, "copies": copies}.items()
        for tokens in lengths
    }
    for call in calls.values():
        call()
    found, _ = alternate(calls, repeats, progress)
    short, long = lengths
    return {
        name: (found[f"{name} {long}"] - found[f"{name} {short}"]) / (long - short)
        for name in ("token", "copies")
    }


def first_token_seconds(
    model: Any, inputs: dict[str, Any], repeats: int, progress: Show
) -> dict[str, float]:
    """Seconds until a streamer is given the first token, by the kernels and by an assistant."""
    options: dict[str, Any] = {
        "first_by_kernels": {},
        "first": {"assistant": SamAssistant(budget=0)},
    }
    seconds: dict[str, list[float]] = {name: [] for name in options}
    for order in orders(list(options), 1 + repeats):  # the first of which warms up
        for name in order:
            progress(name)
            # Its beginning, then what is shown: the prompt, and token by token.
            times = [time.perf_counter()]
            streamer = SimpleNamespace(end=lambda: None)
            streamer.put = lambda _, times=times: times.append(time.perf_counter())
            with reroute(name != "first"):
                generate(model, inputs, 4, streamer=streamer, **options[name])
            seconds[name].append(times[2] - times[0])
    return {name: median(times[1:]) for name, times in seconds.items()}


def _titled(title: str, progress: Show) -> Show:
    return lambda text: progress(f"{title}: {text}")


def measure(
    model: Any, bandwidth: float, settings: Mapping[str, Any], progress: Show
) -> dict[str, float | None]:
    """A model's row."""
    inputs, repeats = prompt_of(model, 1, settings["seed"]), settings["repeats"]
    read = weight_bytes(model) / bandwidth
    with reroute(), torch.no_grad():
        products = {"products": products_of(model)}
        seconds, _ = alternate(products, 1 + 4 * repeats, progress)
    forwards = forwards_of(model, inputs, ROWS, repeats, progress)
    seconds |= {"read": read} | {f"rows_{n}": spent for n, spent in forwards.items()}
    seconds |= token_seconds(model, inputs, settings["lengths"], repeats, progress)
    seconds |= first_token_seconds(model, inputs, 2 * repeats, progress)
    return {
        "mbytes": weight_bytes(model) / 1e6,
        **{what: 1e3 * spent for what, spent in seconds.items()},
        **{f"over_{n}": forwards[n] / read for n in (1, 8) if n in forwards},
    }


def random_model(hidden: int, layers: int, vocab_size: int) -> Any:
    """A Llama that never ends its text."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 32,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def measure_small(report: Report, settings: Mapping[str, Any], progress: Show) -> None:
    """What a step takes where the model's numbers take no time."""
    model, repeats, seed = random_model(*SMALL), settings["repeats"], settings["seed"]
    table = report.table("A Llama of 30 layers of 64, one thread", SMALL_FORWARDS)
    inputs = prompt_of(model, 1, seed)
    for n, spent in forwards_of(model, inputs, (1, 4, 16), 4 * repeats, progress).items():
        table.add(tokens=n, ms=1e3 * spent)
    table = report.table("Between its forwards", BETWEEN)
    for rows in (1, 16):
        inputs = prompt_of(model, rows, seed)
        for (decoding, options), budget in [(d, b) for d in DECODINGS.items() for b in (0, 3)]:
            progress(f"between forwards: {rows} rows, {decoding}, budget {budget}")
            assistant = SamAssistant(budget=budget, extra_memory=0)
            call = partial(generate, model, inputs, assistant=assistant, **options)
            call(tokens=settings["lengths"][1])
            found = ForwardClock()
            for _ in range(repeats):
                with found.watching():
                    call(tokens=settings["lengths"][1])
            calls = [_python_calls(partial(call, tokens=n), assistant) for n in settings["lengths"]]
            steps, made = (long - short for short, long in zip(*calls, strict=True))
            table.add(
                rows=rows,
                decoding=decoding,
                budget=budget,
                nodes=assistant.stats.last.nodes_per_step,
                forward=1e3 * median(found.forwards),
                between=1e3 * median(found.between),
                calls=made / steps,
            )


def _python_calls(call: Callable[[], object], assistant: Assistant) -> tuple[int, int]:
    """The forwards of one call of `generate`, and how many functions of Python it called."""
    profile = cProfile.Profile(builtins=False)
    profile.runcall(call)
    made = sum(entry.callcount for entry in profile.getstats())
    return assistant.stats.last.forwards, made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [*reversed(MODELS), *RANDOM]
    parser.add_argument("--machine-models", nargs="+", choices=[*names, "tiny"], default=names)
    parser.add_argument("--machine-repeats", type=int, default=5)


def run(arguments: argparse.Namespace, progress: Show) -> Report:
    quick, models = arguments.quick, arguments.machine_models
    weights, cycled = WEIGHTS, CYCLED
    arguments.device, arguments.dtype = "cpu", "bfloat16"
    buffer, reads, repeats, lengths = BUFFER, READS, arguments.machine_repeats, (SHORT, LONG)
    if quick:
        models, buffer, reads, repeats, lengths = ["tiny"], 1 << 20, 1, 1, (8, 32)
        weights, cycled = ((64, 32),), 1 << 16
    settings = {"models": models, "repeats": repeats, "lengths": lengths, "seed": arguments.seed}
    report = Report("machine", settings)
    if not quick:
        lock_memory(report)
    memory = report.table("What memory gives", MEMORY)
    bandwidth = read_bandwidth(memory, buffer, reads, progress)
    products = report.table("Products beside the machine", PRODUCTS)
    measure_products(products, bandwidth, weights, cycled, reads, progress)
    table = report.table("Forwards beside the read of their weights", COLUMNS)
    for name in models:
        # One after the other, so that the memory of each is free for the next.
        real = name in MODELS
        model = load_demo_model(name, dtype=torch.bfloat16)[0] if real else None
        model = model or build(SHAPES[name], arguments)
        table.add(model=name, **measure(model, bandwidth, settings, _titled(name, progress)))
        del model
        gc.collect()
        report.save(arguments.output)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measure_small(report, settings, progress)
    finally:
        torch.set_num_threads(threads)
    return report
