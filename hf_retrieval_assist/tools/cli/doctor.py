"""The command `hf-retrieval-assist doctor`."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.backends.cpu import get_cpu_capability
from typer import Argument

from ... import __version__
from ...host import private_names
from ...system.memory import free_memory
from ...verification.service import choose_service
from ...verification.tiers import Tier
from ..kernels import kernel_paths
from .models import DEVICE, DTYPE, model_on

# What the package builds on, and what it may meet.
_PACKAGES = (
    *("transformers", "numpy", "huggingface_hub", "safetensors", "sentencepiece", "accelerate"),
    *("bitsandbytes", "datasets", "deepspeed", "fastapi", "gguf", "llguidance", "lm-eval"),
    *("openai", "optimum-quanto", "outlines", "peft", "prometheus-client", "pyarrow", "redis"),
    *("pydivsufsort", "torchao", "triton", "trl", "uvicorn", "xgrammar"),
)


def doctor(
    model: str | None = Argument(None, help="path or hub id of a model, which is then tested"),
    dtype: str = DTYPE,
    device: str | None = DEVICE,
) -> None:
    """Print what a bug report needs: versions, the machine, how a model is served.

    Prompts, texts and access tokens are not in it.
    """
    print("No prompts, texts or access tokens are below.")
    _show("versions", _versions())
    _show("machine", _machine())
    lacking = ", ".join(private_names.absent(private_names.NEEDED)) or "none"
    served = private_names.why_plain() or "yes"
    _show("private names of transformers", {"absent": lacking, "calls are served": served})
    if model is not None:
        _show("model", _service(model_on(device, model, dtype)))


def _show(title: str, facts: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, value in facts.items():
        print(f"  {name:<30} {value}")


def _versions() -> dict[str, str]:
    # The package of torch does not say what it was built for.
    found = {"hf_retrieval_assist": __version__, "torch": torch.__version__}
    found["Python"] = f"{platform.python_version()} ({platform.python_implementation()})"
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _machine() -> dict[str, str]:
    free = free_memory()
    found = {
        "platform": platform.platform(),
        "CPU": f"{platform.processor() or platform.machine()}, {get_cpu_capability()}",
        "kernels": ", ".join(kernel_paths()) or "none for this CPU",
        "threads": f"{torch.get_num_threads()}, of {os.cpu_count()} CPUs",
        "free memory": f"{free / 2**30:.1f} GiB" if free else "not known",
        "CUDA": torch.version.cuda or "none",
    }
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        memory = f"{about.total_memory / 2**30:.1f} GiB"
        found[f"cuda:{index}"] = f"{about.name}, {memory}, {about.major}.{about.minor}"
    return found


def _service(model: Any) -> dict[str, Any]:
    """How greedy decoding and sampling of one text are served; arguments may demand plain."""
    service = choose_service(model, {})
    by = {"attention by": service.attention_by} if service.tier is Tier.TREE else {}
    return {
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device,
        "tier": f"{service.tier.value} ({service.reason})",
    } | by
