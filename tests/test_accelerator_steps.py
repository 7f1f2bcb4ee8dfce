"""What a step launches and copies on an accelerator, counted on a stand-in."""

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_retrieval_assist import SamAssistant, SuffixAssistant
from hf_retrieval_assist.decoding import dice
from hf_retrieval_assist.decoding.loop import Generation

from .support.accelerator import DEVICE, Accelerator
from .support.heads import as_launches, head_drafter, layers_of, put_head
from .support.lossless import build
from .support.oracle_drafter import oracle_assistant

# What the first forward of a width does besides: it takes memory.
ALLOCATIONS = [("loop", "kernel", f"aten.{name}.default") for name in ("zeros", "new_zeros")]

LAYERS = 4
NEW_TOKENS = 16
OPTIONS = {"do_sample": False, "max_new_tokens": NEW_TOKENS}


def batch_of(rows):
    torch.manual_seed(1)
    ids = torch.randint(1, 60, (rows, 14))
    mask = torch.ones_like(ids)
    mask[1:2, :5] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


ASSISTANTS = {
    "oracle": lambda plain, mask: oracle_assistant(plain, mask),
    "sam": lambda plain, mask: SamAssistant([row.tolist() for row in plain], budget=16),
    "suffix": lambda plain, mask: SuffixAssistant(budget=16),
}


def counted_steps(model, inputs, assistant, monkeypatch, machine=None, **options):
    """Output, kernels of one of the model's forwards, and each step's counts and new tokens."""
    machine, steps, whole = machine or Accelerator(), [], Generation.step
    machine.put(model)

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
        assisted = model.generate(**there, **(OPTIONS | options), assistant=assistant)
    with machine:
        return assisted.cpu(), of_model, steps


def launched(step):
    return step["loop", "kernel"] - sum(step.get(key, 0) for key in ALLOCATIONS)


@pytest.mark.parametrize("rows", [1, 8, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ASSISTANTS)
def test_a_step_is_one_copy_each_way_and_a_few_kernels(rows, name, monkeypatch):
    model = build(LlamaForCausalLM, num_hidden_layers=LAYERS)
    inputs = batch_of(rows)
    plain = model.generate(**inputs, **OPTIONS)
    assistant = ASSISTANTS[name](plain, inputs["attention_mask"])
    assisted, of_model, steps = counted_steps(model, inputs, assistant, monkeypatch)
    assert torch.equal(assisted, plain)
    assert assistant.stats.tier == "tree"
    if name != "suffix":
        assert assistant.stats.last.accepted > 0
    for step, _ in steps:
        assert launched(step) <= 11
        assert step["loop", "to device"] == step["loop", "to host"] == 1
        assert step["model", "kernel"] <= of_model + 2 * LAYERS
        waits = {(where, "wait") for where in ("loop", "model")}
        copies = {("model", "to device"), ("model", "to host")}
        assert not (waits | copies) & step.keys()


@pytest.mark.parametrize(("kind", "rows"), [("EAGLE", 1), ("EAGLE", 8), ("MTP", 8)])
def test_a_head_adds_two_launches_and_three_copies(kind, rows, monkeypatch):
    """At any number of rows, whose hidden states are gathered together."""
    model = build(LlamaForCausalLM, num_hidden_layers=LAYERS)
    drafter, inputs = head_drafter(kind, model), batch_of(rows)
    head = layers_of(drafter, model)
    plain = model.generate(**inputs, **OPTIONS)
    machine = Accelerator()
    put_head(machine, model, head)
    as_launches(machine, head, monkeypatch)
    assistant = SamAssistant(fallback=drafter, budget=16)
    assisted, _, steps = counted_steps(model, inputs, assistant, monkeypatch, machine=machine)
    assert torch.equal(assisted, plain)
    drafted = [step for step, _ in steps if step.get(("loop", "recorded")) == 2]
    assert len(drafted) > NEW_TOKENS // 2
    for step in drafted:
        assert launched(step) <= 13
        assert step["loop", "to device"] == 4
        assert step["loop", "to host"] == 2
        assert ("loop", "wait") not in step


# Kernels of one token: a copy, the processors, the probabilities and the draw.
WARPERS = {
    "none": ({"top_k": 0}, 3),
    "top-k": ({"temperature": 0.8, "top_k": 8}, 7),
    "top-p": ({"temperature": 0.8, "top_k": 0, "top_p": 0.9}, 12),
    "min-p": ({"top_k": 0, "min_p": 0.05}, 10),
}


@pytest.fixture
def known_draws(monkeypatch):
    """A device whose generator is known, as on CUDA."""
    known = dice._generator_of
    generators = {DEVICE.type: torch.default_generator}
    monkeypatch.setattr(dice, "_generator_of", lambda d: generators.get(d.type) or known(d))


# Kernels of all nodes together, besides one draw of random numbers for each position.
CHOICES = {
    "all": ({"top_k": 0}, 10),
    "top-k": ({"temperature": 0.8, "top_k": 8}, 14),
    "top-p": ({"temperature": 0.8, "top_k": 0, "top_p": 0.9}, 19),
    "both": ({"top_k": 8, "top_p": 0.9}, 21),
    "min-p": ({"top_k": 0, "min_p": 0.05}, 17),
    "typical": ({"top_k": 0, "typical_p": 0.9}, 31),
    "epsilon": ({"top_k": 0, "epsilon_cutoff": 0.01}, 16),
    "greedy": ({"do_sample": False, "suppress_tokens": [3, 9]}, 8),
}
DRAW = ("loop", "kernel", "aten.exponential_.default")


@pytest.mark.parametrize(("name", "rows"), [*((name, 1) for name in CHOICES), ("both", 8)])
@pytest.mark.usefixtures("known_draws")
def test_sampled_tokens_come_back_with_the_forward(name, rows, monkeypatch):
    """However many of them a step brings: no wait and no kernel for a token."""
    model = build(LlamaForCausalLM, num_hidden_layers=LAYERS)
    inputs, (options, kernels) = batch_of(rows), CHOICES[name]
    options = {"do_sample": True} | options
    torch.manual_seed(0)
    plain = model.generate(**inputs, **(OPTIONS | options))
    assistant = oracle_assistant(plain, inputs["attention_mask"], depth=6)
    assisted, _, steps = counted_steps(model, inputs, assistant, monkeypatch, **options)
    assert torch.equal(assisted, plain)
    assert assistant.stats.last.accepted > 0
    assert assistant.stats.last.keeps_seed
    for step, _ in steps:
        assert step["loop", "to device"] == step["loop", "to host"] == 1
        assert step["loop", "kernel"] - step.get(DRAW, 0) <= 12 + kernels
        assert ("loop", "wait") not in step
    drawn = sum(step.get(DRAW, 0) for step, _ in steps)
    assert (drawn > 0) is options["do_sample"]
    assert drawn <= NEW_TOKENS + 6


@pytest.mark.parametrize("name", WARPERS)
def test_a_sampled_token_is_one_copy_back_and_nothing_sent(name, monkeypatch):
    """Where nobody knows the device's generator."""
    model = build(LlamaForCausalLM, num_hidden_layers=LAYERS)
    inputs, (warpers, kernels) = batch_of(1), WARPERS[name]
    torch.manual_seed(0)
    plain = model.generate(**inputs, **(OPTIONS | {"do_sample": True} | warpers))
    assistant = oracle_assistant(plain, inputs["attention_mask"])
    sampled = {"do_sample": True, **warpers}
    assisted, _, steps = counted_steps(model, inputs, assistant, monkeypatch, **sampled)
    assert torch.equal(assisted, plain)
    assert assistant.stats.last.accepted > 0
    for step, tokens in steps:
        assert step["loop", "to device"] == 1
        assert step["loop", "to host"] == 1 + tokens
        assert step["loop", "kernel"] <= 9 + kernels * tokens
        assert ("loop", "wait") not in step
