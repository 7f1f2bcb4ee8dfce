"""TRL's GRPO trainer makes its rollouts through an attached assistant."""

import pytest
import torch

from hf_retrieval_assist import SuffixAssistant, attach

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


def train(model, tokenizer, folder, assistant=None, prompts=PROMPTS, peft_config=None, **options):
    """Completions of all steps of a short training."""
    options = {
        "max_steps": 3,
        "learning_rate": 1e-2,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
    } | options
    rollouts = Rollouts()
    config = trl.GRPOConfig(
        output_dir=str(folder),
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
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    if assistant is not None:
        attach(trainer.model, assistant)
    trainer.train()
    return rollouts.completion_ids


@pytest.mark.parametrize("lora", [False, True])
def test_greedy_rollouts_are_plain_ones(tmp_path, lora):
    # Equal completions teach nothing, so weight decay alone moves the weights.
    options = {"generation_kwargs": {"do_sample": False}, "weight_decay": 5.0}
    if lora:
        options["peft_config"] = peft.LoraConfig(r=2, init_lora_weights=False)
    completions, weights = [], []
    for assistant in (None, SuffixAssistant(budget=8)):
        torch.manual_seed(0)
        model, tokenizer = small_world(ALPHABET)
        before = [p.clone() for p in model.parameters()]
        completions.append(train(model, tokenizer, tmp_path, assistant, **options))
        weights.append(list(model.parameters()))
        assert not all(map(torch.equal, before, weights[-1]))
    assert completions[0] == completions[1]
    assert all(map(torch.equal, *weights))
    assert assistant.stats.total.calls > 0
    assert assistant.stats.total.accepted > 0
    assert assistant.stats.tier == "tree"


def test_rollouts_of_continuous_batching_are_plain_ones(tmp_path):
    options = {
        "generation_kwargs": {"do_sample": False},
        "weight_decay": 5.0,
        # In which it would generate otherwise, and where tokens depend on what is fed beside them.
        "bf16": False,
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {
            "page_size": 16,
            "num_blocks": 256,
            "max_batch_tokens": 128,
        },
    }
    completions = []
    for assistant in (None, SuffixAssistant(budget=8)):
        torch.manual_seed(0)
        model, tokenizer = small_world(ALPHABET)
        completions.append(train(model, tokenizer, tmp_path, assistant, **options))
    assert completions[0] == completions[1]
    assert len(completions[0]) == 3 * 8
    assert assistant.stats.tier == "continuous batching"
    assert assistant.stats.total.accepted > 0


def deviations(model, prompt_ids, completion_ids):
    """Standard deviations by which every token was drawn more or less often than it is probable.

    Each draw is held against the model's own distribution after the tokens before it.
    """
    excess, variance = 0.0, 0.0
    for ids in completion_ids:
        text = torch.tensor([*prompt_ids, *ids])
        with torch.no_grad():
            logits = model(text[None, :-1]).logits[0, len(prompt_ids) - 1 :]
        law = logits.double().softmax(dim=-1)
        drawn = torch.nn.functional.one_hot(text[len(prompt_ids) :], law.shape[1])
        excess = excess + (drawn - law).sum(dim=0)
        variance = variance + (law * (1 - law)).sum(dim=0)
    return (excess / variance.sqrt()).abs().max()


def test_sampled_rollouts_are_distributed_as_plain_ones(tmp_path):
    model, tokenizer = small_world("abcd")
    # Peaked, as a trained model's logits are, so that drafts are accepted.
    model.lm_head.weight.data.mul_(1.3)
    assistant = SuffixAssistant(budget=8)
    completions = train(
        model,
        tokenizer,
        tmp_path,
        assistant,
        prompts=["abca"],
        max_steps=32,
        per_device_train_batch_size=32,
        num_generations=32,
        learning_rate=0.0,
    )
    assert len(completions) == 32 * 32
    assert assistant.stats.tier == "tree"  # in the last call as in the first
    assert assistant.stats.total.accepted > 800
    assert deviations(model, tokenizer("abca").input_ids, completions) < 4.5
    torch.manual_seed(0)
    shuffled = [torch.tensor(ids)[torch.randperm(len(ids))].tolist() for ids in completions]
    assert deviations(model, tokenizer("abca").input_ids, shuffled) > 6
