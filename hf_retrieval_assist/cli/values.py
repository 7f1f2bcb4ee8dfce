"""Values of arguments, and models, tokenizers and texts from the paths that arguments name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..system.files import BlankLineError, read_json_lines


def at_least(least: int) -> Any:
    """The type of a whole number with a lower bound."""

    def number(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if found < least:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least}, got {text}")
        return found

    return number


def dtype(text: str) -> str:
    """The type of a model's dtype."""
    import torch

    found = getattr(torch, text, None)
    if text != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise argparse.ArgumentTypeError(f"expected auto, float32, bfloat16 or such, got {text}")
    return text


def device(text: str) -> str:
    """The type of a torch device that is here."""
    import torch

    try:
        torch.empty(0, device=text)
    # A build without CUDA asserts that there is one.
    except (RuntimeError, AssertionError, ImportError) as error:
        raise argparse.ArgumentTypeError(
            f"expected a device of PyTorch, got {text}: {error}"
        ) from None
    return text


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


def load_model(path: str, dtype: str = "auto", device: str | None = None, **options: Any) -> Any:
    """A causal language model in evaluation mode; without a device on the first GPU, else the CPU.

    Raises: as `loaded` does.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = loaded(AutoModelForCausalLM, path, dtype=dtype, **options).eval()
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def read_records(path: Path, *keys: str) -> list[dict[str, str]]:
    """Objects with a text under one of the keys, from a JSON-lines file (`.jsonl`); of any other
    file its texts, which blank lines separate, under the first key.

    Raises:
        ValueError: a line is not such an object, or there is none.
    """
    if path.suffix == ".jsonl":
        lines = read_json_lines(path)
        records = [
            _record(*line, keys) for line in lines if not isinstance(line[1], BlankLineError)
        ]
    else:
        texts = path.read_text(encoding="utf-8").split("\n\n")
        records = [{keys[0]: text.strip()} for text in texts if text.strip()]
    if not records:
        raise ValueError(f"{path}: expected at least one {' or '.join(keys)}, found none")
    return records


def _record(place: str, record: Any, keys: tuple[str, ...]) -> dict[str, str]:
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict) or not any(isinstance(record.get(key), str) for key in keys):
        names = " or ".join(f'"{key}"' for key in keys)
        raise ValueError(f"{place}: expected an object with {names}")
    return record
