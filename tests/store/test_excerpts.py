"""Long tool results that are read only at their ends, and paths that are read from an index."""

from __future__ import annotations

import base64
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from crow.domain.entries import Attachment, CallRef, Diff, Entry, File, NewEntry, ToolResult
from crow.store import Store
from crow.store.codec import encode
from crow.store.sqlite.append import SessionState
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, converse, ids, new_session, result, said
from tests.store.scenes import history as whole_history

MOST = 600


def ends(text: str) -> tuple[str, str, str]:
    head, _, rest = text.partition("\n[… about ")
    line, _, tail = rest.partition(" …]\n")
    return head, line, tail


async def shortened(store: Store, asked: list[int]) -> tuple[Entry, ...]:
    def result_bytes(entries: int) -> int:
        asked.append(entries)
        return MOST

    return tuple([entry async for batch in store.history("s1", result_bytes=result_bytes) for entry in batch])


async def test_a_history_with_excerpts_differs_only_in_long_results(store: Store) -> None:
    await store.create_session(new_session())
    user = await begin(store, "s1", "long " * 5_000)
    (answer,) = await add(store, "s1", said("also long " * 5_000, calls=3), turn=user.turn)
    texts = ["a" * 100_000, "b" * 9_000, "short"]
    await add(store, "s1", *(result(answer.id, text, index=at) for at, text in enumerate(texts)))
    whole, asked = await whole_history(store, "s1"), list[int]()
    found = await shortened(store, asked)
    assert asked == [5]
    assert ids(found) == ids(whole)
    assert (found[:2], found[4]) == (whole[:2], whole[4])
    assert [ends(entry.body.text)[1] for entry in found[2:4] if isinstance(entry.body, ToolResult)] == [
        f"99 kB more: /show call_{answer.id}_0",
        f"8 kB more: /show call_{answer.id}_1",
    ]
    for entry, stored in zip(found[2:4], whole[2:4], strict=True):
        assert isinstance(entry.body, ToolResult)
        assert isinstance(stored.body, ToolResult)
        assert replace(entry, body=replace(entry.body, text=stored.body.text)) == stored
        whole_of = await store.result("s1", entry.body.call)
        assert whole_of == stored
    assert await store.result("s1", CallRef(assistant=answer.id, index=9)) is None
    assert await store.result("s1", CallRef(assistant=2**63, index=0)) is None


async def test_a_result_that_an_older_version_stored_with_its_text_has_the_same_excerpt(
    sqlite_store: SqliteStore,
) -> None:
    await sqlite_store.create_session(new_session())
    (answer,) = await add(sqlite_store, "s1", said("a", calls=2))
    texts = ["line\n" * 20_000, '\\","is_error":"' * 9_000]
    bodies = [result(answer.id, text, index=index) for index, text in enumerate(texts)]

    def store_whole(sql: sqlite3.Connection) -> None:
        state = SessionState(sql, "s1", now_ms=0)
        for body in bodies:
            state.add(NewEntry(body=body), turn=1, encoded=encode(body, shares_texts=False))
        state.save()

    await sqlite_store.database.write(store_whole)
    _, *old = await shortened(sqlite_store, [])
    await add(sqlite_store, "s1", *bodies)
    new = (await shortened(sqlite_store, []))[3:]
    assert [entry.body for entry in old] == [entry.body for entry in new]
    assert [entry.body for entry in (await whole_history(sqlite_store, "s1"))[1:3]] == bodies


async def test_only_the_text_of_a_result_is_shortened_where_the_same_bytes_are_stored_again(store: Store) -> None:
    await store.create_session(new_session())
    (answer,) = await add(store, "s1", said("a", calls=4))
    text = "é" * 20_000
    read = result(answer.id, text)
    diff = Diff(path="/repo/x", old_text=text, new_text="y" * 20_000)
    edited = result(answer.id, "edited", index=1)
    edited = replace(edited, announcement=replace(edited.announcement, diffs=(diff,)))
    long_edit = replace(edited, text="z" * 20_000, call=CallRef(assistant=answer.id, index=2))
    attached = Attachment(name="x", data=base64.b64encode(text.encode()).decode())
    both = replace(result(answer.id, text, index=3), attachments=(attached,))
    before = File(call=edited.call, path="/repo/x", before=text.encode(), after_hash="")
    stored = await add(store, "s1", read, before, edited, long_edit, both)
    _, *found = await shortened(store, [])
    assert ids(found) == ids(stored)
    assert [entry.body for entry in found[1:3]] == [before, edited]
    for entry, body in zip([found[0], *found[3:]], (read, long_edit, both), strict=True):
        assert isinstance(entry.body, ToolResult)
        assert ends(entry.body.text)[1].endswith(f"more: /show {body.call.call_id}")
        assert replace(entry.body, text=body.text) == body


async def test_a_result_of_another_conversation_is_not_found(store: Store) -> None:
    await store.create_session(new_session())
    await store.create_session(new_session("s2"))
    (answer,) = await add(store, "s1", said("a", calls=1))
    await add(store, "s1", result(answer.id))
    call = CallRef(assistant=answer.id, index=0)
    assert await store.result("s1", call) is not None
    assert await store.result("s2", call) is None


@pytest.mark.parametrize(
    "call_id", ["call_1", "call_1_2_3", "call_-1_2", "call_1_٣", f"call_{10**19}_0", "call__", "12_0"]
)
def test_only_ids_of_calls_are_parsed(call_id: str) -> None:
    assert CallRef.parse(call_id) is None
    assert CallRef.parse("call_12_0") == CallRef(assistant=12, index=0)


async def test_a_gap_in_the_index_of_parents_hides_no_entry(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    await store.create_session(new_session())
    entries = await converse(store, "s1", *(f"prompt {number}" for number in range(40)))
    await store.close()
    with closing(sqlite3.connect(tmp_path / "crow.db")) as connection:
        # The index now lacks the entries that it is said not to have.
        connection.execute("PRAGMA writable_schema = ON")
        sql = "CREATE INDEX entries_by_conversation ON entries (conversation, parent)"
        for where in (f" WHERE id > {entries[60].id}", ""):
            connection.execute(
                "UPDATE sqlite_master SET sql = ? WHERE name = 'entries_by_conversation'", (sql + where,)
            )
            connection.commit()
            if where:
                connection.close()
                connection = sqlite3.connect(tmp_path / "crow.db")
                connection.execute("PRAGMA writable_schema = ON")
                connection.execute("REINDEX entries_by_conversation")
                connection.commit()
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        assert ids(await whole_history(store, "s1")) == ids(entries)
    finally:
        await store.close()


async def test_the_path_of_a_session_is_read_in_one_statement(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    await converse(sqlite_store, "s1", *(f"prompt {number}" for number in range(100)))
    statements: list[str] = []
    await sqlite_store.session("s1")
    await sqlite_store.database.read(lambda sql: sql.set_trace_callback(statements.append))
    found = await whole_history(sqlite_store, "s1")
    await sqlite_store.database.read(lambda sql: sql.set_trace_callback(None))
    walks = [statement for statement in statements if statement.startswith("SELECT id, parent FROM entries")]
    assert not any("RECURSIVE" in statement for statement in statements)
    assert len(found) == 300
    assert len(walks) == 1
    plan = await sqlite_store.database.read(lambda sql: sql.execute(f"EXPLAIN QUERY PLAN {walks[0]}").fetchall())
    assert "USING COVERING INDEX entries_by_conversation" in plan[0][3]
