"""A forward of a few rows on a CPU as the list of what it computed, to be computed again.

Half of the time that a small model's forward takes is Python's: modules that call modules, and new
tensors and views for every operator. A :class:`Program` is what remains when they are left out. It
holds the operators of one forward in their order, each with tensors as it read and wrote then, so
that views and shapes need no second look; where these lie says :mod:`.results`. What changes from
forward to forward is given anew: token ids, positions, masks, and the cache. Operators that have
kernels are one compiled call, from one that has none to the next: linears, attention, norms,
copies, sums and products, and functions of one number of two bytes, which are looked up. Others
stay PyTorch's, in a Llama those that turn positions into angles.

The compiled call knows where the cache lies, and which slots each row is written to, rows packed
behind one another or not. Where attention is not the kernels', layers are written to and read by
their own methods, between two such calls.

A program computes what Python decided while it was recorded. So nothing is recorded that decides by
numbers in tensors, draws random numbers, or reads a tensor that is neither the model's own nor
given; and who repeats a program compares it first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from ...system.tensors import memory_of, same_bits, thread
from .results import Noted, Results
from .skinny import (
    CompiledOperators,
    GivenLayers,
    Matrix,
    RepeatedAttend,
    RepeatedElements,
    RepeatedLinears,
    RepeatedRows,
    RepeatedUpdate,
    can_compile,
    route_depth,
    set_route_depth,
    set_verifies,
    verifies,
)

aten = torch.ops.aten

Operator = Callable[[], Any]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], object]
"""Computes attention anew from keys, values and a mask, where its result lies."""
MakeAttend = Callable[[torch.Tensor, dict[str, Any], torch.Tensor], Attend]
"""Makes that of a query, options, and where the result lies."""
Way = Callable[[Any, Any, torch.Tensor], Operator]
"""Makes of an operator's arguments and keywords what computes its result anew where it lies."""

# What shows an operator's results to Python, or a shape that depends on them, or chance.
_TAGS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_READING = {
    *(torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__),
}
_COPYING = {aten.clone, aten._to_copy, aten.contiguous}
_EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_INDEXING = {aten.index, aten.index_put, aten.index_put_}


# Ways in which the weights of one forward may be overridden that are kept.
_MOST_PLANS = 8


class UnrecordableError(Exception):
    """Why a forward cannot be computed again from what was recorded of it."""


class _Overrides(threading.local):
    """What stands for weights of this thread's linear layers, by the identity of the parameter.

    Attributes:
        unseen: whether nothing of the model's sees what the layer that is computed returns.
    """

    by_id: Mapping[int, Any] = MappingProxyType({})
    unseen = False


overrides = _Overrides()


class Given:
    """What the next forward is given.

    Attributes:
        layers: of the cache.
        masks: of attention, in the order in which they were given when it was recorded.
        shown: what each layer has shown in this forward.
    """

    layers: Sequence[Any]
    masks: Sequence[torch.Tensor]

    def __init__(self) -> None:
        self.shown: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, i: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.shown[i] = self.layers[i].update(key, value)

    def attend(self, attend: Attend, i: int, mask: int | None) -> None:
        attend(*self.shown[i], None if mask is None else self.masks[mask])


class _Plan(NamedTuple):
    """Operators in their order, of which neighbours may be one; and what computes the logits behind
    them: the last layer, which is one of them, or the function that the program has for it."""

    operators: Sequence[Operator]
    last: RepeatedLinears | None


class Program:
    """A forward that was recorded.

    Args:
        inputs: tensors that it reads, by name.
        given: what else it is given.
        operators: in their order; of one that has `direct`, that is called where nothing stands for
            any of its `weights`.
        last: computes its logits behind them.
        last_layer: the operator that does the same, if it is a linear layer.
        nbytes: that its tensors take.
        packed: whether its tokens are those of several rows, which the compiled call alone knows.
        verifying: whether kernels computed all its rows, however many.

    Raises:
        UnrecordableError: they are, and layers are not written to and read in such a call.
    """

    def __init__(
        self,
        inputs: Mapping[str, torch.Tensor],
        given: Given,
        operators: Sequence[Operator],
        last: Callable[[], torch.Tensor],
        last_layer: Operator | None,
        nbytes: int,
        packed: bool,
        verifying: bool,
    ) -> None:
        self._inputs, self._given, self._operators = inputs, given, operators
        self._last, self._last_layer = last, last_layer
        whole = [*operators, *([] if last_layer is None else [last_layer])]
        self._weights = {i for operator in whole for i in getattr(operator, "weights", ())}
        on_cache = [one for one in operators if isinstance(one, (RepeatedUpdate, RepeatedAttend))]
        self._updates = [one for one in on_cache if isinstance(one, RepeatedUpdate)]
        numbers = [update.layer for update in self._updates]
        self._placed: GivenLayers | None = None
        # A layer that is written to twice has moved on in between.
        if all(map(can_compile, on_cache)) and self._updates and len({*numbers}) == len(numbers):
            self._placed = GivenLayers(numbers, self._updates[0].dtype)
        self._packed, self._verifying = packed, verifying
        if packed and self._placed is None:
            raise UnrecordableError("packed rows in layers that no kernel writes to")
        self._plans: dict[Any, _Plan] = {}
        self._variants: WeakKeyDictionary[Any, Variant] = WeakKeyDictionary()
        self.nbytes = nbytes

    @property
    def varies(self) -> bool:
        """Whether it has variants: it is of one token, what the output layer reads is known, and
        layers of the cache are written to in one compiled call."""
        one = self._placed is not None and self._updates[0].tokens == 1
        return one and self._last_layer is not None

    def variant(self, weights: PackedModel) -> Variant:
        """The same with other weights, up to what the output layer reads."""
        if weights not in self._variants:
            self._variants[weights] = self._made_variant(weights.by_id)
        return self._variants[weights]

    def _made_variant(self, packed: Mapping[int, PackedWeight]) -> Variant:
        assert self._placed is not None
        assert self._last_layer is not None
        operators = [x for one in self._operators for x in _with_packed(one, packed)]
        whole, x = _compiled(operators, self._placed), self._last_layer.x  # type: ignore[attr-defined]
        return Variant(self._inputs, whole, self._given, self._placed, x)

    def __call__(
        self,
        inputs: Mapping[str, torch.Tensor],
        layers: Sequence[Any],
        masks: Sequence[torch.Tensor],
        compared: bool = True,
    ) -> torch.Tensor:
        """The logits of a forward that is given these; unless they are compared with the model's,
        what stands for the last layer may know them and return nothing of the kind."""
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        self._given.layers, self._given.masks = layers, masks
        depth, verified = route_depth(), verifies()
        # What is not a kernel's of these is routed, too; nothing has to be exchanged for that.
        set_route_depth(depth + 1)
        set_verifies(verified or self._verifying)
        try:
            operators, last = self._plan(layers, masks)
            logits = None if last is None else last.new_out()
            for operator in operators:
                operator()
            if logits is None:
                overrides.unseen = not compared and self._last_layer is not None
                logits = self._last()
            return logits
        finally:
            overrides.unseen = False
            set_route_depth(depth)
            set_verifies(verified)
            self._given.layers = self._given.masks = ()
            self._given.shown.clear()
            if self._placed is not None:
                self._placed.close()

    def _plan(self, layers: Sequence[Any], masks: Sequence[torch.Tensor]) -> _Plan:
        """The operators of a forward in which other weights stand for some."""
        overridden = self._weights.intersection(overrides.by_id)
        placed = self._placed is not None and self._placed.open(
            layers, masks, self._updates[0].tokens
        )
        if self._packed and not placed:
            raise UnrecordableError("packed rows that are not written to one stretch of slots each")
        key = frozenset(overridden), placed
        if (plan := self._plans.get(key)) is None:
            if len(self._plans) == _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._planned(overridden, placed)
        return plan

    def _planned(self, overridden: set[int], placed: bool) -> _Plan:
        chosen = [_chosen(operator, overridden) for operator in self._operators]
        last = None if self._last_layer is None else _chosen(self._last_layer, overridden)
        if not isinstance(last, RepeatedLinears):
            last = None
        whole = chosen if last is None else [*chosen, last]
        return _Plan(_compiled(whole, self._placed if placed else None), last)


class PackedWeight(Protocol):
    """A weight in few bits, and what products read of it."""

    matrix: Matrix


class PackedModel(Protocol):
    """A model's weights in few bits.

    Attributes:
        by_id: what stands for each, by the identity of the parameter.
    """

    by_id: Mapping[int, PackedWeight]


class Variant:
    """A forward of one token that was recorded, with weights in few bits.

    Args:
        inputs, given: the program's.
        operators: up to what the output layer reads.
        placed: tells those on the cache what they are given.
        x: what the output layer would read.
    """

    def __init__(
        self,
        inputs: Mapping[str, torch.Tensor],
        operators: Sequence[Operator],
        given: Given,
        placed: GivenLayers,
        x: torch.Tensor,
    ) -> None:
        # Elements are set through NumPy in a tenth of the time.
        self._ids = inputs["input_ids"].numpy()
        self._positions = [x.numpy() for name, x in inputs.items() if name != "input_ids"]
        self._operators, self._given, self._placed, self._x = operators, given, placed, x

    def __call__(self, token_id: int, position: int, layers: Sequence[Any]) -> torch.Tensor | None:
        """[1, 1, depth], what the output layer would read, until the next call; None: layers are
        not to be written to as they were.

        Args:
            token_id, position: of the token, which sees all that the layers show.
            layers: of the cache.
        """
        if not self._placed.open(layers, (), 1):
            return None
        self._ids[...] = token_id
        for positions in self._positions:
            positions[...] = position
        self._given.layers = layers
        try:
            for operator in self._operators:
                operator()
        finally:
            self._given.layers = ()
            self._given.shown.clear()
            self._placed.close()
        return self._x


def _chosen(operator: Operator, overridden: Set[int]) -> Operator:
    """What computes an operator where others stand for these weights."""
    if overridden.isdisjoint(getattr(operator, "weights", ())):
        return getattr(operator, "direct", operator)
    return operator


def _with_packed(operator: Operator, packed: Mapping[int, PackedWeight]) -> Sequence[Operator]:
    """What computes an operator with weights in few bits."""
    if packed.keys().isdisjoint(getattr(operator, "weights", ())):
        return [getattr(operator, "direct", operator)]
    return operator.packed(packed) or [operator]  # type: ignore[attr-defined]


def _compiled(operators: Sequence[Operator], given: GivenLayers | None) -> list[Operator]:
    """The same, in which neighbours that can be are one.

    Args:
        given: tells operators on the cache what they are given; None: they ask the layers.
    """
    found: list[Operator] = []
    for compiles, group in groupby(operators, partial(_can_compile, given is not None)):
        neighbours = list(group)
        found += [CompiledOperators(neighbours, given)] if compiles else neighbours
    return found


def _can_compile(placed: bool, operator: Operator) -> bool:
    on_cache = isinstance(operator, (RepeatedUpdate, RepeatedAttend))
    return (placed or not on_cache) and can_compile(operator)


class _Watch(TorchFunctionMode):
    """Sees what operators do not show: numbers that Python takes from tensors."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _READING:
            raise UnrecordableError(f"{function.__name__} takes numbers from a tensor")
        return function(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Scope of a forward that is recorded.

    Args:
        model: whose parameters and buffers it may read.
        inputs: what it is given that is copied, by name.
        layers: of the cache.
        masks: that it may hand to attention.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, torch.Tensor],
        layers: Sequence[Any],
        masks: Sequence[torch.Tensor],
    ) -> None:
        super().__init__()
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._given = Given()
        self._layers, self._masks = {id(layer): i for i, layer in enumerate(layers)}, masks
        self._noted: list[Noted] = []
        own = [*model.parameters(), *model.buffers(), *self.inputs.values()]
        self._known = {memory_of(tensor) for tensor in own} - {0}
        # What operators have made: others may write to it. All is kept, so that no other tensor
        # gets its memory.
        self._made: dict[int, torch.Tensor] = {}
        # The last of the operators that write to each of these.
        self._writers: dict[int, int] = {}
        self._constants: list[torch.Tensor] = []
        self._shown: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        # What computes the last linear layer, at once and anew, and its place.
        self._linear: tuple[Callable[..., torch.Tensor], Any, int] | None = None
        # Linear layers by the rows that they read, with the place at which they are computed.
        self._together: dict[Any, tuple[Any, int]] = {}
        self._watch, self._packed, self._verifying = _Watch(), False, False

    def __enter__(self) -> Recorder:
        super().__enter__()
        self._watch.__enter__()
        thread.recorder = self
        return self

    def __exit__(self, *error: Any) -> None:
        thread.recorder = None
        self._watch.__exit__(*error)
        super().__exit__(*error)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Scope in which nothing is recorded."""
        thread.recorder = None
        try:
            with _pop_mode_temporarily(), _disable_current_modes():
                yield
        finally:
            thread.recorder = self

    def program(self, logits: torch.Tensor) -> Program:
        """What was recorded, of a forward with these logits.

        Raises:
            UnrecordableError: they are none of its results.
        """
        last = self._linear
        if last is not None and last[1].out is logits and last[2] == len(self._noted) - 1:
            compute, again, _ = last
            *given, out = again.layers[0]
            results = Results(self._noted[:-1], self._made, given)
            given = results.moved(given)
            final, layer = partial(compute, *given), again.moved([(*given, _without_memory(out))])
        else:
            self._require_known(logits)
            results = Results(self._noted, self._made, [logits])
            final, layer = results.moved(logits).clone, None
        operators = [x for one in results.operators() for x in getattr(one, "copies", [one])]
        parts = self.inputs, self._given, operators, final, layer, results.nbytes
        return Program(*parts, packed=self._packed, verifying=self._verifying)

    def linear(
        self,
        compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
        layers: Callable[[], Any],
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Note a linear layer that is computed by `compute`, and later by `layers()`, together with
        others of the same x: at the place of the first, if all that it reads is written by then."""
        self._verifying = self._verifying or verifies()
        given = [x, weight, *(() if bias is None else (bias,))]
        for tensor in given:
            self._require_known(tensor)
        with self.aside():
            out = compute(x, weight, bias)
            rows = x.data_ptr(), x.shape, x.stride()
            again, place = self._together.get(rows, (None, 0))
            written = max(self._writers.get(memory_of(tensor), -1) for tensor in given)
            if again is not None and written < place and again.add(x, weight, bias, out):
                self._note_tensors([out], place)
                self._linear = None
            else:
                again, place = layers(), len(self._noted)
                self._together[rows] = again, place
                again.add(x, weight, bias, out)
                self._linear = compute, again, place
                self._noted.append(Noted(again.moved, [again.layers]))
                self._note_tensors([out], place)
        return out

    def norm(
        self,
        module: torch.nn.Module,
        x: torch.Tensor,
        out: torch.Tensor,
        make: Callable[[torch.Tensor, torch.Tensor], Operator],
    ) -> None:
        """Note a norm that has given `out`; `make` makes of x and that what computes it anew."""
        self._require_known(x)
        for weight in module.parameters():
            self._require_known(weight)
        self._note(make, [x], out)

    def update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note what a layer of the cache is given, and give it."""
        i = self._layers.get(id(layer))
        if i is None:
            raise UnrecordableError("a layer of another cache")
        self._require_known(key)
        self._require_known(value)
        with self.aside():
            shown = layer.update(key, value)
        self._shown.append((i, *shown))
        self._noted.append(Noted(partial(RepeatedUpdate, self._given.update, i), [key, value]))
        return shown

    def attend(
        self,
        compute: Callable[..., tuple[torch.Tensor, MakeAttend]],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
        packed: bool = False,
    ) -> torch.Tensor:
        """Note attention over what a layer of the cache has shown; `compute` returns what it gives,
        and what makes what computes it anew. `packed`: tokens see the slots of their own rows."""
        self._packed = self._packed or packed
        for tensor in tree_iter((query, dict(options))):
            if isinstance(tensor, torch.Tensor):
                self._require_known(tensor)
        found = [i for i, k, v in self._shown if k is key and v is value]
        if not found:
            raise UnrecordableError("attention reads what no layer of the cache has shown")
        place = None
        if mask is not None:
            place = next((i for i, one in enumerate(self._masks) if _is_same(one, mask)), None)
            if place is None:
                raise UnrecordableError("attention gets a mask that the model has made")
        with self.aside():
            out, make = compute(query, key, value, mask)

        def attend(*moved: Any) -> Operator:
            return RepeatedAttend(self._given.attend, make(*moved), found[-1], place)

        self._note(attend, [query, dict(options)], out)
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._compute(func, args, kwargs or {})

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator, noted with what computes it anew."""
        packet = func.overloadpacket
        told = bool(_TAGS.intersection(func.tags)) and not _takes_places(packet, args)
        if told or func.namespace != "aten":
            raise UnrecordableError(f"{func} depends on more than its inputs' shapes")
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        if packet is not aten.lift_fresh:
            for tensor in given:
                self._require_known(tensor)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        out = func(*args, **kwargs)
        results = [x for x in tree_iter(out) if isinstance(x, torch.Tensor)]
        if packet is aten.lift_fresh:  # a constant, which was made of Python's numbers
            self._known.add(memory_of(results[0]))
            self._constants.append(results[0])
        elif packet in _EMPTY:
            self._note_tensors(results, -1)
        elif not {memory_of(x) for x in results} <= {memory_of(x) for x in given}:  # no view
            one = len(results) == 1
            way = _way(func, args, kwargs, results[0]) if one else partial(_computed, func)
            self._note(way, [args, kwargs], *results)
        return out

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that writes to a tensor which this forward has made."""
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = kwargs.get(argument.name, args[i] if i < len(args) else None)
                if memory_of(written) not in self._made:
                    raise UnrecordableError(f"{func} writes to what the forward did not make")
                self._writers[memory_of(written)] = len(self._noted)
        self._noted.append(Noted(partial(_called, func), [args, kwargs]))
        return func(*args, **kwargs)

    def _note(
        self, make: Callable[..., Operator], given: Sequence[Any], *results: torch.Tensor
    ) -> None:
        self._noted.append(Noted(make, given, results))
        self._note_tensors(results, len(self._noted) - 1)

    def _note_tensors(self, results: Sequence[torch.Tensor], place: int) -> None:
        """Note tensors that the operator of a place has made."""
        for tensor in results:
            self._made[memory_of(tensor)] = tensor
            self._writers[memory_of(tensor)] = place
            self._known.add(memory_of(tensor))

    def _require_known(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_cpu:
            raise UnrecordableError(f"{type(tensor).__name__} is no dense tensor of the host")
        if tensor.numel() and memory_of(tensor) not in self._known:
            raise UnrecordableError("an operator reads a tensor that is not the model's")


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.data_ptr() == other.data_ptr() and one.shape == other.shape
    return same and one.stride() == other.stride()


def _takes_places(packet: Any, args: Any) -> bool:
    """Whether an operator looks up places, as many as it is given."""
    if packet not in _INDEXING:
        return False
    places = [x for x in args[1] if x is not None]
    return all(x.dtype not in (torch.bool, torch.uint8) for x in places)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """One like another, of which nobody reads or writes an element."""
    like = torch.empty_like(tensor)
    like.untyped_storage().resize_(0)
    return like


def _called(func: Any, args: Any, kwargs: Any) -> Operator:
    return partial(func, *args, **kwargs)


def _computed(func: Any, args: Any, kwargs: Any, *results: torch.Tensor) -> Operator:
    def compute() -> None:
        again = [x for x in tree_iter(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
        for result, new in zip(results, again, strict=True):
            result.copy_(new)

    return compute


def _way(func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> Way:
    """The first way that gives an operator's result again, to the bit."""
    expected = result.clone()
    for way in _ways(func, kwargs, result):
        result.zero_()
        with suppress(ValueError, TypeError, RuntimeError):  # it is none of its kind
            way(args, kwargs, result)()
            if same_bits(result, expected):
                return way
    result.copy_(expected)
    return partial(_computed, func)


def _ways(func: Any, kwargs: Any, result: torch.Tensor) -> Iterator[Way]:
    """Ways that may give an operator's result again."""
    packet = func.overloadpacket
    name = packet.__name__
    if packet in _COPYING:
        yield lambda args, _, out: RepeatedElements("copy", args[:1], out)
        yield lambda args, _, out: partial(out.copy_, args[0])
    elif packet in (aten.mul, aten.add, aten.neg) and not kwargs:
        yield lambda args, _, out: RepeatedElements(name, args, out)
    elif packet is aten.cat:
        yield lambda args, _, out: _Joined(out, *args)
    elif packet is aten.embedding:
        yield lambda args, _, out: RepeatedRows(*args[:2], out)
    elif torch.Tag.pointwise in func.tags and result.element_size() == 2:
        yield partial(_from_table, func)
    function = getattr(torch, name, None) or getattr(torch._C._nn, name, None)
    if function is not None:
        yield lambda args, kwargs, out: partial(function, *args, **kwargs, out=out)


# What functions of one number give for every number of two bytes.
_tables: dict[Any, torch.Tensor] = {}


def _from_table(func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> Operator:
    """A function of one number of two bytes, looked up.

    Raises:
        ValueError: it is a function of something else, too.
    """
    first, *rest = args
    options = (*rest, *kwargs.items())
    if any(isinstance(x, torch.Tensor) for x in tree_iter(options)) or first.dtype != result.dtype:
        raise ValueError(f"{func}: expected a function of one number of {result.dtype}")
    key = func, repr(options), result.dtype
    if key not in _tables:
        numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(result.dtype)
        _tables[key] = func(numbers, *rest, **kwargs)
    return RepeatedElements("table", [first], result, _tables[key])


class _Joined:
    """Tensors behind one another along an axis.

    Attributes:
        copies: of each of them.
    """

    def __init__(self, result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> None:
        parts = result.split([tensor.shape[dim] for tensor in tensors], dim)
        pairs = zip(tensors, parts, strict=True)
        self.copies = [RepeatedElements("copy", (tensor,), part) for tensor, part in pairs]

    def __call__(self) -> None:
        for copy in self.copies:
            copy()
