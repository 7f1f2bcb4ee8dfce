"""Whole conversations, assisted and plain side by side: every turn leaves what plain decoding does.

A machine makes up conversations on tiny models: turns with and without the assistant, rows that end
early, returned and callers' caches, caches cut back, calls interrupted in the middle of a forward,
sampling, other models in between, private turns, and memories that forget.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers import (
    BartForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
    Qwen3NextForCausalLM,
)

from hf_retrieval_assist import (
    Assistant,
    OutputMemory,
    QuantizedSelf,
    SamAssistant,
    SuffixAssistant,
)
from hf_retrieval_assist.kernels import quantized_model
from hf_retrieval_assist.verification.kv_cache import SlotCache, has_slots
from tests.interrupts import Interrupt, InterruptedForward
from tests.oracle_drafter import oracle_assistant
from tests.tiny_models import tiny_config, tiny_model

# Trees, trees with windows, chains, chains with convolutions, replay.
CLASSES = (
    LlamaForCausalLM,
    Gemma3ForCausalLM,
    BartForCausalLM,
    Lfm2ForCausalLM,
    Qwen3NextForCausalLM,
)
LONGEST = 70  # tokens, from which on no turn begins
EXAMPLES = 20
MANY_EXAMPLES = 250


@functools.cache
def model_of(model_class):
    overrides = {"is_encoder_decoder": False} if model_class is BartForCausalLM else {}
    return tiny_model(model_class, tiny_config(model_class.config_class, **overrides))


class Conversation(RuleBasedStateMachine):
    """One conversation twice: `plain` never sees an assistant."""

    @initialize(
        model_class=st.sampled_from(CLASSES),
        rows=st.sampled_from([2, 3, 1]),
        seed=st.integers(0, 2**16),
        given=st.booleans(),
    )
    def begin(self, model_class, rows, seed, given):
        self.model = model_of(model_class)
        self.random = torch.Generator().manual_seed(seed)
        length = 9
        self.ids = self.new_tokens(rows, length)
        self.mask = torch.ones_like(self.ids)
        for row in range(1, rows):
            self.mask[row, : int(torch.randint(0, 6, (1,), generator=self.random))] = 0
        self.ids = self.ids * self.mask
        self.memory = OutputMemory()
        self.assistants = [
            SuffixAssistant(self.memory, budget=8),
            SamAssistant(memory=self.memory, budget=12),
        ]
        self.drafts_itself = Assistant([QuantizedSelf()], budget=8)
        self.caches = {"plain": None, "ours": None}
        if given:
            self.caches = {name: DynamicCache(config=self.model.config) for name in self.caches}

    def new_tokens(self, rows, length):
        """A phrase of few words, so that drafts are found."""
        return torch.randint(3, 12, (rows, length), generator=self.random)

    @property
    def rows(self):
        return len(self.ids)

    @property
    def is_assisted(self):
        """Whether a call that is given our cache is served with drafts: what plain decoding leaves
        of a recurrent state when it is interrupted, nobody can use."""
        cache = self.caches["ours"]
        return cache is not None and (isinstance(cache, SlotCache) or has_slots(cache))

    def generate(self, who, ids=None, mask=None, **options):
        ids = self.ids if ids is None else ids
        mask = self.mask if mask is None else mask
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
        return self.model.generate(
            ids,
            attention_mask=mask,
            past_key_values=self.caches[who],
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )

    def extend(self, new):
        self.ids = torch.cat([self.ids, new], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(new)], dim=1)

    def keep(self, plain, ours, masks_padding, eos):
        """Both went the same way; the conversation goes on from there."""
        assert torch.equal(plain.sequences, ours.sequences)
        for one, other in zip(plain.logits, ours.logits, strict=True):
            # Rows of zeros stand behind the end of a finished row.
            live = other.abs().amax(dim=-1) > 0
            torch.testing.assert_close(one[live], other[live], atol=2e-3, rtol=2e-3)
        self.extend(plain.sequences[:, self.ids.shape[1] :])
        if masks_padding and eos is not None:
            new = self.ids[:, -len(plain.logits) :]
            ended = (new == eos).int().cumsum(dim=1) - (new == eos).int() > 0
            self.mask[:, -new.shape[1] :][ended] = 0
        self.caches = {"plain": plain.past_key_values, "ours": ours.past_key_values}

    def assistant(self, kind, plain):
        if kind == "oracle":
            return oracle_assistant(plain.sequences, self.mask, seed=self.ids.shape[1])
        if kind == "self":
            takes_trees = type(self.model) in (LlamaForCausalLM, Gemma3ForCausalLM)
            return self.drafts_itself if takes_trees else self.assistants[0]
        return None if kind == "none" else self.assistants[kind]

    @rule(
        before=st.sampled_from(["", "", "", "", "start over", "forget", "another model"]),
        asked=st.integers(1, 4),
        new=st.sampled_from([6, 9, 14, 2, 1]),
        kind=st.sampled_from(["oracle", 0, "self", 1, "none"]),
        private=st.booleans(),
        ends=st.sampled_from([True, True, False]),
        masks_padding=st.booleans(),
    )
    # A conversation that starts over where it is longest must be able to go on.
    @precondition(lambda self: self.ids.shape[1] < LONGEST or self.caches["plain"] is None)
    def turn(self, before, asked, new, kind, private, ends, masks_padding):
        if before == "start over":
            self.caches = {"plain": None, "ours": None}
        elif before == "forget":
            self.memory.forget()
        elif before == "another model":
            self.ask_another_model()
        self.extend(self.new_tokens(self.rows, asked))
        eos = None
        if ends:
            # A token that some row comes by on its way.
            free = self.model.generate(
                self.ids,
                attention_mask=self.mask,
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            way = free[0, self.ids.shape[1] :]
            eos = int(way[len(way) // 2])
        plain = self.generate("plain", max_new_tokens=new, eos_token_id=eos)
        assistant = self.assistant(kind, plain)
        if private and assistant is not None:
            assistant = assistant.private()
        before = torch.get_rng_state()
        ours = self.generate("ours", max_new_tokens=new, eos_token_id=eos, assistant=assistant)
        assert torch.equal(before, torch.get_rng_state())
        self.keep(plain, ours, masks_padding, eos)

    @rule(
        new=st.integers(1, 8), seed=st.integers(0, 99), kind=st.sampled_from(["oracle", 0, "self"])
    )
    @precondition(lambda self: self.ids.shape[1] < LONGEST)
    def sampled_turn(self, new, seed, kind):
        self.extend(self.new_tokens(self.rows, 1))
        options = {"max_new_tokens": new, "do_sample": True, "temperature": 0.7}
        torch.manual_seed(seed)
        plain = self.generate("plain", **options)
        left = torch.get_rng_state()
        torch.manual_seed(seed)
        ours = self.generate("ours", **options, assistant=self.assistant(kind, plain))
        assert torch.equal(torch.get_rng_state(), left)
        self.keep(plain, ours, False, None)

    @rule(
        forwards=st.integers(0, 6), new=st.integers(2, 12), kind=st.sampled_from(["oracle", "self"])
    )
    @precondition(lambda self: self.is_assisted and self.ids.shape[1] < LONGEST)
    def interrupted_turn(self, forwards, new, kind):
        """Ctrl-C in the middle of a forward; the caller goes on from what the cache holds."""
        self.extend(self.new_tokens(self.rows, 2))
        plain = self.generate("plain", max_new_tokens=new)
        cache, length = self.caches["ours"], self.ids.shape[1]
        try:
            with InterruptedForward(self.model, forwards):
                self.generate("ours", max_new_tokens=new, assistant=self.assistant(kind, plain))
        except Interrupt:
            pass
        everything = plain.sequences
        # A cache of all but the last token has nothing left to say.
        if (stop := max(length, cache.get_seq_length() + 1)) < everything.shape[1]:
            mask = torch.cat([self.mask, torch.ones_like(everything[:, length:])], dim=1)
            missing = everything.shape[1] - stop
            ours = self.generate(
                "ours", everything[:, :stop], mask[:, :stop], max_new_tokens=missing
            )
            assert torch.equal(everything, ours.sequences)
        self.extend(everything[:, length:])
        self.caches = {"plain": plain.past_key_values, "ours": cache}

    @rule(tokens=st.integers(1, 6))
    @precondition(lambda self: self.caches["plain"] is not None and self.ids.shape[1] > 20)
    def cut_back(self, tokens):
        """The caller takes back the last tokens, as for another answer to the same question."""
        held = self.caches["plain"].get_seq_length()
        if held != self.ids.shape[1] - 1 or not self.caches["plain"].is_croppable:
            return
        try:
            self.caches["plain"].crop(-tokens)
        except RuntimeError:
            # A window of plain decoding cannot go back; the conversation starts over.
            self.caches = {"plain": None, "ours": None}
            return
        self.caches["ours"].crop(-tokens)
        self.ids, self.mask = self.ids[:, :-tokens], self.mask[:, :-tokens]

    def ask_another_model(self):
        """One call of the same assistant to a model of the other kind."""
        model = model_of(CLASSES[self.model is model_of(CLASSES[0])])
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        plain = model.generate(self.ids[:1], **options)
        ours = model.generate(self.ids[:1], **options, assistant=self.assistants[0])
        assert torch.equal(plain, ours)


def converse(examples, steps):
    run_state_machine_as_test(
        Conversation,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            # What fails is told as it was found; making it small takes minutes.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    """The tiny models' linears are packed in eight bits."""
    monkeypatch.setattr(quantized_model, "LEAST_ELEMENTS", 1000)


def test_conversations_are_plain_decoding():
    converse(EXAMPLES, 6)


@pytest.mark.slow
def test_many_conversations_are_plain_decoding():
    converse(int(os.environ.get("HFRA_CONVERSATIONS", MANY_EXAMPLES)), 10)


def test_returned_caches_are_slot_caches():
    """The machine would find nothing if its caches were those of plain decoding."""
    model = model_of(LlamaForCausalLM)
    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    result = model.generate(
        prompt,
        max_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
        assistant=SamAssistant(),
    )
    assert isinstance(result.past_key_values, SlotCache)
