"""The demo, with a small random model in the place of the real one."""

import io
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from hf_retrieval_assist.policy.cost_store import CostModels
from hf_retrieval_assist.tools import demo_model
from hf_retrieval_assist.tools.cli import main, models
from hf_retrieval_assist.tools.demo import comparison, show
from hf_retrieval_assist.tools.demo.comparison import Run, Task, Written, compare
from tests.support.byte_model import small_model
from tests.support.fixed_costs import FixedCosts

SHORT = tuple(Task(task.title, task.prompt, 24, task.sampling) for task in comparison.TASKS)
CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def short_demo(monkeypatch, tmp_path):
    """The models of the package index are small ones, which have been unpacked already."""
    for name in demo_model.MODELS:
        model, tokenizer = small_model()
        if name == "smollm2":
            tokenizer.chat_template = CHAT
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    monkeypatch.setattr(demo_model, "converted_model", lambda name: tmp_path / name)
    monkeypatch.setattr(comparison, "TASKS", SHORT)
    monkeypatch.setattr(show.time, "sleep", lambda seconds: None)


@pytest.mark.parametrize("options", [[], ["--model", "smollm2"]])
def test_lines_where_output_is_no_terminal(options, capsys, tmp_path):
    assert main(["demo", *options]) == 0
    out = capsys.readouterr().out
    assert ("Gemma-3", "SmolLM2")[bool(options)] in out
    assert "\x1b" not in out
    for task in SHORT:
        assert f"{task.title}:" in out
    assert out.count("identical text") == len(SHORT)
    plain = [line for line in out.splitlines() if line.startswith("  plain")]
    assert len(plain) == len(SHORT)
    assert all(line.endswith("24 tokens in 24 forwards: the model 24") for line in plain)
    # A model with a chat template is given messages.
    name, shown = ("smollm2", "<user>one two") if options else ("gemma3", "one two")
    tokenizer = models.loaded(demo_model.AutoTokenizer, str(tmp_path / name))
    inputs = demo_model.prompt_inputs(tokenizer, "one two")
    assert tokenizer.decode(inputs["input_ids"][0]) == shown
    assert inputs["attention_mask"].shape == inputs["input_ids"].shape


def test_another_model_and_a_prompt_of_ones_own(tmp_path, capsys):
    path = str(tmp_path / "gemma3")
    assert main(["demo", "--model", path, "--prompt", "one two", "--max-new-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert "Gemma" not in out
    assert "your prompt" in out
    assert "8 tokens in 8 forwards: the model 8" in out


@pytest.mark.parametrize("gpu", [True, False])
def test_the_model_is_on_a_gpu_where_there_is_one(gpu, monkeypatch):
    devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, device: devices.append(device))
    monkeypatch.setattr(show, "show", lambda *arguments: None)
    monkeypatch.setattr(comparison, "compare", lambda *arguments: None)
    assert main(["demo"]) == 0
    assert main(["demo", "--device", "cpu"]) == 0
    assert devices == [("cpu", "cuda")[gpu], "cpu"]


def test_panels_on_a_terminal(monkeypatch):
    screen = io.StringIO()

    class Terminal(show.Console):
        def __init__(self, **options):
            super().__init__(
                file=screen, force_terminal=True, color_system="truecolor", width=100, height=30
            )

    monkeypatch.setattr(show, "Console", Terminal)
    show.show(*small_model(), FixedCosts(lambda n: 1.0), SHORT)
    shown = screen.getvalue()
    assert "plain generate" in shown
    assert shown.count("as fast, identical text") == len(SHORT)
    # Blue, the colour of drafts from the text.
    assert "48;2;0;114;178m" in shown


@pytest.mark.parametrize("task", SHORT)
def test_a_comparison_tells_of_every_token(task):
    plain, assisted = compare(*small_model(), task, CostModels())
    assert comparison.verdict(plain, assisted).endswith("identical text")
    for run in (plain, assisted):
        assert "".join(token.text for token in run.tokens) == "".join(t.text for t in plain.tokens)
        assert len(run.tokens) == 24
        assert [token.seconds for token in run.tokens] == sorted(t.seconds for t in run.tokens)
    assert assisted.forwards <= plain.forwards == 24


def two_runs():
    ids = torch.arange(4)
    plain = [Written(1.0 + i, text, "the model") for i, text in enumerate(["<a>", "&\n", "x" * 60])]
    assisted = [Written(1.0, "<a>", "the model"), Written(1.5, "&\n", "text")]
    assisted.append(Written(1.5, "x" * 60, "text"))
    return Run(plain, ids, 3), Run(assisted, ids, 2)


def test_a_different_text_is_said_and_a_run_is_replayed_as_it_went():
    plain, assisted = two_runs()
    assert [len(run.until(1.7).tokens) for run in (plain, assisted)] == [1, 3]
    assert plain.until(plain.seconds).tokens == plain.tokens
    assisted.ids = torch.arange(1, 5)
    assert comparison.verdict(plain, assisted) == "2.0 times as fast, ANOTHER TEXT"


def test_the_picture_is_one_document_with_every_token_at_its_time(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    from demo_picture import animation

    root = ElementTree.fromstring(animation(SHORT[0], *two_runs()))
    text = "".join(root.itertext())
    assert text.count("<a>") == 2
    assert text.count("x" * 54) == 2
    assert "2.0 times as fast, identical text" in text
    # Nothing from the network, nothing that runs.
    assert not {"script", "image", "use"} & {element.tag.split("}")[1] for element in root.iter()}
    animated = [element for element in root.iter() if element.get("keyTimes")]
    # Four seconds of the finished picture, then the slower run.
    assert {element.get("dur") for element in animated} == {"7.00s"}
    for element in animated:
        times = list(map(float, element.get("keyTimes").split(";")))
        values = element.get("values").split(";")
        assert len(times) == len(values)
        assert times == sorted(times)
        assert times[-1] <= 1
        # What is shown at the end is shown at first.
        assert values[0] == values[-1]
