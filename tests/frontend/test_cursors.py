"""A client that comes back with a cursor gets exactly what it has missed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.agent.feed import Feed
from crow.domain.entries import Announcement, Assistant, CallRef, Entry, ToolResult
from crow.domain.events import CallProgressed, EntryStored, TextShown
from crow.domain.messages import ToolCall
from crow.frontend.cursors import Cursor, CursorGap
from crow.frontend.requester import Requester
from crow.frontend.v2 import VersionTwo
from crow.frontend.view import View
from crow.protocol.frames import RequestError
from crow.protocol.params import ClientCapabilities
from crow.store import Store
from crow.store.principals import PrincipalStore
from tests.support.scripted_model import Say, call
from tests.support.shared_host import Shared, Watcher, shared, transcript

pytestmark = pytest.mark.anyio

SHELL = Announcement(title="make", kind="execute")
CURSORS = {"_meta": {"acp/cursor": True}}
Params = dict[str, Any]


def cursor_of(update: Params) -> str:
    return str(update["_meta"]["acp/cursor"])


def seen(updates: Sequence[Params]) -> list[tuple[str, str, str]]:
    """The transcript without the remarks that only a replay adds at the end of a turn."""
    return [each for each in transcript(updates) if not each[1].startswith("turn_end_")]


async def back(host: Shared, session: str, cursor: str, **more: Any) -> Watcher:
    client = await host.client(**({"capabilities": CURSORS} | more))
    await client.open("session/resume", session, _meta={"acp/cursor": cursor})
    return client


async def reload(host: Shared, session: str) -> list[tuple[str, str, str]]:
    client = await host.client()
    await client.open("session/load", session)
    return seen(client.updates)


def script(chance: random.Random, holds: list[anyio.Event]) -> list[list[Say]]:
    """Random turns. Each answer waits in the middle for the next of `holds`."""

    def words(count: int) -> tuple[str, ...]:
        return tuple(f"{chance.choice(('ein', 'zwei', '三', '🙂', 'vier'))} " for _ in range(count))

    def hold() -> anyio.Event:
        holds.append(anyio.Event())
        return holds[-1]

    def step() -> Say:
        calls = tuple(
            chance.choice(
                (
                    call("read_file", f"c{index}", path="there.txt"),
                    call("read_file", f"c{index}", path="missing.txt"),
                    call("write_file", f"c{index}", path=f"{chance.randrange(9)}.txt", content="x"),
                    call("update_plan", f"c{index}", items=[{"content": "a", "status": "pending"}]),
                    call("nothing", f"c{index}"),
                )
            )
            for index in range(chance.randint(1, 3))
        )
        return Say(text=words(chance.randint(0, 3)), thought=chance.choice(("", "hm")), calls=calls, hold=hold())

    return [
        [*(step() for _ in range(chance.randint(0, 2))), Say(text=words(3), thought="so", hold=hold())]
        for _ in range(2)
    ]


V1: Params = {"capabilities": CURSORS}
V2: Params = {"capabilities": CURSORS, "version": 2, "negotiate": VersionTwo}


@pytest.mark.long
@pytest.mark.parametrize(("seed", "version"), [(0, V1), (1, V1), (2, V1), (3, V1), (4, V2)])
async def test_a_cut_anywhere_loses_and_repeats_nothing(tmp_path: Path, seed: int, version: Params) -> None:
    holds: list[anyio.Event] = []
    turns = script(random.Random(seed), holds)
    says = [say for turn in turns for say in turn]
    async with shared(tmp_path, *says) as host:
        (host.cwd / "there.txt").write_text("text\n")
        writer, watcher = await host.client(), await host.client(**version)
        session = await writer.new()
        opened = await watcher.open("session/resume", session)
        start = cursor_of(opened)
        come_back: list[tuple[int, Watcher]] = []
        for number, turn in enumerate(turns):
            prompting = asyncio.create_task(writer.prompt(session, f"go {number}"))
            for say in turn:
                await say.reached.wait()
                await host.host.open[session].clients.queues[1].flushed()
                for count in {0, len(watcher.updates) // 2, len(watcher.updates) - 1, len(watcher.updates)}:
                    cursor = cursor_of(watcher.updates[count - 1]) if count else start
                    come_back.append((count, await back(host, session, cursor, **version)))
                assert say.hold is not None
                say.hold.set()
            assert (await prompting)["stopReason"] == "end_turn"
            typed = asyncio.create_task(writer.prompt(session, "/context"))
            await typed
        for attachment in tuple(host.host.open[session].clients.queues):
            await attachment.flushed()
        everything = seen(watcher.updates)
        assert everything == await reload(host, session)
        for count, client in come_back:
            assert seen(watcher.updates[:count] + client.updates) == everything, count
            assert "No answer" not in str(client.updates)
        for count in range(len(watcher.updates) + 1):
            cursor = cursor_of(watcher.updates[count - 1]) if count else start
            client = await back(host, session, cursor, **version)
            assert seen(watcher.updates[:count] + client.updates) == everything, count
            assert "No answer" not in str(client.updates)
            await client.drop()


async def test_a_cut_anywhere_in_a_load_can_be_continued(tmp_path: Path) -> None:
    calls = (call("read_file", "a", path="missing.txt"), call("nothing", "b"))
    async with shared(tmp_path, Say(thought="hm", text=("One ",), calls=calls), Say(text=("two.",))) as host:
        writer = await host.client()
        session = await writer.new()
        await writer.prompt(session, "go")
        await writer.prompt(session, "/history")
        loading = await host.client(capabilities=CURSORS)
        loaded = len((await loading.open("session/load", session))["configOptions"]) and len(loading.updates)
        everything = seen(loading.updates[:loaded])
        assert len(everything) == 8
        for count in range(1, loaded + 1):
            client = await back(host, session, cursor_of(loading.updates[count - 1]))
            assert seen(loading.updates[:count] + client.updates) == everything, count
            await client.drop()


async def test_a_cursor_survives_the_process(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(thought="hm", text=("Hello ", "you."))) as host:
        writer, watcher = await host.client(), await host.client(capabilities=CURSORS)
        session = await writer.new()
        await watcher.open("session/resume", session)
        await writer.prompt(session, "hi")
        await watcher.until_kind("session_info_update", "end_turn")
        updates = watcher.updates
    async with shared(tmp_path) as host:
        for count in range(1, len(updates) + 1):
            client = await back(host, session, cursor_of(updates[count - 1]))
            assert seen(updates[:count] + client.updates) == seen(updates)


async def test_the_sender_of_a_prompt_does_not_get_it_back(tmp_path: Path) -> None:
    hold = anyio.Event()
    say = Say(text=("Hello.",), hold=hold)
    async with shared(tmp_path, say) as host:
        ann = await host.client(capabilities=CURSORS, requester=Requester(connection_id="c"))
        opened = await ann.call("session/new", cwd=str(host.cwd), mcpServers=[])
        session = opened["sessionId"]
        turn = asyncio.create_task(ann.prompt(session, "hi"))
        await say.reached.wait()
        await ann.drop()
        with pytest.raises(ConnectionError):
            await turn
        again = await back(host, session, cursor_of(opened), requester=Requester(connection_id="c"))
        other = await back(host, session, cursor_of(opened))
        hold.set()
        for client in (again, other):
            await client.until_kind("session_info_update", "end_turn")
        assert (again.text("user_message_chunk"), other.text("user_message_chunk")) == ("", "hi")
        assert again.text() == other.text() == "Hello."


@pytest.mark.parametrize(
    "cursor",
    ["", "nonsense", "e999999.0", "e1.0;mmsg_x:0:5", "e1.0;c1.0=5,", "e1.0;m" + "x" * 9000, "e0.0;mx:9999:9999"],
)
async def test_a_cursor_that_lies_is_named_and_disturbs_nobody(tmp_path: Path, cursor: str) -> None:
    async with shared(tmp_path, Say(text=("Hello.",)), Say(text=("Again.",))) as host:
        ann, eve = await host.client(), await host.client(capabilities=CURSORS)
        session = await ann.new()
        await ann.prompt(session, "hi")
        before = host.host.open[session]
        with pytest.raises(RequestError, match="resume_failed") as raised:
            await eve.open("session/resume", session, _meta={"acp/cursor": cursor})
        assert raised.value.code == -32602
        assert raised.value.data["reason"] == "cursor_gap"
        assert host.host.open[session] is before
        assert len(before.clients.queues) == 1
        assert eve.updates == []
        await ann.prompt(session, "again")


async def test_a_cursor_of_another_branch_is_a_gap(tmp_path: Path) -> None:
    async with shared(tmp_path, Say(text=("One.",)), Say(text=("Two.",)), Say(text=("Three.",))) as host:
        ann, bob = await host.client(), await host.client(capabilities=CURSORS)
        session = await ann.new()
        await bob.open("session/resume", session)
        for text in ("a", "b"):
            await ann.prompt(session, text)
        await host.host.open[session].clients.queues[1].flushed()
        cursor = cursor_of(bob.updates[-1])
        await ann.prompt(session, "/undo")
        await ann.prompt(session, "c")
        with pytest.raises(RequestError, match="is not in the current history"):
            await back(host, session, cursor)


def test_a_cursor_is_read_as_it_was_written() -> None:
    calls = {CallRef(assistant=7, index=0): 0, CallRef(assistant=7, index=2): 12}
    cursor = Cursor(entry=9, pieces=2, message="msg_ab", thought=3, text=40, calls=calls)
    assert Cursor.parse(str(cursor)) == cursor
    assert Cursor.parse(str(Cursor())) == Cursor()
    many = Cursor(calls={CallRef(assistant=1, index=index): 0 for index in range(500)})
    assert len(Cursor.parse(str(many)).calls) == 64
    with pytest.raises(CursorGap):
        Cursor.parse("e1.0;c" + ",".join(f"1.{index}" for index in range(65)))


async def test_no_call_of_a_hidden_subagent_stays_open_after_a_cut(tmp_path: Path) -> None:
    order = call("task", "t", description="Look", prompt="Look around.")
    says = (Say(calls=(order,)), Say(calls=(call("read_file", path="missing.txt"),)), Say(text=("Seen.",)))
    async with shared(tmp_path, *says, Say(text=("Done.",))) as host:
        writer, watcher = await host.client(), await host.client(capabilities=CURSORS)
        session = await writer.new()
        await watcher.open("session/resume", session)
        await writer.prompt(session, "go")
        await watcher.until_kind("session_info_update", "end_turn")
        shown = [each for each in seen(watcher.updates) if each[0] == "call"]
        assert [status for _, _, status in shown] == ["completed", "failed"]
        for count in range(1, len(watcher.updates) + 1):
            client = await back(host, session, cursor_of(watcher.updates[count - 1]))
            joined = seen(watcher.updates[:count] + client.updates)
            known = {name for _, name, _ in seen(watcher.updates[:count])} | {shown[0][1]}
            assert [each for each in joined if each[0] == "call"] == [each for each in shown if each[1] in known], count
            await client.drop()


async def test_a_cursor_of_a_wrong_type_is_refused(tmp_path: Path) -> None:
    async with shared(tmp_path) as host:
        ann = await host.client(capabilities=CURSORS)
        session = await ann.new()
        wrong: tuple[Any, ...] = (5, [], {"entry": 1}, True)
        for cursor in wrong:
            with pytest.raises(RequestError, match="expected the cursor of an update"):
                await ann.open("session/resume", session, _meta={"acp/cursor": cursor})


def test_only_the_rest_of_a_terminal_is_sent() -> None:
    ref = CallRef(assistant=3, index=0)
    order = ToolCall(id="c", name="shell", arguments="{}")
    answer = Assistant(text="", message_id="msg_0", calls=(order,), announcements=(SHELL,))
    entry = Entry(id=3, conversation=1, session="s", parent=None, turn=1, body=answer)
    feed = Feed("s")
    for item in (
        EntryStored(entry=entry),
        CallProgressed(call=ref, text="abc"),
        CallProgressed(call=ref, text="abcdef"),
        TextShown(message_id="msg_1", offset=0, text="Hel"),
        TextShown(message_id="msg_1", offset=3, text="lo"),
    ):
        feed.put(item)
    caps = ClientCapabilities(terminal_output=True)

    def joined(view: View) -> list[Params]:
        shown = [*view.end_reading(is_running=True), *(one for item in feed.open_items() for one in view.apply(item))]
        return [each.update for each in shown]

    cursor = Cursor(entry=3, message="msg_1", text=2, calls={ref: 3})
    output, text = joined(View.at(cursor, [entry], caps, session_id="s"))
    assert text["content"]["text"] == "llo"
    assert output["_meta"]["terminal_output"]["data"] == "def"
    announced, output, text = joined(View.at(Cursor(entry=3), [entry], caps, session_id="s"))
    assert announced["sessionUpdate"] == "tool_call"
    assert text["content"]["text"] == "Hello"
    assert output["_meta"]["terminal_output"]["data"] == "abcdef"


def test_a_missed_result_is_shown_as_it_would_have_been_live() -> None:
    order, plan = ToolCall(id="c", name="read_file", arguments="{}"), Announcement(title="Read", kind="read")
    answer = Assistant(text="", message_id="msg_0", calls=(order,), announcements=(plan,))
    ref = CallRef(assistant=3, index=0)
    result = ToolResult(call=ref, name="read_file", text="twig\n" * 40_000, announcement=plan)
    first, second = (
        Entry(id=id_, conversation=1, session="s", parent=None, turn=1, body=body)
        for id_, body in ((3, answer), (4, result))
    )
    caps = ClientCapabilities()
    live = View(caps, session_id="s")
    live.apply(EntryStored(entry=first))
    back = View.at(live.cursor, [first], caps, session_id="s")
    stored = EntryStored(entry=second)
    assert [each.update for each in back.apply(stored)] == [each.update for each in live.apply(stored)]


async def test_a_client_that_may_have_missed_updates_of_a_subagent_is_told(tmp_path: Path) -> None:
    both: Params = {"subagents": {}, "session": {"notices": {}}} | CURSORS
    hold = anyio.Event()
    work = Say(text=("Look", "ing."), hold=hold)
    order = call("task", description="Look", prompt="Look around.")
    async with shared(tmp_path, Say(calls=(order,)), work, Say(text=("Done.",))) as host:
        writer = await host.client(capabilities=both)
        opened = await writer.call("session/new", cwd=str(host.cwd), mcpServers=[])
        session = opened["sessionId"]
        turn = asyncio.create_task(writer.prompt(session, "go"))
        await work.reached.wait()
        back_again = await back(host, session, cursor_of(opened), capabilities=both)
        joined = await host.client(capabilities=both)
        await joined.open("session/resume", session)
        hold.set()
        await turn
        for client in (back_again, joined):
            await client.until_kind("session_info_update", "end_turn")
        notices = [
            [each["title"] for each in client.kinds_and_texts() if each["sessionUpdate"] == "notice"]
            for client in (back_again, joined)
        ]
        assert notices == [["Updates of subagents were missed. Load the session to see all of them."], []]
        own = [each["update"] for each in joined.updates if each["sessionId"] != session]
        assert "Looking." in [text for kind, _, text in transcript(own) if kind == "agent_message_chunk"]


class SlowStore(PrincipalStore):
    """The store, which gives what was missed only after `go_on` has returned, and reads the history only then."""

    def __init__(self, store: Store, go_on: Callable[[], Awaitable[None]]) -> None:
        super().__init__(store, None)
        self._go_on = go_on

    async def entries_beyond(self, leaf: int | None, to: int | None, kinds: Collection[str]) -> tuple[Entry, ...]:
        found = await super().entries_beyond(leaf, to, kinds)
        await self._go_on()
        return found

    async def history(self, session_id: str, **more: Any) -> AsyncIterator[Sequence[Entry]]:
        await self._go_on()
        async for batch in super().history(session_id, **more):
            yield batch


async def test_a_turn_that_runs_while_a_client_loads_the_session_is_shown_once(tmp_path: Path) -> None:
    step = Say(text=("Two ",), calls=(call("read_file", path="missing.txt"),))
    async with shared(tmp_path, Say(text=("One ",)), step, Say(text=("three.",))) as host:
        writer = await host.client()
        session = await writer.new()
        await writer.prompt(session, "a")

        async def run_turn() -> None:
            await writer.prompt(session, "b")

        client = await host.client(requester=Requester(view=lambda store: SlowStore(store, run_turn)))
        await client.open("session/load", session)
        await client.until_kind("session_info_update", "end_turn")
        assert client.text() == "One Two three."
        assert client.text("user_message_chunk") == "ab"
        assert [each["status"] for each in client.kinds_and_texts() if "toolCallId" in each] == ["failed"]


@pytest.mark.parametrize("version", [V1, V2])
async def test_a_turn_that_a_load_has_sent_already_moves_no_cursor_back(tmp_path: Path, version: Params) -> None:
    async with shared(tmp_path, Say(text=("One.",)), Say(text=("Two.",))) as host:
        writer = await host.client()
        session = await writer.new()
        await writer.prompt(session, "a")

        async def run_turn() -> None:
            await writer.prompt(session, "b")

        requester = Requester(view=lambda store: SlowStore(store, run_turn))
        client = await host.client(**version, requester=requester)
        if version is V1:
            await client.open("session/load", session)
        else:
            await client.open("session/resume", session, replayFrom={"type": "start"})
        await host.host.open[session].clients.queues[-1].flushed()
        assert [text for kind, _, text in seen(client.updates)] == ["a", "One.", "b", "Two."]
        come_back = await back(host, session, cursor_of(client.updates[-1]), **version)
        assert seen(come_back.updates) == []


async def test_a_turn_that_ends_while_a_client_comes_back_loses_nothing(tmp_path: Path) -> None:
    hold = anyio.Event()
    say = Say(text=("Hel", "lo"), hold=hold)
    async with shared(tmp_path, say) as host:
        writer = await host.client(capabilities=CURSORS)
        opened = await writer.call("session/new", cwd=str(host.cwd), mcpServers=[])
        session = opened["sessionId"]
        turn = asyncio.create_task(writer.prompt(session, "hi"))
        await writer.until_kind("agent_message_chunk")

        async def end_turn() -> None:
            hold.set()
            await asyncio.wait([turn])

        requester = Requester(view=lambda store: SlowStore(store, end_turn))
        client = await back(host, session, cursor_of(opened), requester=requester)
        await client.until_kind("session_info_update", "end_turn")
        assert client.text() == "Hello"
