"""Code in a model's forward that no known library has written: such a model is decoded plainly.

No test of a few tokens can know what such code does at another length, or when another number of
tokens is fed. It stands in classes and on instances, in hooks, in registries, and under the names
that libraries' functions look up: all that :func:`~.model_key.structure_of` describes too. Here it
is looked for whenever that is new, so this may take milliseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..structures.modules import INTERNAL, modules_of
from .model_key import ASIDE, attention_functions, configurations_of, spaces
from .transformers_private import OWN_NAMES, active_modes, global_hooks, hooks_of
from .written import compiled_part, is_known, is_scripted, name_of, parts_of, strangers_part

TRUST = (
    "no test tells what code that no known library has written does at other lengths; if it "
    "computes each token from the tokens before it, whatever the length and the number fed, say "
    "trust_forward=True"
)

_CALLED = frozenset(
    ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")
)

# Names that no forward of a library's module asks of it: they load, move and save it, or generate.
_ASIDE = (
    frozenset(name for base in PreTrainedModel.__mro__ for name in vars(base))
    | INTERNAL
    | OWN_NAMES
    | {"reset_parameters", "_init_weights", "extra_repr", "__init__", "__repr__", "__str__"}
) - _CALLED

# What operators of tensors are written as.
_OPERATORS = frozenset(n for n in dir(torch.Tensor) if n.startswith("__")) - {*dir(object)}

_Place = tuple[str, Any]
"""Where something stands, and what: a callable, or a class."""


def why_code_is_unknown(model: nn.Module, trusts: bool) -> str | None:
    """Why a model's forwards cannot be known to compute drafts as they compute the text, because of
    who wrote or compiled parts of them; None: they can.

    Args:
        trusts: whether their owner says that they do. Compiled parts may refuse other lengths, so
            they are left alone all the same.
    """
    places = [*_places(model)]
    for where, found in places:
        if (part := compiled_part(found)) is not None:
            if is_scripted(part):
                return (
                    f"{where} is TorchScript, of which nobody knows what it does at other lengths"
                )
            return f"its caller has compiled {where}; leave that to `generate` (compile_config)"
    for where, found in places if not trusts else ():
        if (part := strangers_part(found)) is not None:
            return f"{where} is {name_of(part)}, and {TRUST}"
    return None


def has_callers_code(model: nn.Module) -> bool:
    """Whether code that no known library has written runs in a model's forward."""
    return any(strangers_part(found) is not None for _, found in _places(model))


def _places(model: nn.Module) -> Iterator[_Place]:
    modules = modules_of(model)
    for hook in (*global_hooks(), *hooks_of(*modules)):
        yield "a hook", hook.called
    for mode in active_modes():
        yield "a mode of PyTorch's", type(mode)
    bases = [*{base: None for module in modules for base in type(module).__mro__}]
    scanned = {base.__module__ for base in bases if base not in ASIDE}
    found = [(name, vars(sys.modules[name])) for name in scanned & sys.modules.keys()]
    names = [*found, *spaces(), ("torch.Tensor", vars(torch.Tensor))]
    tables: list[tuple[str, Mapping[str, Any]]] = [
        *((base.__module__, vars(base)) for base in bases if base not in ASIDE),
        # PyTorch's own functions load and compile, too.
        *((where, space) for where, space in names if where != "torch"),
    ]
    asked = _asked(table for where, table in tables if is_known(where)) | _OPERATORS
    of_modules = (asked - _ASIDE) | _CALLED
    for base in bases:
        yield from _of_class(base, of_modules)
    for module in modules:
        yield from _of_instance(module, of_modules)
    for config in configurations_of(modules):
        for function in attention_functions(config):
            yield "its attention", function
    for where, space in names:
        yield from _of_space(where, space, asked)


def _asked(tables: Iterable[Mapping[str, Any]]) -> set[str]:
    """The names that the functions in tables look up."""
    values = [value for table in tables for value in table.values()]
    kinds = (FunctionType, property, classmethod, staticmethod)
    functions = [value for value in values if isinstance(value, kinds)]
    parts = (part for function in functions for part in parts_of(function))
    codes = {part.__code__ for part in parts if isinstance(part, FunctionType)}
    return {name for code in codes for name in names_in(code)}


def _of_class(base: type, asked: set[str]) -> Iterator[_Place]:
    """What a class defines that forwards may call: of a caller's class what libraries ask for."""
    known = is_known(base.__module__)
    for name, value in vars(base).items():
        called = callable(value) or hasattr(type(value), "__get__")
        if called and (name in asked or (known and name not in _ASIDE)):
            yield f"{base.__qualname__}.{name}", value


def _of_instance(module: nn.Module, asked: set[str]) -> Iterator[_Place]:
    own, kind = vars(module), type(module)
    if issubclass(kind, (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)):
        yield f"a part of it, {kind.__name__},", module
    if own.get("_compiled_call_impl") is not None:
        yield f"{kind.__name__}.__call__", own["_compiled_call_impl"]
    tables = own.get("_parameters", {}), own.get("_buffers", {}), own
    for name, value in (pair for table in tables for pair in table.items()):
        if issubclass(type(value), torch.Tensor):
            yield f"{name} of {kind.__name__}", type(value)
        elif name == "_hf_hook":  # accelerate's
            for hook in (value, *getattr(value, "hooks", ())):
                yield f"{name} of {kind.__name__}", type(hook)
        elif callable(value) and name in asked and not issubclass(type(value), nn.Module):
            yield f"{name} of {kind.__name__}", value


def _of_space(where: str, space: Mapping[str, Any], asked: set[str]) -> Iterator[_Place]:
    """What stands under the names that libraries look up; in modules of the caller's, which are
    judged by their classes, what is compiled."""
    if not is_known(where):
        found = [(name, value) for name, value in space.items() if callable(value)]
        yield from ((f"{where}.{name}", x) for name, x in found if compiled_part(x) is not None)
        return
    for name in space.keys() & asked:
        value = space[name]
        if callable(value) or isinstance(value, ModuleType):
            yield f"{where}.{name}", value
        elif isinstance(value, dict):
            functions = [(key, x) for key, x in value.items() if isinstance(x, FunctionType)]
            yield from ((f"{where}.{name}[{key!r}]", x) for key, x in functions)


def names_in(code: CodeType) -> Iterator[str]:
    """The names that a function's code looks up, functions within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
