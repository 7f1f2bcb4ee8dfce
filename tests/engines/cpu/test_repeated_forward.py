"""Forwards on a CPU that are recorded once and then repeated: what is, what is not, and what is
noticed of a model that changes."""

import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoKrConfig, LoraConfig, RandLoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations
from transformers import LlamaForCausalLM

from hf_retrieval_assist import Assistant, SamAssistant, reroute
from hf_retrieval_assist.cache.slot_layers import SlotLayer
from hf_retrieval_assist.engines.cpu import repeated_forward
from hf_retrieval_assist.engines.cpu.program import Program, UnrecordableError
from hf_retrieval_assist.engines.cpu.recording import Recorder
from hf_retrieval_assist.engines.cpu.repeated_forward import same_bits
from hf_retrieval_assist.engines.cpu.skinny import route_depth
from hf_retrieval_assist.system.tensors import thread
from tests.support import architectures
from tests.support.lossless import PROMPT, build, knowing, rope_model, run, same
from tests.support.quick import cases, crossed
from tests.support.threads import in_threads
from tests.support.watching import calls_of, results_of
from tests.support.wrapped_models import Around

CLASSES = [
    *("LlamaForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel"),
    *("Qwen3ForCausalLM", "Phi3ForCausalLM"),
]


def repeating(model, assistant=None, **options):
    """An assistant all of whose forwards of this call were recorded by earlier ones."""
    # A fallback whose drafts have all widths at several lengths.
    few = {"budget": 3, "fallback": "logit_ngrams"}
    assistant = assistant or knowing(run(model, **options), **few)
    for _ in range(8):
        same(model, assistant=assistant, **options)
    return assistant


@pytest.mark.parametrize(("name", "sampled"), cases(crossed(CLASSES, [False, True]), 2))
def test_forwards_are_repeated(name, sampled):
    options = {"do_sample": sampled, "seed": 6}
    last = repeating(architectures.build(name), **options).stats.last
    assert last.repeated == last.forwards
    assert last.recordings == 0
    assert last.accepted > 0


def module_of_its_own(model):
    model.model.layers[0].mlp = Around(model.model.layers[0].mlp, lambda x, _: x)


UNREPEATED = {
    "a user's module": module_of_its_own,
    "attention that is not looked up": lambda model: model.set_attn_implementation("eager"),
    "attention of its own": lambda _: architectures.build("FalconForCausalLM"),
    "dynamic RoPE": lambda _: rope_model("dynamic", 128),
}


@pytest.mark.parametrize("change", cases(UNREPEATED.values(), 2), ids=UNREPEATED)
def test_what_python_may_decide_is_not_repeated(change):
    model = build(LlamaForCausalLM)
    last = repeating(change(model) or model).stats.last
    assert last.repeated == last.recordings == 0


def adapted(config, **options):
    return lambda model, names: get_peft_model(model, config(target_modules=names, **options))


def parametrised(wrap):
    """Weights of linear layers that the forward computes."""

    def change(model, names):
        for name, module in [*model.named_modules()]:
            if isinstance(module, nn.Linear) and name.rsplit(".")[-1] in names:
                wrap(module)
        return model

    return change


COMPUTED_WEIGHTS = {
    "weight_norm": parametrised(parametrizations.weight_norm),
    "orthogonal": parametrised(parametrizations.orthogonal),
    "LoKr": adapted(LoKrConfig, r=2, init_weights=False),
    "RandLoRA": adapted(RandLoraConfig, r=2, init_weights=False),
    "LoRA": adapted(LoraConfig, r=2, init_lora_weights=False),
    "DoRA": adapted(LoraConfig, r=2, use_dora=True, init_lora_weights=False),
}
PLACES = {
    "some of a layer's": ("v_proj", "up_proj", "o_proj"),
    "the output layer's": ("lm_head",),
}


@torch.no_grad()
@pytest.mark.parametrize(("name", "place"), cases(crossed(COMPUTED_WEIGHTS, PLACES), 1))
def test_a_training_step_shows_in_weights_that_forwards_compute(name, place):
    model = COMPUTED_WEIGHTS[name](build(LlamaForCausalLM), PLACES[place]).eval()
    assistant, before = repeating(model), run(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.mul_(torch.randn(parameter.shape) * 3)
    plain, *_ = same(model, assistant=assistant)
    assert not torch.equal(plain, before)
    assert assistant.stats.last.repeated > 0


def test_a_program_that_gives_something_else_is_not_used(monkeypatch):
    model, logits = build(LlamaForCausalLM), Program.logits
    monkeypatch.setattr(Program, "logits", lambda *given: logits(*given) * (1 + 1e-6))
    last = repeating(model).stats.last
    assert last.repeated == last.recordings == 0


def test_programs_are_compared_anew_where_the_text_has_doubled(monkeypatch):
    model = build(LlamaForCausalLM, max_position_embeddings=512)
    assistant = repeating(model)
    monkeypatch.setattr(Program, "run", lambda *_: pytest.fail("was not compared"))
    monkeypatch.setattr(repeated_forward, "same_bits", lambda *_: pytest.fail("was compared"))
    with pytest.raises(pytest.fail.Exception, match="was not compared"):
        run(model, assistant=assistant)
    monkeypatch.undo()
    compared = calls_of(monkeypatch, repeated_forward, "same_bits")
    run(model, PROMPT.repeat(1, 8), assistant=assistant)
    assert compared


def test_a_length_that_was_made_a_constant_would_be_noticed(monkeypatch):
    """No program is tried at the length of the cache at which it was recorded."""
    model, tried = build(LlamaForCausalLM), calls_of(monkeypatch, Program, "run")
    for _ in range(5):  # calls of one forward each, all at one length
        same(model, assistant=Assistant([], budget=0), max_new_tokens=2)
    assert not tried
    same(model, assistant=Assistant([], budget=0), max_new_tokens=3)
    assert tried


def test_forwards_are_filled_up_to_no_more_than_was_tested(monkeypatch):
    def width(result, forward, input_ids, **_):
        return input_ids.shape[1]

    fed = results_of(monkeypatch, repeated_forward.RepeatedForward, "__call__", width)
    model = build(LlamaForCausalLM)
    repeating(model, knowing(run(model), budget=16))
    assert max(fed) == 17


def test_programs_go_with_the_model_and_hold_no_weights_back():
    model = build(LlamaForCausalLM)
    assistant = repeating(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weakref.ref(weight.data.untyped_storage())
    del weight
    model.to(torch.bfloat16)
    known = weakref.ref(model)
    del model, assistant
    gc.collect()
    assert known() is None
    assert before() is None


def failing(monkeypatch, fails):
    """Let recordings of so many tokens be too large for which `fails` holds."""
    make = Recorder.program

    def program(recorder, logits):
        made = make(recorder, logits)
        if fails(logits.shape[1]):
            made.nbytes = repeated_forward.MOST_BYTES + 1
        return made

    monkeypatch.setattr(Recorder, "program", program)


def test_what_cannot_be_recorded_of_one_width_may_be_of_others(monkeypatch):
    model = build(LlamaForCausalLM)
    failing(monkeypatch, lambda tokens: tokens > 4)
    wide, narrow = knowing(run(model), budget=12), SamAssistant(budget=0)
    for _ in range(8):
        same(model, assistant=wide)
    assert {tokens > 4 for _, tokens in repeated_forward.PROGRAMS.report(model).faults} == {True}
    for _ in range(2):
        same(model, assistant=narrow)
    assert narrow.stats.last.repeated > 0


def test_a_model_that_cannot_be_recorded_is_tried_once_as_it_is(monkeypatch):
    model, assistant = build(LlamaForCausalLM), Assistant([], budget=0)
    tried = results_of(monkeypatch, repeated_forward._ShapeRecording, "record")
    failing(monkeypatch, lambda tokens: True)
    for setting in ("as it was", "another"):
        model.model.layers[0].mlp.setting = setting
        tried.clear()
        for _ in range(3):
            run(model, assistant=assistant, max_new_tokens=8)
            assert len(tried) == 1
    assert assistant.stats.last.repeated == assistant.stats.last.recordings == 0


def test_an_option_turns_it_off():
    model = build(LlamaForCausalLM)
    assert repeating(model, SamAssistant(budget=4, graphs=False)).stats.last.repeated == 0


@pytest.mark.slow
def test_calls_of_two_threads_repeat_programs_that_they_do_not_share():
    """Side by side, while a third one decodes plainly, which changes nothing of the model."""
    model, together = build(LlamaForCausalLM), threading.Barrier(3)
    prompts = [PROMPT, PROMPT.flip(1), PROMPT.roll(3)]
    plain = [run(model, prompt) for prompt in prompts]

    def meet(ids, scores):
        if ids.shape[1] == PROMPT.shape[1] + 1:
            together.wait(60)
        return scores

    def converse(i):
        for _ in range(12):
            assistant = knowing(plain[i], budget=3) if i < 2 else None
            found = run(model, prompts[i], logits_processor=[meet], assistant=assistant)
            assert torch.equal(found, plain[i])
        return assistant and assistant.stats.last

    for last in in_threads(converse, range(3))[:2]:
        assert last.repeated == last.forwards > 0 == last.recordings


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))


ELSEWHERE = torch.ones(8)
UNRECORDABLE = {
    "a number": lambda model, x: x * x.sum().item(),
    "a list": lambda model, x: x * x.sum(-1).tolist()[0],
    "an array": lambda model, x: x * torch.from_numpy(x.numpy()),
    "a decision": lambda model, x: x if x.sum() > 0 else -x,
    "a shape": lambda model, x: x[x > 0].sum() + x,
    "chance": lambda model, x: x + torch.rand(8),
    "dropout": lambda model, x: nn.functional.dropout(x, 0.5, training=True),
    "a tensor of somebody": lambda model, x: x + ELSEWHERE,
    "a write to a buffer": lambda model, x: x + model.seen.add_(1),
    "a write to an input": lambda model, x: x.add_(1),
}


def program_of(model, x, compute):
    """What is recorded of a forward, and the result of that forward."""
    recording = Recorder(model, {"x": x}, [], [])
    with recording:
        first = compute(model, recording.inputs["x"])
    return recording.program(first), first


def logits_of(program, x):
    return program.logits(program.run({"x": x}, [], []))


def linear_of(model, x):
    return model.linear(x)


@torch.no_grad()
@pytest.mark.parametrize("compute", UNRECORDABLE.values(), ids=UNRECORDABLE)
def test_what_depends_on_more_than_shapes_is_not_recorded(compute):
    with pytest.raises(UnrecordableError):
        program_of(Small(), torch.randn(1, 8), compute)
    assert thread.recorder is None


def linear(x, weight, bias=None):
    return nn.functional.linear(x, weight, bias)


def rooms_of(a, b):
    """Writes into parts of what was made empty."""
    room = torch.empty(1, 8)
    room[:, :4].copy_(a[:, 4:])
    room[:, 4:].copy_(b[:, :4])
    return room


# What a forward may compute of two of its tensors, each float32 [1, 8].
OPERATORS = {
    "a layer": lambda model, a, b: model.linear(a),
    "a layer of a sum": lambda model, a, b: model.linear(a + b),
    "a layer that is written to": lambda model, a, b: model.linear(a).mul_(b),
    "a computed weight": lambda model, a, b: linear(a, model.linear.weight * b),
    "a view as weight": lambda model, a, b: linear(
        a, torch.stack([b[0], b.flip(-1)[0]]).repeat(4, 1)[:, None].flatten(0, 1)
    ),
    "a result as weight": lambda model, a, b: linear(a, model.linear(b.expand(8, 8).contiguous())),
    "a computed bias": lambda model, a, b: linear(a, model.linear.weight, b[0]),
    "a column as bias": lambda model, a, b: linear(a, model.linear.weight, (a * b).T[:, 0]),
    "a number as bias": lambda model, a, b: linear(a, model.linear.weight, b.mean().expand(8)),
    "an activation": lambda model, a, b: nn.functional.silu(a) - b.flip(-1),
    "a product": lambda model, a, b: (a * b).tanh(),
    "a view": lambda model, a, b: a.view(2, 4).T.T.view(1, 8),
    "a part for all": lambda model, a, b: a + b[:, 2:3],
    "parts": lambda model, a, b: torch.cat([-a[:, 4:], b[:, :4]], -1) * a.mean() + 1,
    "rooms": lambda model, a, b: rooms_of(a, b),
    "several results": lambda model, a, b: torch.cat([a.topk(4)[0], b.sort()[0][:, 4:]], -1),
    "places": lambda model, a, b: a[:, torch.arange(8).flip(0)] + torch.zeros(8).fill_(2.0),
    "other dtypes": lambda model, a, b: (a.bfloat16() * 3).float() + b.double().float(),
    "a write": lambda model, a, b: a.mul_(0.5),
    "a write of another": lambda model, a, b: a.copy_(b),
    "an indexed write": lambda model, a, b: a.index_add_(0, torch.tensor([0]), b + 1),
    "zeros": lambda model, a, b: a.zero_(),
}


@torch.no_grad()
@settings(max_examples=150)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from([*OPERATORS]), st.integers(0, 30), st.integers(0, 30)),
        min_size=1,
        max_size=25,
    ),
    last=st.integers(0, 30),
)
def test_a_program_computes_from_what_it_is_given(steps, last):
    """Layers of one input may be computed together, and results lie where others have lain, but
    never across a write or before what they read."""

    def compute(model, x):
        found = [x + 1, x * 2]
        for name, a, b in steps:
            found.append(OPERATORS[name](model, found[a % len(found)], found[b % len(found)]))
        return found[last % len(found)] + found[-1]

    model, x = Small(), torch.randn(1, 8)
    with reroute():
        program, first = program_of(model, x, compute)
        assert same_bits(first, compute(model, x))
        for _ in range(3):
            x = torch.randn(1, 8)
            assert same_bits(logits_of(program, x), compute(model, x))


@torch.no_grad()
@pytest.mark.parametrize("layers", [2, 40])
def test_results_lie_where_those_lay_that_nobody_reads_any_more(layers):
    """So many layers take no more memory than two, and logits none; the recording's is free."""
    model, places = Small(), []

    def compute(model, x):
        for _ in range(layers):
            x = x + nn.functional.silu(model.linear(x))
            places.append(weakref.ref(x.untyped_storage()))
        return nn.functional.linear(x, model.linear.weight.repeat(100, 1))

    with reroute():
        program, first = program_of(model, torch.randn(1, 8), compute)
        kept = first.clone()
        assert [place() for place in places] == [None] * layers
        # Residual stream, product and activation, of an own size or two, and the weight.
        assert program.nbytes <= 6 * 64 + 100 * model.linear.weight.nbytes
        again = torch.randn(1, 8)
        assert same_bits(logits_of(program, again), compute(model, again))
    assert same_bits(first, kept)


@torch.no_grad()
def test_a_program_routes_its_own_operators_alone():
    """Nobody need have entered a scope, and an operator may fail."""
    model, x = Small(), torch.randn(1, 8)
    with reroute():
        program, first = program_of(model, x, linear_of)
    assert same_bits(logits_of(program, x), first)
    assert route_depth() == 0
    program._own.append(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits_of(program, x)
    assert route_depth() == 0


@pytest.mark.parametrize(("new", "found"), [(1, 0), (2, 1), (9, 1)])
def test_the_first_token_waits_for_nothing_that_later_ones_need(new, found, monkeypatch):
    """A model's state is read, and keys and values are moved, for the first forward behind it."""
    model = build(LlamaForCausalLM)
    assistant = repeating(model)
    reads = calls_of(monkeypatch, repeated_forward, "recording_key")
    moves = calls_of(monkeypatch, SlotLayer, "attach")
    plain = run(model, max_new_tokens=new)
    assert torch.equal(plain, run(model, assistant=assistant, max_new_tokens=new))
    # Forwards of one token alone are met for the first time then, and recorded at once.
    assert len(reads) == found + (new == 2)
    assert len(moves) == found * model.config.num_hidden_layers
