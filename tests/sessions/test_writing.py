"""The Python API for writing sessions, beside other processes too."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import pytest

from crow import Sessions
from crow.domain.entries import Checkpoint, Mask, Note, Restore, TurnEnd, User
from crow.domain.errors import ArgumentError, NoSuchSession, SessionBusy, StoreUnavailable
from crow.sessions import Session
from crow.store import Store
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.store import SqliteStore
from tests.store.conftest import AnyStores, PostgresStores, Stores
from tests.store.scenes import add, begin, converse
from tests.support.postgres import new_database

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"path":"x"}'}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
FOUND = {"role": "tool", "tool_call_id": "c1", "content": "twigs"}
HELLO = {"role": "user", "content": "hello"}
DONE = {"role": "assistant", "content": "done"}

Open: TypeAlias = Callable[[], AbstractAsyncContextManager[Sessions]]


@pytest.fixture(params=["wal", "postgres"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AnyStores]:
    """Stores on a SQLite file and on a PostgreSQL database, in the modes in which crow opens them."""
    async with AsyncExitStack() as opened:
        if request.param == "postgres":
            made: AnyStores = PostgresStores(await opened.enter_async_context(new_database()))
        else:
            made = Stores(tmp_path / "crow.db", "wal")
        opened.push_async_callback(made.close)
        yield made


@pytest.fixture
async def place(stores: AnyStores) -> str:
    await stores.open()
    return str(stores.path) if isinstance(stores, Stores) else stores.url


@pytest.fixture
async def sessions(place: str) -> AsyncIterator[Sessions]:
    async with Sessions.open(place, write=True) as opened:
        yield opened


async def ends(session: Session) -> list[TurnEnd]:
    return [entry.body async for entry in session.entries() if isinstance(entry.body, TurnEnd)]


async def test_a_conversation_comes_back_as_it_was_stored(sessions: Sessions) -> None:
    session = await sessions.create(workspace="/repo", model="m1")
    usage = {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 60}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    system, user = {"role": "system", "content": "You mend."}, {"role": "user", "content": [picture]}
    again = {"role": "user", "content": "and now?"}
    await session.append(system, user, {**ASKED, "usage": usage, "cost": 0.25}, FOUND, DONE, again, DONE)
    assert await session.messages() == [system, user, ASKED, FOUND, DONE, again, DONE]
    assert await session.context() == await session.messages()
    assert await session.messages(last=2) == [again, DONE]
    assert [end.stop for end in await ends(session)] == ["end_turn", "end_turn"]
    (found,) = await sessions.list()
    facts = (found.message_count, found.tokens_in, found.tokens_out, found.tokens_cached, found.cost, found.model)
    assert facts == (5, 100, 5, 60, 0.25, "m1")


async def test_a_turn_holds_the_session_and_stores_each_message_at_once(sessions: Sessions, stores: AnyStores) -> None:
    session = await sessions.create(alias="work")
    other = await stores.open()
    async with session.turn("hello") as turn:
        (asked,) = await turn.append(ASKED, usage={"prompt_tokens": 7}, model="m9", cost=0.5)
        assert turn.open_calls == ("c1",)
        assert (await other.session(session.id)).leaf == asked == turn.leaf
        with pytest.raises(SessionBusy, match=f"process {os.getpid()} on .* is running a turn"):
            await begin(other, session.id, "me too")
        async with Sessions.open(str(getattr(stores, "path", "")) or stores.url, write=True) as second:  # type: ignore[union-attr]
            same = await second.get("work")
            for refused in (same.append(HELLO), same.label("here"), same.delete()):
                with pytest.raises(SessionBusy, match=f"process {os.getpid()}"):
                    await refused
            await same.set_title("Meanwhile")  # the row belongs to nobody
        await turn.append(FOUND, DONE)
    with pytest.raises(ArgumentError, match="The turn is over"):
        await turn.append(DONE)
    await converse(other, session.id, "next")
    assert [message["content"] for message in await session.messages()] == [
        "",
        *("hello", None, "twigs", "done", "next", "NEXT"),
    ]
    entries = [entry async for entry in session.entries()]
    assert [(entry.model, entry.cost) for entry in entries if entry.id == asked] == [("m9", 0.5)]
    assert (await sessions.get("work")).title == "Meanwhile"


async def test_two_processes_that_append_at_once_never_mix_their_turns(place: str) -> None:
    async with Sessions.open(place, write=True) as one, Sessions.open(place, write=True) as two:
        name = (await one.create(alias="shared")).id

        async def write(sessions: Sessions, who: str) -> None:
            session = await sessions.get(name)
            for index in range(5):
                while True:
                    try:
                        await session.append({"role": "user", "content": f"{who}{index}"}, ASKED, FOUND, DONE)
                        break
                    except SessionBusy:
                        await asyncio.sleep(0)

        with anyio.fail_after(120):
            await asyncio.gather(write(one, "a"), write(two, "b"))
        messages = (await (await one.get(name)).messages())[1:]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"] * 10
    prompts = [message["content"] for message in messages if message["role"] == "user"]
    assert sorted(prompts) == sorted(f"{who}{index}" for who in "ab" for index in range(5))


async def test_a_cancelled_or_failed_turn_ends_and_keeps_what_was_stored(sessions: Sessions) -> None:
    session = await sessions.create(alias="a")
    stored = asyncio.Event()

    async def work() -> None:
        async with session.turn("hello") as turn:
            await turn.append(ASKED)
            stored.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await stored.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ZeroDivisionError):
        async with session.turn("again"):
            _ = 1 / 0
    assert [(end.stop, end.detail) for end in await ends(session)] == [
        ("cancelled", ""),
        ("error", "ZeroDivisionError"),
    ]
    messages = await session.messages()
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "user"]
    assert "not run" in messages[3]["content"]


async def test_an_append_that_is_cancelled_at_any_moment_leaves_a_session_that_goes_on(sessions: Sessions) -> None:
    for steps in range(0, 36, 3):
        session = await sessions.create(alias=f"after {steps}")
        task = asyncio.create_task(session.append(HELLO, ASKED, FOUND, DONE))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await session.append(HELLO, DONE)
        assert [message["content"] for message in await session.messages()][-2:] == ["hello", "done"], steps
        assert len(await ends(session)) in (1, 2), steps


async def test_a_turn_that_a_scope_of_anyio_cancels_at_any_moment_lets_the_next_one_begin(sessions: Sessions) -> None:
    for steps in range(45):
        session = await sessions.create(alias=f"after {steps}")
        with anyio.CancelScope() as scope:

            async def cancel(steps: int = steps, scope: anyio.CancelScope = scope) -> None:
                for _ in range(steps):
                    await asyncio.sleep(0)
                scope.cancel()

            cancelling = asyncio.create_task(cancel())
            async with session.turn("hello") as turn:
                while True:
                    await turn.append(DONE)
        await cancelling
        await session.append(HELLO, DONE)
        assert [message["content"] for message in await session.messages()][-2:] == ["hello", "done"], steps


async def test_tasks_may_append_the_results_of_their_calls_at_once(sessions: Sessions) -> None:
    session = await sessions.create(alias="a")
    calls = [{**CALL, "id": name} for name in "abc"]
    async with session.turn("hello") as turn:
        await turn.append({**ASKED, "tool_calls": calls})
        await asyncio.gather(*(turn.append({**FOUND, "tool_call_id": name, "content": name}) for name in "cab"))
    assert sorted(message["content"] for message in (await session.messages())[-3:]) == ["a", "b", "c"]


async def test_a_turn_of_a_dead_process_is_ended_by_the_next_one(stores: AnyStores, place: str) -> None:
    dead: Store
    if isinstance(stores, Stores):
        dead = await SqliteStore.open(stores.path, owner="nobody")
    else:
        dead = await PostgresStore.open(stores.url)
    async with Sessions.open(place, write=True) as sessions:
        session = await sessions.create(alias="a")
        await begin(dead, session.id, "unanswered")
        await dead.close()
        async with session.turn("next") as turn:
            await turn.append(DONE)
        assert [end.stop for end in await ends(session)] == ["interrupted", "end_turn"]


BAD: dict[str, tuple[Any, str]] = {
    "no message": ("hi", 'message is "hi"; expected a message such as'),
    "role": ({"role": "robot", "content": "x"}, 'message.role is "robot"; expected system, developer, user'),
    "no content": ({"role": "user"}, "message.content is null; expected text or a list of parts"),
    "blank": ({"role": "user", "content": " \n"}, "message.content is .*; expected at least one visible character"),
    "number": ({"role": "user", "content": 7}, "message.content is 7; expected text"),
    "part": ({"role": "user", "content": [{"type": "audio"}]}, r'message.content\[0\].type is "audio"; expected text'),
    "link": (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]},
        r'message.content\[0\].image_url.url is "https://example.org/a.png"; expected a data: URL',
    ),
    "base64": (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}]},
        "expected valid base64",
    ),
    "empty answer": ({"role": "assistant", "content": ""}, "expected text, or tool_calls beside it"),
    "calls": ({"role": "assistant", "tool_calls": {}}, "message.tool_calls is {}; expected a list"),
    "call type": ({"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}, r'tool_calls\[0\].type is "x"'),
    "call id": ({"role": "assistant", "tool_calls": [{**CALL, "id": ""}]}, r'tool_calls\[0\].id is ""; expected an id'),
    "same id": ({"role": "assistant", "tool_calls": [CALL, CALL]}, r'tool_calls\[1\].id is "c1"; expected an id that'),
    "call name": (
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "rm -rf", "arguments": "{}"}}]},
        r'tool_calls\[0\].function.name is "rm -rf"; expected at most 64 letters',
    ),
    "arguments": (
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "look", "arguments": {}}}]},
        r"tool_calls\[0\].function.arguments is {}; expected JSON as a string",
    ),
    "finish": ({**DONE, "finish_reason": "bored"}, 'message.finish_reason is "bored"; expected stop'),
    "finish type": ({**DONE, "finish_reason": ["stop"]}, r'message.finish_reason is \["stop"\]; expected stop'),
    "usage": ({**DONE, "usage": {"tokens": -1}}, 'message.usage is {"tokens": -1}; expected token counts'),
    "cost": ({**DONE, "cost": float("nan")}, "message.cost is NaN; expected US dollars"),
    "model": ({**DONE, "model": "a\x1b"}, "message.model is .*; expected a name"),
    "tool id": ({"role": "tool", "content": "x"}, "message.tool_call_id is null; expected the id of a call"),
    "unpaired": (FOUND, 'message.tool_call_id is "c1"; expected a call without a result .no call waits for a result'),
    "error flag": ({**FOUND, "is_error": "no"}, 'message.is_error is "no"; expected true or false'),
    "deep": ({"role": "user", "content": json.loads("[" * 900 + "]" * 900)}, "message is nested too deeply"),
    "large": ({"role": "user", "content": "x" * 32_000_001}, "message.content has 32,000,001 characters; at most"),
}


async def test_a_malformed_message_is_refused_by_name_and_nothing_is_stored(sessions: Sessions) -> None:
    session = await sessions.create(alias="a")
    for name, (message, words) in BAD.items():
        with pytest.raises(ArgumentError, match=words):  # the words name the case
            await session.append(message)
        with pytest.raises(ArgumentError, match=words.replace("message", r"messages\[1\]", 1)):
            await session.append(HELLO, message)
        assert (await sessions.get("a")).leaf is None, name


async def test_results_must_answer_the_calls_before_them(sessions: Sessions) -> None:
    session = await sessions.create(alias="a")
    with pytest.raises(ArgumentError, match="results of earlier calls must come before the next message: c1"):
        await session.append(HELLO, ASKED, DONE)
    with pytest.raises(ArgumentError, match=r'messages\[3\].tool_call_id is "c1"; expected a call without a result'):
        await session.append(HELLO, ASKED, FOUND, FOUND)
    async with session.turn(HELLO) as turn:
        await turn.append(ASKED)
        with pytest.raises(ArgumentError, match=r'"c2"; expected a call without a result \(c1\)'):
            await turn.append({**FOUND, "tool_call_id": "c2"})
        with pytest.raises(ArgumentError, match="usage, model and cost belong to an assistant message"):
            await turn.append(FOUND, cost=1.0)
        await turn.append({**FOUND, "is_error": True}, DONE)
    with pytest.raises(ArgumentError, match="prompt has another role"):
        session.turn(DONE)
    assert [message["role"] for message in await session.messages()] == [
        *("system", "user", "assistant", "tool", "assistant")
    ]


async def test_arguments_that_are_no_json_object_do_not_break_later_requests(sessions: Sessions) -> None:
    session = await sessions.create(alias="a")
    call = {**CALL, "function": {"name": "look", "arguments": '{"path": '}}
    await session.append(HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, FOUND, DONE)
    (_, _, asked, *_) = await session.context()
    assert asked["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}


@pytest.mark.long
async def test_huge_and_odd_texts_come_back_whole(sessions: Sessions) -> None:
    session = await sessions.create(alias="a")
    texts = ["x" * 3_000_000, "nul \0 and \x1b[31m", "\u202egnirts 🪺" * 1_000]
    for text in texts:
        await session.append({"role": "user", "content": text}, {"role": "assistant", "content": text})
    assert [message["content"] for message in (await session.messages())[1:]] == [
        one for text in texts for one in [text] * 2
    ]
    await session.append({"role": "user", "content": "half \ud83e"}, DONE)
    assert (await session.messages(last=2))[0]["content"] == "half \ufffd"


async def test_titles_tags_metadata_labels_and_archives(sessions: Sessions) -> None:
    session = await sessions.create(
        title="\x1b]0;owned\x07 Mend\nthe nest", tags=["#Nest"], metadata={"task": {"id": 1}}
    )
    assert (session.title, session.tags) == ("]0;owned Mend the nest", ("nest",))
    await session.append(HELLO, DONE)
    assert (await session.set_title("  Two\twords ")).title == "Two words"
    assert (await session.tag("twigs", "moss")).tags == ("moss", "nest", "twigs")
    assert (await session.untag("nest", "unknown")).tags == ("moss", "twigs")
    changed = await session.merge_metadata({"task": {"id": None, "of": "crow"}})
    assert changed.metadata["task"] == {"of": "crow"}
    assert (await session.archive()).archived
    assert await sessions.list() == ()
    assert [one.id for one in await sessions.list(archived=True)] == [session.id]
    assert not (await session.unarchive()).archived
    label = await session.label("the start")
    (node,) = [node for node in await session.tree() if node.is_leaf]
    assert (node.entry, node.kind, node.text, node.is_current) == (label, "label", "the start", True)
    (first, *_) = await session.tree()
    assert await session.label("greeting", entry=first.entry) == first.entry
    assert [node.labels for node in await session.tree() if node.entry == first.entry] == [("greeting",)]
    other = await sessions.create()
    await other.append(HELLO, DONE)
    (elsewhere, *_) = await other.tree()
    for refused, words in (
        (session.label("x", entry=elsewhere.entry), "expected the id of an entry in the conversation"),
        (session.label("x", entry=10**9), "entry is 1000000000; expected"),
        (session.set_title("\x1b\n"), r"title is \"\\u001b\\n\"; expected at least one visible character"),
        (session.tag("two words"), "cannot be a tag"),
        (session.label("#12"), 'label is "#12"; expected'),
        (session.label("12"), 'label is "12"; expected'),
        (session.label("\u202e"), "expected 1 to 60 visible characters"),
        (session.merge_metadata({"a": {1, 2}}), "patch is not JSON"),
        (session.merge_metadata({"a": "x" * 20_000}), "metadata would take"),
        (sessions.create(alias="\n"), r"alias is .*; expected 1 to 200 visible characters"),
        (sessions.create(title="\0"), "title is"),
        (session.messages(last=0), "last is 0; expected 1 or more"),
    ):
        with pytest.raises(ArgumentError, match=words):
            await refused
    await session.delete()
    with pytest.raises(NoSuchSession):
        await session.messages()


async def test_lists_and_totals_take_conditions(sessions: Sessions) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 1}
    for name, model in (("a", "qwen3"), ("b", "gpt-5")):
        session = await sessions.create(workspace=f"/{name}", model=model, title=f"Title {name}", tags=["t", name])
        await session.append(HELLO, {**DONE, "usage": usage, "cost": 0.5})
    helper = await sessions.create(workspace="/b", model="qwen3", parent=session.id, tags=["help"])
    await helper.append(HELLO, {**DONE, "usage": usage})

    async def titles(**conditions: Any) -> list[str]:
        return [str(one.title) for one in await sessions.list(**conditions)]

    now = datetime.now(UTC)
    assert await titles() == ["Title b", "Title a"]
    assert await titles(model="QWEN") == ["Title a"]
    assert await titles(tags=["T", "b"]) == ["Title b"]
    assert await titles(workspace="/a") == ["Title a"]
    assert await titles(title="TITLE", limit=1) == ["Title b"]
    assert await titles(since=now + timedelta(hours=1)) == await titles(until=now - timedelta(hours=1)) == []
    assert [one.id for one in await sessions.list(parent=session.id)] == [helper.id]
    assert await sessions.list(parent=session.id, model="gpt") == await sessions.list(parent=helper.id) == ()
    assert [one.id for one in await session.subagents()] == [helper.id]
    assert helper.parent_id == session.id
    totals = await sessions.totals()
    assert (totals.sessions, totals.messages, totals.tokens_in, totals.tokens_out, totals.cost) == (2, 4, 30, 3, 1.0)
    assert (await sessions.totals(parent=session.id)).messages == 2
    with pytest.raises(NoSuchSession):
        await sessions.create(parent="nobody")
    later = await sessions.create(parent=session.id)
    await later.append(HELLO, DONE)
    await sessions.create(parent=session.id, title="never prompted")
    assert [one.id for one in await sessions.list(parent=session.id)] == [later.id, helper.id]
    await helper.append(HELLO, DONE)
    assert [one.id for one in await sessions.list(parent=session.id)] == [helper.id, later.id]
    with pytest.raises(ArgumentError, match="limit is 0; expected 1 or more"):
        await sessions.search("hello", limit=0)


async def test_the_tree_marks_the_branch_and_the_leaf(sessions: Sessions, stores: AnyStores) -> None:
    session = await sessions.create(alias="a")
    await session.append(HELLO, DONE)
    first = (await sessions.get("a")).leaf
    await session.append({"role": "user", "content": "dropped"}, DONE)
    other = await stores.open()
    await other.move_leaf(session.id, leaf=(await other.session(session.id)).leaf, to=first, reason="undo")
    await session.append({"role": "user", "content": "kept"}, DONE)
    tree = await session.tree()
    assert [(node.text, node.is_current, node.is_leaf) for node in tree] == [
        ("hello", True, False),
        ("dropped", False, False),
        ("kept", True, True),
    ]
    assert [node.parent for node in tree] == [None, tree[0].entry, tree[0].entry]


async def test_a_compaction_marks_its_session_until_it_is_undone(sessions: Sessions, stores: AnyStores) -> None:
    session = await sessions.create(alias="a")
    await session.append(HELLO, DONE)
    other = await stores.open()
    for body in (Checkpoint(compaction_id="c", summary="SUMMARY", first_kept=None), Mask(before=1)):
        (made,) = await add(other, session.id, body)
        assert [one.is_compacted for one in await sessions.list()] == [True]
        assert (await sessions.get("a")).is_compacted
        assert (await session.messages(last=2)) == [HELLO, DONE]
        await add(other, session.id, Restore(entry=made.id))
        assert [one.is_compacted for one in await sessions.list()] == [False]
    assert await other.compacted([]) == await other.compacted(["nobody"]) == frozenset()


async def test_a_session_opened_for_reading_cannot_be_changed(place: str) -> None:
    async with Sessions.open(place, write=True) as writing:
        await (await writing.create(alias="a")).append(HELLO, DONE)
    async with Sessions.open(place) as reading:
        session = await reading.get("a")
        calls = [reading.create(), session.append(HELLO), session.label("x"), session.set_title("x"), session.delete()]
        for call in calls:
            with pytest.raises(StoreUnavailable):
                await call


async def test_labels_and_prompts_are_the_same_as_crows_own(sessions: Sessions) -> None:
    session = await sessions.create(alias="a")
    await session.append(HELLO, DONE)
    await session.label("here")
    bodies = [entry.body async for entry in session.entries()]
    assert isinstance(bodies[0], User)
    assert bodies[-1] == Note(about="label", value="here")
    async with AsyncExitStack() as stack:
        turn = await stack.enter_async_context(session.turn())
        assert turn.number == 2
        await turn.append(DONE)
