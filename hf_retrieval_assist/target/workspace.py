"""The memory in which a model's forwards are repeated, kept from one call to the next."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..system.locks import Lock
from . import replay
from .arena import Arena
from .fixed_masks import FixedMasks
from .host import attention_of, hook_counts
from .packed_buffer import Field, PackedBuffer
from .replay import Record, Replay
from .tree_attention import LayerMask

logger = logging.getLogger(__name__)

# Slots by which one step moves an accepted path in the copy that all of its inputs share.
MOST_MOVED = 64

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
        compiled: whether `torch.compile` made the forward, and not a recording.
        split: whether attention is computed in parts.
    """

    batch: int
    capacity: int
    rules: tuple[tuple[str, LayerMask], ...] | LayerMask
    dtype: torch.dtype
    device: torch.device
    positions: tuple[int, ...] = ()
    top_k: int = 0
    vocab_size: int = 0
    taps: tuple[tuple[int | str, ...], ...] = ()
    compiled: bool = False
    split: bool = False

    def serves(self, other: Shape) -> bool:
        """Whether memory of this shape does for a call that asks for the other one.

        A compiled forward is made anew for another capacity, a recorded one costs what its
        capacity is.
        """
        if not self.compiled:
            return self == other
        return self.capacity >= other.capacity and self == replace(other, capacity=self.capacity)


class Step:
    """One width of forwards: what it reads, what it leaves, and how it is repeated.

    Attributes:
        inputs: `token_ids`, `slots` [batch, width], `positions` [..., batch, width], `moves`
            [2, batch, MOST_MOVED] (from where, to where), all int64, and the masks' fields.
        results: `best` int64 [batch, width] and, where they are wanted, the largest logits
            `top_logits` [batch, width, top_k] and their tokens `top_ids`.
        used: whether it ran before: the first forward of a width allocates and compiles.
    """

    def __init__(self, shape: Shape, masks: FixedMasks, width: int, record: Record | None):
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
        results: dict[str, Field] = {"best": whole}
        if shape.top_k:
            largest = batch, width, shape.top_k
            results |= {"top_ids": (torch.int64, largest), "top_logits": (shape.dtype, largest)}
        self.inputs = PackedBuffer(inputs | masks.fields(width), shape.device)
        self.results = PackedBuffer(results, shape.device)
        exact = shape.dtype in (torch.float32, torch.float64)
        self.replay = Replay(record, _TOLERANCE if exact else _HALF_PRECISION_TOLERANCE)

    def summarise(self, logits: torch.Tensor) -> None:
        """Write the results of logits [batch, width, vocab_size], on the device."""
        found = self.results.device
        torch.argmax(logits, dim=-1, out=found["best"])
        if "top_ids" in found:
            largest = found["top_logits"], found["top_ids"]
            known = logits[..., : self._vocab_size]
            torch.topk(known, largest[0].shape[-1], dim=-1, out=largest)


@dataclass
class Workspace:
    """The memory of one shape, and what was recorded in it.

    It holds no reference to the model, which it must not outlive.
    """

    shape: Shape
    record: Record | None
    arena: Arena = field(init=False)
    masks: FixedMasks = field(init=False)
    rows: torch.Tensor = field(init=False)
    _steps: dict[int, Step] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.shape
        self.arena = Arena(shape.batch, shape.capacity, not shape.compiled, shape.split)
        rules = shape.rules if isinstance(shape.rules, LayerMask) else dict(shape.rules)
        self.masks = FixedMasks(rules, shape.batch, shape.capacity, shape.dtype, shape.device)
        self.rows = torch.arange(shape.batch, device=shape.device)[:, None]

    def step(self, width: int) -> Step:
        if width not in self._steps:
            self._steps[width] = Step(self.shape, self.masks, width, self.record)
        return self._steps[width]


class Workspaces:
    """Lends a workspace to every call; the last one of each model is kept for the next call.

    What was recorded is repeated only while the model is as it was: see `model_state`.
    """

    def __init__(self) -> None:
        self._idle: weakref.WeakKeyDictionary[Any, tuple[Hashable, Workspace]] = (
            weakref.WeakKeyDictionary()
        )
        self._faults: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._lock = Lock()

    def lend(self, model: Any, shape: Shape, recorded: bool) -> Workspace:
        """The idle workspace of a model where it fits, else a new one.

        Args:
            recorded: False where the call's forwards cannot be repeated.
        """
        recorded = recorded and model not in self._faults
        if not (recorded or shape.compiled):
            return Workspace(shape, None)
        with self._lock:
            state, idle = self._idle.pop(model, (None, None))
        if idle is not None and idle.shape.serves(shape) and state == _state(model, shape):
            return idle
        # Before the new one takes its memory.
        del idle
        return Workspace(shape, replay.recorder(shape.device) if recorded else None)

    def give_back(self, model: Any, workspace: Workspace) -> None:
        """Keep a workspace for the model's next call."""
        compiled = workspace.shape.compiled
        if not compiled and (workspace.record is None or model in self._faults):
            return
        state = _state(model, workspace.shape)
        with self._lock:
            self._idle[model] = (state, workspace)

    def refuse(self, model: Any, fault: str) -> None:
        """Repeat no forward of a model from now on."""
        with self._lock:
            told = model in self._faults
            self._faults[model] = fault
        if not told:
            logger.warning(
                "%s: its forwards run one kernel at a time (%s)", type(model).__name__, fault
            )

    def release(self, model: Any) -> None:
        """Give the memory that is kept for a model's next call back."""
        with self._lock:
            self._idle.pop(model, None)


WORKSPACES = Workspaces()


def _state(model: nn.Module, shape: Shape) -> Hashable:
    """What has to be as it was; `torch.compile` sees to that by itself."""
    return None if shape.compiled else model_state(model)


def model_state(model: nn.Module) -> Hashable:
    """What a recorded forward has taken for granted: where parameters lie, and every setting.

    A call costs a few milliseconds for a model of some hundred modules, so it is made once a call.
    """
    config = getattr(model, "config", None)
    tensors = (*model.parameters(), *model.buffers())
    return (
        hash(tuple((tensor.data_ptr(), tensor.dtype, tensor.device) for tensor in tensors)),
        hash(tuple(_settings(module) for module in model.modules())),
        None if config is None else attention_of(config),
    )


# What every module keeps of itself.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}


def _settings(module: nn.Module) -> Hashable:
    """A module's plain attributes, its hooks and what stands for its forward."""
    plain = tuple(
        (name, repr(value))
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, tuple, list, dict, type(None)))
        and name not in _INTERNAL
    )
    return type(module), id(vars(module).get("forward")), hook_counts(module), plain
