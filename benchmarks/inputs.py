"""The models and prompts that benchmarks take."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_retrieval_assist.tools.demo_model import MODELS, load_demo_model, prompt_inputs

PROMPTS = Path(__file__).parent / "prompts"
UNTUNED = PROMPTS / "untuned"
"""Prompts that nothing was tuned on: three of each of thirteen kinds."""

SHIFT = 16
"""Columns by which weights of real models stand further behind, which were unpacked from files of
four bits: groups that begin where those of the files do would flatter drafts."""
# The axes of weights that are of the hidden state, or of neurons.
AXES = {"gate_proj": (0, 1), "up_proj": (0, 1), "down_proj": (0, 1), "o_proj": (0,)}
AXES |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "embed_tokens", "lm_head"), (1,))


@dataclass(frozen=True)
class Prompt:
    """What a model is asked to write.

    Attributes:
        text: for a base model to go on from.
        message: for a model with a chat template; empty: the same text.
    """

    category: str
    name: str
    text: str
    message: str = ""

    def inputs(self, tokenizer: Any) -> dict[str, torch.Tensor]:
        """What `generate` takes: int64 [1, length] each."""
        text = self.message or self.text if tokenizer.chat_template else self.text
        return dict(prompt_inputs(tokenizer, text))


def read_prompts(folder: Path = PROMPTS) -> list[Prompt]:
    """All prompts, by category."""
    prompts = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        prompts += [Prompt(content["category"], **item) for item in content["prompts"]]
    return prompts


def first_of_each(prompts: list[Prompt], count: int) -> list[Prompt]:
    """The first prompts of every category, `count` at most."""
    seen: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if seen[prompt.category] <= count:
            chosen.append(prompt)
    return chosen


def load_real(dtype: torch.dtype | None, name: str) -> tuple[Any, Any]:
    """A model of the demo, whose hidden states and neurons are shifted, and its tokenizer."""
    model, tokenizer = load_demo_model(name, dtype=dtype)
    shift(model)
    return model, tokenizer


def shift(model: Any) -> None:
    """Let a model, of Llama's or Gemma's kind, have its hidden states and neurons in another order,
    in which it computes the same."""
    for name, weight in model.named_parameters():
        axes = AXES.get(
            name.split(".")[-2], (0,) if len(weight) == model.config.hidden_size else ()
        )
        weight.data = weight.data.roll([SHIFT] * len(axes), axes) if axes else weight.data


def load(arguments: argparse.Namespace, dtype: str | None = None) -> tuple[Any, Any]:
    """The model that `--model` names, in `dtype` or that of `--dtype`, and its tokenizer."""
    dtype = dtype or arguments.dtype
    chosen = None if dtype is None else getattr(torch, dtype)
    if arguments.model in MODELS:
        return load_real(chosen, arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=chosen or "auto")
    return model.eval(), AutoTokenizer.from_pretrained(arguments.model)


def model_name(arguments: argparse.Namespace) -> str:
    """The name of `--model` without the folders of a path."""
    return Path(arguments.model).name


def dtype_name(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")
