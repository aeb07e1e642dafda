"""Removes the data of deleted sessions and keeps the file small.

An entry stays while a living session needs it: because it is on the session's path, because the session wrote it, or
because it lies on a path where the session once stood. Finding the others may take a while, so it only reads. Then they
are removed newest first, a few at a time, and only while no living session has moved. A process killed in between
leaves the rest to the next one. An interrupted import counts as deleted; a running one does not, since its hidden
sessions have a living owner.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import Connection

from crow.store.sqlite.database import UsesDatabase, now_ms, snapshot, transaction
from crow.store.sqlite.lease import is_alive
from crow.store.sqlite.paths import marks
from crow.store.sqlite.sessions import set_title

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_ENTRIES_PER_REMOVAL = 50
_INDEX_PAGES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What to remove from a conversation: `entries`, newest first.

    `living` describes where its living sessions stand. If that changes, the removal is out of date.
    """

    conversation: int
    living: str
    entries: tuple[int, ...]


class MaintenanceMethods(UsesDatabase):
    """Methods of the store for upkeep."""

    async def tidy(self) -> None:
        has_removed = False
        while (removal := await self.next_removal()) is not None:
            has_removed = True
            if not await self._remove(removal):
                break  # somebody moved in between: the next `tidy` goes on
        is_first = True
        while has_removed:
            has_removed = await self._merge_index(is_first)
            is_first = False
        await self.database.compact()

    async def _remove(self, removal: Removal) -> bool:
        for start in range(0, len(removal.entries), _ENTRIES_PER_REMOVAL):
            if not await self.remove_entries(removal, removal.entries[start : start + _ENTRIES_PER_REMOVAL]):
                return False
        return await self.remove_sessions(removal)

    @snapshot()
    def next_removal(self, sql: Connection) -> Removal | None:
        """What to remove next; None if no deleted session is left."""
        now = now_ms()
        hidden = sql.execute(
            "SELECT conversation, owner, lease_ms FROM sessions WHERE deleted_ms IS NOT NULL ORDER BY conversation"
        )
        pending = next(
            (
                found
                for found, owner, lease_ms in hidden
                if not owner or not is_alive(owner, lease_age_ms=now - lease_ms)
            ),
            None,
        )
        hidden.close()  # there may be thousands, and mostly the first one is taken
        if pending is None:
            return None
        entries = tuple(row[0] for row in sql.execute(_UNNEEDED, {"conversation": pending}))
        return Removal(conversation=pending, living=_living(sql, pending), entries=entries)

    @transaction()
    def remove_entries(self, sql: Connection, removal: Removal, ids: Sequence[int]) -> bool:
        """Remove some of the entries, with their blobs and words. False if `removal` is out of date."""
        if _living(sql, removal.conversation) != removal.living:
            return False
        # The index stores no text: it must be told the text while that is still there. Each id is listed: with ids
        # from a subquery, the view would read all entries.
        sql.execute(
            "INSERT INTO entries_fts (entries_fts, rowid, text) SELECT 'delete', id, text FROM searchable"
            f" WHERE id IN ({marks(ids)}) AND text <> ''",
            tuple(ids),
        )
        chosen = (json.dumps(list(ids)),)
        blobs = sql.execute(
            "SELECT DISTINCT blob FROM blob_refs WHERE entry IN (SELECT value FROM json_each(?))", chosen
        ).fetchall()
        sql.execute("DELETE FROM blob_refs WHERE entry IN (SELECT value FROM json_each(?))", chosen)
        sql.executemany(
            "DELETE FROM blobs WHERE hash = ? AND NOT EXISTS (SELECT 1 FROM blob_refs WHERE blob = hash)", blobs
        )
        sql.execute("DELETE FROM entries WHERE id IN (SELECT value FROM json_each(?))", chosen)
        return True

    @transaction()
    def remove_sessions(self, sql: Connection, removal: Removal) -> bool:
        """Once all entries are gone: remove the deleted sessions, and the conversation if no session is left in it.
        False if `removal` is out of date."""
        conversation = removal.conversation
        if _living(sql, conversation) != removal.living:
            return False
        query = "SELECT id FROM sessions WHERE conversation = ? AND deleted_ms IS NOT NULL"
        for (session_id,) in sql.execute(query, (conversation,)).fetchall():
            set_title(sql, session_id, None)
            for table in ("inbox", "drafts", "moves"):
                sql.execute(f"DELETE FROM {table} WHERE session = ?", (session_id,))
            sql.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
        sql.execute(
            "DELETE FROM conversations WHERE id = :id AND NOT EXISTS (SELECT 1 FROM sessions WHERE conversation = :id)",
            {"id": conversation},
        )
        return True

    @transaction()
    def _merge_index(self, sql: Connection, is_first: bool) -> bool:
        """Rewrite a part of the full-text index: until then the words of removed entries are only marked.

        `is_first` begins with all of it. True if there may be more to do.
        """
        pages = -_INDEX_PAGES if is_first else _INDEX_PAGES
        before = sql.total_changes
        sql.execute("INSERT INTO entries_fts (entries_fts, rank) VALUES ('merge', ?)", (pages,))
        return sql.total_changes - before > 1


def _living(sql: Connection, conversation: int) -> str:
    """The living sessions of the conversation, where they stand, and how often any session moved or was deleted."""
    rows = sql.execute(
        "SELECT s.id, s.leaf, s.deleted_ms, (SELECT max(m.id) FROM moves m WHERE m.session = s.id) FROM sessions s"
        " WHERE s.conversation = ? ORDER BY s.number",
        (conversation,),
    ).fetchall()
    return json.dumps(rows)


_UNNEEDED = """
    WITH RECURSIVE
    living (id, leaf) AS (
        SELECT id, leaf FROM sessions WHERE conversation = :conversation AND deleted_ms IS NULL
    ),
    needed (id) AS (
        SELECT leaf FROM living
        UNION SELECT e.id FROM living JOIN entries e ON e.session = living.id
        UNION SELECT m.from_leaf FROM living JOIN moves m ON m.session = living.id
        UNION SELECT m.to_leaf FROM living JOIN moves m ON m.session = living.id
        UNION SELECT e.parent FROM needed JOIN entries e ON e.id = needed.id
    )
    SELECT id FROM entries
    WHERE conversation = :conversation AND id NOT IN (SELECT id FROM needed WHERE id IS NOT NULL)
    ORDER BY id DESC
"""
