"""What calls leave in caches of any kind, find there and show of them is what plain decoding does;
whole conversations leave those of most models."""

import copy
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.decoding.call import Call
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.verification.verifier import Verifier
from tests.support.caches import CACHES, assert_alike, dynamic, of_both, saved, static
from tests.support.interruptions import INTERRUPTIONS
from tests.support.lossless import NEW_TOKENS, PROMPT, build, knowing, outcome, run
from tests.support.oracle_drafter import agreeing, oracle_assistant
from tests.support.quick import cases, crossed
from tests.support.watching import Interrupt, results_of

PROMPTS = torch.cat([PROMPT, PROMPT.flip(1)])


# The model's class, the cache that the caller gives or asks for, and rows: windows, states that are
# replayed, and an encoder's.
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
    """Its classes, its attributes, as many entries, in memory of their own, and nothing that names
    this package; where the prompt's forward is the only one, too."""
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


# The model's class, and what the caller does to a cache that is empty, or behind a first turn.
EMPTY = {
    "shorter windows": ("MistralForCausalLM", narrower),
    "windows that record": ("MistralForCausalLM", recording),
    "convolutions that record": ("Lfm2ForCausalLM", recording),
    "subclass": ("LlamaForCausalLM", lambda cache: setattr(cache, "__class__", Counted)),
}
FILLED = {
    "one row": ("LlamaForCausalLM", lambda cache: cache.batch_select_indices(torch.tensor([0]))),
    "rows twice": ("LlamaForCausalLM", lambda cache: cache.batch_repeat_interleave(2)),
    "one layer cut": ("LlamaForCausalLM", lambda cache: cache.layers[1].crop(-1)),
    "a layer with a window longer": (
        "Gemma3ForCausalLM",
        lambda cache: cache.layers[1].update(*2 * [torch.ones(2, 2, 1, 16)]),
    ),
}


@pytest.mark.parametrize("kind", cases(EMPTY, 2) + cases(FILLED, 4))
def test_a_cache_that_keeps_others_than_the_models_own_is_filled_plainly(kind):
    model_class, change = (EMPTY | FILLED)[kind]
    model, assistant = build(model_class), SamAssistant(budget=8)

    def left(assistant):
        cache, known = DynamicCache(config=model.config), PROMPTS
        if kind in FILLED:
            known = run(model, PROMPTS, max_new_tokens=8, **{CACHE: cache})
        change(cache)
        text = outcome(lambda: run(model, known, **{CACHE: cache}, assistant=assistant).tolist())
        return text, getattr(cache, "count", 0)

    plain = left(None)
    assert left(assistant) == plain
    # Plain decoding raises where layers differ, and of early releases where windows record.
    assert isinstance(plain[0], tuple) or assistant.stats.last.tier == "plain"


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


@pytest.fixture
def streams(monkeypatch):
    """Offloaded caches ask for streams, which a CPU has none of."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch, "Stream", MagicMock)
        for name in ("Stream", "stream", "default_stream"):
            monkeypatch.setattr(torch.cuda, name, MagicMock())


# Drafts are verified by trees, trees with windows, replays and chains: of rows, and the tier.
TIERS = {
    "LlamaForCausalLM": (1, "tree"),
    "Gemma3ForCausalLM": (2, "tree"),
    "BambaForCausalLM": (1, "replay"),
    "Lfm2ForCausalLM": (2, "chain"),
}
# Static ones become dynamic ones, which hold the same; the others stay what the caller wanted.
DRAFTED = {
    **{"static": True, "dynamic": True},
    **{"offloaded": False, "offloaded_static": False, "sliding_window": False},
}


@pytest.mark.parametrize(("name", "kind"), cases(crossed(TIERS, DRAFTED), 3))
@pytest.mark.usefixtures("streams")
def test_caches_that_generate_makes(name, kind):
    rows, tier = TIERS[name]
    inputs = {"input_ids": PROMPTS[:rows], "attention_mask": torch.ones_like(PROMPTS[:rows])}
    options = {"do_sample": False, "max_new_tokens": 10, "cache_implementation": kind}
    agreeing(build(name), inputs, tier=tier if DRAFTED[kind] else "plain", **options)


OFFLOADED = {
    "dynamic": lambda config: DynamicCache(config=config, offloading=True),
    "static": lambda config: StaticCache(config=config, max_cache_len=64, offloading=True),
}


def turn(model, ids, cache, assistant=None):
    return run(model, ids, max_new_tokens=8, **{CACHE: cache}, assistant=assistant)


@pytest.mark.parametrize(
    ("name", "kind"), cases(crossed(TIERS, OFFLOADED), [("Gemma3ForCausalLM", "static")])
)
@pytest.mark.usefixtures("streams")
def test_turns_with_an_offloaded_cache_of_the_caller(name, kind):
    model, prompts = build(name), PROMPTS[: TIERS[name][0]]
    first = turn(model, prompts, OFFLOADED[kind](model.config))
    question = torch.cat([first, prompts[:, :5]], dim=1)
    second = turn(model, question, None)
    for assisted in ((True, True), (True, False), (False, True)):
        cache = OFFLOADED[kind](model.config)
        texts = zip((prompts, question), (first, second), assisted, strict=True)
        for text, expected, helped in texts:
            assistant = oracle_assistant(expected) if helped else None
            assert torch.equal(expected, turn(model, text, cache, assistant))


@pytest.mark.parametrize("layers", [1, 5])
def test_a_cache_of_another_model_is_refused(layers):
    model, other = build(), build(num_hidden_layers=layers)
    count = model.config.num_hidden_layers
    cache = DynamicCache(config=other.config)
    first = turn(other, PROMPTS[:1], cache)
    with pytest.raises(ValueError, match=f"a cache of {count} layers .* got {layers}"):
        turn(model, first, cache, oracle_assistant(first))


def test_windows_hold_what_they_show_and_little_more(monkeypatch):
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    options = {"sliding_window": 32, "layer_types": kinds, "max_position_embeddings": 4096}
    model = build("Gemma3ForCausalLM", **options)
    ids = torch.randint(3, 67, (2, 700), generator=torch.Generator().manual_seed(0))
    plain = turn(model, ids, None)
    cache = DynamicCache(config=model.config)
    assert torch.equal(turn(model, ids, cache, oracle_assistant(plain)), plain)
    more = torch.cat([plain, ids[:, :500]], dim=1)
    plain = turn(model, more, None)
    ended = results_of(monkeypatch, Verifier, "end", lambda _, verifier, tokens: sizes(verifier))
    assert torch.equal(turn(model, more, cache, oracle_assistant(plain)), plain)
    for held, window in ended[-1]:
        assert held <= (32 + 8 * 64 if window else 2048)
    for layer in cache.layers:
        assert layer.get_seq_length() == more.shape[1] + 7


def sizes(verifier):
    """Slots that a call's layers have room for, and their windows."""
    layers = verifier.cache.slot_layers
    return [(layer.store.block_refs[0].block.states.shape[3], layer.window) for layer in layers]


# Bart's decoder starts with token 2.
START = torch.tensor([[2, 9, 33, 21, 60, 7]])
FIRST, LENGTH = 9, 18  # tokens of a first text and of both
BART, MAMBA, QWEN = "BartForConditionalGeneration", "Mamba2ForCausalLM", "Qwen3NextForCausalLM"
# The model, the cache that the caller gives, whether drafts are verified, where the call is
# interrupted, and whether a text stays in the cache.
INTERRUPTED = [
    (QWEN, "dynamic", True, "a prompt's forward", False),
    (BART, "both", False, "a prompt's forward", True),
    (MAMBA, "dynamic", False, "a step's forward", False),
    (BART, "both", True, "a step's forward", True),
    (BART, "both", False, "a step's forward", True),
    (MAMBA, "dynamic", False, "a prompt's forward", False),
    (QWEN, "dynamic", False, "a step's forward", False),
]


@pytest.mark.parametrize(("kind", "given", "drafts", "place", "stays"), cases(INTERRUPTED, 5))
def test_another_call_goes_on_from_what_an_interrupted_one_leaves(
    kind, given, drafts, place, stays, monkeypatch
):
    if not drafts:
        monkeypatch.setattr(Call, "service", lambda call, *_: call._plain("a test says so"))
    model = build(kind)
    model.generation_config.forced_eos_token_id = None
    name = "cache_params" if kind == MAMBA else CACHE
    cache = CACHES[given](model.config)

    def text(ids, **options):
        inputs = {"input_ids": START, "decoder_input_ids": ids}
        inputs = inputs if model.config.is_encoder_decoder else {"input_ids": ids}
        mask = torch.ones_like(inputs["input_ids"])
        options = {"max_length": LENGTH, "do_sample": False, "num_beams": 1, name: cache} | options
        return model.generate(**inputs, attention_mask=mask, **options)

    plain = text(START, **{name: None})
    assistant = SamAssistant(plain.tolist(), budget=2)
    # The model's test, which takes forwards too, is over then.
    assert torch.equal(text(START, **{name: None}, assistant=assistant), plain)
    known = text(START, max_length=FIRST) if place == "a prompt's forward" else START
    with pytest.raises(Interrupt), INTERRUPTIONS[place](model, assistant):
        text(known, assistant=assistant)
    held = 0 if kind == MAMBA else int(cache.get_seq_length())
    assert (held > 0) == stays
    stop = max(known.shape[1], held + 1)
    assert stop < plain.shape[1]
    assert torch.equal(text(plain[:, :stop]), plain)


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
