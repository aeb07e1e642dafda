"""Moves, outlines, what a move leaves behind; forks and aliases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crow.domain.entries import CallRef, Command, File, Note, TurnEnd
from crow.domain.errors import ArgumentError, NoSuchSession
from crow.store import BranchPoint, BranchTip, Move, Store
from crow.store.branches import left_branches, own_entries
from tests.store.conftest import Stores
from tests.store.scenes import add, bodies, converse, history, ids, new_session, result, row_ids, said


async def move(store: Store, to: int | None, reason: str = "undo", session_id: str = "s1") -> None:
    row = await store.session(session_id)
    await store.move_leaf(session_id, leaf=row.leaf, to=to, reason=reason)


async def test_moves_are_read_newest_first(store: Store) -> None:
    await store.create_session(new_session())
    entries = await converse(store, "s1", "one", "two")
    await move(store, entries[2].id)
    await move(store, None, "new")
    assert [(one.from_leaf, one.to_leaf, one.reason) for one in await store.moves("s1")] == [
        (entries[2].id, None, "new"),
        (entries[5].id, entries[2].id, "undo"),
    ]
    assert all(isinstance(one, Move) and one.created_ms > 0 for one in await store.moves("s1"))


async def test_messages_are_counted_on_the_path_alone(store: Store) -> None:
    await store.create_session(new_session())
    await store.create_session(new_session("empty"))
    entries = await converse(store, "s1", "one", "two", "three")
    await store.fork_session("s1", "fork", entry=entries[3].id, cwd="/repo", additional_directories=())
    await move(store, entries[2].id)
    names = ("fork", "s1", "empty", "unknown")
    assert await store.count_messages(names) == {"fork": 3, "s1": 2, "empty": 0, "unknown": 0}
    await converse(store, "fork", "four")
    assert await store.count_messages(("fork",)) == {"fork": 5}


async def test_an_outline_has_the_points_of_every_branch_and_the_ends_that_differ(store: Store) -> None:
    await store.create_session(new_session())
    one = await converse(store, "s1", "one", "two")
    await move(store, one[2].id)
    (command, *_) = await add(store, "s1", Command(text="/undo", answer="Done", message_id="c"))
    (label, *_) = await add(store, "s1", Note(about="label", value="good"), TurnEnd(stop="end_turn"))
    other = await converse(store, "s1", "three")
    found = await store.outline("s1")
    assert found.points == (
        BranchPoint(entry=one[0].id, before=None, previous=None, kind="prompt", text="one"),
        BranchPoint(entry=one[3].id, before=one[2].id, previous=one[0].id, kind="prompt", text="two"),
        BranchPoint(entry=label.id, before=command.id, previous=one[0].id, kind="label", text="good", labels=("good",)),
        BranchPoint(entry=other[0].id, before=label.id + 1, previous=label.id, kind="prompt", text="three"),
    )
    assert found.tips == (
        BranchTip(entry=other[2].id, point=other[0].id, is_current=True),
        BranchTip(entry=one[5].id, point=one[3].id, is_current=False),
    )


async def test_a_label_is_at_its_entry_moves_when_it_is_given_again_and_can_be_removed(store: Store) -> None:
    await store.create_session(new_session())
    one = await converse(store, "s1", "one", "two")

    async def labels() -> dict[int, tuple[str, ...]]:
        return {point.entry: point.labels for point in (await store.outline("s1")).points if point.labels}

    await add(
        store, "s1", Note(about="label", value="a", entry=one[0].id), Note(about="label", value="b", entry=one[0].id)
    )
    await add(store, "s1", Note(about="label", value="c", entry=one[1].id))
    assert await labels() == {one[0].id: ("a", "b"), one[1].id: ("c",)}
    await add(store, "s1", Note(about="label", value="a", entry=one[1].id), Note(about="label", value="b", entry=0))
    assert await labels() == {one[1].id: ("c", "a")}
    (unknown,) = await add(store, "s1", Note(about="label", value="far", entry=10**9))
    assert (await labels())[unknown.id] == ("far",)
    await move(store, None)
    assert (await labels())[one[1].id] == ("c", "a")


async def test_a_place_on_the_way_of_another_branch_is_no_end_but_where_the_session_stands_is_shown(
    store: Store,
) -> None:
    await store.create_session(new_session())
    entries = await converse(store, "s1", "one", "two")
    await move(store, entries[2].id)
    await move(store, None)
    assert (await store.outline("s1")).tips == (
        BranchTip(entry=None, point=None, is_current=True),
        BranchTip(entry=entries[5].id, point=entries[3].id, is_current=False),
    )


async def test_a_branch_that_was_left_in_two_steps_is_one_branch(store: Store) -> None:
    await store.create_session(new_session())
    one = await converse(store, "s1", "one", "two", "three")
    await move(store, one[5].id)
    await move(store, one[2].id)
    other = await converse(store, "s1", "four")
    await move(store, one[2].id, "rewind")
    assert [ids(branch) async for branch in left_branches(store, "s1")] == [ids(other), ids(one[3:])]
    assert [entry.id async for entry in own_entries(store, "s1")] == ids([*one, *other])


async def test_a_session_without_entries_has_an_outline(store: Store) -> None:
    await store.create_session(new_session())
    found = await store.outline("s1")
    assert (found.points, found.tips) == ((), (BranchTip(entry=None, point=None, is_current=True),))
    with pytest.raises(NoSuchSession):
        await store.outline("s2")


async def test_what_a_move_leaves_behind_is_what_the_other_path_does_not_have(store: Store) -> None:
    await store.create_session(new_session())
    one = await converse(store, "s1", "one", "two", "three")
    await move(store, one[2].id)
    two = await converse(store, "s1", "four")
    kinds = ("user", "turn_end")
    assert ids(await store.entries_beyond(one[8].id, one[2].id, kinds)) == ids([one[3], one[5], one[6], one[8]])
    assert ids(await store.entries_beyond(one[8].id, two[2].id, kinds)) == ids([one[3], one[5], one[6], one[8]])
    assert ids(await store.entries_beyond(two[2].id, one[8].id, kinds)) == ids([two[0], two[2]])
    assert ids(await store.entries_beyond(two[2].id, None, ("user",))) == ids([one[0], two[0]])
    assert await store.entries_beyond(one[2].id, one[8].id, kinds) == ()
    assert await store.entries_beyond(None, one[8].id, kinds) == ()


async def test_file_changes_come_with_the_results_of_their_calls_alone(store: Store) -> None:
    await store.create_session(new_session())
    (asked,) = await add(store, "s1", said("x", calls=2))
    file = File(call=CallRef(assistant=asked.id, index=1), path="/a", before=b"was", after_hash="h")
    added = await add(store, "s1", file, result(asked.id, "read", index=0), result(asked.id, "wrote", index=1))
    assert added[0].body == file
    recorded = replace(added[0], body=replace(file, recorded_here=True))  # nothing of it was imported
    assert await store.file_changes(added[-1].id, None) == (recorded, added[2])
    assert await store.file_changes(added[-1].id, added[0].id) == ()


# forks


async def test_a_fork_is_a_row_on_the_same_entries_and_numbered(store: Store) -> None:
    await store.create_session(new_session(title="Nests", config={"effort": "low"}))
    entries = await converse(store, "s1", "one", "two")
    whole = await store.fork_session("s1", "f1", entry=None, cwd="/other", additional_directories=("/more",))
    early = await store.fork_session("s1", "f2", entry=entries[2].id, cwd="/repo", additional_directories=())
    again = await store.fork_session("f1", "f3", entry=None, cwd="/repo", additional_directories=())
    assert [row.title for row in (whole, early, again)] == ["Nests (fork 1)", "Nests (fork 2)", "Nests (fork 3)"]
    assert (whole.leaf, whole.cwd, whole.additional_directories) == (entries[5].id, "/other", ("/more",))
    assert (whole.forked_from, again.forked_from, whole.config) == ("s1", "f1", {"effort": "low"})
    assert (whole.entries, whole.tokens_in, whole.permissions) == (0, 0, ())
    assert ids(await history(store, "f1")) == ids(entries)
    assert ids(await history(store, "f2")) == ids(entries[:3])
    assert row_ids((await store.sessions()).rows) == ["s1", "f3", "f1", "f2"]


async def test_forks_go_their_own_ways(store: Store) -> None:
    await store.create_session(new_session())
    entries = await converse(store, "s1", "one")
    await store.fork_session("s1", "f1", entry=None, cwd="/repo", additional_directories=())
    mine, theirs = await converse(store, "s1", "mine"), await converse(store, "f1", "theirs")
    assert ids(await history(store, "s1")) == ids([*entries, *mine])
    assert ids(await history(store, "f1")) == ids([*entries, *theirs])
    assert (await store.outline("f1")).tips == (BranchTip(entry=theirs[2].id, point=theirs[0].id, is_current=True),)


async def test_a_fork_of_an_entry_of_another_conversation_is_refused(store: Store) -> None:
    await store.create_session(new_session())
    await store.create_session(new_session("s2"))
    (entry, *_) = await converse(store, "s2", "one")
    with pytest.raises(ArgumentError, match=rf"Entry {entry.id} is not in conversation"):
        await store.fork_session("s1", "f1", entry=entry.id, cwd="/repo", additional_directories=())
    with pytest.raises(NoSuchSession):
        await store.fork_session("s3", "f1", entry=None, cwd="/repo", additional_directories=())


async def test_a_fork_outlives_the_session_it_came_from(store: Store) -> None:
    await store.create_session(new_session())
    await converse(store, "s1", "one")
    before = await bodies(store, "s1")
    await store.fork_session("s1", "f1", entry=None, cwd="/repo", additional_directories=())
    await store.delete_session("s1")
    await store.tidy()
    assert await bodies(store, "f1") == before


# aliases


async def test_an_alias_names_one_session_and_moves_in_one_step(stores: Stores) -> None:
    store, other = await stores.open(), await stores.open()
    made = await store.create_session(new_session(alias="discord:channel:1"))
    assert await other.session_by_alias("discord:channel:1") == made
    assert await other.session_by_alias("discord:channel:2") is None
    with pytest.raises(ArgumentError, match='Alias "discord:channel:1" belongs to session s1'):
        await other.create_session(new_session("s2", alias="discord:channel:1"))
    await store.create_session(new_session("s2"))
    await store.move_alias("s1", "s2")
    assert [(await other.session(one)).alias for one in ("s1", "s2")] == [None, "discord:channel:1"]
    with pytest.raises(ArgumentError, match="Session s1 has no alias any more"):
        await store.move_alias("s1", "s2")


async def test_a_deleted_session_gives_its_alias_free(store: Store) -> None:
    await store.create_session(new_session(alias="cli:default"))
    await store.delete_session("s1")
    assert await store.session_by_alias("cli:default") is None
    assert (await store.create_session(new_session("s2", alias="cli:default"))).alias == "cli:default"
