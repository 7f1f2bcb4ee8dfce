"""Calls served in static buffers, a recorder standing where CUDA graphs would be."""

import gc
import sys
import weakref
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MixtralForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.integrations import moe

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.engines.cuda import arena, fixed_memory, fixed_verifier, replay
from hf_retrieval_assist.engines.cuda import engine as cuda_engine
from hf_retrieval_assist.engines.cuda.arena import Arena
from hf_retrieval_assist.engines.cuda.fixed_memory import FixedMemory
from hf_retrieval_assist.engines.cuda.fixed_verifier import FixedVerifier
from hf_retrieval_assist.engines.cuda.workspace import WORKSPACES
from hf_retrieval_assist.host import transformers_private
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.verification import engine, service
from hf_retrieval_assist.verification.tree_verifier import TreeVerifier
from tests.support import dense_attention
from tests.support.logits_feedback import Learner, expected_logits
from tests.support.lossless import INPUTS, PROMPT, build, run
from tests.support.op_recorder import few_tokens, growing, idle, serve_in_place
from tests.support.oracle_drafter import agreeing
from tests.support.quick import cases, crossed
from tests.support.watching import a_librarys, calls_of, results_of
from tests.support.wrapped_models import Around, flash_like

OPTIONS = {"do_sample": False, "max_new_tokens": 40}


@pytest.fixture(autouse=True)
def static_buffers(monkeypatch):
    serve_in_place(monkeypatch)


CLASSES = [LlamaForCausalLM, Gemma3ForCausalLM, Qwen3ForCausalLM]


def test_logits_of_another_dtype_than_the_model():
    """Several models compute them in float32 whatever the head's weights are."""
    model = build(LlamaForCausalLM).to(torch.bfloat16)
    model.lm_head = Around(model.lm_head, lambda logits, _: logits.float())
    assistant = SamAssistant(budget=16, trust_forward=True)
    run(model, assistant=assistant)
    assert assistant.stats.last.tier == "tree"
    assert assistant.policy.top_k > 0


@pytest.mark.parametrize("rows", [1, 2])
def test_drafters_may_keep_what_they_were_told(rows):
    """Logits and hidden states; all recordings leave theirs in one place."""
    model, ids = build(LlamaForCausalLM), torch.cat([PROMPT, PROMPT.flip(1)])[:rows]
    plain = run(model, ids)
    for _ in range(2):
        learner = Learner(plain.tolist())
        learner.needs = replace(learner.needs, hidden_layers=(1, -1))
        assistant = Assistant([learner], budget=4)
        assert torch.equal(run(model, ids, assistant=assistant), plain)
    assert assistant.stats.last.repeated > 0
    expected = expected_logits(model, learner, PROMPT.shape[1])
    for (text, shown), logits in zip(learner.shown, expected, strict=True):
        torch.testing.assert_close(shown.logits, logits, atol=1e-4, rtol=1e-4)
        found = shown.top.of(np.arange(len(logits)), 2, logits.shape[1])
        assert found[0].tolist() == logits.topk(2).indices.tolist()
        with torch.no_grad():
            states = model(text, output_hidden_states=True).hidden_states
        states = torch.cat([states[k][0, -len(logits) :] for k in (1, -1)], dim=-1)
        told = shown.hidden_states
        torch.testing.assert_close(told, states[shown.accepted], atol=1e-4, rtol=1e-4)


def test_buffers_grow_in_mid_call(monkeypatch):
    model, capacities = build(LlamaForCausalLM), growing(monkeypatch, 8)
    for inputs in INPUTS.values():
        agreeing(model, inputs, do_sample=False, max_new_tokens=60)
    assert len(set(capacities)) > 3


# Layers of padded rows are all of one kind, since none of them forgets.
@pytest.mark.parametrize(("inputs", "made"), cases([("one row", 1), ("one row", 0), ("padded", 0)]))
def test_buffers_grow_by_little_where_memory_is_short(inputs, made, monkeypatch):
    """Some layers may have moved by then."""
    model, _ = build(Gemma3ForCausalLM), growing(monkeypatch, 8)
    move_on, grow, made_block = FixedMemory._move_on, FixedMemory.grow, Arena._block
    wanted, failed = [], []

    def moved_on(memory, slots):
        wanted.clear()
        move_on(memory, slots)
        little = slots + memory._room
        assert wanted[0] > little
        assert wanted[1:] in ([], [little])

    def grown(memory, slots, reserved=None):
        wanted.append(slots)
        grow(memory, slots, reserved)

    def short(arena, i, *kind):
        if i == made and len(wanted) == 1 and arena.shape.capacity >= wanted[0]:
            failed.append(i)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made_block(arena, i, *kind)

    agreeing(model, INPUTS[inputs], "tree", do_sample=False, max_new_tokens=60)
    for owner, name, stand_in in (
        (FixedMemory, "_move_on", moved_on),
        (FixedMemory, "grow", grown),
        (Arena, "_block", short),
    ):
        monkeypatch.setattr(owner, name, stand_in)
    wanted[:] = [0, 0]
    WORKSPACES._idle.pop(model, None)  # whose buffers may be large enough
    agreeing(model, INPUTS[inputs], "tree", do_sample=False, max_new_tokens=60)
    assert failed


@pytest.mark.parametrize("inputs", cases(INPUTS))
def test_windows_move_on_in_mid_call(inputs, monkeypatch):
    monkeypatch.setattr(arena, "capacity_bucket", lambda slots: slots)
    monkeypatch.setattr(arena, "_BEYOND_WINDOW", 72)
    monkeypatch.setattr(fixed_verifier, "WIDTHS", (1, 2, 4, 8))
    kinds = ["sliding_attention", "full_attention"]
    options = {"sliding_window": 8, "layer_types": kinds, "num_hidden_layers": 2}
    model, moved = build(Gemma3ForCausalLM, **options), calls_of(monkeypatch, Arena, "begin_with")
    for _ in range(2):
        moved.clear()
        options = {"do_sample": False, "max_new_tokens": 150}
        plain, _, assistant = agreeing(model, INPUTS[inputs], **options)
        assert assistant.stats.last.tier == "tree"
    # Rows of a batch get on unequally, and keep all.
    assert bool(moved) is (len(plain) == 1)


def test_drafts_wider_than_any_bucket(monkeypatch):
    monkeypatch.setattr(fixed_verifier, "WIDTHS", (1, 2))
    monkeypatch.setattr(fixed_memory, "MOST_MOVED", 1)
    monkeypatch.setattr("hf_retrieval_assist.engines.cuda.workspace.MOST_MOVED", 1)
    model = build(LlamaForCausalLM)
    for inputs in INPUTS.values():
        agreeing(model, inputs, "tree", **OPTIONS)


GROWTH = {"by": 0.0}


def growing_logits(logits, held):
    """Scaled by a number which a recording takes for granted."""
    held.scale += GROWTH["by"]
    return logits * held.scale


def test_forwards_that_differ_each_time_are_served_as_they_are(told, monkeypatch):
    # Others' code is not recorded.
    monkeypatch.setattr(Around, "forward", a_librarys(Around.forward))
    monkeypatch.setattr(Around, "__module__", "transformers.written_for_a_test")
    model = build(LlamaForCausalLM)
    model.lm_head = Around(model.lm_head, a_librarys(growing_logits), scale=1.0)
    agreeing(model, INPUTS["one row"], do_sample=False, max_new_tokens=1)
    # Unknown to the self-test, which was before.
    monkeypatch.setitem(GROWTH, "by", 0.5)
    for _ in range(2):
        agreeing(model, INPUTS["one row"], do_sample=False, max_new_tokens=30)
    shown = [text for text in told.messages if "one kernel at a time" in text]
    assert len(shown) == 1
    assert "of their spread" in shown[0]
    assert not WORKSPACES.report(model).idle


@pytest.mark.parametrize(
    ("model_class", "inputs", "recorded"),
    cases(crossed(CLASSES[1::-1], ["padded", "one row"], [True, False])),
)
def test_attention_by_kernels(model_class, inputs, recorded, monkeypatch):
    attended, model = dense_attention.install(monkeypatch), build(model_class)
    for _ in range(3):
        attended.clear()
        *_, assistant = agreeing(model, INPUTS[inputs], "tree", graphs=recorded, **OPTIONS)
    last = assistant.stats.last
    assert last.attention == "triton"
    # Every layer of every forward, whoever launches it.
    assert len(attended) == (0 if recorded else model.config.num_hidden_layers * last.forwards)
    assert last.repeated == (last.forwards if recorded else 0)


def test_flash_attention_is_served_by_trees(monkeypatch):
    attended = dense_attention.install(monkeypatch)
    # transformers would look for kernels under any name with "flash" in it.
    AttentionInterface.register("unmasked", flash_like)
    for module in (service, transformers_private):
        monkeypatch.setattr(module, "why_no_mask", lambda config: "no masks")
    model = build(LlamaForCausalLM)
    model.set_attn_implementation("unmasked")
    agreeing(model, INPUTS["one row"], "tree", **OPTIONS)
    assert attended


def forwards(monkeypatch):
    """Every forward's behind prompts: its width, whether it ran Python, whether it is timed."""
    computed = calls_of(monkeypatch, FixedVerifier, "_compute")

    def told(verified, *_):
        ran = bool(computed)
        computed.clear()
        return verified.width, ran, verified.typical

    return results_of(monkeypatch, FixedVerifier, "_feed", told)


@pytest.mark.parametrize("repeated", [True, False])
def test_forwards_of_a_settled_call_are_repeated_or_at_least_timed(repeated, monkeypatch):
    """Those that are not repeated belong to a model that makes an input of its own for each."""
    model, seen = build(LlamaForCausalLM), forwards(monkeypatch)
    prepare = type(model).prepare_inputs_for_generation

    @wraps(prepare)
    def own(model, *arguments, **options):
        return prepare(model, *arguments, **options) | {"output_attentions": False}

    if not repeated:
        monkeypatch.setattr(type(model), "prepare_inputs_for_generation", a_librarys(own))
    for _ in range(4):
        seen.clear()
        _, _, assistant = agreeing(model, INPUTS["one row"], **OPTIONS)
    last = assistant.stats.last
    assert {ran for _, ran, _ in seen} == {not repeated}
    assert len(seen) > 5
    assert all(typical for width, _, typical in (seen if repeated else seen[-3:]))
    assert [typical for width, _, typical in seen if width == 1][1:]
    assert last.attention == "sdpa"
    assert last.repeated == (last.forwards if repeated else 0)
    assert last.recordings == 0 or not repeated


def test_a_recording_keeps_nothing_of_its_call_and_goes_with_the_model():
    """Neither the call's cache nor logits of every width for themselves."""
    model, caches = build(LlamaForCausalLM), []
    for _ in range(3):
        _, found, _ = agreeing(model, INPUTS["one row"], return_dict_in_generate=True, **OPTIONS)
        caches.append(weakref.ref(found[CACHE]))
        del found
        gc.collect()
        assert [cache() for cache in caches] == [None] * len(caches)
    shown = [step.content[1] for step in idle(model).kinds.values()]
    places = {one.logits.untyped_storage().data_ptr() for one in shown}
    assert len(places) < len(shown)
    assert {one.outputs for one in shown} == {None}
    ends = [weakref.ref(idle(model).arena), weakref.ref(model)]
    del model, shown
    gc.collect()
    assert [end() for end in ends] == [None, None]


def test_a_shortage_of_memory_is_one_of_the_call(monkeypatch, told):
    model, record = build(LlamaForCausalLM), replay.recorder(None)

    def short(compute):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for recorder, kept in ((short, 0), (record, 1)):
        monkeypatch.setattr(replay, "recorder", lambda *_, found=recorder: found)
        for _ in range(2):
            agreeing(model, INPUTS["one row"], **OPTIONS)
        assert len(WORKSPACES.report(model).idle) == kept
    assert not any("one kernel at a time" in text for text in told.messages)


MADE = [("one row", 0), ("one row", 1), ("padded", 0)]


@pytest.mark.parametrize(
    ("inputs", "made", "sampled"),
    cases([(*one, sampled) for one in MADE for sampled in (False, True)]),
)
def test_a_call_without_memory_for_static_buffers_is_decoded_plainly(
    inputs, made, sampled, monkeypatch
):
    """Some layers may lie in such buffers by then. The next call tries again."""
    model, made_block, left = build(Gemma3ForCausalLM), Arena._block, []
    options = OPTIONS | {"do_sample": sampled, "return_dict_in_generate": True}
    agreeing(model, INPUTS[inputs], "tree", **options)

    def short(arena, *group):
        if not left:
            raise torch.OutOfMemoryError("CUDA out of memory")
        left.pop()
        return made_block(arena, *group)

    def never(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for owner, name, failing in ((Arena, "_block", short), (FixedVerifier, "_prepared", never)):
        WORKSPACES._idle.pop(model, None)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing)
            left[:] = [True] * made * (failing is short)
            plain, found, assistant = agreeing(model, INPUTS[inputs], "plain", **options)
        assert not left
        assert "no memory to draft in" in assistant.stats.last.reason
        for layer, expected in zip(found[CACHE].layers, plain[CACHE].layers, strict=True):
            assert layer.keys.shape == expected.keys.shape
            torch.testing.assert_close(layer.keys, expected.keys, atol=1e-4, rtol=1e-3)
    for _ in range(3):
        *_, assistant = agreeing(model, INPUTS[inputs], "tree", **options)
    assert assistant.stats.last.repeated


def test_mixtures_whose_experts_wait_are_recorded_where_they_do_not(monkeypatch, told):
    """Experts of few tokens are computed as where PyTorch has no grouped product."""
    monkeypatch.setattr(MixtralForCausalLM, "_optimize_model_for_decode", few_tokens)
    grouped = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def waits(experts, states, *arguments):
        states.max().item()
        return grouped(experts, states, *arguments)

    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, "grouped_mm", waits)
    model = build(MixtralForCausalLM)
    for _ in range(3):
        *_, assistant = agreeing(model, INPUTS["one row"], **OPTIONS)
    steps = idle(model).kinds
    recorded = {key[0] for key, step in steps.items() if step.trusted}
    faulty = {key[0] for key, step in steps.items() if step.fault}
    assert max(recorded) <= 2 < min(faulty)
    assert assistant.stats.last.repeated > 0 == assistant.stats.last.recordings
    assert len([text for text in told.messages if "one kernel at a time" in text]) == 1


REFUSED = ["nothing can be recorded", "no recorder", "no recordings"]


@pytest.mark.parametrize("refused", cases(REFUSED, 2))
def test_where_nothing_is_recorded_views_are_read(refused, monkeypatch):
    """And no masks over whole buffers: on devices that record nothing, and where nothing can be."""
    model = build(LlamaForCausalLM)
    if refused == "no recorder":
        monkeypatch.undo()  # MPS and XPU are like this
    elif refused == "nothing can be recorded":

        def fails(compute):
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(replay, "recorder", lambda *_: fails)
        agreeing(model, INPUTS["one row"], **OPTIONS)
    verifiers = results_of(monkeypatch, engine.Engine, "verifier")
    fixed = calls_of(monkeypatch, FixedVerifier, "__init__")
    agreeing(model, INPUTS["padded"], "tree", graphs=refused != "no recordings", **OPTIONS)
    # The test's too: what is tested is what serves.
    assert verifiers
    assert all(isinstance(verifier, TreeVerifier) for verifier in verifiers)
    assert not fixed


@pytest.mark.parametrize(
    ("attention", "why"),
    [("sdpa", "ZeroDivisionError"), ("eager", "expected one that models look up")],
)
def test_kernels_that_fail_their_test_are_told(attention, why, monkeypatch, told):
    monkeypatch.setattr(cuda_engine, "has_triton", lambda device: True)
    broken = SimpleNamespace(TritonAttention=lambda *_: None if attention == "eager" else 1 / 0)
    name = "hf_retrieval_assist.engines.cuda.triton_attention"
    monkeypatch.setitem(sys.modules, name, broken)
    model = build(LlamaForCausalLM)
    model.set_attn_implementation(attention)
    for _ in range(2):
        agreeing(model, INPUTS["one row"], "tree", **OPTIONS)
    first, warned = [text for text in told.messages if "Triton" in text or "triton" in text]
    assert "may compile attention (7 s, kept by Triton) and record graphs" in first
    assert why in warned
