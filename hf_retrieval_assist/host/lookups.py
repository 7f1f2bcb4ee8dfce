"""What the functions of a model's forward look up by name, and what a caller may change of a model.

A forward asks names: the functions of its modeling module, of `torch.nn.functional`, methods of its
classes, attention in transformers' registry. Callers exchange these (other rotary embeddings, fused
kernels, captures), before a call or within one. Whatever was found out about a model's forwards, or
recorded of them, holds while every one of these names leads where it led.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Set
from contextlib import suppress
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..structures.lookups import Lookups
from ..structures.modules import modules_of
from .hook_state import LIBRARIES, written_in
from .told import configurations_in
from .transformers_private import attention_of, own_calls

_CALLS = ("__call__", "forward")

# Functions that are followed; what torch's own functions and Python's call is nobody's to exchange,
# except in the modules that models are made of.
_FOLLOWED = ("torch.nn.functional", "torch.nn.modules")
_MOST = 1 << 12


def names_in(code: CodeType) -> Iterator[str]:
    """The names that a function's code looks up, functions within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


class ForwardLookups(Lookups):
    """What the functions of a model's forward look up.

    Attributes:
        strange: a function that no library has written; None: there is none.
    """

    strange: Any = None


def _is_strange(function: FunctionType) -> bool:
    written = written_in(function)
    return written not in LIBRARIES and written not in sys.stdlib_module_names


def lookups_of(model: nn.Module) -> ForwardLookups:
    """What the functions of a model's forward look up, and where that leads now."""
    reader = _Reader()
    modules = modules_of(model)
    for kind in {type(module): None for module in modules}:
        for name in _CALLS:
            reader.follow(reader.found.add(kind, name), kind)
    for module in modules:
        reader.follow(own_calls(module)[0], type(module))
    reader.read()
    for config in configurations_in(model.config):
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            reader.found.add(registry, attention_of(config))
    strange = (function for function, _ in reader.functions if _is_strange(function))
    reader.found.strange = next(strange, None)
    return reader.found


def lookups_in(function: FunctionType, but: Set[str] = frozenset()) -> Lookups:
    """What a function looks up, and where that leads now; what it calls is not followed.

    Args:
        but: names that are left out.
    """
    reader = _Reader()
    reader.look_in(function.__globals__, {*names_in(function.__code__)} - but)
    return reader.found


class _Reader:
    """Goes from functions to those that they name.

    Attributes:
        found: so far.
        functions: that were met, those of torch's own that are not followed left out, with the
            class of the object that has them as methods.
    """

    def __init__(self) -> None:
        self.found = ForwardLookups()
        self.functions: list[tuple[FunctionType, type | None]] = []
        self._known: set[tuple[Any, Any]] = set()

    def follow(self, function: Any, kind: type | None = None) -> None:
        """Read what a function looks up, later; nothing else is followed."""
        while isinstance(function, partial):
            function = function.func
        function = getattr(function, "__func__", function)
        met = function, kind
        if isinstance(function, FunctionType) and met not in self._known and _is_followed(function):
            self._known.add(met)
            self.functions.append((function, kind))

    def read(self) -> None:
        """Look up the names of all functions that are followed."""
        for function, kind in islice(self.functions, _MOST):  # which become more
            self.look_up(function, kind)
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # it holds nothing yet
                    self.follow(cell.cell_contents, kind)

    def look_up(self, function: FunctionType, kind: type | None) -> None:
        """The names of one function."""
        names = {*names_in(function.__code__)}
        self.look_in(function.__globals__, names)
        for name in names if kind is not None else ():
            method = getattr(kind, name, None)
            if isinstance(method, FunctionType):
                self._add(kind, name)
                self.follow(method, kind)

    def look_in(self, space: dict[str, Any], names: set[str]) -> None:
        """The names that a space has, and in turn those that modules among these have."""
        for name in names & space.keys():
            if (id(space), name) in self._known:
                continue
            value = self._add(space, name)
            if isinstance(value, ModuleType):
                self.look_in(vars(value), names)
            elif isinstance(value, type) and not issubclass(value, nn.Module):
                for method in names:
                    if isinstance(getattr(value, method, None), FunctionType):
                        self.follow(self._add(value, method), value)
            else:
                self.follow(value)

    def _add(self, space: Any, name: str) -> Any:
        key = id(space), name
        if key in self._known:
            return getattr(space, name) if isinstance(space, type) else space[name]
        self._known.add(key)
        return self.found.add(space, name)


def _is_followed(function: FunctionType) -> bool:
    module = str(function.__globals__.get("__name__"))
    if module.partition(".")[0] in sys.stdlib_module_names:
        return False
    return not module.startswith("torch.") or module.startswith(_FOLLOWED)
