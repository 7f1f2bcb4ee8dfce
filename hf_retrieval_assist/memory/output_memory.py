"""What earlier outputs taught: one bounded suffix tree for each model, optionally kept on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from ..structures.suffix_tree import SuffixTree
from .log import OutputLog, Record

# A token takes 50 to 80 bytes in the tree and 4 in the log, so that the log's newest records, up to
# this share of the limit, are about what the trees can hold.
_LOG_SHARE = 12

# What an output costs besides its tokens: its object and its place among the others.
_OUTPUT_BYTES = 256


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

    Args:
        max_bytes: bound on the memory that all trees together occupy.
        max_depth: longest context plus draft, in tokens.
        path: log file; None keeps outputs in memory only.

    Attributes:
        lock: guards the trees that `tree` hands out.

    Raises:
        ValueError: if the file at `path` is not a log of outputs, or `max_bytes` is too little.
    """

    def __init__(
        self,
        max_bytes: int = 256 << 20,
        max_depth: int = 64,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        smallest = SuffixTree(max_depth).nbytes
        if max_bytes < 2 * smallest:
            raise ValueError(f"max_bytes: expected at least {2 * smallest}, got {max_bytes}")
        self.max_bytes = max_bytes
        self.max_depth = max_depth
        self.lock = RLock()
        self._trees: dict[str, SuffixTree] = {}
        self._outputs: dict[RunningOutput, None] = {}  # in order of age
        self._log = None if path is None else OutputLog(path, max_bytes // _LOG_SHARE)
        self.refresh()

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        with self.lock:
            trees = sum(tree.nbytes for tree in self._trees.values())
            return trees + _OUTPUT_BYTES * len(self._outputs)

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
        if fingerprint and "" in self._trees:
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
        self.refresh()
        return RunningOutput(self, fingerprint)

    def refresh(self) -> None:
        """Learn what other processes have written to the log."""
        if self._log is not None:
            with self.lock:
                self._take_in(*self._log.read())

    def forget(self) -> None:
        """Forget every output, running ones and those in the log included.

        Other processes on the same log forget them when they next start or finish an output.
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
            for tree in self._trees.values():
                tree.check_invariants()

    def _take_in(self, floor: int, records: list[Record]) -> None:
        for output in [o for o in self._outputs if o.number is not None and o.number < floor]:
            self._drop(output)
        for record in records:
            self._learn_finished(record.fingerprint, record.token_ids, record.number)

    def _adopt(self, fingerprint: str) -> None:
        """Make the finished outputs of no named model those of this one."""
        unnamed = self._trees[""]
        finished = [o for o in self._outputs if not o.fingerprint and o.finished]
        if fingerprint not in self._trees and len(finished) == len(unnamed):
            # The whole tree, which a second one beside it would not leave room for.
            self._trees[fingerprint] = self._trees.pop("")
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

    def _finish(self, output: RunningOutput, token_ids: NDArray[np.int32]) -> None:
        if self._log is not None:
            self._take_in(*self._log.append(output.fingerprint, token_ids))
            output.number = self._log.last_number

    def _learn(self, output: RunningOutput, token_ids: NDArray[np.int32]) -> None:
        """Append to an output, older ones making room; for good no more where there is none."""
        if output.sequence is None and not self._open(output):
            return
        tree = self._trees[output.fingerprint]
        while len(token_ids):
            tree.max_bytes = self.max_bytes - (self.nbytes - tree.nbytes)
            token_ids = token_ids[tree.extend(output.sequence, token_ids) :]
            if len(token_ids) and not self._evict(output):
                output.full = True
                return

    def _open(self, output: RunningOutput) -> bool:
        """Give an output a sequence in its model's tree, where there is room for one."""
        while True:
            known = self._trees.get(output.fingerprint)
            tree = SuffixTree(self.max_depth) if known is None else known
            others = self.nbytes - (0 if known is None else tree.nbytes)
            tree.max_bytes = self.max_bytes - others - _OUTPUT_BYTES
            sequence = tree.add_sequence() if tree.nbytes <= tree.max_bytes else None
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
        tree = self._trees[output.fingerprint]
        tree.remove(output.sequence)
        if not len(tree):
            del self._trees[output.fingerprint]
        del self._outputs[output]
        output.sequence, output.full = None, True


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
        tokens = np.asarray(token_ids, dtype=np.int64)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < 2**31:
            raise ValueError(f"token_ids: expected 0 to 2^31 - 1, got {token_ids}")
        with self._memory.lock:
            if not self.full:
                self._memory._learn(self, tokens.astype(np.int32))
            self._tokens.append(tokens.astype(np.int32))

    def close(self) -> None:
        """The output is finished: write it to the log. Called once."""
        with self._memory.lock:
            self.finished = True
            if self._tokens and not self.forgotten:
                self._memory._finish(self, np.concatenate(self._tokens))
            self._tokens.clear()
