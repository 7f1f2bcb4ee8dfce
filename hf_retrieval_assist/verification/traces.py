"""What forwards leave behind: in a model's own tensors, and in states of random numbers.

Plain decoding would not run the forwards of a test, so what they write is put back, and so are the
random numbers that they draw. Forwards over drafts that are rejected leave traces too, which nobody
takes back. So a model is decoded plainly where its forward draws, or where what one forward has
left decides what later ones compute. Models may count, or keep what no forward reads.

Memory is copied just before it is first written to, and what is computed from what a forward has
left is followed through all operators.
"""

from __future__ import annotations

import gc
import pickle
import random
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..host.callers_hooks import has_callers_hooks
from ..host.lookups import lookups_of
from ..host.model_state import own_attributes
from ..host.told import Teller, attributes_of
from ..host.transformers_private import hooks_of
from ..structures.modules import modules_of
from ..system.tensors import memory_of
from .reach import has_ropes

DRAWS = "its forward draws random numbers, and fewer forwards draw others"
MAY_DRAW = (
    "its forward may draw random numbers, as another thread does now; call the assistant's "
    "model_changed() while no other thread draws"
)
WRITES = "its forward writes to its own tensors what later forwards read"

_LEAST_REST = 0.1  # s in which others are seen to draw random numbers, at least

# What memory holds: what was computed from a text, or from what was moved before; and what a
# forward has left.
_HISTORY, _LEFT = 1, 2

# Operators that leave nothing of what they write over.
_OVERWRITING = ("aten::copy_", "aten::fill_", "aten::zero_")


class Traces(TorchDispatchMode):
    """Scopes in which forwards of a model are watched.

    Its own tensors are those that modules hold, directly, in containers and in objects beside them,
    but the frequencies of RoPE, of which :mod:`.reach` knows when they change.

    Attributes:
        wrote: whether a forward has written to these.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.wrote = False
        self._own: set[int] = set()
        self._stepping = False
        # Keys: addresses. Memory that ends leaves its own to other memory, so it is known of which
        # storages the rest is noted; those that would end before their memory are kept.
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._wrapped: list[torch.UntypedStorage] = []
        self._holds: dict[int, int] = {}
        self._moved: dict[int, int] = {}
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._drawn: dict[torch.Generator, torch.Tensor] = {}
        self._others: list[_Numbers] = []
        self._reads_left = False

    @property
    def why_plain(self) -> str | None:
        """Why other forwards than plain decoding's make another text; None: they do not."""
        if self._drawn or any(numbers.drawn for numbers in self._others):
            return DRAWS
        if any(numbers.shared for numbers in self._others) and _has_foreign_modules(self._model):
            return MAY_DRAW
        return WRITES if self._reads_left else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Scope of the test, at whose end tensors and random states are as before."""
        found = _own_objects(self._model)
        self._own, self._others = self._memories(found), _random_numbers(found)
        for module in filter(has_ropes, modules_of(self._model)):
            for buffer in module.buffers(recurse=False):
                self._copy(buffer)
        try:
            yield
        finally:
            for storage, copy in self._copies.values():
                storage.copy_(copy)
            for generator, state in self._drawn.items():
                generator.set_state(state)
            for numbers in self._others:
                if numbers.drawn:
                    numbers.set(numbers.before)

    @contextmanager
    def step(self, inputs: Iterable[Any]) -> Iterator[None]:
        """Scope of one of several forwards that are all alike, over these inputs."""
        self._own = self._memories(_own_objects(self._model))
        self._moved = {memory: left for memory, left in self._moved.items() if memory in self._own}
        for memory, left in self._moved.items():
            self._holds[memory] = _HISTORY | left
        for tensor in _tensors(inputs):
            self._holds[self._memory(tensor)] = _HISTORY
        self._stepping = True
        yield
        self._stepping = False
        for numbers in self._others:
            numbers.look()
        for memory in self._memories(_own_objects(self._model)) - self._own:
            self._move(memory)

    def judge(self, logits: torch.Tensor) -> None:
        """See whether a step's logits are computed from what an earlier one has left."""
        self._reads_left |= bool(self._holds.get(self._memory(logits), 0) & _LEFT)

    def _move(self, memory: int) -> None:
        """Note that a step has left in own memory what that holds now."""
        left = _LEFT if self._holds.get(memory, 0) & _HISTORY else 0
        self._moved[memory] = self._moved.get(memory, 0) | left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [x for x in _written(func, args, kwargs) if isinstance(x, torch.Tensor)]
        for tensor in written:
            self._save(tensor)
        compute = self._noting_draws if _may_draw(func, args, kwargs) else _call
        result = compute(func, args, kwargs)
        over = [x for x in written if _overwrites(func, x)]
        read = [x for x in _tensors((*args, *kwargs.values())) if not any(x is y for y in over)]
        holds = 0
        for tensor in read:
            holds |= self._holds.get(self._memory(tensor), 0)
        for tensor in written:
            self._write(self._memory(tensor), holds, any(tensor is x for x in over))
        if isinstance(result, bool | int | float):  # Python decides by it
            self._reads_left |= bool(holds & _LEFT)
        kept = [*map(memory_of, written)]
        for tensor in _tensors((result,)):
            if (memory := self._memory(tensor)) not in kept and (holds or memory in self._holds):
                self._holds[memory] = holds
        return result

    def _memories(self, objects: Iterable[Any]) -> set[int]:
        found = {self._memory(x) for x in objects if issubclass(type(x), torch.Tensor)}
        return found - {0}

    def _memory(self, tensor: torch.Tensor) -> int:
        """The address of a tensor's memory, 0 where it has none; what was noted there of memory
        that has ended is forgotten."""
        memory = memory_of(tensor)
        known = self._storages.get(memory)
        if memory and (known is None or known() is None):
            storage = tensor.untyped_storage()
            self._storages[memory] = weakref.ref(storage)
            if not storage.resizable():  # Memory of NumPy's, say, outlasts storages that wrap it.
                self._wrapped.append(storage)
            self._holds.pop(memory, None)
            self._moved.pop(memory, None)
            self._own.discard(memory)
        return memory

    def _save(self, tensor: torch.Tensor) -> None:
        """Copy own memory before it is written to."""
        if self._memory(tensor) in self._own:
            self.wrote = True
            self._copy(tensor)

    def _copy(self, tensor: torch.Tensor) -> None:
        memory = memory_of(tensor)
        if memory and memory not in self._copies:
            storage = tensor.untyped_storage()
            self._copies[memory] = storage, storage.clone()

    def _write(self, memory: int, holds: int, over: bool) -> None:
        own = memory in self._own and self._stepping
        # What is not written over decides what comes of it.
        self._holds[memory] = holds | (_HISTORY if own and not over else 0)
        if own:
            self._move(memory)

    def _noting_draws(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operator that draws, unless it has nothing to draw for."""
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
        generators = given or _default_generators()
        states = [generator.get_state() for generator in generators]
        result = func(*args, **kwargs)
        for generator, state in zip(generators, states, strict=True):
            if not torch.equal(state, generator.get_state()):
                self._drawn.setdefault(generator, state)
        return result


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _may_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws from a generator; attention does where it drops out."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0))


class _Numbers:
    """A source of random numbers beside PyTorch's.

    Other threads may draw from it, too, while forwards are looked at. Whatever moves in more than
    one forward is looked at while there is none: what moves then as well tells nothing of forwards.

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
        """A forward is done."""
        self._moves += self._has_moved()
        if self._moves > 1 and not (self.drawn or self.shared):
            self.shared = self._changes_by_itself()
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
    for found in objects:
        kind = type(found)
        if issubclass(kind, random.Random):
            pairs.append((found.getstate, found.setstate))
        elif issubclass(kind, np.random.RandomState):
            pairs.append((found.get_state, found.set_state))
        elif issubclass(kind, np.random.Generator):
            bits = found.bit_generator
            pairs.append((partial(getattr, bits, "state"), partial(setattr, bits, "state")))
    return [_Numbers(*pair) for pair in pairs]


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
        if not has_ropes(module):
            for held in (module._parameters, module._buffers, own_attributes(module)):
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


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Tensors among values and in containers of them."""
    return [value for value in tree_iter([*values]) if isinstance(value, torch.Tensor)]


@cache
def _writable(func: Any) -> tuple[list[tuple[int, str]], int | None]:
    """Arguments that an operator writes to, by place and name; and the place of what says whether,
    None where it always does."""
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    found = [(i, x.name) for i, x in enumerate(arguments) if x.alias_info and x.alias_info.is_write]
    # Normalisation by batches does not say of its statistics that it writes to them.
    names = [x.name for x in arguments]
    if not found and "running_mean" in names and "training" in names:
        running = [(names.index(name), name) for name in ("running_mean", "running_var")]
        return running, names.index("training")
    return found, None


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    found, when = _writable(func)
    if when is not None and not args[when]:
        return []
    return _tensors(args[i] if i < len(args) else kwargs.get(name) for i, name in found)


def _overwrites(func: Any, tensor: torch.Tensor) -> bool:
    """Whether nothing of a tensor's memory stays as it was."""
    whole = tensor.nbytes == tensor.untyped_storage().nbytes()
    return whole and func._schema.name in _OVERWRITING
