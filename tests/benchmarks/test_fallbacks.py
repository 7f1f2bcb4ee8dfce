"""Fallbacks at equal nodes."""

import pytest
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


def test_drafters_that_know_the_dice_name_the_drawn_token(monkeypatch):
    monkeypatch.setattr(fallbacks, "load_demo_model", small_model)
    report = fallbacks.run(parse(["fallbacks", "--quick", "--fallback-dice"]), lambda text: None)
    assert len(report.tables) == 2
    for table in report.tables:
        assert len({row["category"] for row in table.rows}) == 8
        greedy, sampled = [row for row in table.rows if row["category"] == "all"]
        assert greedy["temperature"] == 0
        assert "known" not in greedy
        assert greedy["blind"] > 0.6
        # The model's law is nearly flat: without the dice a token is anybody's guess.
        assert sampled["blind"] < 0.2 < 0.6 < sampled["known"]
        assert 1 <= sampled["blind_2"] < 1.5 < sampled["known_2"] <= 3


@pytest.mark.parametrize("number", range(len(fallbacks._decodings())))
def test_the_model_itself_names_every_token(number):
    what, options, warpers = fallbacks._decodings()[number]
    model, tokenizer = small_model()
    prompts = fallbacks.read_prompts()[:3]
    texts = fallbacks.sample(model, tokenizer, prompts, 6, 5, options)
    logits = [fallbacks.Reader(model).logits(text) for text in texts]
    seed = 5 if options["do_sample"] else None
    named = fallbacks._first_choices(logits, warpers, seed)
    assert named == [text.new.tolist() for text in texts]
    assert what["temperature"] == options.get("temperature", 0)


def test_chains_end_at_the_first_wrong_choice_and_at_their_length():
    right = [True, True, True, False, True, True, True, True]
    # Prompt; two right and the third drawn by the model; three right and the last one.
    assert fallbacks.chain_forwards(right, 3) == 3
    assert fallbacks.chain_forwards(right, 1) == 5
    assert fallbacks.chain_forwards([False] * 4, 3) == 4
    assert fallbacks.chain_forwards([False], 3) == 1


def test_a_coarse_copy_has_few_weights_in_a_group_and_leaves_the_model_alone():
    model = torch.nn.Sequential(torch.nn.Linear(96, 5))
    before = model[0].weight.clone()
    weight = fallbacks.coarse_copy(model)[0].weight
    assert torch.equal(model[0].weight, before)
    for group, exact in zip(weight.view(-1, 32), before.view(-1, 32), strict=True):
        step = exact.abs().max() / 7
        assert len(group.unique()) <= 15
        assert (group - exact).abs().max() <= step / 2 * 1.001
    assert torch.equal(fallbacks._rounded(torch.zeros(1, 8)), torch.zeros(1, 8))
