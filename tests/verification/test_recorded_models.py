"""What was recorded in one call is repeated in another only where that one computes the same."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from transformers.utils.import_utils import enable_tf32

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES
from hf_retrieval_assist.host.model_key import key_of
from tests.support.changes import CHANGES, RECORDABLE, exchanged
from tests.support.lossless import build, knowing, run, same
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import oracle_assistant
from tests.support.parts import needs
from tests.support.quick import cases, crossed
from tests.support.wrapped_models import with_lora

IN_PLACE = (
    *("a setting", "weights' memory", "another order", "fewer layers", "a hook", "autocast"),
    *("rotary positions", "an operator", "a class's forward"),
)


CASES = [("fewer layers", "in place"), ("another order", "that grows"), ("a forward", "that grows")]
CASES += [(name, "that grows") for name in CHANGES] + [(name, "in place") for name in IN_PLACE]


@needs("engines/cpu")
@pytest.mark.parametrize(("name", "memory"), cases(dict.fromkeys(CASES), 3))
def test_calls_of_a_model_that_was_changed_and_changed_back_are_plain(name, memory, monkeypatch):
    """What was recorded before is not repeated, nor is afterwards what was recorded meanwhile."""
    if memory == "in place":
        serve_in_place(monkeypatch)
    model = build()
    assistant = knowing(run(model), budget=2)

    def text():
        return same(model, assistant=assistant, calls=4, max_new_tokens=14)[0]

    before = text()
    assert assistant.stats.last.repeated > 0
    with CHANGES[name](model):
        assert not torch.equal(text(), before)
        assert (assistant.stats.last.repeated > 0) == (name in RECORDABLE)
    assert torch.equal(text(), before)


@contextmanager
def switched(model):
    model.set_adapter("other")
    try:
        yield
    finally:
        model.set_adapter("one")


IN_TURNS = {
    "adapters": switched,
    "an adapter and none": lambda model: model.disable_adapter(),
    "inference mode": lambda model: torch.inference_mode(),
    **{name: CHANGES[name] for name in ("a setting", "another order", "the configuration")},
}


@needs("engines/cpu")
@pytest.mark.parametrize(
    ("name", "memory"), cases(crossed(IN_TURNS, ["that grows", "in place"]), 2)
)
def test_what_changes_in_turns_is_recorded_once_in_each_state(name, memory, monkeypatch):
    if memory == "in place":
        serve_in_place(monkeypatch)
    model = build()
    if "adapter" in name:
        model = with_lora(model, "one", "other", r=4, target_modules=["q_proj", "v_proj"])
    states = [IN_TURNS[name], lambda model: nullcontext()]
    plain, assistants = [], []
    for state in states:
        with state(model):
            plain.append(run(model, max_new_tokens=40))
            assistants.append(knowing(plain[-1], budget=2))
    for turn in range(5):
        for i, state in enumerate(states):
            with state(model):
                assert torch.equal(run(model, max_new_tokens=40, assistant=assistants[i]), plain[i])
            last = assistants[i].stats.last
            assert turn < 3 or 0 == last.recordings < last.repeated == last.forwards


def test_the_oldest_of_many_states_are_forgotten(monkeypatch):
    serve_in_place(monkeypatch)
    monkeypatch.setattr("hf_retrieval_assist.engines.cuda.workspace.MOST_STATES", 3)
    model = build()
    assistant, attention = knowing(run(model), budget=2), model.model.layers[0].self_attn

    def recorded(scaling):
        attention.scaling = scaling
        same(model, assistant=assistant, max_new_tokens=14)
        return assistant.stats.last.recordings > 0

    assert [recorded(scaling) for scaling in (1.0, 2.0, 3.0)] == [True] * 3
    assert [recorded(scaling) for scaling in (1.0, 4.0)] == [False, True]
    assert [recorded(scaling) for scaling in (3.0, 1.0, 2.0)] == [False, False, True]


def held(kind, model):
    """What holds one of a model's tensors, and the tensor's name there."""
    owner = {"parameter": model.model.embed_tokens, "buffer": model.model.rotary_emb}
    names = {"parameter": "weight", "buffer": "inv_freq", "attribute": "shift"}
    return owner.get(kind, model.model.norm), names[kind]


@needs("engines/cpu")
@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_another_object_in_the_same_memory_is_another(kind):
    """Operators hold the objects that they have seen; here the old one is led elsewhere."""
    model = build()
    model.model.norm.shift = torch.zeros(64)
    assistant = SamAssistant(budget=3)
    same(model, assistant=assistant, calls=10)
    assert assistant.stats.last.repeated > 0
    before = key_of(model)
    owner, name = held(kind, model)
    old = getattr(owner, name)
    setattr(owner, name, type(old)(old.data) if kind == "parameter" else old.detach())
    assert key_of(model) != before
    old.data = torch.zeros_like(old)
    same(model, assistant=assistant, calls=2)


def test_pytorchs_own_switch_for_tf32(monkeypatch):
    """Its older getters raise afterwards."""
    serve_in_place(monkeypatch)
    model = build()
    plain, before = run(model), key_of(model)
    owners = torch.backends.cuda.matmul, torch.backends.cudnn
    unchanged = [exchanged(owner, "fp32_precision", lambda x: x) for owner in owners]
    with unchanged[0], unchanged[1]:
        enable_tf32(True)
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        assert torch.equal(plain, run(model, assistant=oracle_assistant(plain)))
        assert WORKSPACES.report(model).idle
        assert key_of(model) != before
