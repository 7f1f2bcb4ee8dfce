"""Put tables of saved reports into Markdown: `python -m benchmarks.tables [FILE ...] [--check]`.

What stands between a marker and `<!-- end -->` is written anew from the JSON that it names:

    <!-- table file=acceptance title=Presets columns=variant,accepted where=trace:sql -->
    <!-- table file=acceptance title=Presets rows=variant across=trace value=accepted -->
    <!-- machine file=acceptance -->
    <!-- machine file=acceptance brief=yes -->

`file` is below `--results`, without its suffix; `title` is the beginning of the table's. `where`
keeps the rows with these values (`key:value,key:value`). `rows`, `across` and `value` name columns
whose values become lines, columns and cells. `brief` leaves all but machine and version out.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .report import Table, cell

FILES = [Path(__file__).parent.parent / name for name in ("RESULTS.md", "README.md")]
RESULTS = Path(__file__).parent / "results"
MARKER = re.compile(r"<!-- (table|machine) (.*?) -->\n.*?<!-- end -->", re.DOTALL)


def render(text: str, results: Path = RESULTS) -> str:
    """The text with what its markers ask for; where a report is missing, it says so.

    Raises:
        ValueError: a marker names a table or column that is not in its report.
    """

    def block(marker: re.Match[str]) -> str:
        kind, arguments = marker.groups()
        options = dict(word.split("=", 1) for word in shlex.split(arguments))
        try:
            content = _content(kind, results / f"{options.pop('file')}.json", options)
        except (KeyError, TypeError) as error:
            raise ValueError(f"<!-- {kind} {arguments} -->: {error}") from error
        return f"<!-- {kind} {arguments} -->\n{content}\n<!-- end -->"

    return MARKER.sub(block, text)


def _content(kind: str, path: Path, options: dict[str, str]) -> str:
    if not path.is_file():
        return f"Not measured yet: there is no {path.name}."
    return _BLOCKS[kind](json.loads(path.read_text(encoding="utf-8")), **options)


def _table(report: dict[str, Any], title: str, where: str = "", **shape: str) -> str:
    matches = [table for table in report["tables"] if table["title"].startswith(title)]
    if len(matches) != 1:
        raise KeyError(f"{len(matches)} tables begin with {title!r}")
    table = Table(**matches[0])
    for condition in filter(None, where.split(",")):
        key, value = condition.split(":", 1)
        table.rows = [row for row in table.rows if str(row[key]) == value]
    return _pivot(table, **shape) if "across" in shape else _flat(table, **shape)


def _flat(table: Table, columns: str = "") -> str:
    """Chosen columns, or all of them."""
    keys = columns.split(",") if columns else list(table.columns)
    lines = [[cell(row.get(key)) for key in keys] for row in table.rows]
    return markdown([table.columns[key] for key in keys], lines)


def _pivot(table: Table, rows: str, across: str, value: str) -> str:
    """One value by two columns: a line for each value of one, a column for each of the other."""
    cells = {(row[rows], row[across]): row.get(value) for row in table.rows}
    names, headings = (dict.fromkeys(row[key] for row in table.rows) for key in (rows, across))
    lines = [[str(name), *(cell(cells.get((name, h))) for h in headings)] for name in names]
    return markdown([table.columns[rows], *map(str, headings)], lines)


def markdown(headings: list[str], lines: list[list[str]]) -> str:
    """A Markdown table, the first column left, figures right."""
    rule = ["---"] + ["--:"] * (len(headings) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in [headings, rule, *lines])


def _machine(report: dict[str, Any], brief: str = "") -> str:
    """Where and from what a report comes, and with which settings."""
    machine = report["environment"]
    if brief:
        version = machine["versions"].get("hf-retrieval-assist")
        by = f"version {version}, commit" if version else "commit"
        return f"Measured on {machine['cpu']}, {machine['cores']} cores, {by} {machine['commit']}."
    versions = [f"{name} {v}" for name, v in machine["versions"].items() if v is not None]
    memory = machine["memory_bytes"]
    facts = [
        f"{machine['cpu']}, {machine['cores']} cores, torch threads: {machine['torch_threads']}",
        f"GPU: {machine['gpu'] or 'none'}",
        "" if memory is None else f"{memory / 2**30:.0f} GiB",
        f"Python {machine['python']}",
        *versions,
        f"commit {machine['commit']}",
    ]
    settings = [
        f"{name} {value}"
        for name, value in report["settings"].items()
        if not isinstance(value, dict)
    ]
    return f"{', '.join(filter(None, facts))}. Settings: {', '.join(settings)}."


_BLOCKS: dict[str, Callable[..., str]] = {"table": _table, "machine": _machine}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", type=Path, nargs="*", default=FILES)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of reports")
    parser.add_argument("--check", action="store_true", help="fail where a file is out of step")
    arguments = parser.parse_args(argv)
    for path in arguments.files:
        text = path.read_text(encoding="utf-8")
        rendered = render(text, arguments.results)
        if arguments.check and rendered != text:
            raise SystemExit(f"{path} is out of step with {arguments.results}: `make results`")
        path.write_text(rendered, encoding="utf-8")


if __name__ == "__main__":
    main()
