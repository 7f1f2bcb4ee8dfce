"""Put figures of saved reports into Markdown: `python -m benchmarks.tables [FILE ...] [--check]`.

What stands between a marker and `<!-- end -->` is written anew from the JSON that it names:

    <!-- table file=acceptance title=Presets columns=variant,accepted where=trace:sql -->
    <!-- table file=acceptance title=Presets rows=variant across=trace value=accepted -->
    <!-- table file=model-a,model-b title=Unseen rows=model,dtype across=method value=plain -->
    <!-- machine file=acceptance -->
    <!-- machine file=acceptance brief=yes -->
    in a line: <!-- figure file=sql title=Presets where=variant:memory column=nodes -->4<!-- end -->

`file` is below `--results`, without its suffix; rows of several files stand one after the other.
`title` is the beginning of the table's. `where` keeps the rows with these values
(`key:value,key:value`), for a figure one row. `rows`, `across` and `value` name columns whose
values become lines, columns and cells. `digits` are those behind the point. `brief` leaves all but
the machine, the version and the command out.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import Table, cell

FILES = [Path(__file__).parent.parent / name for name in ("RESULTS.md", "README.md")]
RESULTS = Path(__file__).parent / "results"
MARKER = re.compile(r"<!-- (table|machine|figure) (.*?) -->.*?<!-- end -->", re.DOTALL)


def render(text: str, results: Path = RESULTS) -> str:
    """The text with what its markers ask for; where a report is missing, it says so.

    Raises:
        ValueError: a marker names a table or column that is not in its report, or a figure of none
            or several rows.
    """

    def block(marker: re.Match[str]) -> str:
        kind, arguments = marker.groups()
        options = dict(word.split("=", 1) for word in shlex.split(arguments))
        paths = [results / f"{name}.json" for name in options.pop("file").split(",")]
        try:
            content = _content(kind, paths, options)
        except (KeyError, TypeError) as error:
            raise ValueError(f"<!-- {kind} {arguments} -->: {error}") from error
        around = "" if kind == "figure" else "\n"
        return f"<!-- {kind} {arguments} -->{around}{content}{around}<!-- end -->"

    return MARKER.sub(block, text)


def _content(kind: str, paths: Sequence[Path], options: dict[str, str]) -> str:
    for path in paths:
        if not path.is_file():
            return f"Not measured yet: there is no {path.name}."
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    if kind == "machine":
        return _machine(*reports, **options)
    table = _chosen(reports, options.pop("title"), options.pop("where", ""))
    if kind == "figure":
        return _figure(table, **options)
    return _pivot(table, **options) if "across" in options else _flat(table, **options)


def _chosen(reports: Sequence[dict[str, Any]], title: str, where: str) -> Table:
    """The rows of one table of each report for which all conditions hold."""
    found = []
    for report in reports:
        matches = [table for table in report["tables"] if table["title"].startswith(title)]
        if len(matches) != 1:
            raise KeyError(f"{len(matches)} tables begin with {title!r}")
        found.append(Table(**matches[0]))
    rows = [row for table in found for row in table.rows]
    for condition in filter(None, re.split(r",(?=\w+:)", where)):
        key, value = condition.split(":", 1)
        rows = [row for row in rows if str(row[key]) == value]
    return Table(title, found[0].columns, rows)


def _figure(table: Table, column: str, digits: str = "") -> str:
    if len(table.rows) != 1:
        raise KeyError(f"expected one row, got {len(table.rows)}")
    return cell(table.rows[0][column], digits)


def _flat(table: Table, columns: str = "", digits: str = "") -> str:
    """Chosen columns, or all of them."""
    keys = columns.split(",") if columns else list(table.columns)
    lines = [[cell(row.get(key), digits) for key in keys] for row in table.rows]
    return markdown([table.columns[key] for key in keys], lines)


def _pivot(table: Table, rows: str, across: str, value: str, digits: str = "") -> str:
    """A line for each value of `rows`, a column for each of `across`."""
    keys = rows.split(",")
    headings = dict.fromkeys(row[across] for row in table.rows)
    found = {(*(row[key] for key in keys), row[across]): row.get(value) for row in table.rows}
    lines = [
        [*map(str, line), *(cell(found.get((*line, heading)), digits) for heading in headings)]
        for line in dict.fromkeys(tuple(row[key] for key in keys) for row in table.rows)
    ]
    return markdown([*(table.columns[key] for key in keys), *map(str, headings)], lines)


def markdown(headings: list[str], lines: list[list[str]]) -> str:
    """A Markdown table, the first column left, figures right."""
    rule = ["---"] + ["--:"] * (len(headings) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in [headings, rule, *lines])


def _machine(report: dict[str, Any], brief: str = "") -> str:
    """Where and from what a report comes, and with which settings."""
    machine = report["environment"]
    command = machine.get("command")
    if brief:
        version = machine["versions"].get("hf-retrieval-assist")
        by = f"version {version}, commit" if version else "commit"
        typed = f"; `{command}`" if command else ""
        where = f"{machine['cpu']}, {machine['cores']} cores"
        return f"Measured on {where}, {by} {machine['commit']}{typed}."
    versions = [f"{name} {v}" for name, v in machine["versions"].items() if v is not None]
    memory = machine["memory_bytes"]
    facts = [
        f"{machine['cpu']}, {machine['cores']} cores, torch threads: {machine['torch_threads']}",
        f"GPU: {machine['gpu'] or 'none'}",
        "" if memory is None else f"{memory / 2**30:.0f} GiB",
        f"Python {machine['python']}",
        *versions,
        f"commit {machine['commit']}",
        f"`{command}`" if command else "",
    ]
    settings = [
        f"{name} {value}"
        for name, value in report["settings"].items()
        if not isinstance(value, dict)
    ]
    return f"{', '.join(filter(None, facts))}. Settings: {', '.join(settings)}."


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
