"""The examples over trainers and harnesses, with a tiny model in the place of the demo model."""

import runpy
import sys
from pathlib import Path

import pytest

from hf_retrieval_assist.tools import demo_model

from .small_world import small_world

pytest.importorskip("trl")
pytest.importorskip("lm_eval")

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
RUNS = {
    "grpo": ["--steps", "2", "--samples", "4", "--tokens", "12"],
    "evaluate": ["--batch-size", "2", "--tokens", "8"],
}


@pytest.mark.parametrize("name", RUNS)
def test_example(name, monkeypatch, capsys):
    world = small_world(ALPHABET, max_position_embeddings=1024)
    monkeypatch.setattr(demo_model, "load_demo_model", lambda: world)
    monkeypatch.setattr(sys, "argv", [name, *RUNS[name]])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "plain" in shown
    assert "DIFFER" not in shown
    assert "tree" in shown
