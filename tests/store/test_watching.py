"""Sessions that are followed while another store writes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import anyio
import pytest

from crow.domain.entries import Entry, NewEntry
from crow.domain.errors import NoSuchSession, StoreUnavailable
from crow.store import SessionChanges
from crow.store.watching import Draft, News
from tests.store.conftest import AnyStores
from tests.store.scenes import add, begin, converse, history, ids, new_session, result, said

GUARD_S = 60


async def until(news: AsyncIterator[News], is_it: Callable[[News], bool]) -> tuple[list[Entry], News]:
    """Read news up to the first that fits; the entries on the way, and that news."""
    entries: list[Entry] = []
    with anyio.fail_after(GUARD_S):
        async for one in news:
            entries += one.entries
            if is_it(one):
                return entries, one
    raise AssertionError("the news ended")


async def test_a_watcher_gets_what_was_stored_and_then_what_another_store_writes(stores: AnyStores) -> None:
    writer, watcher = await stores.open(), await stores.open()
    await writer.create_session(new_session())
    before = await converse(writer, "s1", "one", "two")
    async with aclosing(watcher.watch("s1", after=before[1].id)) as news:
        first = await anext(news)
        assert (first.entries, first.row, first.draft) == (before[2:], await writer.session("s1"), None)
        after = await converse(writer, "s1", "three")
        entries, last = await until(news, lambda one: after[-1] in one.entries)
        assert tuple(entries) == after
        assert last.row == await writer.session("s1")
        assert not last.is_orphaned
    assert ids(await history(watcher, "s1")) == [*ids(before), *ids(after)]


async def test_every_entry_arrives_once_and_in_order_while_it_is_written(stores: AnyStores) -> None:
    writer, watcher = await stores.open(), await stores.open()
    await writer.create_session(new_session())
    seen: list[Entry] = []

    async def watch(own: bool) -> None:
        async with aclosing((writer if own else watcher).watch("s1")) as news:
            entries, _ = await until(news, lambda one: one.row.title == "done" and one.row.entries == 90)
            seen.extend(entries)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, True)
        tasks.start_soon(watch, False)
        for number in range(30):
            await converse(writer, "s1", str(number))
        await writer.update_session("s1", SessionChanges(title="done"))
    told = list(await history(writer, "s1"))
    assert sorted(seen, key=lambda entry: entry.id) == [entry for entry in told for _ in range(2)]
    assert len(told) == 90


async def test_a_watcher_sees_the_draft_grow_and_end(stores: AnyStores) -> None:
    writer, watcher = await stores.open(), await stores.open()
    await writer.create_session(new_session())
    user = await begin(writer, "s1", "hi")

    async def stream(message_id: str, text: str, thought: str = "") -> None:
        draft = {"message_id": message_id, "text": text, "thought": thought}
        await writer.save_draft("s1", after_leaf=user.id, turn=user.turn, **draft)

    async with aclosing(watcher.watch("s1", after=user.id)) as news:
        assert (await anext(news)).draft is None
        await stream("a1", "one ", "hm")
        await until(news, lambda one: one.draft == Draft(message_id="a1", text="one ", thought="hm"))
        await stream("a1", "two ")
        await stream("a1", "three")
        await until(news, lambda one: one.draft == Draft(message_id="a1", text="one two three", thought="hm"))
        await stream("a2", "asked again")
        await until(news, lambda one: one.draft == Draft(message_id="a2", text="asked again", thought=""))
        async with aclosing(writer.watch("s1")) as late:
            assert (await anext(late)).draft == Draft(message_id="a2", text="asked again", thought="")
        (answer,) = await add(writer, "s1", said("whole"), turn=user.turn)
        entries, last = await until(news, lambda one: one.draft is None)
        assert entries == [answer]
        assert last.row.leaf == answer.id


async def test_a_move_is_news_without_entries_and_a_deletion_ends_the_news(stores: AnyStores) -> None:
    writer, watcher = await stores.open(), await stores.open()
    await writer.create_session(new_session())
    entries = await converse(writer, "s1", "one", "two")
    async with aclosing(watcher.watch("s1", after=entries[-1].id)) as news:
        await anext(news)
        await writer.move_leaf("s1", leaf=entries[-1].id, to=entries[2].id, reason="undo")
        found, _ = await until(news, lambda one: one.row.leaf == entries[2].id)
        assert found == []
        await writer.delete_session("s1")
        with pytest.raises(NoSuchSession):
            await until(news, lambda _: False)


@pytest.mark.long
async def test_long_news_come_in_batches_of_bounded_size(stores: AnyStores) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    made: list[Entry] = []
    for _ in range(2):
        made += await add(store, "s1", *(result(1, f"{number}") for number in range(300)))
    made += await add(store, "s1", *(result(1, letter * 2_000_000) for letter in "abcdef"))
    batches: list[News] = []
    async with aclosing(store.watch("s1")) as news:
        while sum(len(one.entries) for one in batches) < len(made):
            batches.append(await anext(news))
    assert [entry for one in batches for entry in one.entries] == made
    assert len(batches) >= 4
    assert max(len(one.entries) for one in batches) <= 256


@pytest.mark.parametrize("count", [255, 300])
async def test_a_draft_comes_after_all_entries_before_it(stores: AnyStores, count: int) -> None:
    writer, watcher = await stores.open(), await stores.open()
    await writer.create_session(new_session())
    user = await begin(writer, "s1", "hi")
    made = [user, *await add(writer, "s1", *(result(1, f"{number}") for number in range(count)), turn=user.turn)]
    draft = {"message_id": "a1", "text": "so far", "thought": "hm"}
    await writer.save_draft("s1", after_leaf=made[-1].id, turn=user.turn, **draft)
    async with aclosing(watcher.watch("s1")) as news:
        entries, last = await until(news, lambda one: one.draft is not None)
    assert entries == made
    assert last.draft == Draft(**draft)


async def test_a_cursor_can_be_any_number(stores: AnyStores) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    entries = await converse(store, "s1", "one")
    for after, expected in ((-(2**70), entries), (0, entries), (2**70, ())):
        async with aclosing(store.watch("s1", after=after)) as news:
            assert (await anext(news)).entries == expected
    with pytest.raises(NoSuchSession):
        await anext(store.watch("gone\0"))


async def test_closing_the_store_ends_the_news(stores: AnyStores) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    async with aclosing(store.watch("s1")) as news:
        await anext(news)
        await store.close()
        with pytest.raises(StoreUnavailable, match="closed"), anyio.fail_after(GUARD_S):
            await anext(news)


async def test_a_turn_whose_owner_died_is_orphaned_until_it_is_repaired(stores: AnyStores) -> None:
    dead, store = await stores.open(), await stores.open()
    await dead.create_session(new_session())
    user = await begin(dead, "s1", "hi")
    async with aclosing(store.watch("s1", after=user.id)) as news:
        assert not (await anext(news)).is_orphaned
        await dead.close()
        await until(news, lambda one: one.is_orphaned)
        await store.open_session("s1")
        entries, last = await until(news, lambda one: one.row.state == "idle")
        assert not last.is_orphaned
        assert [type(entry.body).__name__ for entry in entries] == ["TurnEnd"]


async def test_entries_of_a_fork_are_no_news_of_the_session_it_was_forked_from(stores: AnyStores) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    (*_, last) = await converse(store, "s1", "one")
    await store.fork_session("s1", "f1", entry=None, cwd="/repo", additional_directories=())
    forked = await converse(store, "f1", "two")
    more = await store.append("s1", leaf=last.id, turn=9, entries=[NewEntry(body=said("x"))])
    async with aclosing(store.watch("s1", after=last.id)) as news:
        assert (await anext(news)).entries == more
    async with aclosing(store.watch("f1")) as news:
        assert (await anext(news)).entries == forked
