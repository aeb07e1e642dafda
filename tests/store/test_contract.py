"""The contract of `Store`: sessions, paths, turns, repair, search, deletion. Runs with both journal modes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import anyio
import pytest

from crow.adapters import open_admin
from crow.domain.entries import Assistant, Checkpoint, Note, Prompt, Remark, Restore, TurnEnd, User
from crow.domain.entries import NewEntry as New
from crow.domain.errors import ArgumentError, LeafMoved, NoSuchSession, SessionBusy, StoreUnavailable
from crow.domain.messages import Image, Link, Resource, Text, ToolSpec, Usage
from crow.store import QueuedPrompt, SessionChanges, SessionRow, Store, Tail, TurnStart
from crow.store.owner import readable
from crow.store.principals import PrincipalStore
from tests.store.conftest import AnyStores
from tests.store.scenes import add, begin, bodies, converse, history, ids, new_session, result, row_ids, said

PROMPT = Prompt(
    system="You are crow.",
    tools=(ToolSpec(name="t", description="d", input_schema={"type": "object"}),),
    cwd="/",
    model="m",
)


def checkpoint(first_kept: int | None) -> Checkpoint:
    return Checkpoint(compaction_id="c", summary="so far", first_kept=first_kept)


# sessions


async def test_a_created_session_is_read_back_as_returned_and_another_store_sees_it(stores: AnyStores) -> None:
    store, other = await stores.open(), await stores.open()
    await store.create_session(new_session("p"))
    made = await store.create_session(
        new_session(additional_directories=("/a", "/b"), config={"effort": "high"}, title="T", parent_id="p")
    )
    assert made == replace(
        SessionRow(id="s1", conversation=made.conversation, leaf=None, cwd="/repo", model="m1", mode="ask"),
        additional_directories=("/a", "/b"),
        config={"effort": "high"},
        title="T",
        parent_id="p",
        created_ms=made.created_ms,
        updated_ms=made.updated_ms,
    )
    assert made.created_ms > 1_700_000_000_000
    assert await other.session("s1") == made
    assert await other.open_session("s1") == Tail(row=made, entries=())


async def test_an_id_is_never_used_twice_even_after_deletion(store: Store) -> None:
    await store.create_session(new_session())
    with pytest.raises(ArgumentError, match="s1 is taken"):
        await store.create_session(new_session())
    await store.delete_session("s1")
    with pytest.raises(ArgumentError, match="s1 is taken"):
        await store.create_session(new_session())


async def test_every_method_that_names_a_session_says_when_there_is_none(store: Store) -> None:
    attempts: list[Callable[[], Awaitable[object]]] = [
        lambda: store.session("gone"),
        lambda: store.update_session("gone", SessionChanges(title="x")),
        lambda: store.open_session("gone"),
        lambda: store.tail("gone"),
        lambda: history(store, "gone"),
        lambda: store.enqueue("gone", (), "m"),
        lambda: store.queued("gone"),
        lambda: store.unstored_end("gone"),
        lambda: store.take_turn("gone", "u", leaf=None),
        lambda: store.append("gone", leaf=None, turn=0, entries=[]),
        lambda: store.move_leaf("gone", leaf=None, to=None, reason="undo"),
        lambda: store.save_draft("gone", after_leaf=None, turn=1, message_id="m", text="x", thought=""),
        lambda: store.search("word", session_id="gone"),
        lambda: store.session("lone \ud800 surrogate"),
    ]
    for attempt in attempts:
        with pytest.raises(NoSuchSession):
            await attempt()
    await store.delete_session("gone")
    await store.drop_prompt("gone", "u")
    assert await store.entry(1) is None
    assert await store.entry(10**30) is None


async def test_changes_touch_the_named_columns_and_no_other(store: Store) -> None:
    before = await store.create_session(new_session(title="old"))
    changes = SessionChanges(
        title=None,
        title_by_user=True,
        model="m2",
        mode="auto",
        cwd="/elsewhere",
        additional_directories=("/x",),
        permissions=({"tool": "shell", "argument": "ls"},),
        config={"a": [1, None]},
        metadata={"b": {"c": 1.5}},
        calibration=1.25,
        alias="home",
        archived=True,
    )
    after = await store.update_session("s1", changes)
    assert after == replace(before, **changes, updated_ms=after.updated_ms)
    assert await store.update_session("s1", SessionChanges()) == after


async def test_a_change_of_the_configuration_sets_and_removes_only_its_own_keys(store: Store) -> None:
    await store.create_session(new_session(config={"a": 1, "b": 2, "c": {"x": 1}}))
    row = await store.update_session("s1", SessionChanges(config={"b": None, "c": {"y": 2}, "gone": None}))
    assert row.config == {"a": 1, "c": {"y": 2}}
    await store.append("s1", leaf=None, turn=1, entries=[New(body=said("x"))], changes=SessionChanges(config={"d": 4}))
    row = await store.session("s1")
    assert row.config == {"a": 1, "c": {"y": 2}, "d": 4}
    assert (await store.update_session("s1", SessionChanges(config={}, mode="plan"))).config == row.config


async def test_a_title_by_the_user_is_only_replaced_by_another_one(store: Store) -> None:
    await store.create_session(new_session(title="T"))
    assert (await store.update_session("s1", SessionChanges(title="made"))).title == "made"
    await store.update_session("s1", SessionChanges(title="mine", title_by_user=True))
    assert (await store.update_session("s1", SessionChanges(title="made", mode="plan"))).title == "mine"
    assert (await store.session("s1")).mode == "plan"
    assert (await store.update_session("s1", SessionChanges(title="other", title_by_user=True))).title == "other"


async def test_an_alias_is_of_one_session_and_free_after_deletion(store: Store) -> None:
    for name in ("s1", "s2"):
        await store.create_session(new_session(name))
    await store.update_session("s1", SessionChanges(alias="home"))
    with pytest.raises(ArgumentError, match='Alias "home" belongs to session s1'):
        await store.update_session("s2", SessionChanges(alias="home"))
    await store.delete_session("s1")
    assert (await store.update_session("s2", SessionChanges(alias="home"))).alias == "home"


# lists


async def test_only_sessions_with_a_prompt_are_listed_newest_entry_first(store: Store) -> None:
    for name in ("empty", "old", "new"):
        await store.create_session(new_session(name))
    await store.create_session(new_session("sub", parent_id="old"))
    for name in ("new", "old", "sub"):
        await converse(store, name, "hello")
    await converse(store, "new", "again")
    page = await store.sessions()
    assert row_ids(page.rows) == ["new", "old"]
    assert page.cursor is None
    assert page.rows[0] == await store.session("new")


async def test_lists_filter_by_directory_and_archive_and_go_on_after_a_cursor(store: Store) -> None:
    for index in range(5):
        await store.create_session(new_session(f"s{index}", cwd="/a" if index % 2 else "/b"))
        await converse(store, f"s{index}", "hello")
    await store.update_session("s4", SessionChanges(archived=True))
    assert row_ids((await store.sessions(cwd="/a")).rows) == ["s3", "s1"]
    assert row_ids((await store.sessions(archived=True)).rows) == ["s4"]
    first = await store.sessions(limit=2)
    await converse(store, "s3", "newer entries do not disturb the walk")
    second = await store.sessions(limit=2, cursor=first.cursor)
    assert (row_ids(first.rows), row_ids(second.rows), second.cursor) == (["s3", "s2"], ["s1", "s0"], None)


async def test_a_cursor_that_no_list_gave_is_refused(store: Store) -> None:
    refused: list[str] = []
    for cursor in ("", "nonsense", "é", "MTI=", "LTU6czE=", "\ud800"):
        try:
            await store.sessions(cursor=cursor)
        except ArgumentError as error:
            refused.append(str(error).partition(" is ")[0])
        else:
            refused.append(f"{cursor!r} was accepted")
    assert refused == ["cursor"] * 6


# appending


async def test_appended_entries_form_a_chain_and_are_read_back_as_returned(store: Store) -> None:
    row = await store.create_session(new_session())
    first = await begin(store, "s1", "hi")
    stored = await store.append(
        "s1",
        leaf=first.id,
        turn=first.turn,
        entries=[
            New(
                body=said("yes", calls=1),
                model="m9",
                usage=Usage(
                    input_tokens=10,
                    output_tokens=4,
                    cached_tokens=6,
                    reasoning_tokens=1,
                    cache_write_tokens=2,
                    is_output_estimated=True,
                ),
                cost=0.25,
                estimate=99,
            ),
            New(body=TurnEnd(stop="end_turn")),
        ],
        release=True,
        changes=SessionChanges(title="Greeting"),
    )
    assert [entry.parent for entry in (first, *stored)] == [None, first.id, stored[0].id]
    assert {(entry.conversation, entry.session, entry.turn) for entry in (first, *stored)} == {
        (row.conversation, "s1", 1)
    }
    assert await history(store, "s1") == (first, *stored)
    assert [await store.entry(entry.id) for entry in stored] == list(stored)
    after = await store.session("s1")
    assert after == replace(
        row,
        leaf=stored[-1].id,
        title="Greeting",
        entries=3,
        tokens_in=10,
        tokens_out=4,
        tokens_cached=6,
        cost=0.25,
        newest_entry=stored[-1].id,
        has_prompt=True,
        updated_ms=after.updated_ms,
    )


async def test_an_append_under_another_leaf_writes_nothing(stores: AnyStores) -> None:
    store, other = await stores.open(), await stores.open()
    await store.create_session(new_session())
    (note,) = await add(store, "s1", Note(about="mode", value="auto"))
    for leaf in (None, note.id + 1):
        with pytest.raises(LeafMoved, match=f"its leaf is entry {note.id}, not {leaf}"):
            await other.append(
                "s1", leaf=leaf, turn=0, entries=[New(body=said("lost"))], changes=SessionChanges(mode="x")
            )
        with pytest.raises(LeafMoved):
            await other.move_leaf("s1", leaf=leaf, to=None, reason="undo")
    assert await history(store, "s1") == (note,)
    assert (await store.session("s1")).mode == "ask"


async def test_a_refused_change_takes_the_append_with_it(store: Store) -> None:
    for name in ("s1", "s2"):
        await store.create_session(new_session(name))
    await store.update_session("s1", SessionChanges(alias="taken"))
    with pytest.raises(ArgumentError):
        await store.append(
            "s2", leaf=None, turn=0, entries=[New(body=said("x"))], changes=SessionChanges(alias="taken")
        )
    assert await store.open_session("s2") == Tail(row=await store.session("s2"), entries=())
    assert (await store.session("s2")).leaf is None


async def test_usage_that_no_column_holds_is_fitted_and_unknown_usage_stays_unknown(store: Store) -> None:
    await store.create_session(new_session())
    stored = await store.append(
        "s1",
        leaf=None,
        turn=0,
        entries=[New(body=said("a"), usage=Usage(input_tokens=10**30)), New(body=said("b"), usage=Usage())],
    )
    assert [entry.usage for entry in stored] == [Usage(input_tokens=2**63 - 1), None]
    assert await history(store, "s1") == stored


async def test_counts_whose_sum_no_column_holds_are_stored_all_the_same(store: Store) -> None:
    await store.create_session(new_session())
    huge = New(body=said("Hi"), usage=Usage(input_tokens=2**63 - 1, output_tokens=2**62, cached_tokens=2**63 - 1))
    stored = await store.append("s1", leaf=None, turn=1, entries=[huge, huge])
    assert [entry.usage for entry in stored] == [huge.usage, huge.usage]
    await store.append("s1", leaf=stored[-1].id, turn=1, entries=[huge])
    assert (await store.session("s1")).leaf == (await history(store, "s1"))[-1].id


async def test_any_text_can_be_stored_and_what_append_returns_is_what_is_read(store: Store) -> None:
    await store.create_session(new_session())
    odd = "NUL \0, lone \ud800 and \udc00, pair \U0001f600, 漢字, \u2028"
    parts = (
        Text(text=odd),
        Image(data="aGVsbG8=", mime_type="image/png", uri="file:///a.png"),
        Image(data="not base64!", mime_type="image/png"),
        Resource(uri="file:///b", text="b" * 40_000, mime_type="text/plain"),
        Link(uri="file:///c", name=odd),
    )
    mended = odd.replace("\ud800", "\ufffd").replace("\udc00", "\ufffd")
    expected = (Text(text=mended), *parts[1:4], Link(uri="file:///c", name=mended))
    await store.enqueue("s1", parts, "u1")
    assert await store.queued("s1") == (QueuedPrompt(parts=expected, message_id="u1"),)
    start = await store.take_turn("s1", "u1", leaf=None, cut=7)
    assert start.entries[-1].body == User(parts=expected, message_id="u1", cut=7)
    stored = await add(store, "s1", PROMPT, replace(said(odd), opaque={"score": float("nan"), odd: [odd]}))
    assert stored[1].body == replace(
        said(odd), text=mended, message_id=f"a-{mended}", opaque={"score": None, mended: [mended]}
    )
    assert await history(store, "s1") == (*start.entries, *stored)


# turns


async def test_a_prompt_waits_until_its_turn_is_taken(store: Store) -> None:
    await store.create_session(new_session())
    await store.enqueue("s1", (Text(text="one"),), "u1")
    await store.enqueue("s1", (Text(text="two"),), "u2")
    start = await store.take_turn("s1", "u1", leaf=None)
    assert [(entry.body, entry.turn) for entry in start.entries] == [
        (User(parts=(Text(text="one"),), message_id="u1"), 1)
    ]
    assert (start.turn, start.moved) == (1, False)
    row = await store.session("s1")
    assert (row.state, row.has_prompt, row.owner) == ("running", True, row.owner)
    assert row.owner.startswith("process ")
    assert await store.queued("s1") == (QueuedPrompt(parts=(Text(text="two"),), message_id="u2"),)
    await add(store, "s1", TurnEnd(stop="end_turn"), release=True)
    row = await store.session("s1")
    assert (row.state, row.owner) == ("idle", "")
    await store.drop_prompt("s1", "u2")
    assert await store.queued("s1") == ()
    with pytest.raises(ArgumentError, match="Prompt u2 is no longer queued"):
        await store.take_turn("s1", "u2", leaf=row.leaf)
    assert await store.session("s1") == row


async def test_a_command_takes_a_turn_without_an_entry(store: Store) -> None:
    await store.create_session(new_session())
    start = await store.take_turn("s1", None, leaf=None)
    assert (start.turn, start.entries, start.moved) == (1, (), False)
    assert (await store.session("s1")).state == "running"
    await store.append("s1", leaf=None, turn=1, entries=[], release=True)
    assert (await store.session("s1")).state == "idle"


async def test_one_turn_at_a_time_here_and_elsewhere(stores: AnyStores) -> None:
    store, other = await stores.open(), await stores.open()
    await store.create_session(new_session())
    user = await begin(store, "s1", "hi")
    for someone in (store, other):
        await someone.enqueue("s1", (Text(text="too"),), "u2")
        with pytest.raises(SessionBusy, match=r"busy: process \d+ on .+ is running a turn"):
            await someone.take_turn("s1", "u2", leaf=user.id)
        assert [prompt.message_id for prompt in await someone.queued("s1")] == ["u2"]
        await someone.drop_prompt("s1", "u2")
    with pytest.raises(SessionBusy):
        await other.append("s1", leaf=user.id, turn=1, entries=[New(body=said("x"))])
    assert ids((await other.open_session("s1")).entries) == [user.id]


async def test_a_turn_taken_after_others_wrote_says_that_the_leaf_moved(stores: AnyStores) -> None:
    store, other = await stores.open(), await stores.open()
    await store.create_session(new_session())
    entries = await converse(other, "s1", "from elsewhere")
    await store.enqueue("s1", (Text(text="mine"),), "u")
    start = await store.take_turn("s1", "u", leaf=None)
    assert (start.moved, start.turn, start.entries[-1].parent) == (True, 2, entries[-1].id)


# repair


async def test_a_turn_whose_owner_died_is_closed_once_with_what_was_shown(stores: AnyStores) -> None:
    dead = await stores.open()
    await dead.create_session(new_session())
    user = await begin(dead, "s1", "hi")
    for text, thought in (("Hel", "hm"), ("lo", "")):
        await dead.save_draft("s1", after_leaf=user.id, turn=1, message_id="a1", text=text, thought=thought)
    await dead.enqueue("s1", (Text(text="next"),), "u2")
    await dead.close()

    store, other = await stores.open(), await stores.open()
    before = await store.tail("s1")
    unstored = await store.unstored_end("s1")
    assert await store.tail("s1") == before
    reported: list[str] = []
    store.on_stored = reported.append
    tail = await store.open_session("s1")
    assert reported == ["s1"]
    crow = readable(dead.owner)
    kept = [(entry.turn, entry.body, entry.model, entry.usage) for entry in tail.entries[1:]]
    assert [(entry.turn, entry.body, entry.model, entry.usage) for entry in unstored] == kept
    assert [entry.parent for entry in unstored] == [user.id, *(entry.id for entry in unstored[:-1])]
    assert await store.unstored_end("s1") == ()
    assert [(entry.turn, entry.body) for entry in tail.entries[1:]] == [
        (1, Assistant(text="Hello", thought="hm", message_id="a1", finish="interrupted")),
        (1, TurnEnd(stop="interrupted", detail=f"{crow} ended in the middle of this turn")),
        (2, User(parts=(Text(text="next"),), message_id="u2")),
        (2, TurnEnd(stop="interrupted", detail=f"{crow} ended before it ran this prompt")),
    ]
    assert (tail.row.state, tail.row.owner, tail.row.leaf) == ("idle", "", tail.entries[-1].id)
    assert await other.open_session("s1") == await store.open_session("s1") == tail
    assert await store.queued("s1") == ()


async def test_a_result_that_is_stored_after_its_turn_was_given_up_has_its_size(store: Store) -> None:
    await store.create_session(new_session())
    user = await begin(store, "s1", "hi")
    entries = [New(body=result(user.id, "long " * 100)), New(body=TurnEnd(stop="cancelled"))]
    store.disown("s1", leaf=user.id, turn=1, end=entries)
    _, stored, end = (await store.open_session("s1")).entries
    assert [stored.body, end.body] == [entry.body for entry in entries]
    assert stored.estimate is not None
    assert stored.estimate > 100


async def test_a_session_that_is_opened_during_a_claim_does_not_end_the_claimed_turn(store: Store) -> None:
    """Though the end of the turn before it was not stored yet."""
    await store.create_session(new_session())
    user = await begin(store, "s1", "first")
    claimed: list[TurnStart] = []

    async def claim(leaf: int) -> None:
        claimed.append(await store.take_turn("s1", f"u{leaf}", leaf=leaf, parts=(Text(text="next"),)))

    for _ in range(20):
        store.disown("s1", leaf=user.id, turn=user.turn, end=[New(body=TurnEnd(stop="cancelled"))])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(claim, user.id)
            for _ in range(4):
                tasks.start_soon(store.open_session, "s1")
        user = claimed[-1].entries[-1]
        await store.save_draft("s1", after_leaf=user.id, turn=user.turn, message_id="m", text="so far", thought="")
        assert (await store.open_session("s1")).row.leaf == user.id
    assert [type(body) for body in await bodies(store, "s1")] == [*[User, TurnEnd] * 20, User]


async def test_a_dead_turn_is_repaired_by_the_claim_of_the_next(stores: AnyStores) -> None:
    dead = await stores.open()
    await dead.create_session(new_session())
    user = await begin(dead, "s1", "hi")
    await dead.close()
    store = await stores.open()
    assert (await store.tail("s1")).row.state == "running"
    with pytest.raises(LeafMoved, match="Load it again"):
        await store.append("s1", leaf=user.id, turn=1, entries=[New(body=said("x"))])
    await store.enqueue("s1", (Text(text="more"),), "u2")
    start = await store.take_turn("s1", "u2", leaf=user.id)
    assert [(type(entry.body), entry.turn, entry.parent) for entry in start.entries] == [
        (TurnEnd, 1, user.id),
        (User, 2, start.entries[0].id),
    ]
    assert (start.turn, start.moved) == (2, False)


@pytest.mark.parametrize("claim", [False, True])
async def test_a_prompt_left_between_arrival_and_turn_is_kept_but_never_run(stores: AnyStores, claim: bool) -> None:
    dead = await stores.open()
    await dead.create_session(new_session())
    await dead.enqueue("s1", (Text(text="hi"),), "u1")
    await dead.close()
    store = await stores.open()
    if claim:
        await store.take_turn("s1", None, leaf=None)
    else:
        await store.open_session("s1")
    kept = await bodies(store, "s1")
    assert kept[0] == User(parts=(Text(text="hi"),), message_id="u1")
    assert [(type(body), getattr(body, "stop", None)) for body in kept] == [(User, None), (TurnEnd, "interrupted")]
    assert await store.queued("s1") == ()
    assert (await store.session("s1")).has_prompt


async def test_a_prompt_of_the_living_is_not_repaired_away(stores: AnyStores) -> None:
    store, other = await stores.open(), await stores.open()
    await store.create_session(new_session())
    await store.enqueue("s1", (Text(text="hi"),), "u1")
    assert (await other.open_session("s1")).entries == ()
    assert [prompt.message_id for prompt in await other.queued("s1")] == ["u1"]
    await begin(store, "s1", "now")
    assert await other.unstored_end("s1") == ()


async def test_only_the_newest_draft_at_the_leaf_becomes_an_answer(stores: AnyStores) -> None:
    dead = await stores.open()
    await dead.create_session(new_session())
    user = await begin(dead, "s1", "hi")
    await dead.save_draft("s1", after_leaf=user.id, turn=1, message_id="a1", text="broken off", thought="")
    await dead.save_draft("s1", after_leaf=user.id, turn=1, message_id="a2", text="asked ", thought="")
    (note,) = await add(dead, "s1", Note(about="mode", value="auto"))
    await dead.save_draft("s1", after_leaf=note.id, turn=1, message_id="a2", text="again", thought="")
    await dead.close()
    store = await stores.open()
    repaired = (await store.open_session("s1")).entries[2]
    assert repaired.body == Assistant(text="asked again", message_id="a2", finish="interrupted")


async def test_an_answer_that_a_crash_cut_off_counts_with_estimated_tokens(stores: AnyStores) -> None:
    dead = await stores.open()
    await dead.create_session(new_session())
    user = await begin(dead, "s1", "hi")
    before = New(body=said("I look.", calls=1), model="m1", usage=Usage(input_tokens=100, output_tokens=20))
    (first,) = await dead.append("s1", leaf=user.id, turn=1, entries=[before])
    await dead.save_draft("s1", after_leaf=first.id, turn=1, message_id="a2", text="x" * 40, thought="")
    await dead.close()
    store = await stores.open()
    tail = await store.open_session("s1")
    cut_off = tail.entries[2]
    estimate = Usage(input_tokens=120, output_tokens=10, is_input_estimated=True, is_output_estimated=True)
    assert (cut_off.model, cut_off.usage) == ("m1", estimate)
    assert (tail.row.tokens_in, tail.row.tokens_out) == (220, 30)
    (total,) = await store.usage_by_model("s1")
    assert (total.requests, total.estimated) == (2, 1)


async def test_a_stored_answer_is_not_repeated_from_its_draft(stores: AnyStores) -> None:
    dead = await stores.open()
    await dead.create_session(new_session())
    user = await begin(dead, "s1", "hi")
    await dead.save_draft("s1", after_leaf=user.id, turn=1, message_id="a1", text="yes", thought="")
    await add(dead, "s1", said("yes"), TurnEnd(stop="end_turn"))
    await dead.close()
    store = await stores.open()
    await store.open_session("s1")
    assert [type(body) for body in await bodies(store, "s1")] == [User, Assistant, TurnEnd]
    assert (await store.session("s1")).state == "idle"


# paths


async def test_the_tail_starts_at_what_the_newest_counting_checkpoint_keeps(store: Store) -> None:
    await store.create_session(new_session())
    prompt, *_ = await add(store, "s1", PROMPT)
    first = await converse(store, "s1", "one", "two")
    (old,) = await add(store, "s1", checkpoint(first[2].id))
    second = await converse(store, "s1", "three", "four")
    (new,) = await add(store, "s1", checkpoint(second[3].id))
    third = await converse(store, "s1", "five")
    tail = await store.tail("s1")
    assert ids(tail.entries) == ids((prompt, *second[3:], new, *third))
    (restore,) = await add(store, "s1", Restore(entry=new.id))
    assert ids((await store.tail("s1")).entries) == ids((prompt, *first[2:], old, *second, new, *third, restore))
    await add(store, "s1", Restore(entry=old.id))
    assert (await store.tail("s1")).entries == await history(store, "s1")
    (bare,) = await add(store, "s1", checkpoint(None))
    (fresh,) = await add(store, "s1", PROMPT)
    assert ids((await store.tail("s1")).entries) == [bare.id, fresh.id]


async def test_long_paths_come_whole_in_order_and_in_batches(store: Store) -> None:
    await store.create_session(new_session())
    (prompt,) = await add(store, "s1", PROMPT)
    many = await add(store, "s1", *(said(f"step {index}") for index in range(700)))
    (kept,) = await add(store, "s1", checkpoint(many[300].id))
    assert ids((await store.tail("s1")).entries) == ids((prompt, *many[300:], kept))
    batches = [batch async for batch in store.history("s1")]
    assert ids([entry for batch in batches for entry in batch]) == ids((prompt, *many, kept))
    assert max(len(batch) for batch in batches) <= 500


@pytest.mark.long
async def test_large_entries_make_small_batches(store: Store) -> None:
    await store.create_session(new_session())
    (asked,) = await add(store, "s1", said("look", calls=6))
    large = await add(store, "s1", *(result(asked.id, "x" * 2_000_000, index=index) for index in range(6)))
    batches = [ids(batch) async for batch in store.history("s1")]
    assert [entry for batch in batches for entry in batch] == ids((asked, *large))
    assert len(batches) >= 2


async def test_a_moved_leaf_leaves_the_branch_and_the_next_entry_grows_beside_it(store: Store) -> None:
    await store.create_session(new_session())
    entries = await converse(store, "s1", "one", "two")
    await store.move_leaf("s1", leaf=entries[-1].id, to=entries[2].id, reason="undo")
    assert ids(await history(store, "s1")) == ids(entries[:3])
    (other,) = await add(store, "s1", said("elsewhere"))
    assert ids((await store.tail("s1")).entries) == ids((*entries[:3], other))
    assert await store.entry(entries[-1].id) == entries[-1]
    await store.move_leaf("s1", leaf=other.id, to=None, reason="undo")
    assert await history(store, "s1") == ()
    await store.create_session(new_session("s2"))
    with pytest.raises(ArgumentError, match=f"Entry {other.id} is not in the conversation of session s2"):
        await store.move_leaf("s2", leaf=None, to=other.id, reason="rewind")


async def test_a_fork_shares_entries_and_both_grow_apart(store: Store) -> None:
    source = await store.create_session(new_session())
    entries = await converse(store, "s1", "one", "two")
    fork = await store.create_session(
        new_session("f1", conversation=source.conversation, leaf=entries[2].id, forked_from="s1", title="T (fork 1)")
    )
    assert (fork.conversation, fork.leaf, fork.forked_from, fork.has_prompt) == (
        source.conversation,
        entries[2].id,
        "s1",
        True,
    )
    more = await converse(store, "f1", "three")
    assert more[0].turn == 2
    assert ids(await history(store, "f1")) == ids((*entries[:3], *more))
    assert ids(await history(store, "s1")) == ids(entries)
    assert row_ids((await store.sessions()).rows) == ["f1", "s1"]
    await store.create_session(new_session("s2"))
    with pytest.raises(ArgumentError, match=f"Entry {entries[0].id} is not in conversation"):
        await store.create_session(
            new_session("f2", conversation=(await store.session("s2")).conversation, leaf=entries[0].id)
        )


# search


async def test_search_finds_words_of_users_the_model_and_titles_in_any_script(store: Store) -> None:
    for name in ("s1", "s2"):
        await store.create_session(new_session(name))
    one = await converse(store, "s1", 'Straße "quoted" AND (braces) 漢字かな')
    two = await converse(store, "s2", "the quoted word")
    await store.update_session("s2", SessionChanges(title="Quoted things"))
    found = await store.search("QUOTED")
    assert [(hit.session, hit.kind, hit.entry) for hit in found] == [
        ("s2", "title", two[-1].id),
        ("s2", "assistant", two[1].id),
        ("s2", "user", two[0].id),
        ("s1", "assistant", one[1].id),
        ("s1", "user", one[0].id),
    ]
    assert found[2].snippet == "the quoted word"
    assert [hit.entry for hit in await store.search("quoted", limit=2)] == [two[-1].id, two[1].id]
    for query in ('"quoted"', "AND (braces)", "漢字かな", "漢字", "straße", "字 quo"):
        assert [hit.entry for hit in await store.search(query, session_id="s1")][-1:] == [one[0].id], query
    for query in ("", "   ", "absent", "zz", 'quoted" OR "absent', "NEAR(quoted)", "\0", "lone \ud800"):
        assert await store.search(query, session_id="s1") == (), query


async def test_search_in_a_session_sees_its_path_alone(store: Store) -> None:
    source = await store.create_session(new_session())
    entries = await converse(store, "s1", "needle one", "needle two")
    await store.create_session(new_session("f1", conversation=source.conversation, leaf=entries[2].id))
    assert [hit.entry for hit in await store.search("needle", session_id="f1")] == [entries[1].id, entries[0].id]
    assert [hit.entry for hit in await store.search("ne", session_id="f1")] == [entries[1].id, entries[0].id]
    assert len(await store.search("needle", session_id="s1")) == len(await store.search("needle")) == 4


async def test_a_title_is_found_under_its_newest_name_only(store: Store) -> None:
    await store.create_session(new_session(title="walrus"))
    await store.update_session("s1", SessionChanges(title="giraffe"))
    assert [hit.kind for hit in await store.search("giraffe")] == ["title"]
    assert await store.search("walrus") == ()
    await store.update_session("s1", SessionChanges(title=None))
    assert await store.search("giraffe") == ()


async def test_a_snippet_shows_the_place_in_a_long_text(store: Store) -> None:
    await store.create_session(new_session())
    await add(store, "s1", said("before " * 200 + "NEEDLE" + " after" * 200))
    (hit,) = await store.search("needle")
    assert hit.snippet.startswith("…")
    assert hit.snippet.endswith("…")
    assert "before NEEDLE after" in hit.snippet
    assert len(hit.snippet) < 200


async def test_texts_of_any_length_are_searched(store: Store) -> None:
    await store.create_session(new_session())
    (entry,) = await add(store, "s1", said("hay " * 20_000 + "needle"))
    assert [hit.entry for hit in await store.search("needle")] == [entry.id]


# endpoints


async def test_facts_about_an_endpoint_are_merged(store: Store) -> None:
    assert await store.learned("http://x/v1", "m") == {}
    await store.learn("http://x/v1", "m", {"window": 8000, "refused": ["seed"]})
    await store.learn("http://x/v1", "m", {"window": 4000})
    assert await store.learned("http://x/v1", "m") == {"window": 4000, "refused": ["seed"]}
    assert await store.learned("http://x/v1", "other") == {}


async def test_what_another_process_learned_is_known_at_once(stores: AnyStores) -> None:
    store, other = await stores.open(), await stores.open()
    assert await store.learned("http://x/v1", "m") == {}
    await other.learn("http://x/v1", "m", {"window": 4000})
    assert await store.learned("http://x/v1", "m") == {"window": 4000}


# deletion


async def test_a_deleted_session_is_gone_at_once_with_its_subagents(store: Store) -> None:
    await store.create_session(new_session(title="needle"))
    await store.create_session(new_session("sub", parent_id="s1"))
    for name in ("s1", "sub"):
        await converse(store, name, "needle")
    await store.delete_session("s1")
    assert (await store.sessions()).rows == ()
    assert await store.search("needle") == ()
    assert await store.search("ne") == ()
    for name in ("s1", "sub"):
        with pytest.raises(NoSuchSession):
            await store.session(name)
    await store.delete_session("s1")
    await store.tidy()


async def test_a_deleted_session_gets_no_subagents_any_more(store: Store) -> None:
    await store.create_session(new_session())
    await begin(store, "s1", "start a subagent")
    await store.delete_session("s1")
    for parent in ("s1", "unknown"):
        with pytest.raises(NoSuchSession) as refused:
            await store.create_session(new_session("sub", parent_id=parent))
        assert refused.value.session_id == parent
        with pytest.raises(NoSuchSession):
            await store.session("sub")


async def test_tidying_keeps_what_a_living_fork_needs_and_nothing_else(store: Store) -> None:
    source = await store.create_session(new_session())
    entries = await converse(store, "s1", "shared needle", "private needle")
    await store.create_session(new_session("f1", conversation=source.conversation, leaf=entries[2].id))
    own = await converse(store, "f1", "forked")
    await store.move_leaf("f1", leaf=own[-1].id, to=entries[1].id, reason="undo")
    await store.delete_session("s1")
    assert [(hit.entry, hit.session) for hit in await store.search("needle")] == [
        (entries[1].id, "f1"),
        (entries[0].id, "f1"),
    ]
    await store.tidy()
    alive = [*entries[:3], *own]
    assert [entry.id for entry in [*entries, *own] if await store.entry(entry.id)] == ids(alive)
    assert ids(await history(store, "f1")) == ids(entries[:2])
    assert [hit.entry for hit in await store.search("needle")] == [entries[1].id, entries[0].id]
    await store.delete_session("f1")
    await store.tidy()
    assert [entry.id for entry in alive if await store.entry(entry.id)] == []
    assert await store.search("needle") == ()


# closing


async def test_a_closed_store_says_so_and_closes_again_in_silence(stores: AnyStores) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    await store.session("s1")
    await store.close()
    await store.close()
    with pytest.raises(StoreUnavailable, match="is closed"):
        await store.session("s1")
    with pytest.raises(StoreUnavailable, match="is closed"):
        await store.create_session(new_session("s2"))


async def test_everything_is_there_after_closing_and_opening(stores: AnyStores) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    await add(store, "s1", PROMPT, Remark(text="hi", message_id="r"))
    entries = await converse(store, "s1", "one")
    before = await store.tail("s1")
    await store.close()
    again = await stores.open()
    assert await again.open_session("s1") == before
    assert before.entries[2:] == entries


async def test_a_name_finds_a_session_by_its_id_alias_start_of_the_id_or_title(store: Store) -> None:
    for name, title, alias in (
        ("work", "Retry policy", None),
        ("codex-01aa", "work", "review"),
        ("codex-01bb", "Retry policy", "wo"),
        ("review-2", "100% _done_", None),
    ):
        await store.create_session(new_session(name, alias=alias, title=title))
    admin = open_admin(store)
    for name, found in (
        ("work", ["work"]),  # an id comes before the title of another session
        ("wo", ["codex-01bb"]),  # an alias comes before the start of an id
        ("review", ["codex-01aa"]),
        ("rev", ["review-2"]),
        ("100% _done_", ["review-2"]),
        ("codex-01", ["codex-01aa", "codex-01bb"]),
        ("Retry policy", ["codex-01bb", "work"]),
        ("%", []),
        ("_", []),
        ("", []),
        ("\ud800", []),
    ):
        assert sorted(one.id for one in await admin.matches(name)) == found
    assert await admin.find("rev") == "review-2"
    with pytest.raises(ArgumentError, match='"codex-01" may mean 2 sessions: '):
        await admin.find("codex-01")


async def test_directories_are_counted_like_the_sessions_in_lists(stores: AnyStores) -> None:
    store = await stores.open()
    ann, bob = PrincipalStore(store, "ann"), PrincipalStore(store, "bob")
    for name, cwd, owner in (("a1", "/one", ann), ("a2", "/two", ann), ("a3", "/one", ann), ("b1", "/three", bob)):
        await owner.create_session(new_session(name, cwd=cwd))
        await converse(owner, name, "hello")
    await ann.create_session(new_session("empty", cwd="/none"))
    await ann.create_session(new_session("task", cwd="/sub", parent_id="a1"))
    await converse(ann, "task", "work")

    async def counted(place: Store) -> list[tuple[str, int]]:
        return [(one.cwd, one.sessions) for one in await place.directories()]

    assert await counted(store) == [("/three", 1), ("/one", 2), ("/two", 1)]
    assert await counted(bob) == [("/three", 1)]
    await ann.share_session("a2", "bob", "read")
    assert await counted(bob) == [("/three", 1), ("/two", 1)]
    await ann.update_session("a3", SessionChanges(archived=True))
    await ann.delete_session("a2")
    assert await counted(ann) == [("/one", 1)]
    (one,) = await ann.directories(limit=1)
    assert one.updated_ms > 0
