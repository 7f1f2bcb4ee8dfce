"""A SQLite database of finished outputs that several processes share.

Two tables: `outputs`, whose names are microseconds since 1970 and only grow, and `forgotten`, with
the names of forgettings among them, and what each was of. SQLite keeps its rollback journal beside
the file during a transaction; between transactions the one file is all, so that it may be deleted,
replaced or copied under running processes.
"""

from __future__ import annotations

import math
import os
import re
import sqlite3
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .outputs import HANDED_OVER, MOST_FORGETTINGS, Forgettings, Output, OutputQueue, SharedOutputs

_SCHEMA = [
    "CREATE TABLE outputs (name INTEGER PRIMARY KEY, writer BLOB, place INTEGER, model TEXT,"
    " ids BLOB, crc INTEGER)",
    "CREATE TABLE forgotten (name INTEGER, prefix TEXT)",
]
_APPLICATION = 0x48465241  # the header's, and the version
_VERSION = 3
_SETTINGS = (
    "trusted_schema = OFF",
    "cell_size_check = ON",
    "temp_store = MEMORY",
    "secure_delete = ON",  # what makes room for newer outputs is overwritten
    "synchronous = OFF",  # the journal undoes what a killed process has begun, unless power is lost
    "journal_mode = DELETE",
)
_FAR = 10 * 365 * 86_400 * 10**6  # names as far in the future are none that time has given
_LARGEST = 1 << 24  # bytes of an output that is read
_ROW_BYTES = 48  # an output's besides its fingerprint and ids
_PATIENCE = 2.0  # seconds to wait for other processes, once; then not until they have let go
_FORGETTING = 10.0  # seconds to wait before everything is forgotten
_OWNER_ONLY = 0o600
# What SQLite says where a file cannot be locked; of some systems without locks, that it is busy.
_UNLOCKED = re.compile("SQLITE_(BUSY|PERM|IOERR_.*LOCK)")
_REMEDY = "where its file system has no locks, choose a local path, or share outputs by url="


class OutputLog(SharedOutputs):
    """A process's view of the database at `path`, which is made where it is missing.

    Its owner alone may read it (mode 0600); a file that others could read is closed to them. When
    `append` returns, the output is with the operating system: it survives the death of every
    process, though not a loss of power. One thread at a time.

    Args:
        path: the file; symbolic links are followed now.
        keep_bytes: when more than twice this size is in use, only the newest outputs, up to this
            size, are kept.

    Raises:
        ValueError: from any method but `forget` of everything, if the file is not such a log, of a
            later version, or damaged.
        OSError: from any method, if the file cannot be used, or is used by others for too long; it
            names the file.
    """

    place = "on disk"
    beginning = 0

    def __init__(self, path: str | os.PathLike[str], keep_bytes: int) -> None:
        super().__init__(keep_bytes)
        self.path = Path(path).resolve()
        self._database: sqlite3.Connection | None = None
        self._opened: tuple[int, ...] = ()  # process, device and inode of the open database
        self._patience = _PATIENCE

    def read(self) -> tuple[list[str], list[Output]]:
        with self._transaction() as database:
            outputs = self._news(database)
        return self._take_forgotten(), outputs

    def append(self, fingerprint: str, token_ids: NDArray[np.int32]) -> bool:
        """See `SharedOutputs`. An output that cannot be written now is written with a later one."""
        output = self._own(fingerprint, token_ids)
        try:
            while True:
                with self._transaction() as database:
                    forgotten = fingerprint.startswith(tuple(self._forgotten))
                    new = [] if forgotten else [output]
                    for waiting in [*self._pending, *new]:
                        self._insert(database, waiting)
                    self._make_room(database)
                if self._opened == self._found():  # and not deleted or replaced meanwhile
                    break
        except (OSError, ValueError):
            self._pending.append(output)
            raise
        self._pending = OutputQueue(self.keep_bytes)
        return not forgotten

    def forget(self, prefix: str) -> int:
        """See `SharedOutputs`. To forget everything the file is emptied in place, whatever it
        holds, so that other links to it do not keep the outputs."""
        self._patience = _FORGETTING
        self._drop([prefix])
        if prefix:
            with self._transaction() as database:
                return self._forget(database, self._next_name(database), prefix)
        name, count = max(_now(), self._newest + 1), 0
        try:
            with self._transaction() as database:
                name = self._next_name(database)
                count = _number(database, "SELECT count(*) FROM outputs")
                database.execute("ROLLBACK")
                database.execute("BEGIN EXCLUSIVE")
                self._clear()
        except ValueError:  # nobody can use it
            self._clear()
        self._database = None  # it remembers the tables
        self._known, self._heard = {name: ""}, True
        with self._transaction() as database:
            # Processes that have not heard of it may have been quicker with the new file.
            self._forget(database, self._next_name(database), "")
        self._forgotten = []
        return count

    def sync(self, timeout: float) -> bool:
        """True: whoever reads the file sees it as it is."""
        return True

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything that the block does, or nothing; what was forgotten is told in between."""
        try:
            database = self._connected()
            database.execute(f"PRAGMA busy_timeout = {int(1000 * self._patience)}")
            self._patience = 0.0
            database.execute("PRAGMA shrink_memory")  # the pages may be those of another file now
            database.execute("BEGIN IMMEDIATE")
            self._patience = _PATIENCE
            with database:
                self._prepare(database)
                self._hear_from(database)
                yield database
        # Messages that quote a damaged file are not always UTF-8.
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            # A file that may be written to is not read-only, whatever its damaged header says.
            damaged = "readonly" in str(error) and os.access(self.path, os.W_OK)
            damaged |= "unsupported file format" in str(error)
            if isinstance(error, sqlite3.OperationalError) and not damaged:
                said = f"{self.path}: {error}"
                if _UNLOCKED.match(getattr(error, "sqlite_errorname", "")):
                    said += f"; {_REMEDY}"
                raise OSError(said) from error
            self._database = None  # it remembers what the header said
            raise ValueError(f"{self.path}: expected a log of outputs, got {error}") from error

    def _connected(self) -> sqlite3.Connection:
        """The database that is now at the path, opened by this process."""
        if self._database is None or self._opened != self._found():
            self._database = None
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _OWNER_ONLY))
            self._opened = self._found()
            how: dict[str, Any] = {"uri": True, "isolation_level": None, "check_same_thread": False}
            uri = f"{self.path.as_uri()}?mode=rw"
            database = sqlite3.connect(uri, timeout=self._patience, **how)
            database.text_factory = partial(bytes.decode, errors="replace")
            for setting in _SETTINGS:
                database.execute(f"PRAGMA {setting}")
            self._database = database
        return self._database

    def _found(self) -> tuple[int, ...]:
        """Process, device and inode of what is at the path; closed to other users from now on."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return ()
        if os.name != "nt" and found.st_mode & 0o077:
            self.path.chmod(_OWNER_ONLY)
        return os.getpid(), found.st_dev, found.st_ino

    def _prepare(self, database: sqlite3.Connection) -> None:
        """Make the tables in an empty file; ValueError for other tables."""
        header = [_number(database, f"PRAGMA {n}") for n in ("application_id", "user_version")]
        tables = [sql for (sql,) in database.execute("SELECT sql FROM sqlite_master LIMIT 3")]
        if not tables and header == [0, 0]:
            for command in _SCHEMA:
                database.execute(command)
            database.execute(f"PRAGMA application_id = {_APPLICATION}")
            database.execute(f"PRAGMA user_version = {_VERSION}")
        elif tables != _SCHEMA or header[0] != _APPLICATION:
            raise ValueError(f"{self.path}: expected a log of outputs, got another database")
        elif header[1] != _VERSION:
            raise ValueError(f"{self.path}: expected version {_VERSION}, got {header[1]}")

    def _hear_from(self, database: sqlite3.Connection) -> None:
        """Hear what others have forgotten, and forget anew what an older copy brought back."""
        queries = ("SELECT count(*) FROM forgotten", "SELECT max(name) FROM forgotten")
        if [_number(database, query) for query in queries] != [len(self._known), self._newest]:
            stored: Forgettings = dict(database.execute("SELECT name, prefix FROM forgotten"))
            if not all(isinstance(prefix, str) for prefix in stored.values()):
                raise sqlite3.DatabaseError("something else in place of what was forgotten")
            # What was forgotten before this process first looked is no news to it.
            for name, prefix in self._hear(stored, math.inf).items():
                self._forget(database, name, prefix)
        self._heard = True

    def _forget(self, database: sqlite3.Connection, name: int, prefix: str) -> int:
        """Drop the outputs with a prefix that are older than a name, and say so to others; how many
        those were."""
        where = "name < ? AND substr(model, 1, ?) = ?" if prefix else "name < ?"
        arguments = [name, len(prefix), prefix] if prefix else [name]
        count = database.execute(f"DELETE FROM outputs WHERE {where}", arguments).rowcount
        database.execute("INSERT INTO forgotten VALUES (?, ?)", [name, prefix])
        self._known[name] = prefix
        if len(self._known) > 2 * MOST_FORGETTINGS:
            oldest = sorted(self._known)[-MOST_FORGETTINGS]
            self._known = {n: p for n, p in self._known.items() if n > oldest} | {oldest: ""}
            database.execute("DELETE FROM forgotten WHERE name <= ?", [oldest])
            database.execute("INSERT INTO forgotten VALUES (?, '')", [oldest])
        return count

    def _next_name(self, database: sqlite3.Connection) -> int:
        last = _number(database, "SELECT max(name) FROM outputs WHERE name < ?", _now() + _FAR)
        return max(_now(), last + 1, self._newest + 1)

    @property
    def _newest(self) -> int:
        return max(self._known, default=0)

    def _insert(self, database: sqlite3.Connection, output: Output) -> None:
        fields = output.fields()
        row = (self._next_name(database), *fields, _checksum(*fields))
        database.execute("INSERT INTO outputs VALUES (?, ?, ?, ?, ?, ?)", row)

    def _make_room(self, database: sqlite3.Connection) -> None:
        """Keep the newest outputs up to `keep_bytes`, the last one in any case."""
        counted = ("page_size", "page_count", "freelist_count")
        size, pages, free = (_number(database, f"PRAGMA {name}") for name in counted)
        if size * (pages - free) <= 2 * self.keep_bytes:
            return
        beyond = _now() + _FAR
        # What each output but the newest takes, and what those after it take.
        sums = (
            f"SELECT name, sum(length(ids) + length(model) + {_ROW_BYTES}) OVER (ORDER BY name DESC"
            " ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS kept FROM outputs"
            " WHERE name < (SELECT max(name) FROM outputs WHERE name < :beyond)"
        )
        where = f"name <= (SELECT max(name) FROM ({sums}) WHERE kept > :keep) OR name >= :beyond"
        arguments = {"keep": self.keep_bytes, "beyond": beyond}
        database.execute(f"DELETE FROM outputs WHERE {where}", arguments)

    def _news(self, database: sqlite3.Connection) -> list[Output]:
        if not _number(database, "SELECT count(*) FROM outputs WHERE name = ?", self._last_read):
            # It has made room, or the file is another one. Writers tell what was read before.
            self._last_read = self.beginning
        columns = "name, writer, place, model, ids, crc"
        rows = database.execute(
            f"SELECT {columns} FROM outputs WHERE name > ? AND name < ?"
            f" AND length(ids) <= {_LARGEST} AND length(model) <= {_LARGEST} ORDER BY name",
            [self._last_read, _now() + _FAR],
        )
        outputs: list[Output] = []
        size = damaged = 0
        for name, *fields, checksum in rows:
            if name <= self._last_read:
                raise sqlite3.DatabaseError("rows that are not in order")
            self._last_read = name
            output = _output(fields, checksum)
            damaged += output is None
            if output is not None and self._is_new(output):
                outputs.append(output)
                size += output.nbytes
            if size > HANDED_OVER:
                break
        rows.close()
        if damaged:
            warnings.warn(f"{self.path}: skipped {damaged} damaged outputs", stacklevel=5)
        return outputs

    def _clear(self) -> None:
        for path in (self.path, Path(f"{self.path}-journal")):
            with suppress(FileNotFoundError):
                os.truncate(path, 0)


def _now() -> int:
    return time.time_ns() // 1000


def _number(database: sqlite3.Connection, query: str, *arguments: int) -> int:
    """The one number that a query finds, 0 where there is none."""
    row = database.execute(query, arguments).fetchone()
    number = 0 if row is None or row[0] is None else row[0]
    if not isinstance(number, int) or not 0 <= number < _now() + _FAR:
        raise sqlite3.DatabaseError(f"{number!r} in place of a number")
    return number


def _checksum(writer: bytes, place: int, model: str, ids: bytes) -> int:
    return zlib.crc32(b"%s %d %s %s" % (writer, place, model.encode(), ids))


def _output(fields: list[Any], checksum: Any) -> Output | None:
    """An output as it was inserted, otherwise None."""
    with suppress(AttributeError, OverflowError, TypeError, ValueError):
        if _checksum(*fields) == checksum:
            return Output.from_fields(*fields)
    return None
