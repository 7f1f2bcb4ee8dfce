"""What hooks call and keep, by which they are told from others, and what their code can do.

Objects are told by themselves and never by their number alone, which another may have later, nor by
what they say of themselves. What a hook reads is looked for in its closure, the globals that it
names, its object's attributes and what was bound to it; not in iterators or other modules.
"""

from __future__ import annotations

import dis
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import chain, pairwise
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from .told import place_of, reference_to

PACKAGE = __name__.partition(".")[0]
LIBRARIES = frozenset(
    ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", PACKAGE)
)

Place = tuple[Hashable, ...]
State = dict[Place, Hashable]
"""What a hook calls and keeps, by where that was found."""

_NUMBERS = (bool, int, float, complex)
_VALUES = (*_NUMBERS, str, bytes, type(None))
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SERIES = (list, tuple, deque)
_HELD = (*_VALUES, *_MAPPINGS, *_SERIES)

# What is looked at of one hook; more than that is never told to be what it was.
_MOST = 1 << 12

# By which a function gets at what its code does not name.
_FRAMES = frozenset(("locals", "vars", "eval", "exec", "_getframe", "currentframe"))


class Identity:
    """Equal to others of the same object, and to none of an object that gets its address later.

    It holds the object only where that cannot be referred to weakly.
    """

    __slots__ = ("_address", "_of", "_place")

    def __init__(self, thing: Any):
        self._address = id(thing)
        self._place = place_of(thing) if issubclass(type(thing), torch.Tensor) else None
        self._of: Any
        try:
            self._of = reference_to(thing)
        except TypeError:
            self._of = lambda: thing

    def __hash__(self) -> int:
        return self._address

    def __eq__(self, other: object) -> bool:
        thing = self._of()
        return (
            isinstance(other, Identity)
            and thing is not None
            and thing is other._of()
            and self._place == other._place
        )


def written_in(function: Any) -> str:
    """The package that a function was written in, whatever name what wraps it has taken over."""
    while isinstance(function, partial):
        function = function.func
    written = getattr(getattr(function, "__func__", function), "__globals__", {})
    name: str = written.get("__name__", type(function).__module__)
    return name.partition(".")[0]


def own_parts(called: Any) -> list[Any]:
    """Of a function and what it wraps, as `torch.no_grad()` does, what no library has written."""
    found = [called]
    while isinstance(called, partial | MethodType) or hasattr(called, "__wrapped__"):
        if isinstance(called, partial):
            called = called.func
            continue
        called = called.__func__ if isinstance(called, MethodType) else called.__wrapped__
        found.append(called)
    return [part for part in found if written_in(part) not in LIBRARIES]


def state_of(called: Any) -> State:
    """What a hook calls and keeps: values by themselves, everything else by its identity, tensors
    with what tells that they were written to."""
    found: State = {}
    seen: set[int] = set()
    waiting: deque[tuple[Place, Any]] = deque([((), called)])
    while waiting and len(found) < _MOST:
        place, value = waiting.popleft()
        found[place], parts = _told(value)
        if id(value) not in seen:
            seen.add(id(value))
            waiting.extend(((*place, name), part) for name, part in parts)
    if waiting:
        found["more",] = Identity(object())
    return found


def _told(value: Any) -> tuple[Hashable, Iterable[tuple[Hashable, Any]]]:
    """A value's own mark, and its parts by name."""
    kind = type(value)
    if kind in _VALUES:
        return (kind, value.hex() if kind is float else value), ()
    if isinstance(value, torch.Tensor):
        return _told_tensor(value), ()
    if kind in _SERIES:
        return (kind, len(value)), enumerate(value)
    if kind in _MAPPINGS:
        return (kind, len(value)), [(_name(name), part) for name, part in value.items()]
    if kind in (set, frozenset):
        return (kind, len(value), frozenset(map(_name, value))), ()
    if kind is partial:
        return (kind,), enumerate((value.func, value.args, value.keywords))
    if kind is MethodType:
        return (kind,), enumerate((value.__func__, value.__self__))
    if kind is FunctionType and written_in(value) not in LIBRARIES:
        return Identity(value.__code__), _kept(value)
    if hasattr(kind, "__next__"):  # nobody can tell how far an iterator has got
        return Identity(object()), ()
    if kind is SimpleNamespace or _is_own(value if isinstance(value, type) else kind):
        return Identity(value), _attributes(value)
    return Identity(value), ()


def _told_tensor(tensor: torch.Tensor) -> Hashable:
    if tensor.is_cpu and tensor.numel() == 1 and tensor.layout is torch.strided:
        return float, Identity(tensor), repr(tensor.tolist())
    return torch.Tensor, Identity(tensor), None if tensor.is_inference() else tensor._version


def _name(name: Any) -> Hashable:
    return (type(name), name) if type(name) in _VALUES else Identity(name)


def _kept(function: FunctionType) -> Iterator[tuple[Hashable, Any]]:
    yield "defaults", function.__defaults__
    yield "keywords", function.__kwdefaults__
    yield "attributes", vars(function)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield ("cell", name), cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield ("global", name), function.__globals__[name]


def _is_own(kind: type) -> bool:
    """Whether a class is a caller's: of others it is not known which attributes are of use."""
    return kind.__module__.partition(".")[0] not in LIBRARIES | {"builtins", "numpy", "logging"}


def _attributes(value: Any) -> Iterator[tuple[Hashable, Any]]:
    held = getattr(value, "__dict__", {})
    if isinstance(value, type):
        yield from ((name, part) for name, part in held.items() if type(part) in _HELD)
        return
    yield "class", type(value)
    yield from held.items()
    slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    for name in chain.from_iterable((s,) if isinstance(s, str) else s for s in slots):
        if hasattr(value, name):
            yield name, getattr(value, name)


def counts(before: State, after: State) -> bool:
    """Whether a number that a hook keeps has become another one."""
    return any(
        isinstance(told, tuple)
        and told[0] in _NUMBERS
        and isinstance(now := after.get(place), tuple)
        and now[0] in _NUMBERS
        and now != told
        for place, told in before.items()
    )


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
    slices = any(step.opname in ("BUILD_SLICE", "STORE_SLICE") for step in steps)
    acts = named or any(
        (step.opname == "RETURN_CONST" and step.argval is not None)
        or (step.opname == "RETURN_VALUE" and (step.is_jump_target or not _is_none(last)))
        or (step.opname == "STORE_SUBSCR" and slices)
        or (step.opname == "STORE_ATTR" and step.argval == "data")
        or (_is_in_place(last) and step.opname.startswith(("STORE_FAST", "STORE_SUBSCR")))
        for last, step in pairwise(steps)
    )
    return acts, any("_IF_" in step.opname for step in steps)


def _is_in_place(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_OP" and step.argrepr.endswith("=")


def _is_none(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and step.argval is None
