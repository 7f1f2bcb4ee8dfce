"""Norms and rotary embeddings as one kernel each, compiled, where forwards are recorded on a GPU.

A repeated forward runs kernel behind kernel, of which those that compute the norms of a Llama layer
and rotate its queries and keys are 22 of 38, each of a few numbers. Within :class:`fusing` they are
what :func:`torch.compile` makes of the same functions. Like :mod:`..cpu.norms` it exchanges them
where they are looked up, for one thread; attention, linears, and modules of other libraries are
left as they are. What cannot be compiled runs as always.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack
from functools import update_wrapper
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ...host.scopes import Exchange
from ...system.locks import Lock
from ...system.log import get_logger

logger = get_logger(__name__)

_LIBRARY = "transformers.models."
_ROTATION = "apply_rotary_pos_emb"
# What compiles; tests take one that needs no compiler.
_BACKEND = "inductor"


class fusing:  # noqa: N801, a context manager reads as a verb
    """Scope in which this thread runs a model's norms and rotary embeddings compiled.

    It holds the functions, not the model.

    Args:
        model: whose classes, as far as they are transformers' own, are looked at.
    """

    def __init__(self, model: nn.Module):
        classes = dict.fromkeys(type(module) for module in model.modules())
        self._attributes = [_attribute(*found) for kind in classes for found in _functions(kind)]

    def __enter__(self) -> fusing:
        for place in self._attributes:
            place.want(True)
        return self

    def __exit__(self, *error: Any) -> None:
        with ExitStack() as all_of_them:
            for place in self._attributes:
                all_of_them.callback(place.want, False)


def _functions(kind: type[nn.Module]) -> Iterator[tuple[Any, str]]:
    """Whose attributes a class looks up that are worth compiling, and their names."""
    if not kind.__module__.startswith(_LIBRARY):
        return
    if kind.__name__.endswith("RMSNorm") and "forward" in vars(kind):
        yield kind, "forward"
    module = sys.modules.get(kind.__module__)
    if callable(getattr(module, _ROTATION, None)):
        yield module, _ROTATION


class _Attribute(Exchange):
    """One attribute, in whose place its compiled form stands while any thread is in a scope."""

    def __init__(self, holder: Any, name: str):
        super().__init__(self._exchange, self._restore)
        self._holder, self._name = holder, name
        self._plain: Callable[..., Any] = getattr(holder, name)
        self._fused: Callable[..., Any] = self._compiled(self._plain)

    def _compiled(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        compiled: dict[Hashable, Callable[..., Any]] = {}
        fails = False

        def fused(*args: Any, **kwargs: Any) -> Any:
            nonlocal fails
            inside = threading.get_ident() in self.threads and not torch.compiler.is_compiling()
            if inside and not fails:
                kind = tuple(_kind(x) for x in args if isinstance(x, torch.Tensor))
                if kind not in compiled:
                    compiled[kind] = torch.compile(_another(plain, len(compiled)), backend=_BACKEND)
                try:
                    return compiled[kind](*args, **kwargs)
                except (MemoryError, torch.OutOfMemoryError):
                    raise  # it says nothing of the compiler
                except Exception as error:  # whatever a compiler lacks, or does not know
                    # What goes wrong within a capture is the capture's, not the compiler's.
                    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                        raise
                    fails = True
                    logger.warning("%s is not compiled (%s)", plain.__qualname__, error)
            return plain(*args, **kwargs)

        fused.stands_for = plain  # type: ignore[attr-defined]
        return fused

    def _exchange(self) -> None:
        if getattr(self._holder, self._name) is self._plain:
            setattr(self._holder, self._name, self._fused)

    def _restore(self) -> None:
        if getattr(self._holder, self._name) is self._fused:
            setattr(self._holder, self._name, self._plain)


def _kind(tensor: torch.Tensor) -> Hashable:
    """What is the same in all forwards of a model, of what a tensor is compiled for."""
    return tensor.device, tensor.dtype, tensor.dim(), tensor.shape[-1:]


def _another(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The function under a name of its own. A compiler knows functions by their code and its name:
    it gives up one that it has compiled eight times, and takes what differs between models for what
    differs between forwards."""
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__
    code = code.replace(co_name=f"{code.co_name}_{number}")
    copied = FunctionType(
        code, function.__globals__, None, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(copied, function)


_attributes: dict[tuple[int, str], _Attribute] = {}
_lock = Lock()


def _attribute(holder: Any, name: str) -> _Attribute:
    """The one of an attribute, as long as that is the same function."""
    key = id(holder), name  # a class or module, which its place keeps
    with _lock:
        found = _attributes.get(key)
        if found is None or getattr(holder, name) not in (found._plain, found._fused):
            found = _attributes[key] = _Attribute(holder, name)
        return found
