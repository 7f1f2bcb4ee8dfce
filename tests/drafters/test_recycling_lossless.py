"""Token Recycling in calls of `generate`: the same tokens, in fewer steps as it warms up."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.drafters.token_recycling import TokenRecyclingDrafter
from hf_retrieval_assist.host.transformers_private import CACHE


@pytest.fixture(scope="module")
def small_llama():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )
    # Logits far enough apart that sampling has something to prefer.
    model = AutoModelForCausalLM.from_config(config).eval()
    model.lm_head.weight.data *= 20
    return model


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}])
def test_generation_is_lossless_and_warms_up(small_llama, options):
    """A second call needs fewer forwards, a reset the first number again; tokens stay the same."""
    prompt = torch.tensor([[5, 6, 7]])
    drafter = TokenRecyclingDrafter()
    assistant = Assistant([drafter], budget=24)

    def generate(**assisted):
        torch.manual_seed(0)
        return small_llama.generate(prompt, max_new_tokens=60, eos_token_id=None, **assisted)

    expected = generate(**options)
    steps = []
    for _ in range(2):
        assert torch.equal(generate(assistant=assistant, **options), expected)
        steps.append(assistant.stats.last.steps)
    assert steps[1] < steps[0]
    drafter.reset()
    again = Assistant([drafter], budget=24)
    assert torch.equal(generate(assistant=again, **options), expected)
    assert again.stats.last.steps == steps[0]


def test_last_logits_are_lossless_over_turns_and_rows(small_llama):
    """Two turns of two rows, the second on the cache of the first; some last logits come true."""
    model = small_llama
    rows = torch.tensor([[5, 6, 7], [9, 8, 5]])
    assistant = Assistant([TokenRecyclingDrafter(last_logits=True)], budget=24)

    def turns(**assisted):
        ids, cache = rows, None
        for _ in range(2):
            out = model.generate(
                ids,
                **{CACHE: cache},
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
                return_dict_in_generate=True,
                **assisted,
            )
            ids = torch.cat([out.sequences, torch.tensor([[11, 12], [13, 14]])], dim=1)
            cache = out[CACHE]
        return out.sequences

    expected = turns()
    with assistant.record() as record:
        assert torch.equal(turns(assistant=assistant), expected)
    proposed, _, came = record.by_origin()["last logits"]
    assert proposed > 0
    assert came > 0
