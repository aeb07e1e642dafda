"""Copies sessions from the database into an export file, and from such a file into the database."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import asyncpg

from crow.domain.entries import Entry, NewEntry, PromptName
from crow.domain.errors import NoSuchSession
from crow.store import portable
from crow.store.admin import FORMER_OWNER, ConversationState, ImportDefaults, SessionExtras
from crow.store.codec import Encoded, from_json, to_json
from crow.store.owner import readable
from crow.store.portable import Block, EntryRecord, ExportFile, MoveRecord, SessionRecord
from crow.store.postgres.append import trigrams
from crow.store.postgres.database import Sql, folded
from crow.store.postgres.paths import first_entries, newest_of_kind
from crow.store.postgres.prompts import add_name, note_entries
from crow.store.rows import COUNTERS, USAGE_COLUMNS, SessionCounts, entry_values, plain, plain_or_none, storable_usage
from crow.store.search import searchable_text
from crow.store.transfer import (
    EXTRA_COLUMNS,
    WRITTEN_LATER,
    ConversationImport,
    ExportedSessionDeleted,
    ExportSelection,
    ImportRemoved,
    Piece,
    SessionTaken,
    by_conversation,
    number_of,
)

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_ENTRY_COLUMNS = (
    *("id", "conversation", "session", "parent", "turn", "kind", "model", "body", "body_blob", "call_entry"),
    *("call_index", *USAGE_COLUMNS, "cost", "estimate", "created_ms"),
)

_NEEDED = """
    WITH RECURSIVE needed (id) AS (
        SELECT leaf FROM crow.sessions WHERE id = ANY ($2::text[])
        UNION SELECT e.id FROM crow.entries e WHERE e.conversation = $1 AND e.session = ANY ($2::text[])
        UNION SELECT m.from_leaf FROM crow.moves m WHERE m.session = ANY ($2::text[])
        UNION SELECT m.to_leaf FROM crow.moves m WHERE m.session = ANY ($2::text[])
        UNION SELECT e.parent FROM needed JOIN crow.entries e ON e.id = needed.id
    )
    SELECT id FROM crow.entries WHERE conversation = $1 AND id IN (SELECT id FROM needed WHERE id IS NOT NULL)
    ORDER BY id
"""
"""Selects the entries of the conversation $1 that the sessions $2 need: those that they wrote, their current and former
leaves, and all entries on the paths to these."""


async def family(sql: Sql, ids: Sequence[str] | None) -> dict[int, tuple[str, ...]]:
    """Map conversations to the chosen sessions and their subagents. If `ids` is None, all sessions that `crow
    sessions` lists are chosen."""
    start = 'SELECT unnest($1::text[]) COLLATE "C"'
    if ids is None:
        start = "SELECT id FROM crow.sessions WHERE has_prompt AND parent_id IS NULL AND $1::text[] IS NULL"
    rows = await sql.fetch(
        f"WITH RECURSIVE family (id) AS ({start}"
        " UNION SELECT s.id FROM family JOIN crow.sessions s ON s.parent_id = family.id)"
        " SELECT conversation, id FROM crow.sessions WHERE id IN (SELECT id FROM family) AND deleted_ms IS NULL"
        " ORDER BY conversation, number",
        ids,
    )
    return by_conversation(rows)


async def choose(sql: Sql, conversation: int, sessions: Sequence[str], known: frozenset[str]) -> ExportSelection:
    """Return the part of `conversation` to be exported with `sessions`. `known` are the ids of all sessions in the
    file."""
    ids = array("q", [row[0] for row in await sql.fetch(_NEEDED, conversation, sessions)])
    created_ms = await sql.fetchval("SELECT created_ms FROM crow.conversations WHERE id = $1", conversation)
    records, moves = [], []
    columns = ", ".join("has_prompt AS listed" if field.name == "listed" else field.name for field in _session_fields)
    query = f"SELECT {columns} FROM crow.sessions WHERE id = ANY ($1::text[]) ORDER BY number"
    for row in await sql.fetch(query, sessions):
        values: dict[str, Any] = dict(row)
        for name in ("parent_id", "forked_from"):
            values[name] = values[name] if values[name] in known else None
        records.append(SessionRecord(**values | {"leaf": _maybe_number(ids, values["leaf"])}))
    query = (
        "SELECT session, from_leaf, to_leaf, reason, created_ms FROM crow.moves WHERE session = ANY ($1::text[])"
        " ORDER BY id"
    )
    for row in await sql.fetch(query, sessions):
        leaves = {name: _maybe_number(ids, row[name]) for name in ("from_leaf", "to_leaf")}
        moves.append(MoveRecord(**dict(row) | leaves))
    return ExportSelection(
        conversation=conversation,
        head=(portable.ConversationRecord(created_ms=created_ms or 0), *records),
        moves=tuple(moves),
        ids=ids,
        missing=frozenset(),
        sessions=frozenset(sessions),
    )


_session_fields = fields(SessionRecord)


async def next_entries(sql: Sql, chosen: ExportSelection, start: int, most: int) -> tuple[tuple[Entry, ...], int]:
    """Return the next entries, beginning with `chosen.ids[start]`, and their number. There are at most `most` entries.

    :raises ExportedSessionDeleted: a session was deleted meanwhile.
    """
    ids = list(chosen.ids[start : start + most])
    entries = await first_entries(sql, ids)
    if [entry.id for entry in entries] != ids[: len(entries)] or not entries:
        raise ExportedSessionDeleted(chosen.sessions)
    return entries, len(entries)


def _maybe_number(ids: array[int], entry: int | None) -> int | None:
    return None if entry is None else number_of(ids, entry) or None


async def conversation_state(sql: Sql, ids: Sequence[str]) -> ConversationState:
    """Return the data that a copy of these sessions needs in addition to an export."""
    extras: dict[str, SessionExtras] = {}
    users: list[str] = []
    stamps: list[object] = []
    for session_id in ids:
        row = await sql.fetchrow(
            f"SELECT alias, {', '.join(EXTRA_COLUMNS)}, state, owner, leaf, turn, newest_entry, updated_ms, epoch FROM"
            " crow.sessions WHERE id = $1 AND deleted_ms IS NULL",
            session_id,
        )
        if row is None:
            raise NoSuchSession(session_id)
        inbox = await sql.fetch(
            "SELECT i.message_id, i.parts, i.created_ms, p.name, p.digest, i.owner FROM crow.inbox i"
            " LEFT JOIN crow.prompts p ON p.session = i.session AND p.message_id = i.message_id AND p.turn IS NULL"
            " WHERE i.session = $1 ORDER BY i.seq",
            session_id,
        )
        shares = await sql.fetch(
            "SELECT principal, access, created_ms FROM crow.shares WHERE session = $1 ORDER BY principal", session_id
        )
        draft = await sql.fetch(
            "SELECT turn, message_id, piece, created_ms FROM crow.drafts WHERE session = $1"
            " AND after_leaf IS NOT DISTINCT FROM $2 ORDER BY seq",
            session_id,
            row["leaf"],
        )
        owners = {row["owner"]} if row["state"] == "running" else set()
        owners |= {one["owner"] for one in inbox}
        query = "SELECT o FROM unnest($1::text[]) AS o WHERE crow.is_alive(o)"
        users += [readable(owner) for (owner,) in await sql.fetch(query, sorted(owners))]
        stamps.append((*row, len(inbox), len(draft), shares))
        extras[session_id] = SessionExtras(
            **{name: row[name] for name in EXTRA_COLUMNS},
            alias=row["alias"],
            is_running=row["state"] == "running",
            shares=tuple(tuple(share) for share in shares),
            inbox=tuple(tuple(one)[:-1] for one in inbox),
            draft=tuple(
                (one["turn"], one["message_id"], *from_json(one["piece"], ["", ""]), one["created_ms"]) for one in draft
            ),
        )
    return ConversationState(extras=extras, users=tuple(dict.fromkeys(users)), stamp=repr(stamps))


class Importer(ConversationImport):
    """Imports one conversation of a checked file. Call `begin`, pass each `next_piece` to `add`, then call `show`.

    Each call is a small transaction. Until `show` is called, the sessions are hidden like deleted sessions, and this
    store owns them as if it were running a turn in each of them. If the store dies, the sessions are removed like
    deleted sessions.
    """

    def __init__(self, file: ExportFile, block: Block, defaults: ImportDefaults) -> None:
        super().__init__(file, block, defaults)
        self._ids = array("q")
        """The database id of each entry of the file, in order."""
        self._conversation = 0
        """The database id of the conversation, or 0 before `begin`."""
        self._rows: Sequence[SessionRecord] = ()
        self._counts: dict[str, SessionCounts] = {}
        """Maps each session to the sums over its entries."""
        self._newest: dict[str, int] = {}
        """Maps each session to the database id of its newest entry."""

    async def begin(self, sql: Sql, here: str) -> bool:
        """Insert the conversation and its hidden sessions. If the conversation was imported before or one of its
        sessions exists, return false and write nothing.

        :raises SessionTaken: another process is importing or removing one of the sessions now.
        """
        if await self._exists(sql):
            return False
        query = "SELECT nextval(pg_get_serial_sequence('crow.entries', 'id')) FROM generate_series(1, $1::bigint)"
        self._ids = array("q", sorted(row[0] for row in await sql.fetch(query, self.block.entries)))
        conversation, self._rows = self.read_head()
        query = "INSERT INTO crow.conversations (created_ms) VALUES ($1) RETURNING id"
        self._conversation = await sql.fetchval(query, conversation.created_ms)
        query = "INSERT INTO crow.imports (conversation, hash, created_ms) VALUES ($1, $2, crow.now_ms())"
        await sql.execute(query, self._conversation, self.block.hash)
        for record in self._rows:
            await self._add_session(sql, record, here)
        return True

    async def _exists(self, sql: Sql) -> bool:
        """Return whether the conversation was imported before, or one of its sessions exists. An earlier import does
        not count if all its sessions were deleted and only their forks are left.

        :raises SessionTaken: another process is importing or removing one of the sessions now.
        """
        same = await sql.fetchval(
            "SELECT EXISTS (SELECT 1 FROM crow.imports i JOIN crow.sessions s ON s.conversation = i.conversation"
            " AND s.deleted_ms IS NULL WHERE i.hash = $1 AND s.forked_from IS NULL)",
            self.block.hash,
        )
        self.is_same = bool(same)
        query = "SELECT id, deleted_ms IS NULL FROM crow.sessions WHERE id = ANY ($1::text[])"
        found, exists = dict(await sql.fetch(query, self.block.sessions)), self.is_same
        for name in self.block.sessions:
            if found.get(name) is False and not exists:
                raise SessionTaken(name)
            exists = exists or name in found
        return exists

    async def _add_session(self, sql: Sql, record: SessionRecord, here: str) -> None:
        title = self.title_of(record)
        values = {
            **{field.name: getattr(record, field.name) for field in _session_fields if field.name not in WRITTEN_LATER},
            "conversation": self._conversation,
            "model": plain(self.defaults.model),
            "mode": plain(self.defaults.mode),
            "title": plain_or_none(title),
            "folded_title": None if title is None else folded(title),
            "cwd": plain(record.cwd),
            "state": "running",
            "owner": here,
        }
        marks = ", ".join(f"${number}" for number in range(1, len(values) + 1))
        try:
            await sql.execute(
                f"INSERT INTO crow.sessions ({', '.join(values)}, deleted_ms) VALUES ({marks}, crow.now_ms())",
                *values.values(),
            )
        except asyncpg.UniqueViolationError:
            raise SessionTaken(record.id) from None

    async def add(self, sql: Sql, here: str, piece: Piece) -> None:
        """Write a piece.

        :raises ImportRemoved: other stores counted this store as dead and removed the data that it had written.
        """
        owned = await sql.fetch(
            "SELECT 1 FROM crow.sessions WHERE conversation = $1 AND owner = $2 ORDER BY number FOR UPDATE",
            self._conversation,
            here,
        )
        if not owned:
            raise ImportRemoved
        entries = [one for one in piece if not isinstance(one, MoveRecord)]
        await sql.executemany(
            "INSERT INTO crow.moves (session, from_leaf, to_leaf, reason, created_ms) VALUES ($1, $2, $3, $4, $5)",
            [
                (
                    one.session,
                    self.entry_id(one.from_leaf),
                    self.entry_id(one.to_leaf),
                    plain(one.reason),
                    one.created_ms,
                )
                for one in piece
                if isinstance(one, MoveRecord)
            ],
        )
        await sql.copy_records_to_table(
            "entries", schema_name="crow", columns=_ENTRY_COLUMNS, records=[self._row(*one) for one in entries]
        )
        texts: list[tuple[int, str, list[int]]] = []
        blobs: dict[str, bytes] = {}
        refs: set[tuple[str, int]] = set()
        for record, stored in entries:
            entry_id = self._ids[record.id - 1]
            blobs |= stored.blobs
            refs |= {(name, entry_id) for name in stored.blobs}
            if text := searchable_text(stored.body):
                texts.append((entry_id, folded(text), trigrams(folded(text))))
        await sql.copy_records_to_table(
            "texts", schema_name="crow", columns=("entry", "folded", "trigrams"), records=texts
        )
        await _add_blobs(sql, blobs)
        await sql.copy_records_to_table("blob_refs", schema_name="crow", columns=("blob", "entry"), records=refs)
        await note_entries(
            sql,
            [
                (record.session, stored.body, record.turn, self._ids[record.id - 1])
                for record, stored in entries
                if record.session is not None
            ],
        )
        for record, stored in entries:  # the last step, because the transaction may run again after a deadlock
            if record.session is not None:
                self._newest[record.session] = self._ids[record.id - 1]
                new = NewEntry(body=stored.body, cost=record.cost)
                self._counts.setdefault(record.session, SessionCounts()).add(new, storable_usage(record.usage))

    def _row(self, record: EntryRecord, stored: Encoded) -> tuple[object, ...]:
        """Return the values of `_ENTRY_COLUMNS`."""
        new = NewEntry(body=stored.body, model=record.model, cost=record.cost, estimate=record.estimate)
        values = {
            "id": self._ids[record.id - 1],
            "conversation": self._conversation,
            "session": record.session or "",
            "parent": self.entry_id(record.parent),
            "turn": record.turn,
            **entry_values(new, stored, storable_usage(record.usage)),
            "created_ms": record.created_ms,
        }
        return tuple(values[name] for name in _ENTRY_COLUMNS)

    async def show(self, sql: Sql) -> None:
        """Make the sessions visible, after the whole file was imported.

        :raises ImportRemoved: other stores counted this store as dead and removed the data that it had written.
        """
        for record in self._rows:
            counts = self._counts.get(record.id, SessionCounts())
            numbers = counts.storable()
            leaf = self.entry_id(record.leaf)
            listed = record.listed
            # Another program may have written the file, with a wrong `listed`. So also look for a prompt.
            if record.id not in self.defaults.extras:
                listed = listed or counts.has_prompt or await newest_of_kind(sql, leaf, "user") is not None
            shown = await sql.fetchval(
                "UPDATE crow.sessions SET leaf = $2, newest_entry = $3, has_prompt = $4, updated_ms = $5,"
                " cost = $6,"
                f" {', '.join(f'{name} = ${number}' for number, name in enumerate(COUNTERS, start=7))},"
                " state = 'idle', owner = '', deleted_ms = NULL WHERE id = $1 AND conversation = $14"
                " RETURNING 1",
                *(record.id, leaf, max(leaf or 0, self._newest.get(record.id, 0)), listed, record.updated_ms),
                *(counts.cost, *numbers.values(), self._conversation),
            )
            if shown is None:
                raise ImportRemoved
            await sql.execute(
                "UPDATE crow.sessions SET cost = cost + $2, tokens_in = crow.plus(tokens_in, $3),"
                " tokens_out = crow.plus(tokens_out, $4), tokens_cached = crow.plus(tokens_cached, $5) WHERE id = $1",
                *(record.parent_id, counts.cost, numbers["tokens_in"], numbers["tokens_out"], numbers["tokens_cached"]),
            )
            if record.id in self.defaults.extras:
                await _set_extras(sql, record.id, leaf, self.defaults.extras[record.id])

    def entry_id(self, number: int | None) -> int | None:
        return self._ids[number - 1] if number is not None and 1 <= number <= len(self._ids) else None

    def bound(self, number: int) -> int:
        if number > len(self._ids):
            return self._ids[-1] + 1 if self._ids else 1
        return self._ids[max(1, number) - 1]


async def _add_blobs(sql: Sql, blobs: Mapping[str, bytes]) -> None:
    names = sorted(blobs)
    await sql.execute(
        "INSERT INTO crow.blobs (hash, size, data) SELECT hash, length(data), data"
        " FROM unnest($1::text[], $2::bytea[]) AS b (hash, data) ON CONFLICT DO NOTHING",
        names,
        [blobs[name] for name in names],
    )
    # Lock the blobs, so that no removal deletes one of them before this transaction ends.
    await sql.fetch("SELECT 1 FROM crow.blobs WHERE hash = ANY ($1::text[]) ORDER BY hash FOR KEY SHARE", names)


async def _set_extras(sql: Sql, session_id: str, leaf: int | None, extras: SessionExtras) -> None:
    """Write the data that an export does not contain. If another session already has the alias, the alias stays with
    that session."""
    columns = ", ".join(f"{name} = ${number}" for number, name in enumerate(EXTRA_COLUMNS, start=5))
    await sql.execute(
        "UPDATE crow.sessions SET state = $2, owner = $3, alias = CASE WHEN EXISTS (SELECT 1 FROM crow.sessions"
        " WHERE alias = $4 AND coalesce(principal, '') = coalesce($11::text, '')) THEN NULL ELSE $4 END,"
        f" {columns} WHERE id = $1",
        session_id,
        *(("running", FORMER_OWNER) if extras.is_running else ("idle", "")),
        plain_or_none(extras.alias),
        *(
            plain(value) if isinstance(value, str) else value
            for name in EXTRA_COLUMNS
            for value in [getattr(extras, name)]
        ),
    )
    await sql.executemany(
        "INSERT INTO crow.shares (session, principal, access, created_ms) VALUES ($1, $2, $3, $4)",
        [(session_id, plain(principal), access, at_ms) for principal, access, at_ms in extras.shares],
    )
    await sql.executemany(
        "INSERT INTO crow.inbox (session, owner, message_id, parts, created_ms) VALUES ($1, $2, $3, $4, $5)",
        [(session_id, FORMER_OWNER, plain(message), parts, at_ms) for message, parts, at_ms, *_ in extras.inbox],
    )
    for message, _, _, name, digest in extras.inbox:
        if name is not None and digest is not None:
            await add_name(sql, session_id, PromptName(id=name, digest=digest), message)
    await sql.executemany(
        "INSERT INTO crow.drafts (session, after_leaf, turn, message_id, piece, created_ms)"
        " VALUES ($1, $2, $3, $4, $5, $6)",
        [
            (session_id, leaf, turn, plain(message), to_json([text, thought]), at_ms)
            for turn, message, text, thought, at_ms in extras.draft
        ],
    )
