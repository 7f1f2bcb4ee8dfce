"""Caches of every kind: turns are those of plain decoding."""

from unittest.mock import MagicMock

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.host.transformers_private import CACHE
from hf_retrieval_assist.verification.verifier import Verifier
from tests.support.lossless import build, run
from tests.support.oracle_drafter import agreeing, oracle_assistant
from tests.support.quick import cases, crossed
from tests.support.watching import results_of

PROMPTS = torch.tensor(
    [[5, 9, 33, 21, 60, 7, 44, 9, 33, 12, 18, 50], [3, 9, 33, 21, 60, 7, 44, 9, 33, 12, 18, 44]]
)
# Drafts are verified by trees, trees with windows, replays and chains: of rows, and the tier.
CASES = {
    "LlamaForCausalLM": (1, "tree"),
    "Gemma3ForCausalLM": (2, "tree"),
    "BambaForCausalLM": (1, "replay"),
    "Qwen3NextForCausalLM": (1, "replay"),
    "Lfm2ForCausalLM": (2, "chain"),
}


@pytest.fixture(autouse=True)
def _streams(monkeypatch):
    """Offloaded caches ask for streams, which a CPU has none of."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch, "Stream", MagicMock)
        for name in ("Stream", "stream", "default_stream"):
            monkeypatch.setattr(torch.cuda, name, MagicMock())


@pytest.fixture(scope="module")
def case(request):
    rows, tier = CASES[request.param]
    return build(request.param), PROMPTS[:rows], tier


# Static ones become dynamic ones, which hold the same; the others stay what the caller wanted.
DRAFTED = {
    **{"static": True, "dynamic": True},
    **{"offloaded": False, "offloaded_static": False, "sliding_window": False},
}


@pytest.mark.parametrize(("case", "kind"), cases(crossed(CASES, DRAFTED), 3), indirect=["case"])
def test_caches_that_generate_makes(case, kind):
    model, prompts, tier = case
    inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    options = {"do_sample": False, "max_new_tokens": 10, "cache_implementation": kind}
    agreeing(model, inputs, tier=tier if DRAFTED[kind] else "plain", **options)


OFFLOADED = {
    "dynamic": lambda config: DynamicCache(config=config, offloading=True),
    "static": lambda config: StaticCache(config=config, max_cache_len=64, offloading=True),
}


def turn(model, ids, cache, assistant=None):
    return run(model, ids, max_new_tokens=8, **{CACHE: cache}, assistant=assistant)


@pytest.mark.parametrize(
    ("case", "kind"),
    cases(crossed(CASES, OFFLOADED), [("Gemma3ForCausalLM", "dynamic")]),
    indirect=["case"],
)
def test_turns_with_an_offloaded_cache_of_the_caller(case, kind):
    model, prompts, _ = case
    first = turn(model, prompts, OFFLOADED[kind](model.config))
    question = torch.cat([first, prompts[:, :5]], dim=1)
    second = turn(model, question, None)
    for assisted in ((True, True), (True, False), (False, True)):
        cache = OFFLOADED[kind](model.config)
        for text, expected, helped in zip(
            (prompts, question), (first, second), assisted, strict=True
        ):
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


@pytest.mark.parametrize(
    ("model_class", "first"),
    cases(crossed(["LlamaForCausalLM", "MistralForCausalLM"], ["ours", "plain"]), 2),
)
def test_plain_turns_that_stop_a_step_late(model_class, first, monkeypatch):
    """Plain decoding on MPS asks a step late whether to stop, and takes that step back."""
    utils = pytest.importorskip("transformers.generation.utils")
    if not hasattr(utils, "DeferredStopCheck"):
        pytest.skip("transformers before 5.24 stops at once")
    late = []

    def is_supported(device, cache, cache_is_returned, is_assistant):
        late.append(not is_assistant and (cache.is_croppable or not cache_is_returned))
        return late[-1]

    monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(is_supported))
    monkeypatch.setattr(torch, "Event", MagicMock)  # a CPU does everything at once
    window = {"sliding_window": 12} if model_class == "MistralForCausalLM" else {}
    model = build(model_class, **window)
    options = {"eos_token_id": int(run(model, PROMPTS[:1])[0, -3]), "max_new_tokens": 30}

    def conversation(assisted):
        ids, kept = PROMPTS[:1], {"return_dict_in_generate": True}
        for ours in assisted:
            named = {"assistant": SamAssistant(budget=8)} if ours else {}
            result = run(model, ids, **kept, **named, **options)
            ids = torch.cat([result.sequences, PROMPTS[:1, :2]], dim=1)
            kept[CACHE] = result[CACHE]
        return result.sequences.tolist(), result[CACHE].get_seq_length()

    plain = conversation((False, False))
    assert any(late)
    assert conversation((first == "ours", first != "ours")) == plain
