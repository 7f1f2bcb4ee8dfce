"""The demo's tasks, each written once by plain `generate` and once with an assistant."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import set_seed

from ...extensions.record.pieces import PieceStream
from ...extensions.record.steps import MODEL
from ...policy.cost_store import CostModels
from ...presets import SamAssistant
from ...verification.engine import engine_of
from ..demo_model import prompt_inputs
from ..kernels import kernel_paths


@dataclass(frozen=True)
class Task:
    """What is to be written."""

    title: str
    prompt: str
    new_tokens: int
    sampling: bool = False


def _text(name: str) -> str:
    return (Path(__file__).parent / "data" / name).read_text(encoding="utf-8")


# The shortest comes first, so that a newcomer soon sees what the demo shows.
TASKS: tuple[Task, ...] = (
    Task("quote from a document", _text("extract.txt"), 64),
    Task("edit a Python file", _text("edit.txt"), 192),
    Task("open-ended text, sampled", _text("open.txt"), 64, sampling=True),
    Task("fill in JSON", _text("json.txt"), 96),
)
WARM_UP = Task("what only first calls cost", "One, two, three, one, two, three, one,", 24)


class Written(NamedTuple):
    """A generated token: seconds from the call's start, what it added, and the source credited."""

    seconds: float
    text: str
    origin: str


@dataclass(eq=False)
class Run:
    """A call to `generate`, as far as it is.

    Attributes:
        ids: the new tokens; empty until the call has ended.
        forwards: the prefill among them.
    """

    tokens: list[Written] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    forwards: int = 0

    @property
    def seconds(self) -> float:
        return self.tokens[-1].seconds if self.tokens else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, the prompt's processing included."""
        return len(self.tokens) / self.seconds if self.tokens else 0.0


def write(
    model: Any,
    tokenizer: Any,
    task: Task,
    assistant: SamAssistant | None = None,
    shown: Callable[[Run], None] = lambda run: None,
    by_kernels: bool = False,
) -> Run:
    """One call, from the same random state every time.

    Args:
        shown: called before the first forward and after each one. What it takes is not counted.
        by_kernels: whether plain decoding runs by the package's kernels.
    """
    inputs = prompt_inputs(tokenizer, task.prompt).to(model.device)
    options: dict[str, Any] = {"max_new_tokens": task.new_tokens, "do_sample": task.sampling}
    options |= {"temperature": 0.8} if task.sampling else {}
    run = Run()
    pieces = PieceStream(tokenizer, inputs.input_ids[0].tolist())
    shown(run)
    set_seed(0)
    started = time.perf_counter()

    def written(tokens: Sequence[int], origins: Sequence[str]) -> None:
        nonlocal started
        now = time.perf_counter()
        run.forwards += 1
        for token, origin in zip(tokens, origins, strict=True):
            run.tokens.append(Written(now - started, pieces.add(token), origin))
        shown(run)
        started += time.perf_counter() - now

    def put(token_ids: torch.Tensor) -> None:
        if token_ids.ndim == 1:  # not the prompt
            written(token_ids.tolist(), [MODEL])

    if assistant is None:
        feed: Any = SimpleNamespace(put=put, end=lambda: None)
        with engine_of(model.device).scope(by_kernels):
            ids = model.generate(**inputs, **options, streamer=feed)
    else:
        with assistant.record(on_step=lambda step: written(step.token_ids.tolist(), step.credits)):
            ids = model.generate(**inputs, **options, assistant=assistant)
    run.ids = ids[0, inputs.input_ids.shape[1] :].tolist()
    return run


def compare(
    model: Any,
    tokenizer: Any,
    task: Task,
    costs: CostModels,
    shown: Callable[[Run, Run], None] = lambda plain, assisted: None,
) -> tuple[Run, Run]:
    """Plain first, then a new assistant that knows only the measured costs of forwards. Both are
    shown as they grow."""
    plain = write(model, tokenizer, task, shown=lambda run: shown(run, Run()))
    assistant = SamAssistant(costs=costs)
    return plain, write(model, tokenizer, task, assistant, lambda run: shown(plain, run))


def verdict(model: Any, tokenizer: Any, task: Task, plain: Run, assisted: Run) -> tuple[str, bool]:
    """ "3.2 times as fast, identical text", or why the texts differ; and whether that is a bug.

    In half precision an assistant promises the text of plain decoding by this package's kernels,
    which is written here where plain `generate` wrote another one.
    """
    fast = f"{plain.seconds / assisted.seconds:.1f} times as fast"
    if plain.ids == assisted.ids:
        return f"{fast}, identical text", False
    dtype = str(model.dtype).removeprefix("torch.")
    parts = f"from token {_first_difference(plain, assisted)} on"
    by, promised = "plain generate", plain
    if model.dtype.itemsize < 4:
        # Kernels whose bits do not depend on how many rows they are given.
        if model.device.type != "cpu" or not kernel_paths():
            said = f"{fast}; {parts} another text than plain generate's. Here rounding in {dtype} "
            said += "depends on how many tokens a forward takes; in float32 the texts are equal."
            return said, False
        by = "plain decoding by this package's kernels"
        promised = write(model, tokenizer, task, by_kernels=True)
        if promised.ids == assisted.ids:
            said = f"{fast}, the text of {by}. PyTorch's kernels round differently in {dtype}: "
            return f"{said}{parts} plain generate writes another.", False
    said = f"ANOTHER TEXT than {by} writes, from token {_first_difference(promised, assisted)} on. "
    said += f"In {dtype} they must be equal: this is a bug of hf_retrieval_assist. Please report "
    said += "it in its repository as a wrong output, with what `hf-retrieval-assist doctor` prints."
    return said, True


def _first_difference(one: Run, other: Run) -> int:
    """The number, from 1, of the first token that two different texts do not share."""
    shared = zip(one.ids, other.ids, strict=False)  # one text may end where the other goes on
    return 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], shared))
