"""Which assistant pays on a reader's own model and prompts, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from ..assistants import Assistant
from ..extensions.record.record import Record
from ..extensions.record.steps import MODEL
from ..memory.output_memory import OutputMemory
from ..policy.cost_store import CostModels
from ..presets import SamAssistant
from ..system.arguments import kind_of, require_at_least, require_several
from ..verification.engine import engine_of

_LOOKUP_TOKENS = 10  # prompt lookup's drafts, as in transformers' examples
_SEED = 0
PLAIN, KERNELS, LOOKUP = "plain generate", "plain in reroute()", "prompt lookup"
COPIES = "without drafts"  # kernels, and what assisted calls have besides

Inputs = dict[str, torch.Tensor]


@dataclass
class Trial:
    """One way of decoding over all prompts.

    Attributes:
        name: as it would be written in code.
        make: gives such an assistant that has learnt nothing; None: no assistant decodes.
        record: of its first calls, which were not timed.
        plain: plain `generate`; None: this is it.
        rounds: seconds of each prompt's call, in each repeat.
        different: numbers of the prompts of which a call did not bring plain `generate`'s tokens.
    """

    name: str
    make: Callable[[], Assistant] | None
    record: Record
    plain: Trial | None = None
    rounds: list[list[float]] = field(default_factory=list)
    different: set[int] = field(default_factory=set)

    @property
    def ratios(self) -> list[float]:
        """Times as fast as plain `generate` in each repeat, all prompts together."""
        plain = self.plain or self
        pairs = zip(plain.rounds, self.rounds, strict=True)
        return [sum(theirs) / sum(mine) for theirs, mine in pairs]

    @property
    def ratio(self) -> float:
        """Times as fast as plain `generate`, each prompt's quickest calls together."""
        return sum((self.plain or self).seconds) / sum(self.seconds)

    @property
    def worst_ratio(self) -> float:
        """The same for the prompt that gained least."""
        plain = (self.plain or self).seconds
        return min(theirs / mine for theirs, mine in zip(plain, self.seconds, strict=True))

    @property
    def seconds(self) -> list[float]:
        """Each prompt's quickest call: other work on a machine makes calls slower only."""
        return [min(times) for times in zip(*self.rounds, strict=True)]

    @property
    def identical(self) -> int:
        """Prompts whose calls all brought the tokens of plain `generate`."""
        return len(self.seconds) - len(self.different)

    @property
    def sources(self) -> str:
        """ "text 61%, logit n-grams 12%": shares of the generated tokens."""
        tokens = {name: counts[2] for name, counts in self.record.by_origin().items()}
        total = max(1, sum(tokens.values()))
        shares = sorted(tokens.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {n / total:.0%}" for name, n in shares if n and name != MODEL)

    def cells(self) -> tuple[str, ...]:
        counts = self.record.stats
        return (
            self.name,
            f"{self.ratio:.2f}",
            f"{min(self.ratios):.2f} to {max(self.ratios):.2f}",
            f"{self.worst_ratio:.2f}",
            f"{counts.tokens_per_forward:.2f}" if counts.calls else "",
            f"{self.identical} of {len(self.seconds)}",
            self.sources,
        )


_COLUMNS = (
    *("decoded by", "x plain", "in repeats", "worst x", "tokens/forward", "identical"),
    "tokens drafted by",
)


@dataclass(repr=False)
class Suggestion:
    """What :func:`suggest` measured; a table when printed.

    Attributes:
        baselines: without drafts: plain `generate` first, then, on a CPU, plain by the kernels of
            `reroute` and an assisted call that drafts nothing, and transformers' prompt lookup
            where the model can.
        trials: of assistants, the fastest first.
    """

    baselines: list[Trial]
    trials: list[Trial]

    @property
    def best(self) -> Trial:
        """The fastest assistant, even where plain decoding is faster."""
        return self.trials[0]

    def __repr__(self) -> str:
        rows = [_COLUMNS, *(trial.cells() for trial in (*self.baselines, *self.trials))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def default_candidates() -> dict[str, Callable[[], Assistant]]:
    """Assistants without a corpus or a second model, on one measured t(n)."""
    make = partial(SamAssistant, costs=CostModels())
    return {
        "SamAssistant()": make,
        "SamAssistant(fallback=None)": partial(make, fallback=None),
        "SamAssistant(memory=OutputMemory())": lambda: make(memory=OutputMemory()),
    }


def suggest(
    model: Any,
    prompts: Sequence[str | torch.Tensor],
    *,
    tokenizer: Any = None,
    candidates: Mapping[str, Callable[[], Assistant]] | None = None,
    max_new_tokens: int = 64,
    repeats: int = 3,
    progress: bool = True,
    **options: Any,
) -> Suggestion:
    """Measure assistants against plain `generate` and prompt lookup.

    In every repeat each way of decoding sees the prompts in order, beginning from an assistant that
    has learnt nothing; whose turn is first changes from prompt to prompt and from repeat to repeat.
    A first pass, which is not timed, warms up and records where tokens come from. The spread of the
    repeats says how far assistants are told apart.

    Args:
        model: a transformers model.
        prompts: texts, or int64 [1, length]; ten or more that resemble each other as those in use
            do say most.
        tokenizer: for texts.
        candidates: name -> what makes an assistant; None for those of `default_candidates`.
        max_new_tokens: of each call.
        repeats: of every call; more of them on a busy machine.
        progress: show a progress bar.
        **options: further arguments of `generate`; without any, decoding is greedy.

    Raises:
        ValueError: no prompts, candidates or repeats, or texts without a tokenizer.
        TypeError: prompts that are no list; a candidate that is an assistant, and does not make
            one.
    """
    require_several("prompts", prompts, "a list of prompts")
    inputs = [_inputs(model, prompt, tokenizer) for prompt in prompts]
    makers = default_candidates() if candidates is None else candidates
    if not isinstance(makers, Mapping):
        raise TypeError(f"candidates: expected name -> function, got {kind_of(makers)}")
    require_at_least(1, prompts=len(inputs), candidates=len(makers), repeats=repeats)
    for name, make in makers.items():
        if isinstance(make, Assistant) or not callable(make):
            raise TypeError(
                f"candidates: expected a function that makes {name}, got {kind_of(make)}"
            )
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, **options}
    generate = partial(model.generate, **options)
    plain = Trial(PLAIN, None, Record(tokenizer))
    others: dict[str, Any] = {}
    if model.device.type == "cpu":
        others = {KERNELS: None, COPIES: lambda: Assistant([], budget=0)}
    with suppress(ValueError):  # how transformers refuses
        _call(partial(generate, max_new_tokens=2), inputs[0], LOOKUP, None)
        others[LOOKUP] = None
    baselines = [plain]
    baselines += [Trial(name, make, Record(tokenizer), plain) for name, make in others.items()]
    trials = [Trial(name, make, Record(tokenizer), plain) for name, make in makers.items()]
    every = [*baselines, *trials]
    calls = (1 + repeats) * len(inputs) * len(every)
    with tqdm(total=calls, unit="call", desc="measuring", disable=not progress) as bar:
        for turn in range(1 + repeats):
            _turn(generate, inputs, every, turn, bar)
    for trial in every:
        del trial.rounds[0]  # it warmed up
    return Suggestion(baselines, sorted(trials, key=lambda trial: -trial.ratio))


def _turn(
    generate: Any, inputs: Sequence[Inputs], every: Sequence[Trial], turn: int, bar: tqdm[Any]
) -> None:
    """One repeat, from assistants that have learnt nothing; the first one is recorded."""
    assistants = {trial.name: trial.make() for trial in every if trial.make is not None}
    for trial in every:
        trial.rounds.append([])
    for number, prompt in enumerate(inputs):
        first, texts = (turn + number) % len(every), {}
        for trial in [*every[first:], *every[:first]]:
            assistant = assistants.get(trial.name)
            scope: Any = nullcontext(Record()) if turn or assistant is None else assistant.record()
            with scope as record:
                seconds, texts[trial.name] = _call(generate, prompt, trial.name, assistant)
            trial.rounds[-1].append(seconds)
            trial.record.calls += record.calls
            bar.update()
        for trial in every:
            if not torch.equal(texts[trial.name], texts[PLAIN]):
                trial.different.add(number)


def _inputs(model: Any, prompt: str | torch.Tensor, tokenizer: Any) -> Inputs:
    if isinstance(prompt, torch.Tensor):
        if prompt.ndim != 2:
            raise ValueError(f"prompts: expected int64 [1, length], got {[*prompt.shape]}")
        ids = prompt.to(model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not isinstance(prompt, str):
        raise TypeError(f"prompts: expected texts or tensors of ids, got {kind_of(prompt)}")
    if tokenizer is None:
        raise ValueError("tokenizer: expected one, since a prompt is text, got None")
    return dict(tokenizer(prompt, return_tensors="pt").to(model.device))


def _call(generate: Any, inputs: Inputs, name: str, assistant: Any) -> tuple[float, torch.Tensor]:
    """Seconds and token ids of a call under a seed, decoded as a trial's name says."""
    lookup = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS} if name == LOOKUP else {}
    torch.manual_seed(_SEED)
    with engine_of(inputs["input_ids"].device).scope(name == KERNELS):
        started = time.perf_counter()
        ids = generate(**inputs, assistant=assistant, **lookup)
        seconds = time.perf_counter() - started
    return seconds, ids.cpu()
