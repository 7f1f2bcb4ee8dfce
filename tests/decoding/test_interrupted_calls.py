"""Calls that are interrupted anywhere leave their caller's cache for another one to go on from."""

import pytest
import torch

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.decoding.call import Call
from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.caches import CACHES
from tests.support.interruptions import INTERRUPTIONS, code_that_interrupts
from tests.support.lossless import build
from tests.support.op_recorder import serve_in_place
from tests.support.quick import cases
from tests.support.watching import Interrupt

# Bart's decoder starts with token 2.
PROMPTS = torch.tensor([[2, 9, 33, 21, 60, 7], [2, 12, 18, 50, 9, 33]])
FIRST, LENGTH = 9, 18  # tokens of a first text and of both


# The model, the cache that the caller gives, and whether its text stays there of plain calls.
LLAMA = ("LlamaForCausalLM", "dynamic", True)
STATIC = ("LlamaForCausalLM", "static", False)
GEMMA = ("Gemma3ForCausalLM", "dynamic", False)
BART = ("BartForConditionalGeneration", "both", True)
QWEN = ("Qwen3NextForCausalLM", "dynamic", False)
MAMBA = ("Mamba2ForCausalLM", "dynamic", False)
CONVOLUTIONS = ("Lfm2ForCausalLM", "dynamic", False)
# Batches of these are decoded plainly.
REPLAYED = ("Qwen3NextForCausalLM", "Mamba2ForCausalLM")
# Where calls are interrupted, and whether the cache held a text before.
PROMPT, STEP = ("a prompt's forward", True), ("a step's forward", False)
# Each loop, and a cache that is replayed, come first; conversations are interrupted anywhere.
CASES = [
    (*LLAMA, "plainly", *STEP),
    (*QWEN, "drafted", *PROMPT),
    (*LLAMA, "in place", "a drafter", False),
    (*GEMMA, "drafted", *PROMPT),
    (*CONVOLUTIONS, "drafted", "a step's forward", True),
    (*STATIC, "drafted", "a drafter", False),
    *((*kind, "plainly", *PROMPT) for kind in (LLAMA, STATIC, GEMMA, BART, QWEN, MAMBA)),
    *((*kind, "plainly", *STEP) for kind in (STATIC, BART, MAMBA, CONVOLUTIONS)),
]


@pytest.mark.parametrize(
    ("model_class", "kind", "stays", "loop", "place", "filled"),
    cases(CASES, 3),
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
