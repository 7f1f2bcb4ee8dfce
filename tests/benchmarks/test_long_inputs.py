"""The benchmark of long inputs, on a repository of three commits."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from benchmarks import long_inputs
from benchmarks.forced import choosing
from benchmarks.long_inputs import git, texts
from hf_retrieval_assist import SamAssistant

from ..support.benchmarks import quick, silent
from ..support.byte_model import small_model

pytestmark = pytest.mark.slow


@pytest.fixture
def repository(tmp_path):
    """Two files of Python, one of which a commit changes, and a page that the next one changes."""
    run = partial(git, tmp_path)
    run("init", "-q")
    run("config", "user.email", "a@example.org")
    run("config", "user.name", "a")
    lines = [f"value_{i} = {i}\n" for i in range(40)]
    for step, subject in enumerate(["First", "Change a value", "Write a page"]):
        changed = [*lines[:9], "value_9 = 10\n", *lines[10:]] if step else lines
        (tmp_path / "a.py").write_text("".join(changed))
        (tmp_path / "b.py").write_text("other = 1\n" * 20)
        (tmp_path / "page.md").write_text(f"{step}\n")
        run("add", "." if step != 1 else "a.py")
        run("commit", "-q", "-m", subject)
    return tmp_path


def test_prompts_end_with_what_a_commit_changes_and_outputs_are_its_diff(repository):
    [(prompt, output)] = list(texts(repository, lambda text: [*text.encode()], 900, 5))
    prompt, output = bytes(prompt).decode(), bytes(output).decode()
    assert prompt.startswith("other = 1\n")
    assert prompt.endswith("value_39 = 39\n\n\nChange a value\n\n")
    assert len(prompt) == 900 or len(prompt) < 900
    assert "-value_9 = 9\n+value_9 = 10\n" in output
    assert "value_9 = 10" not in prompt


def test_methods_are_counted_beside_prompt_lookup(repository, monkeypatch):
    monkeypatch.setattr(long_inputs, "load", lambda arguments: small_model())
    report = long_inputs.run(quick("--repository", repository, "--long-lengths", 900), silent)
    (table,) = report.tables
    assert [row["method"] for row in table.rows] == [*long_inputs.METHODS]
    assert {row["texts"] for row in table.rows} == {1}
    assert all(row["per_forward"] > 1.5 and row["host_us"] > 0 for row in table.rows)


def test_recorded_diffs_are_written_by_the_models_own_forwards(repository, tmp_path, monkeypatch):
    model, tokenizer = small_model()
    monkeypatch.setattr(long_inputs, "load", lambda arguments: (model, tokenizer))
    served = []
    run_method = long_inputs.run_method
    monkeypatch.setattr(
        long_inputs,
        "run_method",
        lambda method, *given, **options: (
            served.append(type(given[0])) or run_method(method, *given, **options)
        ),
    )
    options = ("--long-clock", "--repository", repository, "--long-lengths", 900)
    report = long_inputs.run(quick(*options, "--output", tmp_path), silent)
    (table,) = report.tables
    found = {row["method"]: row for row in table.rows}
    assert [*found] == [method.name for method in long_inputs.clocked_methods()]
    assert {row["same"] for row in found.values()} == {"1 of 1"}
    assert all(row["rate"] > 0 and row["prompt"] > 0 for row in found.values())
    assert found["kernels"]["per_forward"] == found["no drafts"]["per_forward"] == 1
    # Forwards of a class of the benchmark's own would not be repeated.
    assert served.count(type(model)) == len(served) // 2


def test_tokens_are_chosen_for_assisted_calls_alone():
    model, _ = small_model()
    prompt = torch.arange(3, 43)[None]
    output = [*range(20, 60)] * 2
    assistant = SamAssistant()
    options = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for forced in (True, False):
        with choosing(output) if forced else nullcontext():
            text = model.generate(prompt, assistant=assistant, **options)
        assert (text[0, 40:].tolist() == output) is forced
    assert assistant.stats.total.accepted > 20
    assert assistant.stats.total.repeated > 0
