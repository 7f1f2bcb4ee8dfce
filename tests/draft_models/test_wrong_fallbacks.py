"""A fallback that does not fit is one error before the prompt is processed."""

import pytest
import torch
import transformers

from hf_retrieval_assist import EarlyExit, SamAssistant
from hf_retrieval_assist.host import transformers_private as private
from tests.support.eagle_fixtures import tiny_target
from tests.support.heads import block_drafter, eagle_head
from tests.support.lossless import build, run
from tests.support.tiny_models import VOCAB


@pytest.fixture(autouse=True)
def _nothing_is_generated(monkeypatch):
    monkeypatch.setattr(private, "prefill", lambda *_, **__: pytest.fail("generation began"))


def head_for(**shape):
    """A head made for another target than the tests' own."""
    return eagle_head(tiny_target(**shape))


WRONG = {
    "no MTP layers": (lambda: "mtp", r"fallback 'mtp': .*num_mtp_layers.*LlamaForCausalLM"),
    "no EAGLE boundaries": (
        lambda: head_for(hidden_size=32, vocab_size=VOCAB),
        "boundaries: expected -1 or 0 to 2 for a model of 3 blocks",
    ),
    "EAGLE head of more ids": (
        lambda: head_for(hidden_size=32, vocab_size=VOCAB + 1, num_layers=3),
        f"expected ids below the vocabulary size {VOCAB}, got {VOCAB}",
    ),
    "EAGLE head of another width": (
        lambda: head_for(hidden_size=64, vocab_size=VOCAB, num_layers=3),
        "EAGLE head: expected one for the target's hidden size of 32, got one for 64",
    ),
    "DFlash model of another width": (
        lambda: block_drafter(hidden_size=64),
        "DFlash model: expected one for the target's hidden size of 32, got one for 64",
    ),
    "DFlash model of more ids": (
        lambda: block_drafter(mask_token_id=VOCAB),
        f"below the target's {VOCAB} ids, got {VOCAB}",
    ),
    "DFlash model of more layers": (
        lambda: block_drafter(target_layer_ids=[0, 9]),
        "boundaries: expected -1 or 0 to 2",
    ),
    "draft model of another tokenizer": (
        lambda: build(transformers.LlamaForCausalLM, vocab_size=VOCAB + 1),
        "assistant_tokenizer: expected a tokenizer",
    ),
    "draft model without a cache": (
        lambda: build(transformers.RwkvForCausalLM),
        "token trees, got RwkvForCausalLM",
    ),
    "more layers than there are": (lambda: EarlyExit(3), "layer: expected 1 to 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_named_before_the_prompt_is_processed(llama, name):
    """By itself and beside one that fits."""
    make, message = WRONG[name]
    for fallback in (make(), ["token_recycling", make()]):
        with pytest.raises(ValueError, match=message):
            run(llama, assistant=SamAssistant(fallback=fallback))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("Qwen3NextForCausalLM", "recurrent state"),
        ("Lfm2ForCausalLM", "convolution state"),
        ("BloomForCausalLM", "no position_ids"),
        ("T5ForConditionalGeneration", "encoder-decoder"),
    ],
)
def test_models_that_take_no_trees(name, match):
    """As targets of what drafts with them; their first layers may have another reason."""
    model = build(getattr(transformers, name))
    for fallback, reason in (("quantized_self", match), (EarlyExit(1), "fed token trees")):
        with pytest.raises(ValueError, match=reason):
            run(model, assistant=SamAssistant(fallback=fallback))


def test_an_unknown_name():
    with pytest.raises(ValueError, match="'mtp', 'quantized_self', got 'eagle'"):
        SamAssistant(fallback="eagle")


def test_something_that_cannot_draft():
    with pytest.raises(TypeError, match=r"fallback: expected .* got Linear"):
        SamAssistant(fallback=torch.nn.Linear(2, 2))
