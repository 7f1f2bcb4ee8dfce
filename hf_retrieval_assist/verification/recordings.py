"""Computations that are recorded once, compared, and then repeated, from call to call.

What repeats them is an engine's: a program of a CPU's operators, a CUDA graph. It repeats what
Python decided while it was made. So it is taken only after it has given, at other inputs, what the
computation itself gives, and only for models that are as they were: see
:class:`~..host.model_key.ModelKey`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from ..system.locks import Lock
from ..system.log import get_logger
from ..system.memory import SHORTAGES

logger = get_logger(__name__)

# Recordings of a computation that other threads may break before none is tried any more.
MOST_BROKEN = 8

# States of a model whose recordings, or faults, are kept.
MOST_STATES = 8


Powers = tuple[int, int]

Alike = dict[tuple[Hashable, Powers], set[Powers]]
"""Powers of two of lengths at which a model decides as at others, by families of recordings.

What was recorded at one was what the model computes at another, which shows it for the family.
"""


class BrokenRecordingError(RuntimeError):
    """A recording that another thread broke: the next one may succeed."""


class Recording(ABC):
    """A computation on inputs of one shape: computed, recorded, compared, and then repeated.

    Args:
        patience: how often it is computed before it is recorded.

    Attributes:
        key: by which it is known among its model's.
        family: what is equal of those that decide alike by the length of a text.
        width: tokens by which it grows in one.
        alike: what is known of its family, whose recordings share this.
        content: what repeats it; None: nothing does.
        fault: why it is not recorded, in words; None while nothing speaks against it.
        short: whether there was no memory to record or to compare it.
        spare: whether another way of recording it remains where it has a fault.
        did: what the last call did; "compared", too, where that waits for another length.
        trusted: whether it was recorded and compared.
    """

    key: Hashable = None
    family: Hashable = None
    width = 0
    content: Any = None
    fault: str | None = None
    short = spare = False
    did: Literal["computed", "recorded", "compared", "repeated"]

    def __init__(self, patience: int = 0) -> None:
        self._patience, self._broken = patience, 0
        self.alike: Alike = {}
        self._recorded_at: tuple[int, ...] = ()
        self._recorded_in: Powers = 0, 0
        self._stands_there = False  # compared where the longest text is as long as it was recorded
        self.trusted = False

    @abstractmethod
    def compute(self, asked: Any) -> Any:
        """What is asked for."""

    @abstractmethod
    def record(self, asked: Any) -> Any:
        """Compute it, and take `content`, :meth:`trying`."""

    @abstractmethod
    def repeat(self, asked: Any, aside: bool) -> Any:
        """What `content` makes of what is asked for; `aside`: it will be computed all the same."""

    @abstractmethod
    def difference(self, repeated: Any, computed: Any) -> str | None:
        """How far a repetition is off, in words; None: it is not."""

    @property
    def computes(self) -> bool:
        """Whether nothing is recorded, compared or repeated any more."""
        return self.fault is not None or self.short

    def __call__(self, asked: Any, lengths: Sequence[int] = ()) -> Any:
        """What is asked for.

        Args:
            lengths: of the texts before, where a recording may have made constants of them: it is
                compared where the longest has another one, and anew whenever that, or what it is
                behind, has passed a power of two, at which what a model decides by it may change;
                empty: it cannot.
        """
        longest, first = max(lengths, default=0), self._recorded_in
        powers = longest.bit_length(), (longest + self.width).bit_length()
        alike = powers == first or powers in self.alike.get((self.family, first), ())
        if self.trusted and alike:
            self.did = "repeated"
            return self.repeat(asked, False)
        if self.content is not None:
            return self._compared(asked, tuple(lengths), powers)
        self.did = "computed"
        if self.computes or self._patience > 0:
            self._patience -= 1
            return self.compute(asked)
        result = self.record(asked)
        self._recorded_at, self._recorded_in = tuple(lengths), powers
        self.did = "compared" if self.content is None else "recorded"
        return result

    def _compared(self, asked: Any, here: tuple[int, ...], powers: Powers) -> Any:
        """What is asked for, computed, and compared with what is repeated.

        Others may grow while the longest text does not, which has ended: what is compared there
        stands there alone.
        """
        there = bool(here) and max(here) == max(self._recorded_at)
        if there and self._stands_there:
            self.did = "repeated"
            return self.repeat(asked, False)
        self.did, repeated = "compared", None
        if here and here == self._recorded_at:
            return self.compute(asked)
        with self.trying():
            repeated = self.repeat(asked, True)
        computed = self.compute(asked)
        with self.trying():
            if repeated is not None:
                self.fault = self.difference(repeated, computed)
                self._stands_there = self.fault is None
                self.trusted = self._stands_there and not there
                if self.trusted:
                    self._join(self._recorded_in, powers)
        return computed

    def _join(self, one: Powers, other: Powers) -> None:
        """Note that the model decides the same at both, and wherever it does at either."""
        groups = [self.alike.get((self.family, powers), {powers}) for powers in (one, other)]
        joint = groups[0] | groups[1]
        self.alike.update(((self.family, powers), joint) for powers in joint)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Scope of what may fail: it is computed then."""
        try:
            yield
        except SHORTAGES:
            self.short = True
        except Exception as error:  # whatever a forward does that cannot be recorded
            self._broken += isinstance(error, BrokenRecordingError)
            if not isinstance(error, BrokenRecordingError) or self._broken == MOST_BROKEN:
                self.fault = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if self.computes:
            self.content, self.trusted = None, False


class Recordings:
    """Those of a model in one state. They hold no reference to it, and must not outlive it.

    Attributes:
        state: what they have taken for granted.
        faults: why computations with these keys are not recorded in this state.
        short: whether there was no memory for one of them: the next call may find enough.
        kinds: the recordings, by what tells them apart.
    """

    def __init__(self, state: Any, faults: dict[Hashable, str]) -> None:
        self.state, self.faults, self.short = state, faults, False
        self.kinds: dict[Hashable, Any] = {}
        self.alike: Alike = {}

    @property
    def made(self) -> int:
        """How many recordings there are."""
        return sum(kind.content is not None for kind in self.kinds.values())

    @property
    def nbytes(self) -> int:
        """What they take."""
        return 0

    @property
    def lasts(self) -> bool:
        """Whether they are kept for other calls."""
        return not self.short

    def fit(self, state: Any) -> bool:
        """Whether they repeat what a model in this state computes."""
        return bool(self.state == state)

    def enter(self) -> None:
        """Use them behind what was done with them by the last call."""

    def leave(self) -> None:
        """Let others use them behind what was done so far."""

    def wait(self) -> None:
        """Wait until all that was done with them has ended."""


Kept = TypeVar("Kept", bound=Recordings)

_FaultsOfState = tuple[Any, dict[Hashable, str]]


class Report(NamedTuple, Generic[Kept]):
    """What a pool has of a model.

    Attributes:
        idle: what waits for calls, the last that was used behind the others.
        made: recordings in it.
        nbytes: that it takes.
        faults: why other computations are not recorded, by their keys, in whichever state.
    """

    idle: tuple[Kept, ...]
    made: int
    nbytes: int
    faults: dict[Hashable, str]


class Pool(Generic[Kept]):
    """Lends recordings to one call at a time; a few of each model are kept for the next calls.

    Args:
        most: of a model that wait for calls.
        most_bytes: that these take, but for the ones that were used last.
    """

    def __init__(self, most: int, most_bytes: float = math.inf) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._idle: WeakKeyDictionary[Any, list[Kept]] = WeakKeyDictionary()
        # Each model's states with their faults, the last that was asked for behind the others.
        self._faults: WeakKeyDictionary[Any, list[_FaultsOfState]] = WeakKeyDictionary()
        # Models of which something was recorded, whatever else cannot be.
        self._repeating: WeakSet[Any] = WeakSet()
        self._lock = Lock()

    def report(self, model: Any) -> Report[Kept]:
        """What there is of a model now."""
        with self._lock:
            idle = tuple(self._idle.get(model, ()))
            faults = {k: v for _, found in self._faults.get(model, ()) for k, v in found.items()}
        made, sizes = sum(kept.made for kept in idle), (kept.nbytes for kept in idle)
        return Report(idle, made, sum(sizes), faults)

    def skips(self, model: Any) -> bool:
        """Whether a model is left alone, of which nothing could be recorded."""
        return model not in self._repeating and bool(self.report(model).faults)

    def faults_in(self, model: Any, state: Any) -> dict[Hashable, str]:
        """Why computations of a model in a state are not recorded, by their keys, to be added to.
        Kept for a few states."""
        with self._lock:
            known = self._faults.setdefault(model, [])
            found = next((one for one in known if one[0] == state), (state, {}))
            known[:] = [*[one for one in known if one is not found][1 - MOST_STATES :], found]
            return found[1]

    def lend(
        self,
        model: Any,
        make: Callable[[], Kept],
        serves: Callable[[Kept], bool],
        rank: Callable[[Kept], Any] = lambda _: 0,
    ) -> Kept:
        """Idle ones of a model that serve the call, else new ones.

        Those of other states stay: a model may come back to them, as one does whose adapters are
        switched from call to call.

        Args:
            make: makes these.
            rank: of several that serve the call it gets those of the lowest.
        """
        with self._lock:
            idle = self._idle.setdefault(model, [])
            if (found := self._taken(idle, serves, rank)) is not None:
                return found
            # Others make room before the new ones take their memory.
            self._drop_oldest(idle, self.most - 1)
        return make()

    def release(self, model: Any) -> None:
        """Drop what waits for a model's calls."""
        with self._lock:
            self._drop_others(self._idle.pop(model, []), [])

    def give_back(self, model: Any, kept: Kept, spared: int = 1) -> None:
        """Keep what was recorded for the model's next calls; a large one only if it is spared."""
        kept.leave()
        with self._lock:
            if kept.made:
                self._repeating.add(model)
            if kept.lasts:
                idle = self._idle.setdefault(model, [])
                idle.append(kept)
                self._drop_oldest(idle, self.most, spared)

    @staticmethod
    def _taken(
        idle: list[Kept], serves: Callable[[Kept], bool], rank: Callable[[Kept], Any]
    ) -> Kept | None:
        """Those of the lowest rank that serve a call, and of these the last that were used."""
        found = min(filter(serves, reversed(idle)), key=rank, default=None)
        if found is not None:
            idle.remove(found)
            found.enter()
        return found

    def _drop_oldest(self, idle: list[Kept], most: int, spared: int = 1) -> None:
        """Drop the oldest; all but the last ones that are spared, where they take much memory."""
        kept = idle[-most:]
        while sum(one.nbytes for one in kept[: len(kept) - spared]) > self.most_bytes:
            del kept[0]
        self._drop_others(idle, kept)

    @staticmethod
    def _drop_others(idle: list[Kept], kept: Sequence[Kept]) -> None:
        """Drop all others. Their memory goes back to the streams that it was allocated for, and
        may still be in use on another one."""
        for one in idle:
            if one not in kept:
                one.wait()
        idle[:] = kept


class Borrower(Generic[Kept]):
    """What repeats a model's computations in one call, and records them for later ones.

    Args:
        pool: that lends recordings.
        model: of whom they are.
        read: reads its key, see :class:`~..host.model_key.ModelKey`; None: nothing is lent.

    Attributes:
        model: whose they are.
        repeated, recordings: computations that were repeated, and recordings that were made.
    """

    # How loudly a fault is told, and what follows of it.
    _told: tuple[int, str]

    def __init__(self, pool: Pool[Kept], model: Any, read: Callable[[], Any] | None) -> None:
        self._pool, self.model, self._read = pool, model, read
        self.repeated = self.recordings = 0
        # Read once: within a call, transformers' scopes change settings for some of its forwards.
        self._state = None if read is None else read()

    def _is_current(self, lent: Kept) -> bool:
        """Whether what was lent repeats what the model computes now."""
        return self._read is not None and lent.fit(self._read())

    def _run(
        self, lent: Kept, recording: Recording, asked: Any, lengths: Sequence[int] = ()
    ) -> Any:
        """What is computed, repeated where it can be, see :meth:`Recording.__call__`."""
        if recording.content is None:
            recording.fault = lent.faults.get(recording.key)
        known = recording.fault
        result = recording(asked, lengths)
        self.repeated += recording.did == "repeated"
        self.recordings += recording.did == "recorded"
        lent.short |= recording.short
        if recording.fault is not None and known is None:
            name = type(self.model).__name__
            if recording.spare:
                logger.info("%s: recorded in another way (%s)", name, recording.fault)
                return result
            if not self._pool.report(self.model).faults:
                level, follows = self._told
                told = name, follows, recording.fault
                logger.log(level, "%s: some of its forwards, if not all, %s (%s)", *told)
            lent.faults[recording.key] = recording.fault
        return result

    def _give_back(self, lent: Kept) -> None:
        """Leave it to the model's next calls, unless the model was changed meanwhile: what was
        recorded may have been recorded before or after it was."""
        if not self.recordings or self._is_current(lent):
            self._pool.give_back(self.model, lent)
