"""Records as HTML that needs no script and no network, in light and dark surroundings.

Colours, trees on hover or click and charts are style sheets and SVG alone, so that notebooks show
them wherever they show HTML. All text of models and of drafters' names is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from ..drafting.policy import DraftingPolicy
from ..planning.cost_store import CostKey
from ..stats import PHASES, html_row
from .palette import colours
from .pieces import readable, text_pieces
from .steps import MODEL, CallRecord, Step

_MOST_NODES = 48  # of a tree that are shown, besides the accepted ones
_MOST_TREES = 300  # of a row
_TOKENS = (1, 2, 4, 8, 16, 32, 64)  # of forwards whose cost is shown
_FAINT = ' opacity=".35"'  # bars of the model's own tokens

_STYLE = """
.hfra{font:14px/1.5 system-ui,sans-serif;color:inherit;position:relative;max-width:72em}
.hfra .num{font-variant-numeric:tabular-nums}
.hfra table{border-collapse:collapse;font-size:13px;margin:.4em 0}
.hfra th,.hfra td{padding:.1em .8em .1em 0;text-align:right}
.hfra th:first-child,.hfra td:first-child{text-align:left}
.hfra .key{border-radius:3px;padding:0 .4em}
.hfra .row{position:relative;margin:.4em 0 .9em}
.hfra .text{white-space:pre-wrap;overflow-wrap:anywhere;max-height:26em;overflow-y:auto;
 font:13px/1.75 ui-monospace,Menlo,Consolas,monospace;border:1px solid #8886;border-radius:4px;
 padding:.6em .8em}
.hfra .step{cursor:pointer;border-left:2px solid #888a;border-radius:2px}
.hfra .step:hover,.hfra .step:focus{outline:2px solid #8888}
.hfra .tok{unicode-bidi:isolate;border-radius:2px;padding:1px 0}
.hfra .eol{opacity:.45;font-style:normal}
.hfra .hint,.hfra .panel{height:210px;box-sizing:border-box;border:1px solid #8886;border-top:0;
 padding:.5em .8em;overflow:auto;border-radius:0 0 4px 4px}
.hfra .hint{opacity:.6}
.hfra .panel{display:none;position:absolute;left:0;right:0;bottom:0;z-index:1;white-space:normal;
 cursor:auto;font:13px/1.5 system-ui,sans-serif;color:var(--hfra-fg);background:var(--hfra-bg)}
.hfra .first .panel{display:block;z-index:0}
.hfra .step:focus .panel,.hfra .step:focus-within .panel{display:block}
.hfra .step:hover .panel{display:block;z-index:2}
.hfra .sub,.hfra .kids{display:flex;align-items:flex-start}
.hfra .kids{flex-direction:column;border-left:1px solid #8888;margin-left:2px}
.hfra .node{white-space:pre;unicode-bidi:isolate;margin:1px 3px;padding:0 4px;border-radius:3px;
 font:12px/1.6 ui-monospace,Menlo,Consolas,monospace}
.hfra .node small{opacity:.65;padding-left:.5em}
.hfra .hit{box-shadow:inset 0 0 0 2px currentColor;font-weight:600}
.hfra .bar{display:flex;height:1.5em;border-radius:3px;overflow:hidden;font-size:12px}
.hfra .bar span{overflow:hidden;white-space:nowrap;padding-left:3px;border-right:1px solid #8888}
.hfra svg{display:block;width:100%;height:5.5em;border-bottom:1px solid #8888}
.hfra summary{cursor:pointer}
.hfra{--hfra-bg:var(--jp-layout-color1,var(--vscode-editor-background,
 var(--colab-primary-surface-color,Canvas)));
 --hfra-fg:var(--jp-content-font-color1,var(--vscode-editor-foreground,
 var(--colab-primary-text-color,CanvasText)))}
"""


def page(shown: str) -> str:
    """A whole document around a fragment, which follows the reader's choice of light or dark."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="color-scheme" content="light dark"><title>Record of a call</title></head>'
        f"<body>{shown}</body></html>"
    )


def fragment(
    summary: str,
    origins: Sequence[str],
    counts: Mapping[str, tuple[int, int, int]],
    calls: Sequence[CallRecord],
    tokenizer: Any,
) -> str:
    """A record for a notebook's cell.

    Args:
        summary: of the figures of all calls.
        origins: all sources, by which colours are given out.
        counts: of each source that is listed, the nodes proposed and verified, and the tokens.
        calls: whose texts, trees and times are shown.
        tokenizer: of the texts; None: ids are shown.
    """
    palette = colours(origins)
    shown = []
    for number, call in enumerate(calls):
        texts = _Texts(call, palette, tokenizer)
        rows = "".join(map(texts.row, range(len(call.prompts))))
        title = f"call {number + 1}: {call.stats}" if len(calls) > 1 else "text"
        opened = " open" if number == len(calls) - 1 else ""
        shown.append(
            f"<details{opened}><summary>{escape(title)}</summary>{rows}</details>"
            f"{_tokens_chart(call)}{_time_bar(call)}"
        )
    return _styled(
        f"<div>{escape(summary)}</div>{_table_of_origins(counts, palette)}{''.join(shown)}"
    )


def assistant_html(assistant: DraftingPolicy) -> str:
    """An assistant's drafters, what they did so far, and what forwards cost."""
    rows = [html_row("th", "drafter", "proposes from", "nodes tried", "accepted", "expected")]
    for drafter, (name, found) in zip(
        assistant.drafters, assistant.stats.reliability.items(), strict=True
    ):
        figures = (found.trials.sum(), found.observed.sum(), found.predicted.sum())
        rows.append(
            html_row("td", name, ", ".join(drafter.origins), *(f"{n:.0f}" for n in figures))
        )
    budget = escape(str(assistant.planner.budget))
    return _styled(
        f"<b>{escape(type(assistant).__name__)}</b>, budget {budget}<table>{''.join(rows)}</table>"
        f"{assistant.stats._repr_html_()}{_costs(assistant)}"
    )


def _costs(assistant: DraftingPolicy) -> str:
    """Milliseconds of forwards over so many tokens, of each kind that was timed."""
    rows = [
        html_row("td", _kind(key), *(f"{1e3 * cost.seconds(n):.2f}" for n in _TOKENS))
        for key, cost in assistant.costs.timed().items()
    ]
    if not rows:
        return ""
    heading = html_row("th", "ms of a forward over n tokens", *map(str, _TOKENS))
    return f"<table>{heading}{''.join(rows)}</table>"


def _kind(key: CostKey) -> str:
    return f"{key.dtype}, {key.batch_size} x {key.cache_length} tokens in the cache"


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], below: str) -> str:
    """A table of texts, and a sentence under it."""
    body = "".join([html_row("th", *heading), *(html_row("td", *row) for row in rows)])
    return _styled(f"<table>{body}</table><div>{escape(below)}</div>")


def _styled(shown: str) -> str:
    return f'<div class="hfra"><style>{_STYLE}</style>{shown}</div>'


def _tint(colour: str | None) -> str:
    """A background under which text stays readable, in light and dark."""
    return f' style="background:{colour}55"' if colour else ""


def _table_of_origins(
    counts: Mapping[str, tuple[int, int, int]], palette: Mapping[str, str]
) -> str:
    rows = [html_row("th", "source", "nodes proposed", "verified", "tokens")]
    for name, (proposed, verified, tokens) in counts.items():
        nodes = ("", "") if name == MODEL else (f"{proposed:,}", f"{verified:,}")
        key = f'<span class="key"{_tint(palette.get(name))}>{escape(name)}</span>'
        cells = "".join(f'<td class="num">{cell}</td>' for cell in (*nodes, f"{tokens:,}"))
        rows.append(f"<tr><td>{key}</td>{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"


class _Texts:
    """The texts of a call's rows, with the tree of each step."""

    def __init__(self, call: CallRecord, palette: Mapping[str, str], tokenizer: Any):
        self._call = call
        self._palette = palette
        self._tokenizer = tokenizer

    def row(self, row: int) -> str:
        """A row's text with the tree of each step, which shows in the panel below."""
        call = self._call
        pieces = text_pieces(self._tokenizer, call.generated(row), call.prompts[row])
        shown = []
        # Until the reader chooses a step, the one that brought most is open.
        most = max(call.of_row(row), key=lambda step: len(step.token_ids), default=None)
        for number, step in enumerate(call.of_row(row)):
            mine = pieces[step.position : step.position + len(step.token_ids)]
            if mine:
                panel = self._panel(step) if number <= _MOST_TREES else ""
                tokens = "".join(map(self._token, mine, step.credits))
                chosen = " first" if step is most else ""
                shown.append(f'<span class="step{chosen}" tabindex="0">{tokens}{panel}</span>')
        title = f"<div>row {row}</div>" if len(call.prompts) > 1 else ""
        hint = (
            "Every mark between tokens is a forward: hover over its tokens, or click, for its tree."
        )
        if len(shown) > _MOST_TREES + 1:
            hint += f" The first {_MOST_TREES} have one."
        return (
            f'<div class="row">{title}<div>{hint}</div><div class="text">{"".join(shown)}</div>'
            '<div class="hint"></div></div>'
        )

    def _token(self, piece: str, origin: str) -> str:
        text = escape(readable(piece)).replace("\n", '<i class="eol">↵</i>\n')
        return f'<span class="tok"{_tint(self._palette.get(origin))}>{text}</span>'

    def _panel(self, step: Step) -> str:
        proposed = sum(map(len, step.drafts))
        times = ", ".join(f"{phase} {1e3 * took:.1f} ms" for phase, took in step.seconds.items())
        title = f"forward {step.forward}" if step.forward else "prefill"
        facts = (
            f"{title}: {proposed} nodes proposed, {len(step.tree)} verified, "
            f"{len(step.accepted)} accepted, {len(step.token_ids)} tokens; {times}"
        )
        return f'<span class="panel">{escape(facts)}{self._tree(step)}</span>'

    def _tree(self, step: Step) -> str:
        """The tree from left to right, nodes without a choice between them joined in one box."""
        tree = step.tree
        if not len(tree):
            return ""
        likely = np.argsort(-tree.probs, kind="stable")[:_MOST_NODES]
        shown = {*likely.tolist(), *step.accepted.tolist()}
        children: dict[int, list[int]] = {}
        for node in sorted(shown):
            children.setdefault(int(tree.parents[node]), []).append(node)
        root = self._token_before(step)
        boxes = "".join(self._subtree(step, node, root, children) for node in children.get(-1, []))
        hidden = len(tree) - len(shown)
        more = f"<span>and {hidden} less probable nodes</span>" if hidden else ""
        return f'<span class="kids">{boxes}{more}</span>'

    def _token_before(self, step: Step) -> int:
        """The tree's root, the last token before the step."""
        if step.position:
            return int(self._call.generated(step.row)[step.position - 1])
        return int(self._call.prompts[step.row][-1])

    def _subtree(self, step: Step, node: int, before: int, children: dict[int, list[int]]) -> str:
        accepted = set(step.accepted.tolist())
        run = [node]
        while (below := children.get(run[-1], [])) and len(below) == 1:
            same_fate = (run[-1] in accepted) == (below[0] in accepted)
            if not same_fate or step.credit(run[-1]) != step.credit(below[0]):
                break
            run.append(below[0])
        tokens = step.tree.token_ids[run]
        text = "".join(text_pieces(self._tokenizer, tokens, np.array([before], np.int32)))
        text = escape(readable(text).replace("\n", "↵"))
        prob = f"{step.tree.probs[run[-1]]:.2f}"
        hit = " hit" if node in accepted else ""
        named_by = ", ".join(f"{n.origin} {n.prob:.2f}" for n in step.witnesses[run[-1]])
        inner = "".join(self._subtree(step, child, int(tokens[-1]), children) for child in below)
        box = (
            f'<span class="node{hit}"{_tint(self._palette.get(step.credit(node)))} '
            f'title="{escape(named_by)}">{text}<small>{prob}</small></span>'
        )
        kids = f'<span class="kids">{inner}</span>' if inner else ""
        return f'<span class="sub">{box}{kids}</span>'


def _tokens_chart(call: CallRecord) -> str:
    """Tokens of every forward, by source from the bottom up."""
    forwards: dict[int, list[str]] = {}
    for step in call.steps:
        forwards.setdefault(step.forward, []).extend(step.credits)
    counts = [
        sorted(credits, key=lambda name: (name != MODEL, name)) for credits in forwards.values()
    ]
    if not counts:
        return ""
    palette = colours(dict.fromkeys(name for credits in counts for name in credits))
    highest = max(map(len, counts))
    bars = "".join(
        f'<rect x="{x}" y="{highest - start - height}" width=".85" height="{height}" '
        f'fill="{palette.get(name, "currentColor")}"{"" if name in palette else _FAINT}/>'
        for x, credits in enumerate(counts)
        for name, start, height in _runs(credits)
    )
    return (
        f"<div>tokens of each forward (at most {highest})</div>"
        f'<svg viewBox="0 0 {len(counts)} {highest}" preserveAspectRatio="none">{bars}</svg>'
    )


def _runs(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """(name, start, length) of each stretch of equal names."""
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    starts = accumulate((length for _, length in runs), initial=0)
    return [(name, start, length) for (name, length), start in zip(runs, starts, strict=False)]


def _time_bar(call: CallRecord) -> str:
    seconds = {name: call.stats.seconds[name] for name in ("prefill", *PHASES)}
    known = sum(seconds.values())
    if not known:
        return ""
    parts = "".join(
        f'<span style="flex:{took / known:.4f} 0 0;background:#888888{shade}" '
        f'title="{name} {1e3 * took:.1f} ms">{_label(name, took / known)}</span>'
        for (name, took), shade in zip(seconds.items(), ("66", "22", "44", "11", "55"), strict=True)
    )
    return f'<div>time ({known:.2f} s)</div><div class="bar">{parts}</div>'


def _label(phase: str, share: float) -> str:
    """Where there is room for one."""
    return f"{phase} {share:.0%}" if share > 0.1 else ""
