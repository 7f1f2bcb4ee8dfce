"""lm-eval's harness finds the same of a model with an attached assistant."""

import pytest

from hf_retrieval_assist import OutputMemory, SamAssistant

from .small_world import small_world

instance = pytest.importorskip("lm_eval.api.instance")
huggingface = pytest.importorskip("lm_eval.models.huggingface")

PROMPTS = ["one two three one two", "so it goes", "three two one three", "it goes on and on", "a"]


def requests(until):
    arguments = {"until": until, "max_gen_toks": 40}
    return [
        instance.Instance("generate_until", {}, (prompt, dict(arguments)), i)
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("until", [["q"], ["ab", "z "], ["no such text"]])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_generation_is_plain_generation(batch_size, until):
    model, tokenizer = small_world("abcdefghijklmnopqrstuvwxyz ")
    harness = huggingface.HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device="cpu", max_length=120
    )
    plain = harness.generate_until(requests(until), disable_tqdm=True)
    with SamAssistant(memory=OutputMemory(), budget=8).attached(model) as assistant:
        for _ in range(2):
            assert harness.generate_until(requests(until), disable_tqdm=True) == plain
    assert assistant.stats.last.tier == "tree"
    assert assistant.stats.total.accepted > 0
