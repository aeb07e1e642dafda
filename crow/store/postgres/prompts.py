"""The table of prompts with names. Every function runs inside a transaction."""

from __future__ import annotations

from collections.abc import Iterable

from crow.domain.entries import Body, PromptName
from crow.store import NamedPrompt
from crow.store.postgres.database import Sql
from crow.store.postgres.paths import select_entries, session_values
from crow.store.prompts import PromptRow, check_new, check_same, ended_prompt, named_prompt_in, waiting_prompt
from crow.store.rows import plain


async def add_name(sql: Sql, session_id: str, name: PromptName, message_id: str) -> None:
    """Store the name of a prompt that has no turn yet. The caller must have locked the session.

    :raises RepeatedPrompt: the same prompt was stored before.
    :raises ArgumentError: a prompt with other content has this name.
    """
    check_new(name, await _row(sql, session_id, name))
    await sql.execute(
        "INSERT INTO crow.prompts (session, name, digest, message_id) VALUES ($1, $2, $3, $4)",
        *(session_id, plain(name.id), name.digest, plain(message_id)),
    )


async def begin_command(sql: Sql, conversation: int, session_id: str, message_id: str, *, turn: int) -> None:
    """Note the turn of a slash command. The entry of the command is stored at the end of this turn."""
    await sql.execute(
        "UPDATE crow.prompts SET turn = $4, entry ="
        " (SELECT coalesce(max(id), 0) FROM crow.entries WHERE conversation = $1 AND session = $2)"
        " WHERE session = $2 AND message_id = $3 AND turn IS NULL",
        *(conversation, session_id, plain(message_id), turn),
    )


async def note_entries(sql: Sql, stored: Iterable[tuple[str, Body, int, int]]) -> None:
    """Note the turns of prompts that were just stored as entries. Each item is a session's id, a body, a turn and the
    id of the entry. Bodies other than prompts with names are skipped."""
    rows = [
        (session_id, plain(name.id), plain(name.digest), plain(message_id), turn, entry)
        for session_id, body, turn, entry in stored
        if (named := named_prompt_in(body)) is not None
        for name, message_id in [named]
    ]
    if rows:
        await sql.executemany(
            "INSERT INTO crow.prompts AS p (session, name, digest, message_id, turn, entry)"
            " VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (session, name) DO UPDATE"
            " SET turn = excluded.turn, entry = excluded.entry"
            " WHERE p.turn IS NULL AND p.message_id = excluded.message_id",
            rows,
        )


async def waiting_name(sql: Sql, session_id: str, message_id: str) -> PromptName | None:
    """Return the name of a prompt in the inbox, or None if it has no name."""
    query = "SELECT name, digest FROM crow.prompts WHERE session = $1 AND message_id = $2 AND turn IS NULL"
    row = await sql.fetchrow(query, session_id, plain(message_id))
    return None if row is None else PromptName(id=row[0], digest=row[1])


async def forget_waiting(sql: Sql, session_id: str, message_id: str) -> None:
    """Remove the name of a prompt in the inbox, so that the prompt can be sent again."""
    query = "DELETE FROM crow.prompts WHERE session = $1 AND message_id = $2 AND turn IS NULL"
    await sql.execute(query, plain(session_id), plain(message_id))


async def find_prompt(sql: Sql, session_id: str, name: PromptName, owner: str) -> NamedPrompt | None:
    """See :meth:`crow.store.Store.named_prompt`."""
    (conversation,) = await session_values(sql, session_id, "conversation")
    row = await _row(sql, session_id, name)
    if row is None:
        return None
    check_same(name, row.digest)
    if row.turn is None:
        query = "SELECT owner FROM crow.inbox WHERE session = $1 AND message_id = $2"
        found = await sql.fetchval(query, session_id, row.message_id)
        return waiting_prompt(row, found, owner)
    is_of_turn = "conversation = $1 AND session = $2 AND id >= $3 AND turn = $4"
    turn = (conversation, session_id, row.entry, row.turn)
    query = f"SELECT id FROM crow.entries WHERE {is_of_turn} AND kind = 'turn_end' ORDER BY id LIMIT 1"  # noqa: S608  # constants
    last = await sql.fetchval(query, *turn)
    if last is None:
        return NamedPrompt(message_id=row.message_id, turn=row.turn)
    query = (
        f"SELECT id FROM crow.entries WHERE {is_of_turn} AND id <= $5"  # noqa: S608  # constants
        " AND (id = $5 OR input_tokens IS NOT NULL OR output_tokens IS NOT NULL)"
    )
    entries = await select_entries(sql, [entry for (entry,) in await sql.fetch(query, *turn, last)])
    return ended_prompt(row, last, entries)


async def _row(sql: Sql, session_id: str, name: PromptName) -> PromptRow | None:
    query = "SELECT digest, message_id, turn, entry FROM crow.prompts WHERE session = $1 AND name = $2"
    row = await sql.fetchrow(query, session_id, plain(name.id))
    return None if row is None else PromptRow(*row)
