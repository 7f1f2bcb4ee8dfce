"""Drafts of layers in static buffers: the same as of forwards, from recordings."""

from itertools import pairwise

import pytest
import torch

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.draft_models import growth
from hf_retrieval_assist.draft_models.draft_model import DraftModelDrafter
from hf_retrieval_assist.draft_models.sequoia import ShapeChooser
from hf_retrieval_assist.engines.cuda import fixed_memory, fixed_verifier, replay
from hf_retrieval_assist.engines.cuda.fixed_masks import FixedMasks
from hf_retrieval_assist.engines.cuda.recorded_drafts import RecordedDrafts
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES
from hf_retrieval_assist.extensions.heads.layers_follower import LayersFollower
from hf_retrieval_assist.verification import largest
from tests.support import dense_attention
from tests.support.accelerator import DEVICE, Accelerator
from tests.support.drafted_texts import DRAFT_MODELS, Texts, assert_same_drafts, drafting
from tests.support.heads import as_launches, assisted, layers_of, put_head
from tests.support.lossless import run
from tests.support.op_recorder import serve_in_place
from tests.support.quick import cases, crossed


@pytest.fixture(autouse=True)
def _one_shape(monkeypatch):
    """Trees are not solved for again while drafts are compared."""
    monkeypatch.setattr(ShapeChooser, "_has_changed", lambda self: False)


@pytest.fixture
def static_buffers(monkeypatch):
    """Serves from then on as an accelerator does that records."""

    def serve():
        serve_in_place(monkeypatch)
        # Searches for CPUs are no operators that a recorder sees.
        for module in (largest, growth):
            monkeypatch.setattr(module, "largest", lambda scores, count: tuple(scores.topk(count)))

    return serve


# Draft models, and heads with one layer, with three, with windows that trees are deeper than.
NAMES = [*DRAFT_MODELS, "EAGLE", "MTP", "Glm4MoeForCausalLM", "MTP of windows"]


def case_of(name):
    if name in DRAFT_MODELS:
        return drafting(name)
    target, drafter = assisted(name)
    return Texts(drafter, target, budget=40)


def idle(case):
    """The memory that waits for what drafts."""
    return WORKSPACES.report(layers_of(case.drafter, case.target)).idle


RECORDED = [("EAGLE", 1), ("Gemma3ForCausalLM", 8), *((name, 8) for name in NAMES)]


@pytest.mark.parametrize(("name", "rows"), cases(dict.fromkeys(RECORDED), 2))
def test_recordings_draft_what_forwards_do(name, rows, static_buffers):
    case = case_of(name)
    expected = case.conversation(range(rows))
    assert sum(map(len, expected)) > 50
    static_buffers()
    for _ in range(2):
        assert_same_drafts(case.conversation(range(rows)), expected)
    steps = [step for workspace in idle(case) for step in workspace.kinds.values()]
    assert any(step.trusted for step in steps)
    assert not any(step.fault for step in steps)


def refuse(*arguments):
    raise AssertionError("a mask over the whole capacity")


@pytest.mark.parametrize(("kind", "rows"), cases(crossed(DRAFT_MODELS, [8, 1])))
def test_draft_models_attend_by_kernels_without_masks(kind, rows, static_buffers, monkeypatch):
    expected = drafting(kind).conversation(range(rows))
    static_buffers()
    attended = dense_attention.install(monkeypatch)
    monkeypatch.setattr(FixedMasks, "build", refuse)
    case = drafting(kind)
    for _ in range(2):
        assert_same_drafts(case.conversation(range(rows)), expected)
    assert attended


@pytest.mark.parametrize("name", cases(NAMES))
def test_memory_grows_between_drafts(name, static_buffers, monkeypatch):
    case, turns = case_of(name), 24
    expected = case.conversation([0, 3], turns)
    static_buffers()
    monkeypatch.setattr(fixed_memory, "capacity_bucket", lambda slots: slots)
    monkeypatch.setattr(fixed_memory, "with_room", lambda capacity, slot_bytes: capacity)
    monkeypatch.setattr(fixed_verifier, "WIDTHS", (1, 2, 4, 8, 16))
    assert_same_drafts(case.conversation([0, 3], turns), expected)
    assert len({kept.shape.capacity for kept in idle(case)}) > 1


def refused(compute):
    raise RuntimeError("no capture today")


def frozen(compute):
    """A recording that goes on showing what it showed first."""
    shown = compute()
    shown.logits = shown.logits.clone()
    return lambda: None, shown


@pytest.mark.parametrize(
    ("name", "record"), cases(crossed(["LlamaForCausalLM", "EAGLE"], [refused, frozen]), 2)
)
def test_a_recording_that_fails_is_told_once_and_does_without(
    name, record, static_buffers, monkeypatch, told
):
    case = case_of(name)
    expected = case.conversation(range(3))
    static_buffers()
    monkeypatch.setattr(replay, "recorder", lambda *_: record)
    for _ in range(2):
        assert_same_drafts(case.conversation(range(3)), expected)
    assert len([text for text in told.messages if "one kernel at a time" in text]) == 1


@pytest.mark.parametrize("name", cases(["draft model", "EAGLE", "MTP"]))
def test_calls_share_recordings_and_say_what_plain_decoding_says(name, static_buffers):
    """Unless a caller does without recordings."""
    target, drafter = assisted(name)
    plain, drafting = run(target), layers_of(drafter, target)
    static_buffers()
    made = []
    for graphs in (False, True, True, True, True):
        # Kernels for CPUs are no operators that a recorder sees.
        assistant = Assistant([drafter], budget=8, reroute=False, graphs=graphs)
        assert torch.equal(run(target, assistant=assistant), plain)
        assert assistant.stats.last.drafted > 0
        made.append(WORKSPACES.report(drafting).made)
    assert made[0] == 0 < made[1]
    assert made[3:] == made[2:3] * 2


# The tokens of a level put in place and its masks narrowed, then the forward, at once or one kernel
# at a time; its children chosen (four), looked up by their places (two), those fed next picked.
# Where texts went on by different counts, what is new in them is moved to its place (two).
LAUNCHES = 2 + 6 + 1 + 2
# Recorded with the forward: its masks.
BUILT = 4


def counted_drafts(machine, owner, name, monkeypatch, fed):
    """What settled drafts of a group take, beside what `fed` has then."""
    drafts, draft = [], getattr(owner, name)

    def counted(drafting, group, *arguments):
        settled = group.static_drafts is not None
        fed.clear()
        machine.reset()
        trees = draft(drafting, group, *arguments)
        # The first forward of a width allocates.
        if settled and ("loop", "kernel", "aten.zeros.default") not in machine.calls:
            drafts.append((machine.counts.copy(), list(fed)))
        return trees

    monkeypatch.setattr(owner, name, counted)
    return drafts


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
def test_a_level_is_one_copy_there_and_a_draft_one_copy_back(rows, monkeypatch):
    case = drafting("LlamaForCausalLM")
    model = case.drafter.model
    expected = case.conversation(range(rows))
    machine, fed, feed = Accelerator(), [], RecordedDrafts.feed
    machine.put(model)

    def counted(recorded, *arguments):
        fed.append(machine.counts.copy())
        return feed(recorded, *arguments)

    monkeypatch.setattr(RecordedDrafts, "feed", counted)
    drafts = counted_drafts(machine, DraftModelDrafter, "_draft", monkeypatch, fed)
    with machine, machine.watch(model):
        assert_same_drafts(case.conversation(range(rows)), expected)
    assert len(drafts) > 1
    for whole, forwards in drafts:
        assert whole["loop", "to device"] == len(forwards) > 1
        assert whole["loop", "to host"] == 1
        assert not {place for place in whole if place[1] == "wait"}
        for before, after in pairwise(forwards):
            assert after["loop", "to host"] == 0
            assert (after - before)["loop", "kernel"] <= LAUNCHES + BUILT


# What is new in the texts gathered (two), and the layers' last states kept for the next draft.
OF_A_HEAD = 3


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", ["EAGLE", "MTP"])
def test_a_draft_is_two_copies_there_and_one_back(kind, rows, monkeypatch):
    """One of the texts joins late, and one leaves."""
    case = case_of(kind)
    expected = case.conversation(range(rows))
    machine, head = Accelerator(), layers_of(case.drafter, case.target)
    put_head(machine, case.target, head)
    with machine:
        case.features = [found.to(DEVICE) for found in case.features]
    as_launches(machine, head, monkeypatch)
    drafts = counted_drafts(machine, LayersFollower, "draft", monkeypatch, [])
    with machine:
        assert_same_drafts(case.conversation(range(rows)), expected)
    usual = [counts for counts, _ in drafts if counts["loop", "recorded"] == 2]
    assert len(usual) > 3
    for counts in usual:
        assert counts["loop", "kernel"] <= OF_A_HEAD
        assert [counts["loop", kind] for kind in ("to device", "to host", "wait")] == [2, 1, 0]
