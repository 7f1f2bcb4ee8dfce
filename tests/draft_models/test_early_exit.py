"""Drafts of the target's first layers: transformers' early exit, as a tree."""

import pytest
import torch
from transformers.generation.candidate_generator import EarlyExitCandidateGenerator

from hf_retrieval_assist import Assistant, EarlyExit
from hf_retrieval_assist.host.first_layers import first_layers
from tests.support.feature_following import chains_of
from tests.support.lossless import NEW_TOKENS, PROMPT, build, run
from tests.support.rounding import OF_MODEL, within

FAMILIES = ["LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layer", [1, 2])
def test_logits_are_those_of_the_first_layers(name, layer):
    model = build(name)
    with torch.no_grad():
        states = model(PROMPT, output_hidden_states=True).hidden_states
        decoder = model.get_decoder()
        norm = decoder.ln_f if name.startswith("GPT2") else decoder.norm
        expected = model.get_output_embeddings()(norm(states[layer]))
        before = model(PROMPT).logits
        found = first_layers(model, layer)(PROMPT).logits
        torch.testing.assert_close(found, expected, **within(expected, OF_MODEL))
        assert torch.equal(model(PROMPT).logits, before)


def test_no_weight_is_copied(llama):
    shared = {parameter.data_ptr() for parameter in llama.parameters()}
    shallow = first_layers(llama, 1)
    assert {parameter.data_ptr() for parameter in shallow.parameters()} < shared
    assert llama.config.num_hidden_layers == 3


def test_the_chain_is_transformers_own(llama, monkeypatch):
    candidates, drafts = chains_of(monkeypatch, EarlyExitCandidateGenerator, EarlyExit)
    # Otherwise transformers' stops where it is not sure.
    monkeypatch.setattr(llama.generation_config, "assistant_confidence_threshold", 0.0)
    run(llama, assistant_early_exit=2)
    run(llama, assistant=Assistant([EarlyExit(2, width=1, max_levels=8)], budget=8))
    shared = candidates.keys() & drafts.keys()
    lengths = {text: min(len(candidates[text]), len(drafts[text])) for text in shared}
    assert sum(lengths.values()) > NEW_TOKENS
    for text, length in lengths.items():
        assert candidates[text][:length] == drafts[text][:length]
