"""What calls leave in caches, find there and show of them is what plain decoding does."""

import copy
import io

import pytest
import torch
import transformers
from safetensors.torch import save
from transformers import DynamicCache, EncoderDecoderCache, StaticCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.lossless import (
    NEW_TOKENS,
    PROMPT,
    build,
    knowing,
    late_token,
    outcome,
    run,
    same,
)
from tests.support.oracle_drafter import oracle_assistant
from tests.support.quick import cases, crossed
from tests.support.rounding import OF_MODEL, within

PROMPTS = torch.cat([PROMPT, PROMPT.flip(1)])


def assert_alike(one, other):
    """Two caches, layers or parts of them are of one class and hold the same; tensors of the second
    own all of their memory, as those of libraries that save them must."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)
        assert other.is_contiguous()
        assert other.untyped_storage().nbytes() == other.nbytes
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_alike(*pair)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_alike(one[name], other[name])
    elif hasattr(one, "__dict__") and not isinstance(one, type):
        assert_alike(vars(one), vars(other))
    else:
        assert one == other


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


def saved(cache):
    """A cache that was saved and loaded, without a name of this package in the file."""
    file = io.BytesIO()
    torch.save(cache, file)
    assert b"hf_retrieval_assist" not in file.getvalue()
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def of_both(config):
    return EncoderDecoderCache(dynamic(config), dynamic(config))


def dynamic(config):
    return DynamicCache(config=config)


def static(config):
    return StaticCache(config=config, max_cache_len=64)


LEFT = {
    "returned": lambda config: {},
    "static": lambda config: {"cache_implementation": "static"},
    "dynamic": lambda config: {CACHE: dynamic(config)},
    "of unknown layers": lambda config: {CACHE: DynamicCache()},
    "both": lambda config: {CACHE: of_both(config)},
}


# The model's class, and the kinds of caches that its calls leave.
MADE = ("returned", "static", "dynamic")
LEAVING = {
    "LlamaForCausalLM": (*MADE, "of unknown layers"),
    "Gemma3ForCausalLM": (*MADE, "of unknown layers"),
    "Gemma3nForCausalLM": (*MADE, "of unknown layers"),
    "Qwen3NextForCausalLM": MADE,
    "Lfm2ForCausalLM": MADE,
    "FalconH1ForCausalLM": MADE,
    "GlmMoeDsaForCausalLM": MADE,
    "MistralForCausalLM": ("returned",),
    "BartForCausalLM": ("returned", "dynamic"),
    "T5ForConditionalGeneration": ("returned", "static", "both"),
}


LEFT_BY = [(one, kind, n) for one, kinds in LEAVING.items() for kind in kinds for n in (1, 2)]
# Windows, states that are replayed, and an encoder's.
QUICK = [
    ("Gemma3ForCausalLM", "of unknown layers", 2),
    ("Qwen3NextForCausalLM", "returned", 2),
    ("T5ForConditionalGeneration", "static", 1),
]


@pytest.mark.parametrize(("model_class", "kind", "rows"), cases(LEFT_BY, QUICK))
def test_what_turns_leave_is_what_plain_decoding_leaves(model_class, kind, rows):
    """Its classes, its attributes, as many entries, in memory that can be saved, and nothing that
    names this package; where the prompt's forward is the only one, too."""
    # Few heads and places make scores of the indexer equal by chance.
    indexed = model_class == "GlmMoeDsaForCausalLM"
    model = build(model_class, **({"index_topk": 24, "index_n_heads": 16} if indexed else {}))
    options = {"return_dict_in_generate": True, "eos_token_id": None, "pad_token_id": 0}
    encodes = model.config.is_encoder_decoder
    if encodes:
        options |= {"num_beams": 1, "forced_eos_token_id": None}
    caches = [LEFT[kind](model.config) for _ in range(2)]
    ids, accepted = PROMPTS[:rows], 0
    for new in (NEW_TOKENS,) if kind == "static" else (1, NEW_TOKENS, 1):
        if encodes:
            ids, caches = PROMPTS[:rows], [LEFT[kind](model.config) for _ in range(2)]
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


PRECISIONS = {
    "half": of_type(torch.float16),
    "bfloat16": of_type(torch.bfloat16),
    "double": of_type(torch.float64),
    "keys": of_type(torch.float16, ["keys"]),
    "some layers": of_type(torch.float16, layers=slice(1, None)),
}


def precise_turn(model, ids, change, assistant, make=dynamic):
    """What a turn gives that finds a cache of another precision, and the types that it leaves."""
    cache = make(model.config)
    known = run(model, ids, max_new_tokens=8, **{CACHE: cache})
    change(cache)
    found = outcome(lambda: run(model, known, **{CACHE: cache}, assistant=assistant).tolist())
    return found, [(layer.keys.dtype, layer.values.dtype) for layer in cache.layers]


CLASSES = ["LlamaForCausalLM", "Gemma3ForCausalLM", "BartForCausalLM"]


@pytest.mark.parametrize(("kind", "name", "rows"), cases(crossed(PRECISIONS, CLASSES, [1, 2]), 3))
def test_caches_of_another_precision(name, kind, rows):
    """Plain decoding's layers promote what they hold to what is written behind it, or raise."""
    model, ids = build(name), PROMPTS[:rows]
    plain, left = precise_turn(model, ids, PRECISIONS[kind], None)
    raises = isinstance(plain, tuple)
    assert raises == (kind == "double")
    assistant = SamAssistant(budget=8) if raises else knowing(torch.tensor(plain), reroute=False)
    ours, ours_left = precise_turn(model, ids, PRECISIONS[kind], assistant)
    if raises:
        assert ours[0] is plain[0]
    else:
        assert ours == plain
        assert ours_left == left
        assert assistant.stats.last.accepted > 0


@pytest.mark.parametrize(
    ("own", "held", "make", "tier"),
    [
        (torch.bfloat16, torch.float32, dynamic, ""),
        (torch.bfloat16, torch.float16, dynamic, ""),
        (torch.float32, torch.float16, static, ""),
        (torch.float32, torch.float32, static, "tree"),
    ],
)
def test_precisions_that_are_not_promoted(own, held, make, tier):
    model, assistant = build().to(own), SamAssistant(budget=8)
    plain = precise_turn(model, PROMPTS[:1], of_type(held), None, make)
    assert isinstance(plain[0], tuple) == (tier == "")
    ours = precise_turn(model, PROMPTS[:1], of_type(held), assistant, make)
    assert ours[0][0] == plain[0][0]
    assert ours[1] == plain[1] or make is dynamic  # layers before the one that raises are promoted
    assert assistant.stats.last.tier == tier


CHANGED = {
    "one row": ("LlamaForCausalLM", lambda cache: cache.batch_select_indices(torch.tensor([0]))),
    "rows twice": ("LlamaForCausalLM", lambda cache: cache.batch_repeat_interleave(2)),
    "one layer cut": ("LlamaForCausalLM", lambda cache: cache.layers[1].crop(-1)),
    "a layer with a window longer": (
        "Gemma3ForCausalLM",
        lambda cache: cache.layers[1].update(*2 * [torch.ones(2, 2, 1, 8)]),
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


def test_rows_that_end_in_one_step_leave_what_plain_decoding_leaves():
    model = build("Lfm2ForCausalLM")
    free = run(model, PROMPTS)
    ends = [late_token(row[PROMPT.shape[1] :], at) for row, at in zip(free, (3, 8), strict=True)]
    options = {"eos_token_id": ends, "pad_token_id": 0, "return_dict_in_generate": True}
    knows = SamAssistant(free.tolist(), budget=16)
    plain, ours, _ = same(model, PROMPTS, knows, **options)
    assert knows.stats.last.accepted > 0
    assert_alike(plain[CACHE], ours[CACHE])


def test_layers_that_a_model_appends():
    """One that goes over some of its layers several times keeps a copy of them for each round."""
    name = "DoryForCausalLM"
    if not hasattr(transformers, name):
        pytest.skip(f"this release of transformers has no {name}")
    model = build(name)

    def conversation(**options):
        ids, caches = PROMPT, [None]
        for _ in range(3):
            options[CACHE] = caches[-1]
            told = run(model, ids, return_dict_in_generate=True, **options)
            ids = torch.cat([told.sequences, PROMPT[:, :3]], dim=1)
            caches.append(copy.deepcopy(told[CACHE]))
        return ids, caches

    plain, assisted = conversation(), conversation(assistant=SamAssistant(budget=8))
    assert torch.equal(plain[0], assisted[0])
    for left, found in zip(plain[1][1:], assisted[1][1:], strict=True):
        for layer, own in zip(left.layers, found.layers, strict=True):
            assert type(own) is type(layer)
            states = [layer.keys, layer.values]
            torch.testing.assert_close([own.keys, own.values], states, **within(states, OF_MODEL))
