"""Damage to the file: every read gives the truth or names what is damaged, and `repair` brings back the rest."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from crow.domain.conversation import for_model
from crow.domain.entries import NewEntry, Remark, Started, ToolResult
from crow.domain.messages import ToolMessage
from crow.store.intake import Defaults
from crow.store.sqlite import SqliteStore
from crow.store.upkeep import Upkeep
from tests.store.scenes import ANNOUNCED, add, begin, bodies, converse, history, ids, new_session, result, said
from tests.support.paths import problems

CHANGED = "could not be read: it is damaged: its checksum is wrong."


def changed(path: Path, statement: str, *values: object) -> None:
    """Change the closed database behind crow's back."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER entries_never_change")
        assert connection.execute(statement, values).rowcount == 1


async def test_a_result_that_changed_on_disk_is_named_to_the_user_and_to_the_model(sqlite_store: SqliteStore):
    await sqlite_store.create_session(new_session())
    user = await begin(sqlite_store, "s1", "look")
    (answer,) = await add(sqlite_store, "s1", said("I look", calls=1))
    done = result(answer.id, "the number is 17")
    _, tool = await add(sqlite_store, "s1", Started(call=done.call, why="free", announcement=ANNOUNCED), done)
    path = sqlite_store.database.path
    changed(path, "UPDATE entries SET body = replace(body, '17', '71') WHERE id = ?", tool.id)
    entries = await history(sqlite_store, "s1")
    assert ids(entries) == [user.id, answer.id, tool.id - 1, tool.id]
    damaged = entries[-1].body
    assert isinstance(damaged, ToolResult)
    assert (damaged.call, damaged.is_error) == (done.call, True)
    assert damaged.text == f"[Entry {tool.id} (tool) {CHANGED}]"
    messages = for_model((await sqlite_store.open_session("s1")).entries).messages
    assert problems(messages) == []
    assert [message.text for message in messages if isinstance(message, ToolMessage)] == [damaged.text]
    assert "71" not in str(await bodies(sqlite_store, "s1"))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("session", "x"),
        ("turn", 7),
        ("kind", "user"),
        ("model", "x"),
        ("input_tokens", 5),
        ("cost", 0.5),
        ("estimate", "x"),
        ("created_ms", 1),
        ("body", "{}"),
        ("call_index", 3),
    ],
)
async def test_every_column_of_an_entry_is_checked(sqlite_store: SqliteStore, column: str, value: object):
    await sqlite_store.create_session(new_session())
    entries = await converse(sqlite_store, "s1", "one", "two")
    path = sqlite_store.database.path
    changed(path, f"UPDATE entries SET {column} = ? WHERE id = ?", value, entries[1].id)
    read = await history(sqlite_store, "s1")
    assert CHANGED in str(read[1].body)
    assert (read[0], read[2:]) == (entries[0], entries[2:])


async def test_what_was_said_is_found_by_the_words_that_name_the_damage(sqlite_store: SqliteStore):
    await sqlite_store.create_session(new_session())
    entries = await converse(sqlite_store, "s1", "kittiwake")
    path = sqlite_store.database.path
    changed(path, "UPDATE entries SET body = replace(body, 'kittiwake', 'albatross') WHERE id = ?", entries[0].id)
    hits = {hit.entry: hit.snippet for hit in await sqlite_store.search("kittiwake")}
    assert hits == {entries[0].id: f"[Entry {entries[0].id} (user) {CHANGED}]", entries[1].id: "KITTIWAKE"}


async def test_a_blob_that_changed_on_disk_is_named(sqlite_store: SqliteStore):
    await sqlite_store.create_session(new_session())
    whole, spilled = await add(sqlite_store, "s1", said("before"), result(1, "x" * 50_000))
    path = sqlite_store.database.path
    changed(path, "UPDATE blobs SET data = zeroblob(length(data))")
    read = await history(sqlite_store, "s1")
    assert read[0] == whole
    assert f"Entry {spilled.id} (tool) could not be read: blob " in str(read[1].body)
    assert "is damaged: its sha256 is wrong" in str(read[1].body)


async def test_entries_that_an_older_version_wrote_are_read_unchecked(sqlite_store: SqliteStore):
    await sqlite_store.create_session(new_session())
    (entry,) = await add(sqlite_store, "s1", said("words"))
    changed(sqlite_store.database.path, "UPDATE entries SET checksum = NULL")
    assert await history(sqlite_store, "s1") == (entry,)


@pytest.mark.parametrize(
    "text", ["plain", "snow ☃ \U0001f426", "half \ud83d of one", "nul \0 inside", "\x7f\u2028"], ids=ascii
)
@pytest.mark.parametrize("cost", [None, 0, 1, -0.0, 0.1 + 0.2, float("nan"), float("inf")], ids=str)
async def test_what_was_not_changed_is_never_taken_for_damaged(sqlite_store: SqliteStore, text: str, cost: float):
    await sqlite_store.create_session(new_session())
    entry = NewEntry(body=said(text), model=f"m {text}", cost=cost, estimate=3)
    await sqlite_store.append("s1", leaf=None, turn=1, entries=[entry])
    (read,) = await bodies(sqlite_store, "s1")
    assert "could not be read" not in str(read)


@pytest.mark.parametrize("missing", [0, 2, 5], ids=["first", "middle", "leaf"])
async def test_what_is_missing_is_named_where_it_should_come(sqlite_store: SqliteStore, tmp_path: Path, missing: int):
    await sqlite_store.create_session(new_session())
    entries = await converse(sqlite_store, "s1", "one", "two")
    gone = entries[missing].id
    with closing(sqlite3.connect(sqlite_store.database.path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM entries WHERE id = ?", (gone,))
    read = await history(sqlite_store, "s1")
    words = f"Entry {gone} is missing from the database, and with it all before it. Close every crow, then run crow"
    assert isinstance(read[0].body, Remark)
    assert read[0].body.text.startswith(words)
    assert read[1:] == entries[missing + 1 :]
    assert (await sqlite_store.open_session("s1")).entries == read
    written = b"".join([line async for line in Upkeep(sqlite_store).export(("s1",))])
    (tmp_path / "x.jsonl").write_bytes(written)
    other = await SqliteStore.open(tmp_path / "other.db")
    await Upkeep(other).import_file(tmp_path / "x.jsonl", Defaults(model="m1", mode="ask"))
    taken_in = await bodies(other, "s1")
    await other.close()
    assert any(words in str(body) for body in taken_in)
    assert taken_in[-len(entries[missing + 1 :]) or len(taken_in) :] == [entry.body for entry in entries[missing + 1 :]]
    await converse(sqlite_store, "s1", "three")


@pytest.mark.parametrize("parent", [3, 2**40, 0, -1])
async def test_a_parent_that_cannot_be_one_ends_the_path_there(sqlite_store: SqliteStore, parent: int):
    await sqlite_store.create_session(new_session())
    entries = await converse(sqlite_store, "s1", "one", "two")
    with closing(sqlite3.connect(sqlite_store.database.path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("DROP TRIGGER entries_never_change")
        connection.execute("UPDATE entries SET parent = ? WHERE id = ?", (parent, entries[2].id))
    read = await history(sqlite_store, "s1")
    assert "is missing from the database" in str(read[0].body)
    assert CHANGED in str(read[1].body)
    assert read[2:] == entries[3:]
