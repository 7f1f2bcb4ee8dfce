"""What earlier outputs taught: one bounded suffix tree for each model, kept on disk or shared."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plugins import load, paths
from ..structures.suffix_tree import MAX_DEPTH, SuffixTree
from ..system.arguments import byte_count, real_number, whole_number
from ..system.locks import Lock
from .log import Output, SharedOutputs
from .running_output import GROUP_MARK, OutputTree, RunningOutput

# A token takes 50 to 80 bytes in the tree and 4 in the log, so that the log's newest records, up to
# this share of the limit, are about what the trees can hold.
_LOG_SHARE = 12

# Tables that are learnt besides outputs, of a model and a tenant each: how many there are, and the
# share of the limit that all of them take at most; of that, half is for each.
_MOST_TABLES = 64
_TABLES_SHARE = 4

# Separates a tenant's digest from what is inside the tenant's namespace.
_TENANT_MARK = ":"


class OutputMemory:
    """Remembers outputs, so that later ones that resemble them can be drafted.

    Outputs of different models (by `Target.fingerprint`) are kept apart, since their token ids mean
    different things; outputs added without a fingerprint are those of the first model that drafts
    from this memory. Memory in use never exceeds `max_bytes`, tokens of running outputs,
    fingerprints and the tables of drafters among it: the oldest outputs go first. Safe to use from
    several threads.

    With `path`, finished outputs are also kept in a log, an SQLite database, so that they survive a
    restart. An output is in the log when `add`, or `RunningOutput.close`, returns, and then
    outlives even a killed process (not a loss of power); outputs still running are lost with it,
    and those that had to make room before their end are not written. Several processes of one
    machine may share one path: each reads what the others have finished whenever it starts an
    output. The log holds outputs in plain form, readable by their owner alone (mode 0600). Prompts
    are not learnt, unless they are handed to `add`.

    Where the log cannot be read or written later on, a full disk say, or another process that holds
    it for seconds, one warning tells so and outputs are kept in memory alone until it works again.
    Nobody who starts a text waits for the log.

    With `url`, processes on any number of machines share finished outputs through a Redis or Valkey
    server. Nothing but `sync` and `forget` waits for the network: outputs are exchanged in the
    background, and a process goes on alone while the server is away and delivers its outputs later.
    A sixth of `max_bytes` is for what waits on either side. Whoever may read the server's keys may
    read the outputs.

    Where the model itself changes, as a policy in training, older outputs resemble its present ones
    less and less. With a `half_life`, every output that is finished makes each older one of its
    model (or prompt, see :func:`prompt_group`) be dropped with the chance that leaves half of them
    after so many: counts then weigh outputs by their age, and a group stays small.

    Args:
        max_bytes: bound on the memory that all trees and tables together occupy; a number, or
            "1GB".
        max_depth: longest context plus draft, in tokens.
        path: log file; None keeps outputs in memory only.
        url: server, `redis://`, `rediss://` or `unix://` as the `redis` client reads it, with a
            password unless the host is this machine; instead of `path`.
        half_life: later outputs of its kind that an output has an even chance to outlive; None
            drops outputs for want of room only.
        by_prompt: keep the outputs of every prompt apart: a text is drafted from those of its own
            prompt alone, others that are being written beside it among them. For rollouts, many
            samples of each prompt; with a `half_life`, of 16 say, older ones fade as the policy
            moves on.

    Attributes:
        by_prompt: as above.
        lock: guards the trees that `tree` hands out.

    Raises:
        ValueError: if the file at `path` is not a log of outputs, `max_bytes` is too little,
            another number is out of range, or `url` lacks a password or is none of the client's.
        TypeError: if an argument is no number, or `max_bytes` is a text of another form.
        OSError: if the file at `path` cannot be read, or locked, or closed to others.
        ImportError: with `url`, if the `redis` extra is not installed.
    """

    _prefix = ""  # the fingerprints' of a tenant's outputs

    def __init__(
        self,
        max_bytes: int | str = 256 << 20,
        max_depth: int = 64,
        path: str | os.PathLike[str] | None = None,
        url: str | None = None,
        half_life: float | None = None,
        by_prompt: bool = False,
    ) -> None:
        self.by_prompt = by_prompt
        self.max_depth = whole_number("max_depth", max_depth, 1, MAX_DEPTH)
        smallest = 2 * SuffixTree(self.max_depth).nbytes
        given = os.fspath(max_bytes) if isinstance(max_bytes, os.PathLike) else max_bytes
        try:
            size = byte_count(given, "max_bytes")
        except ValueError as error:
            raise TypeError(f"{error}; path= keeps outputs in a file, url= on a server") from None
        self.max_bytes = whole_number("max_bytes", size, smallest)
        if half_life is not None and not real_number("half_life", half_life) > 0:
            raise ValueError(f"half_life: expected None or a number above 0, got {half_life}")
        self.half_life = half_life
        self.lock = Lock()
        self._log_lock = Lock()  # taken before the other one
        self._kinds: dict[str, OutputTree] = {}  # keys: fingerprints
        self._tables: OrderedDict[str, Any] = OrderedDict()  # the last one used is last
        self._outputs: OrderedDict[RunningOutput, None] = OrderedDict()  # those in trees, by age
        self._tree_bytes = 0
        self._output_bytes = 0  # outputs in the trees, besides their tokens
        self._forgettings = 0  # so many have been
        self._log = _shared_outputs(path, url, self.max_bytes // _LOG_SHARE)
        # Bytes for trees and tables.
        self._room = self.max_bytes - (self._log.waiting_bytes if self._log else 0)
        self._alone = False  # the log could not be read or written lately
        while self._learn_news():
            pass

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        with self.lock:
            return self._tree_bytes + self._output_bytes + self._table_bytes

    @property
    def _table_bytes(self) -> int:
        return sum(table.nbytes for table in self._tables.values())

    @property
    def token_count(self) -> int:
        """Number of tokens remembered; see `len`."""
        with self.lock:
            return sum(kind.tree.token_count for kind in self._own_kinds())

    def __repr__(self) -> str:
        kept = "" if self._log is None else f", {self._log.place}"
        if self._alone:  # the next output that is written ends it
            kept = ", in memory only by now"
        size = f"{self.nbytes / 2**20:.1f} of {self.max_bytes / 2**20:,.0f} MiB"
        return f"OutputMemory({len(self)} outputs of {self.token_count:,} tokens, {size}{kept})"

    def __len__(self) -> int:
        """Number of outputs remembered, running ones included: a namespace's own, or all."""
        with self.lock:
            return sum(len(kind.outputs) for kind in self._own_kinds())

    def _own_kinds(self) -> Iterator[OutputTree]:
        """All of a memory; of a namespace those that are not in a namespace inside it."""
        for name, kind in self._kinds.items():
            if not self._prefix or name.rpartition(_TENANT_MARK)[0] == self._prefix[:-1]:
                yield kind

    def namespace(self, tenant: str) -> OutputMemory:
        """This memory for one tenant: what it writes is drafted to nobody else, nor is anything of
        others to it.

        Tenants share the bound of bytes, the log and the server. The oldest outputs go first,
        whoever wrote them, so that a full memory shows that others write much, but not what. Give
        each tenant an assistant of its own: whatever else assistants learn of texts stays in them.
        A namespace inside a tenant's is forgotten with it.

        Args:
            tenant: any name; the log and the server are told a digest of it.

        Raises:
            ValueError: an empty name.
            TypeError: what is no text.
        """
        if not isinstance(tenant, str):
            raise TypeError(f"tenant: expected a name, got {type(tenant).__name__}")
        if not tenant:
            raise ValueError("tenant: expected a name, got ''")
        return _Namespace(self, tenant)

    def table(self, name: str, fingerprint: str, make: Callable[[int], Any]) -> Any:
        """What a drafter learns of a model's texts besides outputs: a tenant's own, kept in this
        process until the outputs are forgotten.

        All tables take a quarter of `max_bytes` at most. Those that were not asked for the longest
        go first; one that is larger than that is made for each text.

        Args:
            name: tells tables of one model apart.
            fingerprint: of the model.
            make: makes the table, of at most so many bytes if it can be that small. It has
                `nbytes`; whoever makes it grow calls `make_room`.
        """
        key = f"{self._prefix}{fingerprint}{GROUP_MARK}{name}"
        most = self.max_bytes // _TABLES_SHARE
        with self.lock:
            table = self._tables.pop(key, None)
            table = make(most // 2) if table is None else table
            if table.nbytes <= most:
                self._tables[key] = table
                self.make_room()
            return table

    def make_room(self) -> None:
        """Drop the oldest tables and outputs until what is left is within its bounds."""
        with self.lock:
            most = self.max_bytes // _TABLES_SHARE
            while self._table_bytes > most or len(self._tables) > _MOST_TABLES:
                self._tables.popitem(last=False)
            while self.nbytes > self._room and self._evict():
                pass

    def tree(self, fingerprint: str = "") -> SuffixTree | None:
        """The suffix tree of a model's outputs, to be used while holding `lock`.

        Finished outputs of no named model become this model's.
        """
        if self._prefix in self._kinds and fingerprint and GROUP_MARK not in fingerprint:
            self._adopt(fingerprint)
        kind = self._kinds.get(self._prefix + fingerprint)
        return kind and kind.tree

    def add(self, token_ids: Sequence[int] | NDArray[np.int32], fingerprint: str = "") -> None:
        """Learn a whole output, or any other text.

        Args:
            token_ids: the text.
            fingerprint: of the model that is to draft from it, see
                :mod:`~hf_retrieval_assist.host.fingerprint`; by default the first model
                that drafts from this memory.

        Raises:
            TypeError: for what is no list of integers.
            ValueError: for a negative id.
        """
        output = self.start(fingerprint)
        output.extend(token_ids)
        output.close()

    def start(self, fingerprint: str = "") -> RunningOutput:
        """An output that is learnt while it grows. Reads what other processes have finished."""
        with self._tolerated():
            self._learn_news(wait=False)
        return RunningOutput(self, self._prefix + fingerprint, self._forgettings)

    def extend(
        self,
        outputs: Sequence[RunningOutput | None],
        token_ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
    ) -> None:
        """Append tokens to running outputs.

        Args:
            outputs: of this memory; None where nothing is learnt.
            token_ids: int32 [n], ids, one output's behind another's.
            offsets: int64 [outputs + 1], where each output's begin.
        """
        with self.lock:
            learnt = self._learn_together(outputs, token_ids, offsets)
            bounds = pairwise(offsets.tolist()) if learnt < len(token_ids) else ()
            for output, (first, end) in zip(outputs, bounds, strict=False):
                if output is not None and not output.full and end > learnt:
                    self._learn(output, token_ids[max(first, learnt) : end])

    def refresh(self) -> None:
        """Learn all that other processes have written to the log, or that has come from the server.

        Starting an output learns a part of it, small enough not to delay the output.
        """
        with self._tolerated():
            while self._learn_news(wait=not self._alone):
                pass

    def _learn_news(self, wait: bool = True) -> bool:
        """Learn some of what other processes have finished; whether there was any."""
        if self._log is None or not self._log_lock.acquire(blocking=wait):
            return False
        try:
            news = self._log.read(wait)
            with self.lock:
                if news.anew:
                    self._forget("")
                for fingerprint, token_ids in news.outputs:
                    self._learn_finished(fingerprint, token_ids)
        finally:
            self._log_lock.release()
        return news.anew or bool(news.outputs)

    def sync(self, timeout: float = 10.0) -> bool:
        """Wait until others can read all outputs finished here, and learn all of theirs.

        Only a memory on a server has anything to wait for, as a process starts or before it ends.

        Args:
            timeout: in seconds.

        Returns:
            Whether the server was reached in time.
        """
        reached = self._log is None or self._log.sync(timeout)
        self.refresh()
        return reached

    def forget(self) -> int:
        """Forget every output, running ones and those in the log or on the server included: of a
        namespace the tenant's alone, of the memory that tenants share everybody's.

        Other processes forget them when they next start or finish an output; they then forget
        everything and learn anew what is still in the log or on the server.

        Returns:
            How many outputs those were: in this memory, or in the log where that has more.

        Raises:
            OSError: the others could not be told; this process has forgotten.
            ValueError: a tenant's outputs are in a log that is damaged; forgetting all empties it.
        """
        with self._log_lock:
            with self.lock:
                count = self._forget(self._prefix)
            return count if self._log is None else max(count, self._log.forget(self._prefix))

    def _forget(self, prefix: str) -> int:
        self._forgettings += 1
        for key in [key for key in self._tables if key.startswith(prefix)]:
            del self._tables[key]
        forgotten = [one for one in self._outputs if one.fingerprint.startswith(prefix)]
        for output in forgotten:
            self._drop(output)
        return len(forgotten)

    def _adopt(self, fingerprint: str) -> None:
        """Make the finished outputs of no named model those of this one."""
        unnamed = self._kinds[self._prefix]
        texts = []
        for output in [output for output in unnamed.outputs if output.finished]:
            texts.append(unnamed.tree.tokens(output.sequence))
            self._drop(output)
        for token_ids in texts:
            self._learn_finished(self._prefix + fingerprint, token_ids)

    def _learn_finished(self, fingerprint: str, token_ids: NDArray[np.int32]) -> None:
        output = RunningOutput(self, fingerprint, self._forgettings)
        output.finished = True
        self._learn(output, token_ids)
        self._fade(output)

    def _fade(self, newest: RunningOutput) -> None:
        """Drop older outputs of its kind by chance, now that one more is finished."""
        if self.half_life is not None and newest.sequence is not None:
            for output in self._kinds[newest.fingerprint].fade(newest, self.half_life):
                self._drop(output)

    def finish(self, output: RunningOutput) -> None:
        """Write an output to the log that grows no more; see `RunningOutput.close`."""
        with self._log_lock:
            with self.lock:
                output.finished = True
                self._fade(output)
                if self._log is None or output.live_sequence is None:
                    return
                token_ids = self._kinds[output.fingerprint].tree.tokens(output.sequence)
            with self._tolerated():
                finished = Output(output.fingerprint, token_ids)
                if not self._log.append(finished, wait=not self._alone):
                    self._learn_news()
                self._alone = False

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Go on in memory alone where the log fails; it is tried again at every output."""
        try:
            yield
        except (OSError, ValueError) as error:
            if not self._alone:
                warnings.warn(f"outputs are not kept on disk for now: {error}", stacklevel=4)
            self._alone = True

    def _learn(self, output: RunningOutput, token_ids: NDArray[np.int32]) -> None:
        """Append to an output, older ones making room; for good no more where there is none."""
        while len(token_ids):
            learnt = self._learn_together([output], token_ids, np.array([0, len(token_ids)]))
            token_ids = token_ids[learnt:]
            if len(token_ids) and not self._evict(output):
                output.full = True
                return

    def _learn_together(
        self,
        outputs: Sequence[RunningOutput | None],
        token_ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
    ) -> int:
        """Append to outputs of one model in one call, where all of them are learnt.

        Returns how many of the tokens found room.
        """
        for output in filter(None, outputs):
            if output.sequence is None and not output.full:
                self._open(output)
        live = [o for o in outputs if o is not None and o.live_sequence is not None]
        if len({output.fingerprint for output in live}) != 1 or len(live) < len(outputs):
            return 0
        tree = self._kinds[live[0].fingerprint].tree
        before = tree.nbytes
        tree.max_bytes = self._room - (self.nbytes - before)
        learnt = tree.extend_all([output.sequence for output in live], token_ids, offsets)
        self._tree_bytes += tree.nbytes - before
        return learnt

    def _open(self, output: RunningOutput) -> None:
        """Give an output a sequence in its model's tree, if there is room for one."""
        output.full = output.forgettings < self._forgettings
        while not output.full:
            known = self._kinds.get(output.fingerprint)
            kind, counted = known or OutputTree(self.max_depth), known.tree.nbytes if known else 0
            tree = kind.tree
            tree.max_bytes = self._room - (self.nbytes - counted) - output.cost
            if tree.nbytes <= tree.max_bytes:
                output.sequence = tree.add_sequence()
            if known or output.sequence is not None:
                self._tree_bytes += tree.nbytes - counted
            if output.sequence is not None:
                self._kinds[output.fingerprint] = kind
                kind.outputs[output] = self._outputs[output] = None
                self._output_bytes += output.cost
                return
            output.full = not self._evict(output)

    def _evict(self, keep: RunningOutput | None = None) -> bool:
        """Drop the oldest output but `keep`, if there is one."""
        oldest = next((output for output in self._outputs if output is not keep), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, output: RunningOutput) -> None:
        """Take an output out of its tree; it will not be learnt any further."""
        kind = self._kinds[output.fingerprint]
        before = kind.tree.nbytes
        kind.tree.remove(output.sequence)
        self._tree_bytes += kind.tree.nbytes - before
        del self._outputs[output], kind.outputs[output]
        if not kind.outputs:
            del self._kinds[output.fingerprint]
            self._tree_bytes -= kind.tree.nbytes
        self._output_bytes -= output.cost
        output.sequence, output.full = None, True


class _Namespace(OutputMemory):
    """A memory as one tenant sees it."""

    __slots__ = ("_prefix",)  # all else is the memory's

    def __init__(self, memory: OutputMemory, tenant: str) -> None:
        self.__dict__ = memory.__dict__
        name = tenant.encode(errors="surrogatepass")
        digest = hashlib.blake2b(name, digest_size=12).hexdigest()
        self._prefix = memory._prefix + digest + _TENANT_MARK


def _shared_outputs(
    path: str | os.PathLike[str] | None, url: str | None, keep_bytes: int
) -> SharedOutputs | None:
    if path is not None and url is not None:
        raise ValueError("path: expected none beside url, got both")
    if url is not None:
        scheme = url.partition(":")[0]
        if scheme not in (known := paths("memories")):
            *most, last = [f"{one}://" for one in known] or ["none, without the extension for it"]
            expected = f"{', '.join(most)} or {last}" if most else last
            raise ValueError(f"url: expected {expected}, got {scheme or 'no scheme'}")
        outputs: SharedOutputs = load("memories", scheme)(url, keep_bytes)
        return outputs
    if path is not None:
        from .log import OutputLog

        return OutputLog(path, keep_bytes)
    return None
