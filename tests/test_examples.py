"""Examples run as a user runs them, with a small random model in the place of the real one."""

import functools
import json
import runpy
from pathlib import Path

import pytest
import torch

import hf_retrieval_assist
from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.tools import demo_model

from .support.byte_model import small_model

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True, params=["gemma3", "smollm2"])
def small_demo_model(request, monkeypatch):
    """A base model in float32, and one with a chat template in bfloat16."""
    model, tokenizer = small_model()
    if request.param == "smollm2":
        model = model.to(torch.bfloat16)
        tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    monkeypatch.setattr(demo_model, "load_demo_model", lambda *_: (model, tokenizer))


SCRIPTS = dict.fromkeys(("script", "pipeline", "chat"), "tokens")
SCRIPTS["candidate_generator"] = "same tokens: True"


@pytest.mark.parametrize("name", SCRIPTS)
def test_example(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert SCRIPTS[name] in capsys.readouterr().out


COMPARE = pytest.param("compare", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["explore", COMPARE, "structured"])
def test_notebook(name, monkeypatch, capsys):
    if name == "structured":
        pytest.importorskip("xgrammar", reason="make test-structured")
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert not any(cell.get("outputs") for cell in notebook["cells"])  # they would grow old
    # Whether drafts pay on a model this small depends on the machine.
    drafting = functools.partial(SamAssistant, budget=8)
    if name == "explore":
        monkeypatch.setattr(hf_retrieval_assist, "SamAssistant", drafting)
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    if name == "explore":
        assert names["record"].calls[0].generated(0).tolist() == names["output"][0, -128:].tolist()
        assert any(len(step.tree) for step in names["record"].steps)
    elif name == "structured":
        for record in (names["record"], names["unconstrained"]):
            assert record.by_origin()["grammar"][1] > 0
        assert torch.equal(names["output"], names["constrained"]())
    else:
        assert len(names["suggestion"].best.identical) == len(names["prompts"])
        assert names["suggestion"].best.name in capsys.readouterr().out
