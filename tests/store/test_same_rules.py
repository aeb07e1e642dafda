"""What a caller sees is the same on both engines: names, errors, order, sums and limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from sqlite3 import Connection

import pytest

from crow.adapters import open_admin
from crow.domain.entries import NewEntry
from crow.domain.errors import ArgumentError, LeafMoved
from crow.domain.messages import Usage
from crow.store import Scope, SessionChanges, Store
from crow.store.admin import ImportDefaults, SessionFilter
from crow.store.sqlite.store import SqliteStore
from tests.store.conftest import AnyStores
from tests.store.scenes import add, begin, converse, history, ids, new_session, said


@pytest.mark.parametrize("session_id", ["nul \0", "half \ud800"])
async def test_an_id_that_no_database_can_store_is_refused(store: Store, session_id: str) -> None:
    with pytest.raises(ArgumentError, match="characters that the database cannot store"):
        await store.create_session(new_session(session_id))
    assert await open_admin(store).ids() == ()


async def test_characters_that_no_column_can_hold_are_replaced_in_every_text_of_a_session(store: Store) -> None:
    odd, mended = "a\0b\ud800c", "a\ufffdb\ufffdc"
    made = await store.create_session(
        replace(new_session(cwd=f"/{odd}", title=odd, alias=odd, principal=odd), model=odd, mode=odd)
    )
    texts = (made.cwd, made.title, made.alias, made.principal, made.model, made.mode)
    assert texts == (f"/{mended}", mended, mended, mended, mended, mended)
    assert await store.session_by_alias(odd, principal=odd) == made
    changed = await store.update_session("s1", SessionChanges(title=f"{odd}{odd}", cwd=odd))
    assert (changed.title, changed.cwd) == (f"{mended}{mended}", mended)
    (answer,) = await store.append("s1", leaf=None, turn=1, entries=[NewEntry(body=said("x"), model=odd)])
    assert await history(store, "s1") == (answer,)


async def test_only_the_store_that_runs_the_turn_saves_its_draft(stores: AnyStores) -> None:
    first, second = await stores.open(), await stores.open()
    await first.create_session(new_session())
    draft = {"turn": 1, "message_id": "a", "text": "x", "thought": ""}
    with pytest.raises(LeafMoved, match="took over session s1"):
        await first.save_draft("s1", after_leaf=None, **draft)  # type: ignore[arg-type]
    user = await begin(first, "s1", "hi")
    with pytest.raises(LeafMoved, match="took over session s1"):
        await second.save_draft("s1", after_leaf=user.id, **draft)  # type: ignore[arg-type]
    await first.save_draft("s1", after_leaf=user.id, **draft)  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", [0, -1, 2**62, 2**63, 10**30, -(10**30)])
async def test_an_entry_that_cannot_exist_is_refused_like_any_other_unknown_one(store: Store, entry: int) -> None:
    await store.create_session(new_session())
    leaf = (await converse(store, "s1", "hi"))[-1].id
    attempts: list[Callable[[], Awaitable[object]]] = [
        lambda: store.fork_session("s1", "f1", entry=entry, cwd="/", additional_directories=()),
        lambda: store.move_leaf("s1", leaf=leaf, to=entry, reason="rewind"),
    ]
    for attempt in attempts:
        with pytest.raises(ArgumentError, match=f"Entry {entry} is not in"):
            await attempt()


async def test_everything_is_beyond_an_entry_that_does_not_exist(store: Store) -> None:
    await store.create_session(new_session())
    entries = await converse(store, "s1", "hi")
    assert ids(await store.entries_beyond(entries[-1].id, 2**62, ["user"])) == [entries[0].id]


async def test_the_shares_of_a_subagent_are_as_old_as_those_of_its_session(store: Store) -> None:
    await store.create_session(new_session(principal="ann"))
    await store.share_session("s1", "bob", "read")
    (share,) = await store.shares("s1")
    await _pass_a_millisecond(store)
    await store.create_session(new_session("s1-1", parent_id="s1"))
    assert await store.shares("s1-1") == (replace(share, session="s1-1"),)


async def _pass_a_millisecond(store: Store) -> None:
    """Create sessions until the store's clock shows another millisecond."""
    first = last = (await store.create_session(new_session("clock-0"))).created_ms
    number = 0
    while last == first:
        number += 1
        last = (await store.create_session(new_session(f"clock-{number}"))).created_ms


async def test_directories_and_titles_of_the_same_age_have_a_fixed_order(store: Store) -> None:
    await store.create_session(new_session(cwd="/Zoo", title="word"))
    await converse(store, "s1", "hi")
    for number, cwd in enumerate(("/a b", "/ab", "/A", "/é", "/a_c")):
        await store.fork_session("s1", f"f{number}", entry=None, cwd=cwd, additional_directories=())
    assert [one.cwd for one in await store.directories()] == ["/A", "/Zoo", "/a b", "/a_c", "/ab", "/é"]
    assert [hit.session for hit in await store.search("word")] == ["s1", "f4", "f3", "f2", "f1", "f0"]
    written = await open_admin(store).written_after(0)
    assert list(written) == ["f0", "f1", "f2", "f3", "f4", "s1"]


async def test_sums_that_take_more_than_64_bits_are_shown_as_the_largest_number(store: Store) -> None:
    await store.create_session(new_session())
    largest = 2**63 - 1
    huge = [NewEntry(body=said("x"), model=name, usage=Usage(input_tokens=largest)) for name in ("b", "b", "a")]
    small = [NewEntry(body=said("x"), model=name, usage=Usage(output_tokens=1)) for name in ("d", "c")]
    stored = await store.append("s1", leaf=None, turn=1, entries=[*huge, *small])
    await store.append("s1", leaf=stored[-1].id, turn=1, entries=huge)
    assert (await store.session("s1")).tokens_in == largest
    by_model = await store.usage_by_model("s1")
    assert [(one.model, one.tokens_in) for one in by_model] == [("a", largest), ("b", largest), ("c", 0), ("d", 0)]
    assert await open_admin(store).totals(["model"], Scope()) == by_model
    (total,) = await open_admin(store).totals([], Scope())
    assert (total.requests, total.tokens_in, total.tokens_out) == (8, largest, 2)


async def test_the_case_of_any_letter_in_the_name_of_a_model_does_not_matter(store: Store) -> None:
    await store.create_session(new_session())
    await converse(store, "s1", "needle")
    await add(store, "s1", said("needle"))
    leaf = (await store.session("s1")).leaf
    await store.append("s1", leaf=leaf, turn=1, entries=[NewEntry(body=said("needle"), model="École", cost=1.0)])
    assert len(await store.search("needle", scope=Scope(model="éCOLE"))) == 1
    assert len(await open_admin(store).totals(["model"], Scope(model="éCOLE"))) == 1
    assert len(await open_admin(store).listed(SessionFilter(model="éCOLE"))) == 1


async def test_a_short_word_is_found_anywhere_on_a_long_path(store: Store) -> None:
    await store.create_session(new_session())
    (first, *_) = await converse(store, "s1", "q!")
    for _ in range(6):
        await add(store, "s1", *[said("x")] * 1_000)
    assert [hit.entry for hit in await store.search("q!", session_id="s1")][-1] == first.id


async def test_a_watcher_of_an_imported_session_gets_nothing_of_a_deleted_one_with_its_id(
    stores: AnyStores, tmp_path: Path
) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    await converse(store, "s1", "hi")
    file = tmp_path / "export.jsonl"
    file.write_bytes(b"".join([line async for line in open_admin(store).export(["s1"])]))
    await store.fork_session("s1", "f1", entry=None, cwd="/", additional_directories=())
    await store.delete_session("s1")
    await open_admin(store).import_file(file, ImportDefaults())
    found: list[int] = []
    async for news in store.watch("s1"):
        found += ids(news.entries)
        break
    assert found == ids(await history(store, "s1"))


async def test_a_read_that_fails_does_not_keep_later_reads_in_the_past(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    entries = await converse(sqlite_store, "s1", "one")

    def fail_between_rows(sql: Connection) -> None:
        rows = sql.execute("SELECT id FROM entries")
        next(rows)
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle") as kept:
        await sqlite_store.database.read(fail_between_rows)
    more = await converse(sqlite_store, "s1", "two")
    assert ids(await history(sqlite_store, "s1")) == ids((*entries, *more))
    assert str(kept.value) == "in the middle"
