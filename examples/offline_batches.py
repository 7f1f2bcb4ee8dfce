"""Many prompts on a cluster: Ray Data, a model and an assistant per worker, one shared memory.

    pip install --editable '.[demo,redis]' 'ray[data]'
    python examples/offline_batches.py --memory redis://localhost

Later prompts are drafted from what any worker has answered before.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray

PLACES = ("the tide mill", "the night market", "the old observatory", "the salt works")
PROMPTS = [
    f"Visit {place} in {month}. Opening hours, directions and prices follow.\n\nOpening hours:"
    for month in ("May", "June", "July", "August")
    for place in PLACES
]


class Writer:
    """Lives in a worker, which loads the model once."""

    def __init__(self, memory: str, new_tokens: int) -> None:
        from hf_retrieval_assist import OutputMemory, SamAssistant
        from hf_retrieval_assist.tools.demo_model import load_demo_model

        self.model, self.tokenizer = load_demo_model()
        self.memory = OutputMemory(**{"url" if "://" in memory else "path": memory})
        self.memory.sync()
        self.assistant = SamAssistant(memory=self.memory)
        self.new_tokens = new_tokens

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        answers, tokens_per_step = [], []
        for prompt in batch["prompt"]:
            inputs = self.tokenizer(str(prompt), return_tensors="pt")
            output = self.model.generate(
                **inputs,
                assistant=self.assistant,
                max_new_tokens=self.new_tokens,
                do_sample=False,
            )
            answer = output[0, inputs["input_ids"].shape[1] :]
            answers.append(self.tokenizer.decode(answer, skip_special_tokens=True))
            tokens_per_step.append(self.assistant.stats.last.mean_accepted_tokens)
        # A worker may be ended as soon as its last batch is done.
        self.memory.sync()
        return {"prompt": batch["prompt"], "answer": answers, "tokens_per_step": tokens_per_step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", required=True, help="redis:// URL, or a file on one machine")
    parser.add_argument("--address", default="local", help="of the cluster (default: a new one)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    ray.init(address=arguments.address)
    answers = ray.data.from_items([{"prompt": prompt} for prompt in PROMPTS]).map_batches(
        Writer,
        fn_constructor_args=(arguments.memory, arguments.new_tokens),
        batch_size=2,
        compute=ray.data.ActorPoolStrategy(size=arguments.workers),
        num_cpus=1,
    )
    for row in answers.iter_rows():
        print(f"{row['tokens_per_step']:.2f} tokens per forward: {row['answer'][:60]!r}")


if __name__ == "__main__":
    main()
