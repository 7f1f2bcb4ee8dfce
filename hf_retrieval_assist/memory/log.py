"""Finished outputs that several processes share, and an SQLite database that keeps them.

The database has a row per output and a mark, a random number that every forgetting replaces: who
finds another mark than before reads everything anew. SQLite guards a transaction by a rollback
journal, not by a write-ahead log, in whose file outputs would stay after they were forgotten.
"""

from __future__ import annotations

import os
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

HANDED_OVER = 1 << 16  # bytes of ids that one `read` returns, about: learnt in a few milliseconds

_SCHEMA = [
    "CREATE TABLE forgotten (mark INTEGER)",
    # No id comes twice, also after the last row was deleted.
    "CREATE TABLE outputs (id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT, ids BLOB)",
]
_SETTINGS = (
    "trusted_schema = OFF",
    "cell_size_check = ON",
    "secure_delete = ON",  # what is forgotten, or makes room, is overwritten
    "synchronous = OFF",  # the journal undoes what a killed process has begun, unless power is lost
)
_LARGEST = 1 << 24  # bytes of a row
_PATIENCE = 2.0  # seconds to wait for other processes
_FORGETTING = 10.0  # and before outputs are forgotten
_OWNER_ONLY = 0o600
# What SQLite says where a file cannot be used now, though it may be a good one; and where it cannot
# be locked: of some file systems without locks, that it is busy.
_UNUSABLE = re.compile("SQLITE_(BUSY|CANTOPEN|FULL|IOERR|PERM|READONLY)")
_UNLOCKED = re.compile("SQLITE_(BUSY|PERM|IOERR_.*LOCK)")
_REMEDY = "; where its file system has no locks, choose a local path, or share outputs by url="


class Output(NamedTuple):
    """A finished output: the fingerprint of its model, and token ids, int32 [n], not negative."""

    fingerprint: str
    token_ids: NDArray[np.int32]

    @classmethod
    def parse(cls, fingerprint: Any, ids: Any) -> Output:
        """What was stored, its ids as little-endian int32; ValueError for what is no output."""
        if isinstance(fingerprint, str) and isinstance(ids, bytes) and not len(ids) % 4:
            token_ids = np.frombuffer(ids, "<i4").astype(np.int32)
            if not (token_ids < 0).any():
                return cls(fingerprint, token_ids)
        raise ValueError("something that is no output")

    def stored_ids(self) -> bytes:
        """See `parse`."""
        return self.token_ids.astype("<i4").tobytes()


class News(NamedTuple):
    """What a process has not read yet.

    Attributes:
        anew: whether something was forgotten: nothing is to be kept of what was learnt before, and
            what is still there is read again, own outputs among it.
        outputs: finished ones of other processes; none if there are no more.
    """

    anew: bool
    outputs: list[Output]


class SharedOutputs(ABC):
    """A process's view of finished outputs that other processes read and write too.

    Attributes:
        place: what an `OutputMemory` shows.
        waiting_bytes: at most, of outputs that wait in this process to be written or read.
    """

    place: str
    waiting_bytes: int = 0

    @abstractmethod
    def read(self, wait: bool = True) -> News:
        """Others' outputs that were not read before, about `HANDED_OVER` bytes; without `wait`
        nothing is new while others write."""

    @abstractmethod
    def append(self, output: Output, wait: bool = True) -> bool:
        """Write an output, which fails without `wait` while others write; False, and it is not
        written, if others have forgotten something since the last `read`."""

    @abstractmethod
    def forget(self, prefix: str) -> int:
        """Drop the outputs whose fingerprints have this prefix, all for the empty one, for every
        process; how many those were, where that is told.

        Raises:
            OSError: the others could not be told.
            ValueError: what there is holds no outputs; not for the empty prefix.
        """

    def sync(self, timeout: float) -> bool:
        """Wait until what was written is with the others and what they wrote can be read; whether
        that was so within `timeout` seconds."""
        return True


class OutputLog(SharedOutputs):
    """The database at `path`, which is made where it is missing.

    Its owner alone may read it (mode 0600); a file that others could read is closed to them. When
    `append` returns, the output is with the operating system: it survives the death of every
    process, though not a loss of power. Every transaction has a connection of its own, so that
    forks share none. One thread at a time.

    Args:
        path: the file; symbolic links are followed now.
        keep_bytes: when more than twice this size is in use, the older half of the outputs goes.

    Raises:
        ValueError: from any method, if the file is not such a log, of another version, or damaged.
        OSError: from any method, if the file cannot be used, or is used by others for too long; it
            names the file.
    """

    place = "on disk"

    def __init__(self, path: str | os.PathLike[str], keep_bytes: int) -> None:
        self.path = Path(path).resolve()
        self.keep_bytes = keep_bytes
        self._mark: Any = None  # nothing was read
        self._last = 0  # the row that was read last
        self._own: set[int] = set()  # rows behind it that this process has written

    def read(self, wait: bool = True) -> News:
        try:
            with self._transaction("DEFERRED", _PATIENCE if wait else 0.0) as database:
                return self._read(database)
        except BlockingIOError:
            if wait:
                raise
            return News(False, [])

    def _read(self, database: sqlite3.Connection) -> News:
        if (mark := _mark(database)) != self._mark:
            anew = self._mark is not None
            self._mark, self._last = mark, 0
            self._own.clear()
            if anew:
                return News(True, [])
        outputs: list[Output] = []
        size = 0
        query = "SELECT id, model, ids FROM outputs WHERE id > ? ORDER BY id"
        with closing(database.execute(query, [self._last])) as rows:
            for row, model, ids in rows:
                if row <= self._last:
                    raise ValueError("rows that are not in order")
                if row not in self._own:
                    outputs.append(Output.parse(model, ids))
                    size += len(ids)
                self._last = row
                if size > HANDED_OVER:
                    break
        self._own = {row for row in self._own if row > self._last}
        return News(False, outputs)

    def append(self, output: Output, wait: bool = True) -> bool:
        with self._transaction("IMMEDIATE", _PATIENCE if wait else 0.0) as database:
            if _mark(database) != self._mark:
                return False
            insert = "INSERT INTO outputs (model, ids) VALUES (?, ?)"
            row = database.execute(insert, [output.fingerprint, output.stored_ids()]).lastrowid
            counted = ("page_size", "page_count", "freelist_count")
            size, pages, free = (_first(database, f"PRAGMA {name}") for name in counted)
            if size * (pages - free) > 2 * self.keep_bytes:
                middle = "SELECT (min(id) + max(id) + 1) / 2 FROM outputs"
                database.execute(f"DELETE FROM outputs WHERE id < ({middle})")
        assert row is not None
        self._own.add(row)
        return True

    def forget(self, prefix: str) -> int:
        """See `SharedOutputs`. To forget everything a damaged file is emptied."""
        try:
            with self._transaction("IMMEDIATE", _FORGETTING) as database:
                known = _mark(database) == self._mark
                delete = "DELETE FROM outputs WHERE ?2 = '' OR substr(model, 1, ?1) = ?2"
                gone = database.execute(delete, [len(prefix), prefix])
                database.execute("UPDATE forgotten SET mark = random()")
                mark = _mark(database)
        except ValueError:
            if prefix:
                raise
            for path in (self.path, Path(f"{self.path}-journal")):
                with suppress(FileNotFoundError):
                    os.truncate(path, 0)
            return self.forget("")
        if known:  # otherwise the next `read` tells what others have forgotten
            self._mark = mark
        return gone.rowcount

    @contextmanager
    def _transaction(self, kind: str, seconds: float) -> Iterator[sqlite3.Connection]:
        """Everything that the block does, or nothing; others are waited for so many seconds."""
        try:
            with closing(self._connection(seconds)) as database:
                for setting in _SETTINGS:
                    database.execute(f"PRAGMA {setting}")
                if not self.path.stat().st_size:
                    _make_tables(database)
                database.execute(f"BEGIN {kind}")
                with database:
                    if _tables(database) != _SCHEMA:
                        raise ValueError("a database with other tables")
                    yield database
        # Messages that quote a damaged file are not always UTF-8, which is a ValueError.
        except (sqlite3.Error, ValueError) as error:
            name = getattr(error, "sqlite_errorname", "")
            if not _UNUSABLE.match(name):
                expected = "expected a log of outputs, written by this version of the package"
                raise ValueError(f"{self.path}: {expected}, got {error}") from error
            said = f"{self.path}: {error}{_REMEDY if _UNLOCKED.match(name) else ''}"
            raise (BlockingIOError if "BUSY" in name else OSError)(said) from error

    def _connection(self, seconds: float) -> sqlite3.Connection:
        """The database that is now at the path; closed to other users."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _OWNER_ONLY))
        if os.name != "nt" and self.path.stat().st_mode & 0o077:
            self.path.chmod(_OWNER_ONLY)
        uri = f"{self.path.as_uri()}?mode=rw"
        database = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=seconds)
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST)
        return database


def _make_tables(database: sqlite3.Connection) -> None:
    database.execute("BEGIN IMMEDIATE")
    with database:
        if not _tables(database):  # otherwise another process was quicker
            for command in _SCHEMA:
                database.execute(command)
            database.execute("INSERT INTO forgotten VALUES (random())")


def _tables(database: sqlite3.Connection) -> list[Any]:
    query = "SELECT sql FROM sqlite_master WHERE name != 'sqlite_sequence' LIMIT 3"
    return [sql for (sql,) in database.execute(query)]


def _first(database: sqlite3.Connection, query: str) -> Any:
    """The first row's only value; None where there is no row."""
    return next(database.execute(query), (None,))[0]


def _mark(database: sqlite3.Connection) -> Any:
    return _first(database, "SELECT mark FROM forgotten")
