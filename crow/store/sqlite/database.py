"""The database file: made, opened, migrated, locked, checkpointed.

Strategy: one connection writes, another only reads, so that lists and replays never wait for a step. WAL where it is
granted, every commit flushed to disk. Checkpoints are made here and only here, since SQLite before 3.51.3 can corrupt
a WAL that two connections reset and commit to at the same instant: there a file lock surrounds everything that writes,
and it also makes processes take turns. Nothing but SQLite ever opens the file, because closing any other handle of it
would drop SQLite's locks. Knows no tables beyond the schema's version.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint_if_cancelled

from crow.domain.errors import StoreTooNew, StoreUnavailable
from crow.store.sqlite.connection import (
    FAILURES,
    REPAIR,
    FairWakeup,
    FileConnection,
    FileGone,
    FileId,
    FileLock,
    GroupCommit,
    LockTimeout,
    SqliteConnection,
    WriteJob,
    do_each,
    explained,
    file_id,
)
from crow.store.sqlite.migrations import APPLICATION_ID, VERSION, is_schema_damaged, migrate

if TYPE_CHECKING:
    from crow.store.sqlite.rescue import Rescue

__all__ = ["Database", "JournalMode", "make_directory"]

T = TypeVar("T")

JournalMode = Literal["wal", "delete"]

logger = logging.getLogger(__name__)

_CHECKPOINT_BYTES = 16 * 1024 * 1024
_JOURNAL_LIMIT_BYTES = 64 * 1024 * 1024
_CLOSE_S = 5.0
_BUSY_STEP_S = 0.05
_VACUUM_PAGES = 500
_OLDEST_SQLITE = (3, 34, 0)  # the trigram tokenizer
_READ = "read"
"""In the place of a journal mode: the file is open to read."""

_HAS_WAL_RESET_BUG = sqlite3.sqlite_version_info < (3, 51, 3)


class Database:
    """The file at `path` and the connections to it.

    When that file is deleted or replaced, what is open is copied to a new file, and work goes on there. Whoever begins
    something then hears of it; what is under way goes on.
    """

    _writer: SqliteConnection

    def __init__(self, path: Path, *, wanted: JournalMode, busy_timeout_s: float) -> None:
        self.path = path
        self.journal_mode = ""
        self.warning = ""
        self._wanted: JournalMode = wanted
        self._reader: SqliteConnection | None = None
        self._reader_lock = anyio.Lock()
        self._busy_timeout_s = busy_timeout_s
        self._patience = LockTimeout(busy_timeout_s)
        self._lock = FileLock(path, self._patience)
        self._checkpoint_at_bytes = _CHECKPOINT_BYTES
        self._together = GroupCommit()
        self._turnstile = FairWakeup()
        self._is_closed = False
        self._opened: FileId | None = None
        self._shared: FileId | None = None
        self._moving = anyio.Lock(fast_acquire=True)
        self._moves = 0
        self._news = ""
        self._refusal = ""
        self._read_only = ""
        self._copy: Path | None = None
        self.foreign_version = 0
        """Another number whenever other processes had written; as of the last transaction."""

    @classmethod
    async def open(cls, path: Path, *, journal_mode: JournalMode, busy_timeout_s: float) -> Database:
        """Make or open the file and bring its schema up to date. One that cannot be written is opened to read.

        :raises StoreUnavailable: it cannot be made or read, or is not crow's.
        :raises StoreTooNew: a newer crow wrote it.
        """
        if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
            raise StoreUnavailable(f"SQLite {sqlite3.sqlite_version} is too old; crow needs 3.34 or newer.")
        database = cls(path, wanted=journal_mode, busy_timeout_s=busy_timeout_s)
        try:
            await database._open_to_write()
        except StoreUnavailable as refused:
            if not _is_unwritable(refused):
                raise
            try:
                await database._open_to_read()
            except StoreUnavailable:
                raise refused from refused.__cause__
            database._read_only = f"{refused} Until then nothing can be stored; what is there can be read."
            database.warning = database._read_only
        return database

    @property
    def is_read_only(self) -> bool:
        """Whether nothing could be stored when that was last tried."""
        return bool(self._read_only)

    async def write(self, work: Callable[[sqlite3.Connection], T], *, begins: bool = False) -> T:
        """What `work` gives, called in a transaction, which is on disk when this returns. Others that wait at the same
        moment may share it.

        Anything `work` raises rolls `work` back. Cancelled before it began: nothing is written. Cancelled later: it is
        finished first, and its result returned, so that the caller never has to wonder; a task cancelled natively
        (`asyncio.Task.cancel`) does not learn the result, but the transaction is whole all the same.

        `begins`: this begins something, so it is refused once when the file was deleted since the last such call, and
        always when it was replaced.
        """
        await checkpoint_if_cancelled()
        self._check_open()
        with anyio.CancelScope(shield=True):
            while True:
                await self._settled()
                if begins:
                    self._tell()
                if self._read_only:
                    await self._retry_to_write()
                moves = self._moves
                try:
                    result = await self._written(work)
                    break
                except FileGone:
                    await self._move(moves)
            await self._turnstile.through()
        return result  # a type checker takes a scope for one that may swallow errors

    async def read(self, work: Callable[[sqlite3.Connection], T], *, begins: bool = False) -> T:
        """What `work` gives, called on one snapshot of the database.

        `begins`: somebody wants to see what there is, so it is refused when it finds that the file was deleted, and
        always when it was replaced.
        """
        while True:
            await self._settled()
            if begins and self._refusal:
                raise StoreUnavailable(self._refusal)
            moves = self._moves
            try:
                reader = await self._open_reader()
                return await self._run(reader, lambda connection: self._snapshot(connection, work))
            except FileGone:
                with anyio.CancelScope(shield=True):
                    await self._move(moves)
                if begins and self._news:
                    raise StoreUnavailable(self._news) from None

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` gives, called in the writer's thread: for what would block the event loop."""
        return await self._run(self._writer, lambda _: function())

    async def checkpoint(self) -> None:
        """Move the WAL into the database, as far as no reader holds it."""
        await self._run(self._writer, self._checkpoint)

    async def vacuum(self) -> bool:
        """Give some free pages back to the file system; whether there may be more."""
        return await self._run(self._writer, self._vacuum)

    def hurry(self) -> None:
        """From now on wait for other programs no longer than a moment, all in all."""
        self._patience.end()

    async def close(self) -> None:
        """Finish what waits and close both connections, in at most a few seconds; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._patience.end()
        with anyio.move_on_after(_CLOSE_S, shield=True) as scope:
            async with self._moving:
                await self._let_go()
        if scope.cancelled_caught:
            logger.warning("%s: closing took longer than %g s and was given up", self.path, _CLOSE_S)

    async def _let_go(self) -> None:
        """Close both connections."""
        try:
            if self._reader is not None:
                await self._reader.close()
            await self._writer.run(self._before_close)
        finally:
            await self._writer.close()
            await self._drop_copy()

    async def _open_to_write(self) -> None:
        """:raises StoreUnavailable: it cannot be made, opened or written."""
        self._writer = await SqliteConnection.open(
            self.path, prepare=lambda: _prepare(self.path), busy_timeout_s=self._busy_timeout_s
        )
        try:
            await self._run(self._writer, self._set_up)
        except BaseException:  # whoever fails to open closes what was opened
            with anyio.CancelScope(shield=True):
                await self._let_go()
            raise

    async def _open_to_read(self) -> None:
        """Open a file that cannot be written: as it is, or else a copy of it among the temporary files.

        :raises StoreUnavailable: it cannot be read either.
        """
        for how in await anyio.to_thread.run_sync(_ways_to_read, self.path):
            if await self._is_readable(how):
                return
        directory = Path(await anyio.to_thread.run_sync(tempfile.mkdtemp, None, "crow-"))
        copy = directory / self.path.name
        try:
            self._writer = await SqliteConnection.open(
                copy, prepare=lambda: _copy_files(self.path, copy), busy_timeout_s=self._busy_timeout_s
            )
            await self._run(self._writer, migrate)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._copy = directory
        self.journal_mode = _READ

    async def _is_readable(self, how: str) -> bool:
        """Whether the file can be read when opened like this; then it is open."""
        try:
            connection = await SqliteConnection.open(
                self.path, prepare=lambda: None, busy_timeout_s=self._busy_timeout_s, how=how
            )
        except StoreUnavailable:
            return False
        self._writer = connection
        try:
            if await self._run(connection, lambda sql: _version(sql, self.path)) == VERSION:
                self.journal_mode = _READ
                return True
        except StoreUnavailable as error:
            logger.info("%s cannot be read with %s: %s", self.path, how, error)
        await connection.close()
        return False

    async def _retry_to_write(self) -> None:
        """Open the file to write, if that can be done by now.

        :raises StoreUnavailable: it cannot.
        """
        async with self._moving:
            if not self._read_only:
                return
            reading = self._writer
            try:
                await self._open_to_write()
            except StoreUnavailable as refused:
                self._writer = reading
                raise StoreUnavailable(self._read_only) from refused
            self._read_only = self.warning = ""
            self._moves += 1
            await reading.close()
            await self._drop_copy()

    async def _drop_copy(self) -> None:
        directory, self._copy = self._copy, None
        if directory is not None:
            await anyio.to_thread.run_sync(partial(shutil.rmtree, directory, ignore_errors=True))

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"{self.path} is closed.")

    async def _run(self, connection: SqliteConnection, work: Callable[[sqlite3.Connection], T]) -> T:
        self._check_open()
        try:
            return await connection.run(work)
        except FAILURES as error:
            explanation = explained(error, self.path, self._busy_timeout_s)
            if explanation is not error:
                raise explanation from error
            if await connection.run(_is_schema_damaged):
                raise StoreUnavailable(f"{self.path} is damaged ({error}). {REPAIR}") from error
            raise

    async def _written(self, work: Callable[[sqlite3.Connection], T]) -> T:
        mine = self._together.add(work)
        return await self._run(self._writer, lambda connection: self._settle(connection, mine))

    async def _settled(self) -> None:
        """Return when nobody moves to another file at the moment."""
        if self._moving.locked():
            async with self._moving:
                pass

    def _tell(self) -> None:
        """:raises StoreUnavailable: the file was replaced, or deleted since the last call."""
        news, self._news = self._news, ""
        if news or self._refusal:
            raise StoreUnavailable(self._refusal or news)

    async def _move(self, moves: int) -> None:
        """Go on in a copy of what is open, unless another did so since there were so many `moves`.

        :raises StoreUnavailable: no copy can be made.
        """
        async with self._moving:
            if self._moves != moves:
                return
            done = await self._writer.run(self._rescue)
            if done.words:
                logger.error("%s", done.words)
                self._news = done.words
            writer = await SqliteConnection.open(done.path, prepare=lambda: None, busy_timeout_s=self._busy_timeout_s)
            for connection in (self._writer, self._reader):
                if connection is not None:
                    await connection.close()  # what waits there fails, and is done again on the new file
            self._lock.close()
            self._lock = FileLock(done.path, self._patience)
            self.path, self._writer, self._reader = done.path, writer, None
            self._refusal = "" if done.is_in_place else done.words
            self._moves += 1
            self._checkpoint_at_bytes = _CHECKPOINT_BYTES
            try:
                await writer.run(self._set_up)
            except FAILURES as error:
                raise explained(error, self.path, self._busy_timeout_s) from error

    def _rescue(self, connection: sqlite3.Connection) -> Rescue:
        from crow.store.sqlite.rescue import rescue

        assert self._opened is not None, "else nobody misses it"
        return rescue(connection, self.path, self._opened, shared=self._shared, writing=self._writing)

    def _check_in_place(self, connection: sqlite3.Connection) -> None:
        """:raises FileGone: the path names another file than the one that `connection` has open, or none."""
        if self.journal_mode != _READ and file_id(self.path) != _file_of(connection):
            raise FileGone

    def _check_named(self) -> None:
        """:raises FileGone: the path names another file than the one that is written to, or none."""
        if file_id(self.path) != self._opened:
            raise FileGone

    async def _open_reader(self) -> SqliteConnection:
        """The reader, opened when first needed: a new session does not read.

        Without a WAL the writer reads: two connections would keep each other waiting, and where the disk's locks do not
        hold either, one would take the other's journal for one that a dead process left, and roll it back.
        """
        if self.journal_mode != "wal":
            return self._writer
        if self._reader is not None:
            return self._reader
        async with self._reader_lock:
            if self._reader is None:
                self._check_open()
                reader = await SqliteConnection.open(
                    self.path, prepare=self._check_named, busy_timeout_s=self._busy_timeout_s
                )
                if await self._run(reader, _file_of) != self._opened:
                    await reader.close()
                    raise FileGone
                self._reader = reader
                await self._run(reader, lambda connection: connection.execute("PRAGMA query_only = ON").close())
            return self._reader

    def _set_up(self, connection: sqlite3.Connection) -> None:
        """In the writer's thread: the checks that must leave the file untouched, then what may change it."""
        wanted = self._wanted
        _set_busy_timeout(connection, self._busy_timeout_s)
        version = _version(connection, self.path)
        journal_mode = str(connection.execute("PRAGMA journal_mode").fetchone()[0])
        if version < VERSION or journal_mode != wanted:
            with self._lock.held():
                if _version(connection, self.path) == 0:
                    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
                    connection.execute("PRAGMA synchronous = NORMAL")  # there is nothing to lose yet
                journal_mode = str(connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()[0])
                migrate(connection)
        if wanted == "wal" and journal_mode != "wal":
            self.warning = (
                f"{self.path} is where SQLite grants no write-ahead log (on a network disk?). Crow works there, but"
                " slower, and no two machines may use it at once. Better set CROW_HOME to a directory on a disk of this"
                " machine."
            )
            logger.warning("%s Using journal mode %s.", self.warning, journal_mode)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL_LIMIT_BYTES}")
        _set_busy_timeout(connection, _BUSY_STEP_S)
        self.journal_mode = journal_mode
        self._opened = _file_of(connection)
        self._shared = file_id(f"{self.path}-shm") if journal_mode == "wal" else None

    def _settle(self, connection: sqlite3.Connection, mine: WriteJob[T]) -> T:
        """What `mine` gave, done now with all that waits unless another call has done it already."""
        if not mine.is_done:
            works = self._together.take()
            try:
                self._transaction(connection, works)
            except Exception as error:  # noqa: BLE001  # each of them raises it
                for work in works:
                    work.fail(error)
        return mine.result()

    def _transaction(self, connection: sqlite3.Connection, works: tuple[WriteJob[object], ...]) -> None:
        with self._writing():
            self._insist(connection, "BEGIN IMMEDIATE")
            try:
                self._check_in_place(connection)
                self.foreign_version = connection.execute("PRAGMA data_version").fetchone()[0]
                do_each(connection, works)
                self._insist(connection, "COMMIT")
            except BaseException:  # no transaction may stay open, whatever happened
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            if self.journal_mode == "wal" and self._wal_bytes() > self._checkpoint_at_bytes:
                self._empty_wal(connection)

    def _insist(self, connection: sqlite3.Connection, statement: str) -> None:
        """Execute a statement that other programs may delay; SQLite's own wait would go on while the store closes."""
        since = time.monotonic()
        while True:
            try:
                connection.execute(statement).close()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or self._patience.is_over(since):
                    raise
            else:
                return

    def _snapshot(self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
        self._check_in_place(connection)

        def read(connection: sqlite3.Connection) -> T:
            if self.journal_mode != "wal":  # there whoever writes keeps readers waiting
                self._insist(connection, "SELECT 1 FROM sqlite_master")
            return work(connection)

        return _snapshot(connection, read)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if _HAS_WAL_RESET_BUG:
            with self._lock.held():
                yield
        else:
            yield

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        if self.journal_mode == "wal" and self._wal_bytes() > 0:
            with self._writing():
                self._empty_wal(connection)

    def _before_close(self, connection: sqlite3.Connection) -> None:
        """Close in here: the last connection to close checkpoints by itself, which belongs under the lock too."""
        try:
            if self.journal_mode == "wal":
                with self._writing():
                    self._empty_wal(connection)
                    connection.close()
        except StoreUnavailable as error:
            logger.info("closing without a checkpoint: %s", error)
        finally:
            self._lock.close()
            if self._refusal:  # the copy beside another file is all that stays
                with suppress(FileNotFoundError):
                    os.unlink(f"{self.path}.lock")

    def _vacuum(self, connection: sqlite3.Connection) -> bool:
        with self._writing():
            before = _free_pages(connection)
            connection.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
            return before > _free_pages(connection) > 0

    def _empty_wal(self, connection: sqlite3.Connection) -> None:
        """The transaction before is on disk already, so nothing here may fail it."""
        try:
            _set_busy_timeout(connection, 0)
            is_busy = bool(connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
        except sqlite3.Error as error:
            logger.warning("%s: the checkpoint failed (%s); the WAL goes on growing", self.path, error)
            is_busy = True
        finally:
            _set_busy_timeout(connection, _BUSY_STEP_S)
        # While somebody reads, the file cannot shrink: try again after as much again.
        self._checkpoint_at_bytes = _CHECKPOINT_BYTES + (self._wal_bytes() if is_busy else 0)

    def _wal_bytes(self) -> int:
        try:
            return os.stat(f"{self.path}-wal").st_size
        except OSError:
            return 0


def _snapshot(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    """What `work` gives, called on one snapshot."""
    connection.execute("BEGIN")
    try:
        return work(connection)
    finally:
        if connection.in_transaction:  # SQLite itself ends it after some errors
            connection.execute("ROLLBACK")


def _file_of(connection: sqlite3.Connection) -> FileId | None:
    return connection.file if isinstance(connection, FileConnection) else None


def _set_busy_timeout(connection: sqlite3.Connection, seconds: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")


def _is_schema_damaged(connection: sqlite3.Connection) -> bool:
    """Whether that is why a statement failed."""
    try:
        return _user_version(connection) == VERSION and is_schema_damaged(connection)
    except FAILURES:
        return True


def _user_version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _free_pages(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA freelist_count").fetchone()[0])


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """The schema's version, 0 for an empty file.

    :raises StoreTooNew: a newer crow wrote it.
    :raises StoreUnavailable: it belongs to another program.
    """

    def look(connection: sqlite3.Connection) -> tuple[int, int, int]:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        application_id = connection.execute("PRAGMA application_id").fetchone()[0]
        (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return version, application_id, objects

    version, application_id, objects = _snapshot(connection, look)
    if (version or objects) and application_id != APPLICATION_ID:
        raise StoreUnavailable(
            f"{path} is the database of another program. Move it away, or set CROW_HOME to another directory."
        )
    if version > VERSION:
        raise StoreTooNew(
            f"{path} was written by a newer crow: its schema is version {version}, this crow knows {VERSION}. Upgrade"
            " crow, or set CROW_HOME to another directory."
        )
    return version


def _prepare(path: Path) -> None:
    """The directory (0700) and an empty file (0600), if there is none: SQLite itself would make it readable by all.

    :raises StoreUnavailable: they cannot be made, or the file cannot be written.
    """
    try:
        make_directory(path.parent)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        if path.is_file() and not os.access(path, os.W_OK):
            raise StoreUnavailable(
                f"{path} cannot be written. Make the file and its directory writable, or set CROW_HOME to another"
                " directory."
            ) from PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        mode = path.stat().st_mode
        if mode & 0o077 and path.is_file():
            path.chmod(mode & 0o700)
    except OSError as error:
        raise StoreUnavailable(
            f"{path} cannot be made ({error.strerror}: {error.filename}). Set CROW_HOME to a directory that you can"
            " write to."
        ) from error


def _is_unwritable(refused: StoreUnavailable) -> bool:
    """Whether the file could not be opened since it, its directory or its disk cannot be written."""
    cause = refused.__cause__
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    return isinstance(cause, OSError) or code in (
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
    )


def _ways_to_read(path: Path) -> tuple[str, ...]:
    """How SQLite may be able to open a file that cannot be written, as queries of its URI, best first."""
    if not path.is_file() or not path.stat().st_size:
        return ()
    wal = Path(f"{path}-wal")
    if not wal.exists():
        return ("mode=ro&immutable=1",)  # nobody has it open
    return ("mode=ro", "mode=ro&immutable=1") if not wal.stat().st_size else ("mode=ro",)


def _copy_files(path: Path, copy: Path) -> None:
    """:raises StoreUnavailable: the files cannot be read, or there is no room for a copy."""
    try:
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be copied to {copy} ({error.strerror}).") from error


def make_directory(path: Path) -> None:
    """A directory for its owner alone, and those above it; what exists stays as it is. :raises OSError:"""
    if not path.is_dir():
        make_directory(path.parent)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
