"""Long tool results that are read only at their ends, and paths that are read from an index."""

from __future__ import annotations

import base64
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain.entries import Attachment, CallRef, Diff, Entry, File, ToolResult
from crow.domain.messages import Image
from crow.store import Store
from crow.store.codec import encode
from crow.store.excerpts import excerpt_of_result
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, converse, ids, new_session, result, said
from tests.store.scenes import history as whole_history
from tests.support.amounts import examples

MOST = 600
CALL = CallRef(assistant=7, index=1)
HOSTILE = [
    '","is_error":',
    ',"text":"',
    "\\",
    '"',
    "\n",
    "\\u0000",
    "\0",
    "é",
    "𝄞",
    "\u2028",
    "word ",
    "}",
    '{"a":',
    "\\\\n",
]


def excerpt(body: ToolResult, most: int = MOST) -> ToolResult | None:
    """The excerpt of a body, read from a blob of a database in memory."""
    text, spilled, blobs = (stored := encode(body, shares_texts=False)).text, stored.spilled, stored.blobs
    data = text.encode() if text is not None else blobs[spilled or ""]
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE blobs (data BLOB)")
        connection.execute("INSERT INTO blobs VALUES (?)", (data,))
        with connection.blobopen("blobs", "data", 1, readonly=True) as blob:
            return excerpt_of_result(blob, most, blobs.get)


def ends(text: str) -> tuple[str, str, str]:
    head, _, rest = text.partition("\n[… about ")
    line, _, tail = rest.partition(" …]\n")
    return head, line, tail


def test_an_excerpt_has_the_ends_of_the_text_and_everything_else_of_the_result() -> None:
    body = replace(
        result(7, "".join(f"line {number}\n" for number in range(20_000)), index=1),
        raw_output={"exit_code": 1, "note": "x", "is_error": True},
        cut=900,
        images=(Image(data="aGk=", mime_type="image/png"),),
        attachments=(Attachment(name="a", uri="https://example.org/a"),),
    )
    found = excerpt(body)
    assert found is not None
    head, line, tail = ends(found.text)
    assert body.text.startswith(head)
    assert body.text.endswith(tail)
    assert MOST * 0.7 < len(head) + len(tail) <= MOST
    assert line.endswith(" kB more: /show call_7_1")
    assert replace(found, text="") == replace(body, text="")


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.sampled_from(HOSTILE) | st.text(max_size=5), min_size=1, max_size=40), st.data())
def test_whatever_the_text_contains_its_ends_are_read_exactly(pieces: list[str], data: st.DataObject) -> None:
    body = replace(
        result(7, "".join(pieces) * 3_000, index=1), raw_output={data.draw(st.text(max_size=9)): "".join(pieces)}
    )
    stored = encode(body).body  # lone surrogates are replaced when it is stored
    assert isinstance(stored, ToolResult)
    body = stored
    found = excerpt(body)
    if found is None:
        return  # it is read whole
    at = body.text.startswith
    head, _, tail = found.text.rpartition("\n[… about ")[0], "", found.text.rpartition(" …]\n")[2]
    assert at(head)
    assert body.text.endswith(tail)
    assert replace(found, text="") == replace(body, text="")


def test_a_result_whose_other_parts_are_long_is_read_whole() -> None:
    long = "x" * 200_000
    announcement = replace(result(7).announcement, diffs=(Diff(path="/a", old_text=long, new_text=long),))
    assert excerpt(replace(result(7), announcement=announcement)) is None
    assert excerpt(replace(result(7, long), announcement=announcement)) is None
    assert excerpt(result(7, "short")) is None
    assert excerpt(result(7, "\\" * 200_000)) is None  # no place where no escape begins


def test_the_end_of_an_excerpt_is_as_long_as_its_beginning_whatever_follows_it() -> None:
    announcement = replace(result(7).announcement, diffs=(Diff(path="/a", old_text="", new_text="x" * 20_000),))
    found = excerpt(replace(result(7, "text " * 100_000), announcement=announcement), 64 * 1024)
    assert found is not None
    head, line, tail = ends(found.text)
    assert abs(len(head) - len(tail)) < 100
    assert line == "434 kB more: /show call_7_0"


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
