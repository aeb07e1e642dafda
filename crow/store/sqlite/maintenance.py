"""What deleted sessions left behind, found and removed.

Strategy: what goes of a conversation is every entry that no living session needs; it needs its path, whatever it wrote,
and every place it ever stood on, with all that lies before. That is found by reading alone, since it may take a while.
Then it is removed newest first and a few entries at a time, each time only if the living still stand where they stood.
An entry goes with its blobs and its words in the full-text index. Killed in between, the next one goes on. An import
that was interrupted is such a session too, one that is still going on is not: its sessions are hidden, but owned.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from crow.store.sqlite.lease import is_alive
from crow.store.sqlite.sessions import set_title

__all__ = ["Removal", "forget_words", "next_removal", "remove_entries", "remove_rows"]

# ruff: noqa: S608  # statements are put together from constants; values are parameters


_PAGES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What goes of a conversation: `entries` newest first. `living` says where its living sessions stand."""

    conversation: int
    living: str
    entries: tuple[int, ...]


def next_removal(connection: sqlite3.Connection, *, now_ms: int) -> Removal | None:
    """What to remove next; None if no deleted session is left, but for those that are being imported."""
    hidden = connection.execute(
        "SELECT conversation, owner, lease_ms FROM sessions WHERE deleted_ms IS NOT NULL ORDER BY conversation"
    )
    pending = next(
        (name for name, owner, lease_ms in hidden if not owner or not is_alive(owner, lease_age_ms=now_ms - lease_ms)),
        None,
    )
    hidden.close()  # there may be thousands; mostly the first is the one
    if pending is None:
        return None
    return Removal(
        conversation=pending,
        living=_living(connection, pending),
        entries=tuple(row[0] for row in connection.execute(_UNNEEDED, {"conversation": pending})),
    )


def remove_entries(connection: sqlite3.Connection, removal: Removal, ids: Sequence[int]) -> bool:
    """Remove some entries of `removal`; false, and nothing is done, if a living session moved since it was found."""
    if _living(connection, removal.conversation) != removal.living:
        return False
    chosen = (json.dumps(list(ids)),)
    # The index holds no text: it must be told what it had, while the text is still there.
    connection.execute(
        # Listed one by one: for ids that a subquery gives, the view would read every entry there is.
        "INSERT INTO entries_fts (entries_fts, rowid, text) SELECT 'delete', id, text FROM searchable"
        f" WHERE id IN ({', '.join('?' * len(ids))}) AND text <> ''",
        tuple(ids),
    )
    blobs = connection.execute(
        "SELECT DISTINCT blob FROM blob_refs WHERE entry IN (SELECT value FROM json_each(?))", chosen
    ).fetchall()
    connection.execute("DELETE FROM blob_refs WHERE entry IN (SELECT value FROM json_each(?))", chosen)
    connection.executemany(
        "DELETE FROM blobs WHERE hash = ? AND NOT EXISTS (SELECT 1 FROM blob_refs WHERE blob = hash)", blobs
    )
    connection.execute("DELETE FROM entries WHERE id IN (SELECT value FROM json_each(?))", chosen)
    return True


def remove_rows(connection: sqlite3.Connection, removal: Removal) -> bool:
    """When all entries are gone: the rows of the deleted sessions, and the conversation if no session is left in it.

    False, and nothing is done, as above.
    """
    if _living(connection, removal.conversation) != removal.living:
        return False
    deleted = connection.execute(
        "SELECT id FROM sessions WHERE conversation = ? AND deleted_ms IS NOT NULL", (removal.conversation,)
    ).fetchall()
    for (session_id,) in deleted:
        set_title(connection, session_id, None)
        for statement in (
            "DELETE FROM inbox WHERE session = ?",
            "DELETE FROM drafts WHERE session = ?",
            "DELETE FROM moves WHERE session = ?",
            "DELETE FROM sessions WHERE id = ?",
        ):
            connection.execute(statement, (session_id,))
    connection.execute(
        "DELETE FROM conversations WHERE id = :id AND NOT EXISTS (SELECT 1 FROM sessions WHERE conversation = :id)",
        {"id": removal.conversation},
    )
    return True


def forget_words(connection: sqlite3.Connection, *, is_first: bool) -> bool:
    """Rewrite a part of the full-text index without the words of removed entries, which it only marks until then.

    `is_first` begins with all of it. True if there may be more.
    """
    before = connection.total_changes
    connection.execute(
        "INSERT INTO entries_fts (entries_fts, rank) VALUES ('merge', ?)", (-_PAGES if is_first else _PAGES,)
    )
    return connection.total_changes - before > 1


def _living(connection: sqlite3.Connection, conversation: int) -> str:
    """Which sessions of the conversation live, where they stand, and how often anybody moved or died."""
    rows = connection.execute(
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
