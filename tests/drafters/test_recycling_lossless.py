"""Token Recycling in calls of `generate`: the same tokens, in fewer steps as it warms up."""

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.drafters.token_recycling import TokenRecyclingDrafter
from hf_retrieval_assist.host.transformers_private import CACHE
from tests.support.lossless import build, run


@pytest.fixture(scope="module")
def small_llama():
    return build(LlamaForCausalLM, vocab_size=300)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}])
def test_generation_is_lossless_and_warms_up(small_llama, options):
    """A second call needs fewer forwards, a reset the first number again; tokens stay the same."""
    drafter = TokenRecyclingDrafter()
    options = {**options, "max_new_tokens": 60, "eos_token_id": None}
    plain, steps = run(small_llama, **options), []
    for reset in (False, False, True):
        if reset:
            drafter.reset()
        assistant = Assistant([drafter], budget=24)
        assert torch.equal(plain, run(small_llama, **options, assistant=assistant))
        steps.append(assistant.stats.last.steps)
    assert steps[1] < steps[0] == steps[2]


def test_last_logits_are_lossless_over_turns_and_rows(small_llama):
    """Two turns of two rows, the second on the cache of the first; some last logits come true."""
    rows = torch.tensor([[5, 6, 7], [9, 8, 5]])
    assistant = Assistant([TokenRecyclingDrafter(last_logits=True)], budget=24)

    def turns(**assisted):
        ids, cache = rows, None
        for _ in range(2):
            options = assisted | {"eos_token_id": None, "return_dict_in_generate": True}
            out = run(small_llama, ids, max_new_tokens=24, **{CACHE: cache}, **options)
            ids = torch.cat([out.sequences, torch.tensor([[11, 12], [13, 14]])], dim=1)
            cache = out[CACHE]
        return out.sequences

    expected = turns()
    with assistant.record() as record:
        assert torch.equal(turns(assistant=assistant), expected)
    proposed, _, came = record.by_origin()["last logits"]
    assert proposed > 0
    assert came > 0
