"""Forwards of a few tokens on a CPU, repeated from programs that are kept from call to call.

See :mod:`~.recording`. A kind of forward is recorded once it has been computed so often
that recording would have paid, and compared, to the bit, before it is repeated: when it is recorded
and whenever the cache's length passes a power of two, at which what a model decides by it may
change.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from ...cache.kv_cache import SlotCache
from ...cache.slot_layers import SlotLayer
from ...host.callers_hooks import callers_global_hooks
from ...host.hook_state import LIBRARIES, written_in
from ...host.lookups import ForwardLookups
from ...host.transformers_private import CACHE, attention_of, hooks_of
from ...system import changes
from ...system.locks import Lock
from ...system.log import get_logger
from ...system.memory import SHORTAGES
from ...system.modules import modules_of
from ...system.tensors import same_bits
from ...verification.recorded_state import recorded_state
from .linear import MAX_ROWS
from .recording import Program, Recorder, UnrecordableError

logger = get_logger(__name__)

# Computed forwards of a kind before one is recorded. Recording a small model's takes as long as
# repeating it saves in eight; programs outlive calls.
PATIENCE = 4

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Tokens that forwards of one row are filled up to, so that there are few kinds of them."""

# Of one model, all programs together.
MOST_BYTES = 256 << 20

# Programs of a model that wait for calls: of so many calls at a time.
_MOST_IDLE = 2

# Calls in which a model is left alone that was found unrecordable: looking at its state takes
# milliseconds.
_REST = 32

_INPUTS = ("input_ids", "position_ids", "cache_position")


@dataclass
class _Kind:
    """Forwards of one shape.

    Attributes:
        uses: how many were computed.
        program: what repeats them.
        recorded_at: the cache's length when it was recorded, of which it may have made a constant.
        output: the class of their outputs.
        lengths: of the cache, in bits, at which the program has given what the model gave.
    """

    uses: int = 0
    program: Program | None = None
    recorded_at: int = 0
    output: Any = None
    lengths: set[int] = field(default_factory=set)


class _Asked(NamedTuple):
    """A forward that is wanted: the model's arguments, and of these what a program is given."""

    arguments: dict[str, Any]
    inputs: Mapping[str, torch.Tensor]
    masks: list[torch.Tensor]


class _Programs:
    """Those of a model in one state.

    Attributes:
        trusted: whether some give what the model gives.
        fault: why no more are recorded.
    """

    def __init__(self, state: Any, lookups: ForwardLookups) -> None:
        self.state, self.lookups = state, lookups
        self.said = changes.said()
        self.kinds: dict[Hashable, _Kind] = {}
        self.trusted = False
        self.fault: str | None = None

    def fit(self, state: Any) -> bool:
        """Whether they repeat what a model in this state computes, whose names lead where they led
        when these were recorded."""
        known = self.state == state and self.said == changes.said()
        return known and self.lookups.changed() is None

    @property
    def nbytes(self) -> int:
        return sum(kind.program.nbytes for kind in self.kinds.values() if kind.program)


_lock = Lock()
_idle: weakref.WeakKeyDictionary[Any, list[_Programs]] = weakref.WeakKeyDictionary()
_resting: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def can_repeat(model: Any, cache: Any, lookups: ForwardLookups) -> bool:
    """Whether forwards over a cache may be repeated, as far as can be seen: attention is what the
    kernels compute, the cache is one of plain keys and values on the CPU, and nothing of the model
    is called but modules and functions of libraries, without hooks."""
    layers = cache.layers if type(cache) is SlotCache else []
    if not layers or attention_of(model.config) != "sdpa" or not layers[0].keys.is_cpu:
        return False
    if rest := _resting.get(model, 0):
        _resting[model] = rest - 1
        return False
    modules = modules_of(model)
    kinds: set[Any] = set(map(type, modules))
    return (
        all(type(layer) is SlotLayer and layer.store.block_refs for layer in layers)
        and all(written_in(kind.forward) in LIBRARIES for kind in kinds)
        and lookups.strange is None
        and not (callers_global_hooks() or hooks_of(*modules))
    )


class RepeatedForward:
    """Stands for a model in the forwards of one call, and repeats those that it can.

    Args:
        model: that is called otherwise.
        cache: the call's.
        arguments: of the call.
        lookups: of the model's forward; nothing is repeated once one of them leads elsewhere.

    Attributes:
        repeats: whether some forwards were repeated when the call began: a step then takes as long
            as a repeated one, else as long as a computed one.
        typical: whether the last forward was one of these.
        repeated, recordings: forwards that were repeated, and programs that were made.
    """

    def __init__(
        self,
        model: Any,
        cache: SlotCache,
        arguments: Mapping[str, Any],
        lookups: ForwardLookups,
    ) -> None:
        self._model, self._cache, self._arguments = model, cache, arguments
        self._handles = RemovableHandle.next_id
        self.typical = True
        self.repeated = self.recordings = 0
        # Programs know where weights lie: they stay there until the end of the call, whoever gives
        # the model others meanwhile.
        self._weights = [
            _memory_kept(tensor)
            for module in modules_of(model)
            for tensors in (module._parameters, module._buffers)
            for tensor in tensors.values()
            if tensor is not None
        ]
        state = recorded_state(model, arguments, torch.device("cpu"))
        self._programs: _Programs | None = None
        if state is not None:
            with _lock:
                idle = _idle.setdefault(model, [])
                idle[:] = [programs for programs in idle if programs.fit(state)]
                self._programs = idle.pop() if idle else _Programs(state, lookups)
        self.repeats = self._programs is not None and self._programs.trusted

    @property
    def widths(self) -> tuple[int, ...]:
        """What forwards of one row are filled up to."""
        programs = self._programs
        hopes = programs is not None and (programs.trusted or programs.fault is None)
        return WIDTHS if hopes else ()

    def __call__(self, **given: Any) -> Any:
        """A forward, as the model's own."""
        self.typical = True
        if RemovableHandle.next_id != self._handles:  # somebody has registered a hook
            self._check()
        if self._programs is not None and self._programs.lookups.changed() is not None:
            self._programs = None
        if self._programs is None:
            return self._model(**given)
        inputs = {name: given[name] for name in _INPUTS if given.get(name) is not None}
        tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
        cache = getattr(given.get(CACHE), "layers", None)
        if (
            not {*tensors} <= {*inputs, "attention_mask"}
            or cache is not self._cache.layers
            or inputs["input_ids"].numel() > MAX_ROWS
        ):
            return self._model(**given)
        mask = given.get("attention_mask")
        masks = list(mask.values()) if isinstance(mask, dict) else [mask]
        key = (
            tuple([(name, tensor.shape) for name, tensor in inputs.items()]),
            tuple([one is None for one in masks]),
            torch.get_num_threads(),
        )
        kind = self._programs.kinds.setdefault(key, _Kind())
        asked = _Asked(given, inputs, [one for one in masks if one is not None])
        return self._run(kind, asked)

    def _run(self, kind: _Kind, asked: _Asked) -> Any:
        programs = self._programs
        assert programs is not None
        layers, longest = self._cache.layers, self._cache.slots.longest
        length = longest.bit_length()
        if kind.program is not None and length in kind.lengths:
            self.repeated += 1
            self.typical = self.repeats
            return kind.output(logits=kind.program(asked.inputs, layers, asked.masks))
        kind.uses += 1
        if kind.program is None and (kind.uses <= PATIENCE or programs.fault is not None):
            self.typical = not self.repeats
            return self._model(**asked.arguments)
        self.typical = False
        if kind.program is not None and longest == kind.recorded_at:
            return self._model(**asked.arguments)
        lengths = [layer.get_seq_length() for layer in layers]
        try:
            if kind.program is None:
                return self._record(kind, asked)
            again = kind.program(asked.inputs, layers, asked.masks)
        except SHORTAGES:
            kind.program = again = None
        except Exception as error:  # whatever a forward does that cannot be recorded
            self._refuse(kind, str(error))
            again = None
        for layer, before in zip(layers, lengths, strict=True):
            layer.set_length(before)
        outputs = self._model(**asked.arguments)
        if again is not None:
            if same_bits(again, outputs.logits):
                kind.lengths.add(length)
                programs.trusted = True
            else:
                self._refuse(kind, "repeated logits are not the model's")
        return outputs

    def _record(self, kind: _Kind, asked: _Asked) -> Any:
        assert self._programs is not None
        recorder = Recorder(self._model, asked.inputs, self._cache.layers, asked.masks)
        with recorder:
            outputs = self._model(**asked.arguments | recorder.inputs)
        if strange := {name for name, x in outputs.items() if x is not None} - {"logits", CACHE}:
            raise UnrecordableError(f"a forward that returns {sorted(strange)}")
        program = recorder.program(outputs.logits)
        if program.nbytes + self._programs.nbytes > MOST_BYTES:
            raise UnrecordableError("its programs take too much memory")
        kind.program, kind.output = program, type(outputs)
        kind.recorded_at = self._cache.slots.longest
        self.recordings += 1
        return outputs

    def _refuse(self, kind: _Kind, fault: str) -> None:
        assert self._programs is not None
        kind.program, self._programs.fault = None, fault
        logger.info("%s: its forwards are not recorded (%s)", type(self._model).__name__, fault)

    def _check(self) -> None:
        """Repeat nothing more where the model is no longer as it was."""
        self._handles = RemovableHandle.next_id
        if self._programs is not None:
            state = recorded_state(self._model, self._arguments, torch.device("cpu"))
            if not self._programs.fit(state):
                self._programs = None

    def give_back(self) -> None:
        """Leave what was recorded to the model's next calls, if the model is as it was."""
        if self.recordings:
            self._check()
        programs, self._programs = self._programs, None
        self._weights.clear()
        if programs is not None:
            if programs.fault is not None and not programs.trusted:
                _resting[self._model] = _REST
            with _lock:
                idle = _idle.setdefault(self._model, [])
                idle.append(programs)
                del idle[:-_MOST_IDLE]


def _memory_kept(tensor: torch.Tensor) -> torch.Tensor:
    """What keeps a tensor's memory where it is."""
    try:
        return tensor.detach()
    except Exception:  # of a kind that nobody computes with yet, or that has no memory of its own
        return tensor
