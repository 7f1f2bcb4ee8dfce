"""What a caller's own code changes within a call or between calls is plain decoding's there too.

`hf_retrieval_assist.host.plain_step` has the table of what is watched, and how.
"""

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    Gemma3ForCausalLM,
    GenerationMixin,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation import logits_process
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host import plain_step
from hf_retrieval_assist.host.lookups import lookups_of
from hf_retrieval_assist.host.model_watch import ModelWatch
from hf_retrieval_assist.host.transformers_private import loop
from hf_retrieval_assist.verification import fixed_verifier, service
from tests.support.lossless import INPUTS, PROMPT, build, knowing, run
from tests.support.op_recorder import serve_in_place
from tests.support.oracle_drafter import oracle_assistant, sequences_of

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "watched.md"
START = PROMPT.shape[1]
TEXT = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 24}


class Each(StoppingCriteria):
    """Code of a caller's that acts at some lengths; it is asked as a criterion."""

    def __init__(self, act):
        self.act = act

    def __call__(self, ids, scores, **options):
        self.act(ids.shape[1])
        return torch.zeros(len(ids), dtype=torch.bool)


class Shows:
    """The same as a streamer."""

    def __init__(self, act):
        self.act, self.length = act, None

    def put(self, ids):
        self.length = ids.shape[1] if self.length is None else self.length + 1
        self.act(self.length)

    def end(self):
        pass


def as_processor(act):
    """The same as a logits processor, which sees a token less."""

    def process(ids, scores):
        act(ids.shape[1] + 1)
        return scores

    return {"logits_processor": [process]}


ASKED = {
    "criterion": lambda act: {"stopping_criteria": [Each(act)]},
    "processor": as_processor,
    "streamer": lambda act: {"streamer": Shows(act)},
}


def both(model, make, inputs="one row", seed=1, assistant=None, **options):
    """The results of plain decoding and of an assistant whose drafts are right, and that assistant.

    Args:
        make: the options of one call, whose objects are its own.
    """
    options, given = TEXT | options, INPUTS[inputs]
    results = []
    for assistants in (False, True):
        torch.manual_seed(seed)
        if assistants and assistant is None:
            assistant = oracle_assistant(results[0], given.get("attention_mask"))
        extra = {"assistant": assistant} if assistants else {}
        results.append(model.generate(**given, **options, **make(), **extra))
    return *results, assistant


def agree(model, make, **options):
    plain, assisted, assistant = both(model, make, **options)
    assert torch.equal(sequences_of(plain), sequences_of(assisted))
    return assistant.stats.last


# Settings of transformers' own objects.


@pytest.mark.parametrize("way", ASKED)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (lambda: TemperatureLogitsWarper(1.0), "temperature", (0.2, 1.2, 2.2)),
        (lambda: TopKLogitsWarper(5), "top_k", (2, 20, 1)),
        (lambda: TopPLogitsWarper(0.9), "top_p", (0.2, 0.9, 0.6)),
        (lambda: MinPLogitsWarper(0.1), "min_p", (0.9, 0.01, 0.3)),
        (lambda: TopKLogitsWarper(5), "filter_value", (-1.0, -2.0, -float("inf"))),
    ],
)
def test_settings_of_warpers_are_read_at_each_token(llama, make, name, values, inputs, way):
    def options():
        warper = make()
        moved = ASKED[way](lambda length: setattr(warper, name, values[length % 3]))
        return {**moved, "logits_processor": [*moved.get("logits_processor", []), warper]}

    last = agree(llama, options, inputs=inputs, do_sample=True, top_k=0)
    assert last.tier == "tree"
    assert last.accepted > 0


def test_settings_of_warpers_are_read_where_the_device_chooses(monkeypatch):
    serve_in_place(monkeypatch)
    model = build(LlamaForCausalLM)

    def options():
        warper = TemperatureLogitsWarper(1.0)
        act = Each(lambda length: setattr(warper, "temperature", 0.2 + length % 3))
        return {"logits_processor": [warper], "stopping_criteria": [act]}

    for _ in range(3):
        last = agree(model, options, do_sample=True, top_k=0)
    assert last.accepted > 0
    made = fixed_verifier.FixedVerifier  # what chose ahead was there to be wrong
    assert made.summarises


def test_suppressed_tokens_that_are_written_in_place_count_at_once(llama):
    def options():
        suppress = logits_process.SuppressTokensLogitsProcessor([5, 9])
        tokens = suppress.suppress_tokens
        return {
            "logits_processor": [suppress],
            "stopping_criteria": [Each(lambda length: tokens.fill_(3 + length % 40))],
        }

    for sampled in (False, True):
        agree(llama, options, do_sample=sampled, top_k=0)


@pytest.mark.parametrize("way", ASKED)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("to", [22, 25, 34, 17])
def test_a_limit_that_is_moved(llama, to, first, way):
    def options():
        limit = MaxLengthCriteria(max_length=30)
        moved = ASKED[way](lambda length: length == 20 and setattr(limit, "max_length", to))
        own = moved.pop("stopping_criteria", [])
        return {**moved, "stopping_criteria": [limit, *own] if first else [*own, limit]}

    agree(llama, options, max_new_tokens=40)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("place", ["another tensor", "written in place"])
def test_an_end_token_that_is_moved(llama, place, inputs):
    text = sequences_of(run(llama, **TEXT))[0]

    def options():
        end = EosTokenCriteria(eos_token_id=66)

        def move(length):
            if length == 20 and place == "another tensor":
                end.eos_token_id = text[25:26].clone()
            elif length == 20:
                end.eos_token_id.fill_(int(text[25]))

        return {"stopping_criteria": [Each(move), end]}

    agree(llama, options, inputs=inputs)


# Classes, loops and functions that are exchanged for the whole process.


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (
            TemperatureLogitsWarper,
            lambda self, ids, scores: scores / (0.05 + (ids.shape[1] + len(ids)) % 3),
        ),
        (TopKLogitsWarper, lambda self, ids, scores: scores.roll(int(ids[0, -1]), -1)),
        (LogitsProcessorList, lambda self, ids, scores, **_: scores.roll(ids.shape[1] % 5, -1)),
        (
            MaxLengthCriteria,
            lambda self, ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= START + 9),
        ),
        (
            EosTokenCriteria,
            lambda self, ids, scores, **_: ids[:, -1] % 7 == 3,
        ),
        (
            StoppingCriteriaList,
            lambda self, ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= START + 11),
        ),
    ],
)
def test_calls_of_transformers_classes_that_are_exchanged(llama, kind, call, inputs, monkeypatch):
    own = {"eos_token_id": 66} if kind is EosTokenCriteria else {}
    options = {"do_sample": True, "temperature": 0.7, "top_k": 5, "inputs": inputs} | own
    agree(llama, dict, **options)
    monkeypatch.setattr(kind, "__call__", call)
    agree(llama, dict, **options)
    agree(llama, dict, **options | {"do_sample": False})
    monkeypatch.undo()
    agree(llama, dict, **options)


def chooses_otherwise(name):
    """A function that stands for one of PyTorch's that choose a token."""
    if name == "argmax":
        return torch, lambda scores, dim: scores.topk(2, dim=dim).indices[..., 1]
    if name == "softmax":
        softmax = F.softmax
        return F, lambda scores, dim: softmax(scores * 3, dim=dim)
    draw, own = torch.multinomial, torch.Generator()
    return torch, lambda probs, num_samples: draw(probs, num_samples, generator=own.manual_seed(3))


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("name", ["argmax", "multinomial", "softmax"])
def test_functions_that_choose_are_asked(llama, name, within, inputs, monkeypatch):
    agree(llama, dict, do_sample=True, top_k=0, inputs=inputs)  # draws are known from here on
    space, function = chooses_otherwise(name)
    before = getattr(space, name)

    def at(length):
        return {START + 6: function, START + 15: before}.get(length)

    def options():
        act = Each(lambda length: at(length) and setattr(space, name, at(length)))
        return {"stopping_criteria": [act]} if within else {}

    if not within:
        monkeypatch.setattr(space, name, function)
    for sampled in (False, True):
        agree(llama, options, do_sample=sampled, top_k=0, inputs=inputs)
    assert within == (getattr(space, name) is before)


def second_best(self, input_ids, logits_processor, stopping_criteria, generation_config, **_):
    while input_ids.shape[1] < generation_config.max_length:
        best = self(input_ids).logits[:, -1].topk(2).indices[:, 1:]
        input_ids = torch.cat([input_ids, best], 1)
    return input_ids


@pytest.mark.parametrize("whose", ["all models'", "a class's", "an instance's"])
def test_a_loop_that_is_exchanged_decodes(whose, monkeypatch):
    model = build(LlamaForCausalLM)
    before = agree(model, dict)
    owner = {"all models'": GenerationMixin, "a class's": LlamaForCausalLM}.get(whose, model)
    monkeypatch.setattr(owner, loop().__name__, second_best, raising=False)
    plain, assisted, assistant = both(model, dict)
    assert torch.equal(plain, assisted)
    if whose == "an instance's":  # which plain decoding does not ask
        assert assistant.stats.last.tier == before.tier
    else:
        assert "another loop" in assistant.stats.last.reason
    with SamAssistant().attached(model):
        assert torch.equal(plain, model.generate(**INPUTS["one row"], **TEXT))


class Later(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **options):
        made = super().prepare_inputs_for_generation(
            input_ids, attention_mask=attention_mask, **options
        )
        if input_ids.shape[1] > 20:
            made["input_ids"] = torch.full_like(made["input_ids"], 7)
        return made


class Forgets(LlamaForCausalLM):
    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *arguments, **options):
        made = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *arguments, **options
        )
        if made.get("attention_mask") is not None and made["attention_mask"].shape[1] == 20:
            made["attention_mask"][:, :10] = 0
        return made


class Ends(LlamaForCausalLM):
    lengths = 0

    def _has_unfinished_sequences(self, *arguments, **options):
        self.lengths += 1
        return super()._has_unfinished_sequences(*arguments, **options) and self.lengths % 9 > 0


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kind", [Later, Forgets, Ends])
def test_methods_that_the_loop_asks(kind, inputs):
    model = build(LlamaForCausalLM)
    drafts = knowing(*model.generate(**INPUTS[inputs], **TEXT).split(1))
    model.__class__ = kind
    results = []
    for assistant in (None, drafts):
        model.lengths = 0
        given = {name: value.clone() for name, value in INPUTS[inputs].items()}
        results.append(model.generate(**given, **TEXT, assistant=assistant))
    assert torch.equal(*results)
    assert (drafts.stats.last.tier, drafts.stats.last.drafted) == ("plain", 0)
    assert "nobody knows what its" in drafts.stats.last.reason


def test_a_method_of_an_instance_that_the_loop_asks():
    model = build(LlamaForCausalLM)
    prepare(model, True)
    last = agree(model, dict)
    assert "nobody knows what its prepare_inputs_for_generation" in last.reason
    prepare(model, False)
    assert agree(model, dict).tier == "tree"


@pytest.mark.parametrize("kind", [DynamicLayer, DynamicCache])
def test_methods_of_caches_that_are_exchanged_make_calls_plain(llama, kind, monkeypatch):
    update = kind.update

    def halves(self, *arguments, **options):
        keys, values = update(self, *arguments, **options)
        return keys, values * 0.5

    monkeypatch.setattr(kind, "update", halves)
    last = agree(llama, dict)
    assert last.tier == "plain"
    assert "update of transformers' caches" in last.reason
    monkeypatch.undo()
    assert agree(llama, dict).tier == "tree"


# What a model's forward looks up.


def exchange_rope(monkeypatch):
    rope = modeling_llama.apply_rotary_pos_emb

    def stretched(q, k, *more, **options):
        return rope(q * 4, k, *more, **options)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", stretched)


def exchange_silu(monkeypatch):
    silu = F.silu
    monkeypatch.setattr(F, "silu", lambda x, **options: silu(x, **options) * 0.3)


def exchange_linear(monkeypatch):
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *more: linear(x, *more).relu() + 0.1)


def exchange_attention(monkeypatch):
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def uniform(module, query, *more, **options):
        return sdpa(module, query * 0.1, *more, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", uniform)


def exchange_forward(monkeypatch):
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x) * 0.2)


def exchange_module_call(monkeypatch):
    call = nn.Module.__call__

    def seen(module, *arguments, **options):
        found = call(module, *arguments, **options)
        return found * 1.5 if isinstance(module, modeling_llama.LlamaMLP) else found

    monkeypatch.setattr(nn.Module, "__call__", seen)


EXCHANGES = (
    *(exchange_rope, exchange_silu, exchange_linear, exchange_attention, exchange_forward),
    exchange_module_call,
)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda one: one.__name__)
def test_functions_that_a_forward_names(exchange, graphs, monkeypatch):
    model = build(LlamaForCausalLM)
    assistant = knowing(run(model, **TEXT), budget=6, graphs=graphs)
    for _ in range(4):
        agree(model, dict, assistant=assistant)
    assert (assistant.stats.last.repeated > 0) == graphs
    exchange(monkeypatch)
    for _ in range(3):
        agree(model, dict, assistant=assistant)
    # Nobody knows what a caller's function does when it is called again.
    assert assistant.stats.last.repeated == 0
    monkeypatch.undo()
    agree(model, dict, assistant=assistant)


def test_a_callers_function_is_tested_with_the_model(llama, monkeypatch):
    """One that depends on how many tokens it is given serves no drafts."""
    assert agree(llama, dict).tier == "tree"
    rope = modeling_llama.apply_rotary_pos_emb

    def crowded(q, k, *more, **options):
        return rope(q * (1.0 if q.shape[2] == 1 else 0.3), k, *more, **options)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", crowded)
    assert agree(llama, dict).tier == "plain"
    monkeypatch.undo()
    assert agree(llama, dict).tier == "tree"


@pytest.mark.parametrize("name", [LlamaForCausalLM, Gemma3ForCausalLM, GPT2LMHeadModel])
def test_the_names_of_a_forward_are_found(name):
    found = {looked for looked, _ in lookups_of(build(name)).items()}
    assert {"forward", "__call__", "sdpa"} <= found
    own = {LlamaForCausalLM: "apply_rotary_pos_emb", Gemma3ForCausalLM: "create_causal_mask"}
    assert own.get(name, "forward") in found


# A model that is changed between two tokens of a call.


def scale(model, on):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 4.0 if on else 0.25


def write(model, on):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(3.0 if on else 1 / 3.0)


def leave_out(model, on):
    model.model.layers[1].mlp.down_proj = model.model.layers[0].mlp.down_proj if on else model.kept


def exchange_layer(model, on):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def hook(model, on):
    if on:
        model.handle = model.model.layers[0].mlp.register_forward_hook(lambda m, a, out: out * 2)
    else:
        model.handle.remove()


def own_forward(model, on):
    mlp = model.model.layers[0].mlp
    if on:
        kind = type(mlp)
        mlp.forward = lambda x: kind.forward(mlp, x) * 0.3
    else:
        del mlp.forward


def rope_of_all(model, on):
    if on:
        model.rope = rope = modeling_llama.apply_rotary_pos_emb
        modeling_llama.apply_rotary_pos_emb = lambda q, k, *more, **o: rope(q * 4, k, *more, **o)
    else:
        modeling_llama.apply_rotary_pos_emb = model.rope


def prepare(model, on):
    if on:
        make = model.prepare_inputs_for_generation

        def control(input_ids, attention_mask=None, **options):
            made = make(input_ids, attention_mask=attention_mask, **options)
            made["input_ids"] = torch.full_like(made["input_ids"], 7)
            return made

        model.prepare_inputs_for_generation = control
    else:
        del model.prepare_inputs_for_generation


CHANGES = (scale, write, leave_out, exchange_layer, hook, own_forward, rope_of_all, prepare)


@pytest.mark.parametrize("way", ASKED)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_a_model_that_is_changed_within_a_call(change, inputs, way):
    model = build(LlamaForCausalLM)
    object.__setattr__(model, "kept", model.model.layers[1].mlp.down_proj)

    def options():
        def act(length):
            if length in (START + 8, START + 17):
                change(model, length == START + 8)

        return ASKED[way](act)

    known = knowing(*(model.generate(**INPUTS[inputs], **TEXT, **options())).split(1))
    for assistant in (None, known, known, known):  # trees, then forwards that are repeated
        last = agree(model, options, inputs=inputs, assistant=assistant)
        assert last.tier == "tree"
        assert last.accepted > 0 or inputs == "padded"
        assert "changed the model" in last.reason


def test_a_model_that_is_changed_where_memory_stays_in_place(monkeypatch):
    serve_in_place(monkeypatch)
    model = build(LlamaForCausalLM)
    for _ in range(3):
        last = agree(
            model,
            lambda: {
                "stopping_criteria": [
                    Each(lambda length: length == START + 8 and scale(model, True)),
                    Each(lambda length: length == START + 17 and scale(model, False)),
                ]
            },
        )
    assert "changed the model" in last.reason


def test_what_nothing_counts_can_be_said():
    model = build(LlamaForCausalLM)
    weight = model.model.layers[0].mlp.down_proj.weight
    assistant = knowing(run(model, **TEXT), budget=6)

    def options():
        def act(length):
            if length in (START + 8, START + 17):
                weight.data.mul_(3.0 if length == START + 8 else 1 / 3.0)
                assistant.model_changed()

        return {"stopping_criteria": [Each(act)]}

    for _ in range(3):
        last = agree(model, options, assistant=assistant)
    assert "changed the model" in last.reason


def test_a_call_without_code_of_the_callers_is_not_compared(llama, monkeypatch):
    monkeypatch.setattr(ModelWatch, "__init__", lambda *_: pytest.fail("compared"))
    assert agree(llama, dict, do_sample=True, temperature=0.7).accepted > 0


def test_ids_that_a_callers_code_writes_into_are_the_text_from_there_on(llama):
    def options():
        def process(ids, scores):
            if ids.shape[1] == START + 6:
                ids[:, 2] = 11
            return scores + F.one_hot((ids[:, 2] + ids[:, -1]) % 67, 67) * 0.5

        class Rewrites(StoppingCriteria):
            def __call__(self, ids, scores, **options):
                if ids.shape[1] == START + 10:
                    ids[:, -1] = 12
                return torch.zeros(len(ids), dtype=torch.bool)

        return {"logits_processor": [process], "stopping_criteria": [Rewrites()]}

    for inputs in INPUTS:
        for sampled in (False, True):
            agree(llama, options, inputs=inputs, do_sample=sampled, top_k=0)


# The table.


def test_the_page_shows_the_table():
    assert plain_step.table() in PAGE.read_text(encoding="utf-8")


def test_every_name_of_the_loop_is_known():
    """A release whose loop asks something else is met here first."""
    assert not isinstance(plain_step._of_loop(), str)
    assert not isinstance(plain_step._of_caches(), str)
    asked = {*plain_step.names_in(loop().__code__)}
    known = {*plain_step.LOOP_METHODS, *(name for _, name in plain_step._CHOOSERS)}
    rows = " ".join(row.what for row in plain_step.TABLE)
    for name in asked & vars(GenerationMixin).keys():
        assert name in known or f"`{name}`" in rows or name in ONCE, name


# What the loop asks once, before the first token.
ONCE = {"_valid_auto_compile_criteria", "get_compiled_call"}


def test_verdicts_hold_no_model():
    model = build(LlamaForCausalLM)
    agree(model, dict)
    before = len(service._services)
    del model
    gc.collect()
    assert len(service._services) < before
