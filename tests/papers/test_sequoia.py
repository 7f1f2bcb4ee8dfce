"""Sequoia in `generate`: its trees are verified whole, and keep the law where they are drawn."""

import pytest
import torch

from hf_retrieval_assist.papers import Sequoia
from tests.support.laws import assert_follows, exact_law
from tests.support.lossless import build, run, same


@pytest.mark.parametrize("temperature", [None, 0.6])
def test_a_perfect_draft_model_is_accepted_to_the_end(llama, temperature):
    assistant = Sequoia(llama, temperature, nodes=4, levels=4, width=1)
    # Drafted at one temperature, accepted at any: greedy decoding draws nothing.
    same(llama, assistant=assistant)
    if temperature is None:
        assert assistant.stats.last.accepted == assistant.stats.last.drafted
    else:
        # Equal laws accept the first child.
        run(llama, do_sample=True, temperature=temperature, top_k=0, assistant=assistant)
        assert assistant.stats.last.accepted == assistant.stats.last.drafted > 0


# The law of residual sampling, on a vocabulary small enough to enumerate.
SMALL = 12


@pytest.fixture(scope="module")
def small_models():
    """A target and a draft model that is no copy of it."""
    target = build(vocab_size=SMALL, num_hidden_layers=1, hidden_size=32, head_dim=8)
    draft = build("GPT2LMHeadModel", vocab_size=SMALL, n_layer=1, n_embd=32)
    for model in (target, draft):
        # Flat enough that all tokens count.
        model.get_output_embeddings().weight.data *= 0.4
    return target, draft


@pytest.mark.parametrize(
    ("temperature", "top_p", "nodes", "rows"),
    [
        (0.7, 1.0, 4, 500),
        (1.3, 0.8, 2, 500),
        pytest.param(0.7, 0.9, 2, 4000, marks=pytest.mark.slow),
        pytest.param(1.5, 1.0, 4, 4000, marks=pytest.mark.slow),
    ],
)
def test_residual_sampling_keeps_the_law(small_models, temperature, top_p, nodes, rows):
    target, draft = small_models
    prompt = [5, 9, 3, 5]
    law = exact_law(target, prompt, temperature, top_p)
    assistant = Sequoia(draft, temperature, nodes=nodes, levels=2, width=3)
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0, "do_sample": True}
    ids = torch.tensor([prompt]).expand(rows, -1)
    result = run(target, ids, **sampling, max_new_tokens=3, assistant=assistant)
    assert assistant.stats.last.accepted > rows // 10
    assert assistant.stats.last.accepted < assistant.stats.last.drafted
    assert_follows(result[:, -3:], law)
