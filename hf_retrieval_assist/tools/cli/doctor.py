"""The command `hf-retrieval-assist doctor`."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.backends.cpu import get_cpu_capability
from typer import Argument

from ... import __version__
from ...host import private_names
from ...plugins import paths
from ...system.memory import free_memory
from ...verification.service import choose_service
from ...verification.tiers import Tier
from .models import DEVICE, DTYPE, model_on

# What the package builds on, and what it may meet.
_BUILT_ON = ("transformers", "numpy", "huggingface_hub", "safetensors", "sentencepiece")
_MET = (
    *("accelerate", "bitsandbytes", "datasets", "deepspeed", "fastapi", "gguf", "llguidance"),
    *("lm-eval", "openai", "optimum-quanto", "outlines", "peft", "prometheus-client", "pyarrow"),
    *("pydivsufsort", "redis", "torchao", "triton", "trl", "uvicorn", "xgrammar"),
)

Facts = Iterator[tuple[str, Any]]


def doctor(
    model: str | None = Argument(None, help="path or hub id of a model, which is then tested"),
    dtype: str = DTYPE,
    device: str | None = DEVICE,
) -> None:
    """Print what a bug report needs: versions, the machine, how a model is served.

    Prompts, texts and access tokens are not in it.
    """
    print("No prompts, texts or access tokens are below.")
    parts = {
        "versions": _versions(),
        "machine": _machine(),
        "private names of transformers": _private_names(),
    }
    if model is not None:
        parts["model"] = _service(model, dtype, device)
    for title, facts in parts.items():
        print(f"\n{title}")
        for name, value in facts:
            print(f"  {name:<30} {value}")


def _versions() -> Facts:
    yield "hf_retrieval_assist", __version__
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    # Its package does not say what it was built for.
    yield "torch", torch.__version__
    for package in (*_BUILT_ON, *_MET):
        try:
            yield package, version(package)
        except PackageNotFoundError:
            if package in _BUILT_ON:
                yield package, "none"


def _machine() -> Facts:
    yield "platform", platform.platform()
    yield "CPU", f"{platform.processor() or platform.machine()}, {get_cpu_capability()}"
    yield "kernels", _kernels()
    yield "threads", f"{torch.get_num_threads()}, of {os.cpu_count()} CPUs"
    yield "free memory", f"{free_memory() / 2**30:.1f} GiB" if free_memory() else "not known"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        about = f"{found.name}, {found.total_memory / 2**30:.1f} GiB, {found.major}.{found.minor}"
        yield f"cuda:{index}", f"{about}, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        yield "CUDA", "no device"


def _kernels() -> str:
    """What the kernels for few rows are compiled for that the CPU has."""
    if "cpu" not in paths("engines"):
        return "none in this installation"
    from ...engines.cpu.skinny import PATHS

    return f"{', '.join(PATHS)}; the last is used" if PATHS else "none for this CPU"


def _private_names() -> Facts:
    lacking = private_names.absent(private_names.NEEDED)
    yield "absent", ", ".join(lacking) or "none"
    yield "calls are served", private_names.why_plain() or "yes"


def _service(path: str, dtype: str, device: str | None) -> Facts:
    """How greedy decoding and sampling of one text are served; arguments may demand plain."""
    model = model_on(device, path, dtype)
    yield "class", type(model).__name__
    yield "dtype", str(model.dtype).removeprefix("torch.")
    yield "device", model.device
    service = choose_service(model, {})
    yield "tier", f"{service.tier.value} ({service.reason})"
    if service.tier is Tier.TREE:
        yield "attention by", service.attention_by
