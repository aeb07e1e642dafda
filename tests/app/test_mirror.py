"""The directory that `store.mirror` names: what is in its files, after kills and attacks too."""

# ruff: noqa: ASYNC240  # these tests look at files while nothing else waits

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from crow.adapters import open_admin
from crow.domain.entries import Checkpoint, Mask, Restore
from crow.export.redact import committed
from crow.mirror import Mirror, MirrorFolder, MirrorSource, MirrorWriter, file_name
from crow.store import Store
from crow.store.admin import Admin
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.store import SqliteStore
from tests.store.conftest import AnyStores, Stores
from tests.store.conftest import stores as stores  # a fixture
from tests.store.scenes import add, begin, converse, history, ids, new_session, result, said

KEY = "sk-1234567890abcdefghij"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def source(store: Store, secrets: tuple[str, ...] = ()) -> MirrorSource:
    async def opened() -> tuple[Store, Admin]:
        return store, open_admin(store)

    return MirrorSource(open=opened, database="here", redact=lambda: committed(secrets))


@asynccontextmanager
async def writing(folder: Path, store: Store, secrets: tuple[str, ...] = ()) -> AsyncIterator[MirrorWriter]:
    opened = MirrorFolder(folder)
    try:
        yield MirrorWriter(opened, store, open_admin(store), source(store, secrets))
    finally:
        opened.close()


async def start(folder: Path, store: Store, secrets: tuple[str, ...] = ()) -> None:
    """Do what a start of crow does."""
    async with writing(folder, store, secrets) as writer:
        await writer.catch_up()


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text("utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


async def entry_ids(store: Store, session_id: str) -> list[int]:
    return ids(await history(store, session_id))


@pytest.mark.long
async def test_a_file_has_each_entry_of_its_session_once_in_both_engines(stores: AnyStores, folder: Path) -> None:
    store = await stores.open()
    await store.create_session(new_session(title="Mend"))
    await converse(store, "s1", "one", "two")
    await start(folder, store)
    path = folder / "s1.jsonl"
    head, *rest = lines(path)
    assert (head["kind"], head["session"], head["directory"], head["database"]) == ("session", "s1", "/repo", "here")
    assert [line["id"] for line in rest] == await entry_ids(store, "s1")
    assert [line["kind"] for line in rest] == ["user", "assistant", "turn_end"] * 2
    assert rest[1]["body"]["text"] == "ONE"
    before = path.read_bytes()
    await start(folder, store)
    assert path.read_bytes() == before
    await converse(store, "s1", "three")
    async with writing(folder, store) as writer:
        await writer.update("s1")
    assert path.read_bytes().startswith(before)
    assert [line["id"] for line in lines(path)[1:]] == await entry_ids(store, "s1")


async def test_every_branch_is_in_the_file_and_a_fork_begins_with_what_it_inherits(
    stores: AnyStores, folder: Path
) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    first = await converse(store, "s1", "one")
    await converse(store, "s1", "dropped")
    leaf = (await store.session("s1")).leaf
    await store.move_leaf("s1", leaf=leaf, to=first[-1].id, reason="undo")
    await converse(store, "s1", "kept")
    await store.fork_session("s1", "fork", entry=first[-1].id, cwd="/repo", additional_directories=())
    await converse(store, "fork", "other")
    await start(folder, store)
    texts = [line["body"]["text"] for line in lines(folder / "s1.jsonl") if line["kind"] == "assistant"]
    assert texts == ["ONE", "DROPPED", "KEPT"]
    assert [line["id"] for line in lines(folder / "fork.jsonl")[1:]] == await entry_ids(store, "fork")
    assert lines(folder / "fork.jsonl")[0]["forked_from"] == "s1"


async def test_a_killed_process_leaves_a_file_that_the_next_start_completes(stores: AnyStores, folder: Path) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    await converse(store, "s1", "one", "two é")
    await start(folder, store)
    path = folder / "s1.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in (*range(first, len(whole), 97), len(whole) - 1):  # wherever the last write ended
        path.write_bytes(whole[:size])
        await start(folder, store)
        assert path.read_bytes() == whole, size
    path.write_bytes(whole[:-40] + b"\0" * 39 + b"\n")  # what a power cut may leave
    await start(folder, store)
    assert path.read_bytes() == whole
    path.unlink()
    (folder / ".s1.jsonl.part").write_bytes(b"{")
    await start(folder, store)
    assert path.read_bytes() == whole


async def test_secrets_are_masked_and_files_are_private(stores: AnyStores, folder: Path) -> None:
    odd = 'a"b\\c\u202edé-secret'
    store = await stores.open()
    await store.create_session(new_session(cwd=f"/repo/{odd}"))
    await begin(store, "s1", f"use {KEY} and {odd}")
    (asked,) = await add(store, "s1", said("look", calls=1))
    await add(store, "s1", result(asked.id, f"{odd}\n" * 30_000))
    await start(folder, store, (odd,))
    text = (folder / "s1.jsonl").read_text("utf-8")
    assert KEY not in text
    assert "secret" not in text
    assert text.count("[hidden]") > 30_000
    assert "\u202e" not in text
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


async def test_a_key_that_is_a_part_of_an_id_or_of_the_databases_name_stops_no_mirror(
    stores: AnyStores, folder: Path
) -> None:
    store = await stores.open()
    await store.create_session(new_session("local-1", cwd="/home/local-1/here"))
    await converse(store, "local-1", "one")
    await start(folder, store, ("local-1", "here"))
    await converse(store, "local-1", "two")
    await start(folder, store, ("local-1", "here"))
    head, *rest = lines(folder / "local-1.jsonl")
    assert (head["session"], head["database"], head["directory"]) == ("local-1", "here", "/home/[hidden]/[hidden]")
    assert [line["id"] for line in rest] == await entry_ids(store, "local-1")
    await store.delete_session("local-1")
    await start(folder, store, ("local-1", "here"))
    assert not (folder / "local-1.jsonl").exists()


async def test_compactions_have_the_words_that_everyone_knows(stores: AnyStores, folder: Path) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    await begin(store, "s1", "hi")
    (summary,) = await add(store, "s1", Checkpoint(compaction_id="c", summary="so far", first_kept=None))
    await add(store, "s1", Mask(before=1), Restore(entry=summary.id))
    await start(folder, store)
    assert [line["kind"] for line in lines(folder / "s1.jsonl")[2:]] == [
        "compaction (summary)",
        "compaction (hidden outputs)",
        "compaction (undone)",
    ]


@pytest.mark.parametrize("kind", ["symlink", "hard link", "directory", "pipe"])
async def test_nothing_outside_of_the_directory_is_written_through_planted_names(
    stores: AnyStores, folder: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder.mkdir()
    for name in ("s1.jsonl", ".s1.jsonl.part", ".crow-mirror.json.new"):
        planted = folder / name
        match kind:
            case "symlink":
                planted.symlink_to(victim)
            case "hard link":
                planted.hardlink_to(victim)
            case "directory":
                planted.mkdir()
            case _:
                os.mkfifo(planted)
    store = await stores.open()
    await store.create_session(new_session())
    await store.create_session(new_session("s2"))
    await converse(store, "s1", "one")
    await converse(store, "s2", "two")
    with caplog.at_level(logging.WARNING), anyio.fail_after(60):
        try:
            await start(folder, store)
        except OSError as error:
            assert ".crow-mirror.json.new" in str(error)  # noqa: PT017
    assert victim.read_text() == "precious"
    assert lines(folder / "s2.jsonl")[0]["session"] == "s2"
    assert "The mirror of session s1 was not written" in caplog.text


async def test_a_directory_that_is_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="mirror"):
        MirrorFolder(folder)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("name", ["../../up", ".hidden", "a/b", "A", "x" * 300, "nul\0", "é", "", "..", "con\n"])
async def test_hostile_ids_become_safe_names_that_differ(name: str) -> None:
    made = file_name(name)
    assert made.isascii()
    assert len(made) < 130
    assert not set("/\0\n") & set(made)
    assert not made.startswith(".")
    assert made.lower() == made
    assert made not in (file_name("a"), file_name(f"{name}x"))


async def test_a_file_of_somebody_else_is_left_alone(stores: AnyStores, folder: Path) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    await converse(store, "s1", "one")
    folder.mkdir()
    (folder / "s1.jsonl").write_text("my notes\n")
    (folder / "other.jsonl").write_text('{"kind": "session", "session": "other", "database": "elsewhere"}\n')
    (folder / "notes.md").write_text("mine")
    await start(folder, store)
    assert (folder / "s1.jsonl").read_text() == "my notes\n"
    assert {path.name for path in folder.iterdir() if path.name[0] != "."} == {"s1.jsonl", "other.jsonl", "notes.md"}


async def test_the_file_of_a_deleted_session_and_those_of_its_subagents_are_removed(
    stores: AnyStores, folder: Path
) -> None:
    store = await stores.open()
    for new in (new_session(), new_session("task-1", parent_id="s1"), new_session("s2")):
        await store.create_session(new)
        await converse(store, new.id, "one")
    await start(folder, store)
    await store.delete_session("s1")
    async with writing(folder, store) as writer:
        await writer.update("s1")
    assert [path.name for path in sorted(folder.glob("*.jsonl"))] == ["s2.jsonl"]


@pytest.mark.long
async def test_a_full_disk_leaves_no_torn_line(
    stores: AnyStores, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    await converse(store, "s1", "one")
    await start(folder, store)
    path = folder / "s1.jsonl"
    before = path.read_bytes()
    await converse(store, "s1", "two " * 50_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5_000, limits[1]))
    try:
        async with writing(folder, store) as writer:
            await writer.update("s1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert "The mirror of session s1 was not written: [Errno 27] File too large" in caplog.text
    await start(folder, store)
    assert [line["id"] for line in lines(path)[1:]] == await entry_ids(store, "s1")


async def test_two_mirrors_of_one_directory_neither_double_nor_tear_lines(stores: AnyStores, folder: Path) -> None:
    async def opened() -> tuple[Store, Admin]:
        store: Store
        if isinstance(stores, Stores):
            store = await SqliteStore.open_to_read(stores.path)
        else:
            store = await PostgresStore.open(stores.url, to_read=True)
        return store, open_admin(store)

    writers = [await stores.open(), await stores.open()]
    mirrors = [Mirror(folder, MirrorSource(open=opened, database="here", redact=lambda: committed(()))) for _ in "ab"]
    await writers[0].create_session(new_session())
    for store, mirror in zip(writers, mirrors, strict=True):
        store.on_stored = mirror.note
        mirror.start()
    for index in range(10):
        await converse(writers[index % 2], "s1", f"p{index}")
    for mirror in mirrors:
        await anyio.to_thread.run_sync(mirror.close, 60)
    assert [line["id"] for line in lines(folder / "s1.jsonl")[1:]] == await entry_ids(writers[0], "s1")
