"""Norms and rotary embeddings that are compiled, most by a stand-in for the compiler."""

import pytest
import torch
from transformers.models.llama import modeling_llama

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.engines.cuda import fused, replay
from hf_retrieval_assist.engines.cuda.fused import fusing
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES
from hf_retrieval_assist.host.transformers_private import compilations
from tests.support.lossless import PROMPT, build, run
from tests.support.op_recorder import idle, serve_in_place
from tests.support.oracle_drafter import OracleDrafter
from tests.support.rounding import OF_MODEL, within
from tests.support.threads import in_threads
from tests.support.watching import a_librarys


@pytest.fixture
def compile_as(monkeypatch):
    """Let a function run whatever is compiled, given that and its arguments."""

    def install(run):
        run = a_librarys(run)

        def compile(function, backend):
            return lambda *args, **kwargs: run(function, *args, **kwargs)

        monkeypatch.setattr(torch, "compile", a_librarys(compile))
        monkeypatch.setattr(fused, "_attributes", {})

    return install


@pytest.fixture
def compiled(compile_as):
    """The names of functions that were compiled, as often as they ran."""
    found = []

    def run(function, *args, **kwargs):
        found.append(function.__qualname__)
        return function(*args, **kwargs)

    compile_as(run)
    return found


FUNCTIONS = {
    "LlamaForCausalLM": {"LlamaRMSNorm.forward": 7, "apply_rotary_pos_emb": 3},
    "Qwen3ForCausalLM": {"Qwen3RMSNorm.forward": 13, "apply_rotary_pos_emb": 3},
    "Gemma3ForCausalLM": {"Gemma3RMSNorm.forward": 19, "apply_rotary_pos_emb": 3},
    "GPT2LMHeadModel": {},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_compiled(name, compiled):
    model = build(name)
    plain = model(PROMPT).logits
    assert not compiled
    with fusing(model):
        assert torch.equal(model(PROMPT).logits, plain)
    assert {one: compiled.count(one) for one in set(compiled)} == FUNCTIONS[name]


def test_a_scope_leaves_nothing_behind_and_concerns_one_thread(compiled, monkeypatch):
    """What a caller put there stays."""
    model, seen = build(), []
    forward, rotate = modeling_llama.LlamaRMSNorm.forward, modeling_llama.apply_rotary_pos_emb
    scope = fusing(model)
    for _ in range(2):
        with scope:
            assert modeling_llama.LlamaRMSNorm.forward is not forward
            in_threads(lambda _: model(PROMPT), [0])
            assert not compiled
        with pytest.raises(KeyError), scope:
            raise KeyError
        assert modeling_llama.LlamaRMSNorm.forward is forward
        assert modeling_llama.apply_rotary_pos_emb is rotate

    def own(*args, **kwargs):
        seen.append(True)
        return rotate(*args, **kwargs)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own)
    with scope:
        model(PROMPT)
    assert modeling_llama.apply_rotary_pos_emb is own
    assert len(seen) == 3
    assert "apply_rotary_pos_emb" not in compiled


def test_what_cannot_be_compiled_runs_as_always(compile_as, told):
    def run(*args, **kwargs):
        raise RuntimeError("no compiler is there")

    compile_as(run)
    model = build()
    plain = model(PROMPT).logits
    with fusing(model):
        assert torch.equal(model(PROMPT).logits, plain)
    said = [r.getMessage() for r in told.records if "is not compiled" in r.getMessage()]
    assert len(said) == 2
    assert "no compiler is there" in said[0]


@pytest.mark.parametrize("capturing", [False, True])
def test_what_a_capture_or_memory_breaks_is_compiled_again(capturing, compile_as, monkeypatch):
    error = RuntimeError("operation failed") if capturing else torch.OutOfMemoryError("full")
    broken, runs = [True], []

    def run(function, *args, **kwargs):
        if broken:
            raise error
        runs.append(function)
        return function(*args, **kwargs)

    compile_as(run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    model = build()
    with fusing(model), pytest.raises(type(error)):
        model(PROMPT)
    broken.clear()
    with fusing(model):
        model(PROMPT)
    assert runs


def texts(model, kinds):
    """Calls with such graphs, whose texts are plain decoding's; what was recorded is looked at
    behind each."""
    plain = run(model, max_new_tokens=40)
    for graphs in kinds:
        assistant = Assistant([OracleDrafter(plain.tolist())], budget=16, graphs=graphs)
        assert torch.equal(run(model, max_new_tokens=40, assistant=assistant), plain)
        yield graphs, idle(model), assistant.stats.last


def test_fused_and_other_recordings_are_kept_apart(compiled, monkeypatch):
    serve_in_place(monkeypatch)
    model, scopes = build(), []
    record = replay.recorder(None)

    def recorded(compute, within=None):
        scopes.append(type(within))
        return record(compute)

    monkeypatch.setattr(replay, "recorder", lambda _: recorded)
    for graphs, workspace, _ in texts(model, (True, "fused", True, "fused")):
        assert workspace.shape.fused == (graphs == "fused")
    assert {*scopes[: len(scopes) // 2]} == {type(None)}
    assert {*scopes[len(scopes) // 2 :]} == {fusing}
    with pytest.raises(ValueError, match="graphs: expected True, False or 'fused', got 'all'"):
        Assistant([], graphs="all")


def test_what_is_off_when_fused_is_recorded_as_it_is(compiled, monkeypatch):
    """No other call of the model hears of it."""
    serve_in_place(monkeypatch)
    model, record = build(), replay.recorder(None)

    def recorded(compute, within=None):
        repeat, shown = record(compute)
        if within is None:
            return repeat, shown
        return lambda: (repeat(), shown.logits.neg_()), shown

    monkeypatch.setattr(replay, "recorder", lambda _: recorded)
    for graphs, workspace, last in texts(model, ["fused"] * 3 + [True] * 3):
        steps = workspace.kinds.values()
        assert not any(step.spare for step in steps if step.trusted)
        assert any(step.spare and step.fault for step in steps) == (graphs == "fused")
        settled = last.repeated == last.forwards
    assert settled
    assert not WORKSPACES.report(model).faults


def test_a_compiler_of_pytorch(monkeypatch):
    """It follows the functions, and none of what it runs is this package's."""
    monkeypatch.setattr(fused, "_BACKEND", "aot_eager")
    monkeypatch.setattr(fused, "_attributes", {})
    model = build(num_hidden_layers=1)
    plain = model(PROMPT).logits
    before = compilations()
    with torch.no_grad(), fusing(model):
        torch.testing.assert_close(model(PROMPT).logits, plain, **within(plain, OF_MODEL))
    assert compilations() > before


def test_other_models_are_other_functions_to_a_compiler(compile_as):
    """Which gives up compiling one when it has done so some times."""
    codes = {}

    def run(function, *args, **kwargs):
        first = next(x for x in args if isinstance(x, torch.Tensor))
        kind = function.__qualname__, first.dtype, first.shape[-1]
        codes.setdefault(function.__code__, set()).add(kind)
        return function(*args, **kwargs)

    compile_as(run)
    for size in (32, 64):
        for dtype in (torch.float32, torch.bfloat16):
            model = build(hidden_size=size).to(dtype)
            for width in (1, 3):
                with fusing(model):
                    model(PROMPT[:, :width])
    assert len(codes) == len(set.union(*codes.values())) > 4
    assert {len(kinds) for kinds in codes.values()} == {1}
