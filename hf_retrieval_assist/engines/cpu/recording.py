"""Forwards are recorded operator by operator; see :mod:`~.program` for what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from ...system.tensors import memory_of, same_bits, thread
from .program import (
    Operator,
    OutputLayer,
    Program,
    RepeatedLayers,
    UnrecordableError,
    takes_kernel,
)
from .results import Noted, Results
from .skinny import (
    RepeatedAttend,
    RepeatedElements,
    RepeatedUpdate,
    verifies,
)

aten = torch.ops.aten

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
        self._layers, self._masks = {id(layer): i for i, layer in enumerate(layers)}, masks
        self._paged = any(hasattr(type(layer), "pages") for layer in layers)
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
        # Linear layers by the rows that they read, with the place at which they are computed.
        self._together: dict[Any, tuple[RepeatedLayers, int]] = {}
        self._watch, self._verifying = _Watch(), False

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
        last, noted, output = self._last_linears(), self._noted, None
        if last is not None and last.layers[0][3] is logits:
            x, weight, bias, _ = last.layers[0]
            noted, output = noted[:-1], OutputLayer(weight, bias)
        else:
            self._require_known(logits)
            x = logits
        results = Results(noted, self._made, [x, output])
        operators = [x for one in results.operators() for x in getattr(one, "copies", [one])]
        if output is not None:  # whose weight may have been computed, too
            output = OutputLayer(*map(results.moved, output))
        made = self.inputs, operators, results.moved(x), output
        return Program(*made, results.nbytes, self._verifying)

    def _last_linears(self) -> RepeatedLayers | None:
        """The layers that the last operator computes, if it computes one."""
        found = [again for again, place in self._together.values() if place == len(self._noted) - 1]
        return found[0] if found and len(found[0].layers) == 1 else None

    def linear(
        self,
        compute: Callable[..., torch.Tensor],
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Note a linear layer, `compute` of x, weight and bias. Kernels compute it anew with others
        of the same x: at the place of the first, if all that it reads is written by then."""
        self._verifying = self._verifying or verifies()
        given = [x, weight, *(() if bias is None else (bias,))]
        for tensor in given:
            self._require_known(tensor)
        with self.aside():
            out = compute(x, weight, bias)
            layer = x, weight, bias, out
            if not takes_kernel(*layer):
                self._note(partial(_computed, compute), [(x, weight, bias), {}], out)
                return out
            rows = x.data_ptr(), x.shape, x.stride()
            again, place = self._together.get(rows, (None, 0))
            written = max(self._writers.get(memory_of(tensor), -1) for tensor in given)
            if again is None or written >= place or not again.add(layer):
                again, place = RepeatedLayers([layer]), len(self._noted)
                self._together[rows] = again, place
                self._noted.append(Noted(RepeatedLayers, [again.layers]))
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
        self._noted.append(Noted(partial(RepeatedUpdate, i, self._paged), [key, value]))
        return shown

    def attend(
        self,
        compute: Callable[..., torch.Tensor | None],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        """Note attention over what a layer of the cache has shown; `compute` returns what the
        kernel gives; None: another computes it."""
        self._require_known(query)
        found = [i for i, k, v in self._shown if k is key and v is value]
        if not found:
            raise UnrecordableError("attention reads what no layer of the cache has shown")
        if self._paged and found[-1] != self._shown[-1][0]:
            raise UnrecordableError(
                "attention reads pages in whose place another layer shows its own"
            )
        place = None
        if mask is not None:
            place = next((i for i, one in enumerate(self._masks) if _is_same(one, mask)), None)
            if place is None:
                raise UnrecordableError("attention gets a mask that the model has made")
        with self.aside():
            out = compute(query, key, value, mask)
        if out is None:
            raise UnrecordableError("attention that is not the kernel's")

        def attend(query: torch.Tensor, out: torch.Tensor) -> Operator:
            return RepeatedAttend(query, scale, out, found[-1], place)

        self._note(attend, [query], out)
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
        yield _looked_up
    elif torch.Tag.pointwise in func.tags and result.element_size() == 2:
        yield partial(_from_table, func)
    function = getattr(torch, name, None) or getattr(torch._C._nn, name, None)
    if function is not None:
        yield lambda args, kwargs, out: partial(function, *args, **kwargs, out=out)


def _looked_up(args: Any, kwargs: Any, result: torch.Tensor) -> Operator:
    """Rows of a matrix."""
    matrix, ids = args[:2]
    return partial(
        torch.index_select, matrix, 0, ids.view(-1), out=result.view(-1, matrix.shape[1])
    )


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
