"""Records as HTML that needs no script and no network, in light and dark surroundings.

Colours, and trees on hover or click, are style sheets alone. Where these are taken away, as in
notebooks that are not trusted, trees stay away with them: their words are attributes that only the
style sheet shows. All text of models and of drafters' names is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from .palette import colours
from .pieces import readable, text_pieces
from .steps import CallRecord, Step

_MOST_NODES = 48  # a tree's that are shown, besides the accepted ones
_MOST_STEPS = 300  # a row's whose trees are shown, besides the prefill

_STYLE = """
.hfra{font:14px/1.5 system-ui,sans-serif;color:inherit;position:relative;max-width:72em}
.hfra .num{font-variant-numeric:tabular-nums}
.hfra table{border-collapse:collapse;font-size:13px;margin:.4em 0}
.hfra th,.hfra td{padding:.1em .8em .1em 0;text-align:right}
.hfra th:first-child,.hfra td:first-child{text-align:left}
.hfra .key{white-space:nowrap;border-radius:3px;padding:0 .4em}
.hfra [data-say]::before{content:attr(data-say)}
.hfra .row{position:relative;margin:.4em 0 .9em}
.hfra .text{margin:0;overflow-wrap:anywhere;max-height:26em;overflow-y:auto;
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
.hfra [data-prob]::after{content:attr(data-prob);opacity:.65;padding-left:.5em;font-size:smaller}
.hfra .hit{box-shadow:inset 0 0 0 2px currentColor;font-weight:600}
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


def fragment(record: Any) -> str:
    """A `Record` for a notebook's cell."""
    palette = colours(record.origins)
    shown = []
    for number, call in enumerate(record.calls):
        texts = _Texts(call, palette, record.tokenizer)
        rows = "".join(map(texts.row, range(len(call.prompts))))
        if len(record) > 1:
            title = escape(f"call {number + 1}: {call.stats}")
            opened = " open" if number == len(record) - 1 else ""
            rows = f"<details{opened}><summary>{title}</summary>{rows}</details>"
        shown.append(rows)
    origins = _table_of_origins(record.shown_origins(), palette)
    figures = f"<div>{escape(str(record.stats))}</div>{origins}"
    return f'<div class="hfra"><style>{_STYLE}</style>{figures}{"".join(shown)}</div>'


def _tint(colour: str | None) -> str:
    """A background under which text stays readable, in light and dark."""
    return f' style="background:{colour}55"' if colour else ""


def _table_of_origins(origins: Sequence[Sequence[str]], palette: Mapping[str, str]) -> str:
    titles = ("source", "nodes proposed", "verified", "tokens")
    rows = ["".join(f"<th>{title}</th>" for title in titles)]
    for name, *figures in origins:
        key = f'<span class="key"{_tint(palette.get(name))}>{escape(name)}</span>'
        cells = "".join(f'<td class="num">{figure}</td>' for figure in figures)
        rows.append(f"<td>{key}</td>{cells}")
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


@dataclass
class _Texts:
    """The texts of a call's rows, with the tree of each step."""

    _call: CallRecord
    _palette: Mapping[str, str]
    _tokenizer: Any

    def row(self, row: int) -> str:
        """A row's text with the tree of each step, which shows in the panel below."""
        call = self._call
        pieces = text_pieces(self._tokenizer, call.generated(row), call.prompts[row])
        shown = []
        steps = [step for step in call.of_row(row) if step.position < len(pieces)]
        # The step that brought most is open until the reader chooses one.
        most = max(steps, key=lambda step: len(step.token_ids), default=None)
        for number, step in enumerate(steps):
            mine = pieces[step.position : step.position + len(step.token_ids)]
            panel = self._panel(step) if number <= _MOST_STEPS else ""
            tokens = "".join(map(self._token, mine, step.credits))
            chosen = " first" if step is most else ""
            shown.append(f'<span class="step{chosen}" tabindex="0">{tokens}{panel}</span>')
        title = f"<div>row {row}</div>" if len(call.prompts) > 1 else ""
        hint = (
            "Every mark between tokens is a forward: hover over its tokens, or click, for its tree."
        )
        if len(steps) > _MOST_STEPS + 1:
            hint += f" The first {_MOST_STEPS} have one."
        return (
            f'<div class="row">{title}<div data-say="{hint}"></div>'
            f'<pre class="text" style="white-space:pre-wrap">{"".join(shown)}</pre>'
            '<div class="hint"></div></div>'
        )

    def _token(self, piece: str, origin: str) -> str:
        text = escape(readable(piece)).replace("\n", '<i class="eol" data-say="↵"></i>\n')
        return f'<span class="tok"{_tint(self._palette.get(origin))}>{text}</span>'

    def _panel(self, step: Step) -> str:
        proposed = sum(map(len, step.drafts))
        times = ", ".join(f"{phase} {1e3 * took:.1f} ms" for phase, took in step.seconds.items())
        title = f"forward {step.forward}" if step.forward else "prefill"
        facts = (
            f"{title}: {proposed} nodes proposed, {len(step.tree)} verified, "
            f"{len(step.accepted)} accepted, {len(step.token_ids)} tokens; {times}"
        )
        return f'<span class="panel" data-say="{escape(facts)}">{self._tree(step)}</span>'

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
        before = self._call.generated(step.row)[: step.position]
        root = int((before if step.position else self._call.prompts[step.row])[-1])
        boxes = "".join(self._subtree(step, node, root, children) for node in children.get(-1, []))
        hidden = len(tree) - len(shown)
        more = f'<span data-say="and {hidden} less probable nodes"></span>' if hidden else ""
        return f'<span class="kids">{boxes}{more}</span>'

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
            f'title="{escape(named_by)}" data-say="{text}" data-prob="{prob}"></span>'
        )
        kids = f'<span class="kids">{inner}</span>' if inner else ""
        return f'<span class="sub">{box}{kids}</span>'
