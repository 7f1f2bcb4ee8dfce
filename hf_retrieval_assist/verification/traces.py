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
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..host.callers_hooks import has_callers_hooks
from ..host.hook_state import LIBRARIES
from ..host.lookups import lookups_of
from ..host.model_state import own_attributes
from ..host.told import Teller, attributes_of
from ..host.transformers_private import hooks_of
from ..structures.modules import modules_of
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
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._numbers: list[_Numbers] = []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Scope of the test, at whose end tensors and random states are as before."""
        found = _own_objects(self._model)
        self._numbers = _random_numbers(found)
        memories = [*_memories(found)]
        copies = [memory.clone() for memory in memories]
        try:
            yield
        finally:
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
        return MAY_DRAW if shared and _has_foreign_modules(self._model) else None


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


def _has_foreign_modules(model: nn.Module) -> bool:
    """Whether code that no library has written runs in a model's forwards."""
    return lookups_of(model).strange is not None or has_callers_hooks(model)


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
    modules, teller = modules_of(model), Teller()
    for hook in hooks_of(*modules):
        teller.tell(hook.called)
    for module in modules:
        foreign = type(module).__module__.partition(".")[0] not in LIBRARIES
        parameters = module._parameters if foreign else {}
        for held in (parameters, module._buffers, own_attributes(module)):
            for value in held.values():
                teller.tell(value)
    teller.rest()
    return [*teller.values, *(beside for value in teller.values for beside in _beside(value))]


def _beside(value: Any) -> Sequence[Any]:
    """What an object holds that is no module, or a function of the scope around it."""
    if type(value) is FunctionType:
        return gc.get_referents(*(value.__closure__ or ()))
    apart = issubclass(type(value), (type, nn.Module, torch.Tensor))
    return () if apart else [*attributes_of(value).values()]


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
