"""Calls that are interrupted leave caches of encoders and recurrences to go on from; whole
conversations are interrupted where they have others."""

import pytest
import torch

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.decoding.call import Call
from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.caches import CACHES
from tests.support.interruptions import INTERRUPTIONS
from tests.support.lossless import build
from tests.support.quick import cases
from tests.support.watching import Interrupt

# Bart's decoder starts with token 2.
PROMPT = torch.tensor([[2, 9, 33, 21, 60, 7]])
FIRST, LENGTH = 9, 18  # tokens of a first text and of both
BART, MAMBA, QWEN = "BartForConditionalGeneration", "Mamba2ForCausalLM", "Qwen3NextForCausalLM"
LLAMA, GEMMA = "LlamaForCausalLM", "Gemma3ForCausalLM"
# The model, the cache that the caller gives, whether drafts are verified, where the call is
# interrupted, and whether a text stays in the cache.
CASES = [
    (QWEN, "dynamic", True, "a prompt's forward", False),
    (BART, "both", False, "a prompt's forward", True),
    (MAMBA, "dynamic", False, "a step's forward", False),
    (GEMMA, "dynamic", False, "a prompt's forward", False),
    (BART, "both", True, "a step's forward", True),
    (BART, "both", False, "a step's forward", True),
    (MAMBA, "dynamic", False, "a prompt's forward", False),
    (LLAMA, "dynamic", False, "a prompt's forward", True),
    (LLAMA, "static", False, "a step's forward", False),
    (GEMMA, "dynamic", True, "a prompt's forward", True),
    (QWEN, "dynamic", False, "a step's forward", False),
]


@pytest.mark.parametrize(("kind", "given", "drafts", "place", "stays"), cases(CASES, 5))
def test_another_call_goes_on_from_what_is_left(kind, given, drafts, place, stays, monkeypatch):
    if not drafts:
        monkeypatch.setattr(Call, "service", lambda call, *_: call._plain("a test says so"))
    model = build(kind)
    model.generation_config.forced_eos_token_id = None
    name = "cache_params" if kind == MAMBA else CACHE
    cache = CACHES[given](model.config)

    def text(ids, **options):
        inputs = {"input_ids": PROMPT, "decoder_input_ids": ids}
        inputs = inputs if model.config.is_encoder_decoder else {"input_ids": ids}
        mask = torch.ones_like(inputs["input_ids"])
        options = {"max_length": LENGTH, "do_sample": False, "num_beams": 1, name: cache} | options
        return model.generate(**inputs, attention_mask=mask, **options)

    plain = text(PROMPT, **{name: None})
    assistant = SamAssistant(plain.tolist(), budget=2)
    # The model's test, which takes forwards too, is over then.
    assert torch.equal(text(PROMPT, **{name: None}, assistant=assistant), plain)
    known = text(PROMPT, max_length=FIRST) if place == "a prompt's forward" else PROMPT
    with pytest.raises(Interrupt), INTERRUPTIONS[place](model, assistant):
        text(known, assistant=assistant)
    held = 0 if kind == MAMBA else int(cache.get_seq_length())
    assert (held > 0) == stays
    stop = max(known.shape[1], held + 1)
    assert stop < plain.shape[1]
    assert torch.equal(text(plain[:, :stop]), plain)
