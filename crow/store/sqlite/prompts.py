"""The table of prompts with names. Every function runs inside a transaction."""

from __future__ import annotations

from sqlite3 import Connection

from crow.domain.entries import Body, Entry, PromptName
from crow.store import NamedPrompt
from crow.store.codec import mend
from crow.store.prompts import PromptRow, check_new, check_same, ended_prompt, named_prompt_in, waiting_prompt
from crow.store.sqlite.connection import insert
from crow.store.sqlite.paths import entries_of


def add_name(sql: Connection, session_id: str, name: PromptName, message_id: str) -> None:
    """Store the name of a prompt that has no turn yet.

    :raises RepeatedPrompt: the same prompt was stored before.
    :raises ArgumentError: a prompt with other content has this name.
    """
    check_new(name, _row(sql, session_id, name))
    values = {"session": session_id, "name": name.id, "digest": name.digest, "message_id": message_id}
    insert(sql, "prompts", values)


def begin_command(sql: Connection, session_id: str, message_id: str, *, turn: int) -> None:
    """Store which turn runs a slash command with a name. The command's entry is stored only at the end of the turn."""
    sql.execute(
        "UPDATE prompts SET turn = ?, entry = (SELECT coalesce(max(id), 0) FROM entries WHERE session = ?)"
        " WHERE session = ? AND message_id = ? AND turn IS NULL",
        (turn, session_id, session_id, message_id),
    )


def note_entry(sql: Connection, session_id: str, body: Body, *, turn: int, entry: int) -> None:
    """Store which turn runs a prompt with a name, after the prompt was stored as `entry`. Do nothing if `body` is not
    such a prompt."""
    if (named := named_prompt_in(body)) is None:
        return
    name, message_id = named
    sql.execute(
        "INSERT INTO prompts (session, name, digest, message_id, turn, entry) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT DO UPDATE SET turn = excluded.turn, entry = excluded.entry"
        " WHERE turn IS NULL AND message_id = excluded.message_id",
        (session_id, *(mend(text) for text in (name.id, name.digest, message_id)), turn, entry),
    )


def waiting_name(sql: Connection, session_id: str, message_id: str) -> PromptName | None:
    """Return the name of a prompt in the inbox, or None if it has no name."""
    query = "SELECT name, digest FROM prompts WHERE session = ? AND message_id = ? AND turn IS NULL"
    row = sql.execute(query, (session_id, message_id)).fetchone()
    return None if row is None else PromptName(id=row[0], digest=row[1])


def forget_waiting(sql: Connection, session_id: str, message_id: str) -> None:
    """Remove the name of a prompt in the inbox, so that the prompt can be sent again."""
    query = "DELETE FROM prompts WHERE session = ? AND message_id = ? AND turn IS NULL"
    sql.execute(query, (session_id, message_id))


def find_prompt(sql: Connection, session_id: str, name: PromptName, owner: str) -> NamedPrompt | None:
    """See :meth:`crow.store.Store.named_prompt`."""
    row = _row(sql, session_id, name)
    if row is None:
        return None
    check_same(name, row.digest)
    if row.turn is None:
        query = "SELECT owner FROM inbox WHERE session = ? AND message_id = ?"
        found = sql.execute(query, (session_id, row.message_id)).fetchone()
        return waiting_prompt(row, found and found[0], owner)
    ends = sql.execute(
        "SELECT id FROM entries WHERE session = ? AND id >= ? AND turn = ? AND kind = 'turn_end' ORDER BY id LIMIT 1",
        (session_id, row.entry, row.turn),
    ).fetchone()
    if ends is None:
        return NamedPrompt(message_id=row.message_id, turn=row.turn)
    (last,) = ends
    query = (
        "SELECT id FROM entries WHERE session = ? AND id BETWEEN ? AND ? AND turn = ? AND (id = ?"
        " OR input_tokens IS NOT NULL OR output_tokens IS NOT NULL) ORDER BY id"
    )
    ids = [entry for (entry,) in sql.execute(query, (session_id, row.entry, last, row.turn, last))]
    entries: list[Entry] = []
    while ids:
        read, taken = entries_of(sql, ids)
        entries += read
        ids = ids[taken:]
    return ended_prompt(row, last, entries)


def _row(sql: Connection, session_id: str, name: PromptName) -> PromptRow | None:
    query = "SELECT digest, message_id, turn, entry FROM prompts WHERE session = ? AND name = ?"
    row = sql.execute(query, (session_id, name.id)).fetchone()
    return None if row is None else PromptRow(*row)
