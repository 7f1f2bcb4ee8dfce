"""Forwards of a few tokens on a CPU, repeated from programs that are kept from call to call.

See :mod:`...verification.recordings` and :mod:`~.recording`. A kind of forward is recorded once it
has been computed so often that recording would have paid, and compared to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from ...cache.kv_cache import SlotCache
from ...cache.slot_layers import SlotLayer
from ...host.model_key import recording_key
from ...host.transformers_private import CACHE, attention_of, hooks_of
from ...structures.modules import modules_of
from ...system import changes
from ...system.tensors import same_bits
from ...verification.recordings import MOST_STATES, Borrower, Pool, Recording, Recordings
from .copies import Copies
from .program import PackedModel, Program, UnrecordableError
from .recording import Recorder
from .skinny import FEW_ROWS, MAX_ROWS, PATHS

# Computed forwards of a kind before one is recorded. Recording a small model's takes as long as
# repeating it saves in eight; programs outlive calls. Where one could be recorded, others of
# `WIDTHS` are when they are first met: they come again.
PATIENCE = 4

WIDTHS: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Tokens that forwards of one row, or of packed rows together, are filled up to, so that there are
few kinds of them; between these are more where each token takes time, as it hardly does by AMX."""
if "amx" not in PATHS:
    WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

# All programs of a model in one state; and those of its other states, and of other calls.
MOST_BYTES = 256 << 20

Compute = Callable[..., Any]
"""A model's forward, in the scope in which the call computes it."""

_INPUTS = ("input_ids", "position_ids", "cache_position")

_KEEP = "logits_to_keep"  # the places of tokens whose logits are wanted


class _Asked(NamedTuple):
    """A forward that is wanted: whose, its arguments, and of these what a program is given."""

    of: RepeatedForward
    arguments: dict[str, Any]
    inputs: Mapping[str, torch.Tensor]
    masks: list[torch.Tensor]


class _ShapeRecording(Recording):
    """Forwards of one shape, repeated by a program and the class of their outputs."""

    content: Any = None  # the program, and the class of the outputs
    packed = False

    def compute(self, asked: _Asked) -> Any:
        return asked.of.compute(**asked.arguments)

    def record(self, asked: _Asked) -> Any:
        forward = asked.of
        with self.trying(), _undone(forward.layers) as kept:
            recorder = Recorder(forward.model, asked.inputs, forward.layers, asked.masks)
            with recorder:
                every = dict.fromkeys({_KEEP} & {*asked.arguments}, 0)
                outputs = forward.compute(**asked.arguments | recorder.inputs | every)
            given = {name for name, x in outputs.items() if x is not None}
            if strange := given - {"logits", CACHE}:
                raise UnrecordableError(f"a forward that returns {sorted(strange)}")
            program = recorder.program(outputs.logits)
            if program.nbytes + forward.lent.nbytes > MOST_BYTES:
                raise UnrecordableError("its programs take too much memory")
            self.content = program, type(outputs)
            if every:
                outputs.logits = outputs.logits[:, asked.arguments[_KEEP]]
            kept.clear()
        return self.compute(asked) if self.content is None else outputs

    def repeat(self, asked: _Asked, aside: bool) -> Any:
        program, outputs = self.content
        with _undone(asked.of.layers) if aside else nullcontext():
            logits = _repeated(program, asked, None if aside else asked.of.copies)
        if logits is None:
            return None if aside else self.compute(asked)
        return outputs(logits=logits)

    def difference(self, repeated: Any, computed: Any) -> str | None:
        same = same_bits(repeated.logits, computed.logits)
        return None if same else "repeated logits are not the model's"


def _repeated(program: Program, asked: _Asked, copies: Copies | None) -> torch.Tensor | None:
    """The logits of a forward, which `copies` may know better; None: it is to be computed."""
    weights = None if copies is None else copies.weights(asked.inputs["input_ids"].numel())
    x = program.run(asked.inputs, asked.of.layers, asked.masks, weights)
    if x is None:
        return None
    if _KEEP in asked.arguments:
        x = x[:, asked.arguments[_KEEP]]
    near = None if copies is None else copies.look(program.output, x)
    return program.logits(x, weights) if near is None else near


@contextmanager
def _undone(layers: list[Any]) -> Iterator[list[Any]]:
    """Scope of a forward that counts for none, unless the layers' lengths are cleared."""
    lengths = [(layer, layer.get_seq_length()) for layer in layers]
    try:
        yield lengths
    finally:
        for layer, length in lengths:
            layer.set_length(length)


class Programs(Recordings):
    """Those of a model in one state; a fault is one of the shape of ids that it was met at."""

    @property
    def nbytes(self) -> int:
        return sum(kind.content[0].nbytes for kind in self.kinds.values() if kind.content)


PROGRAMS: Pool[Programs] = Pool(MOST_STATES, MOST_BYTES)


def can_repeat(model: Any, cache: Any) -> bool:
    """Whether forwards over a cache may be repeated, as far as can be seen: attention is what the
    kernels compute, the cache is one of plain keys and values on the CPU, and there are no hooks.
    """
    layers = cache.layers if type(cache) is SlotCache else []
    if not layers or attention_of(model.config) != "sdpa" or not layers[0].keys.is_cpu:
        return False
    slots = all(type(layer) is SlotLayer and layer.store.block_refs for layer in layers)
    return slots and not hooks_of(*modules_of(model))


class RepeatedForward(Borrower[Programs]):
    """Stands for a model in the forwards of one call, and repeats those that it can.

    Args:
        model: whose forwards.
        compute: the model's forward.
        cache: the call's.
        arguments: of the call.
        copies: of the model's weights, which repeated forwards read; None: they read these.

    Attributes:
        layers: of the cache.
        repeats: whether some forwards were repeated when the call began: a step then takes as long
            as a repeated one, else as long as a computed one.
        typical: whether the last forward was one of these.
        packs: whether forwards over packed rows may be recorded, as far as is known.
        widths: what forwards of one row, or of packed rows, are filled up to.
    """

    _told = logging.INFO, "are not recorded"

    def __init__(
        self,
        model: Any,
        compute: Compute,
        cache: Any,
        arguments: Mapping[str, Any],
        copies: Copies | None,
    ) -> None:
        # Programs know where weights lie: they stay there until the end of the call, whoever gives
        # the model others meanwhile.
        self._weights = [
            _memory_kept(tensor)
            for module in modules_of(model)
            for tensors in (module._parameters, module._buffers)
            for tensor in tensors.values()
            if tensor is not None
        ]
        self.compute, self.copies, self.layers = compute, copies, cache.layers
        self._slots = cache.slots
        self._said, self.typical = changes.said(), True
        read = partial(recording_key, model, arguments, torch.device("cpu"))
        super().__init__(PROGRAMS, model, read)
        self._programs: Programs | None = None
        if self._state is not None:
            self._programs = PROGRAMS.lend(
                model,
                lambda: Programs(self._state, PROGRAMS.faults_in(model, self._state)),
                lambda kept: kept.fit(self._state),
            )
        programs = self._programs
        kinds = {} if programs is None else programs.kinds
        self.repeats = any(kind.trusted for kind in kinds.values())
        faults: list[Any] = [] if programs is None else [*programs.faults]
        self.packs = programs is not None and all(key[0] != "packed" for key in faults)
        hopes = self.repeats or (programs is not None and not programs.faults)
        self.widths = WIDTHS if hopes else ()

    @property
    def lent(self) -> Programs:
        """The programs, while they are those of the model as it is."""
        assert self._programs is not None
        return self._programs

    def width(self, tokens: int, texts: int) -> int | None:
        """What a forward of so many tokens of texts is filled up to; None: it is not repeated."""
        wanted = (width for width in self.widths if width >= tokens)
        return next(wanted, None) if texts <= FEW_ROWS else None

    def is_current(self) -> bool:
        """Whether what was recorded is what the model computes; otherwise it is left."""
        if self._said != changes.said():
            self._programs = None
        return self._programs is not None

    def __call__(self, **given: Any) -> Any:
        """A forward, as the model's own."""
        self.typical = True
        if self.copies is not None:
            self.copies.screened = None
        found = self._kind(given)
        if found is None:
            return self.compute(**given)
        kind, asked = found
        outputs = self._run(self.lent, kind, asked, self._slots.lengths)
        self.packs = self.packs and not (kind.packed and kind.fault)
        self.typical = kind.did == ("repeated" if self.repeats else "computed")
        return outputs

    def prospect(self, **given: Any) -> bool | None:
        """Whether a program repeats such a forward, and tells what the output layer reads of it;
        None: it may come to be recorded."""
        return self._prospect(self._kind(given))

    def _prospect(self, found: tuple[_ShapeRecording, _Asked] | None) -> bool | None:
        """The same of what `_kind` gives."""
        if found is None or found[0].key in self.lent.faults:
            return False
        kind, _ = found
        if kind.trusted:
            return kind.content[0].output is not None
        return False if kind.computes else None

    def draft(self, weights: PackedModel, **given: Any) -> torch.Tensor | None:
        """What the output layer would read of a forward, [..., depth], with weights in another
        form; None: no program computes it, and the forward was computed only to be recorded."""
        found = self._kind(given)
        if (prospect := self._prospect(found)) is None:
            self(**given)
        if found is None or not prospect:
            return None
        kind, asked = found
        program: Program = kind.content[0]
        return program.run(asked.inputs, self.layers, asked.masks, weights)

    def _kind(self, given: dict[str, Any]) -> tuple[_ShapeRecording, _Asked] | None:
        """Forwards like one that is given these, and what is asked of them; None: none of them is
        recorded."""
        if not self.is_current():
            return None
        inputs = {name: given[name] for name in _INPUTS if given.get(name) is not None}
        tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
        cache = getattr(given.get(CACHE), "layers", None)
        if (
            not {*tensors} <= {*inputs, "attention_mask", _KEEP}
            or cache is not self.layers
            or inputs["input_ids"].numel() > MAX_ROWS
        ):
            return None
        shape, batch = tuple(inputs["input_ids"].shape), len(self._slots.lengths)
        packed = shape[0] != batch
        mask = given.get("attention_mask")
        masks = list(mask.values()) if isinstance(mask, dict) else [mask]
        key = (
            tuple([(name, tensor.shape) for name, tensor in inputs.items()]),
            tuple([one is None for one in masks]),
            torch.get_num_threads(),
            packed,
        )
        if key not in (kinds := self.lent.kinds):
            repeats = any(kind.trusted for kind in kinds.values())
            comes_again = repeats and inputs["input_ids"].numel() in WIDTHS
            kinds[key] = _ShapeRecording(0 if comes_again else PATIENCE)
            kinds[key].packed, kinds[key].key = packed, ("packed", shape[1]) if packed else shape
            kinds[key].family, kinds[key].width = key[1:], shape[1]
            kinds[key].alike = self.lent.alike
        seen = [one for one in masks if one is not None]
        return kinds[key], _Asked(self, given, inputs, seen)

    def give_back(self) -> None:
        """Leave what was recorded to the model's next calls, if the model is as it was."""
        programs, self._programs = self._programs, None
        self._weights.clear()
        if programs is not None:
            self._give_back(programs)


def _memory_kept(tensor: torch.Tensor) -> torch.Tensor:
    """What keeps a tensor's memory where it is."""
    try:
        return tensor.detach()
    except Exception:  # nobody computes with its kind yet, or it has no memory of its own
        return tensor
