"""Drafts of the target's first layers: transformers' early exit, as a tree."""

import numpy as np
import pytest
import torch
import transformers
from transformers.generation.candidate_generator import EarlyExitCandidateGenerator

from hf_retrieval_assist import EarlyExit, SamAssistant
from hf_retrieval_assist.drafters.base import Target
from hf_retrieval_assist.host.first_layers import first_layers
from tests.support.lossless import NEW_TOKENS, PROMPT, build, run
from tests.support.tiny_models import VOCAB

FAMILIES = ["LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layer", [1, 2])
def test_logits_are_those_of_the_first_layers(name, layer):
    """Against the hidden states that the whole model has there."""
    model = build(getattr(transformers, name))
    with torch.no_grad():
        states = model(PROMPT, output_hidden_states=True).hidden_states
        decoder = model.get_decoder()
        norm = decoder.ln_f if name.startswith("GPT2") else decoder.norm
        expected = model.get_output_embeddings()(norm(states[layer]))
        before = model(PROMPT).logits
        found = first_layers(model, layer)(PROMPT).logits
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(model(PROMPT).logits, before)


def test_no_weight_is_copied(llama):
    shared = {parameter.data_ptr() for parameter in llama.parameters()}
    shallow = first_layers(llama, 1)
    assert {parameter.data_ptr() for parameter in shallow.parameters()} < shared
    assert llama.config.num_hidden_layers == 3


def test_the_chain_is_transformers_own(llama, monkeypatch):
    """Behind every text, transformers' candidates and ours."""
    candidates = {}
    original = EarlyExitCandidateGenerator.get_candidates

    def record(self, input_ids, **kwargs):
        # Otherwise it stops where it is not sure.
        self.generation_config.assistant_confidence_threshold = 0.0
        result = original(self, input_ids, **kwargs)
        candidates[tuple(input_ids[0].tolist())] = result[0][0, input_ids.shape[1] :].tolist()
        return result

    monkeypatch.setattr(EarlyExitCandidateGenerator, "get_candidates", record)
    run(llama, assistant_early_exit=2)
    assert sum(map(len, candidates.values())) > NEW_TOKENS
    drafter, compared = EarlyExit(2, width=1, max_levels=8), 0
    for text, chain in candidates.items():
        session = drafter.start(np.array(text[:-1], np.int32), Target(VOCAB, model=llama))
        session.commit(text[-1:], None)
        tree = session.propose(len(chain))
        tokens = tree.token_ids.tolist()
        assert len({*tree.depths}) == len(tree)
        assert tokens == chain[: len(tokens)]
        compared += len(tokens)
    assert compared > NEW_TOKENS


def test_no_layer_is_refused():
    with pytest.raises(ValueError, match="layer: expected at least 1, got 0"):
        EarlyExit(0)


def test_a_target_without_trees_is_refused():
    model = build(transformers.Qwen3NextForCausalLM)
    with pytest.raises(ValueError, match="fed token trees"):
        run(model, assistant=SamAssistant(fallback=EarlyExit(1)))
