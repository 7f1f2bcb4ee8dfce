"""Which assistant pays on a reader's own model and prompts, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .assistants import Assistant
from .planning.cost_store import CostModels
from .presets import SamAssistant, SuffixAssistant
from .record.html import table
from .record.record import MODEL, Record

_WORTHWHILE = 1.05  # times as fast as plain decoding
_SEED = 0


@dataclass
class Trial:
    """One assistant over all prompts.

    Attributes:
        name: as it would be written in code.
        make: gives such an assistant that has learnt nothing.
        record: of its calls.
        seconds: of each call.
        plain_seconds: of the same call without an assistant.
        identical: calls that brought the tokens of plain `generate`.
    """

    name: str
    make: Callable[[], Assistant]
    record: Record
    seconds: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)
    identical: int = 0

    @property
    def ratio(self) -> float:
        """Times as fast as plain `generate`, all prompts together."""
        return sum(self.plain_seconds) / sum(self.seconds)

    @property
    def worst_ratio(self) -> float:
        """The same for the prompt that gained least."""
        pairs = zip(self.plain_seconds, self.seconds, strict=True)
        return min(plain / assisted for plain, assisted in pairs)

    @property
    def sources(self) -> str:
        """ "text 61%, token recycling 12%": shares of the generated tokens."""
        tokens = {name: counts[2] for name, counts in self.record.by_origin().items()}
        total = max(1, sum(tokens.values()))
        shares = sorted(tokens.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {n / total:.0%}" for name, n in shares if name != MODEL)

    def cells(self) -> tuple[str, ...]:
        return (
            self.name,
            f"{self.ratio:.2f}",
            f"{self.worst_ratio:.2f}",
            f"{self.record.stats.mean_accepted_tokens:.2f}",
            f"{self.identical} of {len(self.seconds)}",
            self.sources,
        )


_COLUMNS = ("assistant", "x plain", "worst x", "tokens/forward", "identical", "tokens drafted by")


@dataclass
class Suggestion:
    """What :func:`suggest` measured; a table when printed or shown in a notebook.

    Attributes:
        trials: the fastest first.
    """

    trials: list[Trial]

    @property
    def best(self) -> Trial:
        """The fastest assistant, even where plain decoding is faster."""
        return self.trials[0]

    @property
    def advice(self) -> str:
        """A sentence."""
        best = self.best
        if best.ratio < _WORTHWHILE:
            return (
                f"Nothing tried here pays: {best.name} was the fastest, at {best.ratio:.2f} times "
                "the speed of plain generate."
            )
        return (
            f"Use {best.name}: {best.ratio:.2f} times as fast as plain generate on these prompts, "
            f"at worst {best.worst_ratio:.2f}. Drafted tokens: {best.sources}."
        )

    def __str__(self) -> str:
        rows = [_COLUMNS, *(trial.cells() for trial in self.trials)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, self.advice])

    def _repr_html_(self) -> str:
        return table(_COLUMNS, [trial.cells() for trial in self.trials], self.advice)


def default_candidates() -> dict[str, Callable[[], Assistant]]:
    """Assistants without a corpus or a second model, on one measured t(n)."""
    costs = CostModels()
    return {
        "SamAssistant()": lambda: SamAssistant(costs=costs),
        "SamAssistant(fallback=None)": lambda: SamAssistant(fallback=None, costs=costs),
        "SuffixAssistant()": lambda: SuffixAssistant(costs=costs),
        "SuffixAssistant(fallback=None)": lambda: SuffixAssistant(fallback=None, costs=costs),
    }


def suggest(
    model: Any,
    prompts: Sequence[str | torch.Tensor],
    *,
    tokenizer: Any = None,
    candidates: Mapping[str, Callable[[], Assistant]] | None = None,
    max_new_tokens: int = 64,
    **options: Any,
) -> Suggestion:
    """Measure assistants against plain `generate`, prompt by prompt in turn.

    Every candidate is made once and sees the prompts in order, so one that learns from outputs
    shows what that brings. A short call of each comes first, uncounted.

    Args:
        model: a transformers model.
        prompts: texts, or int64 [1, length]; ten or more that resemble each other as those in use
            do say most.
        tokenizer: for texts.
        candidates: name -> what makes an assistant; None for those of `default_candidates`.
        max_new_tokens: of each call.
        **options: further arguments of `generate`; without any, decoding is greedy.

    Raises:
        ValueError: no prompts, or texts without a tokenizer.
    """
    inputs = [_inputs(model, prompt, tokenizer) for prompt in prompts]
    if not inputs:
        raise ValueError("prompts: expected at least one, got none")
    options = {"do_sample": False, **options}
    makers = default_candidates() if candidates is None else candidates
    trials = [Trial(name, make, Record(tokenizer)) for name, make in makers.items()]
    for each in (None, *trials):
        _call(model, inputs[0], None if each is None else each.make(), 8, options)
    assistants = [trial.make() for trial in trials]
    for prompt in inputs:
        plain_seconds, plain = _call(model, prompt, None, max_new_tokens, options)
        for trial, assistant in zip(trials, assistants, strict=True):
            with assistant.record(tokenizer) as record:
                seconds, ids = _call(model, prompt, assistant, max_new_tokens, options)
            trial.record.calls += record.calls
            trial.seconds.append(seconds)
            trial.plain_seconds.append(plain_seconds)
            trial.identical += torch.equal(plain, ids)
    return Suggestion(sorted(trials, key=lambda trial: -trial.ratio))


def _inputs(model: Any, prompt: str | torch.Tensor, tokenizer: Any) -> dict[str, torch.Tensor]:
    if isinstance(prompt, torch.Tensor):
        ids = prompt.to(model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if tokenizer is None:
        raise ValueError("tokenizer: expected one, since a prompt is text, got None")
    return dict(tokenizer(prompt, return_tensors="pt").to(model.device))


def _call(
    model: Any,
    inputs: dict[str, torch.Tensor],
    assistant: Assistant | None,
    max_new_tokens: int,
    options: dict[str, Any],
) -> tuple[float, torch.Tensor]:
    """Seconds and token ids of a call under a seed."""
    torch.manual_seed(_SEED)
    started = time.perf_counter()
    ids = model.generate(**inputs, max_new_tokens=max_new_tokens, assistant=assistant, **options)
    return time.perf_counter() - started, ids.cpu()
