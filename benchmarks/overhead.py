"""What an assistant costs where drafting cannot pay: cheap forwards, hot sampling, many rows.

Models with random weights continue random prompts, so that hardly a draft is accepted. "Never
slower" means a ratio of one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from hf_retrieval_assist import SamAssistant

from .report import Report
from .timing import alternate, steady_mean

PROMPT = 32  # tokens
WARM_UP = 10  # short calls, in which it turns out whether drafts make them faster
SHAPES = {"64 x 2": (64, 2), "256 x 4": (256, 4), "640 x 18": (640, 18)}  # hidden size x layers
CHEAP = ("64 x 2", "256 x 4")
HOST_ROWS = (1, 8, 32)
HOST_NODES = 4  # verified of each row
HOST_WARM_UP = 3  # calls
HOST_TEMPERATURE = 0.7
HOST_COLUMNS = {
    "rows": "rows",
    "method": "drafted from",
    "inside": "in the model, us",
    "outside": "outside it, us",
    "beyond": "beyond plain's, us per row",
}
COLUMNS = {
    "shape": "width x layers",
    "vocab": "vocabulary",
    "rows": "rows",
    "temperature": "temperature",
    "plain": "plain, ms per step",
    "ratio": "assisted over plain",
    "accepted": "accepted of 100 drafted",
    "drafted": "drafted per row and token",
}


def cases(shapes: Sequence[str], quick: bool) -> Iterator[tuple[str, int, int, float]]:
    """Shape, vocabulary, rows, temperature."""
    for shape in CHEAP[:1] if quick else shapes:
        for vocab in (100, 262_144) if shape in CHEAP else (262_144,):
            rows = (1, 16, 64) if vocab == 100 else (1, 8)
            for count in rows[:1] if quick else rows:
                for temperature in (0.0, 0.7, 2.0) if vocab == 100 else (0.0, 1.0):
                    yield shape, vocab, count, temperature


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


def generate(
    model: Any, rows: int, temperature: float, tokens: int, calls: Iterator[int], assistant: Any
) -> None:
    """One call with a prompt of its own."""
    random = torch.Generator().manual_seed(next(calls))
    prompts = torch.randint(1, model.config.vocab_size, (rows, PROMPT), generator=random)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        **sampling,
        **({"assistant": assistant} if assistant is not None else {}),
    )


def compare(
    model: Any,
    rows: int,
    temperature: float,
    tokens: int,
    repeats: int,
    show: Callable[[str], None],
) -> dict[str, float | None]:
    """Plain and assisted calls in turn, and their mean."""
    assistant = SamAssistant()
    candidates = {
        name: partial(generate, model, rows, temperature, tokens, iter(range(10**6)), given)
        for name, given in {"plain": None, "assisted": assistant}.items()
    }
    for call in candidates.values():
        for _ in range(min(WARM_UP, repeats)):
            call()
    seconds, _ = alternate(candidates, repeats, show, steady_mean)
    total = assistant.stats.total
    return {
        "plain": 1e3 * seconds["plain"] / tokens,
        "ratio": seconds["assisted"] / seconds["plain"],
        "accepted": 100 * total.accepted / total.drafted if total.drafted else None,
        "drafted": total.drafted / total.tokens,
    }


class InModel:
    """Processor time that the calling thread spends in a model's forwards.

    Attributes:
        seconds, forwards: since it was made.
    """

    def __init__(self, model: Any):
        self.seconds, self.forwards, self._began = 0.0, 0, 0.0
        self._hooks = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end),
        ]

    def _begin(self, *_: Any) -> None:
        self._began = time.thread_time()

    def _end(self, *_: Any) -> None:
        self.seconds += time.thread_time() - self._began
        self.forwards += 1

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def host_time(call: Callable[[], None], model: Any) -> tuple[float, float]:
    """Microseconds per step of one call of `generate`: in the model, and outside."""
    inside, began = InModel(model), time.thread_time()
    call()
    outside = time.thread_time() - began - inside.seconds
    inside.close()
    return 1e6 * inside.seconds / inside.forwards, 1e6 * outside / inside.forwards


def host_times(tokens: int, repeats: int, progress: Callable[[str], None]) -> Report:
    """What a step costs outside the model, where every row verifies some nodes in every step."""
    report = Report("host", {"tokens": tokens, "repeats": repeats, "nodes": HOST_NODES})
    table = report.table("Processor time of a step", HOST_COLUMNS)
    model = random_model(*SHAPES[CHEAP[0]], 100)
    for rows in HOST_ROWS:
        seeds = iter(range(10**6))
        methods: dict[str, Any] = {
            "plain": None,
            "suffix trees": SamAssistant(fallback=None, budget=HOST_NODES, trust_forward=True),
            "and logit n-grams": SamAssistant(budget=HOST_NODES, trust_forward=True),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
        for repeat in range(HOST_WARM_UP + repeats):
            for name, assistant in methods.items():
                progress(f"{rows} rows: {name}, {repeat + 1}")
                call = partial(generate, model, rows, HOST_TEMPERATURE, tokens, seeds, assistant)
                found[name].append(host_time(call, model))
        plain = median(outside for _, outside in found["plain"][HOST_WARM_UP:])
        for name, times in found.items():
            inside, outside = map(median, zip(*times[HOST_WARM_UP:], strict=True))
            beyond = None if name == "plain" else (outside - plain) / rows
            table.add(rows=rows, method=name, inside=inside, outside=outside, beyond=beyond)
    return report


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--overhead-shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--overhead-tokens", type=int, default=64, help="to generate per call")
    parser.add_argument("--overhead-repeats", type=int, default=12)
    parser.add_argument("--overhead-host", action="store_true", help="host time alone, by rows")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    tokens, repeats = arguments.overhead_tokens, arguments.overhead_repeats
    if arguments.quick:
        tokens, repeats = 8, 1
    if arguments.overhead_host:
        return host_times(tokens, repeats, progress)
    report = Report("overhead", {"tokens": tokens, "repeats": repeats})
    table = report.table("Where drafting cannot pay", COLUMNS)
    models: dict[tuple[str, int], Any] = {}
    for shape, vocab, rows, temperature in cases(arguments.overhead_shapes, arguments.quick):
        if (shape, vocab) not in models:
            models = {(shape, vocab): random_model(*SHAPES[shape], vocab)}
        place = {"shape": shape, "vocab": vocab, "rows": rows, "temperature": temperature}
        show = partial(_show, progress, str(place))
        # Long steps say the same in fewer of them.
        cheap = vocab < 1000
        counts = (tokens, repeats) if cheap else (-(-tokens // 4), -(-repeats // 3))
        found = compare(models[shape, vocab], rows, temperature, *counts, show)
        table.add(**place, **found)
    return report


def _show(progress: Callable[[str], None], place: str, text: str) -> None:
    progress(f"{place}: {text}")
