"""Old blobs are compressed, and every reader still gets the same."""

from __future__ import annotations

import base64
import os
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crow.domain.entries import CallRef, Diff, Entry, File, Prompt, ToolResult
from crow.domain.messages import Image, Text
from crow.store.admin import ImportDefaults
from crow.store.codec import encode
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.compression import compress, content_of, ends_of_blob
from crow.store.sqlite.repair import damaged_entries, problems, repair
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, compress_all, history, new_session, result, said
from tests.support.amounts import examples

DAY_MS = 86_400_000
NOISE = random.Random(7)
WORDS = [f"{NOISE.getrandbits(40):x}" for _ in range(200)]


def text(size: int) -> str:
    """Text that compresses to about a third."""
    return " ".join(NOISE.choices(WORDS, k=size // 10))


def query(store: SqliteStore, sql: str, *values: object) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(store.database.path)) as connection:
        return connection.execute(sql, values).fetchall()


def change(store: SqliteStore, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(store.database.path)) as connection, connection:
        connection.execute("DROP TRIGGER entries_never_change")
        connection.execute(sql, values)
        connection.execute(
            "CREATE TRIGGER entries_never_change BEFORE UPDATE ON entries\n"
            "BEGIN\n    SELECT RAISE(ABORT, 'entries never change');\nEND"
        )


def count_compressed(store: SqliteStore) -> int:
    return int(str(query(store, "SELECT count(*) FROM blobs WHERE length(data) < size")[0][0]))


@dataclass(frozen=True)
class Scene:
    """A session with everything that becomes a blob: the answer with the calls, and the results."""

    answer: int
    results: Sequence[Entry]


async def build(store: SqliteStore) -> Scene:
    await store.create_session(new_session(title="Long"))
    user = await begin(store, "s1", "heron")
    prompt = Prompt(system=text(9_000), tools=(), cwd="/repo", model="m1")
    asked = replace(said("ask", calls=4), text=text(50_000))
    (_, answer) = await add(store, "s1", prompt, asked, turn=user.turn)
    call = CallRef(assistant=answer.id, index=1)
    diff = Diff(path="/repo/a", old_text=text(20_000), new_text=text(21_000))
    announced = replace(result(answer.id).announcement, diffs=(diff,))
    picture = Image(data=base64.b64encode(NOISE.randbytes(6_000)).decode(), mime_type="image/png")
    stored = await add(
        store,
        "s1",
        replace(result(answer.id, text(60_000)), duration_ms=5),
        File(call=call, path="/repo/a", before=text(30_000).encode(), after_hash=""),
        replace(result(answer.id, "edited", index=1), announcement=announced),
        # The body itself becomes a blob, as that of every long result of an older version.
        replace(result(answer.id, text(7_000), index=2), raw_output={"all": text(50_000)}, is_error=True),
        replace(result(answer.id, text(3_000), index=3), images=(picture,)),
        turn=user.turn,
        release=True,
    )
    return Scene(answer=answer.id, results=stored)


async def export(store: SqliteStore) -> bytes:
    return b"".join([line async for line in SessionAdmin(store).export(None)])


async def everything(store: SqliteStore, scene: Scene) -> list[object]:
    """What each kind of reader gets."""
    calls = [CallRef(assistant=scene.answer, index=index) for index in range(4)]
    return [
        await history(store, "s1"),
        [entry async for batch in store.history("s1", result_bytes=lambda _: 600) for entry in batch],
        [entry async for batch in store.history("s1", result_bytes=lambda _: 30_000) for entry in batch],
        await store.tail("s1"),
        [await store.result("s1", call) for call in calls],
        await store.file_changes(scene.results[-1].id, None),
        await store.search("heron"),
        await store.scan(WORDS[3], session_id="s1"),
        await export(store),
    ]


async def test_every_reader_gets_the_same_from_compressed_blobs(sqlite_store: SqliteStore) -> None:
    scene = await build(sqlite_store)
    before = await everything(sqlite_store, scene)
    await compress_all(sqlite_store)
    assert count_compressed(sqlite_store) == 6  # output, two sides, file, system message, body
    assert await everything(sqlite_store, scene) == before
    with closing(sqlite3.connect(sqlite_store.database.path)) as connection:
        assert problems(connection) == ()
        assert damaged_entries(connection) == ()
        connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('integrity-check')")
    stored, size = query(sqlite_store, "SELECT sum(length(data)), sum(size) FROM blobs WHERE length(data) < size")[0]
    assert int(str(stored)) * 2 < int(str(size))
    uses = {use.what.strip(): use for use in await SessionAdmin(sqlite_store).disk_use()}
    saved = uses["saved because they are compressed"]
    assert (saved.number, saved.bytes) == (6, int(str(size)) - int(str(stored)))


async def test_compressed_sessions_can_be_exported_imported_and_removed(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    await build(sqlite_store)
    await compress_all(sqlite_store)
    file = tmp_path / "all.jsonl"
    file.write_bytes(await export(sqlite_store))
    admin = SessionAdmin(sqlite_store)
    await admin.remove(["s1"])
    assert query(sqlite_store, "SELECT (SELECT count(*) FROM blobs), (SELECT count(*) FROM compressed_bodies)") == [
        (0, 0)
    ]
    await admin.import_file(file, ImportDefaults(model="m1", mode="ask"))
    await compress_all(sqlite_store)
    assert count_compressed(sqlite_store) == 6
    assert await export(sqlite_store) == file.read_bytes()


async def test_the_views_say_how_to_read_what_is_compressed(sqlite_store: SqliteStore) -> None:
    scene = await build(sqlite_store)
    shown = "SELECT tool_call_id, tool_name, success, duration_ms, tool_result FROM tool_calls ORDER BY call_index"
    messages = (
        "SELECT id, role, tool_call_id, tool_name, length(content) FROM messages WHERE role IN ('user', 'assistant')"
    )
    calls, texts = query(sqlite_store, shown), query(sqlite_store, messages)
    await compress_all(sqlite_store)
    names = [f"call_{scene.answer}_{index}" for index in range(4)]
    sizes = [size for (size,) in query(sqlite_store, "SELECT size FROM blobs WHERE length(data) < size")]
    found = query(sqlite_store, shown)
    assert [row[:4] for row in found] == [row[:4] for row in calls]
    for at in (0, 2):
        words = str(found[at][4])
        assert words.endswith(f" bytes, compressed: crow sessions show s1 --call {names[at]}]")
        assert int(words[1:].split()[0]) in sizes
    assert (found[1], found[3]) == (calls[1], calls[3])
    assert query(sqlite_store, messages) == texts  # what people and models said stays readable
    for body in query(sqlite_store, "SELECT body FROM entry_bodies"):
        assert body[0] is not None


async def test_only_what_is_old_enough_is_compressed(sqlite_store: SqliteStore) -> None:
    await build(sqlite_store)
    await sqlite_store.tidy()
    assert count_compressed(sqlite_store) == 0  # off
    sqlite_store.compress_after_days = 1
    await sqlite_store.tidy()
    assert count_compressed(sqlite_store) == 0
    change(sqlite_store, "UPDATE entries SET checksum = NULL, created_ms = created_ms - ?", 2 * DAY_MS)
    (answer,) = await add(sqlite_store, "s1", said("again", calls=1))
    await add(sqlite_store, "s1", result(answer.id, text(60_000)))
    await sqlite_store.tidy()
    assert count_compressed(sqlite_store) == 6


async def test_entries_from_the_future_keep_nothing_from_being_compressed(sqlite_store: SqliteStore) -> None:
    await build(sqlite_store)
    change(sqlite_store, "UPDATE entries SET checksum = NULL, created_ms = created_ms - ?", 2 * DAY_MS)
    change(sqlite_store, "UPDATE entries SET created_ms = 253402300799999 WHERE kind = 'prompt'")
    sqlite_store.compress_after_days = 1
    await sqlite_store.tidy()
    assert count_compressed(sqlite_store) == 6


async def test_what_does_not_shrink_is_tried_once(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    (answer,) = await add(sqlite_store, "s1", said("look", calls=1))
    call = CallRef(assistant=answer.id, index=0)
    await add(sqlite_store, "s1", File(call=call, path="/a", before=os.urandom(50_000), after_hash=""))
    await compress_all(sqlite_store)
    assert count_compressed(sqlite_store) == 0
    changes = query(sqlite_store, "SELECT * FROM compression")
    statements: list[str] = []
    await sqlite_store.database.write(lambda sql: sql.set_trace_callback(statements.append))
    await sqlite_store.compress_old()
    assert [one for one in statements if one.startswith("UPDATE")] == []
    assert query(sqlite_store, "SELECT * FROM compression") == changes


async def test_a_text_that_recurs_after_it_was_compressed_is_stored_once(sqlite_store: SqliteStore) -> None:
    scene = await build(sqlite_store)
    await compress_all(sqlite_store)
    blobs = query(sqlite_store, "SELECT count(*), sum(length(data)) FROM blobs")
    first = scene.results[0].body
    assert isinstance(first, ToolResult)
    (answer,) = await add(sqlite_store, "s1", said("again", calls=1))
    (again,) = await add(sqlite_store, "s1", result(answer.id, first.text))
    assert query(sqlite_store, "SELECT count(*), sum(length(data)) FROM blobs") == blobs
    assert (await history(sqlite_store, "s1"))[-1] == again


async def test_a_message_whose_body_was_compressed_as_an_output_is_readable_in_sql(sqlite_store: SqliteStore) -> None:
    """The search index needs the texts of messages, so their bodies are never compressed."""
    await sqlite_store.create_session(new_session())
    message = replace(said("long"), text=f"jackdaw {text(50_000)}")
    body = encode(message)
    (answer,) = await add(sqlite_store, "s1", said("look", calls=1))
    await add(sqlite_store, "s1", result(answer.id, body.blobs[str(body.spilled)].decode()))
    await compress_all(sqlite_store)
    assert count_compressed(sqlite_store) == 1
    await add(sqlite_store, "s1", message)
    assert count_compressed(sqlite_store) == 0
    await compress_all(sqlite_store)
    assert [hit.kind for hit in await sqlite_store.search("jackdaw")] == ["assistant"]
    await SessionAdmin(sqlite_store).remove(["s1"])
    with closing(sqlite3.connect(sqlite_store.database.path)) as connection:
        connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('integrity-check')")


async def test_a_second_process_that_compresses_leaves_it_to_the_first(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    await build(sqlite_store)
    other = await SqliteStore.open(sqlite_store.database.path)
    try:
        batch = await other._next_batch(DAY_MS + 2**50)
        assert batch is not None
        await compress_all(sqlite_store)
        before = query(sqlite_store, "SELECT hash, data FROM blobs ORDER BY hash")
        assert await other._replace(batch, ()) is False
        await compress_all(other)
        assert query(sqlite_store, "SELECT hash, data FROM blobs ORDER BY hash") == before
    finally:
        await other.close()


@pytest.mark.parametrize("damage", ["data = zeroblob(length(data))", "data = substr(data, 1, 200)", "size = size + 1"])
async def test_damaged_compressed_blobs_are_named(sqlite_store: SqliteStore, damage: str) -> None:
    scene = await build(sqlite_store)
    await compress_all(sqlite_store)
    change(sqlite_store, f"UPDATE blobs SET {damage} WHERE length(data) < size")
    entries = await history(sqlite_store, "s1")
    found = [entry for entry in entries if "could not be read" in str(entry.body)]
    if not damage.startswith("size"):  # the content is whole
        assert {scene.results[at].id for at in (0, 1, 2, 3)} <= {entry.id for entry in found}
    short = [entry async for batch in sqlite_store.history("s1", result_bytes=lambda _: 600) for entry in batch]
    assert len(short) == len(entries)


async def test_a_damaged_blob_is_not_compressed(sqlite_store: SqliteStore) -> None:
    await build(sqlite_store)
    change(sqlite_store, "UPDATE blobs SET data = zeroblob(size)")
    await compress_all(sqlite_store)
    assert count_compressed(sqlite_store) == 0


MARK = b"\0\0\xff\xff"


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0, 1, 4_095, 4_096, 4_097, 5_000, 40_000]), st.data())
@example(0, 40_000, None)
def test_parts_of_a_compressed_blob_equal_those_of_its_content(
    seed: int, size: int, data: st.DataObject | None
) -> None:
    chance = random.Random(seed)
    pieces = [MARK, b"word ", chance.randbytes(9), b"\n"]
    content = b"".join(chance.choices(pieces, k=size))[:size]
    stored = compress(content)
    if stored is None:
        return
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE blobs (hash TEXT, size INTEGER, data BLOB)")
        connection.execute("INSERT INTO blobs VALUES ('', ?, ?)", (size, stored))
        for _ in range(5):
            length = data.draw(st.integers(1, size)) if data is not None else 500
            assert ends_of_blob(connection, 1, size, length) == (content[:length], content[-length:])


def test_the_content_of_a_blob_is_read_with_functions_of_sqlite_archives() -> None:
    """zlib's own `decompress` is what `sqlar_uncompress` calls."""
    import hashlib
    import zlib

    content = text(50_000).encode()
    stored = compress(content)
    assert stored is not None
    assert zlib.decompress(stored) == content
    assert content_of(hashlib.sha256(content).hexdigest(), len(content), stored) == content


async def test_prompts_with_images_are_unchanged(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    picture = Image(data="QUJD" * 3_000, mime_type="image/png")
    await sqlite_store.enqueue("s1", (Text(text="see"), picture), "u")
    await sqlite_store.take_turn("s1", "u", leaf=None)
    before = await history(sqlite_store, "s1")
    await compress_all(sqlite_store)
    assert count_compressed(sqlite_store) == 1
    assert await history(sqlite_store, "s1") == before


async def test_a_repair_recovers_compressed_blobs(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    store = await SqliteStore.open(path)
    scene = await build(store)
    await compress_all(store)
    before = await history(store, "s1")
    shown = query(store, "SELECT * FROM tool_calls")
    await store.close()
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes(3_996) + content[4_096:])  # the schema is gone
    repaired = repair(path)
    assert (repaired.outcome, repaired.lost) == ("recovered", ())
    store = await SqliteStore.open(path)
    try:
        assert await history(store, "s1") == before
        assert await store.result("s1", CallRef(assistant=scene.answer, index=2)) == scene.results[3]
        assert query(store, "SELECT * FROM tool_calls") == shown
        assert count_compressed(store) == 6
    finally:
        await store.close()
