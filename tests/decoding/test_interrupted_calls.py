"""Calls that are interrupted anywhere leave their caller's cache for another one to go on from."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.decoding.call import Call
from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.interruptions import INTERRUPTIONS, code_that_interrupts
from tests.support.lossless import build
from tests.support.op_recorder import serve_in_place
from tests.support.quick import cases
from tests.support.watching import Interrupt

# Bart's decoder starts with token 2.
PROMPTS = torch.tensor([[2, 9, 33, 21, 60, 7], [2, 12, 18, 50, 9, 33]])
FIRST, LENGTH = 9, 18  # tokens of a first text and of both


def dynamic(config):
    return DynamicCache(config=config)


CACHES = {
    "dynamic": dynamic,
    "of unknown layers": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config, 64),
    "both": lambda config: EncoderDecoderCache(dynamic(config), dynamic(config)),
}
# The model, the cache that the caller gives, and whether its text stays there of plain calls.
KINDS = [
    ("LlamaForCausalLM", "dynamic", True),
    ("LlamaForCausalLM", "of unknown layers", True),
    ("LlamaForCausalLM", "static", False),
    ("Gemma3ForCausalLM", "dynamic", False),
    ("BartForConditionalGeneration", "both", True),
    ("Qwen3NextForCausalLM", "dynamic", False),
    ("Mamba2ForCausalLM", "dynamic", False),
    ("Lfm2ForCausalLM", "dynamic", False),
]
# Batches of these are decoded plainly.
REPLAYED = ("Qwen3NextForCausalLM", "Mamba2ForCausalLM")
# Where calls are interrupted, and whether the cache held a text before.
PROMPT, STEP = ("a prompt's forward", True), ("a step's forward", False)
CASES = [
    *((*KINDS[0], "plainly", place, False) for place in INTERRUPTIONS if place != "a drafter"),
    *((*kind, "plainly", *where) for kind in KINDS for where in (PROMPT, STEP)),
    *((*KINDS[0], "drafted", place, True) for place in INTERRUPTIONS),
    *((*kind, "drafted", PROMPT[0], True) for kind in (KINDS[3], KINDS[5], KINDS[7])),
    *((*kind, "drafted", STEP[0], True) for kind in (KINDS[3], KINDS[5], KINDS[7])),
    (*KINDS[2], "drafted", "a drafter", False),
    (*KINDS[0], "in place", "a drafter", False),
]


# Each loop, and a cache that is replayed.
QUICK = [
    (*KINDS[0], "plainly", *STEP),
    (*KINDS[5], "drafted", PROMPT[0], True),
    (*KINDS[0], "in place", "a drafter", False),
]


@pytest.mark.parametrize(
    ("model_class", "kind", "stays", "loop", "place", "filled"),
    cases(dict.fromkeys(CASES), QUICK),
)
def test_another_call_goes_on_from_what_is_left(
    model_class, kind, stays, loop, place, filled, monkeypatch
):
    if loop == "in place":
        serve_in_place(monkeypatch)
    elif loop == "plainly":
        monkeypatch.setattr(Call, "service", lambda call, *_: call._plain("a test says so"))
    model, prompts = build(model_class), PROMPTS[: 1 if model_class in REPLAYED else None]
    model.generation_config.forced_eos_token_id = None
    encodes = model.config.is_encoder_decoder
    name = "cache_params" if model_class == "Mamba2ForCausalLM" else CACHE
    cache = CACHES[kind](model.config)

    def text(ids, **options):
        inputs = {"input_ids": prompts, "decoder_input_ids": ids} if encodes else {"input_ids": ids}
        mask = torch.ones_like(inputs["input_ids"])
        options = {"max_length": LENGTH, "do_sample": False, "num_beams": 1, name: cache} | options
        return model.generate(**inputs, attention_mask=mask, **options)

    plain = text(prompts, **{name: None})
    options = {} if loop == "plainly" else {"budget": 2, "graphs": loop == "in place"}
    assistant = SamAssistant(plain.tolist(), **options)
    # The model's test, which takes forwards too, is over then.
    assert torch.equal(text(prompts, **{name: None}, assistant=assistant), plain)
    known = text(prompts, max_length=FIRST) if filled else prompts
    layers = [*getattr(cache, "layers", ())]
    kinds = [(type(layer), vars(layer).keys()) for layer in layers]
    code = code_that_interrupts(place, known.shape[1] + 2)
    with pytest.raises(Interrupt), INTERRUPTIONS[place](model, assistant):
        text(known, assistant=assistant, **code)
    if loop != "plainly":
        # A state may have gone half a step, and cannot go back.
        stays = model_class[:5] in ("Llama", "Gemma") or place != "a prompt's forward"
        assert cache.layers[: len(layers)] == layers
        assert not filled or [(type(layer), vars(layer).keys()) for layer in layers] == kinds
    held = 0 if name == "cache_params" else int(cache.get_seq_length())
    if place != "a prompt's forward" or filled:
        assert (held > 0) == stays
    stop = max(known.shape[1], held + 1)
    assert stop < plain.shape[1]
    assert torch.equal(text(plain[:, :stop]), plain)
