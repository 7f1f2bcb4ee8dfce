"""Draft models in memory that stays in place: the same drafts, from recordings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hf_retrieval_assist.assistants import Assistant
from hf_retrieval_assist.draft_models import draft_model
from hf_retrieval_assist.draft_models.draft_model import DraftModelDrafter
from hf_retrieval_assist.draft_models.early_exit import EarlyExit
from hf_retrieval_assist.draft_models.recorded import RecordedDrafts
from hf_retrieval_assist.draft_models.sequoia import ShapeChooser
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.token_tree import TokenTree
from hf_retrieval_assist.verification import fixed_memory, fixed_verifier, replay
from hf_retrieval_assist.verification.workspace import WORKSPACES, Step
from tests.support.accelerator import Accelerator
from tests.support.lossless import build, run
from tests.support.op_recorder import serve_in_place
from tests.support.tiny_models import VOCAB, randomise

KINDS = ["LlamaForCausalLM", "Gemma3ForCausalLM"]
BUDGET = 12
LENGTHS = [3, 9, 1, 17, 9, 30, 5, 12]


@pytest.fixture(autouse=True)
def _one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are not solved for again while drafts are compared."""
    monkeypatch.setattr(ShapeChooser, "_has_changed", lambda self: False)


def small(kind: str) -> Any:
    """A draft model whose layers see everything, or windows that trees are deeper than."""
    windows = {"sliding_window": 2} if kind == "Gemma3ForCausalLM" else {}
    model = build(getattr(transformers, kind), **windows)
    randomise(model, 0.3)
    return model


def start(drafter: DraftModelDrafter, row: int) -> Any:
    generator = torch.Generator().manual_seed(row)
    text = torch.randint(1, VOCAB, (LENGTHS[row],), generator=generator)
    return drafter.start(text.int().numpy(), Target(VOCAB))


def go_on(sessions: Sequence[Any], trees: Sequence[TokenTree], turn: int) -> None:
    """Texts accept a part of their drafts, each another one, and may leave them."""
    for row, (session, tree) in enumerate(zip(sessions, trees, strict=True)):
        path = tree.path(int(tree.depths.argmax()))[: (row + turn) % 4]
        session.commit([*tree.token_ids[path].tolist(), 1 + (7 * row + turn) % 50], None)


def conversation(model: Any, rows: Sequence[int], turns: int = 6) -> list[TokenTree]:
    """What is drafted for texts that go on, some of which join late, wait, or leave."""
    drafter = DraftModelDrafter(model, max_nodes=BUDGET, max_levels=4, width=3)
    sessions = [start(drafter, row) for row in rows]
    late, drafts = sessions[1:2], []
    for turn in range(turns):
        asked = sessions if turn > 1 else [one for one in sessions if one not in late]
        trees = drafter.propose_rows(asked, [BUDGET] * len(asked))
        go_on(asked, trees, turn)
        drafts += trees
        if turn == 3 and len(sessions) > 2:
            sessions.pop().close()
    # A long piece of text that nobody drafted.
    sessions[0].commit([2 + i % 40 for i in range(90)], None)
    drafts += drafter.propose_rows(sessions, [BUDGET] * len(sessions))
    for session in sessions:
        session.close()
    return drafts


def steps_of(model: Any) -> list[Step]:
    return [step for kept in WORKSPACES._idle[model] for step in kept._steps.values()]


def assert_same(drafts: Sequence[TokenTree], expected: Sequence[TokenTree]) -> None:
    for tree, other in zip(drafts, expected, strict=True):
        assert tree.token_ids.tolist() == other.token_ids.tolist()
        assert tree.parents.tolist() == other.parents.tolist()
        np.testing.assert_allclose(tree.probs, other.probs, rtol=2e-3)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_recordings_draft_what_forwards_do(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(kind)
    expected = conversation(model, range(rows))
    serve_in_place(monkeypatch)
    for _ in range(2):
        assert_same(conversation(model, range(rows)), expected)
    steps = steps_of(model)
    assert any(step.replay.trusted for step in steps)
    assert not any(step.replay.fault for step in steps)


def test_memory_grows_between_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("LlamaForCausalLM")
    expected = conversation(model, range(2), 12)
    serve_in_place(monkeypatch)
    monkeypatch.setattr(fixed_memory, "capacity_bucket", lambda slots: slots - slots % 8)
    monkeypatch.setattr(fixed_memory, "with_room", lambda capacity, slot_bytes: capacity)
    monkeypatch.setattr(fixed_verifier, "WIDTHS", (1, 2, 4, 8, 16))
    assert_same(conversation(model, range(2), 12), expected)
    assert len({kept.shape.capacity for kept in WORKSPACES._idle[model]}) > 1


def refused(compute: Any) -> Any:
    raise RuntimeError("no capture today")


def frozen(compute: Any) -> Any:
    """A recording that goes on showing what it showed first."""
    shown = compute()
    return lambda: None, shown


@pytest.mark.parametrize("record", [refused, frozen])
def test_a_recording_that_fails_is_told_once_and_does_without(
    record: Any, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    model = small("LlamaForCausalLM")
    expected = conversation(model, range(3))
    serve_in_place(monkeypatch)
    monkeypatch.setattr(replay, "recorder", lambda device: record)
    for _ in range(2):
        assert_same(conversation(model, range(3)), expected)
    assert len([text for text in told.messages if "one kernel at a time" in text]) == 1


@pytest.mark.parametrize("kind", ["draft model", "early exit"])
def test_calls_share_recordings_and_say_what_plain_decoding_says(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, model = build(transformers.LlamaForCausalLM), small("LlamaForCausalLM")
    plain = run(target)
    serve_in_place(monkeypatch)
    sizes = {"max_nodes": 8, "max_levels": 3}
    exits = EarlyExit(1, **sizes)
    drafter = DraftModelDrafter(model, **sizes) if kind == "draft model" else exits
    # Kernels for CPUs are no operators that a recorder sees.
    assistant, made = Assistant([drafter], budget=8, reroute=False), []
    for _ in range(4):
        assert torch.equal(run(target, assistant=assistant), plain)
        assert assistant.stats.last.drafted > 0
        drafting = model if kind == "draft model" else exits._drafter_of(target).model
        made.append(sum(workspace.made for workspace in WORKSPACES._idle[drafting]))
    assert made[0] > 0
    assert made[1:] == made[:1] * 3


def test_a_caller_may_do_without_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    target, model = build(transformers.LlamaForCausalLM), small("LlamaForCausalLM")
    plain = run(target)
    serve_in_place(monkeypatch)
    drafter = DraftModelDrafter(model, max_nodes=8, max_levels=3)
    assistant = Assistant([drafter], budget=8, graphs=False)
    assert torch.equal(run(target, assistant=assistant), plain)
    assert model not in WORKSPACES._idle


# The tokens of a level put in place and its masks narrowed, then the forward, at once or one kernel
# at a time; its children chosen (four), looked up by their places (two), those fed next picked.
# Where texts went on by different counts, what is new in them is moved to its place (two).
LAUNCHES = 2 + 6 + 1 + 2
# Recorded with the forward: its masks.
BUILT = 4


@pytest.mark.parametrize("rows", [1, 8])
def test_a_level_is_one_copy_there_and_a_draft_one_copy_back(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small("LlamaForCausalLM")
    expected = conversation(model, range(rows))
    machine, drafts, fed = Accelerator(), [], []
    machine.put(model)
    grow, feed = draft_model.grow, RecordedDrafts.feed

    def drafted(nodes: Any, growth: Any) -> list[TokenTree]:
        settled = nodes._group.in_place is not None
        fed.clear()
        machine.reset()
        trees = grow(nodes, growth)
        # The first forward of a width allocates.
        if settled and ("loop", "kernel", "aten.zeros.default") not in machine.calls:
            drafts.append((machine.counts.copy(), list(fed)))
        return trees

    def counted(recorded: RecordedDrafts, *arguments: Any) -> torch.Tensor:
        fed.append(machine.counts.copy())
        return feed(recorded, *arguments)

    monkeypatch.setattr(draft_model, "grow", drafted)
    monkeypatch.setattr(RecordedDrafts, "feed", counted)
    with machine, machine.watch(model):
        assert_same(conversation(model, range(rows)), expected)
    assert len(drafts) > 1
    for whole, forwards in drafts:
        assert whole["loop", "to device"] == len(forwards) > 1
        assert whole["loop", "to host"] == 1
        assert not {place for place in whole if place[1] == "wait"}
        for before, after in pairwise(forwards):
            assert after["loop", "to host"] == 0
            assert (after - before)["loop", "kernel"] <= LAUNCHES + BUILT
