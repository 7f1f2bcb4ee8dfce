"""Draws `docs/assets/demo.svg`, the README's picture, from a run of now: `make recording`.

Both runs of the demo's longest task, from one start, at the times they took. The picture begins
with its end, which is all that a reader sees who prints it or whose browser animates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hf_retrieval_assist.extensions.record.palette import colours
from hf_retrieval_assist.extensions.record.pieces import readable
from hf_retrieval_assist.policy.cost_store import CostModels
from hf_retrieval_assist.tools.demo.comparison import TASKS, WARM_UP, Run, Task, compare, verdict
from hf_retrieval_assist.tools.demo_model import load_demo_model

# One panel above the other, so that the text is legible on a telephone.
_COLUMNS = 54  # characters of a line of text
_LINES = 8
_ADVANCE, _LEADING = 7.25, 18  # pixels of a character and of a line, at a font size of 12
_MARGIN = 14
_WIDTH = _COLUMNS * _ADVANCE + 2 * _MARGIN
_HEADER = 30  # of a panel: its name and speed
_PANEL = _HEADER + _LINES * _LEADING + 16
_REST = 4.0  # seconds of the finished picture before both runs start
_TICK = 0.25  # seconds between figures of speed
_HIDDEN = ' opacity="0"'  # where nothing is animated


@dataclass(frozen=True)
class _Piece:
    """Part of a token within one line."""

    seconds: float
    line: int
    column: int
    text: str
    colour: str | None


def animation(task: Task, plain: Run, assisted: Run, said: str) -> str:
    """The SVG document, with what is said of both runs below them."""
    slower = max(plain.seconds, assisted.seconds)
    duration = _REST + slower
    panels = _panel("plain generate", plain, 36, duration)
    panels += _panel("assistant=SamAssistant()", assisted, 36 + _PANEL, duration)
    below = 36 + 2 * _PANEL
    forwards = f"{assisted.forwards} forwards instead of {plain.forwards}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {below + 84}" '
        f'width="500" font-family="ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace" '
        f'font-size="12"><rect width="100%" height="100%" rx="8" fill="#16181d"/>'
        f'<text x="{_MARGIN}" y="26" fill="#e6e6e6" font-size="14">'
        f"{escape(task.title)}, {len(assisted.tokens)} tokens</text>"
        f"{panels}{_legend(assisted, below + 18)}"
        f'<g fill="#7ee787" font-size="14">{_appear(slower, duration)}'
        f'<text x="{_MARGIN}" y="{below + 48}">{escape(said)}</text>'
        f'<text x="{_MARGIN}" y="{below + 68}">{forwards}</text></g></svg>\n'
    )


def _panel(name: str, run: Run, top: int, duration: float) -> str:
    height = _LINES * _LEADING + 8
    pieces = list(_layout(run))
    body = "".join(_drawn(piece, duration) for piece in pieces)
    return (
        f'<g transform="translate(0 {top})">'
        f'<text x="{_MARGIN}" y="{_HEADER - 14}" fill="#9aa4b2">{name}</text>'
        f"{_speeds(run, duration)}"
        f'<rect x="4" y="{_HEADER - 6}" width="{_WIDTH - 8:.0f}" height="{height}" rx="5" '
        f'fill="none" stroke="#3b4252"/>'
        f'<clipPath id="clip{top}"><rect x="4" y="{_HEADER - 1}" width="{_WIDTH:.0f}" '
        f'height="{height - 6}"/></clipPath>'
        f'<g clip-path="url(#clip{top})"><g transform="translate(0 {_offset(pieces[-1])})">'
        f"{_scroll(pieces, duration)}{body}</g></g></g>"
    )


def _layout(run: Run) -> Iterator[_Piece]:
    """The run's text, broken into lines of the panel's width."""
    palette = colours(dict.fromkeys(token.origin for token in run.tokens))
    line = column = 0
    for token in run.tokens:
        for part in readable(token.text).expandtabs(4).splitlines(keepends=True):
            text = part.rstrip("\n")
            while text:
                if column == _COLUMNS:
                    line, column = line + 1, 0
                shown, text = text[: _COLUMNS - column], text[_COLUMNS - column :]
                yield _Piece(token.seconds, line, column, shown, palette.get(token.origin))
                column += len(shown)
            if part.endswith("\n"):
                line, column = line + 1, 0


def _drawn(piece: _Piece, duration: float) -> str:
    x, y = _MARGIN + piece.column * _ADVANCE, _HEADER + 12 + piece.line * _LEADING
    width = len(piece.text) * _ADVANCE
    box = ""
    if piece.colour is not None:
        box = (
            f'<rect x="{x:.1f}" y="{y - 13}" width="{width:.1f}" height="{_LEADING - 1}" '
            f'fill="{piece.colour}" fill-opacity=".55"/>'
        )
    return (
        f"<g>{_appear(piece.seconds, duration)}{box}"
        f'<text x="{x:.1f}" y="{y}" fill="#f2f2f2" xml:space="preserve" '
        f'textLength="{width:.1f}">{escape(piece.text)}</text></g>'
    )


def _appear(seconds: float, duration: float, until: float | None = None) -> str:
    """Shows what it stands in from a time of the runs on: to their end and while the picture
    rests, or until another time."""
    shown = "1" if until is None else "0"
    times, values = [0.0, _REST, _REST + seconds], [shown, "0", "1"]
    if until is not None:
        times, values = [*times, _REST + until], [*values, "0"]
    return _animate("animate", 'attributeName="opacity"', times, values, duration)


def _animate(tag: str, what: str, times: list[float], values: list[str], duration: float) -> str:
    key_times = ";".join(f"{time / duration:.5f}" for time in times)
    return (
        f'<{tag} {what} values="{";".join(values)}" keyTimes="{key_times}" '
        f'calcMode="discrete" dur="{duration:.2f}s" repeatCount="indefinite"/>'
    )


def _offset(piece: _Piece) -> int:
    """How far the text stands up where a piece's line is the panel's last."""
    return -_LEADING * max(0, piece.line - _LINES + 1)


def _scroll(pieces: list[_Piece], duration: float) -> str:
    """Moves the text up as it grows."""
    times, offsets = [0.0, _REST], [_offset(pieces[-1]), 0]
    for piece in pieces:
        if _offset(piece) < offsets[-1]:
            times.append(_REST + piece.seconds)
            offsets.append(_offset(piece))
    values = [f"0 {offset}" for offset in offsets]
    what = 'attributeName="transform" type="translate"'
    return _animate("animateTransform", what, times, values, duration)


def _speeds(run: Run, duration: float) -> str:
    """Tokens per second so far, shown every tick, and the last to the end."""
    shown = []
    for tick in range(int(run.seconds / _TICK) + 1):
        done = sum(token.seconds <= tick * _TICK for token in run.tokens)
        if done:
            shown.append((tick * _TICK, done / (tick * _TICK)))
    shown.append((run.seconds, run.rate))
    ends = [start for start, _ in shown[1:]] + [None]
    return "".join(
        f'<text x="{_WIDTH - _MARGIN:.0f}" y="{_HEADER - 14}" fill="#e6e6e6" text-anchor="end"'
        f"{'' if until is None else _HIDDEN}>{_appear(start, duration, until)}"
        f"{rate:.1f} tokens/s</text>"
        for (start, rate), until in zip(shown, ends, strict=True)
    )


def _legend(run: Run, y: float) -> str:
    palette = colours(dict.fromkeys(token.origin for token in run.tokens))
    parts, x = [], float(_MARGIN)
    for origin, colour in [*palette.items(), ("unmarked: the model itself", None)]:
        width = (len(origin) + 2) * _ADVANCE
        if colour is not None:
            parts.append(
                f'<rect x="{x:.1f}" y="{y - 13:.0f}" width="{width:.1f}" height="18" rx="3" '
                f'fill="{colour}" fill-opacity=".55"/>'
            )
        parts.append(
            f'<text x="{x + _ADVANCE:.1f}" y="{y:.0f}" fill="#f2f2f2">{escape(origin)}</text>'
        )
        x += width + _ADVANCE
    return "".join(parts)


def main() -> None:
    model, tokenizer = load_demo_model("gemma3")
    costs = CostModels()
    compare(model, tokenizer, WARM_UP, costs)
    (task,) = (task for task in TASKS if task.title == "edit a Python file")
    runs = compare(model, tokenizer, task, costs)
    said, _ = verdict(model, tokenizer, task, *runs)
    document = animation(task, *runs, said)
    (Path(__file__).parent / "assets" / "demo.svg").write_text(document, encoding="utf-8")


if __name__ == "__main__":
    main()
