"""Compiled forwards, repeated from a recording where CUDA graphs would be."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig, Gemma3ForCausalLM, GenerationConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_retrieval_assist.host.compiled import _without_graphs, compiled_forward
from hf_retrieval_assist.host.transformers_private import compilations, makes_graphs
from hf_retrieval_assist.kernels.scopes import attending
from hf_retrieval_assist.verification import replay
from hf_retrieval_assist.verification.arena import Arena
from hf_retrieval_assist.verification.fixed_verifier import WIDTHS
from hf_retrieval_assist.verification.workspace import WORKSPACES
from tests.decoding.test_compiled import INPUTS, static
from tests.support import dense_attention, op_recorder
from tests.support.lossless import PROMPT, build
from tests.support.oracle_drafter import oracle_assistant

HOST = torch.device("cpu")


@pytest.fixture
def compiler(monkeypatch):
    op_recorder.serve_in_place(monkeypatch)
    with op_recorder.compiler() as compiler:
        yield compiler


def calls(model, inputs, compiler, number, **options):
    """Of so many equal calls, how often Python has run what was compiled, and their assistant."""
    options = static(compiler, do_sample=False, max_new_tokens=60, **options)
    plain, called = model.generate(**INPUTS[inputs], **options), []
    of_plain = compiler.graphs
    for _ in range(number):
        assistant = oracle_assistant(plain, INPUTS[inputs].get("attention_mask"))
        before = compiler.called
        found = model.generate(**INPUTS[inputs], **options, assistant=assistant)
        assert torch.equal(plain, found)
        assert assistant.stats.tier == "tree"
        assert assistant.stats.last.accepted > 0
        called.append(compiler.called - before)
    return called, compiler.graphs - of_plain, assistant


class Copies(TorchDispatchMode):
    """Counts the scatters of accepted paths."""

    def __init__(self):
        super().__init__()
        self.scatters = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.scatters += func.overloadpacket is torch.ops.aten.index_put_
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("model_class", "inputs"), [(LlamaForCausalLM, "padded"), (Gemma3ForCausalLM, "one row")]
)
def test_a_step_is_one_launch_of_what_was_compiled(model_class, inputs, compiler, monkeypatch):
    model, moves = build(model_class), []
    move = Arena.move

    def counted(arena, *arguments):
        with Copies() as copies:
            move(arena, *arguments)
        moves.append((copies.scatters, len(arena._groups)))

    monkeypatch.setattr(Arena, "move", counted)
    called, graphs, assistant = calls(model, inputs, compiler, 3)
    # One for a single token, one for the first other width, one for all others.
    assert graphs <= 3
    steps = assistant.stats.last.forwards
    assert steps > 4
    # Only a call's first forward, which asks the model how it prepares its inputs, runs Python.
    assert called == [*called[:2], 1]
    (workspace,) = WORKSPACES._idle[model]
    assert workspace.shape.compiled
    made = [step.replay for step in workspace._steps.values()]
    assert any(one._trusted for one in made)
    assert [one.fault for one in made] == [None] * len(made)
    assert workspace.made <= len(WIDTHS)
    assert {key.manner for key in assistant.costs._models} == {"compiled recorded"}
    # Layers that show torch memory of their own share it none the less.
    assert moves
    assert all(scatters == groups <= 2 for scatters, groups in moves)


def test_recordings_of_compiled_forwards_and_of_others_stand_beside_one_another(compiler):
    model = build(LlamaForCausalLM)
    calls(model, "one row", compiler, 2)
    (compiled,) = WORKSPACES._idle[model]
    plain = model.generate(PROMPT, do_sample=False, max_new_tokens=60)
    for _ in range(2):
        found = model.generate(
            PROMPT, do_sample=False, max_new_tokens=60, assistant=oracle_assistant(plain)
        )
        assert torch.equal(plain, found)
    calls(model, "one row", compiler, 1)
    first, second = WORKSPACES._idle[model]
    assert second is compiled
    assert not first.shape.compiled
    assert first.made


def test_a_capture_that_fails_leaves_compiled_code_to_its_caller(compiler, monkeypatch, told):
    def fails(compute):
        raise RuntimeError("operation not permitted when stream is capturing")

    works = replay.recorder
    monkeypatch.setattr(
        replay, "recorder", lambda device, compiled: fails if compiled else works(device, compiled)
    )
    model = build(LlamaForCausalLM)
    called, graphs, assistant = calls(model, "one row", compiler, 2)
    assert graphs <= 3
    assert called[1] == assistant.stats.last.forwards
    shown = [text for text in told.messages if "run as they were compiled" in text]
    assert len(shown) == 1
    assert "not permitted" in shown[0]
    # Forwards that are not compiled are recorded all the same.
    assert WORKSPACES.recorder(model, True, HOST) is None
    assert WORKSPACES.recorder(model, False, HOST) is not None


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_that_record_by_themselves_are_compiled_without_that(mode):
    options = CompileConfig(mode=mode).to_dict()
    model = nn.Linear(2, 2)
    theirs = torch.compile(model, **options).get_compiler_config()
    ours = _without_graphs(model, options).get_compiler_config()
    assert {name for name, value in theirs.items() if value != ours[name]} == {"triton.cudagraphs"}
    assert theirs["triton.cudagraphs"]


def test_options_that_record_by_themselves_are_kept_but_for_that():
    options = CompileConfig(mode=None, options={"triton.cudagraphs": True, "max_autotune": True})
    ours = _without_graphs(nn.Linear(2, 2), options.to_dict()).get_compiler_config()
    assert ours["max_autotune"]
    assert not ours["triton.cudagraphs"]


def test_every_call_finds_what_an_earlier_one_compiled():
    model, options = nn.Linear(2, 2), CompileConfig().to_dict()
    with torch.no_grad():
        _without_graphs(model, options)(torch.ones(1, 2))
        before = compilations()
        _without_graphs(model, options)(torch.ones(1, 2))
        assert compilations() == before
    torch._dynamo.reset()


def test_what_is_compiled_in_place_is_recorded_unless_it_records_itself(compiler):
    config = GenerationConfig()
    model = build(LlamaForCausalLM)
    assert compiled_forward(model, config, {}) is None
    model.model.layers[0].compile(backend=compiler)
    found = compiled_forward(model, config, {})
    assert found.call == found.recordable == model.__call__
    model.model.layers[1].compile(mode="reduce-overhead")
    assert makes_graphs(model.model.layers[1]._compiled_call_impl)
    assert compiled_forward(model, config, {}).recordable is None
    # Whose sizes are variables is not known of those.
    assert not found.widens


@pytest.mark.parametrize(
    ("model_class", "inputs"), [(LlamaForCausalLM, "padded"), (Gemma3ForCausalLM, "one row")]
)
def test_compiled_code_attends_by_the_kernels(model_class, inputs, compiler, monkeypatch):
    attended = dense_attention.install(monkeypatch)
    model = build(model_class)
    called, graphs, assistant = calls(model, inputs, compiler, 3)
    assert graphs <= 3
    assert called[2] == 1
    (workspace,) = WORKSPACES._idle[model]
    assert workspace.shape.attention_by == "triton"
    # Every layer of every forward, whether Python or a recording launched it.
    before = len(attended)
    calls(model, inputs, compiler, 1)
    layers = model.config.num_hidden_layers
    assert len(attended) - before == layers * assistant.stats.last.forwards


def test_compiled_code_that_is_not_recorded_attends_by_itself(compiler, monkeypatch):
    """What records itself would go on reading the tables of the call that it was made in."""
    attended = dense_attention.install(monkeypatch)
    monkeypatch.setattr(replay, "recorder", lambda device, compiled: None)
    model = build(LlamaForCausalLM)
    calls(model, "one row", compiler, 1)
    tested = len(attended)
    assert tested
    calls(model, "one row", compiler, 2)
    assert len(attended) == tested
    assert WORKSPACES._idle[model][-1].shape.attention_by == "mask"


def test_a_copy_of_the_mask_is_not_taken_for_it(compiler):
    module = nn.Identity()
    states = torch.ones(1, 2, 3, 4)
    empty = torch.full((), torch.nan).expand(1, 1, 3, 3)
    kernels = dense_attention.DenseAttention({empty.data_ptr(): None}, "sdpa")

    @torch.compile(backend=compiler, fullgraph=True)
    def attend(mask):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, states, states, states, mask)[0]

    with attending("sdpa", {module}, kernels), pytest.raises(RuntimeError, match="got a copy"):
        attend(torch.full((), torch.nan).expand(1, 1, 3, 3))
    with attending("sdpa", {module}, kernels):
        assert torch.equal(attend(torch.zeros(1, 1, 3, 3)), torch.ones(1, 3, 2, 4))
