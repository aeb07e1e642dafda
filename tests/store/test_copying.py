"""Sessions are copied from one database to another, of the same engine or not, and arrive complete."""

from __future__ import annotations

import re
import signal
import tempfile
import typing
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
import pytest
from hypothesis import Phase, example, given, settings

from crow.adapters import open_admin, open_store_at
from crow.domain.entries import Assistant, File, NewEntry, TurnEnd, User
from crow.domain.errors import StoreUnavailable
from crow.domain.messages import Text, Usage
from crow.settings import Loaded, load_settings
from crow.store import SessionChanges, Store
from crow.store.copying import CopiedConversation, SessionCopy
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, bodies, converse, history, new_session, said
from tests.store.test_exchange import OPERATIONS, build, told
from tests.support.amounts import examples
from tests.support.fork_server import run_script
from tests.support.postgres import new_database

Engine = Literal["sqlite", "postgres"]
BOTH_WAYS = pytest.mark.parametrize(("here", "there"), [("sqlite", "postgres"), ("postgres", "sqlite")])


def loaded() -> Loaded:
    return load_settings({}, {"CROW_HOME": "/nowhere"})


class Databases:
    """Opens stores at places, and closes them at the end."""

    def __init__(self, stack: AsyncExitStack, directory: Path) -> None:
        self._stack = stack
        self._directory = directory
        self._made = 0

    async def place(self, engine: Engine, *, is_empty: bool = False) -> str:
        """A database that does not exist yet, or has no sessions; if it `is_empty`, no schema of crow either."""
        self._made += 1
        if engine == "sqlite":
            return str(self._directory / f"{self._made}.db")
        return await self._stack.enter_async_context(new_database(is_empty=is_empty))

    async def open(self, place: str, *, to_read: bool = False) -> Store:
        store = await open_store_at(loaded(), place, to_read=to_read)
        self._stack.push_async_callback(store.close)
        return store


@asynccontextmanager
async def some_databases() -> AsyncIterator[Databases]:
    with tempfile.TemporaryDirectory() as directory:
        async with AsyncExitStack() as stack:
            yield Databases(stack, Path(directory))


@pytest.fixture
async def databases() -> AsyncIterator[Databases]:
    async with some_databases() as made:
        yield made


async def copied(source: Store, target: Store) -> list[CopiedConversation]:
    found: list[CopiedConversation] = []
    await SessionCopy(open_admin(source), open_admin(target), target, found.append).run()
    return found


async def everything(store: Store) -> bytes:
    """All conversations in the form of an export."""
    admin = open_admin(store)
    conversations = await admin.conversations()
    known = frozenset(name for names in conversations.values() for name in names)
    lines = [line for key, names in conversations.items() async for line in _lines(admin.lines(key, names, known))]
    return b"".join(lines)


async def _lines(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for line in lines:
        yield line


async def exported(store: Store) -> bytes:
    return b"".join([line async for line in open_admin(store).export(None)])


async def copies_are_equal(operations: list[tuple[str, int, typing.Any]]) -> None:
    async with some_databases() as databases:
        first, second, third = [
            await databases.open(await databases.place(engine)) for engine in ("sqlite", "postgres", "sqlite")
        ]
        await build(first, operations)  # type: ignore[arg-type]
        assert all(one.outcome == "copied" for one in await copied(first, second))
        assert await everything(second) == await everything(first)
        assert all(one.outcome == "copied" for one in await copied(second, third))
        assert await everything(third) == await everything(first)
        assert await exported(third) == await exported(second) == await exported(first)
        assert all(one.outcome == "known" for one in await copied(first, third))


@pytest.mark.long
@settings(
    max_examples=examples(4), database=None, phases=(Phase.explicit, Phase.generate)
)  # shrinking would take minutes
@example(operations=[("append", 0, NewEntry(body=User(parts=(), message_id="u"))), ("sub", 0, "/repo")])
@example(operations=[("append", 0, NewEntry(body=TurnEnd(stop="cancelled"), model="a\0b"))])
@given(operations=OPERATIONS)
def test_any_copy_is_exported_byte_for_byte(operations: list[tuple[str, int, typing.Any]]) -> None:
    anyio.run(copies_are_equal, operations)


@BOTH_WAYS
async def test_a_copy_keeps_what_an_export_leaves_out_but_no_permissions(
    databases: Databases, here: Engine, there: Engine
) -> None:
    source, target = [await databases.open(await databases.place(engine)) for engine in (here, there)]
    await told(source)  # type: ignore[arg-type]
    await source.update_session("s1", SessionChanges(calibration=1.5, archived=True))
    await source.create_session(new_session("of-ann", principal="ann", alias="cli:default"))
    await source.share_session("of-ann", "bob", "read")
    usage = Usage(input_tokens=70, output_tokens=5, cached_tokens=2)
    await source.create_session(new_session("sub", parent_id="f1"))
    await source.append("sub", leaf=None, turn=1, entries=[NewEntry(body=said("x"), usage=usage, cost=0.5)])
    before = await exported(source)
    assert [one.outcome for one in await copied(source, target)] == ["copied"] * 3
    assert await target.shares("of-ann") == await source.shares("of-ann") != ()
    for name in ("s1", "f1", "sub", "of-ann"):
        one, other = await source.session(name), await target.session(name)
        assert replace(other, conversation=one.conversation, leaf=one.leaf, newest_entry=one.newest_entry) == replace(
            one, permissions=()
        )
        assert len(await history(target, name)) == len(await history(source, name))
    files = [entry for entry in await history(target, "s1") if isinstance(entry.body, File)]
    assert [one.body.before for one in files if isinstance(one.body, File)] == [b"\xff\0"]
    assert (await target.session_by_alias("cli:default")) == await target.session("s1")
    assert [one.reason for one in await target.moves("s1")] == ["undo"]
    assert await exported(target) == before == await exported(source)
    assert [hit.session for hit in await target.search("elsewhere")] == ["f1", "f1"]


@BOTH_WAYS
async def test_a_turn_that_was_cut_short_is_closed_in_the_copy_and_not_in_the_source(
    databases: Databases, here: Engine, there: Engine
) -> None:
    places = [await databases.place(engine) for engine in (here, there)]
    writer = await databases.open(places[0])
    await writer.create_session(new_session())
    user = await begin(writer, "s1", "hello")
    await writer.enqueue("s1", (Text(text="next"),), "u-next")
    await writer.save_draft("s1", after_leaf=user.id, turn=1, message_id="a1", text="half an ", thought="")
    await writer.save_draft("s1", after_leaf=user.id, turn=1, message_id="a1", text="answer", thought="hm")
    source = await databases.open(places[0], to_read=True)
    target = await databases.open(places[1])
    (busy,) = await copied(source, target)
    assert (busy.outcome, busy.sessions) == ("in use", ("s1",))
    assert re.fullmatch(r"process \d+ on .* uses it now", busy.words)
    await writer.close()
    before = await everything(source)
    assert [one.outcome for one in await copied(source, target)] == ["copied"]
    await target.open_session("s1")
    user_, answer, end, second, *_ = await bodies(target, "s1")
    assert isinstance(user_, User)
    assert (getattr(answer, "text", ""), getattr(answer, "thought", "")) == ("half an answer", "hm")
    assert end == TurnEnd(stop="interrupted", detail="the process that ran it ended in the middle of this turn")
    assert isinstance(second, User)
    assert second.parts == (Text(text="next"),)
    assert await target.queued("s1") == ()
    assert await everything(source) == before
    assert len(await bodies(source, "s1")) == 1


@BOTH_WAYS
async def test_nothing_in_the_target_is_changed_by_a_copy(databases: Databases, here: Engine, there: Engine) -> None:
    source, target = [await databases.open(await databases.place(engine)) for engine in (here, there)]
    for store, word in ((source, "there"), (target, "here")):
        await store.create_session(new_session("s1"))
        await converse(store, "s1", word)
    await target.create_session(new_session("mine", alias="main"))
    await source.create_session(new_session("s2", alias="main", parent_id="s1"))
    before = await history(target, "s1")
    changed, fine = await copied(source, target)
    assert (changed.outcome, changed.sessions) == ("changed", ("s1",))
    assert changed.words.startswith("the target has different sessions with these ids")
    assert fine.outcome == "copied"
    assert await history(target, "s1") == before
    assert ((await target.session("mine")).alias, (await target.session("s2")).alias) == ("main", None)
    # what goes on in the target after the copy is no difference
    await converse(target, "s2", "more")
    assert [one.outcome for one in await copied(source, target)] == ["changed", "known"]


class _DeletedMeanwhile(SessionAdmin):
    """An admin of a store in which somebody deletes the session "s1" as soon as its copy has begun."""

    def __init__(self, store: SqliteStore) -> None:
        super().__init__(store)
        self._of = store

    async def lines(self, conversation: int, ids: Sequence[str], known: frozenset[str]) -> AsyncIterator[bytes]:
        async for line in super().lines(conversation, ids, known):
            yield line
            if "s1" in ids:
                await self._of.delete_session("s1")
                await self._of.tidy()


async def test_a_session_that_is_deleted_while_it_is_copied_does_not_keep_the_others(databases: Databases) -> None:
    source, target = [await databases.open(await databases.place("sqlite")) for _ in range(2)]
    assert isinstance(source, SqliteStore)
    for name in ("s1", "s2"):
        await source.create_session(new_session(name))
        await converse(source, name, name)
    found: list[CopiedConversation] = []
    await SessionCopy(_DeletedMeanwhile(source), open_admin(target), target, found.append).run()
    assert [(one.outcome, one.sessions, one.words) for one in found] == [
        ("in use", ("s1",), "it was deleted while it was copied"),
        ("copied", ("s2",), ""),
    ]


async def test_a_conversation_that_cannot_be_copied_does_not_keep_the_others(databases: Databases) -> None:
    source, target = [await databases.open(await databases.place(engine)) for engine in ("sqlite", "postgres")]
    for name, cwd in (("s1", "/one"), ("s2", "/new\nline"), ("s3", "/three")):
        await source.create_session(new_session(name, cwd=cwd))
        await converse(source, name, "hello")
    found = {one.sessions: one for one in await copied(source, target)}
    assert [found[name,].outcome for name in ("s1", "s2", "s3")] == ["copied", "refused", "copied"]
    assert 'session: cwd is "/new\\nline"; expected an absolute path' in found["s2",].words


COPY = """
import asyncio, os, signal, sys
from crow.adapters import open_admin, open_store_at
from crow.settings import load_settings
from crow.store.copying import SessionCopy
import crow.store.copying as copying
copying._BATCH_CONVERSATIONS = 1

async def main():
    loaded = load_settings({}, {"CROW_HOME": "/nowhere"})
    source = await open_store_at(loaded, sys.argv[1], to_read=True)
    target = await open_store_at(loaded, sys.argv[2])
    left = int(sys.argv[3])

    def count(*_):
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    run = type(target.database).write if sys.argv[2].endswith(".db") else type(target.database).transaction
    def counted(*arguments, **options):
        count()
        return run(*arguments, **options)
    setattr(type(target.database), run.__name__, counted)
    await SessionCopy(open_admin(source), open_admin(target), target, lambda one: print(one.outcome, one.words)).run()
    await target.close()
    await source.close()
asyncio.run(main())
"""


@pytest.mark.long
@BOTH_WAYS
async def test_a_copy_that_was_killed_anywhere_is_completed_by_the_next_one(
    databases: Databases, here: Engine, there: Engine
) -> None:
    places = [await databases.place(engine) for engine in (here, there)]
    source = await databases.open(places[0])
    await told(source)  # type: ignore[arg-type]
    await source.create_session(new_session("long"))
    for number in range(3):
        answers = [Assistant(text=f"{number} {count} " + "x" * 2_000, message_id="a") for count in range(300)]
        await add(source, "long", *answers)
    await source.create_session(new_session("sub", parent_id="s1"))
    await converse(source, "sub", "last")
    expected = await everything(source)
    for writes in (4, 9):  # each process begins with what the one before it left
        done = await anyio.to_thread.run_sync(partial(run_script, COPY, *places, str(writes), check=False))
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    target = await databases.open(places[1])
    outcomes = [one.outcome for one in await copied(source, target)]
    assert sorted(outcomes, reverse=True) == outcomes, "what had been copied was known, and the rest was copied"
    assert set(outcomes) == {"known", "copied"}
    assert await everything(target) == expected == await everything(source)
    assert (await open_admin(target).ids()) == ("f1", "long", "s1", "sub")


async def test_an_empty_or_missing_source_is_named(databases: Databases) -> None:
    with pytest.raises(StoreUnavailable, match="There is no database at"):
        await databases.open("/nowhere/crow.db", to_read=True)
    place = await databases.place("postgres", is_empty=True)
    with pytest.raises(StoreUnavailable, match=r"PostgreSQL database crow_\w+ on .* has no sessions\."):
        await databases.open(place, to_read=True)
    reader = await databases.open(await databases.place("sqlite"))
    assert await copied(reader, await databases.open(place)) == []
    reading = await databases.open(place, to_read=True)
    with pytest.raises(StoreUnavailable, match="was opened only for reading"):
        await reading.create_session(new_session())
