"""Conversations of an exported file into the database.

Strategy: others go on working meanwhile, so a conversation is written in many small transactions, between which they
take their turns; its sessions stay hidden until the whole file is here, and are shown in one. Until then they are owned
by the store that brings them, as a turn is: should it die, they are what a deleted session leaves, and go the same way.
What is here already is left as it is: nothing is merged, nothing overwritten. A session comes in as a new one would,
with the model and mode that the caller gives; no permission, configuration, alias or further directory comes with it.
The file was checked before.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from crow.domain.entries import Body, NewEntry
from crow.domain.errors import ArgumentError, StoreUnavailable
from crow.store.codec import Encoded, encode
from crow.store.exchange import ConversationRecord, EntryRecord, MoveRecord, Record, SessionRecord, renumbered
from crow.store.export_file import Block, ExportFile
from crow.store.paths import has_user
from crow.store.sessions import set_title
from crow.store.tip import Tip

__all__ = ["Defaults", "Intake", "Piece", "abandon", "show"]

_PIECE_RECORDS = 200
_PIECE_CHARACTERS = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What an imported session gets, as a new one would."""

    model: str
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some records of a conversation, ready to be written: entries come with their bodies as stored."""

    entries: Sequence[tuple[EntryRecord, Encoded]]
    moves: Sequence[MoveRecord]


class Intake:
    """One conversation on its way into the database: `begin`, each `next_piece` through `add`, then `show`.

    Entry n of the file gets the id `_base` + n: those ids are reserved, since others write in between.
    """

    def __init__(self, file: ExportFile, block: Block, defaults: Defaults) -> None:
        self._block = block
        self._defaults = defaults
        self._records: Iterator[tuple[Record, Body | None]] = file.records(block)
        self._base = 0
        self._conversation = 0
        self._rows: list[SessionRecord] = []
        self._tips: dict[str | None, Tip] = {}

    def begin(self, connection: sqlite3.Connection, here: str, *, now_ms: int) -> bool:
        """Make the conversation and its hidden sessions; false, and nothing is done, if they are here.

        :raises ArgumentError: one of them is about to come or to go, by somebody else's doing.
        """
        if _is_here(connection, self._block):
            return False
        self._base = _reserved(connection, self._block.entries)
        for record, body in self._records:
            match record:
                case ConversationRecord(created_ms=created_ms):
                    self._add_conversation(connection, created_ms, now_ms)
                case SessionRecord():
                    self._add_session(connection, record)
                case EntryRecord() | MoveRecord():
                    self._records = chain([(record, body)], self._records)
                    break
                case _:
                    pass
        # What a session that is not in the file wrote: of no row, so that it counts for none.
        self._tips[None] = Tip(connection, self._rows[0].id, now_ms=0)
        self._tips[None].session_id = ""
        connection.execute(
            "UPDATE sessions SET deleted_ms = ?, state = 'running', owner = ?, lease_ms = ? WHERE conversation = ?",
            (now_ms, here, now_ms, self._conversation),
        )
        return True

    def next_piece(self) -> Piece | None:
        """What comes next in the file; None at its end. Touches no database.

        :raises ArgumentError: the file was changed since it was checked.
        """
        entries: list[tuple[EntryRecord, Encoded]] = []
        moves: list[MoveRecord] = []
        characters = 0
        for record, body in self._records:
            match record:
                case EntryRecord():
                    assert body is not None
                    stored = encode(renumbered(body, lambda number: self._id(number) or 0, self._bound))
                    characters += len(stored.text or "") + sum(map(len, stored.blobs.values()))
                    entries.append((record, stored))
                case MoveRecord():
                    moves.append(record)
                case _:
                    pass
            if len(entries) + len(moves) >= _PIECE_RECORDS or characters >= _PIECE_CHARACTERS:
                break
        return Piece(entries=entries, moves=moves) if entries or moves else None

    def add(self, connection: sqlite3.Connection, here: str, piece: Piece, *, now_ms: int) -> None:
        """Write a piece. :raises StoreUnavailable: others took this process for dead, and removed what it wrote."""
        found = connection.execute(
            "UPDATE sessions SET lease_ms = ? WHERE conversation = ? AND owner = ?", (now_ms, self._conversation, here)
        )
        if not found.rowcount:
            raise StoreUnavailable(
                "The import was interrupted for so long that it was given up. Import the file again."
            )
        for record, stored in piece.entries:
            tip = self._tips[record.session]
            tip.leaf, tip.now_ms = self._id(record.parent), record.created_ms
            new = NewEntry(
                body=stored.body, model=record.model, usage=record.usage, cost=record.cost, estimate=record.estimate
            )
            tip.add(new, turn=record.turn, encoded=stored, entry_id=self._base + record.id)
        connection.executemany(
            "INSERT INTO moves (session, from_leaf, to_leaf, reason, created_ms) VALUES (?, ?, ?, ?, ?)",
            [
                (move.session, self._id(move.from_leaf), self._id(move.to_leaf), move.reason, move.created_ms)
                for move in piece.moves
            ],
        )

    def show(self, connection: sqlite3.Connection) -> None:
        """See `show` below."""
        for record in self._rows:
            self._tips[record.id].save()
            leaf = self._id(record.leaf)
            listed = record.listed or (leaf is not None and has_user(connection, leaf))
            connection.execute(
                "UPDATE sessions SET leaf = ?, newest_entry = max(newest_entry, ?), has_prompt = ?, updated_ms = ?,"
                " deleted_ms = NULL WHERE id = ?",
                (leaf, leaf or 0, listed, record.updated_ms, record.id),
            )

    def _add_conversation(self, connection: sqlite3.Connection, created_ms: int, now_ms: int) -> None:
        cursor = connection.execute("INSERT INTO conversations (created_ms) VALUES (?)", (created_ms,))
        assert cursor.lastrowid is not None
        self._conversation = cursor.lastrowid
        connection.execute(
            "INSERT OR REPLACE INTO imports (conversation, hash, created_ms) VALUES (?, ?, ?)",
            (self._conversation, self._block.hash, now_ms),
        )

    def _add_session(self, connection: sqlite3.Connection, record: SessionRecord) -> None:
        connection.execute(
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
            set_title(connection, record.id, record.title)
        self._rows.append(record)
        self._tips[record.id] = Tip(connection, record.id, now_ms=record.updated_ms)

    def _id(self, number: int | None) -> int | None:
        """The id of an entry of the file; None if it has none with this number."""
        return self._base + number if number is not None and 1 <= number <= self._block.entries else None

    def _bound(self, number: int) -> int:
        return self._base + max(1, min(number, self._block.entries + 1))


def show(connection: sqlite3.Connection, intakes: Sequence[Intake]) -> None:
    """All of it is here: the sessions are sessions like any other."""
    for intake in intakes:
        intake.show(connection)


def abandon(connection: sqlite3.Connection, here: str) -> None:
    """Nothing more comes of what `here` was bringing in: it may be removed."""
    connection.execute(
        "UPDATE sessions SET state = 'idle', owner = '' WHERE owner = ? AND deleted_ms IS NOT NULL", (here,)
    )


def _is_here(connection: sqlite3.Connection, block: Block) -> bool:
    """Whether the conversation is here: imported before from the same lines, or under one of its sessions' ids. A fork
    alone, made of an import whose sessions are gone, is another conversation's."""
    same = connection.execute(
        "SELECT 1 FROM imports i JOIN sessions s ON s.conversation = i.conversation AND s.deleted_ms IS NULL"
        " WHERE i.hash = ? AND s.forked_from IS NULL",
        (block.hash,),
    ).fetchone()
    is_here = same is not None
    for name in block.sessions:
        row = connection.execute("SELECT deleted_ms IS NULL FROM sessions WHERE id = ?", (name,)).fetchone()
        if row == (0,) and not is_here:
            raise ArgumentError(
                f'Session "{name}" is being imported, or removed, by another process at this moment. Import the file'
                " again when that is done."
            )
        is_here = is_here or row is not None
    return is_here


def _reserved(connection: sqlite3.Connection, entries: int) -> int:
    """The id after which so many ids are free, and are given to no other entry from now on."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'entries'").fetchone()
    if row is None:
        connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('entries', ?)", (entries,))
        return 0
    connection.execute("UPDATE sqlite_sequence SET seq = seq + ? WHERE name = 'entries'", (entries,))
    return int(row[0])
