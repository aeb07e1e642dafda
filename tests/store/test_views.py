"""The views of the database, as seen in a SQL shell."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from crow.domain.entries import (
    Announcement,
    CallRef,
    Checkpoint,
    Diff,
    File,
    Mask,
    NewEntry,
    Prompt,
    Restore,
    Skill,
    TurnEnd,
)
from crow.domain.messages import Usage
from crow.store.copying import SessionCopy
from crow.store.postgres.admin import PostgresAdmin
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, ids, make_older, new_session, result, said
from tests.support.postgres import new_database


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
    task = NewEntry(body=result(1), model="m1", usage=usage, cost=0.5)  # what a subagent's own entries say already
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


@pytest.fixture
async def lived(sqlite_store: SqliteStore) -> SqliteStore:
    """A session of one workspace with a failed call, an edit, a skill, usage and two compactions; a shorter one, a
    subagent, and one that was never prompted."""
    store = sqlite_store
    await store.create_session(
        new_session("long", title="Mend the nest", metadata={"task": "42", "tags": {"nest": True}})
    )
    await begin(store, "long", "mend the nest")
    usage = Usage(input_tokens=100, output_tokens=20, cached_tokens=50)
    row = await store.session("long")
    answer = NewEntry(body=said("look", calls=2), model="m1", usage=usage, cost=0.25)
    (asked,) = await store.append("long", leaf=row.leaf, turn=1, entries=[answer])
    changed = Announcement(title="Edit", diffs=(Diff(path="/repo/nest.py", old_text="a\n", new_text="b\n"),))
    await add(
        store,
        "long",
        File(call=CallRef(assistant=asked.id, index=0), path="/repo/nest.py", before=b"a\n", after_hash="x"),
        replace(result(asked.id, "mended"), name="edit_file", duration_ms=12, announcement=changed),
        replace(result(asked.id, "no such file", index=1), is_error=True, duration_ms=3),
        Skill(name="review", text="Read it twice."),
    )
    first = Checkpoint(
        compaction_id="c1", summary="so far", first_kept=None, method="prefix", tokens_before=90, tokens_after=9
    )
    await add(store, "long", first)
    said_after = await add(store, "long", said("one"), said("two"), said("three"))
    await add(store, "long", replace(first, compaction_id="c2", first_kept=said_after[1].id), TurnEnd(stop="end_turn"))
    await store.create_session(new_session("short", cwd="/other"))
    await begin(store, "short", "hello")
    await store.create_session(new_session("helper", parent_id="short"))
    await begin(store, "helper", "help")
    await store.create_session(new_session("empty"))
    return store


DAY = "date('now')"
GUESSED = {
    # sessions
    "SELECT session_id, workspace_path FROM sessions WHERE session_id = 'long'": [("long", "/repo")],
    "SELECT session_id, title, message_count FROM session_list": [("short", None, 1), ("long", "Mend the nest", 5)],
    "SELECT count(*) FROM session_list WHERE created_at > datetime('now', '-1 day')": [(2,)],
    "SELECT count(*) FROM sessions WHERE updated_at <= datetime('now')": [(4,)],
    "SELECT workspace_path, count(*) FROM session_list GROUP BY workspace_path ORDER BY 1": [
        ("/other", 1),
        ("/repo", 1),
    ],
    "SELECT session_id FROM session_list ORDER BY message_count DESC LIMIT 1": [("long",)],
    "SELECT session_id FROM session_list WHERE json_extract(metadata, '$.task') = '42'": [("long",)],
    "SELECT date(updated_at) = date('now') FROM session_list WHERE session_id = 'long'": [(1,)],
    # messages
    "SELECT role, content FROM messages WHERE session_id = 'long' ORDER BY timestamp, id LIMIT 2": [
        ("user", "mend the nest"),
        ("assistant", "look"),
    ],
    "SELECT session_id, count(*) FROM messages GROUP BY session_id ORDER BY 2 DESC LIMIT 1": [("long", 7)],
    "SELECT tool_name, content FROM messages WHERE role = 'tool' ORDER BY id": [
        ("edit_file", "mended"),
        ("read_file", "no such file"),
    ],
    "SELECT session_id FROM messages WHERE content LIKE '%nest%'": [("long",)],
    "SELECT s.title, m.content FROM messages m JOIN session_list s ON s.session_id = m.session_id"
    " WHERE m.role = 'user' ORDER BY m.id LIMIT 1": [("Mend the nest", "mend the nest")],
    "SELECT count(*) FROM messages WHERE date(created_at) = date('now')": [(9,)],
    # tool calls
    "SELECT tool_name, count(*), avg(success), sum(duration_ms) FROM tool_calls GROUP BY tool_name": [
        ("read_file", 2, 0.5, 15)
    ],
    "SELECT tool_args, tool_result FROM tool_calls WHERE success = 0": [('{"path":"x"}', "no such file")],
    "SELECT json_extract(tool_args, '$.path') AS path, count(*) FROM tool_calls GROUP BY path": [("x", 2)],
    "SELECT c.tool_result FROM tool_calls c JOIN messages m USING (tool_call_id) WHERE m.content = 'mended'": [
        ("mended",)
    ],
    "SELECT m.content FROM tool_calls c JOIN messages m ON m.id = c.message_id WHERE c.success": [("look",)],
    "SELECT session_id, tool_name FROM tool_calls WHERE timestamp > '2020-01-01' ORDER BY duration_ms DESC LIMIT 1": [
        ("long", "read_file")
    ],
    # compactions and skills
    "SELECT session_id, before_message_count, after_message_count FROM compaction_history ORDER BY timestamp, id": [
        ("long", 4, 1),
        ("long", 4, 3),
    ],
    "SELECT count(*) FROM compaction_history WHERE created_at >= date('now')": [(2,)],
    "SELECT session_id, skill_name, skill_content FROM session_skills": [("long", "review", "Read it twice.")],
    # usage
    f"SELECT sum(input_tokens), sum(output_tokens), sum(cost) FROM usage WHERE day = {DAY}": [(100, 20, 0.25)],
    "SELECT u.session_id, s.title, sum(u.cost) FROM usage u JOIN session_list s USING (session_id) GROUP BY 1": [
        ("long", "Mend the nest", 0.25)
    ],
}


async def test_a_query_that_a_stranger_guesses_is_answered(lived: SqliteStore) -> None:
    assert {query: rows(lived, query) for query in GUESSED} == GUESSED


@pytest.mark.parametrize(
    ("query", "index"),
    [
        ("SELECT * FROM messages WHERE session_id = 'x'", "entries_by_session"),
        ("SELECT * FROM tool_calls WHERE session_id = 'x'", "entries_by_session"),
        ("SELECT * FROM tool_calls WHERE success = 0", "entries_results"),
        ("SELECT * FROM compaction_history", "entries_compactions"),
        ("SELECT restored FROM compaction_history", "entries_restores"),
        ("SELECT * FROM session_skills", "entries_skills"),
        ("SELECT * FROM entry_bodies WHERE kind = 'file'", "entries_files"),
    ],
)
async def test_views_find_rare_and_related_entries_by_an_index(
    sqlite_store: SqliteStore, query: str, index: str
) -> None:
    plan = [str(row[3]) for row in rows(sqlite_store, f"EXPLAIN QUERY PLAN {query}")]
    assert any(f"INDEX {index}" in step for step in plan), plan
    assert not any(step.startswith("AUTOMATIC") or "AUTOMATIC" in step for step in plan), plan


async def test_an_answered_call_of_a_damaged_result_keeps_its_row(lived: SqliteStore) -> None:
    with closing(sqlite3.connect(lived.database.path)) as connection:
        connection.execute("DROP TRIGGER entries_never_change")
        connection.execute("UPDATE entries SET body = substr(body, 2) WHERE kind IN ('tool', 'restore')")
        connection.commit()
    assert rows(lived, "SELECT tool_name, tool_result, success FROM tool_calls") == [("read_file", None, None)] * 2
    assert len(rows(lived, "SELECT * FROM compaction_history")) == 2


async def test_an_older_database_gets_the_new_names(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    await store.create_session(new_session("s1", title="Old"))
    await begin(store, "s1", "hello")
    await store.close()
    make_older(tmp_path / "crow.db", version=5)
    store = await SqliteStore.open(tmp_path / "crow.db")
    assert rows(store, "SELECT session_id, title, message_count FROM session_list") == [("s1", "Old", 1)]
    assert [hit.session for hit in await store.search("hello")] == ["s1"]
    await store.close()


async def test_views_say_what_was_sent_what_it_took_and_what_was_compacted(sqlite_store: SqliteStore) -> None:
    store = sqlite_store
    programs = {"client": {"name": "zed", "version": "1.2"}, "crow": "0.1.0"}
    await store.create_session(new_session(config=programs))
    await store.create_session(new_session("fresh"))
    await begin(store, "fresh", "hello")
    await begin(store, "s1", "mend the nest")
    prompt = Prompt(system="You are crow.", tools=(), cwd="/repo", model="m1")
    row = await store.session("s1")
    usage = Usage(input_tokens=50, output_tokens=9, is_output_estimated=True)
    asked = NewEntry(body=said("look", calls=1), model="m1", usage=usage)
    stored = await store.append("s1", leaf=row.leaf, turn=1, entries=[NewEntry(body=prompt), asked])
    await add(store, "s1", result(stored[1].id, "twigs " * 100))
    columns = "role, content, tool_args, tokens, tokens_estimated"
    assert rows(store, f"SELECT {columns} FROM messages WHERE session_id = 's1' ORDER BY id") == [
        ("user", "mend the nest", None, 8, 1),
        ("system", "You are crow.", None, 8, 1),
        ("assistant", "look", None, 9, 1),
        ("tool", "twigs " * 100, '{"path":"x"}', 162, 1),
    ]
    (summary,) = await add(
        store,
        "s1",
        Checkpoint(compaction_id="c", summary="s", first_kept=None, threshold=80, window=100, focus="the nest"),
    )
    compacted = "SELECT session_id, is_compacted FROM session_list ORDER BY session_id"
    assert rows(store, compacted) == [("fresh", 0), ("s1", 1)]
    assert await store.compacted(["s1", "fresh", "none"]) == {"s1"}
    await add(store, "s1", Restore(entry=summary.id), Mask(before=1, reason="early", threshold=8, window=9))
    columns = "compaction, reason, threshold, context_window, asked, restored"
    assert rows(store, f"SELECT {columns} FROM compaction_history ORDER BY id") == [
        ("summary", "threshold", 80, 100, "the nest", 1),
        ("hidden outputs", "early", 8, 9, None, 0),
    ]
    assert rows(store, compacted) == [("fresh", 0), ("s1", 1)]
    (mask,) = rows(store, "SELECT id FROM compaction_history WHERE compaction = 'hidden outputs'")[0]
    assert isinstance(mask, int)
    await add(store, "s1", Restore(entry=mask), Skill(name="review", text="Twice."))
    assert rows(store, compacted) == [("fresh", 0), ("s1", 0)]
    assert await store.compacted(["s1"]) == frozenset()
    opened = "SELECT crow_version, client_name, client_version FROM session_list ORDER BY session_id"
    assert rows(store, opened) == [(None, None, None), ("0.1.0", "zed", "1.2")]
    assert rows(store, "SELECT skill_name, loaded_at = created_at FROM session_skills") == [("review", 1)]


async def test_a_damaged_configuration_keeps_its_row(lived: SqliteStore) -> None:
    with closing(sqlite3.connect(lived.database.path)) as connection:
        connection.execute("UPDATE sessions SET config = '{' WHERE id = 'long'")
        connection.commit()
    found = rows(lived, "SELECT session_id, client_name FROM session_list WHERE session_id = 'long'")
    assert found == [("long", None)]


PROJECT = Path(__file__).parents[2]
PAGE = (PROJECT / "schemas" / "store.md").read_text("utf-8")
GUIDE = (PROJECT / "docs" / "sessions.md").read_text("utf-8")
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


GUIDE_QUERIES = re.findall(r"^```sql\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def test_the_guide_has_queries() -> None:
    assert len(GUIDE_QUERIES) >= 6


@pytest.mark.parametrize("query", GUIDE_QUERIES, ids=range(len(GUIDE_QUERIES)))
async def test_a_query_of_the_guide_returns_rows(lived: SqliteStore, query: str) -> None:
    assert rows(lived, query)


VIEWS = {
    "session_list": "session_id, title, workspace_path, message_count, model, mode, state, tokens_in, tokens_out,"
    " tokens_cached, cost, files_changed, lines_added, lines_removed, alias, forked_from, is_compacted, crow_version,"
    " client_name, client_version",
    "messages": "id, session_id, parent, turn, role, content, thought, tool_call_id, tool_name, tool_args,"
    " model, input_tokens, output_tokens, cost, tokens, tokens_estimated",
    "tool_calls": "tool_call_id, session_id, message_id, turn, tool_name, tool_args, tool_result, success, duration_ms,"
    " result_entry, model",
    "compaction_history": "id, session_id, kind, reason, method, first_kept, tokens_before, tokens_after, model_calls,"
    " summary, restored, before_message_count, after_message_count, model, compaction, threshold,"
    " context_window, asked",
    "session_skills": "session_id, skill_name, first_entry, times, skill_content",
    "usage": "session_id, model, requests, input_tokens, output_tokens, cached_tokens, reasoning_tokens, cost,"
    " cache_write_tokens, estimated_requests",
}


async def test_views_of_postgresql_show_the_same_as_those_of_the_file(lived: SqliteStore) -> None:
    await lived.create_session(new_session("large"))
    await begin(lived, "large", "hello")
    (asked,) = await add(lived, "large", said("look", calls=1))
    await add(lived, "large", result(asked.id, "x" * 40_000))
    (dropped,) = await add(lived, "large", Checkpoint(compaction_id="c", summary="so far", first_kept=None))
    await add(lived, "large", Mask(before=asked.id, tokens_before=50, tokens_after=5), Restore(entry=dropped.id))
    await lived.create_session(new_session("nul"))
    await add(lived, "nul", replace(said("a\0b"), message_id="a"), result(1, "y\0" * 20_000))
    await lived.close()
    source = await SqliteStore.open_to_read(lived.database.path)
    times = "min(created_at), max(timestamp)"
    async with new_database() as url:
        other = await PostgresStore.open(url)
        await SessionCopy(SessionAdmin(source), PostgresAdmin(other), other, lambda _: None).run()
        await other.close()
        connection = await asyncpg.connect(url, server_settings={"timezone": "UTC"})
        for view, columns in VIEWS.items():
            query = f"SELECT {columns} FROM {{}}{view} WHERE session_id <> 'nul'"
            expected = map(_with_booleans(columns), rows(lived, query.format("")))
            assert {tuple(row) for row in await connection.fetch(query.format("crow."))} == set(expected), view
            if "session_list" not in view and view != "usage":
                (first, last) = rows(lived, f"SELECT {times} FROM {view}")[0]
                oldest, newest = await connection.fetchrow(f"SELECT {times} FROM crow.{view}")
                assert (f"{oldest:%Y-%m-%d %H:%M:%S}", f"{newest:%Y-%m-%d %H:%M:%S}") == (
                    str(first)[:19],
                    str(last)[:19],
                )
        contents = await connection.fetch("SELECT content FROM crow.messages WHERE session_id = 'nul' ORDER BY id")
        assert [row[0] for row in contents] == ["a\ufffdb", "y\\000" * 20_000]
        await connection.close()
    await source.close()


def _with_booleans(columns: str) -> Callable[[tuple[object, ...]], tuple[object, ...]]:
    """Turn what SQLite returns for a row into what PostgreSQL returns."""
    names = [name.strip() for name in columns.split(",")]
    are_booleans = [name in {"success", "restored", "is_compacted", "tokens_estimated"} for name in names]

    def convert(row: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(
            bool(value) if is_boolean and value is not None else value
            for value, is_boolean in zip(row, are_booleans, strict=True)
        )

    return convert
