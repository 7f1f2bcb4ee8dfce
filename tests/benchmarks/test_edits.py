"""Files written anew with a change in them."""

import ast
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import edits

from ..support.benchmarks import quick, silent

pytestmark = pytest.mark.slow

FILE = '''
import os


def first(path, mode):
    """Reads."""
    if mode == 1:
        return os.path.join(path, "a")
    return None


def second(path):
    """Calls the first."""
    found = first(path, 1)
    return found, first(path, 2)


class Third:
    def method(self, name):
        """Names."""
        return second(name)
'''


@pytest.fixture
def files(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(FILE, encoding="utf-8")
    return [path]


def encode(text):
    """A token a word, the same in every process."""
    return [zlib.crc32(word.encode()) % 50_000 for word in text.replace("(", " ( ").split()]


@pytest.mark.parametrize("kind", edits.KINDS)
def test_a_change_is_small_and_leaves_a_program(kind, files):
    for seed in range(5):
        (edit,) = edits.edits(kind, files, 1, seed)
        assert edit == next(edits.edits(kind, files, 1, seed))
        assert edit.before == FILE
        assert edit.after != FILE
        ast.parse(edit.after)
        kept = set(FILE.splitlines()) & set(edit.after.splitlines())
        assert len(kept) > 0.6 * len(set(FILE.splitlines()))


def test_what_is_expected_is_drafted_without_being_in_the_prompt(files, monkeypatch):
    def tokenizer(text, add_special_tokens):
        return SimpleNamespace(input_ids=encode(text))

    found = edits.library_files()
    assert len(found) > 20
    assert all(isinstance(path, Path) and path.stat().st_size <= edits.LONGEST for path in found)
    monkeypatch.setattr(edits, "load", lambda arguments: (None, tokenizer))
    monkeypatch.setattr(edits, "library_files", lambda: files)
    report = edits.run(quick("--edit-nodes", 16), silent)
    rows = {(r["kind"], r["prompt"], r["method"]): r for r in report.tables[0].rows}
    assert len(rows) == len(edits.KINDS) * len(edits.PROMPTS) * len(edits.methods(16))
    for kind in edits.KINDS:
        unseen = rows[kind, "wish alone", "SamAssistant"]["per_forward"]
        expected = rows[kind, "wish alone", "SamAssistant, expecting"]
        assert expected["per_forward"] > 2 * unseen
        assert expected["nodes"] <= 16
        assert rows[kind, "wish and file", "SamAssistant"]["per_forward"] > 2 * unseen
