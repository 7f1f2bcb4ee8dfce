"""What was recorded in one call is repeated in another only where that one computes the same."""

import gc
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils.import_utils import enable_tf32

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES
from hf_retrieval_assist.host.model_key import key_of, recording_key
from tests.support.changes import CHANGES, COMPUTED, RECORDABLE, exchanged
from tests.support.int8_weight import rounded
from tests.support.lossless import build, knowing, run, same
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import oracle_assistant
from tests.support.parts import needs
from tests.support.quick import cases, crossed

CPU = torch.device("cpu")


IN_PLACE = (
    *("a setting", "weights' memory", "another order", "a hook", "autocast"),
    *("rotary positions", "an operator", "a class's forward"),
)


CASES = [("a setting", "in place"), ("another order", "that grows"), ("a forward", "that grows")]
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
        assert torch.equal(text(), before) == (name == "autocast")
        assert (assistant.stats.last.repeated > 0) == (name in RECORDABLE)
    assert torch.equal(text(), before)


def adapted(model):
    """The model with two adapters."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config, adapter_name="one").eval()
    adapted.add_adapter("other", config)
    return adapted


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
        model = adapted(model)
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


def test_a_model_that_had_fewer_layers_meanwhile_repeats_nothing_of_before(monkeypatch):
    """What was recorded is of buffers that are gone."""
    serve_in_place(monkeypatch)
    model = build()
    assistant = knowing(run(model), budget=2)
    same(model, assistant=assistant, calls=3)
    assert assistant.stats.last.repeated > 0
    with (
        exchanged(model.model, "layers", lambda layers: layers[:2]),
        exchanged(model.config, "num_hidden_layers", lambda _: 2),
    ):
        same(model, assistant=assistant, calls=3, tier="tree")
        assert assistant.stats.last.repeated > 0
    same(model, assistant=assistant)
    assert assistant.stats.last.recordings > 0


@pytest.mark.parametrize("name", ["inference mode", "other attention", *COMPUTED])
def test_every_change_is_seen(name):
    """Under autocast nothing is recorded."""
    scopes = {
        "inference mode": lambda model: torch.inference_mode(),
        "other attention": lambda model: exchanged(
            model.config, "_attn_implementation", lambda _: "eager"
        ),
    }
    model = build()
    before = key_of(model)
    assert before == key_of(model)
    with (scopes | COMPUTED)[name](model):
        assert (recording_key(model, {}, CPU) is None) == (name == "autocast")
        assert key_of(model) != before
    assert key_of(model) == before


def test_what_libraries_hook_in_counts_by_what_it_is():
    model = build()
    keys = []
    for factor in (2, 2, 3):
        # What is called is written in torch.
        hook = partial(torch.utils.hooks.unserializable_hook, [factor])
        handle = model.lm_head.register_forward_hook(hook)
        keys.append(key_of(model))
        handle.remove()
    assert keys[0] == keys[1] != keys[2]
    # A verdict holds for all of them: adapters are mixed by hooks of each call.
    assert keys[0].structure == keys[2].structure


def test_keywords_are_part_of_the_state():
    model = build()

    def state(**arguments):
        return recording_key(model, arguments, CPU)

    assert state(names=["a"]) == state(names=["a"])
    assert state(names=["a"]) != state(names=["b"])
    assert state(ids=torch.ones(1)) == state(ids=torch.zeros(1))


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
    model.model.norm.shift = torch.zeros(32)
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


def test_nothing_is_kept_alive():
    model = build()
    model.held = held = np.zeros(3)
    ends = [weakref.ref(held), weakref.ref(model.lm_head.weight)]
    gc.disable()
    try:
        state = key_of(model)
        model.lm_head.weight = nn.Parameter(torch.ones(1))
        del model.held, held
        assert state
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


def test_quantised_weights_are_where_their_numbers_are():
    """Not where the tensor is that holds others, which has no address of its own."""
    model = build()
    model.lm_head.weight = weight = rounded(model.lm_head.weight)
    before = key_of(model)
    assert key_of(model) == before
    weight.values = weight.values.clone()
    assert key_of(model) != before


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
    model, matmul = build(), torch.backends.cuda.matmul
    before = key_of(model)
    with put_back(matmul, name):
        setattr(matmul, name, not getattr(matmul, name))
        assert key_of(model) != before
    assert key_of(model) == before


def test_pytorchs_own_switch_for_tf32(monkeypatch):
    """Its older getters raise afterwards."""
    serve_in_place(monkeypatch)
    model = build()
    plain, before = run(model), key_of(model)
    owners = torch.backends.cuda.matmul, torch.backends.cudnn
    with put_back(owners[0], "fp32_precision"), put_back(owners[1], "fp32_precision"):
        enable_tf32(True)
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        assert torch.equal(plain, run(model, assistant=oracle_assistant(plain)))
        assert WORKSPACES.report(model).idle
        assert key_of(model) != before


@pytest.mark.parametrize("kind", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_how_a_checkpoint_was_read_is_no_change(kind, tmp_path):
    """Models whose weights were renamed or joined keep the rules by which they were."""
    build(kind).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model._weight_conversions
    assert key_of(model) == key_of(model)
