"""The demo's tasks, each written once by plain `generate` and once with an assistant."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed
from transformers.generation.streamers import BaseStreamer

from ..planning.cost_store import CostModels
from ..presets import SamAssistant
from ..record.pieces import PieceStream
from ..record.record import MODEL, Step

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Task:
    """What is to be written.

    Attributes:
        file: with the prompt, among the demo's own.
        text: the prompt itself, where there is no file.
    """

    title: str
    file: str
    new_tokens: int
    sampling: bool = False
    text: str = ""

    @property
    def prompt(self) -> str:
        if not self.file:
            return self.text
        return (_DATA / self.file).read_text(encoding="utf-8")

    @property
    def options(self) -> dict[str, Any]:
        """What `generate` is told."""
        temperature = {"temperature": 0.8} if self.sampling else {}
        return {"max_new_tokens": self.new_tokens, "do_sample": self.sampling, **temperature}


TASKS = (
    Task("edit a Python file", "edit.txt", 192),
    Task("quote from a document", "extract.txt", 64),
    Task("open-ended text, sampled", "open.txt", 64, sampling=True),
    Task("fill in JSON", "json.txt", 96),
)


@dataclass(frozen=True)
class Written:
    """A generated token.

    Attributes:
        seconds: from the start of the call.
        text: what it added.
        origin: the source it is credited to.
    """

    seconds: float
    text: str
    origin: str


@dataclass
class Run:
    """A call to `generate`, growing while it goes on.

    Attributes:
        assisted: whether an assistant drafted.
        tokens: generated so far.
        ids: int64 [prompt and new tokens], at the end.
        forwards: so far, the prefill among them.
    """

    assisted: bool
    tokens: list[Written] = field(default_factory=list)
    ids: torch.Tensor | None = None
    forwards: int = 0

    def until(self, seconds: float) -> Run:
        """What there was of it so many seconds after its start."""
        tokens = [token for token in self.tokens if token.seconds <= seconds]
        return Run(self.assisted, tokens)

    @property
    def seconds(self) -> float:
        return self.tokens[-1].seconds if self.tokens else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, the prompt's processing included."""
        return len(self.tokens) / self.seconds if self.tokens else 0.0


Watch = Callable[[Run], None]


@dataclass(frozen=True)
class Comparison:
    task: Task
    plain: Run
    assisted: Run

    @property
    def ratio(self) -> float:
        """Plain seconds over assisted seconds."""
        return self.plain.seconds / self.assisted.seconds

    @property
    def identical(self) -> bool:
        assert self.plain.ids is not None
        assert self.assisted.ids is not None
        return torch.equal(self.plain.ids, self.assisted.ids)


class _Feed(BaseStreamer):
    """Hands on what plain `generate` writes."""

    def __init__(self, write: Callable[[Sequence[int], Sequence[str]], None]):
        self._write = write
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._write(value.flatten().tolist(), [MODEL])
        self._prompt_seen = True

    def end(self) -> None:
        pass


def write(
    model: Any, tokenizer: Any, task: Task, assistant: SamAssistant | None, watch: Watch
) -> Run:
    """One call, from the same random state every time; `watch` hears of every forward."""
    inputs = tokenizer(task.prompt, return_tensors="pt").to(model.device)
    run = Run(assisted=assistant is not None)
    pieces = PieceStream(tokenizer, inputs.input_ids[0].tolist())
    set_seed(0)
    started = time.perf_counter()

    def written(tokens: Sequence[int], origins: Sequence[str]) -> None:
        seconds = time.perf_counter() - started
        run.forwards += 1
        for token, origin in zip(tokens, origins, strict=True):
            run.tokens.append(Written(seconds, pieces.add(token), origin))
        watch(run)

    def on_step(step: Step) -> None:
        written(step.token_ids.tolist(), step.credits)

    if assistant is None:
        ids = model.generate(**inputs, **task.options, streamer=_Feed(written))
    else:
        with assistant.record(on_step=on_step):
            ids = model.generate(**inputs, **task.options, assistant=assistant)
    run.ids = ids[0]
    return run


def compare(model: Any, tokenizer: Any, task: Task, costs: CostModels, watch: Watch) -> Comparison:
    """Plain first, then an assistant that has seen nothing but the measured cost of forwards."""
    plain = write(model, tokenizer, task, None, watch)
    assisted = write(model, tokenizer, task, SamAssistant(costs=costs), watch)
    return Comparison(task, plain, assisted)


def warm_up(model: Any, tokenizer: Any, costs: CostModels) -> None:
    """Spend what only the first calls of a process cost."""
    inputs = tokenizer("One, two, three, one, two, three, one,", return_tensors="pt")
    inputs = inputs.to(model.device)
    for options in ({}, {"assistant": SamAssistant(costs=costs)}):
        model.generate(**inputs, **options, max_new_tokens=24, do_sample=False)
