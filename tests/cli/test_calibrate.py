"""The command that measures t(n): what it prints, keeps and draws."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_retrieval_assist.cli import main
from hf_retrieval_assist.cost_measurement import measure_cost
from hf_retrieval_assist.decoding.loop import cost_key
from hf_retrieval_assist.planning.cost_store import CostModels
from tests.support.tiny_models import tiny_config, tiny_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model(
        LlamaForCausalLM, tiny_config(LlamaConfig, max_position_embeddings=1024)
    ).save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of the user's cache."""
    monkeypatch.setattr(CostModels, "user_directory", staticmethod(lambda: tmp_path / "cost"))
    return tmp_path / "cost"


def table(text: str) -> dict[int, tuple[float, float]]:
    rows = re.findall(r"^ *(\d+) +([\d.]+) +([\d.]+)$", text, re.MULTILINE)
    return {int(n): (float(ms), float(ratio)) for n, ms, ratio in rows}


def test_prints_and_keeps_what_it_measured(model_path, directory, capsys):
    assert main(["calibrate", model_path, "--max-tokens", "8", "--cache-length", "128"]) == 0
    printed = capsys.readouterr().out
    rows = table(printed)
    assert list(rows) == [1, 2, 3, 4, 6, 8]
    assert rows[1][1] == 1
    assert [*rows.values()] == sorted(rows.values())
    assert "Cheapest per token: n = " in printed
    assert f"Saved in {directory}" in printed
    model = AutoModelForCausalLM.from_pretrained(model_path)
    kept = CostModels(directory).get(cost_key(model, model.dummy_inputs["input_ids"][:1], 128))
    assert kept.observations > 60
    assert 1e3 * kept.seconds(8) == pytest.approx(rows[8][0], abs=1e-3)


def test_every_size_is_fed_to_every_row(model_path):
    model = AutoModelForCausalLM.from_pretrained(model_path)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    fed = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    costs = CostModels()
    cost = measure_cost(model, [1, 3, 7], costs, batch_size=2, cache_length=100)
    for size in (1, 3, 7):
        assert fed.count((2, size)) >= 12
    prompt = model.dummy_inputs["input_ids"][:2]
    assert costs.get(cost_key(model, prompt, 100)) is cost
    single = replace(cost_key(model, prompt, 100), batch_size=1)
    assert costs.get(single) is not cost


def test_draws_the_curve(model_path, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "curve.svg"
    options = ["--max-tokens", "2", "--cache-length", "64", "--plot", str(plot)]
    assert main(["calibrate", model_path, *options]) == 0
    assert "<svg" in plot.read_text()


def test_a_plot_without_the_extra_names_it(model_path, directory, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["calibrate", model_path, "--plot", "curve.svg"]) == 1
    assert "hf-retrieval-assist[plot]" in capsys.readouterr().err
    assert not directory.exists()


@pytest.mark.parametrize("option", ["--batch-size", "--cache-length", "--max-tokens"])
def test_sizes_are_at_least_one(option, model_path, capsys):
    with pytest.raises(SystemExit):
        main(["calibrate", model_path, option, "0"])
    assert "expected a number of at least 1, got 0" in capsys.readouterr().err
