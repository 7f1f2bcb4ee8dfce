"""Heads in memory that stays in place: the same drafts, each from one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.draft_models import growth, layers_follower
from hf_retrieval_assist.draft_models.mtp import MtpDrafter
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.kernels import largest
from hf_retrieval_assist.token_tree import TokenTree
from hf_retrieval_assist.verification import fixed_memory, replay
from hf_retrieval_assist.verification.workspace import WORKSPACES
from tests.support.accelerator import DEVICE, Accelerator
from tests.support.feature_following import features_of, seen
from tests.support.heads import as_launches, head_drafter, layers_of, put_head
from tests.support.lossless import build, run
from tests.support.mtp_models import FAMILIES, saved_with_mtp
from tests.support.op_recorder import serve_in_place
from tests.support.tiny_models import VOCAB

BUDGET = 40
LENGTHS = [3, 9, 1, 17, 9, 30, 5, 12]
# With one layer, with three, with windows that trees are deeper than.
NAMES = ["EAGLE", "MTP", "Glm4MoeForCausalLM", "MTP with windows"]


class Case:
    """A drafter that follows hidden states, and texts with theirs."""

    def __init__(self, name: str, folder: Path) -> None:
        drafter: Any
        if name in FAMILIES:
            self.target = saved_with_mtp(getattr(transformers, name), folder, **FAMILIES[name])
            drafter = MtpDrafter()
        else:
            self.target = build(transformers.LlamaForCausalLM)
            if name == "MTP with windows":
                layers = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 2}
                self.target = build(transformers.Gemma3ForCausalLM, num_hidden_layers=3, **layers)
            drafter = head_drafter(name, self.target)
        self.drafter = drafter
        self.texts = [
            torch.randint(1, VOCAB, (300,), generator=torch.Generator().manual_seed(row)).tolist()
            for row in range(len(LENGTHS))
        ]
        layers = drafter.needs.hidden_layers
        self.features = [features_of(self.target, layers, text) for text in self.texts]

    def conversation(self, rows: Sequence[int], turns: int = 6, graphs: bool = True) -> Any:
        """What is drafted for texts that go on, some of which join late, wait, or leave."""
        talk = Conversation(self, graphs)
        for row in rows:
            talk.start(row)
        late = rows[1:2]
        for turn in range(turns):
            talk.propose([row for row in talk.rows if turn > 1 or row not in late])
            for row in talk.rows:
                talk.grow(row, 1 + (row + turn) % 3)
            if turn == 3 and len(talk.rows) > 2:
                talk.leave(talk.rows[-1])
        # Nothing new; a long piece of text that nobody drafted; a piece whose states nobody knows.
        talk.propose(talk.rows)
        talk.propose(talk.rows)
        talk.grow(rows[0], 90)
        talk.propose(talk.rows)
        talk.skip(rows[0], 5)
        talk.grow(rows[0], 6)
        for _ in range(3):
            talk.propose(talk.rows)
            talk.grow(rows[0], 2)
        for row in list(talk.rows):
            talk.leave(row)
        return talk.drafts


class Conversation:
    def __init__(self, case: Case, graphs: bool) -> None:
        self.case = case
        self.target = Target(VOCAB, model=case.target, graphs=graphs)
        self.sessions: dict[int, Any] = {}
        self.known: dict[int, int] = {}
        self.drafts: list[TokenTree] = []

    @property
    def rows(self) -> list[int]:
        return list(self.sessions)

    def start(self, row: int) -> None:
        length, text = LENGTHS[row], self.case.texts[row]
        session = self.case.drafter.start(np.array(text[:length], np.int32), self.target)
        session.commit(text[length : length + 1], seen(self.case.features[row][:length]))
        self.sessions[row], self.known[row] = session, length

    def grow(self, row: int, count: int, told: bool = True) -> None:
        first, last = self.known[row], self.known[row] + count
        features = seen(self.case.features[row][first:last]) if told else None
        self.sessions[row].commit(self.case.texts[row][first + 1 : last + 1], features)
        self.known[row] = last

    def skip(self, row: int, count: int) -> None:
        self.grow(row, count, told=False)

    def leave(self, row: int) -> None:
        self.sessions.pop(row).close()

    def propose(self, rows: Sequence[int]) -> None:
        sessions = [self.sessions[row] for row in rows]
        self.drafts += self.case.drafter.propose_rows(sessions, [BUDGET] * len(rows))


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return Case(request.param, tmp_path)


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Serves from then on as an accelerator does that records."""

    def serve() -> None:
        serve_in_place(monkeypatch)
        # Searches for CPUs are no operators that a recorder sees.
        for module in (largest, growth):
            monkeypatch.setattr(module, "largest", lambda scores, count: tuple(scores.topk(count)))

    return serve


def assert_same(drafts: Sequence[TokenTree], expected: Sequence[TokenTree]) -> None:
    for tree, other in zip(drafts, expected, strict=True):
        assert tree.token_ids.tolist() == other.token_ids.tolist()
        assert tree.parents.tolist() == other.parents.tolist()
        assert tree.classes.tolist() == other.classes.tolist()
        np.testing.assert_allclose(tree.probs, other.probs, rtol=2e-3)


def workspaces(case: Case) -> list[Any]:
    return WORKSPACES._idle[layers_of(case.drafter, case.target)]


@pytest.mark.parametrize("rows", [1, 8])
def test_recordings_draft_what_forwards_do(
    case: Case, rows: int, in_place: Callable[[], None]
) -> None:
    expected = case.conversation(range(rows))
    assert sum(map(len, expected)) > 50
    in_place()
    for _ in range(2):
        assert_same(case.conversation(range(rows)), expected)
    steps = [step for kept in workspaces(case) for step in kept._steps.values()]
    assert any(step.replay.trusted for step in steps)
    assert not any(step.replay.fault for step in steps)


def test_memory_grows_between_drafts(
    case: Case, in_place: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = case.conversation([0, 3], 40)
    in_place()
    monkeypatch.setattr(fixed_memory, "capacity_bucket", lambda slots: slots)
    monkeypatch.setattr(fixed_memory, "with_room", lambda capacity, slot_bytes: capacity)
    assert_same(case.conversation([0, 3], 40), expected)
    assert len({kept.shape.capacity for kept in workspaces(case)}) > 1


def refused(compute: Any) -> Any:
    raise RuntimeError("no capture today")


def frozen(compute: Any) -> Any:
    """A recording that goes on showing what it showed first."""
    shown = compute()
    shown.logits = shown.logits.clone()
    return lambda: None, shown


@pytest.mark.parametrize("record", [refused, frozen])
def test_a_recording_that_fails_is_told_once_and_does_without(
    record: Any,
    in_place: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    told: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    case = Case("EAGLE", tmp_path)
    expected = case.conversation(range(3))
    in_place()
    monkeypatch.setattr(replay, "recorder", lambda device: record)
    for _ in range(2):
        assert_same(case.conversation(range(3)), expected)
    assert len([text for text in told.messages if "one kernel at a time" in text]) == 1


def test_a_caller_may_do_without_recordings(tmp_path: Path, in_place: Callable[[], None]) -> None:
    case = Case("EAGLE", tmp_path)
    expected = case.conversation(range(3))
    in_place()
    assert_same(case.conversation(range(3), graphs=False), expected)
    assert layers_of(case.drafter, case.target) not in WORKSPACES._idle


@pytest.mark.parametrize("kind", ["EAGLE", "MTP"])
def test_calls_share_recordings_and_say_what_plain_decoding_says(
    kind: Any, in_place: Callable[[], None]
) -> None:
    target = build(transformers.LlamaForCausalLM)
    drafter = head_drafter(kind, target)
    plain = run(target)
    in_place()
    # Kernels for CPUs are no operators that a recorder sees.
    assistant, made = SamAssistant(fallback=drafter, budget=12, reroute=False), []
    for _ in range(4):
        assert torch.equal(run(target, assistant=assistant), plain)
        assert assistant.stats.last.drafted > 0
        made.append(
            sum(workspace.made for workspace in WORKSPACES._idle[layers_of(drafter, target)])
        )
    assert made[0] > 0
    assert made[2:] == made[1:2] * 2


# What is new in the texts gathered (two), where their layers have got to kept for another attempt.
LAUNCHES = 3


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", ["EAGLE", "MTP"])
def test_a_draft_is_two_copies_there_and_one_back(
    kind: Any, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = Case(kind, tmp_path)
    expected = case.conversation(range(rows))
    machine, drafts = Accelerator(), []
    head = layers_of(case.drafter, case.target)
    put_head(machine, case.target, head)
    with machine:
        case.features = [found.to(DEVICE) for found in case.features]
    as_launches(machine, head, monkeypatch)
    draft = layers_follower.LayersFollower.draft

    def drafted(follower: Any, group: Any, *asked: Any) -> Any:
        settled = group.in_place is not None
        machine.reset()
        trees = draft(follower, group, *asked)
        # The first forward of a width allocates.
        if settled and ("loop", "kernel", "aten.zeros.default") not in machine.calls:
            drafts.append(machine.counts.copy())
        return trees

    monkeypatch.setattr(layers_follower.LayersFollower, "draft", drafted)
    with machine:
        assert_same(case.conversation(range(rows)), expected)
    usual = [counts for counts in drafts if counts["loop", "recorded"] == 2]
    assert len(usual) > 3
    for counts in usual:
        assert counts["loop", "kernel"] <= LAUNCHES
        assert counts["loop", "to device"] == 2
        assert counts["loop", "to host"] == 1
        assert counts["loop", "wait"] == 0
