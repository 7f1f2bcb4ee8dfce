"""Which tier serves the attention implementations of transformers."""

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support.lossless import PROMPT, build
from tests.support.oracle_drafter import both

# It compiles a kernel for every length.
FLEX = pytest.param("flex_attention", marks=pytest.mark.slow)


@pytest.mark.parametrize("attention", ["eager", "sdpa", FLEX])
def test_tokens_are_those_of_plain_decoding(attention):
    model = build(LlamaForCausalLM)
    model.set_attn_implementation(attention)
    options = {"do_sample": False, "max_new_tokens": 4}
    plain, assisted, assistant = both(model, {"input_ids": PROMPT}, **options)
    assert torch.equal(plain, assisted)
    assert assistant.stats.tier == ("chain" if attention == "flex_attention" else "tree")
