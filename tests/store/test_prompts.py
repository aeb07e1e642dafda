"""Prompts with names: a repeat is never stored, and finds the outcome of the first prompt."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from crow.adapters import open_admin
from crow.domain.entries import Command, ModelRequest, NewEntry, PromptName, TurnEnd, User
from crow.domain.errors import ArgumentError, RepeatedPrompt
from crow.domain.messages import Text, Usage
from crow.store import NamedPrompt, Store
from crow.store.admin import ImportDefaults
from crow.store.copying import CopiedConversation, SessionCopy
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.repair import repair
from crow.store.sqlite.store import SqliteStore
from tests.store.conftest import AnyStores
from tests.store.scenes import add, bodies, history, new_session, said
from tests.store.test_damage import overwrite
from tests.support.postgres import new_database

NAME = PromptName(id="p1", digest="d1")
PARTS = (Text(text="go"),)


async def take(store: Store, message_id: str = "u1", *, name: PromptName | None = NAME) -> User:
    start = await store.take_turn("s1", message_id, leaf=(await store.session("s1")).leaf, parts=PARTS, name=name)
    body = start.entries[-1].body
    assert isinstance(body, User)
    return body


async def end(store: Store, stop: TurnEnd, *, turn: int = 1) -> int:
    return (await add(store, "s1", stop, turn=turn, release=True))[-1].id


async def outcome(store: Store) -> NamedPrompt:
    found = await store.named_prompt("s1", NAME)
    assert found is not None
    return found


async def test_a_name_is_stored_with_its_prompt_and_has_the_outcome_of_the_turn(stores: AnyStores) -> None:
    store, other = await stores.open(), await stores.open()
    await store.create_session(new_session())
    assert await store.named_prompt("s1", NAME) is None
    assert (await take(store)).name == NAME
    assert await outcome(other) == NamedPrompt(message_id="u1", turn=1)
    used = Usage(input_tokens=10, output_tokens=2)
    leaf = (await store.session("s1")).leaf
    title = ModelRequest(purpose="title")
    entries = [
        NewEntry(body=said("A"), model="m", usage=used),
        NewEntry(body=title, model="m", usage=used),
        NewEntry(body=said("B"), model="m", usage=used),
    ]
    await store.append("s1", leaf=leaf, turn=1, entries=entries)
    last = await end(store, TurnEnd(stop="max_tokens"))
    await take(store, "u2", name=None)
    await end(store, TurnEnd(stop="end_turn"), turn=2)
    known = NamedPrompt(
        message_id="u1",
        turn=1,
        end=TurnEnd(stop="max_tokens"),
        end_entry=last,
        usage=Usage(input_tokens=20, output_tokens=4),
    )
    assert await outcome(other) == known
    assert await store.named_prompt("s1", PromptName(id="p2", digest="d1")) is None


async def test_a_repeat_is_refused_wherever_it_would_be_stored(stores: AnyStores) -> None:
    store, other = await stores.open(), await stores.open()
    await store.create_session(new_session())
    await store.enqueue("s1", PARTS, "u1", name=NAME)
    assert await outcome(store) == NamedPrompt(message_id="u1", is_own=True)
    assert await outcome(other) == NamedPrompt(message_id="u1")
    for _ in ("waits", "runs", "ended"):
        for each in (store, other):
            with pytest.raises(RepeatedPrompt) as refused:
                await take(each, "u2")
            assert refused.value.message_id == "u1"
            with pytest.raises(RepeatedPrompt):
                await each.enqueue("s1", PARTS, "u2", name=NAME)
            with pytest.raises(RepeatedPrompt):
                await each.take_turn("s1", None, leaf=None, name=NAME, command_id="u2")
            with pytest.raises(ArgumentError, match="other content"):
                await take(each, "u2", name=PromptName(id="p1", digest="d2"))
            with pytest.raises(ArgumentError, match="other content"):
                await each.named_prompt("s1", PromptName(id="p1", digest="d2"))
        row = await store.session("s1")
        if row.leaf is None:
            start = await store.take_turn("s1", "u1", leaf=None)
            assert start.entries[-1].body == User(parts=PARTS, message_id="u1", name=NAME)
        elif row.state == "running":
            await end(store, TurnEnd(stop="end_turn"))
    assert [type(body) for body in await bodies(store, "s1")] == [User, TurnEnd]
    assert await store.queued("s1") == ()


async def test_of_two_stores_at_once_exactly_one_stores_a_prompt(stores: AnyStores) -> None:
    store, other = await stores.open(), await stores.open()
    await store.create_session(new_session())
    for number in range(20):
        name = PromptName(id=f"p{number}", digest="d")
        done: list[str] = []

        async def send(one: Store, message_id: str, name: PromptName = name, done: list[str] = done) -> None:
            try:
                await one.enqueue("s1", PARTS, message_id, name=name)
            except RepeatedPrompt as error:
                done.append(f"repeats {error.message_id}")
            else:
                done.append(message_id)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, store, f"a{number}")
            tasks.start_soon(send, other, f"b{number}")
        stored = (await store.queued("s1"))[-1].message_id
        assert sorted(done) == sorted([stored, f"repeats {stored}"])
    assert len(await store.queued("s1")) == 20


async def test_a_command_keeps_its_name_from_the_claim_on(stores: AnyStores) -> None:
    store, other = await stores.open(), await stores.open()
    await store.create_session(new_session())
    await store.take_turn("s1", None, leaf=None, name=NAME, command_id="c1")
    assert await outcome(other) == NamedPrompt(message_id="c1", turn=1)
    await add(store, "s1", Command(text="/undo", answer="Done.", message_id="c1", name=NAME))
    last = await end(store, TurnEnd(stop="end_turn"))
    assert await outcome(other) == NamedPrompt(message_id="c1", turn=1, end=TurnEnd(stop="end_turn"), end_entry=last)


async def test_a_prompt_that_is_dropped_can_be_sent_again_unless_it_was_cancelled(store: Store) -> None:
    await store.create_session(new_session())
    await store.enqueue("s1", PARTS, "u1", name=NAME)
    await store.drop_prompt("s1", "u1")
    assert await store.named_prompt("s1", NAME) is None
    await store.enqueue("s1", PARTS, "u2", name=NAME)
    await store.drop_prompt("s1", "u2", is_cancelled=True)
    assert await outcome(store) == NamedPrompt(message_id="u2", end=TurnEnd(stop="cancelled"))


async def test_a_steered_prompt_has_the_outcome_of_the_turn_it_joined(store: Store) -> None:
    await store.create_session(new_session())
    await take(store, name=None)
    await store.enqueue("s1", PARTS, "u2", name=NAME)
    await add(store, "s1", User(parts=PARTS, message_id="u2", name=NAME))
    assert await outcome(store) == NamedPrompt(message_id="u2", turn=1)
    last = await end(store, TurnEnd(stop="cancelled"))
    assert (await outcome(store)).end_entry == last


async def test_a_prompt_of_a_dead_process_is_stored_once_with_its_name(stores: AnyStores) -> None:
    store, other = await stores.open(), await stores.open()
    await store.create_session(new_session())
    await store.enqueue("s1", PARTS, "u1", name=NAME)
    await store.close()
    await other.open_session("s1")
    known = await outcome(other)
    assert (known.message_id, known.end and known.end.stop) == ("u1", "interrupted")
    assert [getattr(body, "name", None) for body in await bodies(other, "s1")] == [NAME, None]
    with pytest.raises(RepeatedPrompt):
        await take(other, "u2")


async def test_undo_hides_no_name_and_a_fork_has_none(store: Store) -> None:
    await store.create_session(new_session())
    await take(store)
    last = await end(store, TurnEnd(stop="end_turn"))
    await store.fork_session("s1", "s2", entry=None, cwd="/repo", additional_directories=())
    await store.move_leaf("s1", leaf=last, to=None, reason="undo")
    assert (await outcome(store)).end_entry == last
    with pytest.raises(RepeatedPrompt):
        await take(store, "u2")
    assert await store.named_prompt("s2", NAME) is None
    await store.take_turn("s2", "u9", leaf=last, parts=PARTS, name=NAME)
    assert (await outcome(store)).end_entry == last


async def test_an_export_keeps_the_names(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    await sqlite_store.create_session(new_session())
    await take(sqlite_store)
    await end(sqlite_store, TurnEnd(stop="end_turn"))
    data = b"".join([line async for line in SessionAdmin(sqlite_store).export(None)])
    await anyio.Path(tmp_path / "export").write_bytes(data)
    other = await SqliteStore.open(tmp_path / "other.db")
    try:
        await SessionAdmin(other).import_file(tmp_path / "export", ImportDefaults())
        known = await outcome(other)
        assert (known.message_id, known.end) == ("u1", TurnEnd(stop="end_turn"))
        assert known.end_entry == (await history(other, "s1"))[-1].id
    finally:
        await other.close()


async def test_names_go_with_a_deleted_session(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    await take(sqlite_store)
    await end(sqlite_store, TurnEnd(stop="end_turn"))
    await sqlite_store.delete_session("s1")
    await sqlite_store.tidy()
    rows = await sqlite_store.database.read(lambda sql: sql.execute("SELECT count(*) FROM prompts").fetchall())
    assert rows == [(0,)]


async def test_the_look_up_reads_no_more_in_a_long_session(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    plans = await sqlite_store.database.read(
        lambda sql: sql.execute(
            "EXPLAIN QUERY PLAN SELECT id FROM entries WHERE session = 's1' AND id >= 5 AND turn = 1"
            " AND kind = 'turn_end' ORDER BY id LIMIT 1"
        ).fetchall()
    )
    assert [plan[-1] for plan in plans] == ["SEARCH entries USING INDEX entries_by_session (session=? AND rowid>?)"]


async def test_a_copy_keeps_the_names_of_waiting_prompts(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    await sqlite_store.create_session(new_session())
    await take(sqlite_store, "u0", name=None)
    await end(sqlite_store, TurnEnd(stop="end_turn"))
    await sqlite_store.enqueue("s1", PARTS, "u1", name=NAME)
    async with new_database() as url:
        there = await PostgresStore.open(url)
        back = await SqliteStore.open(tmp_path / "back.db")
        try:
            for source, target in ((sqlite_store, there), (there, back)):
                done: list[CopiedConversation] = []
                if source is sqlite_store:
                    await sqlite_store.database.write(lambda sql: sql.execute("UPDATE inbox SET owner = 'dead'"))
                await SessionCopy(open_admin(source), open_admin(target), target, done.append).run()
                assert await outcome(target) == NamedPrompt(message_id="u1")
            await back.open_session("s1")
            assert [getattr(body, "name", None) for body in await bodies(back, "s1")] == [None, None, NAME, None]
        finally:
            await there.close()
            await back.close()


async def test_a_recovered_database_knows_the_names_of_its_entries(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    store = await SqliteStore.open(path)
    await store.create_session(new_session())
    await take(store)
    await end(store, TurnEnd(stop="end_turn"))
    await store.close()
    overwrite(path, "prompts")
    assert repair(path).outcome == "recovered"
    store = await SqliteStore.open(path)
    try:
        known = await outcome(store)
        assert (known.message_id, known.end) == ("u1", TurnEnd(stop="end_turn"))
    finally:
        await store.close()
