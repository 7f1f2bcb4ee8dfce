"""Every block of Python in the documentation and the README runs, page by page."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_retrieval_assist.tools import demo_model

from .support.byte_model import small_model
from .support.parts import since

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks_of(page):
    return BLOCK.findall(page.read_text(encoding="utf-8"))


WITH_CODE = [page for page in PAGES if blocks_of(page)]


QUICK = ("README.md", "texts.md", "batches.md", "drafter.md")


def runs(page):
    """A page, as a parameter."""
    serves = "generate_batch(" in page.read_text(encoding="utf-8")
    marks = [since("5.20", "continuous batching")] if serves else []
    marks += [] if page.name in QUICK else [pytest.mark.slow]
    return pytest.param(page, id=page.name, marks=marks)


@pytest.mark.parametrize("page", map(runs, WITH_CODE))
def test_code_of_a_page_runs(page, monkeypatch, tmp_path, capsys):
    model, tokenizer = small_model()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    monkeypatch.setattr(demo_model, "load_demo_model", lambda *_, **__: (model, tokenizer))
    for auto, made in (("AutoModelForCausalLM", model), ("AutoTokenizer", tokenizer)):
        loader = SimpleNamespace(from_pretrained=lambda *_, made=made, **__: made)
        # The name, since transformers exchanges the module while a first model is made.
        monkeypatch.setattr(f"transformers.{auto}", loader)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"__name__": page.stem}
    for number, block in enumerate(blocks_of(page)):
        exec(compile(block, f"{page.name}, block {number + 1}", "exec"), names)
