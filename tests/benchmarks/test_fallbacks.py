"""Fallbacks at equal nodes."""

import torch

from benchmarks import fallbacks
from benchmarks.__main__ import parse
from hf_retrieval_assist import MtpHead

from ..test_examples import small_model


def test_every_method_writes_plains_tokens_within_its_nodes(monkeypatch, tmp_path):
    monkeypatch.setattr(fallbacks, "load_demo_model", small_model)
    model, _ = small_model()
    torch.manual_seed(0)
    MtpHead.for_target(model).save_pretrained(tmp_path)
    arguments = parse(["fallbacks", "--quick", "--mtp-head", str(tmp_path)])
    report = fallbacks.run(arguments, lambda text: None)
    (table,) = report.tables
    whole = {row["method"]: row for row in table.rows if row["category"] == "all"}
    head = MtpHead.from_pretrained(tmp_path, model)
    assert [*whole] == [method.name for method in fallbacks.methods(8, head)]
    kinds = len({row["category"] for row in table.rows}) - 1
    for row in whole.values():
        assert row["same"] == f"{kinds} of {kinds}"
        assert 1 <= row["per_forward"] <= 9
    # A small random model repeats itself.
    assert whole["all together"]["per_forward"] > 1.2
    assert str(tmp_path) not in str(report.settings)


def test_without_a_head_its_lines_are_left_out():
    names = [method.name for method in fallbacks.methods(8, None)]
    assert names == [
        "plain",
        "retrieval alone",
        "Token Recycling",
        "retrieval and Token Recycling",
    ]


def test_drafts_are_asked_for_as_many_nodes(monkeypatch):
    model, _ = small_model()
    chosen = [m.options() for m in fallbacks.methods(16, MtpHead.for_target(model))]
    assistants = [options["assistant"] for options in chosen if options]
    assert {assistant.planner.budget for assistant in assistants} == {16}
    limits = [d.limits for a in assistants for d in a.drafters if d.name == "mtp"]
    assert [(sizes.top_k, sizes.depth) for sizes in limits] == [(1, 15), (8, 7), (8, 7)]
    assert {sizes.total for sizes in limits} == {17}
