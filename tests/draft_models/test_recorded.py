"""Drafts of layers in memory that stays in place: the same as of forwards, from recordings."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.draft_models import draft_model, growth, layers_follower
from hf_retrieval_assist.draft_models.draft_model import DraftModelDrafter
from hf_retrieval_assist.draft_models.early_exit import EarlyExit
from hf_retrieval_assist.draft_models.mtp import MtpDrafter
from hf_retrieval_assist.draft_models.recorded import RecordedDrafts
from hf_retrieval_assist.draft_models.sequoia import ShapeChooser
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.kernels import largest
from hf_retrieval_assist.verification import fixed_memory, fixed_verifier, replay
from hf_retrieval_assist.verification.fixed_masks import FixedMasks
from hf_retrieval_assist.verification.workspace import WORKSPACES
from tests.support import dense_attention
from tests.support.accelerator import DEVICE, Accelerator
from tests.support.feature_following import assert_same as assert_same_draft
from tests.support.feature_following import features_of, seen
from tests.support.heads import as_launches, head_drafter, layers_of, put_head
from tests.support.lossless import build, run
from tests.support.mtp_models import FAMILIES, saved_with_mtp
from tests.support.op_recorder import serve_in_place
from tests.support.tiny_models import VOCAB, randomise

LENGTHS = [3, 9, 1, 17, 9, 30, 5, 12]


@pytest.fixture(autouse=True)
def _one_shape(monkeypatch):
    """Trees are not solved for again while drafts are compared."""
    monkeypatch.setattr(ShapeChooser, "_has_changed", lambda self: False)


@pytest.fixture
def in_place(monkeypatch):
    """Serves from then on as an accelerator does that records."""

    def serve():
        serve_in_place(monkeypatch)
        # Searches for CPUs are no operators that a recorder sees.
        for module in (largest, growth):
            monkeypatch.setattr(module, "largest", lambda scores, count: tuple(scores.topk(count)))

    return serve


class Drafting:
    """A draft model whose layers see everything, or windows that trees are deeper than."""

    budget = 12

    def __init__(self, kind):
        windows = {"sliding_window": 2} if kind == "Gemma3ForCausalLM" else {}
        self.layers = build(getattr(transformers, kind), **windows)
        randomise(self.layers, 0.3)

    def conversation(self, rows, turns=6):
        """What is drafted for texts that go on, some of which join late, wait, or leave."""
        drafter = DraftModelDrafter(self.layers, max_nodes=self.budget, max_levels=4, width=3)
        sessions = [self._start(drafter, row) for row in rows]
        late, drafts = sessions[1:2], []
        for turn in range(turns):
            asked = sessions if turn > 1 else [one for one in sessions if one not in late]
            trees = drafter.propose_rows(asked, [self.budget] * len(asked))
            self._go_on(asked, trees, turn)
            drafts += trees
            if turn == 3 and len(sessions) > 2:
                sessions.pop().close()
        # A long piece of text that nobody drafted.
        sessions[0].commit([2 + i % 40 for i in range(90)], None)
        drafts += drafter.propose_rows(sessions, [self.budget] * len(sessions))
        for session in sessions:
            session.close()
        return drafts

    @staticmethod
    def _start(drafter, row):
        generator = torch.Generator().manual_seed(row)
        text = torch.randint(1, VOCAB, (LENGTHS[row],), generator=generator)
        return drafter.start(text.int().numpy(), Target(VOCAB))

    @staticmethod
    def _go_on(sessions, trees, turn):
        """Texts accept a part of their drafts, each another one, and may leave them."""
        for row, (session, tree) in enumerate(zip(sessions, trees, strict=True)):
            path = tree.path(int(tree.depths.argmax()))[: (row + turn) % 4]
            session.commit([*tree.token_ids[path].tolist(), 1 + (7 * row + turn) % 50], None)


class Following:
    """A drafter that follows hidden states, and texts with theirs."""

    budget = 40

    def __init__(self, name, folder):
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
        self.drafter, self.layers = drafter, layers_of(drafter, self.target)
        self.texts = [
            torch.randint(1, VOCAB, (300,), generator=torch.Generator().manual_seed(row)).tolist()
            for row in range(len(LENGTHS))
        ]
        tapped = drafter.needs.hidden_layers
        self.features = [features_of(self.target, tapped, text) for text in self.texts]

    def conversation(self, rows, turns=6):
        """What is drafted for texts that go on, some of which join late, wait, or leave."""
        talk = Conversation(self)
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
    def __init__(self, case):
        self.case, self.target = case, Target(VOCAB, model=case.target)
        self.sessions = {}
        self.known = {}
        self.drafts = []

    @property
    def rows(self):
        return list(self.sessions)

    def start(self, row):
        length, text = LENGTHS[row], self.case.texts[row]
        session = self.case.drafter.start(np.array(text[:length], np.int32), self.target)
        session.commit(text[length : length + 1], seen(self.case.features[row][:length]))
        self.sessions[row], self.known[row] = session, length

    def grow(self, row, count, told=True):
        first, last = self.known[row], self.known[row] + count
        features = seen(self.case.features[row][first:last]) if told else None
        self.sessions[row].commit(self.case.texts[row][first + 1 : last + 1], features)
        self.known[row] = last

    def skip(self, row, count):
        self.grow(row, count, told=False)

    def leave(self, row):
        self.sessions.pop(row).close()

    def propose(self, rows):
        sessions = [self.sessions[row] for row in rows]
        self.drafts += self.case.drafter.propose_rows(sessions, [self.case.budget] * len(rows))


# Of draft models, and of heads with one layer, with three, with windows that trees are deeper than.
NAMES = [
    *("LlamaForCausalLM", "Gemma3ForCausalLM"),
    *("EAGLE", "MTP", "Glm4MoeForCausalLM", "MTP with windows"),
]


def case_of(name, folder):
    return Drafting(name) if name in NAMES[:2] else Following(name, folder)


@pytest.fixture(params=NAMES)
def case(request, tmp_path):
    return case_of(request.param, tmp_path)


def assert_same(drafts, expected):
    for tree, other in zip(drafts, expected, strict=True):
        assert tree.classes.tolist() == other.classes.tolist()
        assert_same_draft(tree, other)


@pytest.mark.parametrize(("name", "rows"), [("EAGLE", 1), *((name, 8) for name in NAMES)])
def test_recordings_draft_what_forwards_do(name, rows, in_place, tmp_path):
    case = case_of(name, tmp_path)
    expected = case.conversation(range(rows))
    assert sum(map(len, expected)) > 50
    in_place()
    for _ in range(2):
        assert_same(case.conversation(range(rows)), expected)
    kept = WORKSPACES._idle[case.layers]
    steps = [step for workspace in kept for step in workspace._steps.values()]
    assert any(step.trusted for step in steps)
    assert not any(step.fault for step in steps)


def refuse(*arguments):
    raise AssertionError("a mask over the whole capacity")


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", NAMES[:2])
def test_draft_models_attend_by_kernels_without_masks(kind, rows, in_place, monkeypatch):
    expected = Drafting(kind).conversation(range(rows))
    in_place()
    attended = dense_attention.install(monkeypatch)
    monkeypatch.setattr(FixedMasks, "build", refuse)
    case = Drafting(kind)
    for _ in range(2):
        assert_same(case.conversation(range(rows)), expected)
    assert attended


def test_memory_grows_between_drafts(case, in_place, monkeypatch):
    turns = 12 if isinstance(case, Drafting) else 24
    expected = case.conversation([0, 3], turns)
    in_place()
    monkeypatch.setattr(fixed_memory, "capacity_bucket", lambda slots: slots)
    monkeypatch.setattr(fixed_memory, "with_room", lambda capacity, slot_bytes: capacity)
    monkeypatch.setattr(fixed_verifier, "WIDTHS", (1, 2, 4, 8, 16))
    assert_same(case.conversation([0, 3], turns), expected)
    assert len({kept.shape.capacity for kept in WORKSPACES._idle[case.layers]}) > 1


def refused(compute):
    raise RuntimeError("no capture today")


def frozen(compute):
    """A recording that goes on showing what it showed first."""
    shown = compute()
    shown.logits = shown.logits.clone()
    return lambda: None, shown


@pytest.mark.parametrize("record", [refused, frozen])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "EAGLE"])
def test_a_recording_that_fails_is_told_once_and_does_without(
    name, record, in_place, monkeypatch, told, tmp_path
):
    case = case_of(name, tmp_path)
    expected = case.conversation(range(3))
    in_place()
    monkeypatch.setattr(replay, "recorder", lambda device: record)
    for _ in range(2):
        assert_same(case.conversation(range(3)), expected)
    assert len([text for text in told.messages if "one kernel at a time" in text]) == 1


def drafter_of(name, target):
    """A drafter, and what of it is recorded."""
    sizes = {"max_nodes": 8, "max_levels": 3}
    if name == "early exit":
        exits = EarlyExit(1, **sizes)
        return exits, lambda: exits._drafter_of(target).model
    if name == "draft model":
        model = Drafting("LlamaForCausalLM").layers
        return DraftModelDrafter(model, **sizes), lambda: model
    drafter = head_drafter(name, target)
    return drafter, lambda: layers_of(drafter, target)


@pytest.mark.parametrize("name", ["draft model", "early exit", "EAGLE", "MTP"])
def test_calls_share_recordings_and_say_what_plain_decoding_says(name, in_place):
    target = build(transformers.LlamaForCausalLM)
    drafter, layers = drafter_of(name, target)
    plain = run(target)
    in_place()
    # Kernels for CPUs are no operators that a recorder sees.
    assistant, made = Assistant([drafter], budget=8, reroute=False), []
    for _ in range(4):
        assert torch.equal(run(target, assistant=assistant), plain)
        assert assistant.stats.last.drafted > 0
        made.append(sum(workspace.made for workspace in WORKSPACES._idle[layers()]))
    assert made[0] > 0
    assert made[2:] == made[1:2] * 2


@pytest.mark.parametrize("name", ["draft model", "EAGLE"])
def test_a_caller_may_do_without_recordings(name, in_place):
    target = build(transformers.LlamaForCausalLM)
    drafter, layers = drafter_of(name, target)
    plain = run(target)
    in_place()
    assistant = Assistant([drafter], budget=8, graphs=False)
    assert torch.equal(run(target, assistant=assistant), plain)
    assert assistant.stats.last.drafted > 0
    assert layers() not in WORKSPACES._idle


# The tokens of a level put in place and its masks narrowed, then the forward, at once or one kernel
# at a time; its children chosen (four), looked up by their places (two), those fed next picked.
# Where texts went on by different counts, what is new in them is moved to its place (two).
LAUNCHES = 2 + 6 + 1 + 2
# Recorded with the forward: its masks.
BUILT = 4


@pytest.mark.parametrize("rows", [1, 8])
def test_a_level_is_one_copy_there_and_a_draft_one_copy_back(rows, monkeypatch):
    case = Drafting("LlamaForCausalLM")
    expected = case.conversation(range(rows))
    machine, drafts, fed = Accelerator(), [], []
    machine.put(case.layers)
    grow, feed = draft_model.grow, RecordedDrafts.feed

    def drafted(nodes, growth):
        settled = nodes._group.in_place is not None
        fed.clear()
        machine.reset()
        trees = grow(nodes, growth)
        # The first forward of a width allocates.
        if settled and ("loop", "kernel", "aten.zeros.default") not in machine.calls:
            drafts.append((machine.counts.copy(), list(fed)))
        return trees

    def counted(recorded, *arguments):
        fed.append(machine.counts.copy())
        return feed(recorded, *arguments)

    monkeypatch.setattr(draft_model, "grow", drafted)
    monkeypatch.setattr(RecordedDrafts, "feed", counted)
    with machine, machine.watch(case.layers):
        assert_same(case.conversation(range(rows)), expected)
    assert len(drafts) > 1
    for whole, forwards in drafts:
        assert whole["loop", "to device"] == len(forwards) > 1
        assert whole["loop", "to host"] == 1
        assert not {place for place in whole if place[1] == "wait"}
        for before, after in pairwise(forwards):
            assert after["loop", "to host"] == 0
            assert (after - before)["loop", "kernel"] <= LAUNCHES + BUILT


# What is new in the texts gathered (two), where their layers have got to kept for another attempt.
OF_A_HEAD = 3


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", ["EAGLE", "MTP"])
def test_a_draft_is_two_copies_there_and_one_back(kind, rows, monkeypatch, tmp_path):
    case = Following(kind, tmp_path)
    expected = case.conversation(range(rows))
    machine, drafts = Accelerator(), []
    put_head(machine, case.target, case.layers)
    with machine:
        case.features = [found.to(DEVICE) for found in case.features]
    as_launches(machine, case.layers, monkeypatch)
    draft = layers_follower.LayersFollower.draft

    def drafted(follower, group, *asked):
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
        assert counts["loop", "kernel"] <= OF_A_HEAD
        assert counts["loop", "to device"] == 2
        assert counts["loop", "to host"] == 1
        assert counts["loop", "wait"] == 0
