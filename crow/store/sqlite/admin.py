"""Finds, removes, exports, imports and backs up stored sessions for the command line.

`crow acp` needs neither these functions nor the modules that they import. Therefore this module is separate from the
store.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from sqlite3 import Connection

import anyio

from crow.domain.entries import Entry
from crow.domain.errors import ArgumentError, SessionBusy, StoreUnavailable
from crow.store.admin import (
    Backup,
    ConversationState,
    Damage,
    DiskUse,
    ImportDefaults,
    Imported,
    SessionFilter,
    SessionMatch,
    UnusedSession,
    best_matches,
)
from crow.store.files import move_to_new
from crow.store.owner import is_alive, readable
from crow.store.portable import ExportFile, InvalidExport
from crow.store.rows import SESSION_COLUMNS, possible_time, session_of
from crow.store.shared_admin import Listing, SharedAdmin, counted_tags, subagents_by_root, taken_by
from crow.store.sqlite.connection import pragma
from crow.store.sqlite.database import now_ms, snapshot, transaction
from crow.store.sqlite.failures import REPAIR
from crow.store.sqlite.repair import damaged_entries, problems
from crow.store.sqlite.search import UsageMethods
from crow.store.sqlite.sessions import hide_session
from crow.store.sqlite.store import SqliteStore
from crow.store.sqlite.transfer import (
    Importer,
    abandon,
    choose,
    conversation_state,
    family,
    next_entries,
    show,
)
from crow.store.transfer import ExportSelection, by_conversation, groups_of

_EXPORT_BATCH = 4_096

_USED_MS = "max(created_ms, coalesce((SELECT e.created_ms FROM entries e WHERE e.id = sessions.newest_entry), 0))"
_LAST_USED = f"""
    SELECT id, cwd, title, {_USED_MS} AS used_ms, entries, archived, state, owner, lease_ms
    FROM sessions WHERE parent_id IS NULL AND deleted_ms IS NULL
"""  # noqa: S608  constants
_LISTED = f"""
    SELECT {SESSION_COLUMNS}, {_USED_MS} AS used_ms FROM sessions
    WHERE has_prompt = 1 AND parent_id IS NULL AND deleted_ms IS NULL AND archived = :archived
    AND (:model IS NULL OR instr(folded(model), folded(:model)) OR EXISTS (
        SELECT 1 FROM entries e WHERE e.session = sessions.id AND e.conversation = sessions.conversation
        AND instr(folded(e.model), folded(:model))
    ))
    AND (:directories IS NULL OR cwd IN (SELECT value FROM json_each(:directories)))
    AND (:since_ms IS NULL OR used_ms >= :since_ms) AND (:before_ms IS NULL OR used_ms < :before_ms)
    ORDER BY used_ms DESC, newest_entry DESC, id
"""  # noqa: S608  constants
_SUBAGENTS = f"""
    WITH RECURSIVE family (id, root) AS (
        SELECT value, value FROM json_each(?)
        UNION SELECT s.id, family.root FROM family JOIN sessions s ON s.parent_id = family.id
    )
    SELECT {SESSION_COLUMNS}, {_USED_MS}, family.root FROM sessions JOIN family USING (id)
    WHERE id <> family.root AND deleted_ms IS NULL ORDER BY number
"""  # noqa: S608  constants


_MATCHES = """
    SELECT id, title, iif(id = :name, 0, iif(alias = :name AND principal IS NULL, 1, 2)) AS rank
      FROM sessions
     WHERE deleted_ms IS NULL AND :name <> ''
       AND (substr(id, 1, length(:name)) = :name OR (alias = :name AND principal IS NULL) OR title = :name)
     ORDER BY rank, newest_entry DESC, id
"""


class SessionAdmin(UsageMethods, SharedAdmin):
    """Administers the sessions of an open store."""

    def __init__(self, store: SqliteStore) -> None:
        super().__init__(store.database)
        self.store: SqliteStore = store

    @snapshot()
    def matches(self, sql: Connection, name: str) -> tuple[SessionMatch, ...]:
        rows = sql.execute(_MATCHES, {"name": name})
        return best_matches([(rank, SessionMatch(id=id_, title=title)) for id_, title, rank in rows])

    @snapshot()
    def ids(self, sql: Connection) -> tuple[str, ...]:
        query = "SELECT id FROM sessions NOT INDEXED WHERE deleted_ms IS NULL ORDER BY id"  # an index may be damaged
        return tuple(row[0] for row in sql.execute(query))

    @snapshot()
    def written_after(self, sql: Connection, entry: int) -> dict[str, int]:
        query = "SELECT id, newest_entry FROM sessions WHERE newest_entry > ? AND deleted_ms IS NULL ORDER BY 2, 1"
        return dict(sql.execute(query, (entry,)).fetchall())

    @snapshot()
    def listing(self, sql: Connection, chosen: SessionFilter, limit: int | None) -> Listing:
        limits: dict[str, object] = {
            name: getattr(chosen, name) for name in ("archived", "model", "since_ms", "before_ms")
        }
        limits["directories"] = None if chosen.directories is None else json.dumps(list(chosen.directories))
        found = ((session_of(row), possible_time(used_ms)) for *row, used_ms in sql.execute(_LISTED, limits))
        rows = taken_by(chosen, found, limit)
        below = sql.execute(_SUBAGENTS, (json.dumps([row.id for row, _ in rows]),))
        subagents = ((session_of(row), possible_time(used_ms), root) for *row, used_ms, root in below)
        return Listing(rows=rows, subagents=subagents_by_root(subagents))

    @snapshot()
    def disk_use(self, sql: Connection) -> tuple[DiskUse, ...]:
        # This reads all pages that have a row of an entry.
        page_bytes: int = pragma(sql, "page_size")
        bodies = sql.execute(
            "SELECT kind, count(*), sum(length(CAST(body AS BLOB))) FROM entries GROUP BY kind ORDER BY 3 DESC"
        )
        uses = [DiskUse(what=f"entries: {kind}", number=number, bytes=size or 0) for kind, number, size in bodies]
        number, size, stored, compressed = sql.execute(
            "SELECT count(*), coalesce(sum(size), 0), coalesce(sum(length(data)), 0), total(length(data) < size)"
            " FROM blobs"
        ).fetchone()
        uses.append(DiskUse(what="blobs: outputs, files, images, prompts", number=number, bytes=stored))
        uses.append(DiskUse(what="  saved because they are compressed", number=int(compressed), bytes=size - stored))
        (shared,) = sql.execute(
            "SELECT coalesce(sum(b.size), 0) FROM blob_refs r JOIN blobs b ON b.hash = r.blob"
        ).fetchone()
        uses.append(DiskUse(what="  not stored again because it is equal", number=None, bytes=shared - size))
        (size,) = sql.execute("SELECT coalesce(sum(length(block)), 0) FROM entries_fts_data").fetchone()
        uses.append(DiskUse(what="search index", number=None, bytes=size))
        for table, columns in (("drafts", "text || thought"), ("inbox", "parts")):
            query = f"SELECT count(*), coalesce(sum(length(CAST({columns} AS BLOB))), 0) FROM {table}"  # noqa: S608  constants
            number, size = sql.execute(query).fetchone()
            uses.append(DiskUse(what=table, number=number, bytes=size))
        query = (
            "SELECT count(*), coalesce(sum(length(CAST(e.body AS BLOB))), 0) FROM entries e JOIN sessions s"
            " ON s.id = e.session AND s.conversation = e.conversation WHERE s.deleted_ms IS NOT NULL"
        )
        number, size = sql.execute(query).fetchone()
        uses.append(DiskUse(what="entries of deleted sessions, not removed yet", number=number, bytes=size))
        free = pragma(sql, "freelist_count")
        uses.append(DiskUse(what="free pages", number=free, bytes=free * page_bytes))
        uses.append(DiskUse(what="the whole database", number=None, bytes=pragma(sql, "page_count") * page_bytes))
        with suppress(OSError):
            log = os.stat(f"{self.database.path}-wal").st_size
            uses.append(DiskUse(what="write-ahead log", number=None, bytes=log))
        return tuple(uses)

    @snapshot()
    def count_tags(self, sql: Connection) -> Mapping[str, int]:
        rows = sql.execute("SELECT metadata FROM sessions WHERE deleted_ms IS NULL AND metadata <> '{}'")
        return counted_tags(rows)

    @snapshot()
    def directories(self, sql: Connection) -> tuple[str, ...]:
        return tuple(row[0] for row in sql.execute("SELECT DISTINCT cwd FROM sessions WHERE deleted_ms IS NULL"))

    @snapshot()
    def unused_since(self, sql: Connection, before_ms: int, cwd: str | None = None) -> tuple[UnusedSession, ...]:
        return _unused_since(sql, before_ms, cwd)

    @transaction()
    def hide_unused(self, sql: Connection, before_ms: int, cwd: str | None) -> tuple[UnusedSession, ...]:
        old = _unused_since(sql, before_ms, cwd)
        for session in old:
            hide_session(sql, session.id)
        return old

    @transaction()
    def hide(self, sql: Connection, ids: Sequence[str]) -> None:
        for session_id in ids:
            row = sql.execute("SELECT state, owner, lease_ms FROM sessions WHERE id = ?", (session_id,)).fetchone()
            if row is not None and _is_running(*row):
                raise SessionBusy(session_id, readable(row[1]))
            hide_session(sql, session_id)

    @snapshot()
    def family(self, sql: Connection, ids: Sequence[str] | None) -> Mapping[int, tuple[str, ...]]:
        return family(sql, ids)

    @snapshot()
    def selection(
        self, sql: Connection, conversation: int, sessions: Sequence[str], known: frozenset[str]
    ) -> ExportSelection:
        return choose(sql, conversation, sessions, known)

    @snapshot()
    def next_entries(self, sql: Connection, selected: ExportSelection, start: int) -> tuple[Sequence[Entry], int]:
        return next_entries(sql, selected, start, _EXPORT_BATCH)

    @snapshot()
    def conversations(self, sql: Connection) -> Mapping[int, tuple[str, ...]]:
        rows = sql.execute(
            "SELECT conversation, id FROM sessions s WHERE deleted_ms IS NULL AND (has_prompt OR parent_id IS NOT NULL"
            " OR leaf IS NOT NULL OR newest_entry > 0 OR alias IS NOT NULL OR title IS NOT NULL OR metadata <> '{}'"
            " OR EXISTS (SELECT 1 FROM sessions c WHERE c.parent_id = s.id)"
            " OR EXISTS (SELECT 1 FROM inbox i WHERE i.session = s.id)"
            " OR EXISTS (SELECT 1 FROM moves m WHERE m.session = s.id)) ORDER BY conversation, number"
        )
        return by_conversation(rows)

    @snapshot()
    def conversation_state(self, sql: Connection, ids: Sequence[str]) -> ConversationState:
        return conversation_state(sql, ids)

    async def import_file(self, path: Path, defaults: ImportDefaults) -> tuple[Imported, ...]:
        await self.store.tidy()  # frees the ids of deleted sessions
        database, owner = self.database, self.store.owner
        file = await database.call(lambda: ExportFile(path, relatives=defaults.relatives))
        try:
            importers = [Importer(file, block, defaults) for block in await database.call(file.scan)]
            new: list[Importer] = []
            for group in groups_of(importers):
                new += await self._write_hidden(group)
            for importer in importers:
                if importer not in new:
                    await database.call(partial(file.check_block, importer.block))
            await database.write(lambda sql: show(sql, new))
        except BaseException as error:
            # if this fails, the data is removed after the end of this process
            with anyio.CancelScope(shield=True), suppress(StoreUnavailable):
                await database.write(lambda sql: abandon(sql, owner))
            if isinstance(error, InvalidExport):
                await self.store.remove_deleted()
                await database.call(file.check)
                raise ArgumentError(f"{path} was changed while it was being imported; import it again.") from error
            raise
        finally:
            await database.call(file.close)
        return tuple(importer.outcome(is_new=importer in new) for importer in importers)

    async def _write_hidden(self, group: Sequence[Importer]) -> list[Importer]:
        """Write all conversations of a group, and keep them hidden. Return the importers of the conversations that were
        new to the database."""
        owner = self.store.owner

        def begin(sql: Connection) -> list[Importer]:
            new: list[Importer] = []
            for importer in group:  # one after the other, because they read from the same file
                if importer.begin(sql, owner, now_ms=now_ms()):
                    new.append(importer)
                    while len(group) > 1 and (piece := importer.next_piece()) is not None:
                        importer.add(sql, here=owner, piece=piece, now_ms=now_ms())
            return new

        new = await self.database.write(begin)
        for importer in new if len(group) == 1 else ():
            while (piece := await self.database.call(importer.next_piece)) is not None:
                await self.database.write(partial(importer.add, here=owner, piece=piece, now_ms=now_ms()))
        return new

    async def damage(self) -> Damage:
        found = await self.database.read(problems)
        return Damage(problems=found, entries=() if found else await self.database.read(damaged_entries))

    async def size(self) -> int | None:
        files = (self.database.path, Path(f"{self.database.path}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    @snapshot()
    def back_up(self, sql: Connection, path: Path) -> Backup:
        # The copy is a single file with one snapshot. It gets its final name after SQLite's integrity check.
        exists = ArgumentError(f"{path} exists already. Name a new file, so that no backup is overwritten.")
        if os.path.lexists(path):
            raise exists
        part = path.with_name(f"{path.name}.part-{os.getpid()}")
        try:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            try:
                sessions, entries = _copy_and_count(sql, part, path)
                if not move_to_new(part, path):
                    raise exists
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be created: {error.strerror}.") from error
        return Backup(path=str(path), bytes=path.stat().st_size, sessions=sessions, entries=entries)


def _unused_since(sql: Connection, before_ms: int, cwd: str | None) -> tuple[UnusedSession, ...]:
    rows = sql.execute(
        f"SELECT * FROM ({_LAST_USED}) WHERE used_ms < :before AND (:cwd IS NULL OR cwd = :cwd)"  # noqa: S608  constants
        " ORDER BY used_ms, id",
        {"before": before_ms, "cwd": cwd},
    ).fetchall()
    return tuple(
        UnusedSession(id=name, cwd=directory, title=title, used_ms=used_ms, entries=entries, archived=bool(archived))
        for name, directory, title, used_ms, entries, archived, *running in rows
        if not _is_running(*running)
    )


def _is_running(state: str, owner: str, lease_ms: int) -> bool:
    return state == "running" and is_alive(owner, lease_age_ms=now_ms() - lease_ms)


def _copy_and_count(sql: Connection, part: Path, path: Path) -> tuple[int, int]:
    """Copy the database to `part`. Return the number of sessions and entries in it."""
    with closing(sqlite3.connect(part, isolation_level=None)) as copy:
        try:
            sql.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{path} was not created: {error}. Check the disks, then try again.") from error
        try:
            problems = [row[0] for row in copy.execute("PRAGMA integrity_check(3)")]
        except sqlite3.DatabaseError as error:
            problems = [str(error)]
        if problems != ["ok"]:
            raise StoreUnavailable(
                f"{path} was not created: the copy fails SQLite's integrity check ({'; '.join(problems)}), so the"
                f" database itself is damaged. {REPAIR}"
            )
        (sessions,) = copy.execute("SELECT count(*) FROM sessions WHERE deleted_ms IS NULL").fetchone()
        (entries,) = copy.execute("SELECT count(*) FROM entries").fetchone()
    return sessions, entries
