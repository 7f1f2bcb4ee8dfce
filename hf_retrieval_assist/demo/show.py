"""The demo on a terminal: both runs side by side, every token in the colour of its source."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..planning.cost_store import CostModels
from ..record.palette import colours, text_on
from ..record.pieces import readable
from ..record.record import MODEL
from .comparison import Comparison, Run, Task, compare
from .measure import HEADER, row

_FRAMES = 12  # a second, at most
_LINES = 20  # of text, where the terminal has room for them


def show(model: Any, tokenizer: Any, costs: CostModels, tasks: Sequence[Task]) -> list[Comparison]:
    """Run the tasks and show them: on a terminal both runs of a task from one start, each at its
    own speed, elsewhere as lines. A table of all tasks ends it.

    Raises:
        ImportError: rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError(
            "the demo needs the `demo` extra: pip install 'hf-retrieval-assist[demo]'"
        ) from error
    console = Console(highlight=False)
    stage = _Stage(console) if console.is_terminal else _Lines()
    found = []
    for task in tasks:
        stage.begin(task)
        comparison = compare(model, tokenizer, task, costs, lambda run: None)
        stage.end(comparison)
        found.append(comparison)
    console.print(HEADER, *(row(each.task, [each]) for each in found), sep="\n", soft_wrap=True)
    return found


def verdict(comparison: Comparison) -> str:
    """ "3.2 times as fast, identical text"."""
    same = "identical text" if comparison.identical else "ANOTHER TEXT"
    return f"{comparison.ratio:.1f} times as fast, {same}"


def tally(run: Run) -> str:
    """ "192 tokens in 31 forwards: text 120, token recycling 41, the model 31"."""
    counts = Counter(token.origin for token in run.tokens).most_common()
    sources = ", ".join(f"{origin} {count}" for origin, count in counts)
    return f"{len(run.tokens)} tokens in {run.forwards} forwards: {sources}"


def _style(colour: str | None) -> str:
    return f"{text_on(colour)} on {colour}" if colour else ""


class _Lines:
    """For output that is no terminal."""

    def begin(self, task: Task) -> None:
        print(f"{task.title}:", flush=True)

    def end(self, comparison: Comparison) -> None:
        for name, run in (("plain", comparison.plain), ("assisted", comparison.assisted)):
            print(f"  {name:<9}{run.rate:7.1f} tokens/s  {tally(run)}")
        print(f"  {verdict(comparison)}", flush=True)


class _Stage:
    """Two panels, and below them what came of the task."""

    def __init__(self, console: Any):
        from rich.live import Live

        self._console = console
        self._live_class = Live

    def begin(self, task: Task) -> None:
        self._task = task
        self._console.print(f"{task.title}: recording both runs", style="dim")

    def end(self, comparison: Comparison) -> None:
        runs = (comparison.plain, comparison.assisted)
        end = max(run.seconds for run in runs)
        live = self._live_class(console=self._console, auto_refresh=False, transient=True)
        started = time.perf_counter()
        with live:
            while (now := time.perf_counter() - started) < end:
                self._runs = [run.until(now) for run in runs]
                live.update(self._frame(), refresh=True)
                time.sleep(1 / _FRAMES)
        self._runs = list(runs)
        self._console.print(self._frame(done=True))
        style = "bold green" if comparison.identical else "bold red"
        self._console.print(f"  {verdict(comparison)}", style=style, end="")
        self._console.print(f"   ({tally(comparison.assisted)})\n", markup=False)

    def _frame(self, done: bool = False) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        panels: list[Any] = []
        table = Table.grid(expand=True)
        table.add_column(ratio=1)
        table.add_column(ratio=1)
        room = max(4, min(_LINES, self._console.height - 8))
        texts = [self._text(run, room) for run in self._runs]
        # While it grows the picture keeps its size.
        height = max(map(len, texts)) if done else room
        for run, lines in zip(self._runs, texts, strict=True):
            panels.append(self._panel(run, lines, height))
        table.add_row(*panels)
        title = Text(f"{self._task.title}, {self._task.new_tokens} tokens", style="bold")
        return Group(title, table, self._legend())

    def _text(self, run: Run, room: int) -> Any:
        """The last lines of what a run wrote."""
        from rich.text import Text

        palette = colours(dict.fromkeys(token.origin for token in run.tokens))
        text = Text()
        for token in run.tokens:
            text.append(readable(token.text), style=_style(palette.get(token.origin)))
        return text.wrap(self._console, self._console.width // 2 - 4)[-room:]

    def _panel(self, run: Run, lines: Any, height: int) -> Any:
        from rich.panel import Panel
        from rich.text import Text

        name = "assistant=SamAssistant()" if run.assisted else "plain generate"
        return Panel(
            Text("\n").join(lines),
            title=f"[bold]{name}[/]  {run.rate:5.1f} tokens/s",
            title_align="left",
            height=height + 2,
            border_style="green" if run.assisted else "dim",
        )

    def _legend(self) -> Any:
        from rich.text import Text

        origins = dict.fromkeys(token.origin for token in self._runs[1].tokens)
        legend = Text("drafted from: ", style="dim")
        for origin, colour in colours(origins).items():
            legend.append(f" {origin} ", style=f"not dim {_style(colour)}").append(" ")
        return legend.append(f" unmarked: {MODEL}", style="dim")
