"""What people do with old sessions: find, count, export, import, archive, remove, back up.

Strategy: as `sqlite`: each method is a function of another file, run in the thread of the reader or the writer. The
agent knows nothing of this; the command line is the only caller. Whatever removes or overwrites is asked for by name.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from crow.domain.entries import Entry
from crow.domain.errors import ArgumentError, SessionBusy, StoreUnavailable
from crow.store import Scope
from crow.store.portable import ExportFile
from crow.store.sqlite.connection import REPAIR
from crow.store.sqlite.lease import is_alive, readable
from crow.store.sqlite.search import Group, UsageTotal, totals
from crow.store.sqlite.sessions import delete_session
from crow.store.sqlite.store import SqliteStore
from crow.store.sqlite.transfer import (
    ExportSelection,
    ImportDefaults,
    Importer,
    Lines,
    Piece,
    abandon,
    choose,
    family,
    next_entries,
    show,
)

__all__ = [
    "Backup",
    "Imported",
    "SessionAdmin",
    "UnusedSession",
    "back_up",
    "find",
    "prune",
    "remove",
    "session_ids",
    "unused_since",
]

_IDS_PER_READ = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import did with one conversation: `is_new` false if it was here and stayed as it is."""

    sessions: tuple[str, ...]
    entries: int
    is_new: bool


class SessionAdmin:
    """The upkeep of an open store."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._database = store.database

    async def find(self, name: str) -> str:
        """The id of the session that `name` means: an id, an alias, or the beginning of one id.

        :raises ~crow.domain.errors.ArgumentError: none, or several.
        """
        return await self._database.read(lambda sql: find(sql, name))

    async def ids(self) -> tuple[str, ...]:
        """Every session's id, in order."""
        return await self._database.read(session_ids)

    async def totals(self, by: Sequence[Group], scope: Scope) -> tuple[UsageTotal, ...]:
        """Tokens and cost, summed by the groups."""
        return await self._database.read(lambda sql: totals(sql, by, scope))

    async def unused_since(self, before_ms: int, cwd: str | None = None) -> tuple[UnusedSession, ...]:
        """Sessions that were last used before that time, oldest first."""
        return await self._database.read(lambda sql: unused_since(sql, before_ms, cwd, now_ms=_now_ms()))

    async def prune(self, before_ms: int, cwd: str | None = None) -> tuple[UnusedSession, ...]:
        """Remove those, and say which."""
        old = await self._database.write(lambda sql: prune(sql, before_ms, cwd, now_ms=_now_ms()))
        await self._store.tidy()
        return old

    async def remove(self, ids: Sequence[str]) -> None:
        """Remove sessions with all that no other one needs.

        :raises ~crow.domain.errors.SessionBusy: a living process runs a turn in one; none is removed.
        """
        await self._database.write(lambda sql: remove(sql, ids, now_ms=_now_ms()))
        await self._store.tidy()

    async def back_up(self, path: Path) -> Backup:
        """Copy the database to `path` while it is in use, and verify the copy.

        :raises ~crow.domain.errors.ArgumentError: `path` exists or cannot be made.
        """
        return await self._database.read(lambda sql: back_up(sql, path))

    async def export(self, ids: Sequence[str] | None) -> AsyncIterator[bytes]:
        """The lines of a file with these sessions and their sub-agents; None: with every one that is listed."""
        lines = Lines()
        chosen = await self._database.read(lambda sql: family(sql, ids))
        for session_id in (name for names in chosen.values() for name in names):
            await self._store.open_session(session_id)  # closes what a dead process left open
        known = frozenset(name for names in chosen.values() for name in names)
        yield lines.header()
        for conversation, sessions in chosen.items():
            part = await self._choose(conversation, sessions, known)
            yield lines.head(part)
            done = 0
            while done < len(part.ids):
                entries, taken = await self._read(part, done)
                done += taken
                for line in lines.entries(part, entries):
                    yield line
            yield lines.moves(part)
        yield lines.end()

    async def import_file(self, path: Path, defaults: ImportDefaults) -> tuple[Imported, ...]:
        """Check the whole file, then take in what is not here yet: a little at a time, since others write too, and
        nothing of it is seen before all of it is.

        :raises ~crow.domain.errors.ArgumentError: it is damaged or foreign, or what is in it is on its way in or out;
            nothing was imported.
        """
        await self._store.tidy()  # ids of sessions that were deleted are free after it
        file = await self._database.call(lambda: ExportFile(path))
        try:
            blocks = await self._database.call(file.check)
            intakes = [Importer(file, block, defaults) for block in blocks]
            new = [intake for intake in intakes if await self._take_in(intake)]
            await self._database.write(lambda sql: show(sql, new))
        except BaseException:
            with (
                anyio.CancelScope(shield=True),
                suppress(StoreUnavailable),
            ):  # else it is removed when this process ends
                await self._database.write(lambda sql: abandon(sql, self._store.owner))
            raise
        finally:
            await self._database.call(file.close)
        return tuple(
            Imported(sessions=block.sessions, entries=block.entries, is_new=intake in new)
            for block, intake in zip(blocks, intakes, strict=True)
        )

    async def _take_in(self, intake: Importer) -> bool:
        """Write all of it, hidden; false if it is here."""
        here = self._store.owner
        if not await self._database.write(lambda sql: intake.begin(sql, here, now_ms=_now_ms())):
            return False
        while (piece := await self._database.call(intake.next_piece)) is not None:
            await self._database.write(_addition(intake, here, piece))
        return True

    async def _choose(self, conversation: int, sessions: Sequence[str], known: frozenset[str]) -> ExportSelection:
        return await self._database.read(lambda sql: choose(sql, conversation, sessions, known))

    async def _read(self, chosen: ExportSelection, start: int) -> tuple[Sequence[Entry], int]:
        return await self._database.read(lambda sql: next_entries(sql, chosen, start, _IDS_PER_READ))


def _addition(intake: Importer, here: str, piece: Piece) -> Callable[[sqlite3.Connection], None]:
    return lambda sql: intake.add(sql, here, piece, now_ms=_now_ms())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


# FROM store.backup: A copy of the database while it is in use.
#
# Strategy: SQLite's own online backup, in one step and so of one snapshot, into a file of another name beside the
# wanted
# one; then `PRAGMA integrity_check` of the copy, and only a copy that passes takes the wanted name. Others go on
# reading
# and writing meanwhile. The copy is a single file that needs no WAL.


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A verified copy: where, how large, how many sessions and entries are in it."""

    path: str
    bytes: int
    sessions: int
    entries: int


def back_up(connection: sqlite3.Connection, path: Path) -> Backup:
    """Copy the database to `path`, which must not exist.

    :raises ArgumentError: it exists, or cannot be made.
    :raises StoreUnavailable: the copy is damaged: so is the database.
    """
    if path.exists() or path.is_symlink():
        raise ArgumentError(f"{path} exists already. Name a file that does not, so that no backup is overwritten.")
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            sessions, entries = _copy(connection, part, path)
            part.rename(path)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
    except OSError as error:
        raise ArgumentError(f"{path} cannot be made: {error.strerror}.") from error
    return Backup(path=str(path), bytes=path.stat().st_size, sessions=sessions, entries=entries)


def _copy(connection: sqlite3.Connection, part: Path, path: Path) -> tuple[int, int]:
    with closing(sqlite3.connect(part, isolation_level=None)) as copy:
        try:
            connection.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        except sqlite3.Error as error:
            raise _unfinished(error, path) from error
        problems = _problems_of(copy)
        if problems != ["ok"]:
            raise StoreUnavailable(
                f"{path} was not made: the copy fails SQLite's integrity check ({'; '.join(problems)}), so the database"
                f" itself is damaged. {REPAIR}"
            )
        (sessions,) = copy.execute("SELECT count(*) FROM sessions WHERE deleted_ms IS NULL").fetchone()
        (entries,) = copy.execute("SELECT count(*) FROM entries").fetchone()
    return sessions, entries


def _problems_of(copy: sqlite3.Connection) -> list[str]:
    """What SQLite says of the copy: `["ok"]`, or what is wrong."""
    try:
        return [row[0] for row in copy.execute("PRAGMA integrity_check(3)")]
    except sqlite3.DatabaseError as error:
        return [str(error)]


def _unfinished(error: sqlite3.Error, path: Path) -> StoreUnavailable:
    return StoreUnavailable(f"{path} was not made: {error}. Check the disks, then try again.")


# FROM store.retention: Old sessions: found by a part of their id, listed by age, removed on request.
#
# Strategy: the age of a session is the time of the newest entry it stands on or wrote, or of its making if that is
# later;
# what only touches its row (a title, archiving) makes it no younger. What is listed and what is removed come from one
# statement. A session in which a living process runs a turn is never removed. Nothing here happens by itself.


# ruff: noqa: S608  # statements are put together from constants; values are parameters


_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedSession:
    """A session that was not used for long; times are Unix milliseconds. `title` None: none, or no prompt yet."""

    id: str
    cwd: str
    title: str | None
    used_ms: int
    entries: int
    archived: bool


def find(connection: sqlite3.Connection, name: str) -> str:
    """The id of the session with this id or alias, or else the one whose id begins so.

    :raises ArgumentError: none, or several.
    """
    rows = connection.execute(
        "SELECT id FROM sessions WHERE deleted_ms IS NULL AND (id = :name OR alias = :name) ORDER BY id <> :name",
        {"name": name},
    ).fetchall()
    if not rows and name:
        rows = connection.execute(
            "SELECT id FROM sessions WHERE deleted_ms IS NULL AND substr(id, 1, length(:name)) = :name"
            " ORDER BY newest_entry DESC, id",
            {"name": name},
        ).fetchall()
        if len(rows) > 1:
            shown = ", ".join(row[0] for row in rows[:_SHOWN]) + (", ..." if len(rows) > _SHOWN else "")
            raise ArgumentError(f'"{name}" begins the ids of {len(rows)} sessions: {shown}. Give more of the id.')
    if not rows:
        raise ArgumentError(f'No session "{name}". Run "crow sessions" to list them.')
    return str(rows[0][0])


def session_ids(connection: sqlite3.Connection) -> tuple[str, ...]:
    """Every id, sub-agents included, in order."""
    return tuple(row[0] for row in connection.execute("SELECT id FROM sessions WHERE deleted_ms IS NULL ORDER BY id"))


def unused_since(
    connection: sqlite3.Connection, before_ms: int, cwd: str | None, *, now_ms: int
) -> tuple[UnusedSession, ...]:
    """Sessions last used before that time, oldest first; with `cwd`, those of that directory."""
    rows = connection.execute(
        f"SELECT * FROM ({_USED}) WHERE used_ms < :before AND (:cwd IS NULL OR cwd = :cwd) ORDER BY used_ms, id",
        {"before": before_ms, "cwd": cwd},
    ).fetchall()
    return tuple(
        UnusedSession(id=name, cwd=directory, title=title, used_ms=used_ms, entries=entries, archived=bool(archived))
        for name, directory, title, used_ms, entries, archived, state, owner, lease_ms in rows
        if not _is_running(state, owner, lease_ms, now_ms=now_ms)
    )


def prune(connection: sqlite3.Connection, before_ms: int, cwd: str | None, *, now_ms: int) -> tuple[UnusedSession, ...]:
    """Hide what `unused_since` lists, with its sub-agents."""
    old = unused_since(connection, before_ms, cwd, now_ms=now_ms)
    for session in old:
        delete_session(connection, session.id, now_ms=now_ms)
    return old


def remove(connection: sqlite3.Connection, ids: Sequence[str], *, now_ms: int) -> None:
    """Hide sessions, with their sub-agents.

    :raises SessionBusy: a living process runs a turn in one; none is hidden.
    """
    for session_id in ids:
        row = connection.execute("SELECT state, owner, lease_ms FROM sessions WHERE id = ?", (session_id,)).fetchone()
        if row is not None and _is_running(*row, now_ms=now_ms):
            raise SessionBusy(session_id, readable(row[1]))
        delete_session(connection, session_id, now_ms=now_ms)


def _is_running(state: str, owner: str, lease_ms: int, *, now_ms: int) -> bool:
    return state == "running" and is_alive(owner, lease_age_ms=now_ms - lease_ms)


_USED = """
    SELECT id, cwd, title, max(created_ms, coalesce(
        (SELECT e.created_ms FROM entries e WHERE e.id = sessions.newest_entry), 0)) AS used_ms,
        entries, archived, state, owner, lease_ms
    FROM sessions WHERE parent_id IS NULL AND deleted_ms IS NULL
"""
