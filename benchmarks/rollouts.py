"""Rollouts of reinforcement learning: samples of the same prompts in every epoch.

Gemma-3-270M with LoRA samples groups of outputs at temperature 1. After an epoch it takes one
policy-gradient step per prompt, rewarded for sentences that end soon, so that every epoch samples
from other weights. `python -m benchmarks.rollouts` replays by `simulate` what was sampled, which is
kept beside the report, epoch by epoch. With `--clock ROWS` some of the prompts are sampled anew by
every method under each epoch's weights, against the clock. Needs the `ecosystem` and `demo` extras.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from hf_retrieval_assist import Assistant, RolloutAssistant, SamAssistant, simulate
from hf_retrieval_assist.demo_model import load_demo_model

from .__main__ import Progress
from .baselines import PromptLookupDrafter
from .report import Report

LEARNING_RATE = 5e-4
ROWS = (1, 2, 4, 8, 32)  # of the batches that are replayed
TOGETHER = 4  # prompts sampled in one batch
WARM_UP = 8  # tokens

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
        samples: int32 [epochs, prompts, samples, tokens], -1 behind an output's end and where
            none was sampled yet.
        weights: the adapter's, of each epoch that was begun.
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
    def nothing(cls, prompts: list[list[int]], epochs: int, samples: int, tokens: int) -> Rollouts:
        """Before the first epoch."""
        return cls(prompts, np.full((epochs, len(prompts), samples, tokens), -1, np.int32), [])

    @classmethod
    def load(cls, folder: Path) -> Rollouts:
        with np.load(folder / "samples.npz", allow_pickle=False) as arrays:
            samples = arrays["samples"]
            ends = np.cumsum(arrays["lengths"])[:-1]
            prompts = [part.tolist() for part in np.split(arrays["prompts"], ends)]
        paths = sorted(folder.glob("weights-*.safetensors"))
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


def next_weights(
    policy: Policy, rollouts: Rollouts, progress: Callable[[str], None]
) -> dict[str, torch.Tensor]:
    """Those of the next epoch: learnt from the last one, if there was one."""
    if known := len(rollouts.weights):
        policy.set_weights(rollouts.weights[-1])
        optimizer = torch.optim.AdamW(policy.trained.values(), lr=LEARNING_RATE)
        for number, prompt in enumerate(rollouts.prompts):
            progress(f"learning from prompt {number + 1} of {len(rollouts.prompts)}")
            group = [output[output >= 0].tolist() for output in rollouts.samples[known - 1, number]]
            policy.learn(optimizer, prompt, group)
    return policy.weights()


def sampled(
    policy: Policy, prompts: Sequence[list[int]], samples: int, tokens: int
) -> NDArray[np.int32]:
    """int32 [prompts, samples, tokens], of plain decoding."""
    rows = [prompt for prompt in prompts for _ in range(samples)]
    found = np.full((len(rows), tokens), -1, np.int32)
    outputs, _ = policy.sample(rows, tokens)
    for row, output in enumerate(map(policy.without_end, outputs)):
        found[row, : len(output)] = output
    return found.reshape(len(prompts), samples, tokens)


def record(
    policy: Policy, rollouts: Rollouts, folder: Path, progress: Callable[[str], None]
) -> None:
    """Sample what is missing, keeping what is there in a folder."""
    epochs, prompts, samples, tokens = rollouts.samples.shape
    for epoch in range(epochs):
        if epoch == len(rollouts.weights):
            rollouts.weights.append(next_weights(policy, rollouts, progress))
            rollouts.save(folder)
        policy.set_weights(rollouts.weights[epoch])
        for first in range(0, prompts, TOGETHER):
            some = slice(first, first + TOGETHER)
            if (rollouts.samples[epoch, some, :, 0] >= 0).all():
                continue
            progress(f"epoch {epoch + 1}: prompts from {first + 1} on of {prompts}")
            torch.manual_seed(epoch * prompts + first)
            found = sampled(policy, rollouts.prompts[some], samples, tokens)
            rollouts.samples[epoch, some] = found
            rollouts.save(folder)


def replayed() -> dict[str, Assistant]:
    """What drafts without logits, the memories empty."""
    return {
        "prompt lookup": Assistant([PromptLookupDrafter()]),
        "own text only": SamAssistant(fallback=None),
        "group memory": RolloutAssistant(),
    }


def replay(rollouts: Rollouts, cost: Callable[[int], float]) -> Report:
    """How the recorded outputs are drafted; epoch after epoch."""
    axes = ("epochs", "prompts", "samples", "tokens")
    report = Report("rollouts", dict(zip(axes, rollouts.samples.shape, strict=True)))
    table = report.table("Recorded rollouts, replayed", REPLAYED)
    for rows in ROWS:
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
    return report


def batches(prompts: Sequence[list[int]], samples: int, rows: int) -> Iterator[list[list[int]]]:
    """Groups of samples of the same prompts, `rows` outputs at a time."""
    wanted = [prompt for prompt in prompts for _ in range(samples)]
    for first in range(0, len(wanted), rows):
        yield wanted[first : first + rows]


@dataclass
class Method:
    """A way to sample, and what it took.

    Attributes:
        assistant: None where transformers samples alone.
        options: of `generate`.
        tokens, seconds: by epoch.
    """

    assistant: Assistant | None
    options: dict[str, Any] = field(default_factory=dict)
    tokens: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def sample(
        self, policy: Policy, prompts: Sequence[list[int]], tokens: int
    ) -> tuple[int, float]:
        """How many tokens were sampled, up to each output's end, and in how many seconds."""
        with self.assistant.attached(policy.model) if self.assistant else nullcontext():
            outputs, seconds = policy.sample(prompts, tokens, **self.options)
        return sum(len(policy.without_end(output)) for output in outputs), seconds

    @property
    def rates(self) -> list[float]:
        """Tokens per second, epoch by epoch."""
        return [self.tokens[epoch] / self.seconds[epoch] for epoch in sorted(self.tokens)]


def clocked(rows: int) -> dict[str, Method]:
    """Every method, its memory empty."""
    methods = {
        "plain": Method(None),
        "our kernels, no drafts": Method(SamAssistant(budget=0, fallback=None)),
        "SamAssistant": Method(SamAssistant()),
        "RolloutAssistant": Method(RolloutAssistant()),
    }
    if rows == 1:
        # transformers' own takes one row at a time.
        methods["prompt lookup"] = Method(None, {"prompt_lookup_num_tokens": 10})
    return methods


def clock(
    policy: Policy,
    rollouts: Rollouts,
    prompts: int,
    tokens: int,
    rows: int,
    progress: Callable[[str], None],
) -> Report:
    """Sample the first prompts anew by every method, epoch after epoch; alone, one output each."""
    epochs, _, samples, _ = rollouts.samples.shape
    wanted = list(batches(rollouts.prompts[:prompts], 1 if rows == 1 else samples, rows))
    methods = clocked(rows)
    for name, method in methods.items():
        progress(f"{rows} rows: warming up {name}")
        method.sample(policy, wanted[0], WARM_UP)
    for epoch, number in product(range(epochs), range(len(wanted))):
        policy.set_weights(rollouts.weights[epoch])
        for name, method in methods.items():
            progress(f"{rows} rows, epoch {epoch + 1}, batch {number + 1}: {name}")
            torch.manual_seed(1000 * epoch + number)
            count, seconds = method.sample(policy, wanted[number], tokens)
            method.tokens[epoch] += count
            method.seconds[epoch] += seconds
    settings = {"rows": rows, "prompts": prompts, "epochs": epochs, "tokens": tokens}
    report = Report(f"rollouts-{rows}", settings)
    table = report.table("Tokens per second", CLOCKED)
    for name, method in methods.items():
        rates = {f"epoch{n}": rate for n, rate in enumerate(method.rates, 1)}
        assistant = method.assistant
        accepted = assistant.stats.total.mean_accepted_tokens if assistant else None
        # An epoch in which the machine was busy with something else says nothing.
        ratio = median(method.rates) / median(methods["plain"].rates)
        table.add(rows=rows, method=name, **rates, ratio=ratio, accepted=accepted)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of a sample")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--clock", type=int, metavar="ROWS", help="time batches of so many rows")
    parser.add_argument("--timed", type=int, default=4, help="prompts that are timed")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/out"), help="for JSON")
    parser.add_argument("--timed-tokens", type=int, default=24, help="of an output that is timed")
    arguments = parser.parse_args()
    progress = Progress(["rollouts"])
    progress.next()
    policy = Policy(seed=0)
    folder = arguments.output / "rollouts"
    if (folder / "samples.npz").exists():
        rollouts = Rollouts.load(folder)
    else:
        prompts = [policy.tokenizer(text).input_ids for text in PROMPTS[: arguments.prompts]]
        shape = arguments.epochs, arguments.samples, arguments.tokens
        rollouts = Rollouts.nothing(prompts, *shape)
    record(policy, rollouts, folder, progress)
    if arguments.clock:
        report = clock(
            policy,
            rollouts,
            arguments.timed,
            arguments.timed_tokens,
            arguments.clock,
            progress,
        )
    else:
        report = replay(rollouts, lambda n: 1.0 + 0.06 * (n - 1))
    print(f"{report}\n\nwritten to {report.save(arguments.output)}")


if __name__ == "__main__":
    main()
