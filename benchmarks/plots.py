"""Figures from reports; needs the `plot` extra."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

from .report import Report, Table, cell


def require_matplotlib() -> Any:
    """matplotlib.pyplot, drawing to files.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "figures need the `plot` extra: pip install 'hf-retrieval-assist[plot]'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(report: Report, folder: Path) -> list[Path]:
    """Draw a report's figures into a folder; returns their paths."""
    plt = require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in _FIGURES.get(report.benchmark, _no_figures)(plt, report).items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110, bbox_inches="tight")
        plt.close(figure)
    return paths


def _no_figures(plt: Any, report: Report) -> dict[str, Any]:
    """Tables say it all."""
    return {}


def _structures(plt: Any, report: Report) -> dict[str, Any]:
    """Growth with the size of the text."""
    table = report.tables[0]
    wanted = [key for key in ("build", "bytes", "update", "draft") if _any(table, key)]
    structures = _by(table, "structure")
    figure, axes = plt.subplots(2, 2, figsize=(9, 7.5))
    for axis, key in zip(axes.flat, wanted, strict=False):
        for index, (name, rows) in enumerate(structures.items()):
            points = [(r["tokens"], r[key]) for r in rows if r["text"] == "natural" and r.get(key)]
            # Without points too, so that every structure has one colour and a place in the legend.
            x, y = zip(*points, strict=True) if points else ((), ())
            axis.plot(x, y, marker="o", markersize=3, label=name, color=f"C{index}")
        axis.set(xscale="log", xlabel="tokens indexed", ylabel=table.columns[key])
        axis.set(**({"ylim": (0, None)} if key == "bytes" else {"yscale": "log"}))
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(wanted) :]:
        axis.set_axis_off()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=4, loc="lower center")
    figure.suptitle(f"{table.title}; natural text")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return {"structures": figure}


def _acceptance(plt: Any, report: Report) -> dict[str, Any]:
    """Tokens per step of every study, learning curves, and Sequoia's trees beside chains."""
    figures = {}
    for index, table in enumerate(t for t in report.tables if t.rows):
        if "served" in table.columns:
            figures["learning"] = _lines(plt, table, "trace", "served", _by_memory)
        elif "tree" in table.columns:
            figures["sequoia"] = _lines(plt, table, "draft", "nodes", _tree_and_chains)
        else:
            figures[f"acceptance-{index}"] = _ladders(plt, table)
    return figures


def _by_memory(rows: list[dict[str, Any]], x: str) -> dict[str, list[tuple[Any, Any]]]:
    lines: dict[str, list[tuple[Any, Any]]] = {}
    for row in rows:
        lines.setdefault(row["variant"], []).append((row[x], row["accepted"]))
    return lines


def _tree_and_chains(rows: list[dict[str, Any]], x: str) -> dict[str, list[tuple[Any, Any]]]:
    titles = {"tree": "Sequoia's tree", "chains": "best k chains", "chain": "one chain"}
    return {title: [(row[x], row[key]) for row in rows] for key, title in titles.items()}


def _replay(plt: Any, report: Report) -> dict[str, Any]:
    """Tokens per second by batch size."""
    settings = report.settings
    subtitle = f"{settings['shape']}, {settings['dtype']}, {settings['device']}"
    return {
        f"replay-{index}": _bars(
            plt, table, "batch", "method", "rate", "tokens per second", subtitle
        )
        for index, table in enumerate(report.tables)
        if table.rows
    }


def _model(plt: Any, report: Report) -> dict[str, Any]:
    """Speed relative to plain decoding by category."""
    return {
        f"model-{index}": _bars(
            plt, table, "category", "method", "ratio", "speed relative to plain", reference=1.0
        )
        for index, table in enumerate(report.tables)
        if "category" in table.columns
    }


def _forwards(plt: Any, report: Report) -> dict[str, Any]:
    """t(n) of each variant."""
    (table,) = report.tables
    figure, axis = plt.subplots(figsize=(6, 4))
    for name, rows in _by(table, "variant").items():
        points = [(row["tokens"], row["ms"]) for row in rows]
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axis.set(xlabel="tokens in the forward (n)", ylabel="milliseconds")
    axis.set(xscale="log", yscale="log", xticks=report.settings["sizes"])
    axis.set_xticklabels(report.settings["sizes"])
    axis.minorticks_off()
    axis.set_title(table.title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return {"forwards": figure}


def _roofline(plt: Any, report: Report) -> dict[str, Any]:
    """GFLOP/s by rows under what memory and arithmetic allow, a panel per dtype."""
    bounds, table = report.tables
    figure, axes = plt.subplots(1, len(bounds.rows), figsize=(4.5 * len(bounds.rows), 4))
    for axis, bound in zip(axes, bounds.rows, strict=True):
        found = [row for row in table.rows if row["dtype"] == bound["dtype"]]
        sizes = sorted({row["rows"] for row in found})
        item_bytes = 4 if bound["dtype"] == "float32" else 2
        roof = [min(2 * n * bound["gbytes"] / item_bytes, bound["gflops"]) for n in sizes]
        axis.plot(sizes, roof, "k--", linewidth=1, label="plain read, large product")
        for method in dict.fromkeys(row["method"] for row in found):
            points = [(row["rows"], row["gflops"]) for row in found if row["method"] == method]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=method)
        axis.set(xscale="log", yscale="log", xlabel="rows", ylabel="GFLOP/s", xticks=sizes)
        axis.set_xticklabels(sizes)
        axis.minorticks_off()
        axis.set_title(bound["dtype"], fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    return {"roofline": figure}


def _repeated(plt: Any, report: Report) -> dict[str, Any]:
    """Speed relative to plain decoding by pass."""
    (table,) = report.tables
    label = "speed relative to plain"
    return {"repeated": _bars(plt, table, "prompts", "method", "ratio", label, reference=1.0)}


def _bars(
    plt: Any,
    table: Table,
    group: str,
    series: str,
    value: str,
    label: str,
    subtitle: str = "",
    reference: float | None = None,
) -> Any:
    """Grouped bars: a group per value of one column, a colour per value of another."""
    groups, names = list(_by(table, group)), list(_by(table, series))
    figure, axis = plt.subplots(figsize=(max(6, 1.1 * len(groups) + 0.25 * len(names) + 2), 4))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        found = {row[group]: row[value] for row in table.rows if row[series] == name}
        places = [g + (i - (len(names) - 1) / 2) * width for g in range(len(groups))]
        heights = [found.get(key) or 0 for key in groups]
        axis.bar(places, heights, width, label=name)
    if reference is not None:
        axis.axhline(reference, color="black", linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(groups)), [str(key) for key in groups], rotation=20)
    axis.set(xlabel=table.columns[group], ylabel=label)
    axis.set_title("\n".join(filter(None, [table.title, subtitle])), fontsize=10)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    axis.grid(axis="y", alpha=0.3)
    return figure


def _ladders(plt: Any, table: Table) -> Any:
    """Tokens per step: a panel per trace, a bar per variant, with its figure beside it."""
    panels, variants = _by(table, "trace"), list(_by(table, "variant"))
    size = (3.2 + 2 * len(panels), 1.3 + 0.27 * len(variants))
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
    for axis, (title, rows) in zip(axes[0], panels.items(), strict=True):
        places = [variants.index(row["variant"]) for row in rows]
        bars = axis.barh(places, [row["accepted"] for row in rows], color="C0")
        axis.bar_label(bars, [cell(row["accepted"]) for row in rows], padding=2, fontsize=7)
        axis.set(xlabel="tokens per step")
        axis.margins(x=0.22)
        axis.set_title(title, fontsize=9)
    axes[0][0].set_yticks(range(len(variants)), variants, fontsize=8)
    axes[0][0].invert_yaxis()
    figure.suptitle(table.title, fontsize=10)
    figure.tight_layout()
    return figure


def _lines(
    plt: Any,
    table: Table,
    panel: str,
    x: str,
    lines_of: Callable[[list[dict[str, Any]], str], dict[str, list[tuple[Any, Any]]]],
) -> Any:
    """A panel per value of one column; tokens per step over another."""
    panels = _by(table, panel)
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(down, across, figsize=(4 * across, 3.2 * down), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, rows) in zip(axes.flat, panels.items(), strict=False):
        # Lines that coincide stay visible through each other's gaps.
        for style, (label, points) in zip(
            cycle(("-", "--", ":")), lines_of(rows, x).items(), strict=False
        ):
            axis.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=label)
        axis.set(xlabel=_AXES[x], ylabel="tokens per step")
        axis.set_ylim(0, 1.35 * axis.get_ylim()[1])  # room for the legend
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(table.title, fontsize=10)
    figure.tight_layout()
    return figure


_AXES = {"served": "requests served before", "nodes": "drafted nodes"}


def _by(table: Table, key: str) -> dict[Any, list[dict[str, Any]]]:
    """Rows by the value of a column, in order of appearance."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in table.rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def _any(table: Table, key: str) -> bool:
    return any(row.get(key) is not None for row in table.rows)


_FIGURES: dict[str, Callable[[Any, Report], dict[str, Any]]] = {
    "structures": _structures,
    "acceptance": _acceptance,
    "replay": _replay,
    "model": _model,
    "forwards": _forwards,
    "roofline": _roofline,
    "repeated": _repeated,
}
