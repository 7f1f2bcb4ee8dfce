"""The demo on a terminal: both runs side by side, every token in the colour of its source."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from ...extensions.record.palette import colours
from ...extensions.record.pieces import readable
from ...extensions.record.steps import MODEL
from ...policy.cost_store import CostModels
from .comparison import Run, Task, compare, verdict

RUNS = ("plain generate", "assistant=SamAssistant()")
_FRAMES = 12  # a second, at most
_LINES = 20  # lines of text, where the terminal has room for them
_OTHER_LINES = 11  # lines of a frame and what is said below it, at 80 columns


def show(model: Any, tokenizer: Any, costs: CostModels, tasks: Sequence[Task]) -> None:
    """Run the tasks: both runs of each are shown as they write on a terminal, elsewhere as they
    have written."""
    console = Console(highlight=False)
    for task in tasks:
        runs = _stream(console, model, tokenizer, task, costs)
        for name, run in zip(RUNS, runs, strict=True):
            console.print(f"{name}: {tally(run)}", markup=False)
        with console.status("comparing the texts"):
            said, is_bug = verdict(model, tokenizer, task, *runs)
        console.print(f"{said}\n", style="bold red" if is_bug else "bold green")


def tally(run: Run) -> str:
    """ "192 tokens in 31 forwards: text 120, logit n-grams 41, the model 31"."""
    counts = Counter(token.origin for token in run.tokens).most_common()
    sources = ", ".join(f"{origin} {count}" for origin, count in counts)
    return f"{len(run.tokens)} tokens in {run.forwards} forwards: {sources}"


def _stream(
    console: Console, model: Any, tokenizer: Any, task: Task, costs: CostModels
) -> tuple[Run, Run]:
    drawn = 0.0
    with Live(console=console, auto_refresh=False) as live:

        def draw(*runs: Run) -> None:
            nonlocal drawn
            if time.perf_counter() - drawn >= 1 / _FRAMES:
                live.update(_frame(console, task, runs), refresh=True)
                drawn = time.perf_counter()

        runs = compare(model, tokenizer, task, costs, draw)
        live.update(_frame(console, task, runs), refresh=True)
    return runs


def _frame(console: Console, task: Task, runs: Sequence[Run]) -> Group:
    """Two panels, which keep their size while their texts grow."""
    room = max(4, min(_LINES, console.height - _OTHER_LINES))
    panels = [
        Panel(
            _last_lines(console, run, room),
            title=f"[bold]{name}[/]",
            title_align="left",
            subtitle=f"{len(run.tokens)} tokens, {run.rate:.1f} tokens/s"
            if run.tokens
            else "no token yet",
            subtitle_align="right",
            height=room + 2,
            border_style=border,
        )
        for name, run, border in zip(RUNS, runs, ("dim", "green"), strict=True)
    ]
    title = Text(f"{task.title}, {task.new_tokens} tokens", style="bold")
    beside = Columns(panels, width=console.width // 2, padding=0)
    return Group(title, beside, _legend(runs[1]))


def _last_lines(console: Console, run: Run, room: int) -> Text:
    text, styles = Text(), _styles(run)
    for token in run.tokens:
        text.append(readable(token.text), style=styles.get(token.origin, ""))
    return Text("\n").join(text.wrap(console, console.width // 2 - 4)[-room:])


def _legend(run: Run) -> Text:
    legend = Text("drafted from: ", style="dim")
    for origin, style in _styles(run).items():
        legend.append(f" {origin} ", style=f"not dim {style}").append(" ")
    return legend.append(f" unmarked: {MODEL}", style="dim")


def _styles(run: Run) -> dict[str, str]:
    found = colours(dict.fromkeys(token.origin for token in run.tokens))
    return {origin: f"black on {colour}" for origin, colour in found.items()}
