"""The memory in which a model's forwards are repeated, kept from one call to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from ...cache.slot_layers import SlotLayer
from ...host.model_key import is_autocast
from ...verification.recordings import MOST_STATES, Pool, Recordings
from . import replay
from .arena import Arena, Shape
from .fixed_masks import FixedMasks
from .fused import fusing
from .packed_buffer import Field, PackedBuffer, runs_behind
from .replay import Record, Replay, Shown

# Slots by which one step moves an accepted path in the copy that all of its inputs share.
MOST_MOVED = 64

# The workspaces of a model that wait for calls.
_MOST_IDLE_BYTES = 1 << 30

# Tokens per row that there is room for where the logits of all widths lie, as far as they are few.
_LOGITS_OF = (64, 256)

_HALF_PRECISION_TOLERANCE = 0.2
_TOLERANCE = 1e-3


class Repeated(Replay):
    """A computation on inputs of one shape, computed or repeated.

    Args:
        fields: of what the host tells the device.
        shape: of the memory that it runs in.
        record: what records it; None: nothing does.

    Attributes:
        inputs: the fields.
        key: by which its workspace knows it.
    """

    key: Hashable = None

    def __init__(self, fields: Mapping[str, Field], shape: Shape, record: Record | None) -> None:
        self.inputs = PackedBuffer(fields, shape.device)
        exact = shape.dtype in (torch.float32, torch.float64)
        super().__init__(record, _TOLERANCE if exact else _HALF_PRECISION_TOLERANCE)


class LogitsBuffer:
    """Where the recordings of one batch leave their logits, whatever their width and the state that
    the model was in."""

    def __init__(self) -> None:
        self._held: torch.Tensor | None = None

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """The place of logits [batch, width, vocab_size]."""
        batch, width, size = logits.shape
        held = self._held
        if held is None or not (
            held.shape[1] >= width and held.shape[2] == size and held.dtype == logits.dtype
        ):
            room = next((room for room in _LOGITS_OF if room >= width), width)
            # A tensor of the inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                held = torch.empty((batch, room, size), dtype=logits.dtype, device=logits.device)
            self._held = held
        return held.view(-1, size)[: batch * width].view(logits.shape)


class Step(Repeated):
    """One width of forwards: what it reads, and what it leaves.

    Attributes:
        inputs: `token_ids`, `slots` [batch, width], `positions` [..., batch, width], `moves`
            [2, batch, MOST_MOVED] (from where, to where), all int64, and the masks' fields.
        results: `best` int64 [batch, width]; `sound` float32, NaN where a token's logits are;
            `chosen` int64 [batch * width], see `NodeChooser`; where they are wanted, the
            largest logits `top_logits` [batch, width, top_k] and their tokens `top_ids`.
        largest: these two on the host, [batch * width, top_k]; empty where they are not
            wanted.
        used: whether it ran before: the first forward of a width allocates.
    """

    def __init__(
        self,
        shape: Shape,
        record: Record | None,
        width: int,
        masks: Mapping[str, Field],
        place: LogitsBuffer,
    ) -> None:
        self.used = False
        self._vocab_size, self._place = shape.vocab_size, place
        batch = shape.batch
        whole = torch.int64, (batch, width)
        inputs: dict[str, Field] = {
            "token_ids": whole,
            "slots": whole,
            "positions": (torch.int64, (*shape.positions, batch, width)),
            "moves": (torch.int64, (2, batch, MOST_MOVED)),
        }
        super().__init__({**inputs, **masks}, shape, record)
        results: dict[str, Field] = {
            "best": whole,
            "chosen": (torch.int64, (batch * width,)),
            "sound": (torch.float32, ()),
        }
        if shape.top_k:
            largest = batch, width, shape.top_k
            # Some models compute the logits in float32, whatever their own dtype.
            results |= {"top_ids": (torch.int64, largest), "top_logits": (torch.float32, largest)}
        self.results = PackedBuffer(results, shape.device)
        names = ("top_logits", "top_ids") if shape.top_k else ()
        self.largest = [self.results.host[name].flatten(0, 1).numpy() for name in names]

    def summarise(self, logits: torch.Tensor) -> None:
        """Write the results of logits [batch, width, vocab_size], on the device."""
        found = self.results.device
        torch.argmax(logits, dim=-1, out=found["best"])
        torch.sum(logits[..., 0], (0, 1), dtype=torch.float32, out=found["sound"])
        if "top_ids" in found:
            known = logits[..., : self._vocab_size]
            largest, ids = torch.topk(known, found["top_ids"].shape[-1], dim=-1)
            found["top_logits"].copy_(largest)
            found["top_ids"].copy_(ids)

    def place(self, shown: Shown) -> Shown:
        return replace(shown, logits=self._place.of(shown.logits).copy_(shown.logits))


RepeatedT = TypeVar("RepeatedT", bound=Repeated)


@dataclass(eq=False)
class _InState:
    """What was recorded while a model was in one state.

    Attributes:
        within: the scope in which forwards are recorded, as far as they give there what they give
            outside of it; None: none.
        kinds: the recordings, by what tells them apart.
    """

    state: Any = None
    within: AbstractContextManager[Any] | None = None
    kinds: dict[Hashable, Any] = field(default_factory=dict)


class Workspace(Recordings):
    """The memory of one shape, and what was recorded in it, state by state of the model.

    Attributes:
        record: what records in it; None: nothing does.
        states: [layers, batch, width], see `Shape`.
    """

    def __init__(self, shape: Shape, record: Record | None = None) -> None:
        super().__init__(None, {})
        self.shape, self.record = shape, record
        # The present state is the last one.
        self._in_states = [_InState(kinds=self.kinds)]
        layers, width = shape.states
        states = layers, shape.batch, width
        # Tensors of the inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.arena, self.masks = Arena(shape), FixedMasks(shape)
            self.rows = torch.arange(shape.batch, device=shape.device)[:, None]
            self.states = torch.zeros(states, dtype=shape.dtype, device=shape.device)
        self._left: torch.cuda.Event | None = None
        self._place = LogitsBuffer()

    def turn_to(self, state: Any, model: Any) -> None:
        """Go on with what was recorded while the model was in a state, which it is in now."""
        found = self._found(state)
        if found is None:
            found = _InState(state, fusing(model) if self.shape.fused else None)
        others = [one for one in self._in_states if one is not found and one.kinds]
        self._keep([*others[1 - MOST_STATES :], found])

    def knows(self, state: Any) -> bool:
        """Whether a model was in a state before."""
        return self._found(state) is not None

    def _found(self, state: Any) -> _InState | None:
        return next((one for one in self._in_states if one.state == state), None)

    def _keep(self, kept: Sequence[_InState]) -> None:
        """Drop what was recorded in other states; the present one is the last."""
        if {*map(id, self._in_states)} - {*map(id, kept)}:
            self.wait()
        self._in_states = [*kept]
        self.state, self.kinds = kept[-1].state, kept[-1].kinds

    def hold(self, layers: Sequence[SlotLayer]) -> None:
        """Let layers write here, see :meth:`Arena.hold`. Where others did before, in tensors of
        other shapes, nothing is left of what was recorded there."""
        stays, present = False, self._in_states[-1]
        try:
            stays = self.arena.hold(layers)
        finally:  # the memory may not suffice
            if not stays and self.made:
                self._keep([_InState(present.state, present.within)])

    def step(self, width: int, columns: int) -> Step:
        """What feeds so many tokens, of up to `columns` behind the kept ones."""
        # Kernels look up holes of prompts only where there are some.
        kind = width, columns, self.masks.gapless
        fields, present = self.masks.fields(width, columns), self._in_states[-1]

        def made(record: Record | None, spare: bool) -> Step:
            step = Step(self.shape, record, width, fields, self._place)
            step.spare = spare
            return step

        if present.within is not None and self.record is not None:
            record = partial(self.record, within=present.within)
            found = self.cached((*kind, "within"), lambda: made(record, True))
            if not found.computes:
                return found
        return self.cached(kind, lambda: made(self.record, False))

    def cached(self, key: Hashable, make: Callable[[], RepeatedT]) -> RepeatedT:
        """What was made for a key."""
        if key not in self.kinds:
            self.kinds[key] = made = make()
            made.key = key
        found: Any = self.kinds[key]
        return found

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes

    @property
    def made(self) -> int:
        kinds = [kind for one in self._in_states for kind in one.kinds.values()]
        return sum(kind.content is not None for kind in kinds)

    @property
    def lasts(self) -> bool:
        return super().lasts and self.record is not None and self.made > 0

    def enter(self) -> None:  # the last call's stream may be another one
        if self._left is not None:
            torch.cuda.current_stream(self.shape.device).wait_event(self._left)

    def wait(self) -> None:
        if self._left is not None:
            self._left.synchronize()

    def leave(self) -> None:
        if runs_behind(self.shape.device):
            self._left = self._left or torch.cuda.Event()
            self._left.record(torch.cuda.current_stream(self.shape.device))


class Workspaces(Pool[Workspace]):
    """Lends a workspace to every call; a few of each model are kept for the next calls."""

    def __init__(self) -> None:
        super().__init__(most=3, most_bytes=_MOST_IDLE_BYTES)

    def records(self, model: Any, device: torch.device) -> bool:
        """Whether forwards of a model are recorded, as far as that is known."""
        return not self.skips(model) and not is_autocast(device)

    def reserve(self, model: Any, batch: int, slots: int) -> Workspace | None:
        """An idle workspace for a call whose prompt may be written into it; None: none fits.

        Much memory that is too small for the call is given back, so that its own has room.
        """
        few = (1 << 62, _MOST_IDLE_BYTES)
        with self._lock:
            idle = self._idle.get(model, [])
            found = self._taken(
                idle,
                lambda kept: kept.shape.has_room(batch, slots),
                lambda kept: kept.shape.capacity,
            )
            if found is None:
                fits = [k for k in idle if k.nbytes <= few[k.shape.capacity < slots]]
                self._drop_others(idle, fits)
        return found

    def workspace(
        self, model: Any, shape: Shape, state: Any, reserved: Workspace | None = None
    ) -> Workspace:
        """An idle workspace of a model that serves the call: the smallest of those in which the
        model was in this state before, else the smallest; a new one if there is none.

        Args:
            state: that recordings take for granted; None: nothing is recorded.
            reserved: that the call has already, and takes if it fits.
        """
        found = reserved if reserved is not None and reserved.shape.serves(shape) else None
        if state is None:
            return found or Workspace(shape)
        if found is None:
            found = self.lend(
                model,
                lambda: Workspace(shape, replay.recorder(shape.device)),
                lambda kept: kept.shape.serves(shape),
                lambda kept: (not kept.knows(state), kept.shape.capacity),
            )
        found.turn_to(state, model)
        found.faults = self.faults_in(model, state)
        return found


WORKSPACES = Workspaces()
