"""Whole conversations, assisted and plain side by side: every turn leaves what plain decoding does.

A machine makes up conversations on tiny models, some of which cross lengths at which their forwards
change: turns with and without the assistant, drafted and plain, of ids and of embeddings, rows that
end early, callables that tell rows apart, returned and callers' caches, caches cut back, calls
interrupted in the middle of a forward, sampling, hooks and adapters that come and go, other models
in between, private turns, and memories that forget.
"""

import copy
import functools
import os
from contextlib import nullcontext, suppress

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, assume, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from packaging.version import Version

from hf_retrieval_assist import Assistant, OutputMemory, QuantizedSelf, SamAssistant, reroute
from hf_retrieval_assist.decoding.prompt_parts import prompts_in_parts
from hf_retrieval_assist.engines.cpu import few_bits, weight_copies
from hf_retrieval_assist.host.scopes import attending
from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.caches import CACHES, assert_alike, saved
from tests.support.interruptions import INTERRUPTIONS, code_that_interrupts, raising
from tests.support.lossless import build, rope_model
from tests.support.memories import remembering
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import oracle_assistant
from tests.support.quick import cases
from tests.support.watching import Interrupt, Spectator, interrupted_forward

LONGEST = 70  # tokens, from which on no turn begins


def adapted_model():
    """One with two adapters, neither of them active."""
    peft = pytest.importorskip("peft")
    model = build()
    for name in ("first", "second"):
        torch.manual_seed(len(name))
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, model, adapter_name=name)
    choose_adapter(model, None)
    return model.eval()


def model_with_poison():
    """One that a draft of token 66, which it never writes greedily, fills with NaN."""
    model = build()
    model.get_output_embeddings().weight.data[66] = 0.0
    model.get_input_embeddings().weight.data[66] = float("nan")
    return model


def choose_adapter(model, name):
    """Compute with one adapter alone; None: with none. transformers' own methods refuse releases of
    PEFT that are older than they are."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(name is not None)
            if name is not None:
                module.set_adapter(name)


# Each tier, and forwards that change at a length or with a setting.
MODELS = {
    "trees": build,
    "windows": lambda: build("Gemma3ForCausalLM"),
    "chains": lambda: build("BartForCausalLM"),
    "convolutions": lambda: build("Lfm2ForCausalLM"),
    "recurrences": lambda: build("Qwen3NextForCausalLM"),
    "both at once": lambda: build("FalconH1ForCausalLM"),
    "shared layers": lambda: build("Gemma3nForCausalLM"),
    "one window": lambda: build("MistralForCausalLM", sliding_window=12),
    # No longer than the longest text.
    "position table": lambda: build("GPT2LMHeadModel", n_positions=88),
    "not finite": model_with_poison,
    "adapters": adapted_model,
    # Few heads make many scores exactly 0, and which of equal ones are kept is nobody's choice.
    "few keys": lambda: build("GlmMoeDsaForCausalLM", index_topk=24, index_n_heads=16),
    "dynamic rope": lambda: rope_model("dynamic", 24),
    "longrope": lambda: rope_model("longrope", 24),
    "cache dropped": lambda: rope_model("longrope", 24, "Phi3ForCausalLM"),
}
# Their caches are made from a configuration.
LAYERED = ("convolutions", "recurrences", "both at once", "few keys", "layers gone over twice")
WINDOWED = ("windows", "one window", "shared layers", "layers gone over twice")
# States that have gone on with a text.
STATES = ("convolutions", "recurrences", "both at once")
if hasattr(transformers, "DoryForCausalLM"):
    MODELS["layers gone over twice"] = lambda: build("DoryForCausalLM")
# What they compute of a text depends on the pieces that it was fed in.
BY_PIECES = ("dynamic rope", "longrope", "cache dropped")

# Who drafts, if anybody.
KINDS = ("oracle", 0, "self", 1, "by time", "plain", "none")

# Earlier ones leave the lengths of layers.
RESETS = Version(transformers.__version__) >= Version("5.23")
# Where turns are interrupted, beside any forward. Python may raise before `__exit__` has begun.
INTERRUPTED = {name: scope for name, scope in INTERRUPTIONS.items() if "forward" not in name}
for kind in (attending, reroute):
    INTERRUPTED[f"the end of {kind.__name__}"] = lambda *_, kind=kind: raising(kind, "__exit__", 2)

# What is drawn of.
WARPERS = [
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 9},
    {"top_k": 0, "top_p": 0.8, "repetition_penalty": 1.3},
    {"top_k": 0, "no_repeat_ngram_size": 3, "min_p": 0.05},
]
# What a caller does before a turn; nothing as often as anything else together.
BEFORE = ["start over", "reset", "forget", "another model", "save", "choose rows"]
BEFORE += [""] * (len(BEFORE) - 1)

in_parts = functools.partial(prompts_in_parts, 5, lambda: None)
model_of = functools.cache(lambda name: MODELS[name]())


def steering(first, size):
    """A hook that changes the positions of a forward from one on."""

    def steer(module, args, out):
        hidden = (out[0] if isinstance(out, tuple) else out).clone()
        hidden[:, first:] += torch.linspace(-size, size, hidden.shape[-1])
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    return steer


# One that only looks, and others that change every position or the last one.
HOOKS = {"note": lambda *_: None, "steer": steering(0, 0.5), "steer last": steering(-1, 2)}


class AllowedOfRows:
    """Allows tokens by row and by how often the row was asked about, as incremental parsers do."""

    def __init__(self, ids):
        self.ids, self.asked = ids, [0] * len(ids)

    def __call__(self, row, text):
        assert torch.equal(text[: self.ids.shape[1]], self.ids[row])
        self.asked[row] += 1
        return [token for token in range(3, 66) if (token + row) % 4 != self.asked[row] % 4]


def frequencies_of(model):
    """What the model's RoPE keeps from forward to forward."""
    modules = [m for m in model.modules() if hasattr(m, "max_seq_len_cached")]
    ropes = [module for module in modules if hasattr(module, "inv_freq")]
    return [(rope, rope.max_seq_len_cached, rope.inv_freq.clone()) for rope in ropes]


def set_frequencies(frequencies):
    for module, length, inv_freq in frequencies:
        module.max_seq_len_cached = length
        module.register_buffer("inv_freq", inv_freq.clone(), persistent=False)


def close_draws(scores):
    """Whether rounding may decide what `torch.multinomial` draws, where probabilities race."""
    races = [one.softmax(-1) / torch.empty_like(one).exponential_() for one in scores]
    first, second = torch.stack(races).topk(2).values.unbind(-1)
    return bool((first < second * (1 + 1e-4)).any())


class Conversation(RuleBasedStateMachine):
    """One conversation twice: `plain` never sees an assistant."""

    @initialize(
        name=st.sampled_from(list(MODELS)),
        rows=st.sampled_from([2, 3, 1]),
        seed=st.integers(0, 2**16),
        given=st.sampled_from(["", "dynamic", "of unknown layers", "static"]),
    )
    def begin(self, name, rows, seed, given):
        self.name, self.model, self.hook = name, model_of(name), None
        self.random = torch.Generator().manual_seed(seed)
        self.ids = self.new_tokens(rows, 9)
        self.mask = torch.ones_like(self.ids)
        for row in range(1, rows):
            self.mask[row, : int(torch.randint(0, 6, (1,), generator=self.random))] = 0
        self.ids = self.ids * self.mask
        self.memory = OutputMemory()
        self.assistants = [
            remembering(self.memory, budget=8),
            SamAssistant(memory=self.memory, budget=12),
        ]
        self.by_time = SamAssistant(memory=self.memory)
        self.drafts_itself = Assistant([QuantizedSelf()], budget=8)
        self.given = "dynamic" if given == "of unknown layers" and name in LAYERED else given
        self.start_over()
        for who in self.caches if given else ():
            self.caches[who] = CACHES[self.given](self.model.config)

    def teardown(self):
        # Other conversations have the same model.
        if hasattr(self, "model"):
            self.set_up("nothing")

    def start_over(self):
        self.caches = {"plain": None, "ours": None}
        # Whether a cache can be filled again as it was filled at first.
        self.refillable = self.name not in BY_PIECES and self.hook is None
        # Whether both were filled in the same pieces, which differ in what padding leaves there. A
        # static window keeps a token more than its layer looks at.
        self.alike = self.given != "static" or self.name not in WINDOWED

    def new_tokens(self, rows, length):
        """A phrase of few words, so that drafts are found."""
        return torch.randint(3, 12, (rows, length), generator=self.random)

    @property
    def rows(self):
        return len(self.ids)

    def generate(self, who, ids=None, mask=None, kind="", **options):
        ids = self.ids if ids is None else ids
        mask = self.mask if mask is None else mask
        inputs = {"input_ids": ids, "attention_mask": mask, CACHE: self.caches[who]}
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
        # Rows of unequal progress are not asked for states.
        options |= {"output_hidden_states": kind == "plain"}
        # Frequencies that have grown with a text stay so: both calls begin with the same ones.
        if who == "plain":
            self.frequencies = frequencies_of(self.model)
        else:
            set_frequencies(self.frequencies)
        return self.model.generate(
            **(inputs | options), return_dict_in_generate=True, output_logits=True
        )

    def extend(self, new):
        self.ids = torch.cat([self.ids, new], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(new)], dim=1)

    def keep(self, plain, ours, masks_padding=False, eos=None):
        """Both went the same way; the conversation goes on from there."""
        assert torch.equal(plain.sequences, ours.sequences)
        torch.testing.assert_close(plain.logits, ours.logits, atol=2e-3, rtol=2e-3)
        self.extend(plain.sequences[:, self.ids.shape[1] :])
        if masks_padding and eos is not None:
            new = self.ids[:, -len(plain.logits) :]
            ended = (new == eos).int().cumsum(dim=1) - (new == eos).int() > 0
            self.mask[:, -new.shape[1] :][ended] = 0
            # A state has seen the padding, and would not if the text were fed once more.
            self.refillable &= self.name not in STATES
        self.caches = {"plain": plain[CACHE], "ours": ours[CACHE]}
        if self.alike:
            assert_alike(plain[CACHE], ours[CACHE], tolerance=2e-3, owned=False)

    def assistant(self, kind, plain):
        if kind == "oracle":
            return oracle_assistant(plain.sequences, self.mask, seed=self.ids.shape[1])
        if kind == "self" and self.name in ("trees", "windows"):
            return self.drafts_itself
        if kind == "by time":
            return self.by_time
        return None if kind == "none" else self.assistants[kind == 1]

    @rule(
        before=st.sampled_from(["", *BEFORE]),
        scope=st.sampled_from([nullcontext, nullcontext, torch.inference_mode, in_parts]),
        asked=st.integers(1, 4),
        new=st.sampled_from([6, 9, 14, 2, 1]),
        kind=st.sampled_from(KINDS),
        private=st.booleans(),
        ends=st.sampled_from([True, True, False]),
        masks_padding=st.booleans(),
    )
    # A conversation that starts over where it is longest must be able to go on.
    @precondition(lambda self: self.ids.shape[1] < LONGEST or self.caches["plain"] is None)
    def turn(self, before, scope, asked, new, kind, private, ends, masks_padding):
        if before == "choose rows":
            self.choose_rows()
        elif before == "reset" and RESETS and self.caches["plain"] is not None:
            for cache in self.caches.values():
                cache.reset()
        elif before == "save" and self.caches["ours"] is not None:
            self.caches["ours"] = copy.deepcopy(saved(self.caches["ours"]))
        elif before == "start over":
            self.start_over()
        elif before == "forget":
            self.memory.forget()
        elif before == "another model":
            self.ask_another_model()
        self.extend(self.new_tokens(self.rows, asked))
        eos = None
        if ends:
            # A token that some row comes by on its way.
            endless = {"max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
            inputs = {"input_ids": self.ids, "attention_mask": self.mask}
            free = self.model.generate(**inputs, do_sample=False, **endless)
            way = free[0, self.ids.shape[1] :]
            eos = int(way[len(way) // 2])
        plain = self.generate("plain", max_new_tokens=new, eos_token_id=eos)
        assistant = self.assistant(kind, plain)
        if private and assistant is not None:
            assistant = assistant.private()
        before = torch.get_rng_state()
        options = {"max_new_tokens": new, "eos_token_id": eos, "assistant": assistant}
        # What inference mode has made cannot be written in place outside.
        stays = self.given == "static" or self.name in (*BY_PIECES, *STATES)
        if scope is torch.inference_mode and stays:
            scope = nullcontext
        with scope():
            ours = self.generate("ours", kind=kind, **options)
        assert torch.equal(before, torch.get_rng_state())
        self.keep(plain, ours, masks_padding, eos)

    @rule(
        warpers=st.sampled_from(WARPERS),
        new=st.integers(1, 8),
        seed=st.integers(0, 99),
        kind=st.sampled_from(KINDS),
    )
    @precondition(lambda self: self.ids.shape[1] < LONGEST)
    def sampled_turn(self, warpers, new, seed, kind):
        self.extend(self.new_tokens(self.rows, 1))
        options = {"max_new_tokens": new, "do_sample": True, **warpers}
        if self.name == "not finite":
            options["suppress_tokens"] = [66]
        torch.manual_seed(seed)
        plain = self.generate("plain", **options, output_scores=True)
        left = torch.get_rng_state()
        torch.manual_seed(seed)
        assume(not close_draws(plain.scores))
        torch.manual_seed(seed)
        ours = self.generate("ours", kind=kind, **options, assistant=self.assistant(kind, plain))
        assert torch.equal(torch.get_rng_state(), left)
        self.keep(plain, ours)

    @rule(new=st.integers(2, 14), alone=st.booleans(), kind=st.sampled_from(KINDS))
    @precondition(lambda self: self.ids.shape[1] < LONGEST and self.name != "both at once")
    def turn_of_embeddings(self, new, alone, kind):
        """The text so far as the caller embeds it, with its ids or without."""
        self.extend(self.new_tokens(self.rows, 2))
        self.start_over()
        embeds = self.model.get_input_embeddings()(self.ids).detach()
        options = {"inputs_embeds": embeds, "max_new_tokens": new}
        options |= {"input_ids": None} if alone else {}
        plain = self.generate("plain", **options)
        assistant = self.assistant(kind, plain)
        ours = self.generate("ours", kind=kind, **options, assistant=assistant)
        for result in (plain, ours) if alone else ():
            result.sequences = torch.cat([self.ids, result.sequences], dim=1)
        self.keep(plain, ours)

    @rule(
        new=st.integers(2, 14),
        kind=st.sampled_from(KINDS),
        ends=st.booleans(),
        streams=st.booleans(),
    )
    @precondition(lambda self: self.ids.shape[1] < LONGEST)
    def turn_of_callables(self, new, kind, ends, streams):
        """Callables that know rows by their numbers and remember what they were asked, and a
        streamer that is sent the tokens of all rows."""
        self.extend(self.new_tokens(self.rows, 1))

        first, spectators = self.ids.shape[1] + 2, {"plain": Spectator(), "ours": Spectator()}

        def rows_end(ids, scores, **kwargs):
            return ids.shape[1] >= first + torch.arange(len(ids))

        def called(who, **options):
            options["stopping_criteria"] = [rows_end] if ends else []
            options["streamer"] = spectators[who] if streams else None
            allowed = AllowedOfRows(self.ids)
            options |= {"max_new_tokens": new, "prefix_allowed_tokens_fn": allowed}
            return self.generate(who, **options)

        plain = called("plain")
        self.keep(plain, called("ours", kind=kind, assistant=self.assistant(kind, plain)))
        assert spectators["plain"].sent == spectators["ours"].sent

    @rule(state=st.sampled_from(["nothing", "note", "steer", "steer last", "first", "second"]))
    def set_up(self, state):
        """Change the model's hooks or adapters, with which later tokens are computed."""
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        blocks = next(m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList))
        if state in HOOKS:
            self.hook = blocks[1].register_forward_hook(HOOKS[state])
        if self.name == "adapters":
            choose_adapter(self.model, state if state in ("first", "second") else None)
        self.refillable = False

    def choose_rows(self):
        """Leave rows out and repeat others, in the caches as well."""
        fixed = self.given == "static" or self.name in STATES
        count = self.rows if fixed else int(torch.randint(1, 4, (1,), generator=self.random))
        rows = torch.randint(self.rows, (count,), generator=self.random)
        for cache in self.caches.values():
            if cache is not None:
                cache.reorder_cache(rows) if fixed else cache.batch_select_indices(rows)
        self.ids, self.mask = self.ids[rows], self.mask[rows]

    @rule(
        place=st.sampled_from(["a forward", *INTERRUPTED]),
        forwards=st.integers(0, 6),
        new=st.integers(2, 12),
        kind=st.sampled_from(KINDS),
    )
    @precondition(
        lambda self: (
            self.refillable and self.caches["ours"] is not None and self.ids.shape[1] < LONGEST
        )
    )
    def interrupted_turn(self, place, forwards, new, kind):
        """Ctrl-C anywhere; the caller goes on from what the cache holds."""
        self.extend(self.new_tokens(self.rows, 2))
        plain = self.generate("plain", max_new_tokens=new)
        cache, length = self.caches["ours"], self.ids.shape[1]
        assistant = self.assistant(kind, plain) or self.by_time
        options = code_that_interrupts(place, length + 1 + forwards)
        if place == "a forward":
            scope = interrupted_forward(self.model, forwards)
        else:
            scope = INTERRUPTED[place](self.model, assistant)
        with suppress(Interrupt), scope:
            self.generate("ours", kind=kind, max_new_tokens=new, assistant=assistant, **options)
        everything = plain.sequences
        # A cache of all but the last token has nothing left to say.
        if (stop := max(length, cache.get_seq_length() + 1)) < everything.shape[1]:
            mask = torch.cat([self.mask, torch.ones_like(everything[:, length:])], dim=1)
            missing = everything.shape[1] - stop
            known = everything[:, :stop], mask[:, :stop]
            ours = self.generate("ours", *known, max_new_tokens=missing)
            assert torch.equal(everything, ours.sequences)
        self.extend(everything[:, length:])
        self.caches = {"plain": plain[CACHE], "ours": cache}
        self.alike = False

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
            self.start_over()
            return
        self.caches["ours"].crop(-tokens)
        # Static memory still holds what was cut.
        self.alike &= self.given != "static"
        self.ids, self.mask = self.ids[:, :-tokens], self.mask[:, :-tokens]

    def ask_another_model(self):
        model = model_of("windows" if self.name == "trees" else "trees")
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        plain = model.generate(self.ids[:1], **options)
        ours = model.generate(self.ids[:1], **options, assistant=self.assistants[0])
        assert torch.equal(plain, ours)


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    """The tiny models' linears are packed in eight bits."""
    for part in (few_bits, weight_copies):
        monkeypatch.setattr(part, "LEAST_ELEMENTS", 1000)


SEED = os.environ.get("HFRA_SEED")
MANY = int(os.environ.get("HFRA_CONVERSATIONS", "250"))


@pytest.mark.parametrize(
    ("conversations", "turns", "number", "in_place"),
    cases(
        [
            *((2, 6, number, number > 9) for number in range(13)),
            *((MANY, 10, None, in_place) for in_place in (False, True)),
        ],
        13,
    ),
)
def test_conversations_are_plain_decoding(conversations, turns, number, in_place, monkeypatch):
    if in_place:
        serve_in_place(monkeypatch)
    number = number if SEED is None else int(SEED) + (number or 0)
    run_state_machine_as_test(
        Conversation if number is None else seed(number)(Conversation),
        settings=settings(
            max_examples=conversations,
            stateful_step_count=turns,
            deadline=None,
            derandomize=number is None,
            database=None,
            # What fails is told as it was found; making it small takes minutes.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
