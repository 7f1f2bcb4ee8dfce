"""TRL's GRPO trainer makes its rollouts through an attached assistant."""

import pytest
import torch

from hf_retrieval_assist import attach
from tests.support.memories import remembering

from .small_world import small_world

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

PROMPTS = ["abcabcab", "hgfedcba", "abab"]
ALPHABET = "abcdefgh"


class Rollouts:
    """A reward that remembers what was generated."""

    __name__ = "rollouts"

    def __init__(self):
        self.completion_ids = []

    def __call__(self, completion_ids, **kwargs):
        self.completion_ids += completion_ids
        return [float(len(set(ids))) for ids in completion_ids]


def train(model, tokenizer, folder, assistant, peft_config=None, **options):
    """Completions of all steps of a short training."""
    rollouts = Rollouts()
    config = trl.GRPOConfig(
        output_dir=str(folder),
        max_steps=3,
        learning_rate=1e-2,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=24,
        use_vllm=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        beta=0.0,
        seed=1,
        **options,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=rollouts,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    if assistant is not None:
        attach(trainer.model, assistant)
    trainer.train()
    return rollouts.completion_ids


# Equal completions teach nothing, so weight decay alone moves the weights.
GREEDY = {"generation_kwargs": {"do_sample": False}, "weight_decay": 5.0}
KINDS = {
    "greedy": GREEDY,
    "LoRA": GREEDY | {"peft_config": peft.LoraConfig(r=2, init_lora_weights=False)},
    # A token in bfloat16 would depend on what is fed beside it.
    "sampled": {"bf16": False},
    "batching": {
        **GREEDY,
        "bf16": False,
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {
            "page_size": 16,
            "num_blocks": 256,
            "max_batch_tokens": 128,
        },
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_rollouts_and_what_they_teach_are_plain(tmp_path, kind):
    completions, weights = [], []
    for assistant in (None, remembering(budget=8)):
        torch.manual_seed(0)
        model, tokenizer = small_world(ALPHABET)
        before = [p.clone() for p in model.parameters()]
        completions.append(train(model, tokenizer, tmp_path, assistant, **KINDS[kind]))
        weights.append(list(model.parameters()))
        assert not all(map(torch.equal, before, weights[-1]))
    assert completions[0] == completions[1]
    assert len(completions[0]) == 3 * 8
    assert all(map(torch.equal, *weights))
    assert assistant.stats.last.tier == ("continuous batching" if kind == "batching" else "tree")
    assert assistant.stats.total.accepted > 0
