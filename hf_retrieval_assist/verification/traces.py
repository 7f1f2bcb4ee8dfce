"""What forwards leave behind: in tensors, and in states of random numbers.

Plain decoding would not run the forwards of a test, so what they write is put back, and so are the
random numbers that they draw. Forwards over drafts that are rejected leave traces too, which nobody
takes back. So a model is decoded plainly where its forward draws, or where a text gets other logits
once other forwards have run. Models may count, or keep what no forward reads.

Memory is compared before and after, and no mode of PyTorch's is entered: compilers see these.
"""

from __future__ import annotations

import gc
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..host.transformers_private import hooks_of
from ..host.written import is_known
from ..structures.modules import INTERNAL, PLAIN, modules_of, own_attributes
from ..system.tensors import memory_of

DRAWS = "its forward draws random numbers, and fewer forwards draw others"
MAY_DRAW = (
    "its forward may draw random numbers, as another thread does now; call the assistant's "
    "model_changed() while no other thread draws"
)
REMEMBERS = "its forward leaves behind what later forwards compute by"

_LEAST_REST = 0.1  # s in which others are seen to draw random numbers, at least

# Bytes of memory that is put back, at most: of floating-point numbers, and of others, among which
# weights in few bits are.
_MOST_FLOATING, _MOST_OTHERS = 1 << 24, 1 << 16


class Traces:
    """What forwards of a model leave while it is looked at.

    Its own tensors are those that modules and hooks hold, directly, in containers and in objects
    beside them; parameters count where a caller has written the module.

    Args:
        model: to look at.
        foreign: whether code that no known library has written runs in its forwards.
    """

    def __init__(self, model: nn.Module, foreign: bool = False) -> None:
        self._model, self._foreign = model, foreign
        self._numbers: list[_Numbers] = []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Scope of the test, at whose end tensors and random states are as before, and modules hold
        the objects that they have held, directly and in containers."""
        found = _own_objects(self._model)
        held = [(table, _members(table)) for table in _tables(self._model)]
        self._numbers = _random_numbers(found)
        memories = [*_memories(found)]
        copies = [memory.clone() for memory in memories]
        try:
            yield
        finally:
            for table, members in held:
                if not _are_same(members, _members(table)):
                    _restore(table, members)
            for memory, copy in zip(memories, copies, strict=True):
                if not torch.equal(memory, copy):
                    memory.copy_(copy)
            for numbers in self._numbers:
                if numbers.drawn:
                    numbers.set(numbers.before)

    def look(self) -> None:
        """See which random numbers were drawn since the last look, as a text was decoded."""
        for numbers in self._numbers:
            numbers.look()

    @property
    def why_plain(self) -> str | None:
        """Why fewer forwards draw other numbers, as far as two texts tell; None: none is drawn."""
        if any(numbers.drawn for numbers in self._numbers):
            return DRAWS
        shared = any(numbers.shared for numbers in self._numbers)
        return MAY_DRAW if shared and self._foreign else None


class _Numbers:
    """A source of random numbers.

    Other threads may draw from it, too, while forwards are looked at. Whatever moves in both texts
    is looked at while there is no forward: what moves then as well tells nothing of forwards.

    Args:
        get, put: its state, plain data.

    Attributes:
        before: the state as the test begins.
        drawn: whether forwards draw from it.
        shared: whether another thread does, so that nobody knows of forwards.
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._get, self.set = get, put
        self.before, self.drawn, self.shared = get(), False, False
        self._began, self._last, self._moves = time.monotonic(), pickle.dumps(self.before), 0

    def look(self) -> None:
        """A text was decoded."""
        self._moves += self._has_moved()
        alone = threading.active_count() == 1
        if self._moves > (0 if alone else 1) and not (self.drawn or self.shared):
            self.shared = not alone and self._changes_by_itself()
            self.drawn = not self.shared

    def _has_moved(self) -> bool:
        last, self._last = self._last, pickle.dumps(self._get())
        return self._last != last

    def _changes_by_itself(self) -> bool:
        """Whether it moves while this thread waits, for longer than it took to move twice."""
        ends = time.monotonic() + max(_LEAST_REST, 2 * (time.monotonic() - self._began))
        while time.monotonic() < ends:
            time.sleep(_LEAST_REST / 10)
            if self._has_moved():
                return True
        return False


def _random_numbers(objects: Iterable[Any]) -> list[_Numbers]:
    """Those of the process, and those among some objects."""
    pairs: list[tuple[Any, Any]] = [(random.getstate, random.setstate)]
    pairs.append((np.random.get_state, np.random.set_state))
    generators = _default_generators()
    for found in objects:
        kind = type(found)
        if issubclass(kind, torch.Generator):
            generators.append(found)
        elif issubclass(kind, random.Random):
            pairs.append((found.getstate, found.setstate))
        elif issubclass(kind, np.random.RandomState):
            pairs.append((found.get_state, found.set_state))
        elif issubclass(kind, np.random.Generator):
            bits = found.bit_generator
            pairs.append((partial(getattr, bits, "state"), partial(setattr, bits, "state")))
    pairs += [(partial(_bytes_of, each), partial(_set_bytes, each)) for each in generators]
    return [_Numbers(*pair) for pair in pairs]


def _bytes_of(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _set_bytes(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _default_generators() -> list[torch.Generator]:
    """PyTorch's, of every device in use."""
    found = [torch.default_generator]
    for devices in (torch.cuda, torch.xpu):
        if devices.is_initialized():
            found += devices.default_generators
    return found


def _own_objects(model: nn.Module) -> list[Any]:
    """What modules and their hooks hold."""
    modules = modules_of(model)
    found = [hook.called for hook in hooks_of(*modules)]
    for module in modules:
        parameters = {} if is_known(type(module).__module__) else module._parameters
        for held in (parameters, module._buffers, own_attributes(module, INTERNAL)):
            found += held.values()
    found = _with_members(found)
    return [*found, *(beside for value in found for beside in _beside(value))]


def _with_members(values: Iterable[Any]) -> list[Any]:
    """Objects, and those in containers among them, each once."""
    found: dict[int, Any] = {}
    waiting = [*values]
    for value in waiting:  # which become more
        if type(value) not in PLAIN and id(value) not in found:
            found[id(value)] = value
            waiting += _members(value)
    return [*found.values()]


def _beside(value: Any) -> Sequence[Any]:
    """What an object holds that is no module, or a function of the scope around it."""
    if type(value) is FunctionType:
        return gc.get_referents(*(value.__closure__ or ()))
    if issubclass(type(value), (type, nn.Module, torch.Tensor)):
        return ()
    try:
        return [*object.__getattribute__(value, "__dict__").values()]
    except AttributeError:
        return ()


def _tables(model: nn.Module) -> Iterator[Any]:
    """What holds something of a model and can be changed: modules' own tables, and containers."""
    for module in modules_of(model):
        own = vars(module)
        yield from (own, own["_buffers"], own["_parameters"], own["_modules"])
        for value in _with_members(own_attributes(module, INTERNAL).values()):
            if issubclass(type(value), (dict, list, set)):
                yield value


def _members(value: Any) -> list[Any]:
    """What is in a container, of tables names and values in turns; nothing of what is none."""
    kind = type(value)
    if issubclass(kind, dict):
        return [part for pair in dict.items(value) for part in pair]
    for base in (list, tuple, set, frozenset):
        if issubclass(kind, base):
            return [*base.__iter__(value)]
    return []


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _restore(table: Any, members: list[Any]) -> None:
    """Let a container hold what it has held."""
    if issubclass(type(table), list):
        list.__setitem__(table, slice(None), members)
    elif issubclass(type(table), set):
        set.clear(table)
        set.update(table, members)
    else:
        before = dict(zip(members[::2], members[1::2], strict=True))
        for name in [name for name in dict.keys(table) if name not in before]:
            dict.__delitem__(table, name)
        dict.update(table, before)


def _memories(objects: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The memory of tensors and arrays among objects, each once, as bytes."""
    seen = {0}
    for found in objects:
        if issubclass(type(found), np.ndarray):
            if found.flags.writeable and found.flags.c_contiguous and not found.dtype.hasobject:
                size, floats = found.nbytes, found.dtype.kind in "fc"
                if size <= _most_bytes(floats):
                    yield torch.from_numpy(found.reshape(-1).view(np.uint8))
        elif issubclass(type(found), torch.Tensor) and memory_of(found) not in seen:
            storage = found.untyped_storage()
            if storage.nbytes() <= _most_bytes(found.is_floating_point()):
                seen.add(storage.data_ptr())
                yield torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _most_bytes(floats: bool) -> int:
    return _MOST_FLOATING if floats else _MOST_OTHERS
