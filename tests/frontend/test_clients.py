"""What a client is shown of a turn that goes on between the load of its session and the client's introduction."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

import anyio
import pytest

from crow.domain.entries import CallRef, Entry, Started, TurnEnd
from crow.domain.events import CallProgressed, EntryStored, Event, SubagentChanged, TextShown, TurnBegan, TurnEnded
from crow.frontend.client import SessionClient
from crow.frontend.clients import SessionClients
from crow.frontend.questions import Dialogs
from crow.frontend.workspace import SharedWorkspace
from crow.protocol import ClientConnection
from crow.protocol.params import ClientCapabilities
from crow.protocol.updates import turn_state
from crow.tools.workspace import DiskWorkspace
from tests.support.paths import PathBuilder, result_of, said, user
from tests.support.shared_host import transcript

SESSION, TASK = "s", "task-1"
PROMPT, CALLS, STARTED, RESULT, ANSWER, END = PathBuilder(
    user("go"),
    replace(said("I look.", "a"), message_id="first"),
    Started(call=CallRef(assistant=2, index=0), why=""),
    result_of(2),
    replace(said("Twigs."), message_id="second"),
    TurnEnd(stop="end_turn"),
).entries
TURN: Sequence[Event] = (
    TextShown(message_id="first", offset=0, text="I look."),
    EntryStored(entry=CALLS),
    EntryStored(entry=STARTED),
    CallProgressed(call=CallRef(assistant=2, index=0), text="line\n"),
    EntryStored(entry=RESULT),
    TextShown(message_id="second", offset=0, text="Twi"),
    TextShown(message_id="second", offset=3, text="gs."),
    EntryStored(entry=ANSWER),
    EntryStored(entry=END),
)


class Wire:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    async def notify(self, _method: str, params: dict[str, Any]) -> None:
        self.sent.append(params)

    def updates(self, session_id: str) -> list[dict[str, Any]]:
        return [params["update"] for params in self.sent if params["sessionId"] == session_id]


def attached(clients: SessionClients) -> tuple[SessionClient, Wire]:
    """A new client that shows subagents. It is not introduced yet."""
    wire = Wire()
    client = SessionClient(
        SESSION,
        cast(ClientConnection, wire),
        ClientCapabilities(subagents=True),
        cwd="/",
        feed=clients.feed,
        options=list,
        commands=list,
        dialogs=Dialogs(answer_s=60),
    )
    clients.attach(client, origin=wire, may_write=True, is_patient=False, drop=lambda _reason: None)
    return client, wire


def in_session(item: Event, session_id: str) -> Event:
    return replace(item, entry=replace(item.entry, session=session_id)) if isinstance(item, EntryStored) else item


async def introduce(client: SessionClient) -> None:
    await client.subagents.tell()
    client.open()


@pytest.mark.parametrize("session_id", [SESSION, TASK], ids=["session", "subagent"])
@pytest.mark.parametrize("before", range(len(TURN) + 1))
async def test_what_happens_before_a_loaded_client_is_introduced_is_shown_once_and_in_order(
    before: int, session_id: str
) -> None:
    async with anyio.create_task_group() as tasks:
        clients = SessionClients(SESSION, tasks, SharedWorkspace(DiskWorkspace("/")), wait_s=60)
        client, wire = attached(clients)
        await introduce(client)
        put, shown = clients.put, client
        if session_id == TASK:
            await clients.publish(SubagentChanged(session_id=TASK, title="Look", state="running"))
            put, shown = clients.open_subagent(TASK).put, client.subagents.running[TASK]
            await clients.flushed()
        client.hold()

        async def history() -> AsyncIterator[Sequence[Entry]]:
            yield [replace(PROMPT, session=session_id)]

        await shown.load(history(), is_running=lambda: True)
        for item in TURN[:before]:
            put(in_session(item, session_id))
        await introduce(client)
        for item in TURN[before:]:
            put(in_session(item, session_id))
        await clients.flushed()
        tasks.cancel_scope.cancel()
    updates = wire.updates(session_id)
    assert transcript(updates)[-3:] == [
        ("agent_message_chunk", "first", "I look."),
        ("call", "call_2_0", "completed"),
        ("agent_message_chunk", "second", "Twigs."),
    ]
    assert Counter(each["sessionUpdate"] for each in updates)["tool_call"] == 1
    statuses = [each["status"] for each in updates if "toolCallId" in each]
    assert statuses == ["pending", "in_progress", "in_progress", "completed"]


async def test_the_end_of_a_lost_turn_does_not_end_the_turn_of_the_process_that_took_over() -> None:
    async with anyio.create_task_group() as tasks:
        clients = SessionClients(SESSION, tasks, SharedWorkspace(DiskWorkspace("/")), wait_s=60)
        client, wire = attached(clients)
        await introduce(client)
        for event in (TurnBegan(message_id="lost"), TurnBegan(message_id="other"), TurnEnded(message_id="lost")):
            await clients.publish(event)
        await clients.flushed()
        assert turn_state(clients.feed.last_turn) == {"state": "running"}
        await clients.publish(TurnEnded(message_id="other"))
        await clients.flushed()
        assert turn_state(clients.feed.last_turn) == {"state": "idle", "stopReason": "end_turn"}
        tasks.cancel_scope.cancel()
    states = [update["_meta"]["acp/turnState"]["state"] for update in wire.updates(SESSION)]
    assert states == ["running", "running", "idle"]


async def test_a_client_that_is_attached_to_a_running_turn_is_shown_the_rest_of_it_once() -> None:
    async with anyio.create_task_group() as tasks:
        clients = SessionClients(SESSION, tasks, SharedWorkspace(DiskWorkspace("/")), wait_s=60)
        for item in TURN[:3]:
            clients.put(item)
        client, wire = attached(clients)
        for item in TURN[3:6]:
            clients.put(item)
        await introduce(client)
        for item in TURN[6:]:
            clients.put(item)
        await clients.flushed()
        tasks.cancel_scope.cancel()
    updates = wire.updates(SESSION)
    assert transcript(updates) == [("call", "call_2_0", "completed"), ("agent_message_chunk", "second", "Twigs.")]
    assert Counter(each["sessionUpdate"] for each in updates)["tool_call"] == 1


async def test_a_subagent_that_begins_before_its_client_is_introduced_is_announced_once_and_first() -> None:
    async with anyio.create_task_group() as tasks:
        clients = SessionClients(SESSION, tasks, SharedWorkspace(DiskWorkspace("/")), wait_s=60)
        client, wire = attached(clients)
        await clients.publish(SubagentChanged(session_id=TASK, title="Look", state="running"))
        clients.open_subagent(TASK).put(in_session(TURN[1], TASK))
        await introduce(client)
        await clients.flushed()
        tasks.cancel_scope.cancel()
    first, *calls = wire.sent
    assert (first["sessionId"], first["update"]["sessionId"]) == (SESSION, TASK)
    assert [each["sessionId"] for each in calls] == [TASK, TASK]
    assert Counter(each["update"]["sessionUpdate"] for each in calls)["tool_call"] == 1


@pytest.mark.parametrize("stored", [2, 3, 4])
async def test_a_load_of_a_running_subagent_shows_its_call_with_the_status_that_was_shown_live(stored: int) -> None:
    log = [replace(entry, session=TASK) for entry in (PROMPT, CALLS, STARTED, RESULT)[:stored]]

    async def history() -> AsyncIterator[Sequence[Entry]]:
        yield log

    async with anyio.create_task_group() as tasks:
        clients = SessionClients(SESSION, tasks, SharedWorkspace(DiskWorkspace("/")), wait_s=60)
        client, wire = attached(clients)
        await introduce(client)
        await clients.publish(SubagentChanged(session_id=TASK, title="Look", state="running"))
        group = clients.open_subagent(TASK)
        for entry in log:
            group.put(EntryStored(entry=entry))
        await clients.flushed()
        live = transcript(wire.updates(TASK))
        wire.sent.clear()
        await client.subagents.running[TASK].load(history(), is_running=lambda: True)
        tasks.cancel_scope.cancel()
    assert transcript(wire.updates(TASK)) == live
    assert live[-1] == ("call", "call_2_0", ("pending", "in_progress", "completed")[stored - 2])
