"""The demo, with a small random model in the place of the real one."""

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.policy.cost_store import CostModels
from hf_retrieval_assist.tools import demo_model
from hf_retrieval_assist.tools.cli import main, models
from hf_retrieval_assist.tools.demo import comparison, show
from hf_retrieval_assist.tools.demo.comparison import Run, Task, Written, compare, verdict, write
from tests.support.byte_model import small_model
from tests.support.fixed_costs import FixedCosts
from tests.support.parts import needs

ROOT = Path(__file__).parents[2]
TASKS = comparison.TASKS
SHORT = tuple(Task(task.title, task.prompt[-200:], 24, task.sampling) for task in TASKS)
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
    monkeypatch.setattr(show, "_FRAMES", float("inf"))


@pytest.mark.parametrize("options", [[], ["--model", "smollm2"]])
def test_lines_where_output_is_no_terminal(options, capsys, tmp_path):
    assert main(["demo", *options]) == 0
    out = capsys.readouterr().out
    assert ("Gemma-3", "SmolLM2")[bool(options)] in out
    assert "\x1b" not in out
    for task in SHORT:
        assert f"{task.title}, 24 tokens" in out
    assert out.count("identical text") == len(SHORT)
    assert out.count("plain generate: 24 tokens in 24 forwards: the model 24") == len(SHORT)
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


def test_panels_on_a_terminal(monkeypatch):
    screen, size = io.StringIO(), {"width": 100, "height": 30, "color_system": "truecolor"}
    monkeypatch.setattr(show, "Console", partial(Console, file=screen, force_terminal=True, **size))
    show.show(*small_model(), FixedCosts(lambda n: 1.0), SHORT)
    shown = screen.getvalue()
    assert shown.count("as fast, identical text") == len(SHORT)
    # Blue, the colour of drafts from the text.
    assert "48;2;0;114;178m" in shown


def test_what_showing_takes_is_no_time_of_the_runs(monkeypatch):
    now = [0.0]

    def shown(plain, assisted):
        now[0] += 100

    monkeypatch.setattr(comparison, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for run in compare(*small_model(), SHORT[0], CostModels(), shown):
        assert {token.seconds for token in run.tokens} == {0.0}
    assert now[0] > 2500


@pytest.mark.parametrize("task", SHORT)
def test_a_comparison_tells_of_every_token(task):
    model, tokenizer = small_model()
    plain, assisted = compare(model, tokenizer, task, CostModels())
    said, is_bug = verdict(model, tokenizer, task, plain, assisted)
    assert said.endswith("as fast, identical text")
    assert not is_bug
    for run in (plain, assisted):
        assert "".join(token.text for token in run.tokens) == "".join(t.text for t in plain.tokens)
        assert len(run.tokens) == 24
        assert [token.seconds for token in run.tokens] == sorted(t.seconds for t in run.tokens)
    assert assisted.forwards <= plain.forwards == 24


@pytest.fixture
def written(monkeypatch):
    """Writes a task by plain `generate`: what `verdict` takes, and the calls that followed."""
    calls = []

    def make(dtype, task=SHORT[0]):
        model, tokenizer = small_model()
        model.to(dtype)
        plain = write(model, tokenizer, task)
        generate = model.generate
        monkeypatch.setattr(
            model, "generate", lambda **options: calls.append(options) or generate(**options)
        )
        return model, tokenizer, task, plain

    return make, calls


def other(run, token):
    """The same run with another token at a place, counted from 1."""
    return replace(run, ids=[run_id + (i == token) for i, run_id in enumerate(run.ids, 1)])


@needs("engines/cpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("task", SHORT[1:3])
def test_in_half_precision_the_text_of_the_kernels_is_the_one_promised(written, dtype, task):
    make, calls = written
    *given, _ = make(dtype, task)
    assisted = write(*given, SamAssistant(costs=FixedCosts(lambda n: 1.0)))
    del calls[:]
    said, is_bug = verdict(*given, other(assisted, 17), assisted)
    assert not is_bug
    assert len(calls) == 1
    assert said.partition(", ")[2] == (
        "the text of plain decoding by this package's kernels. PyTorch's kernels round differently "
        f"in {str(dtype)[6:]}: from token 17 on plain generate writes another."
    )


KERNELS = "plain decoding by this package's kernels"


@pytest.mark.parametrize(
    ("dtype", "than"),
    [
        (torch.float32, "plain generate"),
        (torch.float64, "plain generate"),
        pytest.param(torch.bfloat16, KERNELS, marks=needs("engines/cpu")),
    ],
)
def test_a_text_that_must_be_equal_is_a_bug_to_report(written, dtype, than):
    *given, plain = written[0](dtype)
    promised = write(*given, by_kernels=dtype is torch.bfloat16)
    said, is_bug = verdict(*given, other(plain, 3), other(other(promised, 17), 9))
    assert is_bug
    first = 9 if than == KERNELS else 3
    assert said.startswith(f"ANOTHER TEXT than {than} writes, from token {first} on.")
    assert "a bug" in said
    assert "report" in said


@needs("engines/cpu")
@pytest.mark.parametrize("served_by", ["another device", "no kernels"])
def test_where_rounding_depends_on_what_is_drafted_nothing_is_alarming(
    served_by, written, monkeypatch
):
    from hf_retrieval_assist.engines.cpu import skinny

    make, calls = written
    model, *given, plain = make(torch.bfloat16)
    if served_by == "another device":
        monkeypatch.setattr(type(model), "device", torch.device("meta"))
    else:
        monkeypatch.setattr(skinny, "PATHS", ())
    said, is_bug = verdict(model, *given, plain, other(plain, 9))
    assert not is_bug
    assert "from token 9 on another text than plain generate's" in said
    assert not calls


def test_the_picture_is_one_document_with_every_token(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from demo_picture import animation

    texts, ids = ("<a>", "&\n", "x" * 60), [5, 6, 7]
    plain = [Written(1.0 + i, text, "the model") for i, text in enumerate(texts)]
    by = (1.0, "the model"), (1.5, "text"), (1.5, "text")
    assisted = [Written(second, text, who) for text, (second, who) in zip(texts, by, strict=True)]
    runs = Run(plain, ids, 3), Run(assisted, ids, 2)
    root = ElementTree.fromstring(animation(SHORT[0], *runs, "said <b>"))
    text = "".join(root.itertext())
    assert text.count("<a>") == 2
    assert text.count("x" * 54) == 2
    assert "said <b>" in text
    # Nothing from the network, nothing that runs.
    assert not {"script", "image", "use"} & {element.tag.split("}")[1] for element in root.iter()}
