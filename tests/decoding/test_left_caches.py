"""What calls leave in caches, find there and show of them is what plain decoding does."""

import copy

import pytest
import torch
import transformers
from safetensors.torch import save
from transformers import DynamicCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.caches import CACHES, assert_alike, dynamic, of_both, saved, static
from tests.support.lossless import NEW_TOKENS, PROMPT, build, knowing, outcome, run
from tests.support.oracle_drafter import oracle_assistant
from tests.support.quick import cases

PROMPTS = torch.cat([PROMPT, PROMPT.flip(1)])


def tensors_in(part, name="cache"):
    """All tensors of a cache, a layer or a part of one, by where they are."""
    if isinstance(part, torch.Tensor):
        return {name: part}
    if isinstance(part, list):
        named = enumerate(part)
    else:
        named = (part if isinstance(part, dict) else getattr(part, "__dict__", {})).items()
    found = [tensors_in(one, f"{name}.{i}") for i, one in named if not isinstance(one, type)]
    return {place: tensor for tensors in found for place, tensor in tensors.items()}


# The model's class, the cache that the caller gives or asks for, and rows: windows, states that are
# replayed, and an encoder's. Whole conversations leave those of most other models.
LEFT_BY = [
    ("Gemma3ForCausalLM", "of unknown layers", 2),
    ("Qwen3NextForCausalLM", "returned", 2),
    ("T5ForConditionalGeneration", "asked to be static", 1),
    ("T5ForConditionalGeneration", "both", 2),
    ("BartForCausalLM", "returned", 1),
    ("Lfm2ForCausalLM", "asked to be static", 1),
    ("FalconH1ForCausalLM", "dynamic", 1),
    ("LlamaForCausalLM", "asked to be static", 2),
]
if hasattr(transformers, "DoryForCausalLM"):  # it appends layers
    LEFT_BY.insert(0, ("DoryForCausalLM", "asked to be static", 1))


def given_cache(kind, config):
    """Options of a call."""
    if kind == "asked to be static":
        return {"cache_implementation": "static"}
    return {} if kind == "returned" else {CACHE: CACHES[kind](config)}


@pytest.mark.parametrize(("model_class", "kind", "rows"), cases(LEFT_BY, 4))
def test_what_turns_leave_is_what_plain_decoding_leaves(model_class, kind, rows):
    """Its classes, its attributes, as many entries, in memory that can be saved, and nothing that
    names this package; where the prompt's forward is the only one, too."""
    model = build(model_class)
    options = {"return_dict_in_generate": True, "eos_token_id": None, "pad_token_id": 0}
    encodes = model.config.is_encoder_decoder
    if encodes:
        options |= {"num_beams": 1, "forced_eos_token_id": None}
    caches = [given_cache(kind, model.config) for _ in range(2)]
    ids, accepted = PROMPTS[:rows], 0
    for new in (NEW_TOKENS,) if "static" in kind else (1, NEW_TOKENS, 1):
        if encodes:
            ids, caches = PROMPTS[:rows], [given_cache(kind, model.config) for _ in range(2)]
        options["max_new_tokens"] = new
        plain = run(model, ids, **options, **caches[0])
        assistant = oracle_assistant(plain)
        ours = run(model, ids, **options, **caches[1], assistant=assistant)
        assert torch.equal(plain.sequences, ours.sequences)
        assert ours[CACHE] is caches[1].get(CACHE, ours[CACHE])
        accepted += assistant.stats.last.accepted
        assert_alike(plain[CACHE], ours[CACHE])
        save(tensors_in(ours[CACHE]))
        ids = torch.cat([plain.sequences, ids[:, :3]], dim=1)
        caches = [{CACHE: plain[CACHE]}, {CACHE: copy.deepcopy(saved(ours[CACHE]))}]
    # Recurrent states of a batch would only go back together.
    replayed = model_class in ("Qwen3NextForCausalLM", "FalconH1ForCausalLM")
    assert (accepted > 0) == (rows == 1 or not replayed)


def recording(cache):
    cache.activate_past_recording()


def narrower(cache):
    for layer in cache.layers:
        layer.sliding_window = 4


class Counted(DynamicCache):
    count = 0

    def update(self, key_states, *arguments, **options):
        self.count += key_states.shape[-2]
        return super().update(key_states, *arguments, **options)


STRANGE = {
    "shorter windows": ("MistralForCausalLM", DynamicCache, narrower),
    "windows that record": ("MistralForCausalLM", DynamicCache, recording),
    "convolutions that record": ("Lfm2ForCausalLM", DynamicCache, recording),
    "subclass": ("LlamaForCausalLM", Counted, lambda cache: None),
}


@pytest.mark.parametrize("kind", cases(STRANGE, 2))
def test_a_cache_that_keeps_others_than_the_models_own_is_filled_plainly(kind):
    model_class, cache_class, change = STRANGE[kind]
    model, assistant = build(model_class), SamAssistant(budget=8)

    def left(assistant):
        cache = cache_class(config=model.config)
        change(cache)
        text = outcome(lambda: run(model, PROMPTS, **{CACHE: cache}, assistant=assistant).tolist())
        return text, getattr(cache, "count", 0)

    plain = left(None)
    assert left(assistant) == plain
    # Plain decoding of early releases fails where windows record.
    assert assistant.stats.last.tier == ("" if isinstance(plain[0], tuple) else "plain")


def of_type(dtype, names=("keys", "values"), layers=slice(None)):
    def change(cache):
        for layer in cache.layers[layers]:
            for name in names:
                setattr(layer, name, getattr(layer, name).to(dtype))

    return change


def precise_turn(model, ids, change, assistant, make=dynamic):
    """What a turn gives that finds a cache of another precision, and the types that it leaves."""
    cache = make(model.config)
    known = run(model, ids, max_new_tokens=8, **{CACHE: cache})
    change(cache)
    found = outcome(lambda: run(model, known, **{CACHE: cache}, assistant=assistant).tolist())
    return found, [(layer.keys.dtype, layer.values.dtype) for layer in cache.layers]


# What is held, of which class of model and its dtype, in which cache, and whether plain decoding
# raises; otherwise its layers promote what they hold to what is written behind it.
HALF, SINGLE = torch.float16, torch.float32
PRECISIONS = [
    (of_type(HALF), "LlamaForCausalLM", SINGLE, dynamic, False),
    (of_type(torch.bfloat16), "Gemma3ForCausalLM", SINGLE, dynamic, False),
    (of_type(HALF, ["keys"]), "BartForCausalLM", SINGLE, dynamic, False),
    (of_type(torch.float64), "LlamaForCausalLM", SINGLE, dynamic, True),
    (of_type(HALF), "LlamaForCausalLM", SINGLE, static, True),
    (of_type(SINGLE), "LlamaForCausalLM", SINGLE, static, False),
    (of_type(HALF, layers=slice(1, None)), "Gemma3ForCausalLM", SINGLE, dynamic, False),
    (of_type(SINGLE), "LlamaForCausalLM", torch.bfloat16, dynamic, True),
    (of_type(HALF), "LlamaForCausalLM", torch.bfloat16, dynamic, True),
]


@pytest.mark.parametrize(("change", "name", "dtype", "make", "raises"), cases(PRECISIONS, 6))
@pytest.mark.parametrize("rows", [1, 2])
def test_caches_of_another_precision(change, name, dtype, make, raises, rows):
    model, ids = build(name).to(dtype), PROMPTS[:rows]
    plain, left = precise_turn(model, ids, change, None, make)
    assert isinstance(plain, tuple) == raises
    assistant = SamAssistant(budget=8) if raises else knowing(torch.tensor(plain), reroute=False)
    ours, ours_left = precise_turn(model, ids, change, assistant, make)
    assert ours[0] == plain[0]
    if not raises:
        assert ours == plain
        assert ours_left == left
        assert assistant.stats.last.accepted > 0


CHANGED = {
    "one row": ("LlamaForCausalLM", lambda cache: cache.batch_select_indices(torch.tensor([0]))),
    "rows twice": ("LlamaForCausalLM", lambda cache: cache.batch_repeat_interleave(2)),
    "one layer cut": ("LlamaForCausalLM", lambda cache: cache.layers[1].crop(-1)),
    "a layer with a window longer": (
        "Gemma3ForCausalLM",
        lambda cache: cache.layers[1].update(*2 * [torch.ones(2, 2, 1, 16)]),
    ),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_caches_whose_layers_or_rows_are_others_than_the_calls_are_left_to_plain_decoding(kind):
    model_class, change = CHANGED[kind]
    model = build(model_class)
    plain = precise_turn(model, PROMPTS, change, None)
    assert precise_turn(model, PROMPTS, change, SamAssistant(budget=8)) == plain


class Looks(StoppingCriteria, BaseStreamer):
    """Notes what a call's cache shows wherever it is asked, and crops so many tokens of it once."""

    def __init__(self, cache, crops=0):
        self.cache, self.crops, self.seen = cache, crops, []

    def put(self, value):
        own = getattr(self.cache, "self_attention_cache", self.cache)
        layers = [layer for layer in own.layers if getattr(layer, "keys", None) is not None]
        shown = [(type(layer), layer.keys.shape, float(layer.keys.sum())) for layer in layers]
        copied = copy.deepcopy(self.cache) if len(self.seen) == 6 else self.cache
        length = int(copied.get_seq_length())
        self.seen.append((length, len(self.cache), own.is_initialized, shown))
        if self.crops and len(self.seen) == 4:
            self.cache.crop(-self.crops)

    def end(self):
        pass

    def __call__(self, ids, scores, **kwargs):
        self.put(ids)
        return torch.full((len(ids),), int(self.cache.get_seq_length()) >= 34)

    def process(self, ids, scores):
        self.put(ids)
        return scores

    def allowed(self, row, ids):
        self.put(ids)
        return [*range(67)]


PLACES = {
    "criterion": lambda looks: {"stopping_criteria": [looks]},
    "processor": lambda looks: {"logits_processor": [looks.process]},
    "streamer": lambda looks: {"streamer": looks},
    "function": lambda looks: {"prefix_allowed_tokens_fn": looks.allowed},
}
# The model's class, the cache that the caller gives, and how many tokens of it are cropped.
WATCHED = [
    ("LlamaForCausalLM", dynamic, 0),
    ("LlamaForCausalLM", dynamic, 1),
    ("LlamaForCausalLM", static, 0),
    ("Gemma3ForCausalLM", dynamic, 0),
    ("Lfm2ForCausalLM", dynamic, 0),
    ("T5ForConditionalGeneration", of_both, 0),
]


def looked_at(model, make, crops, place, assistant):
    """The text of a call, or what it raises, and what code of the caller's saw of its cache."""
    cache = make(model.config)
    looks = Looks(cache, crops)
    options = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0, "num_beams": 1}
    options |= {CACHE: cache, "assistant": assistant, **PLACES[place](looks)}
    return outcome(lambda: run(model, PROMPTS[:1], **options).tolist()), looks.seen


SEEN = [(*kind, place) for kind in WATCHED for place in PLACES]
# Tokens that are cropped, a static cache, and convolutions.
QUICK = [
    (*WATCHED[1], "streamer"),
    (*WATCHED[2], "criterion"),
    (*WATCHED[4], "processor"),
]


@pytest.mark.parametrize(("model_class", "make", "crops", "place"), cases(SEEN, QUICK))
def test_code_of_the_callers_sees_its_cache_as_in_plain_decoding(model_class, make, crops, place):
    model = build(model_class)
    plain, seen = looked_at(model, make, crops, place, None)
    assistant = knowing(run(model, PROMPTS[:1], num_beams=1))
    assert looked_at(model, make, crops, place, assistant) == (plain, seen)
    assert len(seen) > 6
