"""Rollouts of reinforcement learning: samples of the same prompts in every epoch.

Gemma-3-270M with LoRA samples groups of outputs at temperature 1. After an epoch it takes one
policy-gradient step per prompt, rewarded for sentences that end soon, so that every epoch samples
from other weights. What was sampled is replayed by `simulate`; the clock is read on some of the
prompts, which are sampled anew by every method under each epoch's weights. Needs the `ecosystem`
and `demo` extras: `python -m benchmarks.rollouts`. What was sampled is kept beside the report.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from hf_retrieval_assist import Assistant, RolloutAssistant, SamAssistant, simulate
from hf_retrieval_assist.demo_model import load_demo_model

from .__main__ import progress_line
from .baselines import PromptLookupDrafter
from .report import Report

LEARNING_RATE = 5e-4

PROMPTS = (
    "The days of the week are",
    "A short recipe for pancakes:",
    "The capital of France is",
    "To list the files of a folder in Python, write",
    "Water boils at",
    "The three primary colours are",
    "Once upon a time there was a king who",
    "Dear Sir or Madam, I am writing to",
    "The planets of our solar system are",
    "def fibonacci(n):",
    "SELECT name FROM customers WHERE",
    "The first ten prime numbers are",
    "How to make a cup of tea: first",
    "The largest ocean on Earth is",
    "My favourite season is winter because",
    "In the year 1969, the first man",
    "A list of five common fruits:",
    "The opposite of hot is",
    "Shakespeare wrote many plays, among them",
    "If it rains tomorrow, we will",
    "The recipe needs two eggs, a cup of flour and",
    "Question: What is 12 times 12? Answer:",
    "The train from London to Paris takes",
    "Three reasons to learn a language:",
)

REPLAYED = {
    "rows": "rows",
    "method": "method",
    **{f"epoch{n}": f"tokens/row-step, epoch {n}" for n in (1, 2, 3)},
    "nodes": "nodes/row-step",
    "forwards": "forwards",
    "plain_forwards": "plain's",
}
CLOCKED = {
    "rows": "rows",
    "method": "method",
    **{f"epoch{n}": f"tokens/s, epoch {n}" for n in (1, 2, 3)},
    "ratio": "x plain",
    "accepted": "tokens/row-step",
}


@dataclass
class Rollouts:
    """What was sampled.

    Attributes:
        prompts: token ids.
        samples: int32 [epochs, prompts, samples, tokens], -1 behind an output's end.
        weights: the adapter's, of each epoch.
    """

    prompts: list[list[int]]
    samples: NDArray[np.int32]
    weights: list[dict[str, torch.Tensor]]

    def requests(self, epoch: int) -> list[tuple[list[int], list[int]]]:
        return [
            (prompt, output[output >= 0].tolist())
            for prompt, group in zip(self.prompts, self.samples[epoch], strict=True)
            for output in group
        ]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for epoch, weights in enumerate(self.weights):
            save_file(weights, folder / f"weights-{epoch}.safetensors")
        np.savez_compressed(
            folder / "samples.npz",
            samples=self.samples,
            prompts=np.concatenate(self.prompts),
            lengths=np.array([len(prompt) for prompt in self.prompts]),
        )

    @classmethod
    def load(cls, folder: Path) -> Rollouts:
        with np.load(folder / "samples.npz", allow_pickle=False) as arrays:
            samples = arrays["samples"]
            ends = np.cumsum(arrays["lengths"])[:-1]
            prompts = [part.tolist() for part in np.split(arrays["prompts"], ends)]
        paths = [folder / f"weights-{epoch}.safetensors" for epoch in range(len(samples))]
        return cls(prompts, samples, [load_file(path) for path in paths])


class Policy:
    """The model with an adapter, and how it samples and learns."""

    def __init__(self, seed: int):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        model, self.tokenizer = load_demo_model()
        lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        self.model: Any = get_peft_model(model, lora).eval()
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    @torch.no_grad()
    def set_weights(self, weights: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.trained.items():
            parameter.copy_(weights[name])

    def sample(
        self, prompts: Sequence[Sequence[int]], tokens: int, **options: Any
    ) -> tuple[torch.Tensor, float]:
        """int64 [rows, tokens], one output for each prompt, and the seconds that it took."""
        longest = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        started = time.perf_counter()
        found = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=pad,
            **options,
        )
        return found[:, longest:], time.perf_counter() - started

    def assisted(
        self, assistant: Assistant | None, prompts: Sequence[list[int]], tokens: int, **options: Any
    ) -> tuple[int, float]:
        """How many tokens were sampled, up to each output's end, and in how many seconds."""
        with assistant.attached(self.model) if assistant else nullcontext():
            outputs, seconds = self.sample(prompts, tokens, **options)
        return sum(len(self.without_end(output)) for output in outputs), seconds

    def without_end(self, output: torch.Tensor) -> list[int]:
        """The tokens of one output up to its end-of-sequence token, or padding."""
        ids: list[int] = output.tolist()
        ends = {self.tokenizer.pad_token_id, self.tokenizer.eos_token_id}
        return next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)

    def learn(self, optimizer: Any, prompt: Sequence[int], outputs: Sequence[list[int]]) -> None:
        """One policy-gradient step on the best and the worst output of a prompt."""
        texts = [self.tokenizer.decode(ids) for ids in outputs]
        rewards = torch.tensor([(text.find(".") + 1) / max(len(text), 1) for text in texts])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        extremes = [int(rewards.argmax()), int(rewards.argmin())]
        outputs, advantages = [outputs[i] for i in extremes], advantages[extremes]
        width = max(map(len, outputs))
        ids = torch.tensor([[*prompt, *ids, *[0] * (width - len(ids))] for ids in outputs])
        used = torch.tensor([[1.0] * len(ids) + [0.0] * (width - len(ids)) for ids in outputs])
        logits = self.model(input_ids=ids[:, :-1], logits_to_keep=width).logits
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, -width:], reduction="none"
        )
        optimizer.zero_grad()
        ((losses * used).sum(dim=1) / used.sum(dim=1) * advantages).mean().backward()
        optimizer.step()


def record(
    policy: Policy,
    prompts: Sequence[list[int]],
    samples: int,
    tokens: int,
    epochs: int,
    progress: Callable[[str], None],
) -> Rollouts:
    """Sample every epoch, assisted, which draws from the same distribution; learn between two."""
    assistant = RolloutAssistant()
    optimizer = torch.optim.AdamW(policy.trained.values(), lr=LEARNING_RATE)
    found = np.full((epochs, len(prompts), samples, tokens), -1, np.int32)
    weights = []
    for epoch in range(epochs):
        weights.append(policy.weights())
        torch.manual_seed(epoch)
        for number, batch in enumerate(batches(prompts, samples, 4 * samples)):
            progress(f"epoch {epoch + 1}: prompts from {4 * number + 1} on of {len(prompts)}")
            with assistant.attached(policy.model):
                outputs, _ = policy.sample(batch, tokens)
            for row, output in enumerate(map(policy.without_end, outputs)):
                prompt, sample = divmod(4 * samples * number + row, samples)
                found[epoch, prompt, sample, : len(output)] = output
        if epoch + 1 < epochs:
            for number, ids in enumerate(prompts):
                progress(f"learning from prompt {number + 1} of {len(prompts)}")
                group = [output[output >= 0].tolist() for output in found[epoch, number]]
                policy.learn(optimizer, ids, group)
    return Rollouts(list(prompts), found, weights)


def replayed() -> dict[str, Assistant]:
    """What drafts without logits, the memories empty."""
    return {
        "prompt lookup": Assistant([PromptLookupDrafter()]),
        "own text only": SamAssistant(fallback=None),
        "group memory": RolloutAssistant(),
    }


def clocked() -> dict[str, Assistant | None]:
    return {
        "plain": None,
        "SamAssistant": SamAssistant(),
        "RolloutAssistant": RolloutAssistant(),
    }


def replay(report: Report, rollouts: Rollouts, cost: Callable[[int], float]) -> None:
    """How the recorded outputs are drafted; epoch after epoch."""
    table = report.table("Recorded rollouts, replayed", REPLAYED)
    for rows in (1, 8, 32):
        for name, assistant in replayed().items():
            epochs = [
                simulate(assistant, rollouts.requests(epoch), cost, batch_size=rows, packed=True)
                for epoch in range(len(rollouts.samples))
            ]
            steps = sum(epoch.steps for epoch in epochs)
            table.add(
                rows=rows,
                method=name,
                **{f"epoch{n}": e.mean_accepted_tokens for n, e in enumerate(epochs, 1)},
                nodes=sum(epoch.nodes for epoch in epochs) / steps,
                forwards=sum(epoch.forwards for epoch in epochs),
                plain_forwards=sum(epoch.plain_forwards for epoch in epochs),
            )


def batches(prompts: Sequence[list[int]], samples: int, rows: int) -> Iterator[list[list[int]]]:
    """Groups of samples of the same prompts, `rows` outputs at a time."""
    wanted = [prompt for prompt in prompts for _ in range(samples)]
    for first in range(0, len(wanted), rows):
        yield wanted[first : first + rows]


def clock(
    report: Report,
    policy: Policy,
    rollouts: Rollouts,
    prompts: int,
    rows: Sequence[int],
    progress: Callable[[str], None],
) -> None:
    """Sample the first prompts anew by every method, epoch after epoch; alone, one output each."""
    table = report.table("Tokens per second", CLOCKED)
    samples, tokens = rollouts.samples.shape[2:]
    for count in rows:
        wanted = list(batches(rollouts.prompts[:prompts], 1 if count == 1 else samples, count))
        methods = clocked()
        extra: dict[str, dict[str, Any]] = {name: {} for name in methods}
        if count == 1:
            # transformers' own takes one row at a time.
            methods["prompt lookup"] = None
            extra["prompt lookup"] = {"prompt_lookup_num_tokens": 10}
        produced = {name: np.zeros(len(rollouts.weights)) for name in methods}
        seconds = {name: np.zeros(len(rollouts.weights)) for name in methods}
        for name, assistant in methods.items():
            progress(f"{count} rows: warming up {name}")
            policy.assisted(assistant, wanted[0], 8, **extra[name])
        for epoch, weights in enumerate(rollouts.weights):
            policy.set_weights(weights)
            for number, batch in enumerate(wanted):
                for name, assistant in methods.items():
                    progress(f"{count} rows, epoch {epoch + 1}, batch {number + 1}: {name}")
                    torch.manual_seed(1000 * epoch + number)
                    found = policy.assisted(assistant, batch, tokens, **extra[name])
                    produced[name][epoch] += found[0]
                    seconds[name][epoch] += found[1]
        rates = {name: produced[name].sum() / seconds[name].sum() for name in methods}
        for name, assistant in methods.items():
            epochs = enumerate(produced[name] / seconds[name], 1)
            table.add(
                rows=count,
                method=name,
                **{f"epoch{n}": float(rate) for n, rate in epochs},
                ratio=float(rates[name] / rates["plain"]),
                accepted=assistant.stats.total.mean_accepted_tokens if assistant else None,
            )


def measure(
    policy: Policy,
    rollouts: Rollouts,
    prompts: int,
    rows: Sequence[int],
    progress: Callable[[str], None],
) -> Report:
    """Replay what was sampled, and time some of it."""
    axes = ("epochs", "prompts", "samples", "tokens")
    settings = dict(zip(axes, rollouts.samples.shape, strict=True))
    report = Report("rollouts", settings | {"prompts_timed": prompts})
    replay(report, rollouts, lambda n: 1.0 + 0.06 * (n - 1))
    if rows:
        clock(report, policy, rollouts, prompts, rows, progress)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of a sample")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--timed", type=int, default=4, help="prompts that are timed")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32], help="that are timed")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/out"), help="for JSON")
    arguments = parser.parse_args()
    progress = progress_line(time.perf_counter())
    policy = Policy(seed=0)
    folder = arguments.output / "rollouts"
    if (folder / "samples.npz").exists():
        rollouts = Rollouts.load(folder)
    else:
        prompts = [policy.tokenizer(text).input_ids for text in PROMPTS[: arguments.prompts]]
        sizes = arguments.samples, arguments.tokens, arguments.epochs
        rollouts = record(policy, prompts, *sizes, progress)
        rollouts.save(folder)
    report = measure(policy, rollouts, arguments.timed, arguments.rows, progress)
    print(f"{report}\n\nwritten to {report.save(arguments.output)}")


if __name__ == "__main__":
    main()
