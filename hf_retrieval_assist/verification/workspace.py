"""The memory in which a model's forwards are repeated, kept from one call to the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from ..kernels.fixed_attention import AttentionBy
from ..system.locks import Lock
from ..system.log import get_logger
from . import replay
from .arena import Arena
from .fixed_masks import FixedMasks
from .packed_buffer import Field, PackedBuffer
from .recorded_state import is_autocast, recorded_state
from .replay import Record, Replay
from .tree_attention import LayerMask

logger = get_logger(__name__)

# Slots by which one step moves an accepted path in the copy that all of its inputs share.
MOST_MOVED = 64

# A recorded forward is repeated in memory of at most so many times the capacity that a call needs.
_MOST_SPARE = 4

# Workspaces of a model that wait for calls.
_MOST_IDLE = 3
_MOST_IDLE_BYTES = 1 << 30

_HALF_PRECISION_TOLERANCE = 0.2
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Shape:
    """What a recorded forward depends on besides the tensors it reads.

    Attributes:
        batch: rows.
        capacity: slots of each row.
        rules: the masks', per layer type as pairs, or one for all.
        dtype, device: the model's.
        positions: leading axes of its position ids.
        top_k: how many of the largest logits are brought to the host.
        vocab_size: of these, ids from here on being left out.
        taps: the boundaries whose hidden states are wanted.
        compiled: whether `torch.compile` made the forward.
        attention_by: what computes attention.
        exact: whether another capacity, by which kernels may divide their sums, does not do.
        states: hidden states of a row, [layers, width], that forwards leave to the next ones.
    """

    batch: int
    capacity: int
    rules: tuple[tuple[str, LayerMask], ...] | LayerMask
    dtype: torch.dtype
    device: torch.device
    positions: tuple[int, ...] = ()
    top_k: int = 0
    vocab_size: int = 0
    taps: tuple[tuple[int, ...], ...] = ()
    compiled: bool = False
    attention_by: AttentionBy = "mask"
    exact: bool = False
    states: tuple[int, ...] = ()

    def serves(self, other: Shape) -> bool:
        """Whether memory of this shape does for a call that asks for the other one.

        A compiled forward is made anew for another capacity; a recorded one of the model's own
        costs what its capacity is, unless attention follows the slots in use.
        """
        if self.exact:
            return self == other
        largest = other.capacity * _MOST_SPARE
        fits = self.capacity >= other.capacity and (self.compiled or self.capacity <= largest)
        return fits and self == replace(other, capacity=self.capacity)


class Repeated:
    """A computation on inputs of one shape: what it reads, and how it is repeated.

    Args:
        fields: of what the host tells the device.
        shape: of the memory that it runs in.
        record: what records it; None: nothing does.

    Attributes:
        inputs: the fields.
        replay: computes, or repeats.
    """

    def __init__(self, fields: Mapping[str, Field], shape: Shape, record: Record | None) -> None:
        self.inputs = PackedBuffer(fields, shape.device)
        exact = shape.dtype in (torch.float32, torch.float64)
        self.replay = Replay(record, _TOLERANCE if exact else _HALF_PRECISION_TOLERANCE)


class Step(Repeated):
    """One width of forwards: what it reads, what it leaves, and how it is repeated.

    Attributes:
        inputs: `token_ids`, `slots` [batch, width], `positions` [..., batch, width], `moves`
            [2, batch, MOST_MOVED] (from where, to where), all int64, and the masks' fields.
        results: `best` int64 [batch, width]; `chosen` int64 [batch * width], see
            `ForwardOptions.choose`; where they are wanted, the largest logits `top_logits`
            [batch, width, top_k] and their tokens `top_ids`.
        used: whether it ran before: the first forward of a width allocates and compiles.
    """

    def __init__(
        self, shape: Shape, masks: FixedMasks, width: int, columns: int, record: Record | None
    ):
        self.used = False
        self._vocab_size = shape.vocab_size
        batch = shape.batch
        whole = torch.int64, (batch, width)
        inputs: dict[str, Field] = {
            "token_ids": whole,
            "slots": whole,
            "positions": (torch.int64, (*shape.positions, batch, width)),
            "moves": (torch.int64, (2, batch, MOST_MOVED)),
        }
        super().__init__(inputs | masks.fields(width, columns), shape, record)
        results: dict[str, Field] = {"best": whole, "chosen": (torch.int64, (batch * width,))}
        if shape.top_k:
            largest = batch, width, shape.top_k
            # Some models compute the logits in float32, whatever their own dtype.
            results |= {"top_ids": (torch.int64, largest), "top_logits": (torch.float32, largest)}
        self.results = PackedBuffer(results, shape.device)

    def summarise(self, logits: torch.Tensor) -> None:
        """Write the results of logits [batch, width, vocab_size], on the device."""
        found = self.results.device
        torch.argmax(logits, dim=-1, out=found["best"])
        if "top_ids" in found:
            known = logits[..., : self._vocab_size]
            largest, ids = torch.topk(known, found["top_ids"].shape[-1], dim=-1)
            found["top_logits"].copy_(largest)
            found["top_ids"].copy_(ids)


Kind = TypeVar("Kind", bound=Repeated)


@dataclass
class Workspace:
    """The memory of one shape, and what was recorded in it.

    It holds no reference to the model, which it must not outlive.

    Attributes:
        state: what its recordings have taken for granted.
        states: [layers, batch, width], see `Shape`.
        lent_with: how many there were when it was lent.
    """

    shape: Shape
    record: Record | None
    state: Any = None
    arena: Arena = field(init=False)
    masks: FixedMasks = field(init=False)
    rows: torch.Tensor = field(init=False)
    states: torch.Tensor = field(init=False)
    lent_with: int = 0
    _steps: dict[Any, Repeated] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.shape
        self.arena = Arena(shape.batch, shape.capacity, shape.compiled)
        rules = shape.rules if isinstance(shape.rules, LayerMask) else dict(shape.rules)
        self.masks = FixedMasks(rules, shape.batch, shape.capacity, shape.dtype, shape.device)
        self.rows = torch.arange(shape.batch, device=shape.device)[:, None]
        layers, width = shape.states or (0, 0)
        self.states = torch.zeros(
            (layers, shape.batch, width), dtype=shape.dtype, device=shape.device
        )

    def step(self, width: int, columns: int) -> Step:
        """What feeds so many tokens, of up to `columns` behind the kept ones."""
        # Triton's kernels look at prompts with holes by another way.
        key = width, columns, self.masks.gapless
        return self.kept(key, lambda: Step(self.shape, self.masks, width, columns, self.record))

    def kept(self, key: Any, make: Callable[[], Kind]) -> Kind:
        """What was made for a key."""
        if key not in self._steps:
            self._steps[key] = make()
        found: Any = self._steps[key]
        return found

    def record_no_more(self) -> None:
        """From now on, forwards are computed in it."""
        self.record, self.state = None, torch.is_inference_mode_enabled()

    @property
    def made(self) -> int:
        """How many recordings were begun in it."""
        return sum(not step.replay.new for step in self._steps.values())


class Workspaces:
    """Lends a workspace to every call; a few of each model are kept for the next calls.

    What was recorded is repeated only while all that it has read is as it was: see
    :mod:`.recorded_state`.
    """

    def __init__(self) -> None:
        self._idle: weakref.WeakKeyDictionary[Any, list[Workspace]] = weakref.WeakKeyDictionary()
        # By whether the forward is compiled.
        self._faults: weakref.WeakKeyDictionary[Any, dict[bool, str]] = weakref.WeakKeyDictionary()
        self._lock = Lock()

    def recorder(self, model: Any, compiled: bool, device: torch.device) -> Record | None:
        """What records a model's forwards, as they are compiled or its own; None: nothing does."""
        if self._refuses(model, compiled) or is_autocast(device):
            return None
        return replay.recorder(device, compiled)

    def lend(
        self, model: Any, shape: Shape, record: Record | None, arguments: Mapping[str, Any]
    ) -> Workspace:
        """The smallest idle workspace of a model that fits, else a new one.

        Args:
            record: what records in a new one.
            arguments: the call's.
        """
        if record is None and not shape.compiled:
            return Workspace(shape, None)
        state = _state(model, record, shape, arguments)
        with self._lock:
            idle = self._idle.setdefault(model, [])
            if record is not None:
                # What was recorded of a model that was changed will not be used again.
                idle[:] = [kept for kept in idle if kept.record is None or kept.state == state]
            fitting = [kept for kept in idle if kept.shape.serves(shape) and kept.state == state]
            if fitting:
                found = min(fitting, key=lambda kept: kept.shape.capacity)
                idle[:] = [kept for kept in idle if kept is not found]
                found.lent_with = found.made
                return found
            # Before the new one takes its memory.
            _leave_few(idle, _MOST_IDLE - 1)
        return Workspace(shape, record, state)

    def give_back(self, model: Any, workspace: Workspace, arguments: Mapping[str, Any]) -> None:
        """Keep a workspace for the model's next calls."""
        shape = workspace.shape
        if self._refuses(model, shape.compiled):
            workspace.record_no_more()
        if workspace.record is None and not shape.compiled:
            return
        # A model that was changed meanwhile may have been recorded before or after it was.
        grown = workspace.made > workspace.lent_with
        if grown and workspace.state != _state(model, workspace.record, shape, arguments):
            return
        with self._lock:
            idle = self._idle.setdefault(model, [])
            idle.append(workspace)
            _leave_few(idle, _MOST_IDLE)

    def refuse(self, model: Any, compiled: bool, fault: str) -> None:
        """Repeat no forward of a model from now on; compiled ones and its own stand apart."""
        with self._lock:
            faults = self._faults.setdefault(model, {})
            told = compiled in faults
            faults[compiled] = fault
        if not told:
            how = "as they were compiled" if compiled else "one kernel at a time"
            logger.warning("%s: its forwards run %s (%s)", type(model).__name__, how, fault)

    def _refuses(self, model: Any, compiled: bool) -> bool:
        return compiled in self._faults.get(model, {})

    def release(self, model: Any) -> None:
        """Give the memory that is kept for a model's next call back."""
        with self._lock:
            self._idle.pop(model, None)


WORKSPACES = Workspaces()


def _leave_few(idle: list[Workspace], most: int) -> None:
    """Forget the oldest; all but the last one, where they take much memory."""
    while len(idle) > most or sum(kept.arena.nbytes for kept in idle[:-1]) > _MOST_IDLE_BYTES:
        del idle[0]


def _state(
    model: nn.Module, record: Record | None, shape: Shape, arguments: Mapping[str, Any]
) -> Any:
    """What has to be as it was; where nothing is recorded, `torch.compile` sees to all of it but
    that tensors of the inference mode are not written to outside."""
    if record is None:
        return torch.is_inference_mode_enabled()
    return recorded_state(model, arguments, shape.device)
