"""Tokens per forward at a fixed number of nodes."""

import json

from benchmarks import spec_bench

from ..support.benchmarks import quick, silent
from ..support.byte_model import small_model


def test_every_method_writes_plains_tokens_within_its_nodes(monkeypatch):
    monkeypatch.setattr(spec_bench, "load", lambda arguments: small_model())
    report = spec_bench.run(quick("--spec-nodes", 8), silent)
    rows = report.tables[0].rows
    names = [method.name for method in spec_bench.methods(8)]
    assert [row["method"] for row in rows[-len(names) :]] == names
    whole = {row["method"]: row for row in rows if row["category"] == "all"}
    kinds = len(rows) // len(names) - 1
    assert all(row["prompts"] == kinds for row in whole.values())
    assert whole["plain"]["per_forward"] == 1
    for name in names[2:]:
        assert whole[name]["same"] == f"{kinds} of {kinds}"
        assert 1 <= whole[name]["per_forward"] <= 9
    # A small random model repeats itself.
    assert whole["SamAssistant"]["per_forward"] > 1.2


def test_questions_become_prompts_by_kind(tmp_path):
    path = tmp_path / "question.jsonl"
    questions = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "More."]},
        {"question_id": 161, "category": "qa", "turns": ["Who?"]},
    ]
    path.write_text("\n".join(map(json.dumps, questions)), encoding="utf-8")
    first, second = spec_bench.read_questions(path)
    assert (first.category, second.category) == ("multi-turn conversation", "question answering")
    assert (first.text, first.message) == ("Question: Write.\n\nAnswer:", "Write.")
