"""Reinforcement learning with TRL, its rollouts sped up by an assistant: `python examples/grpo.py`.

TRL's GRPOTrainer teaches the demo model, by LoRA, to end its sentences soon: the reward is the
share of a completion that lies within its first sentence. The trainer makes its rollouts with
`model.generate` and knows nothing of the assistant, which is attached to the model: samples of one
prompt draft from one another, and from those of the epoch before. To compare speeds, every rollout
is made twice; before the first one, both ways are warmed up. Needs the `ecosystem` and `demo`
extras, and PEFT.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.tools.demo_model import load_demo_model

PROMPTS = (
    "The days of the week are",
    "A short recipe for pancakes:",
    "The capital of France is",
    "To list the files of a folder in Python, write",
)


def rollout_assistant() -> SamAssistant:
    """Samples of a prompt draft from one another, the newest ones most."""
    memory = OutputMemory("1GB", by_prompt=True, half_life=16)
    return SamAssistant(memory=memory, fallback="logit_ngrams")


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of each text that is its first sentence."""
    return [(text.find(".") + 1) / max(len(text), 1) for text in completions]


class Timed(GRPOTrainer):
    """The trainer, making every rollout twice: plainly, then with an assistant attached.

    It learns from the second one. Both begin with the same random state and the same weights.

    Attributes:
        assistant: set before training.
        tokens, seconds: of the rollouts, plain and assisted.
    """

    assistant: SamAssistant

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.tokens, self.seconds = [0, 0], [0.0, 0.0]
        self._warm = False

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        rollout = partial(super()._generate_single_turn, *args, **kwargs)
        with torch.random.fork_rng():
            if not self._warm:
                # What only first calls take is no part of the comparison. The trainer's assistant
                # has not seen these rollouts.
                self._warm = True
                rollout()
                with rollout_assistant().attached(self.model):
                    rollout()
        with torch.random.fork_rng():
            self._timed(0, rollout)
        with self.assistant.attached(self.model):
            return self._timed(1, rollout)

    def _timed(self, number: int, rollout: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = rollout()
        self.seconds[number] += time.perf_counter() - started
        self.tokens[number] += sum(map(len, result[0]))
        return result


def train(arguments: argparse.Namespace, assistant: SamAssistant) -> Timed:
    """A short training; the trainer, with its accounts."""
    set_seed(0)
    model, tokenizer = load_demo_model()
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    policy = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.samples,
            num_generations=arguments.samples,
            max_completion_length=arguments.tokens,
            temperature=1.0,
            learning_rate=1e-4,
            use_vllm=False,
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = Timed(
            model=policy,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": list(PROMPTS)}),
            processing_class=tokenizer,
        )
        trainer.assistant = assistant
        trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="of training")
    parser.add_argument("--samples", type=int, default=8, help="per prompt, in one batch")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion at most")
    arguments = parser.parse_args()
    assistant = rollout_assistant()
    trainer = train(arguments, assistant)
    rates = [n / seconds for n, seconds in zip(trainer.tokens, trainer.seconds, strict=True)]
    for name, tokens, rate in zip(("plain", "assisted"), trainer.tokens, rates, strict=True):
        print(f"rollouts, {name}: {tokens} tokens at {rate:.1f} tokens/s")
    print(f"assisted over plain: {rates[1] / rates[0]:.2f}x")
    print(assistant.stats)


if __name__ == "__main__":
    main()
