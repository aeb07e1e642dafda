"""Repair loses nothing that is readable, names every change, and never changes an id."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.domain.errors import StoreUnavailable
from crow.store import Token
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.pages import Pages
from crow.store.sqlite.repair import Repaired, repair
from crow.store.sqlite.store import SqliteStore
from tests.store.damaged_files import (
    PAGE_BYTES,
    Whole,
    build_whole,
    check,
    corpus,
    pages_of,
    read,
    token_of,
    with_log,
    write,
)
from tests.store.scenes import converse, history
from tests.support import memory
from tests.support.amounts import some
from tests.support.fork_server import run_script


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with memory.new_directory() as path:
        yield path


@pytest.fixture(scope="module")
def whole(directory: Path) -> Whole:
    return anyio.run(build_whole, directory / "whole.db")


@pytest.fixture(scope="module")
def logged(whole: Whole, directory: Path) -> Whole:
    turns = [f"<{90_000 + turn}> in the log" for turn in range(6)]
    return anyio.run(with_log, directory / "logged.db", whole, *turns)


@pytest.fixture(scope="module")
def other(directory: Path) -> Whole:
    async def make() -> Whole:
        return await with_log(directory / "log.db", await build_whole(directory / "other.db", 4), "<95000> other")

    return anyio.run(make)


@pytest.mark.long
async def test_damaged_files_are_repaired(tmp_path: Path, other: Whole) -> None:
    """`make soak-repair` repairs all damaged files of a larger database."""
    whole = await build_whole(tmp_path / "whole.db", turns=4)
    logged = await with_log(tmp_path / "logged.db", whole, *(f"<{90_000 + turn}> in the log" for turn in range(6)))
    damaged_copies = list(corpus(whole, logged, other, seed=7, every=32))
    assert len(damaged_copies) >= 35
    assert sum(damaged.is_empty for damaged in damaged_copies) >= 1
    for damaged in damaged_copies:
        path = tmp_path / "damaged" / "crow.db"
        path.parent.mkdir()
        try:
            await check(path, damaged, logged if damaged.of_logged else whole)
        except BaseException as error:
            error.add_note(damaged.name)
            raise
        shutil.rmtree(path.parent)


def files_in(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir()}


def flip(path: Path, text: bytes, bit: int, *, at: int = 0) -> None:
    """Flip a bit of the last copy of `text` in the file."""
    content = bytearray(path.read_bytes())
    content[content.rindex(text) + at] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("cwd", [None, "/home/s2"])
async def test_every_listed_id_can_be_opened_though_the_indexes_have_another_one(
    tmp_path: Path, whole: Whole, cwd: str | None
) -> None:
    path = tmp_path / "crow.db"
    content = bytearray(whole.content)
    pages = Pages(whole.content)
    for index in ("sessions_listed", "sessions_listed_by_cwd", "sqlite_autoindex_sessions_1"):
        (number,) = pages_of(pages, pages.roots[index])
        start = (number - 1) * PAGE_BYTES
        at = bytes(content[start : start + PAGE_BYTES]).rindex(b"s2")
        content[start + at] ^= 0x11
    write(path, bytes(content))
    store = await SqliteStore.open(path)
    try:
        rows = (await store.sessions(cwd=cwd)).rows
        assert "s2" in [row.id for row in rows]
        for name in (*(row.id for row in rows), *await SessionAdmin(store).ids()):
            assert (await store.open_session(name)).row.id == name
    finally:
        await store.close()


async def test_one_damaged_title_hides_no_session(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    flip(path, b"Title of s2", 7, at=1)
    store = await SqliteStore.open(path)
    listed = {row.id: row.title for row in (await store.sessions()).rows}
    assert listed == {row.id: row.title for row in whole.rows.values() if row.has_prompt} | {"s2": "T\ufffdtle of s2"}
    assert await history(store, "s2") == whole.histories["s2"]
    await store.update_session("s1", {"model": "m2"})
    await store.close()
    done = repair(path)
    assert (done.outcome, done.lost) == ("mended", ())
    assert done.problems == ("row 2 of sessions: title is b'T\\xe9tle of s2'",)
    assert done.changes == ("session s2: its title was b'T\\xe9tle of s2' and is now \"T\ufffdtle of s2\"",)
    assert repair(path).outcome == "whole"


@pytest.mark.long
@pytest.mark.parametrize("bit", [0, 7], ids=["another letter", "no letter"])
@pytest.mark.parametrize("name", ["s1", "s3", "f1"])
async def test_an_id_never_changes(tmp_path: Path, whole: Whole, name: str, bit: int) -> None:
    path = tmp_path / "crow.db"
    content = bytearray(whole.content)
    stored = re.search(rf"{name}[^/]{{1,8}}/(home/{name}|repo)".encode(), content, re.DOTALL)  # not the index by cwd
    assert stored is not None
    content[stored.start()] ^= 1 << bit
    path.write_bytes(content)
    done = repair(path)
    assert any(line.startswith(f"session {name}: its id was ") for line in done.changes), done
    assert done.lost == ()
    store = await SqliteStore.open(path)
    for one, row in whole.rows.items():
        assert await store.session(one) == row
        assert await history(store, one) == whole.histories[one]
    await store.close()


async def test_a_damaged_entry_keeps_its_place_and_its_bytes(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    damaged = next(
        entry for entry in whole.histories["s3"] if b"I look" not in str(entry.body).encode() and entry.turn == 3
    )
    flip(path, token_of(damaged).encode(), 1, at=3)
    done = repair(path)
    assert len(done.lost) == 1
    assert done.lost[0].startswith(f"entry {damaged.id} (")
    with closing(sqlite3.connect(path)) as connection:
        (body,) = connection.execute("SELECT body FROM entries WHERE id = ?", (damaged.id,)).fetchone()
    assert "of twigs" in body
    store = await SqliteStore.open(path)
    for one, entries in whole.histories.items():
        found = await history(store, one)
        assert [entry for entry in found if entry.id != damaged.id] == [
            entry for entry in entries if entry.id != damaged.id
        ]
        assert [(entry.id, entry.parent) for entry in found] == [(entry.id, entry.parent) for entry in entries]
    await store.close()


async def test_shares_and_tokens_survive_a_damaged_value(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    store = await SqliteStore.open(path)
    token = Token(id="t1", principal="ada", label="laptop", hash="0" * 64, created_ms=1)
    await store.add_token(token)
    await store.share_session("s1", "ada", "read")
    shares = await store.shares("s1")
    await store.close()
    flip(path, b"Title of s1", 7)
    assert repair(path).lost == ()
    store = await SqliteStore.open(path)
    assert await store.tokens() == (token,)
    assert await store.shares("s1") == shares
    await store.close()


@pytest.mark.long
@pytest.mark.parametrize("part", some(range(1, 11), 3))
async def test_a_cut_file_of_any_length_is_recovered(tmp_path: Path, large: Whole, part: int) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(large.content[: large.pages * part // 11 * PAGE_BYTES])
    before = len(large.entries)
    done = repair(path)
    with closing(sqlite3.connect(path)) as connection:
        (lost,) = connection.execute("SELECT count(*) FROM entries WHERE body LIKE '%was lost when the%'").fetchone()
    more = sum(int(line.split()[0]) for line in done.lost if " more of the " in line)
    undone = sum(1 for line in done.lost if line.startswith("entry "))
    assert undone >= lost
    assert done.entries + more >= before  # each entry is there, or named, or counted
    assert any(line.startswith("everything on the last") for line in done.lost)
    assert repair(path).outcome == "whole"


@pytest.fixture(scope="module")
def large(directory: Path) -> Whole:
    """A file in which each table and index of entries has several pages, so that a cut takes only some of them."""
    return anyio.run(build_whole, directory / "large.db", 24)


async def test_an_entry_whose_past_is_lost_starts_a_branch_that_says_so(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    entries = whole.histories["s3"]
    gone, kept = entries[:40], entries[40:]
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executemany("DELETE FROM entries WHERE id = ?", [(entry.id,) for entry in gone])
    done = repair(path)
    first = gone[-1].id
    assert f"entry {first} of session s3" in done.lost
    assert f"39 more of the {whole.rows['s3'].entries} entries that session s3 wrote" in done.lost
    store = await SqliteStore.open(path)
    found = await history(store, "s3")
    await store.close()
    assert found[1:] == kept
    assert str(found[0].body).count("this branch starts here") == 1


async def test_turns_after_a_damaged_frame_of_the_log_are_kept(tmp_path: Path, logged: Whole) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(logged.content)
    log = bytearray(logged.log)
    log[32 + 24 + 2_000] ^= 4  # in the first frame
    path.with_name("crow.db-wal").write_bytes(log)
    done = repair(path)
    assert done.problems[0].startswith("1 of ")
    assert done.problems[0].endswith(" frames in the write-ahead log are damaged")
    store = await SqliteStore.open(path)
    assert (await history(store, "s1"))[-12:] == logged.histories["s1"][-12:]
    await store.close()


async def test_a_commit_after_dropped_frames_of_the_log_is_kept(tmp_path: Path, logged: Whole) -> None:
    path = tmp_path / "crow.db"
    log = bytearray(logged.log)
    log[32 + (24 + PAGE_BYTES) * 20 + 24 + 2_000] ^= 4
    write(path, logged.content, bytes(log))
    store = await SqliteStore.open(path)  # SQLite drops the damaged frame and all after it
    entries = await converse(store, "s2", "taken after that")
    dropped, kept = await history(store, "s1"), await history(store, "s2")
    write(tmp_path / "killed.db", *read(path, "-wal"))
    await store.close()
    assert len(dropped) < len(logged.histories["s1"])
    done = repair(tmp_path / "killed.db")
    assert done.outcome == "mended"
    assert "frames in the write-ahead log do not continue the frames before them" in done.problems[0]
    assert "which are old or follow a damaged frame" in done.lost[0]
    assert done.copy is not None
    assert f"{done.copy.name}-wal" in files_in(tmp_path)
    store = await SqliteStore.open(tmp_path / "killed.db")
    assert (await history(store, "s1"), await history(store, "s2")) == (dropped, kept)
    assert kept[-len(entries) :] == entries
    await store.close()
    assert repair(tmp_path / "killed.db").outcome == "whole"


def test_two_repairs_in_the_same_second_keep_both_damaged_files(
    tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    flip(path, b"Title of s2", 7, at=1)
    damaged = path.read_bytes()
    monkeypatch.setattr(time, "strftime", lambda _: "20261129-120000")
    first: list[Repaired] = []
    open_file = os.open

    def open_after_another_repair(*arguments: Any, **options: Any) -> int:
        if not first:
            monkeypatch.setattr(os, "open", open_file)
            first.append(repair(path))
            path.write_bytes(damaged)
        return open_file(*arguments, **options)

    monkeypatch.setattr(os, "open", open_after_another_repair)
    second = repair(path)
    copies = [done.copy for done in (*first, second)]
    assert [copy and copy.name for copy in copies] == [
        "crow-damaged-20261129-120000.db",
        "crow-damaged-20261129-120000-2.db",
    ]
    assert [copy and copy.read_bytes() for copy in copies] == [damaged] * 2


# repairs that are killed


def test_the_files_of_a_killed_repair_are_removed(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    for name in ("crow.db.repair-1", "crow.db.repair-1-wal", "crow.db.repair-22.source"):
        (tmp_path / name).write_bytes(b"half")
    assert repair(path).outcome == "whole"
    assert files_in(tmp_path) == {"crow.db", "crow.db.lock"}


async def test_a_running_crow_removes_the_files_of_a_killed_repair(tmp_path: Path, whole: Whole) -> None:
    path = tmp_path / "crow.db"
    path.write_bytes(whole.content)
    (tmp_path / "crow.db.repair-1").write_bytes(b"half")
    store = await SqliteStore.open(path)
    await store.tidy()
    await store.close()
    assert not (tmp_path / "crow.db.repair-1").exists()


KILLED = """
import os, sys
from pathlib import Path
from crow.store.sqlite import repair

calls = int(sys.argv[2])
for name in ("copy_files", "remove_files", "_check", "_recover", "_put_in_place"):
    def wrapped(*given, original=getattr(repair, name), **more):
        global calls
        calls -= 1
        if calls < 0:
            os._exit(9)
        return original(*given, **more)
    setattr(repair, name, wrapped)
print(repair.repair(Path(sys.argv[1])).outcome)
"""


@pytest.mark.long
@pytest.mark.parametrize("calls", some(range(16), 2))
async def test_a_repair_that_is_killed_anywhere_is_taken_up(tmp_path: Path, logged: Whole, calls: int) -> None:
    path = tmp_path / "crow.db"
    content = bytearray(logged.content)
    content[4096 * 12 + 100 : 4096 * 13] = os.urandom(3_996)
    path.write_bytes(content)
    log = bytearray(logged.log)
    log[32 + 24 + 2_000] ^= 4
    path.with_name("crow.db-wal").write_bytes(log)
    ended = run_script(KILLED, str(path), str(calls), check=False)
    assert ended.returncode in (0, 9)
    if (tmp_path / "crow.db.repaired").exists():
        with pytest.raises(StoreUnavailable, match=r"A repair of .* was interrupted\. Run crow doctor --repair"):
            await SqliteStore.open(path)
    repair(path)
    names = files_in(tmp_path)
    assert not any(".repair" in name for name in names), names
    store = await SqliteStore.open(path)
    assert (await history(store, "s1"))[-9:] == logged.histories["s1"][-9:]
    await store.close()


@pytest.mark.parametrize("bit", [0, 3, 6])
async def test_an_entry_keeps_its_id_although_no_checksum_covers_it(tmp_path: Path, whole: Whole, bit: int) -> None:
    stored = whole.histories["s3"][60]
    high, low = 0x80 | stored.id >> 7, stored.id & 0x7F
    place = re.compile(re.escape(bytes([high, low])) + b".{1,30}" + re.escape(b"s3"), re.DOTALL)
    text = token_of(stored).encode()
    places = [found.start() for found in place.finditer(whole.content) if text in whole.content[found.start() :][:400]]
    assert len(places) == 1
    content = bytearray(whole.content)
    content[places[0] + 1] ^= 1 << bit
    path = tmp_path / "crow.db"
    path.write_bytes(content)
    done = repair(path)
    assert done.changes == (f"entry {stored.id}: its id was {stored.id ^ 1 << bit} and is now {stored.id}",)
    assert done.lost == ()
    store = await SqliteStore.open(path)
    for name, entries in whole.histories.items():
        assert await history(store, name) == entries
    await store.close()
