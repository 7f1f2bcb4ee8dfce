"""What a head is trained on: token sequences, and what the target makes of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from ..host.feature_taps import FeatureTap
from ..system.files import replacing

# Probability mass beyond the likeliest so many tokens of the draft vocabulary is dropped.
SOFT_TARGETS = 64


@dataclass(frozen=True)
class Example:
    """A token sequence.

    Attributes:
        token_ids: int64 [length].
        learn_from: index of the first token that the head is to learn to predict; what stands
            before it (a prompt) is context.
    """

    token_ids: Tensor
    learn_from: int = 0


def examples_of_texts(
    texts: Iterable[str | Sequence[int]], tokenizer: Any, max_length: int
) -> list[Example]:
    """Texts, or their token ids, cut into pieces of at most `max_length` tokens.

    Raises:
        ValueError: a text is a string and there is no tokenizer.
    """
    examples = []
    for text in texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError("tokenizer: expected one, because texts are strings")
            text = tokenizer(text)["input_ids"]
        ids = torch.tensor(text, dtype=torch.long)
        examples += [Example(piece) for piece in ids.split(max_length) if len(piece) > 2]
    return examples


@torch.no_grad()
def examples_of_prompts(
    prompts: Sequence[str | Sequence[int]],
    target: Any,
    tokenizer: Any,
    max_new_tokens: int,
    batch_size: int = 8,
    **generation: Any,
) -> list[Example]:
    """Prompts continued by the target itself, which is the text the head will have to draft.

    Args:
        prompts: texts or token ids.
        target: the transformers model.
        tokenizer: needed for texts.
        max_new_tokens: most tokens of an answer.
        batch_size: prompts that are answered together.
        generation: further arguments of `generate`, such as `do_sample` and `temperature`.
    """
    ids = [tokenizer(p)["input_ids"] if isinstance(p, str) else list(p) for p in prompts]
    # Prompts of similar length share a batch, so that little of it is padding.
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    examples: dict[int, Example] = {}
    for start in tqdm(range(0, len(ids), batch_size), desc="Generating", unit="batch"):
        batch = order[start : start + batch_size]
        answers = _answers(target, [ids[i] for i in batch], max_new_tokens, generation)
        for i, answer in zip(batch, answers, strict=True):
            examples[i] = Example(torch.tensor(ids[i] + answer), learn_from=len(ids[i]))
    return [examples[i] for i in range(len(ids))]


def _answers(
    target: Any, prompts: list[list[int]], max_new_tokens: int, generation: dict[str, Any]
) -> list[list[int]]:
    """The target's answers, each up to and with its first end-of-sequence token."""
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(ids)) + ids for ids in prompts]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    config = target.generation_config
    ends = generation.get("eos_token_id", config.eos_token_id)
    ends = set(ends) if isinstance(ends, list) else {ends}
    output = target.generate(
        torch.tensor(padded, device=target.device),
        attention_mask=torch.tensor(mask, device=target.device),
        **{"max_new_tokens": max_new_tokens, "pad_token_id": 0, **generation},
    )
    return [_until(row, ends) for row in output[:, longest:].tolist()]


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: stop + 1]


def choose_draft_ids(examples: Sequence[Example], count: int, vocab_size: int) -> Tensor:
    """The `count` most frequent ids among the learnt tokens, or all that occur; ascending."""
    frequency = torch.zeros(vocab_size, dtype=torch.long)
    for example in examples:
        learnt = example.token_ids[example.learn_from :]
        frequency += torch.bincount(learnt, minlength=vocab_size)
    kept = frequency.argsort(descending=True, stable=True)[:count]
    return kept[frequency[kept] > 0].sort().values


class Supervisor:
    """What the target's forward over a sequence teaches a head.

    Args:
        target: the transformers model.
        boundaries: of the residual stream that the head reads.
        draft_ids: int64 [Vd], the draft vocabulary, ascending.
    """

    def __init__(self, target: Any, boundaries: Sequence[int], draft_ids: Tensor) -> None:
        self._target = target
        self._tap = FeatureTap(target, boundaries)
        self._draft_ids = draft_ids

    @torch.no_grad()
    def __call__(self, token_ids: Tensor) -> dict[str, Tensor]:
        """Features and soft targets of one sequence, int64 [T].

        Returns:
            features: [T, width].
            soft_ids, soft_probs: int64 and float32 [T, k], the likeliest draft ids (indices into
                the draft vocabulary) after each token, and their shares of it.
            covered: bool [T], whether the target's own choice is in the draft vocabulary.
        """
        with self._tap as tap:
            logits = self._target(token_ids[None].to(self._target.device)).logits[0]
        draft_ids = self._draft_ids.to(logits.device)
        probs = logits[:, draft_ids].float().softmax(-1)
        soft_probs, soft_ids = probs.topk(min(SOFT_TARGETS, len(draft_ids)), dim=-1)
        return {
            "features": tap.features[0],
            "soft_ids": soft_ids,
            "soft_probs": soft_probs / soft_probs.sum(-1, keepdim=True),
            "covered": torch.isin(logits.argmax(-1), draft_ids),
        }


class ExampleDataset(Dataset[dict[str, Tensor]]):
    """Examples with their supervision, computed when asked for, or once and kept on disk.

    Args:
        examples: the data.
        supervisor: called for what is not on disk.
        folder: where supervision is kept; None: nowhere.

    Raises:
        ValueError: the folder holds the supervision of another target, head or data.
    """

    def __init__(
        self, examples: Sequence[Example], supervisor: Supervisor, folder: Path | None = None
    ) -> None:
        self._examples = examples
        self._supervisor = supervisor
        self._folder = folder

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        example = self._examples[index]
        supervision = self._kept(index) if self._folder else self._supervisor(example.token_ids)
        learnt = torch.arange(len(example.token_ids)) >= example.learn_from
        return {"token_ids": example.token_ids, "learnt": learnt, **supervision}

    def fill(self) -> None:
        """Compute what the folder lacks; an interrupted run goes on where it was."""
        for index in tqdm(range(len(self)), desc="Target features", unit="text"):
            self._kept(index)

    def _kept(self, index: int) -> dict[str, Tensor]:
        assert self._folder is not None
        path = self._folder / f"{index:08d}.safetensors"
        if not path.is_file():
            supervision = self._supervisor(self._examples[index].token_ids)
            compact = {name: _compact(tensor) for name, tensor in supervision.items()}
            with replacing(path) as file:
                save_file(compact, file)
        return load_file(path)


def _compact(tensor: Tensor) -> Tensor:
    """Two bytes for a float and four for an id; bfloat16 because features may be large."""
    small = {torch.float32: torch.bfloat16, torch.int64: torch.int32}
    return tensor.to("cpu", small.get(tensor.dtype, tensor.dtype)).contiguous()


def open_feature_cache(folder: Path, **made_from: Any) -> Path:
    """Make or reopen a folder of supervision for exactly these ingredients.

    Raises:
        ValueError: the folder was filled from other ingredients.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.json"
    content = digests(**made_from)
    if manifest.is_file():
        require_same(manifest, content, "features")
    elif any(folder.iterdir()):
        raise ValueError(f"{folder}: expected an empty folder or one of features")
    else:
        manifest.write_text(json.dumps(content), encoding="utf-8")
    return folder


def digests(**made_from: Any) -> dict[str, str]:
    """What a manifest says of ingredients: ids, tensors, and what has a string of its own."""
    return {
        name: hashlib.sha256(b"".join(_bytes_of(value))).hexdigest()
        for name, value in made_from.items()
    }


def require_same(manifest: Path, content: dict[str, str], what: str) -> None:
    """ValueError for what was made from other ingredients, or from nobody knows which."""
    found = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    if changed := [name for name in content if found.get(name) != content[name]]:
        raise ValueError(f"{manifest.parent}: expected {what} of the same {', '.join(changed)}")


def _bytes_of(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield value.cpu().contiguous().numpy().tobytes()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _bytes_of(item)
            yield b"|"
    else:
        yield str(value).encode()


def collate(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A batch, padded on the right; nothing padded is learnt."""
    return {
        name: pad_sequence([item[name] for item in items], batch_first=True) for name in items[0]
    }
