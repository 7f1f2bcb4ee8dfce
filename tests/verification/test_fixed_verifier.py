"""Calls served in memory that stays in place, a recorder standing where CUDA graphs would be."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from transformers import (
    AttentionInterface,
    DynamicCache,
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    Qwen3ForCausalLM,
)

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.drafters.base import Drafter, DraftSession, FeedbackNeeds
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.token_tree import TokenTree
from hf_retrieval_assist.verification import fixed_memory, fixed_verifier, service, tiers
from hf_retrieval_assist.verification.fixed_memory import FixedMemory
from hf_retrieval_assist.verification.workspace import WORKSPACES
from tests.support import dense_attention
from tests.support.dense_attention import flash_like
from tests.support.lossless import PROMPT, build, knowing, run
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import OracleDrafter, both


@pytest.fixture(autouse=True)
def in_place(monkeypatch):
    serve_in_place(monkeypatch)


def idle(model):
    """The workspace that was used last."""
    return WORKSPACES._idle[model][-1]


BATCH = torch.cat([PROMPT, PROMPT.flip(1), PROMPT + 3])
MASK = torch.ones_like(BATCH)
MASK[1, :5] = MASK[2, :9] = 0
INPUTS = {
    "one row": {"input_ids": PROMPT},
    "padded": {"input_ids": BATCH * MASK, "attention_mask": MASK},
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Gemma3ForCausalLM, Qwen3ForCausalLM])
def test_tokens_are_those_of_plain_decoding(model_class, inputs):
    model = build(model_class)
    for _ in range(2):
        options = {"do_sample": False, "max_new_tokens": 40}
        plain, assisted, assistant = both(model, INPUTS[inputs], **options)
        assert torch.equal(plain, assisted)
        assert assistant.stats.last.accepted > 0
        assert assistant.stats.tier == "tree"
    steps = idle(model)._steps.values()
    assert any(step.replay._trusted for step in steps)
    assert all(step.replay.fault is None for step in steps)


def test_one_row_sampled_with_processors():
    model = build(LlamaForCausalLM)
    options = {"do_sample": True, "top_k": 8, "repetition_penalty": 1.3, "max_new_tokens": 24}
    plain, assisted, assistant = both(model, INPUTS["one row"], seed=4, **options)
    assert torch.equal(plain, assisted)
    assert assistant.stats.last.accepted > 0


class InFloat32(torch.nn.Module):
    """A head whose logits are float32 whatever its weights are, as several models compute them."""

    def __init__(self, head):
        super().__init__()
        self.head, self.weight = head, head.weight

    def forward(self, states):
        return self.head(states).float()


def test_logits_of_another_dtype_than_the_model():
    model = build(LlamaForCausalLM).to(torch.bfloat16)
    model.lm_head = InFloat32(model.lm_head)
    assistant = SamAssistant(budget=16)
    run(model, assistant=assistant)
    assert assistant.stats.tier == "tree"
    assert assistant.top_k > 0


def test_buffers_grow_in_mid_call(monkeypatch):
    monkeypatch.setattr(fixed_memory, "capacity_bucket", lambda slots: -(-slots // 8) * 8)
    monkeypatch.setattr(fixed_memory, "with_room", lambda capacity, slot_bytes: capacity)
    monkeypatch.setattr(fixed_verifier, "WIDTHS", (1, 2, 4, 8))
    model = build(LlamaForCausalLM)
    shapes = []
    grow = FixedMemory.grow

    def noted(memory, slots):
        # As if the length of the text were not known beforehand.
        memory._shape = replace(memory._shape, capacity=0)
        grow(memory, slots)
        shapes.append(memory.workspace.shape.capacity)

    monkeypatch.setattr(FixedMemory, "grow", noted)
    for inputs in INPUTS.values():
        plain, assisted, _ = both(model, inputs, do_sample=False, max_new_tokens=60)
        assert torch.equal(plain, assisted)
    assert len(set(shapes)) > 3


def test_drafts_wider_than_any_bucket(monkeypatch):
    monkeypatch.setattr(fixed_verifier, "WIDTHS", (1, 2))
    monkeypatch.setattr(fixed_verifier, "MOST_MOVED", 1)
    monkeypatch.setattr("hf_retrieval_assist.verification.workspace.MOST_MOVED", 1)
    model = build(LlamaForCausalLM)
    for inputs in INPUTS.values():
        plain, assisted, assistant = both(model, inputs, do_sample=False, max_new_tokens=40)
        assert torch.equal(plain, assisted)
        assert assistant.stats.last.accepted > 0


def test_returned_caches_are_the_callers_own():
    model = build(LlamaForCausalLM)
    cache = DynamicCache(config=model.config)
    first = run(model, **{CACHE: cache}, assistant=knowing(run(model)))
    kept = [layer.keys.clone() for layer in cache.layers]
    # Others use the same workspace meanwhile.
    run(model, assistant=knowing(run(model)), ids=PROMPT.flip(1))
    for layer, keys in zip(cache.layers, kept, strict=True):
        assert torch.equal(layer.keys, keys)
    longer = torch.cat([first, PROMPT[:, :3]], dim=1)
    plain = run(model, longer)
    assert torch.equal(plain, run(model, longer, **{CACHE: cache}))
    returned = run(model, return_dict_in_generate=True, assistant=knowing(first))
    again = run(model, longer, **{CACHE: returned[CACHE]}, assistant=knowing(plain))
    assert torch.equal(plain, again)


class Flaky:
    """A setting that a recording takes for granted."""

    def __init__(self, model):
        self.scale, self.growth = 1.0, 0.0
        model.register_forward_hook(self)

    def __call__(self, module, inputs, output):
        output.logits = output.logits * self.scale
        self.scale += self.growth
        return output


def test_forwards_that_differ_each_time_are_served_as_they_are(told):
    model = build(LlamaForCausalLM)
    flaky = Flaky(model)
    both(model, INPUTS["one row"], do_sample=False, max_new_tokens=1)
    # Unknown to the self-test, which was before.
    flaky.growth = 0.5
    plain, assisted, _ = both(model, INPUTS["one row"], do_sample=False, max_new_tokens=30)
    assert torch.equal(plain, assisted)
    both(model, INPUTS["one row"], do_sample=False, max_new_tokens=30)
    shown = [text for text in told.messages if "one kernel at a time" in text]
    assert len(shown) == 1
    assert "of their spread" in shown[0]
    assert not WORKSPACES._idle[model]


def test_what_was_recorded_lasts_while_the_model_stays_as_it_is():
    model = build(LlamaForCausalLM)
    options = {"do_sample": False, "max_new_tokens": 40}
    both(model, INPUTS["one row"], **options)
    first = idle(model)
    both(model, INPUTS["one row"], **options)
    assert idle(model) is first
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0).clone()
    plain, assisted, _ = both(model, INPUTS["one row"], **options)
    assert torch.equal(plain, assisted)
    assert idle(model) is not first


def test_its_memory_goes_with_the_model():
    model = build(LlamaForCausalLM)
    both(model, INPUTS["one row"], do_sample=False, max_new_tokens=20)
    arena, alive = weakref.ref(idle(model).arena), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert arena() is None


def test_memory_can_be_asked_back():
    model = build(LlamaForCausalLM)
    both(model, INPUTS["one row"], do_sample=False, max_new_tokens=20)
    WORKSPACES.release(model)
    assert model not in WORKSPACES._idle


def test_an_interrupted_call_leaves_a_cache_to_go_on_from():
    model = build(LlamaForCausalLM)
    cache = DynamicCache(config=model.config)

    def stop(ids, scores):
        if ids.shape[1] > PROMPT.shape[1] + 9:
            raise KeyboardInterrupt
        return scores

    options = {CACHE: cache, "logits_processor": [stop]}
    assistant = knowing(run(model))
    with pytest.raises(KeyboardInterrupt):
        run(model, assistant=assistant, **options)
    assert cache.get_seq_length() >= PROMPT.shape[1]
    whole = run(model)
    prefix = whole[:, : PROMPT.shape[1] + 11]
    assert torch.equal(run(model, prefix), run(model, prefix, **{CACHE: cache}))


class Collector(Drafter):
    """Drafts nothing and keeps the hidden states it is shown."""

    needs = FeedbackNeeds(hidden_layers=(1, -1))

    def __init__(self):
        self.seen = []

    def start(self, prompt_ids, target):
        return CollectorSession(self.seen)


class CollectorSession(DraftSession):
    def __init__(self, seen):
        self.seen = seen

    def propose(self, budget):
        return TokenTree.empty()

    def commit(self, token_ids, feedback):
        self.seen.append(feedback.hidden_states.clone())


def test_hidden_states_come_from_what_was_recorded():
    model = build(LlamaForCausalLM)
    found = []
    for recorded in (True, False):
        collector = Collector()
        text = run(model, max_new_tokens=40)[0].tolist()
        assistant = Assistant([OracleDrafter([text]), collector], budget=16, graphs=recorded)
        run(model, max_new_tokens=40, assistant=assistant)
        found.append(torch.cat(collector.seen))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_flash_attention_is_served_by_trees_where_there_is_triton(monkeypatch):
    widths = dense_attention.install(monkeypatch)
    # transformers would look for kernels under any name with "flash" in it.
    AttentionInterface.register("unmasked", flash_like)
    for module in (service, tiers):
        monkeypatch.setattr(module, "why_no_mask", lambda config: "no masks")
    model = build(LlamaForCausalLM)
    model.set_attn_implementation("unmasked")
    options = {"do_sample": False, "max_new_tokens": 30}
    plain, assisted, assistant = both(model, INPUTS["one row"], **options)
    assert torch.equal(plain, assisted)
    assert assistant.stats.tier == "tree"
    assert widths
