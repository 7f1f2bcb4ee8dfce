"""What hooks call and keep, by which they are told from others, and what their code can do.

Objects are told by themselves and never by their number alone, which another may have later, nor by
what they say of themselves. What a hook reads is looked for in its closure, the globals that it
names, its object's attributes and what was bound to it; not in iterators or other modules.
"""

from __future__ import annotations

import dis
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain, pairwise
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from .told import PLAIN, Teller, Told, attributes_of, flat, place_of, version_of

PACKAGE = __name__.partition(".")[0]
LIBRARIES = frozenset(
    ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", PACKAGE)
)

_NUMBERS = (bool, int, float, complex)
# What is told of a class: the rest are its methods.
_HELD = PLAIN | {dict, OrderedDict, defaultdict, Counter, list, tuple, deque}

# What is looked at of one hook; more than that is never told to be what it was.
_MOST = 1 << 13

# A function gets at what its code does not name by these.
_FRAMES = frozenset(("locals", "vars", "eval", "exec", "_getframe", "currentframe"))


def written_in(function: Any) -> str:
    """The package that a function was written in, whatever name what wraps it has taken over."""
    while isinstance(function, partial):
        function = function.func
    written = getattr(getattr(function, "__func__", function), "__globals__", {})
    name: str = written.get("__name__", type(function).__module__)
    return name.partition(".")[0]


def own_parts(called: Any) -> list[Any]:
    """What no library has written of a function and what it wraps, as `torch.no_grad()` does."""
    found = [called]
    while isinstance(called, partial | MethodType) or hasattr(called, "__wrapped__"):
        if isinstance(called, partial):
            called = called.func
            continue
        called = called.__func__ if isinstance(called, MethodType) else called.__wrapped__
        found.append(called)
    return [part for part in found if written_in(part) not in LIBRARIES]


class DeepTeller(Teller):
    """Looks into functions, classes and objects that no library has written, too.

    Args:
        most: parts of objects that are looked at; what has more is never told to be what it was.
    """

    def __init__(self, most: int = _MOST) -> None:
        super().__init__(most=most)
        self.at_once = False

    def parts(self, value: Any) -> tuple[Sequence[Any], bool]:
        kind = type(value)
        parts, which = super().parts(value)
        if issubclass(kind, torch.Tensor):
            parts = _tensor(value)
        elif issubclass(kind, deque):
            parts, which = [*deque.__iter__(value)], False
        elif kind is weakref.ref:
            parts, which = [value()], False
        elif kind is FunctionType and written_in(value) not in LIBRARIES:
            parts, which = _kept(value), False
        elif kind is SimpleNamespace or _is_own(value if issubclass(kind, type) else kind):
            parts = [*parts, *_attributes(value)]
        if not self.spend(1 + len(parts)):
            return (), False
        if hasattr(kind, "__next__"):  # nobody knows what it gives next
            self.give_up()
            return (), False
        return parts, which


State = tuple[Told, dict[tuple[int, ...], complex]]
"""What a hook calls and keeps, and the numbers among that by where they were found."""


def state_of(called: Any) -> State:
    """What a hook calls and keeps."""
    teller, numbers = DeepTeller(), dict[tuple[int, ...], complex]()
    teller.tell(called)
    places: dict[int, tuple[int, ...]] = {0: ()}
    for number, (kind, parts) in enumerate(teller.rest()):
        for i, part in enumerate((kind, *parts)):
            place = *places[number], i
            if type(part) is tuple:
                places.setdefault(part[1], place)
            elif type(part) in _NUMBERS:
                numbers[place] = part
    return Told(teller), numbers


def counts(before: State, after: State) -> bool:
    """Whether a number that a hook keeps has become another one."""
    now = after[1]
    return any(place in now and now[place] != then for place, then in before[1].items())


def _tensor(tensor: torch.Tensor) -> list[Any]:
    """What tells that a tensor was written to, or is another one of its memory; a single number is
    told by what it is."""
    if tensor.is_cpu and tensor.numel() == 1 and tensor.layout is torch.strided:
        return [tensor.item()]
    return [f"{version_of(tensor)} {place_of(tensor)}"]


def _kept(function: FunctionType) -> list[Any]:
    """What a function's code is, and what it reads."""
    code, space = function.__code__, function.__globals__
    kept: list[Any] = [code, function.__defaults__, function.__kwdefaults__, vars(function)]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing is in it yet
            kept += name, cell.cell_contents
    return kept + [part for name in code.co_names if name in space for part in (name, space[name])]


def _is_own(kind: type) -> bool:
    """Whether a class is a caller's: of others it is not known which attributes are of use."""
    return kind.__module__.partition(".")[0] not in LIBRARIES | {"builtins", "numpy", "logging"}


def _attributes(value: Any) -> list[Any]:
    if isinstance(value, type):
        return flat({name: part for name, part in vars(value).items() if type(part) in _HELD})
    held = attributes_of(value)
    slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    for name in chain.from_iterable((s,) if isinstance(s, str) else s for s in slots):
        with suppress(AttributeError):
            held[name] = object.__getattribute__(value, name)
    return flat(held)


def _code_of(called: Any) -> tuple[CodeType | None, int]:
    """A hook's code, and how many of its parameters come before those of hooks; None: it has none
    in Python."""
    bound = 0
    while not isinstance(called, FunctionType):
        if isinstance(called, partial):
            bound, called = bound + len(called.args), called.func
        elif isinstance(called, MethodType):
            bound, called = bound + 1, called.__func__
        else:
            name = "forward" if isinstance(called, nn.Module) else "__call__"
            bound, called = bound + 1, getattr(type(called), name, None)
            if not isinstance(called, FunctionType):
                return None, bound
    return called.__code__, bound


def reads_more_than_its_module(called: Any) -> bool:
    """Whether a hook's code names anything of what it is shown but the module."""
    code, bound = _code_of(called)
    return code is None or hasattr(called, "__wrapped__") or _reads(code, bound)


@lru_cache(1 << 10)
def _reads(code: CodeType, bound: int) -> bool:
    if not _FRAMES.isdisjoint(code.co_names):
        return True
    has = [bool(code.co_flags & flag) for flag in (0x04, 0x08)]  # *args, **kwargs
    last = code.co_argcount + code.co_kwonlyargcount + sum(has)
    shown = {*code.co_varnames[min(bound + 1, code.co_argcount) : last]}
    named = (x.argval for x in dis.get_instructions(code) if isinstance(x.argval, str | tuple))
    return any(not shown.isdisjoint((x,) if isinstance(x, str) else x) for x in named)


def may_act(called: Any) -> tuple[bool, bool]:
    """Whether a hook's own code can return something or write into tensors, and whether it decides
    what it does."""
    codes = [code for code, _ in map(_code_of, own_parts(called)) if code is not None]
    found = [*map(_acts, codes)]
    return any(acts for acts, _ in found), any(decides for _, decides in found)


@lru_cache(1 << 10)
def _acts(code: CodeType) -> tuple[bool, bool]:
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("SWAP", "COPY")]
    named = any(name.endswith("_") and not name.endswith("__") for name in code.co_names)
    slices = any(step.opname == "BUILD_SLICE" or _has_slice(step.argval) for step in steps)
    acts = named or any(
        (step.opname == "RETURN_CONST" and step.argval is not None)
        or (step.opname == "RETURN_VALUE" and (step.is_jump_target or not _is_none(last)))
        or (step.opname == "STORE_SUBSCR" and slices)
        or step.opname == "STORE_SLICE"
        or (step.opname == "STORE_ATTR" and step.argval == "data")
        or (_is_in_place(last) and step.opname.startswith(("STORE_FAST", "STORE_SUBSCR")))
        for last, step in pairwise(steps)
    )
    return acts, any("_IF_" in step.opname for step in steps)


def _has_slice(constant: Any) -> bool:
    """Python 3.14 makes slices of constants beforehand."""
    parts = constant if type(constant) is tuple else (constant,)
    return any(type(part) is slice for part in parts)


def _is_in_place(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_OP" and step.argrepr.endswith("=")


def _is_none(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and step.argval is None
