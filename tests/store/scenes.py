"""Helpers that fill stores with sessions and turns."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from crow.domain.entries import Announcement, Assistant, Body, CallRef, Entry, NewEntry, ToolResult, TurnEnd
from crow.domain.messages import Text, ToolCall
from crow.store import NewSession, SessionRow, Store
from crow.store.sqlite.migrations import migrate
from crow.store.sqlite.store import SqliteStore

ANNOUNCED = Announcement(title="Read notes.txt", kind="read")


def new_session(session_id: str = "s1", *, cwd: str = "/repo", **more: object) -> NewSession:
    return NewSession(id=session_id, cwd=cwd, model="m1", mode="ask", **more)  # type: ignore[arg-type]


def said(text: str, *, calls: int = 0) -> Assistant:
    return Assistant(
        text=text,
        message_id=f"a-{text}",
        calls=tuple(ToolCall(id=f"c{index}", name="read_file", arguments='{"path":"x"}') for index in range(calls)),
    )


def result(assistant: int, text: str = "done", *, index: int = 0) -> ToolResult:
    return ToolResult(
        call=CallRef(assistant=assistant, index=index), name="read_file", text=text, announcement=ANNOUNCED
    )


async def begin(store: Store, session_id: str, prompt: str) -> Entry:
    """Take a turn with `prompt`; its user entry."""
    row = await store.session(session_id)
    await store.enqueue(session_id, (Text(text=prompt),), f"u-{prompt}")
    start = await store.take_turn(session_id, f"u-{prompt}", leaf=row.leaf)
    return start.entries[-1]


async def add(store: Store, session_id: str, *bodies: Body, turn: int = 1, release: bool = False) -> tuple[Entry, ...]:
    """Append under whatever the leaf is."""
    row = await store.session(session_id)
    entries = [NewEntry(body=body, model="m1") for body in bodies]
    return await store.append(session_id, leaf=row.leaf, turn=turn, entries=entries, release=release)


async def converse(store: Store, session_id: str, *prompts: str) -> tuple[Entry, ...]:
    """Whole turns, each answered by the prompt in capitals; all entries."""
    entries: list[Entry] = []
    for prompt in prompts:
        user = await begin(store, session_id, prompt)
        end = TurnEnd(stop="end_turn")
        entries += [
            user,
            *await add(store, session_id, said(prompt.upper()), end, turn=user.turn, release=True),
        ]
    return tuple(entries)


async def history(store: Store, session_id: str) -> tuple[Entry, ...]:
    return tuple([entry async for batch in store.history(session_id) for entry in batch])


async def bodies(store: Store, session_id: str) -> list[Body]:
    return [entry.body for entry in await history(store, session_id)]


def ids(entries: Sequence[Entry]) -> list[int]:
    return [entry.id for entry in entries]


def row_ids(rows: Sequence[SessionRow]) -> list[str]:
    return [row.id for row in rows]


def make_older(path: Path, version: int = 4) -> None:
    """Give a closed database the schema of an older version. What that version did not have is lost."""
    old = path.with_name("older.db")
    with closing(sqlite3.connect(old, isolation_level=None)) as connection:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = wal").fetchall()
        migrate(connection, version)
        connection.execute("ATTACH ? AS new", (str(path),))
        for table in ("conversations", "sessions", "entries", "inbox", "drafts", "moves", "blobs", "blob_refs"):
            columns = ", ".join(row[1] for row in connection.execute(f"PRAGMA main.table_info({table})"))
            connection.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table}")
        connection.execute("DETACH new")
        connection.execute(
            "INSERT INTO entries_fts (rowid, text) SELECT id, text FROM searchable WHERE text <> '' ORDER BY id"
        )
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    old.replace(path)


async def compress_all(store: SqliteStore) -> None:
    """Compress what can be compressed, whatever its age."""
    store.compress_after_days = -2
    try:
        await store.tidy()
    finally:
        store.compress_after_days = None
