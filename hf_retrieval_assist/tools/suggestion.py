"""Which assistant pays on a reader's own model and prompts, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from ..assistants import Assistant
from ..memory.output_memory import OutputMemory
from ..policy.cost_store import CostModels
from ..policy.stats import CallStats
from ..presets import SamAssistant
from ..system.arguments import kind_of, require_at_least, require_several
from ..verification.engine import engine_of

PLAIN, KERNELS, LOOKUP = "plain generate", "plain in reroute()", "prompt lookup"
COPIES = "without drafts"  # kernels, and what assisted calls have besides

Inputs = dict[str, torch.Tensor]


@dataclass
class Trial:
    """One way of decoding over all prompts.

    Attributes:
        name: as it would be written in code.
        make: gives such an assistant that has learnt nothing; None: no assistant decodes.
        seconds: of all prompts' calls together, in each repeat.
        stats: of the assistant in the last repeat.
        identical: prompts whose calls all brought the tokens of plain `generate`.
    """

    name: str
    make: Callable[[], Assistant] | None = None
    seconds: list[float] = field(default_factory=list)
    stats: CallStats = field(default_factory=CallStats)
    identical: set[int] = field(default_factory=set)


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
        rows: list[tuple[str, ...]]
        rows = [("decoded by", "x plain", "in repeats", "tokens/forward", "identical")]
        rows += [self._cells(trial) for trial in (*self.baselines, *self.trials)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _cells(self, trial: Trial) -> tuple[str, ...]:
        plain = self.baselines[0]
        # Other work on a machine makes calls slower only, so the quickest repeats tell most.
        ratio = min(plain.seconds) / min(trial.seconds)
        pairs = zip(plain.seconds, trial.seconds, strict=True)
        ratios = [theirs / mine for theirs, mine in pairs]
        return (
            trial.name,
            f"{ratio:.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{trial.stats.tokens_per_forward:.2f}" if trial.stats.calls else "",
            f"{len(trial.identical)} of {len(plain.identical)}",
        )


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
    A first pass, which is not timed, warms up. The spread of the repeats says how far assistants
    are told apart.

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
    baselines = _baselines(model, partial(generate, max_new_tokens=2), inputs[0])
    trials = [Trial(name, make) for name, make in makers.items()]
    every = [*baselines, *trials]
    for trial in every:
        trial.identical.update(range(len(inputs)))
    calls = (1 + repeats) * len(inputs) * len(every)
    with tqdm(total=calls, unit="call", desc="measuring", disable=not progress) as bar:
        for turn in range(1 + repeats):
            _turn(generate, inputs, every, turn, bar)
    for trial in every:
        del trial.seconds[0]  # it warmed up
    return Suggestion(baselines, sorted(trials, key=lambda trial: min(trial.seconds)))


def _baselines(model: Any, generate: Any, inputs: Inputs) -> list[Trial]:
    """What decodes without drafts of ours; `generate` tries what the model may refuse."""
    found = [Trial(PLAIN)]
    if model.device.type == "cpu":
        found += [Trial(KERNELS), Trial(COPIES, lambda: Assistant([], budget=0))]
    with suppress(ValueError):  # how transformers refuses
        _call(generate, inputs, LOOKUP, None)
        found.append(Trial(LOOKUP))
    return found


def _turn(
    generate: Any, inputs: Sequence[Inputs], every: Sequence[Trial], turn: int, bar: tqdm[Any]
) -> None:
    """One repeat, from assistants that have learnt nothing."""
    assistants = {trial.name: trial.make() for trial in every if trial.make is not None}
    for trial in every:
        trial.seconds.append(0.0)
    for number, prompt in enumerate(inputs):
        first, texts = (turn + number) % len(every), {}
        for trial in [*every[first:], *every[:first]]:
            assistant = assistants.get(trial.name)
            seconds, texts[trial.name] = _call(generate, prompt, trial.name, assistant)
            trial.seconds[-1] += seconds
            bar.update()
        for trial in every:
            if not torch.equal(texts[trial.name], texts[PLAIN]):
                trial.identical.discard(number)
    for trial in every:
        if trial.name in assistants:
            trial.stats = assistants[trial.name].stats.total


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
    lookup = {"prompt_lookup_num_tokens": 10} if name == LOOKUP else {}
    torch.manual_seed(0)
    with engine_of(inputs["input_ids"].device).scope(name == KERNELS):
        started = time.perf_counter()
        ids = generate(**inputs, assistant=assistant, **lookup)
        seconds = time.perf_counter() - started
    return seconds, ids.cpu()
