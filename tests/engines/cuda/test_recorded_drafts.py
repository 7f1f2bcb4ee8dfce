"""Drafts of layers in static buffers: the same as of forwards, from recordings."""

import pytest
import torch

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.draft_models import growth
from hf_retrieval_assist.draft_models.sequoia import ShapeChooser
from hf_retrieval_assist.engines.cuda import fixed_memory, fixed_verifier
from hf_retrieval_assist.engines.cuda.fixed_masks import FixedMasks
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES
from hf_retrieval_assist.verification import largest
from tests.support import dense_attention
from tests.support.drafted_texts import DRAFT_MODELS, Texts, assert_same_drafts, drafting
from tests.support.heads import assisted, layers_of
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
