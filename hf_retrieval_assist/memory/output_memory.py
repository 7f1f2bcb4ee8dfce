"""What earlier outputs taught: one bounded suffix tree for each model, kept on disk or shared."""

from __future__ import annotations

import hashlib
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from ..structures.suffix_tree import SuffixTree
from ..system.locks import Lock
from .log import OutputLog, Record, SharedOutputs
from .redis_server import RedisServer
from .stream import OutputStream

# A token takes 50 to 80 bytes in the tree and 4 in the log, so that the log's newest records, up to
# this share of the limit, are about what the trees can hold.
_LOG_SHARE = 12

# What an output costs besides its tokens: its object and its place among the others.
_OUTPUT_BYTES = 256

# Ids below this number are checked one by one, since a call of numpy takes longer.
_FEW = 64

# Between a model's fingerprint and a prompt's name, which no fingerprint contains.
_GROUP_MARK = "/"


def prompt_group(fingerprint: str, prompt_ids: NDArray[np.int32]) -> str:
    """The name under which outputs of one prompt are kept apart from a model's others."""
    ids = np.ascontiguousarray(prompt_ids, dtype=np.int32)
    return fingerprint + _GROUP_MARK + hashlib.blake2b(ids.tobytes(), digest_size=12).hexdigest()


class OutputMemory:
    """Remembers outputs, so that later ones that resemble them can be drafted.

    Outputs of different models (by `Target.fingerprint`) are kept apart, since their token ids mean
    different things; outputs added without a fingerprint are those of the first model that drafts
    from this memory. Memory in use never exceeds `max_bytes`: the oldest outputs go first. Safe to
    use from several threads.

    With `path`, finished outputs are also appended to a log, so that they survive a restart. An
    output is in the log when `add`, or `RunningOutput.close`, returns, and then outlives even a
    killed process (not a loss of power); outputs still running are lost with it. Several processes
    may share one path: each reads what the others have finished whenever it starts an output. The
    log holds outputs in plain form, readable by their owner alone (mode 0600). Prompts are not
    learnt, unless they are handed to `add`.

    Where the log cannot be read or written later on, a full disk say, one warning tells so and
    outputs are kept in memory; those that are still there follow once the log works again.

    With `url`, processes on any number of machines share finished outputs through a Redis or Valkey
    server. Nothing but `sync` and `forget` waits for the network: outputs are exchanged in the
    background, and a process goes on alone while the server is away and delivers its outputs later.
    What waits on either side takes up to a sixth of `max_bytes` besides the trees. Whoever may read
    the server's keys may read the outputs.

    Where the model itself changes, as a policy in training, older outputs resemble its present ones
    less and less. With a `half_life`, every output that is finished makes each older one of its
    model (or prompt, see :func:`prompt_group`) be dropped with the chance that leaves half of them
    after so many: counts then weigh outputs by their age, and a group stays small.

    Args:
        max_bytes: bound on the memory that all trees together occupy.
        max_depth: longest context plus draft, in tokens.
        path: log file; None keeps outputs in memory only.
        url: server, `redis://`, `rediss://` or `unix://` as the `redis` client reads it, with a
            password unless the host is this machine; instead of `path`.
        half_life: later outputs of its kind that an output has an even chance to outlive; None
            drops outputs for want of room only.

    Attributes:
        lock: guards the trees that `tree` hands out.

    Raises:
        ValueError: if the file at `path` is not a log of outputs, `max_bytes` is too little, or
            `url` lacks a password or is none of the client's.
        OSError: if the file at `path` cannot be read, or locked, or closed to others.
        ImportError: with `url`, if the `redis` extra is not installed.
    """

    def __init__(
        self,
        max_bytes: int = 256 << 20,
        max_depth: int = 64,
        path: str | os.PathLike[str] | None = None,
        url: str | None = None,
        half_life: float | None = None,
    ) -> None:
        smallest = SuffixTree(max_depth).nbytes
        if max_bytes < 2 * smallest:
            raise ValueError(f"max_bytes: expected at least {2 * smallest}, got {max_bytes}")
        if half_life is not None and not half_life > 0:
            raise ValueError(f"half_life: expected None or a number above 0, got {half_life}")
        self.max_bytes = max_bytes
        self.max_depth = max_depth
        self.half_life = half_life
        self.lock = Lock()
        self._trees: dict[str, SuffixTree] = {}
        self._tree_bytes = 0
        self._outputs: dict[RunningOutput, None] = {}  # in order of age
        self._finished: dict[str, list[RunningOutput]] = {}  # those that fade, by fingerprint
        self._chance = random.Random(0)
        self._log = _shared_outputs(path, url, max_bytes // _LOG_SHARE)
        self._behind = False  # finished outputs could not be written to the log
        self._read_all()

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        with self.lock:
            return self._tree_bytes + _OUTPUT_BYTES * len(self._outputs)

    @property
    def token_count(self) -> int:
        """Number of tokens remembered."""
        with self.lock:
            return sum(tree.token_count for tree in self._trees.values())

    def __len__(self) -> int:
        """Number of outputs remembered, running ones included."""
        return len(self._outputs)

    def tree(self, fingerprint: str = "") -> SuffixTree | None:
        """The suffix tree of a model's outputs, to be used while holding `lock`.

        Finished outputs of no named model become this model's.
        """
        if "" in self._trees and fingerprint and _GROUP_MARK not in fingerprint:
            self._adopt(fingerprint)
        return self._trees.get(fingerprint)

    def add(self, token_ids: Sequence[int] | NDArray[np.int32], fingerprint: str = "") -> None:
        """Learn a whole output, or any other text.

        Args:
            token_ids: the text.
            fingerprint: of the model that is to draft from it, see
                :mod:`~hf_retrieval_assist.target.fingerprint`; by default the first model
                that drafts from this memory.

        Raises:
            ValueError: for a negative id.
        """
        output = self.start(fingerprint)
        output.extend(token_ids)
        output.close()

    def start(self, fingerprint: str = "") -> RunningOutput:
        """An output that is learnt while it grows. Reads what other processes have finished."""
        if self._log is not None:
            with self.lock, self._tolerated():
                self._take_in(*self._log.read())
        return RunningOutput(self, fingerprint)

    def refresh(self) -> None:
        """Learn all that other processes have written to the log, or that has come from the server.

        Starting an output learns a part of it, small enough not to delay the output.
        """
        with self.lock, self._tolerated():
            self._read_all()

    def _read_all(self) -> None:
        while self._log is not None and self._take_in(*self._log.read()):
            pass

    def sync(self, timeout: float = 10.0) -> bool:
        """Wait until others can read all outputs finished here, and learn all of theirs.

        Only a memory on a server has anything to wait for: when a process starts, or before it
        ends.

        Args:
            timeout: in seconds.

        Returns:
            Whether the server was reached in time.
        """
        reached = self._log is None or self._log.sync(timeout)
        self.refresh()
        return reached

    def forget(self) -> None:
        """Forget every output, running ones and those in the log or on the server included.

        Other processes forget them when they next start or finish an output.

        Raises:
            OSError: the others could not be told; this process has forgotten.
        """
        with self.lock:
            for output in list(self._outputs):
                self._drop(output)
                output.forgotten = True
            if self._log is not None:
                self._log.forget()

    def check_invariants(self) -> None:
        """Raise AssertionError where trees, outputs and limit contradict one another."""
        with self.lock:
            assert self.nbytes <= self.max_bytes, "above the limit"
            assert sum(map(len, self._trees.values())) == len(self._outputs), "lost sequences"
            held = sum(tree.nbytes for tree in self._trees.values())
            assert held == self._tree_bytes, "miscounted bytes"
            for name, faded in self._finished.items():
                assert faded, "an empty group"
                assert all(o.fingerprint == name and o in self._outputs for o in faded), "a ghost"
            for tree in self._trees.values():
                tree.check_invariants()

    def _take_in(self, floor: int, records: list[Record]) -> bool:
        """Forget what is numbered below `floor`, learn the records; whether there were any."""
        for output in [o for o in self._outputs if o.number is not None and o.number < floor]:
            self._drop(output)
        for record in records:
            self._learn_finished(record.fingerprint, record.token_ids, record.number)
        return bool(records)

    def _adopt(self, fingerprint: str) -> None:
        """Make the finished outputs of no named model those of this one."""
        unnamed = self._trees[""]
        finished = [o for o in self._outputs if not o.fingerprint and o.finished]
        if fingerprint not in self._trees and len(finished) == len(unnamed):
            # The whole tree, which a second one beside it would not leave room for.
            self._trees[fingerprint] = self._trees.pop("")
            if faded := self._finished.pop("", None):
                self._finished[fingerprint] = faded
            for output in finished:
                output.fingerprint = fingerprint
            return
        for output in finished:
            if output.sequence is not None:  # it has not made room for one before it
                token_ids, number = unnamed.tokens(output.sequence), output.number
                self._drop(output)
                self._learn_finished(fingerprint, token_ids, number)

    def _learn_finished(
        self, fingerprint: str, token_ids: NDArray[np.int32], number: int | None
    ) -> None:
        output = RunningOutput(self, fingerprint)
        output.finished, output.number = True, number
        self._learn(output, token_ids)
        self._fade(output)

    def _fade(self, newest: RunningOutput) -> None:
        """Drop older outputs of its kind by chance, now that one more is finished."""
        if self.half_life is None or newest.sequence is None:
            return
        lasting = 0.5 ** (1 / self.half_life)
        for output in list(self._finished.get(newest.fingerprint, ())):
            if self._chance.random() > lasting:
                self._drop(output)
        self._finished.setdefault(newest.fingerprint, []).append(newest)

    def _finish(self, output: RunningOutput, token_ids: NDArray[np.int32]) -> None:
        self._fade(output)
        if self._log is not None:
            with self._tolerated():
                if self._behind:
                    self._deliver(self._log)
                self._write(self._log, output, token_ids)
                self._behind = False

    def _write(
        self, log: SharedOutputs, output: RunningOutput, token_ids: NDArray[np.int32]
    ) -> None:
        self._take_in(*log.append(output.fingerprint, token_ids))
        output.number = log.last_number

    def _deliver(self, log: SharedOutputs) -> None:
        """Write the outputs that could not be written before, as far as they are still whole."""
        for output in [o for o in self._outputs if o.finished and o.number is None]:
            if output.live_sequence is not None:
                tree = self._trees[output.fingerprint]
                self._write(log, output, tree.tokens(output.live_sequence))

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Go on in memory alone where the log fails; it is tried again at every output."""
        try:
            yield
        except (OSError, ValueError) as error:
            if not self._behind:
                warnings.warn(f"outputs are not kept on disk for now: {error}", stacklevel=4)
            self._behind = True

    def _learn(self, output: RunningOutput, token_ids: NDArray[np.int32]) -> None:
        """Append to an output, older ones making room; for good no more where there is none."""
        if output.sequence is None and not self._open(output):
            return
        tree = self._trees[output.fingerprint]
        while len(token_ids):
            before = tree.nbytes
            tree.max_bytes = self.max_bytes - (self.nbytes - before)
            learnt = tree.extend(output.sequence, token_ids)
            self._tree_bytes += tree.nbytes - before
            token_ids = token_ids[learnt:]
            if len(token_ids) and not self._evict(output):
                output.full = True
                return

    def _open(self, output: RunningOutput) -> bool:
        """Give an output a sequence in its model's tree, where there is room for one."""
        while True:
            known = self._trees.get(output.fingerprint)
            tree = SuffixTree(self.max_depth) if known is None else known
            counted = 0 if known is None else tree.nbytes
            tree.max_bytes = self.max_bytes - (self.nbytes - counted) - _OUTPUT_BYTES
            sequence = tree.add_sequence() if tree.nbytes <= tree.max_bytes else None
            if known is not None or sequence is not None:
                self._tree_bytes += tree.nbytes - counted
            if sequence is not None:
                output.sequence = sequence
                self._trees[output.fingerprint] = tree
                self._outputs[output] = None
                return True
            if not self._evict(output):
                output.full = True
                return False

    def _evict(self, keep: RunningOutput) -> bool:
        """Drop the oldest output but `keep`, if there is one."""
        oldest = next((output for output in self._outputs if output is not keep), None)
        if oldest is None:
            return False
        self._drop(oldest)
        return True

    def _drop(self, output: RunningOutput) -> None:
        """Take an output out of its tree; it will not be learnt any further."""
        name = output.fingerprint
        tree = self._trees[name]
        before = tree.nbytes
        tree.remove(output.sequence)
        self._tree_bytes += tree.nbytes - before
        if not len(tree):
            del self._trees[name]
            self._tree_bytes -= tree.nbytes
        del self._outputs[output]
        if output in self._finished.get(name, ()):
            self._finished[name].remove(output)
            if not self._finished[name]:
                del self._finished[name]
        output.sequence, output.full = None, True


def _shared_outputs(
    path: str | os.PathLike[str] | None, url: str | None, keep_bytes: int
) -> SharedOutputs | None:
    if path is not None and url is not None:
        raise ValueError("path: expected none beside url, got both")
    if url is not None:
        return OutputStream(RedisServer(url), keep_bytes)
    return None if path is None else OutputLog(path, keep_bytes)


class RunningOutput:
    """An output that an :class:`OutputMemory` learns while it grows. One thread at a time.

    Attributes:
        fingerprint: of the model that writes it.
        sequence: its id in the memory's tree; None before its first token and after its eviction.
        number: its place in the log, when it is there.
        finished: whether it grows no more.
        full: whether the memory takes in no more of it.
        forgotten: whether the memory was told to forget it; it will not be logged either.
    """

    __slots__ = (
        *("_memory", "_tokens", "finished", "fingerprint", "forgotten", "full", "number"),
        "sequence",
    )

    def __init__(self, memory: OutputMemory, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.sequence: int | None = None
        self.number: int | None = None
        self.finished = self.full = self.forgotten = False
        self._memory = memory
        self._tokens: list[NDArray[np.int32]] = []

    @property
    def live_sequence(self) -> int | None:
        """Its id in the memory's tree while all of its tokens are there, otherwise None."""
        return None if self.full else self.sequence

    def extend(self, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Append tokens.

        Raises:
            ValueError: for a negative id, or one above 2^31 − 1.
        """
        self.append(_checked(token_ids))

    def append(self, token_ids: NDArray[np.int32]) -> None:
        """Append what is known to be token ids, int32 [n], and to stay as it is."""
        with self._memory.lock:
            if not self.full:
                self._memory._learn(self, token_ids)
            self._tokens.append(token_ids)

    def close(self) -> None:
        """The output is finished: write it to the log. Called once."""
        with self._memory.lock:
            if self._tokens and not self.forgotten:
                self._memory._finish(self, np.concatenate(self._tokens))
            self.finished = True
            self._tokens.clear()


def _checked(token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
    """A copy of ids as int32 [n]; ValueError for what is none."""
    tokens = np.array(token_ids, dtype=getattr(token_ids, "dtype", np.int64))
    ids = tokens.tolist() if len(tokens) < _FEW else [tokens.min(), tokens.max()]
    if len(ids) and not 0 <= min(ids) <= max(ids) < 2**31:
        raise ValueError(f"token_ids: expected 0 to 2^31 - 1, got {token_ids}")
    return tokens.astype(np.int32, copy=False)
