"""Watermarks, healed prompts, caches, compiled models and images beside an assistant."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers import (
    BartForConditionalGeneration,
    DynamicCache,
    Gemma3ForConditionalGeneration,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    QuantizedCache,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.draft_models.draft_model import DraftModelDrafter
from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.lossless import build
from tests.support.oracle_drafter import agreeing, oracle_assistant

PROMPT = torch.tensor([[5, 9, 33, 21, 60, 7, 44, 9, 33, 12, 18, 50]])
INPUTS = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
ROWS = {name: tensor.repeat(2, 1) for name, tensor in INPUTS.items()}


def equal(model, inputs=INPUTS, **kwargs):
    return agreeing(model, inputs, **({"do_sample": False, "max_new_tokens": 16} | kwargs))


SYNTHID = SynthIDTextWatermarkingConfig(
    keys=[654, 400, 836, 123], ngram_len=3, context_history_size=32, sampling_table_size=256
)


@pytest.mark.parametrize("inputs", [INPUTS, ROWS], ids=["row", "batch"])
@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
def test_watermark(llama, inputs, scheme):
    config = WatermarkingConfig(bias=4.0, seeding_scheme=scheme)
    marked, _, assistant = equal(llama, inputs, watermarking_config=config)
    assert assistant.stats.tier == "tree"
    assert assistant.stats.last.accepted > 0
    assert not torch.equal(marked, llama.generate(**inputs, do_sample=False, max_new_tokens=16))


@pytest.mark.parametrize("seed", range(3))
def test_synthid_watermark(llama, seed):
    options = {"do_sample": True, "seed": seed}
    marked, _, assistant = equal(llama, watermarking_config=SYNTHID, **options)
    assert assistant.stats.tier == "tree"
    assert assistant.stats.last.accepted > 0
    assert not torch.equal(marked, equal(llama, **options)[0])


def test_synthid_watermark_of_a_batch_keeps_its_rows_in_step(llama):
    _, _, assistant = equal(llama, ROWS, watermarking_config=SYNTHID, do_sample=True)
    assert assistant.stats.tier == "tree"
    assert assistant.stats.last.keeps_seed


def tokenizer():
    """One token per letter, and the words that "th" may have been cut from."""
    tokens = ["<pad>", "<s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz ", "th", "the", "thi", "tha"]
    merges = [("t", "h"), ("th", "e"), ("th", "i"), ("th", "a")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    rust = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    rust.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", pad_token="<pad>", unk_token="<unk>"
    )


def test_token_healing(llama):
    words = tokenizer()
    inputs = {"input_ids": words("look at th", return_tensors="pt").input_ids}
    healed = llama.heal_tokens(inputs["input_ids"].clone(), words)
    assert healed[0, -1] != inputs["input_ids"][0, -1]
    options = {"token_healing": True, "tokenizer": words}
    plain, _, assistant = equal(llama, inputs, **options)
    assert torch.equal(plain[:, : healed.shape[1]], healed)
    assert assistant.stats.last.accepted > 0


def test_prompt_of_one_token(llama):
    ids = torch.tensor([[5]])
    _, _, assistant = equal(llama, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert assistant.stats.last.accepted > 0


class TakingPlaceholders(nn.Embedding):
    """Ids that the vocabulary lacks stand for something else, as LLaVA's -200 for an image."""

    def forward(self, ids):
        return super().forward(ids.clamp(0, self.num_embeddings - 1))


def taking_placeholders():
    model = build(LlamaForCausalLM)
    model.get_input_embeddings().__class__ = TakingPlaceholders
    return model


@pytest.mark.parametrize("placeholder", [-200, -1, 67, 2**31 - 1, 2**31 + 5, 2**40])
def test_placeholders_among_the_ids(placeholder):
    model = taking_placeholders()
    ids = torch.tensor([[5, 9, placeholder, placeholder, 7, 44, 5, 9, placeholder]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    _, _, assistant = equal(model, inputs)
    assert assistant.stats.last.accepted > 0
    options = {"do_sample": False, "max_new_tokens": 16}
    drafts = DraftModelDrafter(build(LlamaForCausalLM))
    for assistant in (SamAssistant(budget=8), Assistant([drafts], budget=8)):
        ours = model.generate(**inputs, **options, assistant=assistant)
        assert torch.equal(model.generate(**inputs, **options), ours)


def test_quantised_cache_of_the_caller_is_refused(llama):
    # Made without its quantisation library, which the refusal comes before.
    cache = QuantizedCache.__new__(QuantizedCache)
    with pytest.raises(ValueError, match=rf"{CACHE}.*QuantizedCache"):
        llama.generate(
            **INPUTS, max_new_tokens=4, **{CACHE: cache}, assistant=oracle_assistant(PROMPT)
        )


class OffloadingCache(DynamicCache):
    """Says that it offloads; moving layers for real takes an accelerator."""

    offloading = property(lambda self: self.says_so, lambda self, value: None)
    says_so = True

    def update(self, *args, **kwargs):
        self.says_so = False
        states = super().update(*args, **kwargs)
        self.says_so = True
        return states


def test_offloaded_cache_is_decoded_plainly(llama):
    options = {"do_sample": False, "max_new_tokens": 12}
    plain = llama.generate(**INPUTS, **options)
    assistant = oracle_assistant(plain)
    cache = OffloadingCache(config=llama.config)
    assisted = llama.generate(**INPUTS, **options, **{CACHE: cache}, assistant=assistant)
    assert torch.equal(plain, assisted)
    assert assistant.stats.tier == "plain"


def test_bart():
    model = build(BartForConditionalGeneration, is_encoder_decoder=True)
    options = {"forced_eos_token_id": None, "num_beams": 1, "max_new_tokens": 20}
    mask = torch.ones_like(ROWS["input_ids"])
    mask[1, 8:] = 0
    for inputs in (INPUTS, {"input_ids": ROWS["input_ids"], "attention_mask": mask}):
        plain = model.generate(**inputs, do_sample=False, **options)
        assistant = oracle_assistant(plain)
        assisted = model.generate(**inputs, do_sample=False, **options, assistant=assistant)
        assert torch.equal(plain, assisted)
        assert assistant.stats.tier == "chain"
        assert assistant.stats.last.accepted > 0


def gemma3_inputs():
    """A prompt, longer than the window, around one image of four tokens that see each other."""
    ids = torch.tensor([[5, 9, 62, *[64] * 4, 63, 33, 21, 60, 12]])
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    types = (ids == 64).int()
    mask = torch.ones_like(ids)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": pixels,
        "token_type_ids": types,
    }


def test_gemma3_with_an_image():
    model = build(
        Gemma3ForConditionalGeneration,
        image_token_index=64,
        boi_token_index=62,
        eoi_token_index=63,
        mm_tokens_per_image=4,
    )
    inputs, options = gemma3_inputs(), {"suppress_tokens": [62, 63, 64]}
    plain, _, assistant = equal(model, inputs, **options)
    assert assistant.stats.tier == "tree"
    assert assistant.stats.last.accepted > 0
    other = inputs | {"pixel_values": inputs["pixel_values"].flip(-1) + 1.0}
    assert not torch.equal(
        plain, model.generate(**other, do_sample=False, max_new_tokens=16, **options)
    )
