"""Conversations of an exported file into the database.

Strategy: each is written in one transaction, remembered by the hash of its lines. What is here already is left as it
is: nothing is merged, nothing overwritten. A session comes in as a new one would, with the model and mode that the
caller gives; no permission, configuration, alias or further directory comes with it. The file was checked before.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from crow.domain.entries import Body, NewEntry
from crow.store.exchange import ConversationRecord, EntryRecord, MoveRecord, SessionRecord, renumbered
from crow.store.export_file import Block, ExportFile
from crow.store.paths import has_user
from crow.store.sessions import set_title
from crow.store.tip import Tip

__all__ = ["Defaults", "write_block"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What an imported session gets, as a new one would."""

    model: str
    mode: str


def write_block(
    connection: sqlite3.Connection, file: ExportFile, block: Block, defaults: Defaults, *, now_ms: int
) -> bool:
    """Write a conversation, in the caller's transaction; false, and nothing is done, if it is here."""
    if _is_here(connection, block):
        return False
    return _Writing(connection, block, defaults).write(file, now_ms=now_ms)


class _Writing:
    """One conversation on its way into the database. Entry n of the file gets the id `_base` + n."""

    def __init__(self, connection: sqlite3.Connection, block: Block, defaults: Defaults) -> None:
        self._connection = connection
        self._block = block
        self._defaults = defaults
        row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'entries'").fetchone()
        self._base: int = row[0] if row else 0
        self._conversation = 0
        self._rows: list[SessionRecord] = []
        self._tips: dict[str | None, Tip] = {}

    def write(self, file: ExportFile, *, now_ms: int) -> bool:
        """All of it."""
        for record, body in file.records(self._block):
            match record:
                case ConversationRecord(created_ms=created_ms):
                    self._begin(created_ms, now_ms)
                case SessionRecord():
                    self._add_session(record)
                case EntryRecord():
                    assert body is not None
                    self._add_entry(record, body)
                case MoveRecord():
                    self._connection.execute(
                        "INSERT INTO moves (session, from_leaf, to_leaf, reason, created_ms) VALUES (?, ?, ?, ?, ?)",
                        (
                            record.session,
                            self._id(record.from_leaf),
                            self._id(record.to_leaf),
                            record.reason,
                            record.created_ms,
                        ),
                    )
                case _:
                    pass
        self._finish()
        return True

    def _begin(self, created_ms: int, now_ms: int) -> None:
        cursor = self._connection.execute("INSERT INTO conversations (created_ms) VALUES (?)", (created_ms,))
        assert cursor.lastrowid is not None
        self._conversation = cursor.lastrowid
        self._connection.execute(
            "INSERT OR REPLACE INTO imports (conversation, hash, created_ms) VALUES (?, ?, ?)",
            (self._conversation, self._block.hash, now_ms),
        )

    def _add_session(self, record: SessionRecord) -> None:
        self._connection.execute(
            "INSERT INTO sessions (id, conversation, forked_from, parent_id, cwd, title_by_user, model, mode, turn,"
            " archived, created_ms, updated_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                record.id,
                self._conversation,
                record.forked_from,
                record.parent_id,
                record.cwd,
                record.title_by_user,
                self._defaults.model,
                self._defaults.mode,
                record.turn,
                record.archived,
                record.created_ms,
                record.updated_ms,
            ),
        )
        if record.title is not None:
            set_title(self._connection, record.id, record.title)
        self._rows.append(record)
        self._tips[record.id] = Tip(self._connection, record.id, now_ms=record.updated_ms)

    def _add_entry(self, record: EntryRecord, body: Body) -> None:
        if record.session not in self._tips:
            # Written by a session that is not in the file: of no row, so that it counts for none.
            stranger = Tip(self._connection, self._rows[0].id, now_ms=0)
            stranger.session_id = ""
            self._tips[None] = stranger
        tip = self._tips[record.session]
        tip.leaf, tip.now_ms = self._id(record.parent), record.created_ms
        new = NewEntry(
            body=renumbered(body, lambda number: self._id(number) or 0, self._bound),
            model=record.model,
            usage=record.usage,
            cost=record.cost,
            estimate=record.estimate,
        )
        entry = tip.add(new, turn=record.turn)
        assert entry.id == self._base + record.id

    def _finish(self) -> None:
        for record in self._rows:
            self._tips[record.id].save()
            leaf = self._id(record.leaf)
            listed = record.listed or (leaf is not None and has_user(self._connection, leaf))
            self._connection.execute(
                "UPDATE sessions SET leaf = ?, newest_entry = max(newest_entry, ?), has_prompt = ?, updated_ms = ?"
                " WHERE id = ?",
                (leaf, leaf or 0, listed, record.updated_ms, record.id),
            )

    def _id(self, number: int | None) -> int | None:
        """The id of an entry of the file; None if it has none with this number."""
        return self._base + number if number is not None and 1 <= number <= self._block.entries else None

    def _bound(self, number: int) -> int:
        return self._base + max(1, min(number, self._block.entries + 1))


def _is_here(connection: sqlite3.Connection, block: Block) -> bool:
    """Whether the conversation is here: imported before from the same lines, or under one of its sessions' ids."""
    row = connection.execute(
        "SELECT 1 FROM imports i JOIN sessions s ON s.conversation = i.conversation AND s.deleted_ms IS NULL"
        " WHERE i.hash = ?",
        (block.hash,),
    ).fetchone()
    taken = (connection.execute("SELECT 1 FROM sessions WHERE id = ?", (name,)).fetchone() for name in block.sessions)
    return row is not None or any(taken)
