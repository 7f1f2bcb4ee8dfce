"""Every block of Python in the documentation and the README runs, page by page."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import hf_retrieval_assist
from hf_retrieval_assist import demo_model

from .test_examples import small_model

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks_of(page):
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.name
)
def test_code_of_a_page_runs(page, monkeypatch, tmp_path, capsys):
    model, tokenizer = small_model()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    monkeypatch.setattr(demo_model, "load_demo_model", lambda *_: (model, tokenizer))
    for auto, made in (("AutoModelForCausalLM", model), ("AutoTokenizer", tokenizer)):
        loader = SimpleNamespace(from_pretrained=lambda *_, made=made, **__: made)
        monkeypatch.setattr(transformers, auto, loader)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"__name__": page.stem}
    for number, block in enumerate(blocks_of(page)):
        exec(compile(block, f"{page.name}, block {number + 1}", "exec"), names)


def test_the_pages_of_the_site_have_code():
    assert sum(bool(blocks_of(page)) for page in PAGES) >= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


# Turns of phrase that readers stumbled over, and what to write instead.
STUMBLES = {
    r"\b(?:is|are) (?:not )?asked\b": "say who does what: the drafter drafts, the loop calls",
    r"\b(?:is|are) heard\b": "a context counts, or speaks for a token",
    r"\bestimate stands\b": "a node keeps an estimate",
    r"\bgoes? on as on\b": "is served as on",
    r"\bis the price of\b": "the time of",
    r"\brests? from\b": "a call is decoded plainly; a drafter is left alone",
    r"\bsee(?:n)? nothing before\b": "a new assistant",
    r"\b(?:nothing|none) of ours\b": "this package",
}
PUBLIC = {name: getattr(hf_retrieval_assist, name) for name in hf_retrieval_assist.__all__}


@pytest.mark.parametrize("where", [*PAGES, *PUBLIC])
def test_sentences_say_who_does_what(where):
    text = where.read_text(encoding="utf-8") if isinstance(where, Path) else PUBLIC[where].__doc__
    text = re.sub(r"## What it brings.*?(?=\n## )", "", text or "", flags=re.DOTALL)  # figures
    for phrase, instead in STUMBLES.items():
        found = re.search(phrase, " ".join(text.split()))
        assert found is None, f"{found[0]!r}: {instead}"
