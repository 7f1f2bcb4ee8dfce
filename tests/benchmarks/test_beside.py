"""The benchmark beside what users could choose instead, on a small random model."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import beside
from benchmarks.methods import Run
from benchmarks.report import Report
from tests.support.rounding import near

from ..support.benchmarks import quick, rows, silent
from ..support.byte_model import small_model

pytestmark = pytest.mark.slow

OURS = ["plain", "static cache, compiled", "prompt lookup", "kernels", "no drafts", "SamAssistant"]
THEIRS = ["llama.cpp, bfloat16", "llama.cpp, Q8_0"]


@pytest.fixture
def small(monkeypatch):
    """A small model, whose texts would end at their first tokens if they were let."""
    model, tokenizer = small_model()
    model.generation_config.eos_token_id = list(range(model.config.vocab_size))
    monkeypatch.setattr(beside, "load", lambda arguments: (model, tokenizer))
    return model


def engine_of(model, nbytes):
    """An engine that writes what the model writes, in a second, half of it for the prompt."""

    def generate(ids, new_tokens):
        ids = torch.tensor([ids])
        options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        text = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        new = text[:, ids.shape[1] :]
        return Run(new.numel(), new.numel(), 1.0, new, None, {"prefill": 0.5})

    return SimpleNamespace(generate=generate, nbytes=nbytes)


def test_every_way_takes_turns_and_says_where_its_time_goes(small, tmp_path, monkeypatch):
    theirs = {"bfloat16": engine_of(small, 2000), "Q8_0": engine_of(small, 1000)}
    monkeypatch.setattr(beside, "engines", lambda *given: theirs)
    monkeypatch.setattr(beside, "read_bandwidth", lambda *given: 1e6)
    report = beside.run(quick("--llama", tmp_path, "--output", tmp_path), silent)
    assert [path.name for path in tmp_path.iterdir()] == ["beside.json"]
    assert not report.notes
    whole = rows(report, "Unseen prompts")
    assert [row["method"] for row in whole] == [*OURS, *THEIRS, *OURS]
    for row in whole:
        if row["decoding"] == "greedy":
            assert row["same"] == row["same_as_kernels"] == "2 of 2"
            assert row["Q8_0"] == row["bfloat16"] == near(row["rate"] / 8)
    assert len(rows(report, "By kind of prompt")) == 2 * len(whole)
    times = {row["method"]: row for row in rows(report, "Where a token's time goes")}
    assert [*times] == [*OURS[:1], *OURS[3:], *THEIRS]
    for row in times.values():
        assert row["total"] == near(
            sum(row[part] for part in ("prompt", "read", "rest", "draft", "host"))
        )
        assert row["prompt"] > 0
    assert all(times[name]["host"] > 0 for name in ("plain", "kernels"))
    # 7 forwards behind the prompt's read 1,000 bytes each for 8 tokens.
    found = [times["llama.cpp, Q8_0"][part] for part in ("prompt", "read", "total", "host")]
    assert found == near([62.5, 7 / 8, 125, 0])


def test_what_calls_consist_of():
    phases = {"test": 1, "prefill": 2, "forward": 10, "draft": 3, "walk": 1, "cache": 1, "pack": 1}
    ours = [Run(8, 6, 20.0, torch.zeros(1, 8), 4, phases)] * 2
    found = beside.spent(ours, 1.5)
    expected = {"prompt": 500, "read": 1.5 * 5000 / 8, "rest": 2.5 * 1000 / 8, "draft": 375}
    assert found == near(expected | {"host": 375, "total": 2500})


def test_what_cannot_run_is_left_out_with_its_reason(small):
    def fails(prompt):
        raise RuntimeError("no compiler")

    report, said = Report("beside", {}), []
    able = beside.warmed_up({"a": said.append, "b": fails}, report, silent)
    assert [*able] == ["a"]
    assert len(said) == 2
    assert report.notes == ["left out: b: RuntimeError: no compiler"]
