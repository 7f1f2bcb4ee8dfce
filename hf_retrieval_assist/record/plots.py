"""Figures of a record, drawn with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..planning.cost_model import CostModel
from ..stats import PHASES
from .palette import colours
from .pieces import readable
from .record import MODEL, Record, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NODES = 24  # of a drawn tree, besides the accepted ones


def new_axis(width: float, height: float) -> Axes:
    """A figure of one axis.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "plots need the `plot` extra: pip install 'hf-retrieval-assist[plot]'"
        ) from error
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def plot_tokens(record: Record, axis: Axes | None = None) -> Axes:
    """A bar for every step, the model's own token at the bottom."""
    axis = new_axis(9, 3) if axis is None else axis
    steps = list(record.steps)
    palette = colours(record.origins) | {MODEL: "0.7"}
    below = np.zeros(len(steps))
    for name in reversed(record.origins):
        tokens = np.array([step.credits.count(name) for step in steps], dtype=float)
        axis.bar(range(len(steps)), tokens, 1.0, below, color=palette[name], label=name)
        below += tokens
    axis.set(xlabel="step", ylabel="tokens")
    axis.legend()
    return axis


def plot_time(record: Record, axis: Axes | None = None) -> Axes:
    """A bar for every phase."""
    axis = new_axis(6, 2) if axis is None else axis
    phases = ("prefill", *PHASES)
    bars = axis.barh(phases, [record.stats.seconds[phase] for phase in phases], color="0.6")
    axis.bar_label(bars, fmt="%.2f s", padding=3)
    axis.margins(x=0.15)
    axis.invert_yaxis()
    axis.set(xlabel="seconds")
    return axis


def plot_cost(costs: dict[str, CostModel], axis: Axes | None = None, most: int = 64) -> Axes:
    """Milliseconds of a forward over 1 to `most` tokens, a line for each name."""
    axis = new_axis(5, 3) if axis is None else axis
    for name, cost in costs.items():
        axis.plot(range(1, most + 1), 1e3 * cost.curve(most), label=name)
    axis.set(xlabel="tokens of a forward", ylabel="milliseconds", ylim=(0, None))
    axis.legend()
    return axis


def plot_tree(record: Record, step: Step, axis: Axes | None = None) -> Axes:
    """From left to right by depth, a line for every leaf."""
    tree = step.tree
    depths = np.append(tree.depths, 0)
    likely = np.argsort(-tree.probs, kind="stable")[:_MOST_NODES]
    # Closed under parents: none is less probable than its child, and paths are accepted whole.
    shown = np.union1d(likely, step.accepted).astype(int)
    place = np.full(len(tree) + 1, -1)  # among the shown ones; the root's stays -1
    place[shown] = np.arange(len(shown))
    rows = np.zeros(len(tree) + 1, dtype=int)
    rows[[*shown, -1]] = _rows(place[tree.parents[shown]])
    if axis is None:
        axis = new_axis(2 + 1.3 * depths[shown].max(initial=0), 1 + 0.3 * rows.max())
    palette = colours(record.origins)
    accepted = set(step.accepted.tolist())
    for node in shown.tolist():
        parent = int(tree.parents[node])
        style: dict[str, Any] = {"color": palette.get(step.credit(node), "0.7")}
        axis.plot(
            [depths[parent], depths[node]],
            [rows[parent], rows[node]],
            linewidth=3 if node in accepted else 1,
            **style,
        )
        piece = readable(record.pieces(tree.token_ids[[node]], tree.token_ids[[parent]])[0])
        axis.annotate(
            f"{piece!r} {tree.probs[node]:.2f}",
            (depths[node], rows[node]),
            fontsize=8,
            fontweight="bold" if node in accepted else "normal",
            parse_math=False,
        )
    axis.invert_yaxis()
    axis.axis("off")
    return axis


def _rows(parents: np.ndarray) -> np.ndarray:
    """The line of each node, of the root at the end: its first child's, every leaf on its own."""
    rows = np.full(len(parents) + 1, -1)
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents.tolist()):
        children[parent].append(node)
    free = 0
    waiting = [-1]
    while waiting:
        node = waiting.pop()
        path = [node]
        while children[path[-1]]:
            waiting.extend(reversed(children[path[-1]][1:]))
            path.append(children[path[-1]][0])
        rows[path] = free
        free += 1
    return rows
