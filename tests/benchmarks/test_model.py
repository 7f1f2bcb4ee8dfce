"""The benchmark on a real model, on a small random one; timings are not looked at."""

import json

import pytest
import torch

from benchmarks import inputs, model, timing
from benchmarks.inputs import Prompt
from benchmarks.methods import Run
from tests.support.rounding import near

from ..support.benchmarks import quick, silent
from ..support.byte_model import small_model
from ..support.lossless import PROMPT, build

pytestmark = pytest.mark.slow

NAMES = ["plain", "prompt lookup", "prompt lookup in reroute", "kernels"]
NAMES += ["+ recordings", "+ copies", "+ drafts", "+ drafts, a dozen before"]


@pytest.fixture
def small(monkeypatch):
    """A quick run on a small model, which leaves the user's choices of kernels alone."""
    monkeypatch.setattr(model, "load", lambda arguments: small_model())


def test_a_file_for_a_model_and_a_dtype_after_each_way_of_decoding(small, tmp_path, monkeypatch):
    written = []
    fill = model.fill
    monkeypatch.setattr(
        model, "fill", lambda *given: written.append(len(list(tmp_path.iterdir()))) or fill(*given)
    )
    report = model.run(quick("--output", tmp_path, "--model", "small"), silent)
    assert written == [0, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["model-small-float32.json"]
    saved = json.loads((tmp_path / "model-small-float32.json").read_text())
    assert saved["settings"].items() >= {"model": "small", "dtype": "float32"}.items()
    whole, kinds = report.tables
    assert [row["method"] for row in whole.rows] == 3 * NAMES
    assert {row["decoding"] for row in whole.rows} == model.DECODINGS.keys()
    for row in whole.rows:
        assert row["rate"] > 0
        if "lookup" not in row["method"] or row["decoding"] == "greedy":
            assert (row["same"], row["same_as_kernels"]) == ("2 of 2", "2 of 2")
    greedy = {row["method"]: row for row in whole.rows[: len(NAMES)]}
    assert greedy["plain"]["plain"] == greedy["plain"]["worst"] == 1
    assert greedy["kernels"]["kernels"] == greedy["kernels"]["worst_kind"] == 1
    for name in ("plain", "kernels", "+ copies", "+ recordings"):
        assert greedy[name]["per_forward"] == 1
    assert [greedy[name]["nodes"] for name in NAMES[:6]] == [None] * 4 + [0, 0]
    assert len(kinds.rows) == 3 * len(NAMES) * len({row["kind"] for row in kinds.rows})


def run_of(seconds, tokens=4, forwards=4, ids=(1, 2, 3, 4), nodes=None):
    return Run(tokens, forwards, seconds, torch.tensor([ids]), nodes, {})


def test_figures_are_medians_and_geometric_means():
    """Ratios of speeds, since texts may differ in their lengths."""
    turns = [
        model.Turns(
            Prompt(kind, "", ""),
            {
                "plain": [run_of(4.0), run_of(400.0), run_of(4.0)],
                "kernels": [run_of(2.0)] * 3,
                "+ drafts": [run_of(seconds, 8, 2, ids=range(8), nodes=6)] * 3,
            },
        )
        for kind, seconds in (("a", 4.0), ("b", 1.0), ("b", 4.0))
    ]
    found = model.summary(turns, "+ drafts")
    assert found["plain"] == near((2 * 8 * 2) ** (1 / 3))
    assert found["kernels"] == near((1 * 4 * 1) ** (1 / 3))
    assert (found["worst"], found["worst_of_kernels"], found["worst_kind"]) == (2, 1, 1)
    assert (found["rate"], found["per_forward"], found["nodes"]) == (24 / 9, 4, 3)
    assert found["same"] == found["same_as_kernels"] == "0 of 3"
    assert model.summary(turns, "kernels")["same"] == "3 of 3"
    assert dict(model.by_kind(turns, "+ drafts", "kernels")) == {"a": [1], "b": [4, 1]}


def test_methods_take_turns_from_another_first():
    order = []
    calls = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    timing.alternate(calls, 3, silent)
    assert order == ["a", "b", "b", "a", "a", "b"]
    order.clear()
    calls = {name: lambda prompt, name=name: order.append(name) for name in "abc"}
    model.take_turns(["p", "q"], calls, 2, silent, lambda: None)
    assert "".join(order) == "abcbcabcacab"


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_a_model_whose_columns_are_shifted_computes_the_same(kind):
    """All that is read of a hidden state, or of neurons, is moved with it."""
    model = build(kind, tie_word_embeddings=kind[0] == "G")
    with torch.no_grad():
        expected, before = model(PROMPT).logits, model.lm_head.weight.clone()
        inputs.shift(model)
        assert torch.equal(model.lm_head.weight, before.roll(inputs.SHIFT, 1))
        torch.testing.assert_close(model(PROMPT).logits, expected, rtol=1e-4, atol=1e-4)
