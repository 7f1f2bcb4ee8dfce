"""The commands that run a model on texts, and models and tokenizers from their paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer import Argument, Option

from ...corpus.readers import read_texts


def _known_dtype(text: str) -> str:
    import torch

    found = getattr(torch, text, None)
    if text != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"expected auto, float32, bfloat16 or such, got {text}")
    return text


def _usable_device(text: str) -> str:
    import torch

    try:
        torch.empty(0, device=text)
    # A build without CUDA asserts that there is one.
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"expected a device of PyTorch, got {text}: {error}") from None
    return text


DTYPE = Option("auto", parser=_known_dtype, metavar="DTYPE", help="auto, float32, bfloat16, ...")
DEVICE = Option(None, parser=_usable_device, metavar="DEVICE", help="default: a GPU, or the CPU")


def suggest(
    model: str = Argument(..., help="path or hub id of the model"),
    prompts: Path = Argument(
        ..., help='a text file, its prompts separated by blank lines, or JSON lines with "prompt"'
    ),
    dtype: str = DTYPE,
    device: str | None = DEVICE,
    max_new_tokens: int = Option(64, min=1, help="tokens of each output"),
    repeats: int = Option(3, min=1, help="of every call"),
) -> None:
    """Measure which assistant pays on your prompts."""
    texts = _prompts(prompts)

    from transformers import AutoTokenizer

    from .. import suggestion

    tokenizer, target = loaded(AutoTokenizer, model), model_on(device, model, dtype)
    counts: dict[str, Any] = {"max_new_tokens": max_new_tokens, "repeats": repeats}
    print(suggestion.suggest(target, texts, tokenizer=tokenizer, **counts))


def _prompts(path: Path) -> list[str]:
    """Those under "prompt" of JSON lines; any other file's texts, which blank lines separate;
    ValueError where there is none."""
    if path.suffix == ".jsonl":
        prompts = [text for _, text in read_texts([str(path)], "prompt")]
    else:
        texts = path.read_text(encoding="utf-8").split("\n\n")
        prompts = [text.strip() for text in texts if text.strip()]
    if not prompts:
        raise ValueError(f"{path}: expected at least one prompt, found none")
    return prompts


def demo(
    model: str = Option(
        "gemma3",
        help="gemma3 (a base model) or smollm2 (tuned for chat), from the package index; or the "
        "path or hub id of another one",
    ),
    device: str | None = DEVICE,
    prompt: str | None = Option(None, help="to answer or to go on from; default: four tasks"),
    max_new_tokens: int = Option(128, min=1, help="tokens after --prompt"),
) -> None:
    """Plain and assisted decoding side by side on a real model."""
    from transformers import AutoTokenizer

    from ...policy.cost_store import CostModels
    from .. import demo_model
    from ..demo.comparison import TASKS, WARM_UP, Task, compare
    from ..demo.show import show

    if model in demo_model.MODELS:
        print(demo_model.MODELS[model].title, flush=True)
        model = str(demo_model.converted_model(model))
    target, tokenizer = model_on(device, model), loaded(AutoTokenizer, model)
    tasks = TASKS if prompt is None else (Task("your prompt", prompt, max_new_tokens),)
    costs = CostModels()
    print("Warming up: plain generate first, then an assistant.", flush=True)
    compare(target, tokenizer, WARM_UP, costs)
    show(target, tokenizer, costs, tasks)


def model_on(device: str | None, path: str, dtype: str = "auto") -> Any:
    """A causal language model in evaluation mode; without a device on the first GPU, or the CPU.
    What it raises is what `loaded` does."""
    import torch
    from transformers import AutoModelForCausalLM

    model = loaded(AutoModelForCausalLM, path, dtype=dtype).eval()
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def loaded(auto_class: Any, path: str, **options: Any) -> Any:
    """A model or tokenizer of transformers.

    Raises:
        ValueError: its files cannot be read, whatever the libraries that read them raise.
        OSError, ImportError: as transformers explains them.
    """
    try:
        return auto_class.from_pretrained(path, **options)
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:
        kind = type(error).__name__
        raise ValueError(f"{path}: expected files of transformers, got {kind}: {error}") from error


COMMANDS = (suggest, demo)
