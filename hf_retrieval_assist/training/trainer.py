"""Training an EAGLE-3 head or an MTP layer for a target that has none.

The training-time test of EAGLE-3 (Li et al. 2025, arXiv:2503.01840, section 3.1): from the target's
features the head is unrolled over its own outputs for several steps, as it will be when it drafts;
the loss is the cross-entropy against the target's distribution over the draft vocabulary, and
features are never regressed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import DynamicCache, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from ..draft_models.eagle_head import EagleHead
from ..draft_models.mtp_head import MtpHead
from ..host.borrowed import TargetShape
from ..system.arguments import require_at_least
from .data import (
    Example,
    ExampleDataset,
    Supervisor,
    choose_draft_ids,
    collate,
    digests,
    examples_of_texts,
    open_feature_cache,
    require_same,
)

STAGING = ".saving-"

# In a checkpoint: what its head is made from.
_MANIFEST = "made_from.json"

Head = EagleHead | MtpHead

KINDS: dict[str, type[Head]] = {"eagle3": EagleHead, "mtp": MtpHead}
"""What can be trained, by name."""


@dataclass(frozen=True)
class HeadTraining:
    """How a head is trained.

    Attributes:
        kind: of the head, one of `KINDS`.
        draft_vocab_size: most ids that the head may draft, chosen by frequency in the data.
        steps: unrolled steps; the paper's 7 serve drafts of that depth.
        step_decay: weight of each step's loss relative to the one before it.
        max_length: texts are cut into pieces of so many tokens.
        head: fields of :class:`HeadConfig` for a new EAGLE-3 head.
        arguments: of transformers' `TrainingArguments`, over the defaults below.
    """

    kind: str = "eagle3"
    draft_vocab_size: int = 8192
    steps: int = 5
    step_decay: float = 0.8
    max_length: int = 512
    head: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {[*KINDS]}, got {self.kind!r}")
        require_at_least(1, draft_vocab_size=self.draft_vocab_size, steps=self.steps)
        require_at_least(3, max_length=self.max_length)
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"step_decay: expected a value in (0, 1], got {self.step_decay}")

    def training_arguments(self, output_dir: Path) -> TrainingArguments:
        defaults = {
            "per_device_train_batch_size": 4,
            "num_train_epochs": 1,
            "learning_rate": 5e-4,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.04,
            "max_grad_norm": 0.5,
            "adam_beta2": 0.95,
            "save_steps": 500,
            "save_total_limit": 2,
            "logging_steps": 20,
            "report_to": [],
        }
        # Columns are what the unrolled head reads; there are no labels besides.
        # Features may come from the target's device, whose memory cannot be pinned.
        fixed = {
            "remove_unused_columns": False,
            "label_names": [],
            "dataloader_pin_memory": False,
        }
        return TrainingArguments(str(output_dir), **{**defaults, **self.arguments, **fixed})


def train_head(
    target: Any,
    texts: Iterable[str | Sequence[int] | Example],
    output_dir: str | PathLike[str],
    training: HeadTraining | None = None,
    *,
    tokenizer: Any = None,
    feature_dir: str | PathLike[str] | None = None,
    resume: bool = True,
) -> Head:
    """Train a head for `target` and save it in `output_dir`.

    Checkpoints appear there complete or not at all, and a run that was interrupted goes on from
    the last one. Each of them, and the result, is a head that its class's `from_pretrained` loads.

    Args:
        target: a transformers causal language model; it is only read.
        texts: strings, token ids, or examples (see `examples_of_prompts`).
        output_dir: made if missing.
        training: how to train; the defaults if None.
        tokenizer: needed for strings.
        feature_dir: keep the target's features on disk, so that further epochs and runs need
            not compute them (for each token, 2 bytes a boundary and unit of the target's width,
            and about 0.4 kB).
        resume: go on from the last checkpoint in `output_dir`, if there is one.

    Returns:
        The head, ready to draft.

    Raises:
        ImportError: accelerate, on which transformers' `Trainer` runs, is not installed.
        ValueError: there is no text of three or more tokens, or `feature_dir` or the checkpoint
            belongs to another target, other texts or another vocabulary of drafts.
    """
    training, output = training or HeadTraining(), Path(output_dir)
    examples = _examples(texts, tokenizer, training.max_length)
    arguments = training.training_arguments(output)
    torch.manual_seed(arguments.seed)
    vocab_size = TargetShape.of(target).vocab_size
    draft_ids = choose_draft_ids(examples, training.draft_vocab_size, vocab_size)
    head = KINDS[training.kind].for_target(target, draft_ids=draft_ids, **training.head)
    dataset = _dataset(target, head, examples, draft_ids, feature_dir)
    trainer = HeadTrainer(
        model=UnrolledHead(head, training.steps, training.step_decay),
        args=arguments,
        train_dataset=dataset,
        data_collator=collate,
    )
    trainer.made_from = digests(
        kind=training.kind,
        target=_weights_digest(target),
        draft_vocabulary=draft_ids,
        texts=[(example.token_ids, example.learn_from) for example in examples],
    )
    checkpoint = _last_checkpoint(output) if resume else None
    if checkpoint is not None:
        what = "a checkpoint to go on from (resume=False, --restart: from the start)"
        require_same(Path(checkpoint, _MANIFEST), trainer.made_from, what)
    trainer.train(resume_from_checkpoint=checkpoint)
    head.save_pretrained(output)
    return head.requires_grad_(False).eval()


def _examples(
    texts: Iterable[str | Sequence[int] | Example], tokenizer: Any, max_length: int
) -> list[Example]:
    examples: list[Example] = []
    for text in texts:
        if isinstance(text, Example):
            examples.append(text)
        else:
            examples += examples_of_texts([text], tokenizer, max_length)
    examples = [example for example in examples if len(example.token_ids) > 2]
    if not examples:
        raise ValueError("texts: expected at least one of three or more tokens, found none")
    return examples


def _dataset(
    target: Any,
    head: Head,
    examples: list[Example],
    draft_ids: Tensor,
    feature_dir: str | PathLike[str] | None,
) -> ExampleDataset:
    supervisor = Supervisor(target, head.boundaries, draft_ids)
    if feature_dir is None:
        return ExampleDataset(examples, supervisor)
    folder = open_feature_cache(
        Path(feature_dir),
        target=_weights_digest(target),
        boundaries=head.boundaries,
        draft_vocabulary=draft_ids,
        texts=[example.token_ids for example in examples],
    )
    dataset = ExampleDataset(examples, supervisor, folder)
    dataset.fill()
    return dataset


def _weights_digest(target: Any) -> str:
    """Of the architecture and of the output for one input, which no other weights give."""
    with torch.no_grad():
        logits = target(torch.arange(4, device=target.device)[None]).logits
    digest = hashlib.sha256(target.config.to_json_string().encode())
    digest.update(logits.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _last_checkpoint(output: Path) -> str | None:
    if not output.is_dir():
        return None
    for left_over in output.glob(f"{STAGING}*"):
        shutil.rmtree(left_over)
    return get_last_checkpoint(str(output))


class UnrolledHead(nn.Module):
    """A head, run for several steps over its own outputs, and the loss of that.

    Args:
        head: the head that is trained.
        steps: how often it is fed its own output.
        decay: weight of a step's loss relative to the one before it.
    """

    def __init__(self, head: Head, steps: int, decay: float) -> None:
        super().__init__()
        self.head = head
        self.steps = steps
        self.decay = decay

    def forward(
        self,
        token_ids: Tensor,
        learnt: Tensor,
        features: Tensor,
        soft_ids: Tensor,
        soft_probs: Tensor,
        covered: Tensor,
    ) -> dict[str, Tensor]:
        """The loss of a batch of texts; shapes [B, T, ...] as `Supervisor` gives them.

        At step i the head stands at position p with the token at p + 1 + i, and learns what the
        target says after that token. Entries of earlier steps are seen only where they lie on the
        way: the text by all later positions, the head's own outputs by their own position.
        """
        texts, pairs = token_ids.shape[0], token_ids.shape[1] - 1
        hidden = self.head.fuse(features[:, :-1].to(self.head.dtype))
        positions = torch.arange(pairs, device=hidden.device).expand(texts, -1)
        own = torch.eye(pairs, dtype=torch.bool, device=hidden.device)
        mask, cache = torch.ones_like(own).tril(), DynamicCache()
        weights = learnt[:, 1:] & covered[:, :-1]
        loss = hidden.new_zeros(())
        for step in range(min(self.steps, pairs - 1)):
            shifted = token_ids[:, 1:].roll(-step, dims=1)
            hidden = self.head(hidden, shifted, positions + step, mask, cache)
            ahead = slice(step + 1, pairs)
            loss = loss + self.decay**step * self._cross_entropy(
                hidden[:, : pairs - 1 - step],
                soft_ids[:, ahead],
                soft_probs[:, ahead],
                weights[:, ahead],
            )
            mask = torch.cat([mask, own], dim=1)
        return {"loss": loss}

    def _cross_entropy(
        self, hidden: Tensor, soft_ids: Tensor, soft_probs: Tensor, learnt: Tensor
    ) -> Tensor:
        """Mean over the positions that are learnt (bool [B, n]); hidden [B, n, H], targets
        [B, n, k]."""
        logits = self.head.logits(hidden[learnt]).float()
        # The targets of a position sum to one.
        expected = (soft_probs[learnt] * logits.gather(-1, soft_ids[learnt].long())).sum(-1)
        return (logits.logsumexp(-1) - expected).sum() / learnt.sum().clamp(min=1)


class HeadTrainer(Trainer):
    """transformers' trainer, whose checkpoints are heads and appear in one step.

    Attributes:
        made_from: digests of what the head is made from, which checkpoints keep.
    """

    made_from: dict[str, str]
    _staging: str | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        name, final = f"checkpoint-{self.state.global_step}", Path(self.args.output_dir)
        final.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=final, prefix=STAGING) as self._staging:
            super()._save_checkpoint(model, trial)
            manifest = Path(self._staging, name, _MANIFEST)
            manifest.write_text(json.dumps(self.made_from), encoding="utf-8")
            if (final / name).exists():
                os.replace(final / name, Path(self._staging, "replaced"))
            os.replace(Path(self._staging, name), final / name)
        self._staging = None
        rotate_checkpoints(str(final), save_total_limit=self.args.save_total_limit, use_mtime=True)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self._head.save_pretrained(output_dir or self.args.output_dir)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        tensors = load_file(Path(resume_from_checkpoint, "model.safetensors"))
        self._head.load_state_dict(tensors)

    @property
    def _head(self) -> Head:
        return self.accelerator.unwrap_model(self.model).head
