"""The demo, with a small random model in the place of the real one."""

from __future__ import annotations

import io
import sys
from xml.etree import ElementTree

import pytest
import torch

from hf_retrieval_assist import demo_model
from hf_retrieval_assist.cli import main
from hf_retrieval_assist.demo import comparison, show
from hf_retrieval_assist.demo.comparison import Comparison, Run, Task, Written, compare
from hf_retrieval_assist.demo.picture import animation
from hf_retrieval_assist.planning.cost_store import CostModels

from ..support.fixed_costs import FixedCosts
from ..test_examples import small_model

SHORT = tuple(Task(task.title, task.file, 24, task.sampling) for task in comparison.TASKS)


@pytest.fixture(autouse=True)
def short_demo(monkeypatch):
    monkeypatch.setattr(demo_model, "load_demo_model", lambda *_: small_model())
    monkeypatch.setattr(comparison, "TASKS", SHORT)
    monkeypatch.setattr(show.time, "sleep", lambda seconds: None)


def test_lines_where_output_is_no_terminal(capsys):
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for task in SHORT:
        assert f"{task.title}:" in out
    assert out.count("identical text") == len(SHORT)
    plain = [line for line in out.splitlines() if line.startswith("  plain")]
    assert len(plain) == len(SHORT)
    assert all(line.endswith("24 tokens in 24 forwards: the model 24") for line in plain)
    # The table at the end.
    assert [line.split()[-1] for line in out.splitlines()[-4:]] == ["yes"] * 4


def test_another_model_and_a_prompt_of_ones_own(tmp_path, capsys):
    model, tokenizer = small_model()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    command = ["demo", "--model", str(tmp_path), "--prompt", "one two", "--max-new-tokens", "8"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "Gemma" not in out
    assert "8 tokens in 8 forwards: the model 8" in out


def test_a_run_is_replayed_as_it_went():
    found = a_comparison()
    halves = [len(run.until(1.7).tokens) for run in (found.plain, found.assisted)]
    assert halves == [1, 3]
    assert found.plain.until(found.plain.seconds).tokens == found.plain.tokens


def test_medians(capsys):
    assert main(["demo", "--measure", "--repeats", "2"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()[-5:]
    assert heading.split()[-1] == "identical"
    assert [row.split()[-1] for row in rows] == ["yes"] * 4


def test_panels_on_a_terminal(monkeypatch):
    rich_console = pytest.importorskip("rich.console")
    screen = io.StringIO()

    class Terminal(rich_console.Console):
        def __init__(self, **options):
            super().__init__(
                file=screen, force_terminal=True, color_system="truecolor", width=100, height=30
            )

    monkeypatch.setattr(rich_console, "Console", Terminal)
    model, tokenizer = small_model()
    found = show.show(model, tokenizer, FixedCosts(lambda n: 1.0), SHORT)
    shown = screen.getvalue()
    assert "plain generate" in shown
    assert shown.count("as fast, identical text") == len(found) == 4
    # Blue, the colour of drafts from the text.
    assert "48;2;0;114;178m" in shown


def test_without_rich_the_demo_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["demo"]) == 1
    assert "hf-retrieval-assist[demo]" in capsys.readouterr().err


@pytest.mark.parametrize("task", SHORT)
def test_a_comparison_tells_of_every_token(task):
    model, tokenizer = small_model()
    seen = []
    found = compare(model, tokenizer, task, CostModels(), lambda run: seen.append(len(run.tokens)))
    assert found.identical
    texts = ["".join(token.text for token in run.tokens) for run in (found.plain, found.assisted)]
    assert texts[0] == texts[1]
    for run in (found.plain, found.assisted):
        assert len(run.tokens) == 24
        assert [token.seconds for token in run.tokens] == sorted(t.seconds for t in run.tokens)
    assert found.plain.forwards == 24
    assert len(seen) == found.plain.forwards + found.assisted.forwards


def a_comparison():
    ids = torch.arange(4)
    plain = [Written(1.0 + i, text, "the model") for i, text in enumerate(["<a>", "&\n", "x" * 60])]
    assisted = [Written(1.0, "<a>", "the model"), Written(1.5, "&\n", "text")]
    assisted.append(Written(1.5, "x" * 60, "text"))
    return Comparison(
        comparison.TASKS[0],
        Run(assisted=False, tokens=plain, ids=ids, forwards=3),
        Run(assisted=True, tokens=assisted, ids=ids, forwards=2),
    )


def test_the_picture_is_one_document_with_every_token_at_its_time():
    found = a_comparison()
    assert found.ratio == 2
    root = ElementTree.fromstring(animation(found))
    text = "".join(root.itertext())
    assert "<a>" in text
    assert text.count("x") == 2 * 60 + text.replace("x" * 54, "").replace("x" * 6, "").count("x")
    assert "2.0 times as fast, identical text" in text
    # Nothing from the network, nothing that runs.
    assert not {"script", "image", "use"} & {element.tag.split("}")[1] for element in root.iter()}
    durations = {e.get("dur") for e in root.iter() if e.tag.endswith("animate")}
    assert durations == {"7.00s"}
    for element in root.iter():
        if times := element.get("keyTimes"):
            assert len(times.split(";")) == len(element.get("values").split(";"))
            assert [float(t) for t in times.split(";")] == sorted(map(float, times.split(";")))
