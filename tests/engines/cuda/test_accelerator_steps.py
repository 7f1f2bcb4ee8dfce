"""What a step launches and copies on an accelerator, counted on a stand-in."""

import pytest
import torch
from transformers import LlamaForCausalLM, MixtralForCausalLM

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.decoding import draws
from hf_retrieval_assist.decoding.loop import Generation
from tests.support.accelerator import DEVICE, Accelerator
from tests.support.heads import DRAFTERS, as_launches, layers_of, put_head
from tests.support.lossless import build, padded
from tests.support.memories import remembering
from tests.support.oracle_drafter import oracle_assistant

pytestmark = pytest.mark.slow

# What the first forward of a width does besides: it takes memory.
ALLOCATIONS = [("loop", "kernel", f"aten.{name}.default") for name in ("zeros", "new_zeros")]

LAYERS = 4
# Kernels of a layer by which more tokens take more than one: repeated heads, and grouped experts
# (with torch 2.11 three more than with 2.13).
MORE = {LlamaForCausalLM: 2, MixtralForCausalLM: 12}
NEW_TOKENS = 16
OPTIONS = {"do_sample": False, "max_new_tokens": NEW_TOKENS}


def counted_steps(make, rows, monkeypatch, model_class=LlamaForCausalLM, **options):
    """The assistant of a call, whose tokens are plain decoding's, kernels of one of the model's
    forwards, and each step's counts and new tokens.

    Args:
        make: makes the assistant from plain decoding's result, its mask, the model and the machine.
    """
    model, machine = build(model_class, num_hidden_layers=LAYERS), Accelerator()
    inputs, options = padded(rows), OPTIONS | options
    torch.manual_seed(0)
    plain = model.generate(**inputs, **options)
    assistant = make(plain, inputs["attention_mask"], model, machine)
    machine.put(model)
    steps, whole = [], Generation.step

    def counted(generation):
        machine.reset()
        before = sum(map(len, generation.rows))
        whole(generation)
        counts = dict(machine.counts) | dict(machine.calls)
        steps.append((counts, sum(map(len, generation.rows)) - before))

    with machine, machine.watch(model):
        there = {key: value.to(DEVICE) for key, value in inputs.items()}
        machine.reset()
        model.generate(**there, **OPTIONS)
        # The prefill costs what a step does.
        of_model = machine.counts["model", "kernel"] / NEW_TOKENS
        monkeypatch.setattr(Generation, "step", counted)
        torch.manual_seed(0)
        assisted = model.generate(**there, **options, assistant=assistant)
        assert torch.equal(assisted.cpu(), plain)
    return assistant, of_model, steps


def launched(step):
    return step["loop", "kernel"] - sum(step.get(key, 0) for key in ALLOCATIONS)


def knowing(plain, mask, *_):
    return oracle_assistant(plain, mask)


ASSISTANTS = {
    "oracle": knowing,
    "sam": lambda plain, *_: SamAssistant([row.tolist() for row in plain], budget=16),
    "suffix": lambda *_: remembering(budget=16),
}


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize(
    ("name", "model_class"),
    [*((name, LlamaForCausalLM) for name in ASSISTANTS), ("oracle", MixtralForCausalLM)],
)
def test_a_step_is_one_copy_each_way_and_a_few_kernels(rows, name, model_class, monkeypatch):
    assistant, of_model, steps = counted_steps(ASSISTANTS[name], rows, monkeypatch, model_class)
    assert assistant.stats.last.tier == "tree"
    if name != "suffix":
        assert assistant.stats.last.accepted > 0
    for step, _ in steps:
        assert launched(step) <= 11
        assert step["loop", "to device"] == step["loop", "to host"] == 1
        assert step["model", "kernel"] <= of_model + MORE[model_class] * LAYERS
        waits = {(where, "wait") for where in ("loop", "model")}
        copies = {("model", "to device"), ("model", "to host")}
        assert not (waits | copies) & step.keys()


@pytest.mark.parametrize(("kind", "rows"), [("EAGLE", 1), ("EAGLE", 8), ("MTP", 8)])
def test_a_head_adds_two_launches_and_three_copies(kind, rows, monkeypatch):
    """Any number of rows has its hidden states gathered together."""

    def with_head(plain, mask, model, machine):
        drafter = DRAFTERS[kind](model)
        head = layers_of(drafter, model)
        put_head(machine, model, head)
        as_launches(machine, head, monkeypatch)
        return SamAssistant(fallback=drafter, budget=16)

    _, _, steps = counted_steps(with_head, rows, monkeypatch)
    drafted = [step for step, _ in steps if step.get(("loop", "recorded")) == 2]
    assert len(drafted) > NEW_TOKENS // 2
    for step in drafted:
        assert launched(step) <= 13
        assert step["loop", "to device"] == 4
        assert step["loop", "to host"] == 2
        assert ("loop", "wait") not in step


@pytest.fixture
def known_draws(monkeypatch):
    """A device whose generator is known, as on CUDA."""
    known = draws._generator_of
    generators = {DEVICE.type: torch.default_generator}
    monkeypatch.setattr(draws, "_generator_of", lambda d: generators.get(d.type) or known(d))


# Kernels of all nodes together, besides one draw of random numbers for each position; and of one
# token where it is chosen alone: a copy, the processors, the probabilities and the draw.
CHOICES = {
    "all": ({"top_k": 0}, 10, 3),
    "top-k": ({"temperature": 0.8, "top_k": 8}, 14, 7),
    "top-p": ({"temperature": 0.8, "top_k": 0, "top_p": 0.9}, 19, 12),
    "min-p": ({"top_k": 0, "min_p": 0.05}, 17, 10),
    "both": ({"top_k": 8, "top_p": 0.9}, 21, None),
    "typical": ({"top_k": 0, "typical_p": 0.9}, 31, None),
    "epsilon": ({"top_k": 0, "epsilon_cutoff": 0.01}, 16, None),
    "greedy": ({"do_sample": False, "suppress_tokens": [3, 9]}, 8, None),
}
DRAW = ("loop", "kernel", "aten.exponential_.default")


@pytest.mark.parametrize(("name", "rows"), [*((name, 1) for name in CHOICES), ("both", 8)])
@pytest.mark.usefixtures("known_draws")
def test_sampled_tokens_come_back_with_the_forward(name, rows, monkeypatch):
    """However many of them a step brings: no wait and no kernel for a token."""
    options, kernels, _ = CHOICES[name]
    options = {"do_sample": True} | options
    assistant, _, steps = counted_steps(knowing, rows, monkeypatch, **options)
    assert assistant.stats.last.accepted > 0
    assert assistant.stats.last.keeps_seed
    for step, _ in steps:
        assert step["loop", "to device"] == step["loop", "to host"] == 1
        assert step["loop", "kernel"] - step.get(DRAW, 0) <= 12 + kernels
        assert ("loop", "wait") not in step
    drawn = sum(step.get(DRAW, 0) for step, _ in steps)
    assert (drawn > 0) is options["do_sample"]
    assert drawn <= NEW_TOKENS + 6


@pytest.mark.parametrize("name", ["all", "top-k", "top-p", "min-p"])
def test_a_sampled_token_is_one_copy_back_and_nothing_sent(name, monkeypatch):
    """Where nobody knows the device's generator."""
    options, _, kernels = CHOICES[name]
    assistant, _, steps = counted_steps(knowing, 1, monkeypatch, do_sample=True, **options)
    assert assistant.stats.last.accepted > 0
    for step, tokens in steps:
        assert step["loop", "to device"] == 1
        assert step["loop", "to host"] == 1 + tokens
        assert step["loop", "kernel"] <= 9 + kernels * tokens
        assert ("loop", "wait") not in step
