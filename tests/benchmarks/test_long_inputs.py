"""The benchmark of long inputs, on a repository of three commits."""

from functools import partial

import pytest

from benchmarks import long_inputs
from benchmarks.long_inputs import git, texts

from ..support.benchmarks import quick, silent
from ..support.byte_model import small_model


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
