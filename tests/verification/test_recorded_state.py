"""What was recorded in one call is repeated in another only where that one computes the same."""

from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, MixtralForCausalLM, Qwen3MoeForCausalLM

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.verification.recorded_state import recorded_state
from hf_retrieval_assist.verification.replay import Replay
from hf_retrieval_assist.verification.workspace import WORKSPACES
from tests.support.lossless import PROMPT, build, run
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import oracle_assistant

CPU = torch.device("cpu")
STRENGTH = {"of all": 0.0}


def steering(vector):
    return lambda module, inputs, output: output + vector


def by_module_table(module, inputs, output):
    return output + STRENGTH["of all"]


def scaled(module, inputs, output, factors):
    return output * factors[0]


class Slotted:
    """Holds what it knows in no dictionary, and cannot be referred to weakly."""

    __slots__ = ("__strength",)

    def __init__(self, strength):
        self.__strength = strength

    def hook(self, module, inputs, output):
        return output + self.__strength


class Steered:
    """A model whose forwards depend on what its caller does between calls."""

    def __init__(self):
        self.model = build(LlamaForCausalLM, num_hidden_layers=2)
        self.place = self.model.model.layers[0].mlp
        self.handle = None
        self.scope = ExitStack
        self.held = SimpleNamespace(strength=0.0)

    def hook(self, hook):
        if self.handle is not None:
            self.handle.remove()
        self.handle = self.place.register_forward_hook(hook)

    def by_object(self, module, inputs, output):
        return output + self.held.strength

    def change(self, kind, number):
        if kind == "another hook":
            generator = torch.Generator().manual_seed(number)
            size = self.model.config.hidden_size
            self.hook(steering(torch.randn(size, generator=generator) * 2))
        elif kind == "a hook's object":
            self.held.strength = float(number)
            self.hook(self.by_object)
        elif kind == "a hook's slots":
            self.hook(Slotted(float(number)).hook)
        elif kind == "a hook's module":
            STRENGTH["of all"] = float(number)
            self.hook(by_module_table)
        elif kind == "a hook's arguments":
            self.hook(partial(scaled, factors=[1 + number]))
        elif kind == "autocast":
            self.scope = partial(torch.autocast, "cpu", torch.bfloat16, enabled=bool(number % 2))
        elif kind == "inference mode":
            self.scope = partial(torch.inference_mode, bool(number % 2))
        elif kind == "weights":
            self.model.lm_head.weight.data = self.model.lm_head.weight.data.roll(number, 0).clone()
        elif kind == "a setting":
            self.model.model.norm.variance_epsilon = 10.0**-number

    def check(self):
        with self.scope():
            plain = run(self.model, max_new_tokens=24)
            assistant = oracle_assistant(plain)
            assert torch.equal(plain, run(self.model, max_new_tokens=24, assistant=assistant))


KINDS = [
    *("another hook", "a hook's object", "a hook's slots", "a hook's module"),
    *("a hook's arguments", "autocast", "inference mode", "weights", "a setting", "nothing"),
]


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3)), min_size=2, max_size=4))
def test_calls_after_any_change_are_plain_ones(changes):
    with pytest.MonkeyPatch.context() as monkeypatch:
        serve_in_place(monkeypatch)
        steered = Steered()
        for _ in range(2):
            steered.check()
        for change in changes:
            steered.change(*change)
            steered.check()


@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_seen(kind):
    steered = Steered()
    if kind == "autocast":
        pytest.skip("no forward is recorded there")

    def state():
        with steered.scope():
            return recorded_state(steered.model, {}, CPU)

    steered.change(kind, 1)
    before = state()
    assert state() == before
    steered.change(kind, 2)
    assert (state() == before) is (kind == "nothing")


def test_keywords_are_part_of_the_state():
    model = build(LlamaForCausalLM)

    def state(**arguments):
        return recorded_state(model, arguments, CPU)

    assert state(names=["a"]) == state(names=["a"])
    assert state(names=["a"]) != state(names=["b"])
    # Of what cannot be looked into nobody knows what it says next.
    assert state(names=iter(())) != state(names=iter(()))


def test_hooks_count_by_what_they_do_and_not_by_their_numbers():
    model = build(LlamaForCausalLM)
    states = []
    for factor in (2, 2, 3):
        handle = model.lm_head.register_forward_hook(partial(scaled, factors=[factor]))
        states.append(recorded_state(model, {}, CPU))
        handle.remove()
    assert states[0] == states[1] != states[2]


@pytest.mark.parametrize("kind", [MixtralForCausalLM, Qwen3MoeForCausalLM])
def test_how_a_checkpoint_was_read_is_no_change(kind, tmp_path):
    """Models whose weights were renamed or joined keep the rules by which they were."""
    build(kind).save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path)
    assert model._weight_conversions
    assert recorded_state(model, {}, CPU) == recorded_state(model, {}, CPU)


def test_what_is_too_much_to_read_is_recorded_anew():
    model = build(LlamaForCausalLM)
    model.history = list(range(100_000))
    assert recorded_state(model, {}, CPU) != recorded_state(model, {}, CPU)


def test_no_forward_is_recorded_under_autocast(monkeypatch):
    serve_in_place(monkeypatch)
    model = build(LlamaForCausalLM)
    with torch.autocast("cpu", torch.bfloat16):
        run(model, PROMPT, assistant=oracle_assistant(run(model)))
    assert not WORKSPACES._idle.get(model)


@pytest.mark.slow
def test_chats_of_all_lengths_record_little(monkeypatch):
    """200 calls of chats that grow from 20 to 4,000 tokens and begin anew."""
    serve_in_place(monkeypatch)
    model = build(LlamaForCausalLM, max_position_embeddings=8192)
    begin, begun = Replay._try, []

    def noted(replay, compute):
        begun.append(len(lengths))
        begin(replay, compute)

    monkeypatch.setattr(Replay, "_try", noted)
    # Kernels for CPUs are no operators that a recorder sees.
    assistant, rng = SamAssistant(budget=32, reroute=False), np.random.default_rng(0)
    text, lengths = torch.empty((1, 0), dtype=torch.int64), []
    for _ in range(200):
        if not 0 < text.shape[1] <= 4000 or rng.random() < 0.12:
            phrase = torch.from_numpy(rng.integers(2, 60, (1, 17)))
            text = phrase.repeat(1, 236)[:, : int(20 * 200 ** rng.random())]
        lengths.append(text.shape[1])
        answered = run(model, text, max_new_tokens=12, assistant=assistant)
        asked = torch.from_numpy(rng.integers(2, 60, (1, int(20 * 20 ** rng.random()))))
        text = torch.cat([answered, asked], dim=1)
    assert min(lengths) < 40
    assert max(lengths) > 3500
    assert 0 < len(begun) <= 12
    assert len(set(begun)) <= 20  # nine of ten calls record nothing


def test_chats_of_growing_length_share_what_was_recorded(monkeypatch):
    serve_in_place(monkeypatch)
    model = build(LlamaForCausalLM, max_position_embeddings=4096)
    text, made = PROMPT, []
    for _ in range(6):
        plain = run(model, text, max_new_tokens=40)
        run(model, text, max_new_tokens=40, assistant=oracle_assistant(plain, depth=2))
        made.append(sum(workspace.made for workspace in WORKSPACES._idle[model]))
        text = torch.cat([plain, plain[:, -60:].flip(1)], dim=1)
    assert len(WORKSPACES._idle[model]) == 1
    assert made[-1] == made[2]
