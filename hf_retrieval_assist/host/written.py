"""Who wrote code: transformers, a known library round it, or somebody else.

A function is judged by the module that its code was written in, and so is everything that it wraps,
is bound to or has in its scope; other callables are judged by their class.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

PACKAGE = __name__.partition(".")[0]

LIBRARIES = frozenset(
    (
        *("torch", "transformers", "accelerate", "peft", PACKAGE),
        # Quantised weights.
        *("bitsandbytes", "torchao", "optimum", "compressed_tensors", "hqq", "aqlm", "eetq"),
        *("auto_gptq", "gptqmodel", "awq", "fbgemm_gpu"),
        # Kernels, and models spread over devices.
        *("kernels", "flash_attn", "flash_attn_interface", "causal_conv1d", "mamba_ssm", "fla"),
        *("triton", "deepspeed"),
        # What modeling modules import beside these.
        *("numpy", "safetensors", "huggingface_hub", "tqdm", "packaging", "einops"),
    )
)
"""Whose code computes a token from the tokens before it, whatever their number."""

# The names that the library `kernels` gives to modules of its hub.
_OF_HUB = re.compile(r"(\w+_)?[0-9a-f]{8,16}")

# Folders of Python's own modules.
_OF_PYTHON = (str(Path(os.__file__).parent), sysconfig.get_path("platstdlib"))

# What functions have that `torch.compile` has made.
_MARK = "_torchdynamo_orig_callable"
_SCRIPTED = (torch.jit.ScriptFunction, torch._C.ScriptMethod, torch.jit.ScriptModule)


def is_known(module: str) -> bool:
    """Whether a module is a known library's, or Python's; a caller's file may have such a name."""
    root = module.partition(".")[0]
    if root in LIBRARIES or root in sys.stdlib_module_names:
        held = sys.modules.get(root)
        return _is_theirs(root, getattr(held, "__file__", None), hasattr(held, "__path__"))
    return "kernels" in sys.modules and _OF_HUB.fullmatch(root) is not None


@cache
def _is_theirs(root: str, file: str | None, is_package: bool) -> bool:
    """Whether a library's or Python's module lies where those do: a library in a package, or in a
    file that was installed, Python's modules in a folder of its own, or in none."""
    installed = file is not None and bool({"site-packages", "dist-packages"} & {*Path(file).parts})
    if root in LIBRARIES:
        return is_package or installed or file is None
    if file is None:
        return not is_package
    return not installed and any(Path(file).is_relative_to(folder) for folder in _OF_PYTHON)


def written_in(function: Any) -> str:
    """The name of the module that a callable's own code was written in."""
    while isinstance(function, (partial, MethodType)):
        function = function.func if isinstance(function, partial) else function.__func__
    if isinstance(function, ModuleType):
        return function.__name__
    if isinstance(function, type):
        return function.__module__
    if isinstance(function, torch.jit.ScriptFunction):
        return str(function.qualified_name).removeprefix("__torch__.")
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__"))
    if isinstance(function, BuiltinFunctionType):
        return function.__module__ or type(function.__self__).__module__
    return type(function).__module__


def name_of(function: Any) -> str:
    """A callable's name and module, for messages."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__qualname__} of {written_in(function)}"


def strangers_part(function: Any) -> Any:
    """What of a callable no known library has written; None: there is nothing."""
    parts = [*parts_of(function)]
    strange = [part for part in parts if not is_known(written_in(part))]
    if not strange:
        # What wraps a function goes by the name of that.
        functions = (part for part in parts if isinstance(part, FunctionType))
        strange = [part for part in functions if not is_known(str(part.__module__ or PACKAGE))]
    return strange[0] if strange else None


def compiled_part(function: Any) -> Any:
    """What of a callable somebody has compiled; None: there is nothing."""
    return next((part for part in parts_of(function) if is_compiled(part)), None)


def is_compiled(function: Any) -> bool:
    """Whether a callable was made by `torch.compile`, or is TorchScript."""
    if isinstance(function, FunctionType):
        return _MARK in vars(function)
    return isinstance(function, (*_SCRIPTED, torch._dynamo.OptimizedModule))


def is_scripted(function: Any) -> bool:
    """Whether it is TorchScript."""
    return isinstance(function, _SCRIPTED)


def is_librarys(function: Any) -> bool:
    """Whether known libraries have written all of a callable."""
    return strangers_part(function) is None


def parts_of(function: Any) -> Iterator[Any]:
    """A callable, and what it calls besides its own code, as far as it says so."""
    waiting, seen = [function], {id(function)}
    for part in waiting:  # which become more
        yield part
        for inner in _within(part):
            if id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)


def _within(part: Any) -> Iterator[Any]:
    if isinstance(part, partial):
        held = [part.func, *part.args, *part.keywords.values()]
        yield from (x for x in held if callable(x) and not isinstance(x, torch.nn.Module))
    elif isinstance(part, MethodType):
        yield part.__func__
    elif isinstance(part, property):
        yield from filter(None, (part.fget, part.fset))
    elif isinstance(part, (classmethod, staticmethod)):
        yield part.__func__
    elif isinstance(part, FunctionType):
        held = [vars(part).get("__wrapped__")]
        for cell in part.__closure__ or ():
            with suppress(ValueError):  # nothing is in it yet
                held.append(cell.cell_contents)
        yield from (x for x in held if isinstance(x, (FunctionType, MethodType, partial)))
    elif not isinstance(part, (type, BuiltinFunctionType, ModuleType)):
        with suppress(AttributeError, KeyError):  # functools.lru_cache
            yield object.__getattribute__(part, "__dict__")["__wrapped__"]
