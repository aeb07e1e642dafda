"""Reads from a damaged database are right or report the damage, and `repair` recovers everything else."""

from __future__ import annotations

import random
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import product
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain.conversation import for_model
from crow.domain.entries import Body, Checkpoint, Entry, NewEntry, Remark, Restore, Started, ToolResult, TurnEnd
from crow.domain.errors import ArgumentError, CrowError, StoreError
from crow.domain.messages import Text, ToolMessage
from crow.store import paths
from crow.store.admin import ImportDefaults, SessionFilter
from crow.store.spending import session_spending
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.migrations import VERSION
from crow.store.sqlite.pages import Pages
from crow.store.sqlite.repair import problems as problems_of
from crow.store.sqlite.repair import repair
from crow.store.sqlite.store import SqliteStore
from tests.store.damaged_files import PAGE_BYTES, TOKEN, Whole, build_whole, token_of
from tests.store.scenes import (
    ANNOUNCED,
    add,
    begin,
    bodies,
    converse,
    history,
    ids,
    make_older,
    new_session,
    result,
    row_ids,
    said,
)
from tests.support.amounts import examples
from tests.support.fork_server import run_script
from tests.support.paths import problems

CHANGED = "could not be read: it is damaged: its checksum is wrong."


def changed(path: Path, statement: str, *values: object) -> None:
    """Change the closed database behind crow's back."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER entries_never_change")
        assert connection.execute(statement, values).rowcount >= 1


async def test_a_result_that_changed_on_disk_is_reported_to_the_user_and_the_model(sqlite_store: SqliteStore) -> None:
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
        ("cache_write_tokens", 7),
        ("estimated", 3),
        ("estimate", "x"),
        ("created_ms", 1),
        ("body", "{}"),
        ("call_index", 3),
    ],
)
async def test_every_column_of_an_entry_is_checked(sqlite_store: SqliteStore, column: str, value: object) -> None:
    await sqlite_store.create_session(new_session())
    entries = await converse(sqlite_store, "s1", "one", "two")
    path = sqlite_store.database.path
    changed(path, f"UPDATE entries SET {column} = ? WHERE id = ?", value, entries[1].id)
    read = await history(sqlite_store, "s1")
    assert CHANGED in str(read[1].body)
    assert (read[0], read[2:]) == (entries[0], entries[2:])


async def test_a_search_hit_in_a_damaged_entry_shows_the_damage(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    entries = await converse(sqlite_store, "s1", "kittiwake")
    path = sqlite_store.database.path
    changed(path, "UPDATE entries SET body = replace(body, 'kittiwake', 'albatross') WHERE id = ?", entries[0].id)
    hits = {hit.entry: hit.snippet for hit in await sqlite_store.search("kittiwake")}
    assert hits == {entries[0].id: f"[Entry {entries[0].id} (user) {CHANGED}]", entries[1].id: "KITTIWAKE"}


@pytest.mark.parametrize("body", [said("x" * 50_000), result(1, "x" * 50_000)])
async def test_a_blob_that_changed_on_disk_is_reported(sqlite_store: SqliteStore, body: Body) -> None:
    await sqlite_store.create_session(new_session())
    whole, damaged = await add(sqlite_store, "s1", said("before"), body)
    path = sqlite_store.database.path
    changed(path, "UPDATE blobs SET data = zeroblob(length(data))")
    read = await history(sqlite_store, "s1")
    assert read[0] == whole
    assert f"Entry {damaged.id} (" in str(read[1].body)
    assert ") could not be read: " in str(read[1].body)
    assert "is damaged: its sha256 is wrong" in str(read[1].body)


async def test_entries_of_older_versions_are_read_without_a_checksum(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    (entry,) = await add(sqlite_store, "s1", said("words"))
    changed(sqlite_store.database.path, "UPDATE entries SET checksum = NULL")
    assert await history(sqlite_store, "s1") == (entry,)


@pytest.mark.parametrize(
    "text", ["plain", "snow ☃ \U0001f426", "half \ud83d of one", "nul \0 inside", "\x7f\u2028"], ids=ascii
)
async def test_an_unchanged_entry_is_never_reported_as_damaged(sqlite_store: SqliteStore, text: str) -> None:
    await sqlite_store.create_session(new_session())
    costs = (None, 0, 1, -0.0, 0.1 + 0.2, float("nan"), float("inf"))
    entries = [NewEntry(body=said(text), model=f"m {text}", cost=cost, estimate=3) for cost in costs]
    await sqlite_store.append("s1", leaf=None, turn=1, entries=entries)
    read = await bodies(sqlite_store, "s1")
    assert len(read) == len(costs)
    assert "could not be read" not in str(read)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET created_ms = 'x' WHERE id = 2",
        "UPDATE sessions SET lease_ms = 'x', owner = '{}' WHERE id = 'gone'",
        "UPDATE openings SET opened_ms = 'x'",
    ],
)
async def test_damaged_numbers_do_not_end_the_upkeep(sqlite_store: SqliteStore, statement: str) -> None:
    for name in ("s1", "gone", "empty"):
        await sqlite_store.create_session(new_session(name))
    await begin(sqlite_store, "s1", "look")
    await add(sqlite_store, "s1", result(1, "x" * 100_000), release=True)
    await begin(sqlite_store, "gone", "look")
    await sqlite_store.delete_session("gone")
    changed(sqlite_store.database.path, statement)
    sqlite_store.compress_after_days = 1
    await sqlite_store.tidy()
    assert await sqlite_store.next_removal() is None


async def fill_tables(path: Path) -> None:
    """A whole session `s1`, and a session `s2` with a row in every small table."""
    store = await SqliteStore.open(path, journal_mode="delete")
    for name in ("s1", "s2"):
        await store.create_session(new_session(name, title="needle"))
        entries = await converse(store, name, "one", "two")
        await store.move_leaf(name, leaf=entries[5].id, to=entries[2].id, reason="undo")
    user = await begin(store, "s2", "three")
    await store.save_draft("s2", after_leaf=user.id, turn=user.turn, message_id="m", text="half", thought="hm")
    await store.enqueue("s2", (Text(text="later"),), "u")
    await store.create_session(new_session("unused"))
    await store.fork_session("s2", "deleted", entry=None, cwd="/", additional_directories=())
    await store.delete_session("deleted")
    await store.close()


async def use_sessions(store: SqliteStore) -> None:
    """Do with `s2` what users do. All errors are in the words of crow. Then check `s1`."""
    admin = SessionAdmin(store)
    for attempt in (
        lambda: store.directories(),
        lambda: admin.listed(SessionFilter()),
        lambda: admin.conversation_state(["s2"]),
        lambda: store.unstored_end("s2"),
        lambda: session_spending(store, "s2"),
        lambda: store.outline("s2"),
        lambda: store.open_session("s2"),
        lambda: history(store, "s2"),
        lambda: converse(store, "s2", "again"),
        lambda: everything(admin),
        lambda: store.tidy(),
    ):
        with suppress(CrowError):
            await attempt()
    assert "s1" in row_ids((await store.sessions()).rows)
    assert "s1" in {hit.session for hit in await store.search("ne")}
    assert [body.stop for body in await bodies(store, "s1") if isinstance(body, TurnEnd)] == ["end_turn"]


async def everything(admin: SessionAdmin) -> bytes:
    return b"".join([line async for line in admin.export(None)])


@pytest.mark.long
@pytest.mark.parametrize("table", ["sessions", "inbox", "drafts", "moves", "openings"])
async def test_a_value_of_a_wrong_type_keeps_no_session_from_being_used(tmp_path: Path, table: str) -> None:
    original, path = tmp_path / "original.db", tmp_path / "crow.db"
    await fill_tables(original)
    with closing(sqlite3.connect(original)) as connection:
        columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
    for column, value in product(columns, ("x", b"\0\xff", 2**63 - 1)):
        path.write_bytes(original.read_bytes())
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            rows = "session = 's2'" if table not in ("sessions", "openings") else "true"
            rows = "id <> 's1'" if table == "sessions" else rows
            with suppress(sqlite3.Error):  # some columns hold no such value
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE {rows}", (value,))
        store = await SqliteStore.open(path, journal_mode="delete")
        try:
            await use_sessions(store)
        finally:
            await store.close()


async def test_a_damaged_restore_keeps_no_long_session_from_being_opened(
    sqlite_store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "TAIL_BYTES", 100_000)
    await sqlite_store.create_session(new_session())
    await begin(sqlite_store, "s1", "go")
    summary, restore = await add(
        sqlite_store, "s1", Checkpoint(compaction_id="c", summary="the summary", first_kept=None), Restore(entry=1)
    )
    for number in range(3):
        (answer,) = await add(sqlite_store, "s1", said(f"look {number}", calls=1))
        await add(sqlite_store, "s1", result(answer.id, "x" * 60_000))
    changed(sqlite_store.database.path, "UPDATE entries SET body = '{' WHERE id = ?", restore.id)
    unread, *_ = (await sqlite_store.open_session("s1")).entries
    assert isinstance(unread.body, Checkpoint)
    assert unread.body.summary.startswith("the summary\n\n[Entry ")
    assert unread.id > summary.id


@pytest.mark.parametrize("missing", [0, 2, 5], ids=["first", "middle", "leaf"])
async def test_a_missing_entry_is_reported_in_its_place(
    sqlite_store: SqliteStore, tmp_path: Path, missing: int
) -> None:
    await sqlite_store.create_session(new_session())
    entries = await converse(sqlite_store, "s1", "one", "two")
    gone = entries[missing].id
    with closing(sqlite3.connect(sqlite_store.database.path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM entries WHERE id = ?", (gone,))
    read = await history(sqlite_store, "s1")
    words = f"Entry {gone} is missing from the database, and so is everything before it. Quit every crow, then run crow"
    assert isinstance(read[0].body, Remark)
    assert read[0].body.text.startswith(words)
    assert read[1:] == entries[missing + 1 :]
    assert (await sqlite_store.open_session("s1")).entries == read
    written = b"".join([line async for line in SessionAdmin(sqlite_store).export(("s1",))])
    (tmp_path / "x.jsonl").write_bytes(written)
    other = await SqliteStore.open(tmp_path / "other.db")
    await SessionAdmin(other).import_file(tmp_path / "x.jsonl", ImportDefaults(model="m1", mode="ask"))
    taken_in = await bodies(other, "s1")
    await other.close()
    assert any(words in str(body) for body in taken_in)
    assert taken_in[-len(entries[missing + 1 :]) or len(taken_in) :] == [entry.body for entry in entries[missing + 1 :]]
    await converse(sqlite_store, "s1", "three")


@pytest.mark.parametrize("parent", [3, 2**40, 0, -1])
async def test_a_path_ends_at_an_impossible_parent(sqlite_store: SqliteStore, parent: int) -> None:
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


# damaged pages

HOW = ("zeros", "ones", "noise", "a sector", "a byte")
NAMED = ("is damaged", "is not a crow database", "could not be read", "is missing from the database")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    path = tmp_path_factory.mktemp("whole") / "crow.db"

    return anyio.run(build_whole, path)


def damaged(content: bytes, number: int, how: str, noise: random.Random) -> bytes:
    """The file with a damaged page."""
    start = (number - 1) * PAGE_BYTES
    page = bytearray(content[start : start + PAGE_BYTES])
    match how:
        case "zeros":
            page[:] = bytes(PAGE_BYTES)
        case "ones":
            page[:] = b"\xff" * PAGE_BYTES
        case "noise":
            page[:] = noise.randbytes(PAGE_BYTES)
        case "a sector":
            sector = noise.randrange(8) * 512
            page[sector : sector + 512] = noise.randbytes(512)
        case "a byte":
            page[noise.randrange(PAGE_BYTES)] ^= 1 << noise.randrange(8)
    return content[:start] + bytes(page) + content[start + PAGE_BYTES :]


def names_damage(found: object) -> bool:
    return any(words in str(found) for words in NAMED)


@contextmanager
def damage_is_named() -> Iterator[None]:
    """What fails in the block says that the database is damaged."""
    try:
        yield
    except StoreError as error:
        if not names_damage(error):
            raise


async def check_reads(path: Path, whole: Whole) -> None:
    """Every read gives the truth, or an error or words that name the damage."""
    with damage_is_named():
        store = await SqliteStore.open(path)
        try:
            for read in (check_list, check_histories, check_search, check_export):
                with damage_is_named():
                    await read(store, whole)
        finally:
            await store.close()


async def check_list(store: SqliteStore, whole: Whole) -> None:
    listed = {row.id: row for row in (await store.sessions()).rows}
    assert listed == {name: row for name, row in whole.rows.items() if row.has_prompt}


async def check_histories(store: SqliteStore, whole: Whole) -> None:
    for name, truth in whole.histories.items():
        with damage_is_named():
            check_path(await history(store, name), truth, whole)
        with damage_is_named():
            check_path((await store.open_session(name)).entries, truth, whole)


def check_path(found: tuple[Entry, ...], truth: tuple[Entry, ...], whole: Whole) -> None:
    assert all(entry == whole.entries.get(entry.id) or names_damage(entry.body) for entry in found)
    assert found == truth or any(names_damage(entry.body) for entry in found)


async def check_search(store: SqliteStore, whole: Whole) -> None:
    for entry in list(whole.entries.values())[::17]:
        hits = await store.search(token_of(entry))
        assert all(names_damage(hit.snippet) or token_of(entry) in hit.snippet for hit in hits)


async def check_export(store: SqliteStore, whole: Whole) -> None:
    written = b"".join([line async for line in SessionAdmin(store).export(("s1", "s2", "s3"))]).decode()
    told = set(TOKEN.findall(written))
    expected = {token_of(entry) for name in ("s1", "s2", "s3") for entry in whole.histories[name]}
    assert names_damage(written) or expected <= told


async def check_repaired(path: Path, whole: Whole, number: int) -> None:
    """Everything is there again that is not on the page; the rest is named."""
    done = repair(path)
    touched, rows = whole.entries_on(number), whole.sessions_on(number)
    store = await SqliteStore.open(path)
    try:
        for entry in whole.entries.values():
            found = await store.entry(entry.id)
            assert found is not None
            assert (found.parent, found.session) == (entry.parent, entry.session)
            if found.body != entry.body:
                assert entry.id in touched
                assert any(line.startswith(f"entry {entry.id} ") for line in done.lost)
        for name, row in whole.rows.items():
            found_row = await store.session(name)
            if found_row != row:
                assert name in rows
                assert any(f"session {name}" in line for line in done.lost)
                assert found_row.conversation == row.conversation
                assert found_row.cwd == row.cwd or not row.has_prompt  # only indexes of what is listed know that
            if found_row.leaf == row.leaf:
                assert ids(await history(store, name)) == ids(whole.histories[name])
        assert set(await SessionAdmin(store).ids()) == set(whole.rows)
        await converse(store, "s3", "and on it goes")
    finally:
        await store.close()
    with closing(sqlite3.connect(path)) as connection:
        assert problems_of(connection) == ()
        connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('integrity-check')")
        assert connection.execute("SELECT count(*) FROM entries WHERE session = 'gone'").fetchone() == (0,)


@pytest.mark.long
@settings(max_examples=examples(6))
@given(at=st.floats(0, 1, exclude_max=True), how=st.sampled_from(HOW), seed=st.integers())
def test_a_damaged_page_is_reported_and_everything_else_is_recovered(
    whole: Whole, at: float, how: str, seed: int
) -> None:
    number = 1 + int(at * whole.pages)

    async def check(path: Path) -> None:
        await check_reads(path, whole)
        await check_repaired(path, whole, number)

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "crow.db"
        path.write_bytes(damaged(whole.content, number, how, random.Random(seed)))
        anyio.run(check, path)


# repair


def overwrite(path: Path, table: str) -> None:
    """Destroy the root page of a table or an index."""
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * PAGE_BYTES)
        file.write(b"\xff" * PAGE_BYTES)


def files_in(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir() if file.suffix != ".lock"}


async def test_repair_names_an_entry_whose_kind_is_no_text(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    entry = max(whole.entries)
    with closing(sqlite3.connect(path)) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("UPDATE entries SET kind = CAST(x'ff7544' AS TEXT) WHERE id = ?", (entry,))
        connection.commit()
    done = repair(path)
    assert any(f"entry {entry} " in each for each in done.lost), done.lost


async def test_repair_leaves_a_whole_database_unchanged(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    done = repair(path)
    assert (done.outcome, done.copy, done.problems, done.lost) == ("whole", None, (), ())
    assert (done.sessions, path.read_bytes()) == (len(whole.rows), whole.content)
    assert files_in(tmp_path) == {"crow.db"}


@pytest.mark.parametrize("index", ["entries_fts_data", "entries_fts_idx", "entries_by_session", "sessions_listed"])
async def test_repair_loses_nothing_if_only_an_index_is_damaged(tmp_path: Path, whole: Whole, index: str) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    overwrite(path, index)
    store = await SqliteStore.open(path)
    with pytest.raises(StoreError, match=r"is damaged .*Quit every crow, then run crow doctor --repair"):
        await converse(store, "s1", "refused")
    await store.close()
    before = path.read_bytes()
    done = repair(path)
    assert (done.outcome, done.lost, done.sessions) == ("recovered", (), len(whole.rows))
    assert done.copy is not None
    assert done.copy.read_bytes() == before
    assert path.stat().st_mode & 0o777 == done.copy.stat().st_mode & 0o777 == 0o600
    store = await SqliteStore.open(path)
    for name, row in whole.rows.items():
        assert await store.session(name) == row
        assert await history(store, name) == whole.histories[name]
    hits = await store.search(token_of(whole.histories["s1"][0]))
    assert [hit.entry for hit in hits] == [whole.histories["s1"][0].id]
    assert dict(await store.learned("http://127.0.0.1:1/v1", "m1")) == {"context_window": 4_000}
    await converse(store, "s1", "taken")
    assert (await history(store, "s1"))[-1].id > max(whole.entries)
    await store.close()


async def test_an_index_that_lacks_rows_is_rebuilt(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('delete-all')")
        connection.execute("PRAGMA writable_schema = ON")
        sql = "SELECT sql FROM sqlite_master WHERE name = 'entries_by_session'"
        (defined,) = connection.execute(sql).fetchone()
        partial = f"{defined} WHERE id > 20"
        connection.execute("DROP INDEX entries_by_session")
        connection.execute(partial)
        connection.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'entries_by_session'", (defined,))
    done = repair(path)
    assert (done.outcome, done.lost) == ("mended", ())
    assert any("missing from index entries_by_session" in line for line in done.problems)
    store = await SqliteStore.open(path)
    assert len(await store.search(token_of(whole.histories["s1"][0]))) == 1
    await store.close()
    assert problems_in(path) == ()


def problems_in(path: Path) -> tuple[str, ...]:
    with closing(sqlite3.connect(path)) as connection:
        return problems_of(connection)


KILLED = """
import asyncio, os, sys
from pathlib import Path
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import converse

async def main(path):
    store = await SqliteStore.open(path)
    await converse(store, "s1", "only in the log")
    os._exit(0)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("what", ["header", "map of pages", "root of entries"])
async def test_entries_in_the_write_ahead_log_are_recovered_too(tmp_path: Path, whole: Whole, what: str) -> None:
    page = {"header": 1, "map of pages": 2, "root of entries": Pages(whole.content).roots["entries"]}[what]
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    run_script(KILLED, str(path))
    path.write_bytes(damaged(path.read_bytes(), page, "ones", random.Random(0)))
    done = repair(path)
    assert done.copy is not None
    assert (done.lost, files_in(tmp_path)) == ((), {"crow.db", f"{done.copy.name}", f"{done.copy.name}-wal"})
    store = await SqliteStore.open(path)
    found = await history(store, "s1")
    await store.close()
    assert found[: len(whole.histories["s1"])] == whole.histories["s1"]
    assert "ONLY IN THE LOG" in str(found[-2].body)


OPEN = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("SELECT count(*) FROM entries").fetchone()
print("open", flush=True)
sys.stdin.read()
"""


async def test_an_open_database_is_not_repaired(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    async with await anyio.open_process([sys.executable, "-c", OPEN, str(path)], stderr=None) as other:
        assert other.stdout is not None
        assert (await other.stdout.receive()).startswith(b"open")
        with pytest.raises(ArgumentError, match=r"is open in another process\. Quit every editor"):
            repair(path)
        assert path.read_bytes() == whole.content
        assert files_in(tmp_path) == {"crow.db", "crow.db-wal", "crow.db-shm"}
    assert repair(path).outcome == "whole"


async def test_repair_refuses_foreign_files_and_those_of_a_newer_crow(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "crow.db"
    with pytest.raises(ArgumentError, match="does not exist"):
        repair(path)
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    path.write_bytes(whole.content)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    newer = path.read_bytes()
    for content, words_of in (
        (newer, "was written by a newer crow"),
        (other.read_bytes(), "no crow data"),
        (b"My thesis. " * 9_999, "no crow data"),
        (b"", "is empty"),
    ):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=words_of):
            repair(path)
        assert path.read_bytes() == content
        assert files_in(tmp_path) == {"crow.db", "other.db"}


async def test_a_database_of_an_older_version_is_repaired_too(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    make_older(path)
    overwrite(path, "entries_by_conversation")
    assert (repair(path).lost, problems_in(path)) == ((), ())
    store = await SqliteStore.open(path)
    assert await history(store, "s1") == whole.histories["s1"]
    await store.close()


async def test_a_missing_entry_is_replaced_by_a_message(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    await sqlite_store.create_session(new_session())
    entries = await converse(sqlite_store, "s1", "one", "two", "three")
    await sqlite_store.close()
    gone = entries[4]
    with closing(sqlite3.connect(tmp_path / "crow.db", isolation_level=None)) as connection:
        connection.execute("DELETE FROM entries WHERE id = ?", (gone.id,))
    done = repair(tmp_path / "crow.db")
    assert done.lost == (f"entry {gone.id} of session s1",)
    store = await SqliteStore.open(tmp_path / "crow.db")
    found = await history(store, "s1")
    await store.close()
    assert ids(found) == ids(entries)
    assert found[4].body == Remark(
        text=f"Entry {gone.id} was lost when the database was damaged.", message_id=f"lost-{gone.id}"
    )
    assert (*found[:4], *found[5:]) == (*entries[:4], *entries[5:])
