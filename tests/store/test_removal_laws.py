"""Whatever is forked, undone, deleted, pruned and imported, in any order: what is left is whole, and all there is."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import anyio
import asyncpg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain.entries import Body, File
from crow.domain.errors import ArgumentError
from crow.store.admin import ImportDefaults
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, bodies, converse, history, ids, new_session, result, said
from tests.support.amounts import examples
from tests.support.killing import HALVES, POSTGRES_HALVES
from tests.support.postgres import new_database

KINDS = (
    "new",
    "say",
    "say",
    "call",
    "call",
    "task",
    "fork",
    "fork",
    "move",
    "move",
    "delete",
    "prune",
    "travel",
    "tidy",
)
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, 30)), min_size=8, max_size=20)


class Life:
    """A store, and what each of its sessions must tell; large bodies are the same few, so that blobs are shared.

    Only SQLite prunes sessions and writes them into files. A life on PostgreSQL leaves these steps out."""

    def __init__(self, store: SqliteStore | PostgresStore, directory: Path) -> None:
        self.store, self.directory = store, directory
        self.upkeep = SessionAdmin(store) if isinstance(store, SqliteStore) else None
        self.told: dict[str, list[Body]] = {}
        self.parents: dict[str, str] = {}
        self.made = 0

    async def make(self, **more: object) -> str:
        name = f"s{self.made}"
        self.made += 1
        await self.store.create_session(new_session(name, cwd=f"/{self.made % 2}", **more))
        return name

    async def step(self, kind: str, which: int, value: int) -> None:
        if kind == "new" or not self.told:
            await self.begin(await self.make(title="T"), "hello")
        name = sorted(self.told)[which % len(self.told)]
        path = ids(await history(self.store, name))
        match kind:
            case "say":
                await converse(self.store, name, f"word {value}")
            case "call":
                (asked,) = await add(self.store, name, said("look", calls=1))
                done = result(asked.id, "x" * (40_000 + value % 3))
                await add(
                    self.store, name, File(call=done.call, path="/a", before=b"\xff" * value, after_hash="h"), done
                )
            case "task":
                task = await self.make(parent_id=name)
                self.parents[task] = name
                await self.begin(task, "a task")
            case "fork":
                row, leaf = await self.store.session(name), path[value % len(path)] if path else None
                fork = new_session(
                    f"f{self.made}", conversation=row.conversation, leaf=leaf, forked_from=name, title="F"
                )
                self.made += 1
                await self.store.create_session(fork)
                self.told[fork.id] = await bodies(self.store, fork.id)
            case "move":
                row = await self.store.session(name)
                to = [None, *path][value % (len(path) + 1)]
                await self.store.move_leaf(name, leaf=row.leaf, to=to, reason="undo")
            case "delete":
                await self.store.delete_session(name)
                self.forget(name)
            case "prune":
                if self.upkeep is not None:
                    for old in await self.upkeep.prune(2**53, f"/{value % 2}"):
                        self.forget(old.id)
            case "travel":
                await self.travel(name)
            case "tidy":
                await self.store.tidy()
        if kind in ("say", "call", "move"):
            self.told[name] = await bodies(self.store, name)

    async def begin(self, name: str, prompt: str) -> None:
        await converse(self.store, name, prompt)
        self.told[name] = await bodies(self.store, name)

    def forget(self, name: str) -> None:
        self.told.pop(name, None)
        for task in [task for task, parent in self.parents.items() if parent == name]:
            del self.parents[task]
            self.forget(task)

    async def travel(self, name: str) -> None:
        """Out into a file, gone here, and in again."""
        if self.upkeep is None:
            return
        file = self.directory / "x.jsonl"
        await anyio.Path(file).write_bytes(b"".join([line async for line in self.upkeep.export((name,))]))
        await self.store.delete_session(name)
        try:
            done = await self.upkeep.import_file(file, ImportDefaults(model="m1", mode="ask"))
        except ArgumentError as error:
            raise AssertionError("what was exported is taken in") from error
        assert all(one.is_new for one in done)
        self.parents.pop(name, None)  # what is exported without the session that it is a task of is nobody's task

    async def check(self) -> None:
        await self.store.tidy()
        if self.upkeep is not None:
            assert set(await self.upkeep.ids()) == set(self.told)
        for name, expected in self.told.items():
            found = await bodies(self.store, name)
            assert [type(body) for body in found] == [type(body) for body in expected]
            assert [body for body in found if not hasattr(body, "call")] == [
                body for body in expected if not hasattr(body, "call")
            ]


async def live(steps: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "crow.db"
        store = await SqliteStore.open(path)
        try:
            life = Life(store, Path(directory))
            for step in steps:
                await life.step(*step)
            await life.check()
        finally:
            await store.close()
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('integrity-check')")
            for query in HALVES:
                assert connection.execute(query).fetchall() == [], query
            if not life.told:
                assert connection.execute("SELECT (SELECT count(*) FROM entries) + count(*) FROM blobs").fetchone() == (
                    0,
                )


async def live_on_postgres(steps: list[tuple[str, int, int]]) -> None:
    async with new_database() as url:
        store = await PostgresStore.open(url)
        try:
            life = Life(store, Path())
            for step in steps:
                await life.step(*step)
            await life.check()
        finally:
            await store.close()
        connection = await asyncpg.connect(url)
        try:
            for query in POSTGRES_HALVES:
                assert await connection.fetch(query) == [], query
            names = {row[0] for row in await connection.fetch("SELECT id FROM crow.sessions")}
            assert names == set(life.told)
            if not life.told:
                query = "SELECT (SELECT count(*) FROM crow.entries) + (SELECT count(*) FROM crow.blobs)"
                assert await connection.fetchval(query) == 0
        finally:
            await connection.close()


@pytest.mark.long
@settings(max_examples=examples(3), database=None, deadline=None)
@given(steps=STEPS)
def test_what_is_left_on_postgres_after_any_life_is_whole_and_nothing_else(steps: list[tuple[str, int, int]]) -> None:
    anyio.run(live_on_postgres, steps)


@settings(max_examples=examples(6), database=None)
@given(steps=STEPS)
def test_what_is_left_after_any_life_is_whole_and_nothing_else(steps: list[tuple[str, int, int]]) -> None:
    anyio.run(live, steps)


async def test_a_session_comes_back_from_its_file_though_a_fork_of_it_is_still_here() -> None:
    """The fork keeps the conversation of an import, whose session is gone."""
    await live([("new", 0, 0), ("travel", 0, 0), ("fork", 0, 0), ("travel", 1, 0)])
