"""What was recorded in one call is repeated in another only where that one computes the same."""

import gc
import weakref
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaForCausalLM, MixtralForCausalLM, Qwen3MoeForCausalLM
from transformers.utils.import_utils import enable_tf32

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES
from hf_retrieval_assist.verification.recorded_state import recorded_state, why_unrecorded
from tests.support.int8_weight import rounded
from tests.support.lossless import build, run, same
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import oracle_assistant
from tests.support.wrapped_models import Around

CPU = torch.device("cpu")


class Changing:
    """A model whose forwards depend on what its caller does between calls."""

    def __init__(self):
        self.model = build(LlamaForCausalLM, num_hidden_layers=2)
        head, scaled = self.model.lm_head, lambda logits, held: logits * held.strength
        self.model.lm_head = Around(head, scaled, strength=1.0)
        self.scope = ExitStack
        self.handles = []

    def change(self, kind, number):
        if kind == "a held object":
            self.model.lm_head.held.strength = 1.0 + number
        elif kind == "another object":
            self.model.lm_head.held = SimpleNamespace(strength=2.0 - number)
        elif kind == "inference mode":
            self.scope = partial(torch.inference_mode, bool(number % 2))
        elif kind == "weights":
            weight = self.model.lm_head.weight
            weight.data = weight.data.roll(number, 0).clone()
        elif kind == "a setting":
            self.model.model.norm.variance_epsilon = 10.0**-number
        elif kind == "the configuration":
            self.model.config.rope_parameters = {"rope_type": "default", "rope_theta": number}
        elif kind == "attention":
            self.model.set_attn_implementation("eager" if number % 2 else "sdpa")
        elif kind == "a hook":
            for handle in self.handles:
                handle.remove()
            hook = lambda module, arguments, output: output * number  # noqa: E731
            self.handles = [self.model.model.layers[0].mlp.register_forward_hook(hook)]
        elif kind == "autocast":
            self.scope = partial(torch.autocast, "cpu", torch.bfloat16, enabled=bool(number % 2))

    def check(self):
        with self.scope():
            same(self.model, assistant=oracle_assistant, max_new_tokens=24)


KINDS = [
    *("a held object", "another object", "inference mode", "weights", "a setting"),
    *("the configuration", "attention", "nothing"),
]
UNRECORDED = ["a hook", "autocast"]


@settings(max_examples=5, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(KINDS + UNRECORDED), st.integers(1, 3)), max_size=4))
def test_calls_after_any_change_are_plain_ones(changes):
    with pytest.MonkeyPatch.context() as monkeypatch:
        serve_in_place(monkeypatch)
        changing = Changing()
        for change in [("nothing", 0), *changes]:
            changing.change(*change)
            changing.check()


@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_seen(kind):
    changing = Changing()

    def state():
        with changing.scope():
            return recorded_state(changing.model, {}, CPU)

    changing.change(kind, 1)
    before = state()
    assert before is not None
    assert state() == before
    changing.change(kind, 2)
    assert (state() == before) is (kind == "nothing")


@pytest.mark.parametrize("kind", UNRECORDED)
def test_what_nobody_can_know_is_not_recorded(kind, monkeypatch):
    serve_in_place(monkeypatch)
    changing = Changing()
    changing.change(kind, 1)
    with changing.scope():
        assert recorded_state(changing.model, {}, CPU) is None
    changing.check()
    assert not WORKSPACES._idle.get(changing.model)


def test_a_forward_that_the_caller_has_exchanged_is_not_recorded():
    """Nor one that has taken over another one's name."""
    model = build(LlamaForCausalLM)
    layer = model.model.layers[0]
    own = layer.forward
    layer.forward = wraps(own)(lambda *arguments, **options: own(*arguments, **options))
    assert layer.forward.__module__.startswith("transformers")
    assert "nobody knows" in why_unrecorded(model, CPU)
    layer.forward = partial(type(layer).forward, layer)
    assert why_unrecorded(model, CPU) is None


def test_what_libraries_hook_in_counts_by_what_it_is():
    model = build(LlamaForCausalLM)
    states = []
    for factor in (2, 2, 3):
        # What is called is written in torch.
        hook = partial(torch.utils.hooks.unserializable_hook, [factor])
        handle = model.lm_head.register_forward_hook(hook)
        states.append(recorded_state(model, {}, CPU))
        handle.remove()
    assert states[0] == states[1] != states[2]


def test_keywords_are_part_of_the_state():
    model = build(LlamaForCausalLM)

    def state(**arguments):
        return recorded_state(model, arguments, CPU)

    assert state(names=["a"]) == state(names=["a"])
    assert state(names=["a"]) != state(names=["b"])
    # Of what cannot be looked into nobody knows what it says next.
    assert state(names=iter(())) is None
    assert state(names=[*range(100_000)]) is None


def test_objects_are_themselves_while_they_live():
    model = build(LlamaForCausalLM)
    model.held = np.zeros(3)
    before = recorded_state(model, {}, CPU)
    assert recorded_state(model, {}, CPU) == before
    model.held = np.zeros(3)
    gc.collect()
    assert recorded_state(model, {}, CPU) != before


def held(kind, model):
    """What holds one of a model's tensors, and the tensor's name there."""
    owner = {"parameter": model.model.embed_tokens, "buffer": model.model.rotary_emb}
    names = {"parameter": "weight", "buffer": "inv_freq", "attribute": "shift"}
    return owner.get(kind, model.model.norm), names[kind]


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_another_object_in_the_same_memory_is_another(kind):
    """Operators hold the objects that they have seen; here the old one is led elsewhere."""
    model = build(LlamaForCausalLM)
    model.model.norm.shift = torch.zeros(32)
    assistant = SamAssistant(budget=3)
    for _ in range(10):
        same(model, assistant=assistant)
    assert assistant.stats.last.repeated > 0
    before = recorded_state(model, {}, CPU)
    owner, name = held(kind, model)
    old = getattr(owner, name)
    setattr(owner, name, type(old)(old.data) if kind == "parameter" else old.detach())
    assert recorded_state(model, {}, CPU) != before
    old.data = torch.zeros_like(old)
    for _ in range(2):
        same(model, assistant=assistant)


def test_nothing_is_kept_alive():
    model = build(LlamaForCausalLM)
    model.held = held = np.zeros(3)
    ends = [weakref.ref(held), weakref.ref(model.lm_head.weight)]
    gc.disable()
    try:
        state = recorded_state(model, {}, CPU)
        model.lm_head.weight = nn.Parameter(torch.ones(1))
        del model.held, held
        assert state is not None
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


def test_quantised_weights_are_where_their_numbers_are():
    """Not where the tensor is that holds others, which has no address of its own."""
    model = build(LlamaForCausalLM)
    model.lm_head.weight = weight = rounded(model.lm_head.weight)
    before = recorded_state(model, {}, CPU)
    assert recorded_state(model, {}, CPU) == before
    weight.values = weight.values.clone()
    assert recorded_state(model, {}, CPU) != before


@contextmanager
def put_back(owner, name):
    """Scope after which a setting of PyTorch's is as before; pytest would take it off instead."""
    before = getattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, before)


FLAGS = [
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
]


@pytest.mark.parametrize("name", FLAGS)
def test_how_sums_are_rounded_is_part_of_the_state(name):
    model, matmul = build(LlamaForCausalLM), torch.backends.cuda.matmul
    before = recorded_state(model, {}, CPU)
    with put_back(matmul, name):
        setattr(matmul, name, not getattr(matmul, name))
        assert recorded_state(model, {}, CPU) != before
    assert recorded_state(model, {}, CPU) == before


def test_pytorchs_own_switch_for_tf32(monkeypatch):
    """After which its older getters raise."""
    serve_in_place(monkeypatch)
    model = build(LlamaForCausalLM)
    plain, before = run(model), recorded_state(model, {}, CPU)
    owners = torch.backends.cuda.matmul, torch.backends.cudnn
    with put_back(owners[0], "fp32_precision"), put_back(owners[1], "fp32_precision"):
        enable_tf32(True)
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        assert torch.equal(plain, run(model, assistant=oracle_assistant(plain)))
        assert WORKSPACES._idle[model]
        assert recorded_state(model, {}, CPU) != before


@pytest.mark.parametrize("kind", [MixtralForCausalLM, Qwen3MoeForCausalLM])
def test_how_a_checkpoint_was_read_is_no_change(kind, tmp_path):
    """Models whose weights were renamed or joined keep the rules by which they were."""
    build(kind).save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path)
    assert model._weight_conversions
    state = recorded_state(model, {}, CPU)
    assert state is not None
    assert recorded_state(model, {}, CPU) == state
