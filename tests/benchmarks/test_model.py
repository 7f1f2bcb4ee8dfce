"""The benchmark on a real model, on a small random one; timings are not looked at."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import llama_engine, model, tables, timing
from benchmarks.__main__ import parse
from benchmarks.inputs import Prompt, first_of_each, read_prompts
from benchmarks.methods import Run
from tests.support.rounding import near

from ..support.benchmarks import quick, silent
from ..support.byte_model import small_model

NAMES = ["plain", "prompt lookup", "prompt lookup in reroute", "kernels"]
NAMES += ["+ copies", "+ recordings", "+ drafts", "+ drafts, a dozen before"]


@pytest.fixture
def small(monkeypatch):
    """A quick run on a small model, which leaves the user's choices of kernels alone."""
    monkeypatch.setattr(model, "load", lambda arguments: small_model())
    monkeypatch.setattr(model, "forget_choices", lambda: pytest.fail("in a quick run"))


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
    page = (tables.RESULTS.parent / "README.md").read_text(encoding="utf-8")
    (markers,) = re.findall(r"```markdown\n(.*?)```", page, re.DOTALL)
    markers = markers.replace("model-smollm2-bfloat16", "model-small-float32")
    shown = tables.render(markers, tmp_path)
    assert shown.count("| + copies |") == 2
    assert re.search(r"at temperature 1 <!--.*?-->\d+\.\d\d<!-- end -->", shown)


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
    seconds, results = timing.alternate(calls, 3, silent)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert results == {"a": 5, "b": 6}
    assert seconds.keys() == {"a", "b"}
    order.clear()
    calls = {name: lambda prompt, name=name: order.append(name) for name in "abc"}
    begun = []
    model.take_turns(["p", "q"], calls, 2, silent, lambda: begun.append(len(order)))
    assert "".join(order) == "abcbcabcacab"
    assert begun == [0, 6]


def test_an_assistant_has_answered_the_prompts_before_and_is_new_in_every_repeat():
    loaded, tokenizer = small_model()
    before = [Prompt("", "", text) for text in ("one two", "three four", "five")]
    compared = model.Compared(loaded, tokenizer, before, {"max_new_tokens": 2}, 0)
    known = []
    for _ in range(2):
        compared.begin()
        known.append(compared._known)
        assert known[-1].stats.total.calls == 3
    assert known[0] is not known[1]
    compared.calls[NAMES[-1]](before[0])
    compared.calls["+ drafts"](before[0])
    assert known[1].stats.total.calls == 4


def test_a_busy_machine_is_waited_for_and_its_choices_are_forgotten(monkeypatch, tmp_path):
    loads = iter([3.0, 0.9, 0.4])
    monkeypatch.setattr(model.os, "getloadavg", lambda: (next(loads), 0, 0))
    monkeypatch.setattr(model.time, "sleep", lambda seconds: None)
    said = []
    model.await_quiet(60, said.append)
    assert [text.split()[3] for text in said] == ["3.00:", "0.90:"]
    monkeypatch.setattr(model.os, "getloadavg", lambda: (2.0, 0, 0))
    monkeypatch.setattr(model, "PATIENCE", 0)
    with pytest.raises(SystemExit, match=r"load of at most 0\.5, got 2\.00"):
        model.run(parse(["model"]), silent)
    monkeypatch.setattr(model, "tuning_file", lambda kind: tmp_path / kind)
    for name in ("linear", "other"):
        (tmp_path / name).write_text("{}")
    model.forget_choices()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_methods_of_llama_cpp_take_turns_with_ours():
    """An engine writes what the model writes."""
    loaded, tokenizer = small_model()
    loaded.generation_config.eos_token_id = 0
    options = {"max_new_tokens": 6, "do_sample": False}

    def generate(ids, new_tokens, ends, drafts):
        assert (new_tokens, ends) == (6, {0})
        ids = torch.tensor([ids])
        text = loaded.generate(ids, attention_mask=torch.ones_like(ids), **options)
        new = text[:, ids.shape[1] :]
        return Run(new.numel(), 3 if drafts else 6, 1.0, new, None, {})

    engine = SimpleNamespace(generate=generate)
    calls = llama_engine.calls_of(engine, loaded, tokenizer, 6)
    turns = model.take_turns(first_of_each(read_prompts(), 1)[:1], calls, 1, silent)
    found = {name: model.summary(turns, name) for name in calls}
    assert {row["same"] for row in found.values()} == {"1 of 1"}
    assert found["llama.cpp, prompt lookup"]["per_forward"] == 2
