"""Draws the diagrams of `docs/assets`, some from what was measured: `python docs/pictures.py`.

All are 400 units wide and their smallest text is 13, so that it is legible on a telephone.
"""

import json
from pathlib import Path

import matplotlib

ROOT = Path(__file__).parent.parent


def measured_curves():
    """(name, n, t(n) / PyTorch's t(1)) for each way of computing a forward that was measured."""
    report = json.loads((ROOT / "benchmarks/results/forwards.json").read_text(encoding="utf-8"))
    rows = report["tables"][0]["rows"]
    for name in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == name]
        yield name, [row["tokens"] for row in mine], [row["ms"] / rows[0]["ms"] for row in mine]


# Readers of a dark page see dark diagrams, whose hues stay.
_DARK = (
    "<style>@media (prefers-color-scheme:dark){svg{filter:invert(.88) hue-rotate(180deg)}}</style>"
)


def _save(figure, path):
    figure.savefig(path, metadata={"Date": None})
    before, opened, after = path.read_text(encoding="utf-8").partition('version="1.1">')
    path.write_text(f"{before}{opened}{_DARK}{after}", encoding="utf-8")


COLOURS = {"float32": "#0072b2", "bfloat16": "#d55e00"}


def draw_costs(path):
    matplotlib.use("Agg")
    # The same file from the same figures.
    matplotlib.rcParams |= {"svg.hashsalt": "cost", "svg.fonttype": "none", "font.size": 13}
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(400 / 72, 380 / 72), layout="constrained")
    for name, tokens, ratios in measured_curves():
        style = ":" if name.endswith("PyTorch's") else "-"
        look = {"color": COLOURS[name.partition(",")[0]], "linestyle": style, "marker": "o"}
        axis.plot(tokens, ratios, markersize=4, label=f"CPU, two cores, {name}", **look)
    tokens = list(range(1, 65))
    gpu = [1 + 0.003 * (n - 1) for n in tokens]
    axis.plot(tokens, gpu, "k--", label="a GPU, as the simulations assume it")
    axis.set(xlabel="tokens of a forward, n", ylabel="t(n) / t(1) of PyTorch's own", ylim=(0, None))
    figure.legend(loc="outside lower center", frameon=False)
    _save(figure, path)


_INK, _LINE, _FAINT, _STRONG, _MARKED = "#111", "#555", "#eee", "#0072b2", "#cfe4f2"


def _write(path, height, drawn):
    """An SVG of what is drawn, on a ground of its own."""
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 {height}" width="500" '
        f'font-family="system-ui,sans-serif" font-size="13" fill="{_INK}">{_DARK}'
        '<rect width="100%" height="100%" rx="8" fill="#fbfbfd"/><defs>'
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{_LINE}"/></marker></defs>'
    )
    path.write_text(f"{start}{''.join(drawn)}</svg>\n", encoding="utf-8")


def _box(x, y, width, height, fill, stroke=_LINE):
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" '
        f'stroke="{stroke}"/>'
    )


def _text(x, y, words, anchor="middle", more=""):
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{more}>{words}</text>'


_TITLE = ' font-size="15" font-weight="600"'


def _arrow(x, y, to_x, to_y):
    return (
        f'<path d="M{x} {y} L{to_x} {to_y}" stroke="{_LINE}" stroke-width="1.5" fill="none" '
        'marker-end="url(#tip)"/>'
    )


# The stages of a step, what each does in two lines, its colour, and its place in a ring.
_STAGES = (
    ("1 propose", "drafters name", "a tree of tokens", _MARKED, (0, 0)),
    ("2 plan", "keep the nodes", "that pay at t(n)", "#e8e8f4", (1, 0)),
    ("3 verify", "one forward over", "root and nodes", "#f7e3c0", (1, 1)),
    ("4 walk", "choose tokens as", "plain decoding does", "#d3ecdf", (1, 2)),
    ("5 keep", "the cache holds the", "accepted path alone", "#f3dbe8", (0, 2)),
    ("6 learn", "what was right, and", "what the forward took", _FAINT, (0, 1)),
)


def draw_loop(path):
    width, height, gap = 178, 76, 28
    drawn, centres = [], []
    for name, first, second, fill, (column, row) in _STAGES:
        left, top = 8 + column * (width + gap), 8 + row * (height + gap)
        x, y = left + width / 2, top + height / 2
        drawn += [_box(left, top, width, height, fill), _text(x, y - 14, name, more=_TITLE)]
        drawn += [_text(x, y + 6, first), _text(x, y + 24, second)]
        centres.append((x, y, column, row))
    for (x, y, column, row), (to_x, to_y, *to) in zip(
        centres, centres[1:] + centres[:1], strict=True
    ):
        right = (to[0] - column) * (width / 2 + 2)
        down = (to[1] - row) * (height / 2 + 2)
        drawn.append(_arrow(x + right, y + down, to_x - right, to_y - down))
    _write(path, 16 + 3 * height + 2 * gap, drawn)


# A node's word, its parent and its place; whether the model chose it.
_NODES = {
    "the": ("on", (0, 0), True),
    "cat": ("the", (1, -1), True),
    "dog": ("the", (1, 1), False),
    "sat": ("cat", (2, -1), True),
    "ran": ("dog", (2, 1), False),
}


def draw_tree(path):
    drawn = [_text(12, 28, "the draft", "start", _TITLE), _text(12, 113, "… on", "start")]
    places = {"on": (44, 108)}
    for word, (parent, (depth, side), chosen) in _NODES.items():
        x, y = places[word] = 108 + 116 * depth, 108 + 46 * side
        from_x, from_y = places[parent]
        drawn.append(_arrow(from_x + (30 if parent != "on" else 6), from_y, x - 31, y))
        drawn.append(_box(x - 29, y - 17, 58, 34, _MARKED if chosen else _FAINT))
        drawn.append(_text(x, y + 5, word))
    drawn += [_text(108 + 116 * depth, 202, f"depth {depth + 1}") for depth in range(3)]
    drawn.append(_text(12, 244, "the mask", "start", _TITLE))
    words, size = ["text", "on", *_NODES], 38
    for column, word in enumerate(words):
        drawn.append(_text(104 + 44 * column, 270, word))
    for row, word in enumerate(words[1:]):
        y = 280 + row * (size + 4)
        seen, ancestor = {"text", "on"}, word
        while ancestor in _NODES:
            seen.add(ancestor)
            ancestor = _NODES[ancestor][0]
        drawn.append(_text(76, y + size / 2 + 5, f"{word} sees", "end"))
        for column, other in enumerate(words):
            fill = _STRONG if other in seen else _FAINT
            drawn.append(_box(85 + 44 * column, y, 38, size, fill, "none"))
    _write(path, 288 + 6 * (size + 4), drawn)


if __name__ == "__main__":
    draw_loop(ROOT / "docs/assets/loop.svg")
    draw_tree(ROOT / "docs/assets/tree.svg")
    draw_costs(ROOT / "docs/assets/cost.svg")
