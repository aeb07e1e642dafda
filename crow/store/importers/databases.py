"""Reads SQLite databases of other programs from a private copy."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from crow.domain.errors import ArgumentError
from crow.store.importers.files import Damaged, open_regular, readable

_FAILURES = (sqlite3.Error, UnicodeDecodeError, MemoryError)
"""The exceptions that SQLite's functions raise. Invalid names or sizes in a damaged file cause the last two."""

MAGIC = b"SQLite format 3\0"
"""The first bytes of every SQLite file."""

_MOST_COPIED_BYTES = 64 * 1024 * 1024
"""If a database is larger, and its file has rows, `count_rows` counts only these and makes no copy."""
_ATTEMPTS = 3
"""A copy is tried this many times if the database changes meanwhile."""
_FETCH = 20
_MAX_VALUE = 64 * 1024 * 1024
_SUFFIXES = ("", "-wal")
"""The endings of the files of a database: the file itself, and its write-ahead log."""


class ForeignDatabase:
    """A copy of another program's database. The names of tables and columns are those that the other program chose."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._tables: Mapping[str, frozenset[str]] | None = None

    def tables(self) -> Mapping[str, frozenset[str]]:
        """Return the tables with their columns. Views are left out, because reading a view could run any SQL.

        :raises ArgumentError: the database is damaged.
        """
        if self._tables is None:
            self._tables = self._read_tables()
        return self._tables

    def _read_tables(self) -> Mapping[str, frozenset[str]]:
        names = [row["name"] for row in self.rows("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        return {
            name: frozenset(row["name"] for row in self.rows("SELECT name FROM pragma_table_info(?)", (name,)))
            for name in names
            if isinstance(name, str)
        }

    def columns(
        self, table: str, names: Sequence[str], rest: str = "", values: Sequence[Any] = ()
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the columns `names` of a table's rows. Columns that the table does not have are left out. Values of
        more than 64 Mi characters or bytes become None. All arguments except `values` become part of the SQL, so they
        must be constants.

        :raises ArgumentError: the database is damaged.
        """
        known = self.tables().get(table, frozenset())
        chosen = ", ".join(
            f"CASE WHEN length({name}) <= {_MAX_VALUE} THEN {name} END AS {name}" for name in names if name in known
        )
        return self.rows(f"SELECT {chosen} FROM {table} {rest}", values)  # noqa: S608

    def rows(self, sql: str, values: Sequence[Any] = ()) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of a query. Bytes that are not UTF-8 become U+FFFD.

        :raises ArgumentError: the database is damaged.
        """
        try:
            with closing(self._connection.execute(sql, values)) as cursor:
                names = [column[0] for column in cursor.description]
                while rows := cursor.fetchmany(_FETCH):
                    for row in rows:
                        yield dict(zip(names, row, strict=True))
        except _FAILURES as error:
            raise ArgumentError(f"{self.path} cannot be read: {error}.") from error


@contextmanager
def opened_copy(path: Path) -> Iterator[ForeignDatabase]:
    """Open a copy of a database that another program may be using. The database itself is not opened, because SQLite
    would create files next to the database even for reading.

    :raises ArgumentError: the file is not an SQLite database, or it kept changing while it was copied.
    """
    with tempfile.TemporaryDirectory(prefix="crow-") as directory:
        copy = Path(directory) / "copy.db"
        try:
            for _ in range(_ATTEMPTS):
                before = _versions(path)
                for suffix in _SUFFIXES:
                    # The log of a hostile database could be a link to an endless device.
                    with (
                        suppress(FileNotFoundError),
                        open_regular(Path(f"{path}{suffix}")) as source,
                        open(f"{copy}{suffix}", "wb") as target,
                    ):
                        shutil.copyfileobj(source, target)
                if _versions(path) == before:
                    break
                for suffix in _SUFFIXES:
                    Path(f"{copy}{suffix}").unlink(missing_ok=True)
            else:
                raise ArgumentError(f"{path} is being written to. Quit the program that uses it, then try again.")
        except (OSError, Damaged) as error:
            raise ArgumentError(f"{path} cannot be copied with its write-ahead log: {readable(error)}.") from error
        with closing(_connect(copy, path)) as connection:
            yield ForeignDatabase(path, connection)


def count_rows(path: Path, table: str, column: str = "", values: Sequence[str] = ()) -> int:
    """Count the rows of a table, or only those with one of `values` in a column. Return 0 if the table cannot be read.
    `table` and `column` become part of the SQL, so they must be constants.

    A database with a write-ahead log is copied, because the log may have most of the rows. If the database is large
    and some of the rows are in its file, only those in the file are counted.
    """
    where = f' WHERE "{column}" IN ({", ".join("?" * len(values))})' if column else ""
    sql = f'SELECT count(*) AS number FROM "{table}"{where}'  # noqa: S608  constants
    found = _count_in_file(path, sql, values)
    try:
        sizes = [Path(f"{path}{suffix}").stat().st_size for suffix in ("", "-wal")]
    except OSError:
        return found
    if sizes[1] == 0 or (found and sum(sizes) > _MOST_COPIED_BYTES):
        return found
    try:
        with opened_copy(path) as database:
            (row,) = database.rows(sql, values)
            return int(row["number"])
    except (ArgumentError, ValueError, TypeError):
        return found


def _count_in_file(path: Path, sql: str, values: Sequence[str]) -> int:
    """Run a query that counts rows, without the write-ahead log. Return 0 if this fails."""
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            (number,) = connection.execute(sql, values).fetchone()
            return int(number)
    except (*_FAILURES, ValueError, TypeError):
        return 0


def _connect(copy: Path, path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(copy, isolation_level=None)
    try:
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        connection.execute("PRAGMA query_only = ON")
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except _FAILURES as error:
        connection.close()
        raise ArgumentError(f"{path} cannot be read: {error}.") from error
    return connection


def _versions(path: Path) -> list[tuple[int, int] | None]:
    """Return the size and the modification time of each file of a database, or None for a file that does not exist."""
    found: list[tuple[int, int] | None] = []
    for suffix in _SUFFIXES:
        try:
            status = Path(f"{path}{suffix}").stat()
            found.append((status.st_size, status.st_mtime_ns))
        except FileNotFoundError:
            found.append(None)
    return found
