"""Draws `docs/assets/cost.svg` from what the benchmarks measured: `python docs/pictures.py`."""

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


def draw_costs(path):
    matplotlib.use("Agg")
    # The same file from the same figures.
    matplotlib.rcParams |= {"svg.hashsalt": "cost", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for name, tokens, ratios in measured_curves():
        axis.plot(tokens, ratios, marker="o", markersize=3, label=f"CPU, two cores, {name}")
    tokens = list(range(1, 65))
    gpu = [1 + 0.003 * (n - 1) for n in tokens]
    axis.plot(tokens, gpu, "k--", label="a GPU, as the simulations assume it")
    axis.set(xlabel="tokens of a forward, n", ylabel="t(n) / t(1) of PyTorch's own", ylim=(0, None))
    axis.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    before, opened, after = path.read_text(encoding="utf-8").partition('version="1.1">')
    path.write_text(f"{before}{opened}{_DARK}{after}", encoding="utf-8")


if __name__ == "__main__":
    draw_costs(ROOT / "docs/assets/cost.svg")
