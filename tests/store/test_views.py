"""The views of the database, as seen in a SQL shell."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from crow.domain.entries import Announcement, CallRef, Checkpoint, Diff, File, Mask, NewEntry, Restore, Skill
from crow.domain.messages import Usage
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, ids, new_session, result, said


def rows(store: SqliteStore, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(store.database.path)) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture
async def told(sqlite_store: SqliteStore) -> list[int]:
    """A session with two calls, one without a result; ids of its entries."""
    await sqlite_store.create_session(new_session())
    user = await begin(sqlite_store, "s1", "hi")
    (asked,) = await add(sqlite_store, "s1", said("look", calls=2))
    answers = await add(
        sqlite_store,
        "s1",
        replace(result(asked.id, "x" * 40_000), is_error=True, duration_ms=7),
        Skill(name="review", text="..."),
        Skill(name="review", text="..."),
    )
    return ids((user, asked, *answers))


async def test_messages_shows_users_answers_and_results_even_large_ones(
    sqlite_store: SqliteStore, told: list[int]
) -> None:
    calls = (
        '[{"id":"c0","name":"read_file","arguments":"{\\"path\\":\\"x\\"}","fault":null,"raw":null,"extra":{}},'
        '{"id":"c1","name":"read_file","arguments":"{\\"path\\":\\"x\\"}","fault":null,"raw":null,"extra":{}}]'
    )
    assert rows(
        sqlite_store, "SELECT id, session, turn, role, content, thought, tool_calls FROM messages ORDER BY id"
    ) == [
        (told[0], "s1", 1, "user", "hi", None, None),
        (told[1], "s1", 1, "assistant", "look", None, calls),
        (told[2], "s1", 1, "tool", "x" * 40_000, None, None),
    ]


async def test_tool_calls_shows_each_call_once_with_its_result(sqlite_store: SqliteStore, told: list[int]) -> None:
    columns = "assistant, call_index, session, name, args, result, success, duration_ms, result_entry"
    assert rows(sqlite_store, f"SELECT {columns} FROM tool_calls ORDER BY call_index") == [
        (told[1], 0, "s1", "read_file", '{"path":"x"}', "x" * 40_000, 0, 7, told[2]),
        (told[1], 1, "s1", "read_file", '{"path":"x"}', None, None, None, None),
    ]


async def test_session_skills_counts_each_skill(sqlite_store: SqliteStore, told: list[int]) -> None:
    assert rows(sqlite_store, "SELECT session, name, first_entry, times FROM session_skills") == [
        ("s1", "review", told[3], 2)
    ]


async def test_compaction_history_shows_checkpoints_masks_and_what_was_restored(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    made = Checkpoint(
        compaction_id="c",
        summary="so far",
        first_kept=3,
        method="prefix",
        tokens_before=90,
        tokens_after=9,
        model_calls=1,
    )
    kept, dropped, mask = await add(sqlite_store, "s1", made, made, Mask(before=2, tokens_before=50, tokens_after=5))
    await add(sqlite_store, "s1", Restore(entry=dropped.id))
    columns = "id, kind, reason, method, first_kept, tokens_before, tokens_after, model_calls, summary, restored"
    assert rows(sqlite_store, f"SELECT {columns} FROM compaction_history ORDER BY id") == [
        (kept.id, "checkpoint", "threshold", "prefix", 3, 90, 9, 1, "so far", 0),
        (dropped.id, "checkpoint", "threshold", "prefix", 3, 90, 9, 1, "so far", 1),
        (mask.id, "mask", None, None, 2, 50, 5, None, None, 0),
    ]


async def test_usage_sums_by_session_model_and_day(sqlite_store: SqliteStore) -> None:
    for name in ("s1", "s2"):
        await sqlite_store.create_session(new_session(name))
    usage = Usage(input_tokens=10, output_tokens=2, cached_tokens=4)
    answer = NewEntry(body=said("x"), model="m1", usage=usage, cost=0.5)
    await sqlite_store.append("s1", leaf=None, turn=1, entries=[answer, answer, replace(answer, model="m2")])
    task = NewEntry(body=result(1), model="m1", usage=usage, cost=0.5)  # what a sub-agent's own entries say already
    await sqlite_store.append("s2", leaf=None, turn=1, entries=[answer, NewEntry(body=said("free"), model="m1"), task])
    columns = "session, model, requests, input_tokens, output_tokens, cached_tokens, reasoning_tokens, cost"
    assert rows(sqlite_store, f"SELECT {columns}, day = date('now') FROM usage ORDER BY session, model") == [
        ("s1", "m1", 2, 20, 4, 8, None, 1.0, 1),
        ("s1", "m2", 1, 10, 2, 4, None, 0.5, 1),
        ("s2", "m1", 1, 10, 2, 4, None, 0.5, 1),
    ]


async def test_a_session_counts_the_files_and_lines_it_changed(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    call = CallRef(assistant=1, index=0)
    changed = Announcement(title="Edit", diffs=(Diff(path="/a", old_text="1\n2\n3\n", new_text="3\n1\nfour\nfive\n"),))
    made = Announcement(title="Write", diffs=(Diff(path="/b", old_text=None, new_text="one\n"),))
    await add(
        sqlite_store,
        "s1",
        File(call=call, path="/a", before=b"1\n2\n3\n", after_hash=""),
        replace(result(1), announcement=changed),
        replace(result(1), announcement=made),
        replace(result(1), announcement=made, is_error=True),
    )
    assert rows(sqlite_store, "SELECT files_changed, lines_added, lines_removed FROM sessions") == [(1, 3, 1)]


PAGE = (Path(__file__).parents[2] / "schemas" / "store.md").read_text("utf-8")
QUERIES = re.findall(r"^```sql\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


async def test_every_query_of_the_database_page_returns_rows(sqlite_store: SqliteStore, told: list[int]) -> None:
    summary = Checkpoint(
        compaction_id="c", summary="so far", first_kept=3, method="prefix", tokens_before=9, tokens_after=1
    )
    answer = NewEntry(body=said("a nest of twigs"), model="m1", usage=Usage(input_tokens=1))
    await sqlite_store.append("s1", leaf=told[-1], turn=1, entries=[NewEntry(body=summary), answer])
    assert [query for query in QUERIES if not rows(sqlite_store, query)] == []


async def test_the_database_page_names_every_table_and_queries_every_view(sqlite_store: SqliteStore) -> None:
    made = (
        "SELECT name FROM sqlite_master WHERE type = ? AND name NOT GLOB 'sqlite_*' AND name NOT GLOB 'entries_fts_*'"
    )
    with closing(sqlite3.connect(sqlite_store.database.path)) as connection:
        tables = {name for (name,) in connection.execute(made, ("table",))}
        views = {name for (name,) in connection.execute(made, ("view",))}
    assert {name for name in tables if f"`{name}`" not in PAGE} == set()
    assert {name for name in views if not any(re.search(rf"\b{name}\b", query) for query in QUERIES)} == set()
