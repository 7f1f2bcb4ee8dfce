"""The demo's tasks, each written once by plain `generate` and once with an assistant."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import set_seed

from ...extensions.record.pieces import PieceStream
from ...extensions.record.steps import MODEL
from ...policy.cost_store import CostModels
from ...presets import SamAssistant
from ..demo_model import prompt_inputs


@dataclass(frozen=True)
class Task:
    """What is to be written."""

    title: str
    prompt: str
    new_tokens: int
    sampling: bool = False


def _text(name: str) -> str:
    return (Path(__file__).parent / "data" / name).read_text(encoding="utf-8")


TASKS: tuple[Task, ...] = (
    Task("edit a Python file", _text("edit.txt"), 192),
    Task("quote from a document", _text("extract.txt"), 64),
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
    """A call to `generate`.

    Attributes:
        ids: int64 [prompt and new tokens].
        forwards: the prefill among them.
    """

    tokens: list[Written]
    ids: torch.Tensor
    forwards: int

    def until(self, seconds: float) -> Run:
        """The same with no more than what there was so many seconds after its start."""
        return replace(self, tokens=[token for token in self.tokens if token.seconds <= seconds])

    @property
    def seconds(self) -> float:
        return self.tokens[-1].seconds if self.tokens else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, the prompt's processing included."""
        return len(self.tokens) / self.seconds if self.tokens else 0.0


def write(model: Any, tokenizer: Any, task: Task, assistant: SamAssistant | None) -> Run:
    """One call, from the same random state every time."""
    inputs = prompt_inputs(tokenizer, task.prompt).to(model.device)
    options: dict[str, Any] = {"max_new_tokens": task.new_tokens, "do_sample": task.sampling}
    options |= {"temperature": 0.8} if task.sampling else {}
    run = Run([], torch.empty(0), 0)
    pieces = PieceStream(tokenizer, inputs.input_ids[0].tolist())
    set_seed(0)
    started = time.perf_counter()

    def written(tokens: Sequence[int], origins: Sequence[str]) -> None:
        seconds = time.perf_counter() - started
        run.forwards += 1
        for token, origin in zip(tokens, origins, strict=True):
            run.tokens.append(Written(seconds, pieces.add(token), origin))

    def put(token_ids: torch.Tensor) -> None:
        if token_ids.ndim == 1:  # not the prompt
            written(token_ids.tolist(), [MODEL])

    if assistant is None:
        feed: Any = SimpleNamespace(put=put, end=lambda: None)
        ids = model.generate(**inputs, **options, streamer=feed)
    else:
        with assistant.record(on_step=lambda step: written(step.token_ids.tolist(), step.credits)):
            ids = model.generate(**inputs, **options, assistant=assistant)
    run.ids = ids[0]
    return run


def compare(model: Any, tokenizer: Any, task: Task, costs: CostModels) -> tuple[Run, Run]:
    """Plain first, then a new assistant that knows only the measured costs of forwards."""
    plain = write(model, tokenizer, task, None)
    return plain, write(model, tokenizer, task, SamAssistant(costs=costs))


def verdict(plain: Run, assisted: Run) -> str:
    """ "3.2 times as fast, identical text"."""
    same = "identical text" if torch.equal(plain.ids, assisted.ids) else "ANOTHER TEXT"
    return f"{plain.seconds / assisted.seconds:.1f} times as fast, {same}"
