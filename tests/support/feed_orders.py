"""Random orders of everything that can happen to the clients of a session, on several processes that share its log.

The log, the processes and the connections are simulated; the feeds, views and queues are crow's own. At the end, every
client must show what a client that loads the session now shows.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, cast

import anyio
import anyio.abc
from anyio.lowlevel import checkpoint

from crow.domain.entries import (
    Announcement,
    Assistant,
    Body,
    CallRef,
    Checkpoint,
    Entry,
    Remark,
    Started,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.events import (
    CallAnnounced,
    CallEnded,
    CallProgressed,
    EntryStored,
    Event,
    TextShown,
    ThoughtShown,
    TurnBegan,
    TurnEnded,
)
from crow.domain.messages import Text, ToolCall
from crow.domain.rendering import INTERRUPTED
from crow.frontend.client import SessionClient
from crow.frontend.clients import SessionClients
from crow.frontend.cursors import Cursor, CursorGap
from crow.frontend.missed import Missed
from crow.frontend.questions import Dialogs
from crow.frontend.queue import ClientQueue
from crow.frontend.workspace import SharedWorkspace
from crow.protocol import ClientConnection
from crow.protocol.params import ClientCapabilities
from crow.tools.workspace import DiskWorkspace
from tests.support.shared_host import transcript

__all__ = ["check_order"]

SESSION, ORIGINAL, HIDDEN = "s", "original", "task-1"
CAPS = ClientCapabilities(cursors=True, terminal_output=True, marked_remarks=True)
Transcript = list[tuple[str, str, str]]


class Line:
    """A connection that keeps what it sends. A slow one sends only when it is given time."""

    is_patient = False

    def __init__(self, chance: random.Random, *, is_slow: bool) -> None:
        self.sent: list[dict[str, Any]] = []
        self._chance = chance
        self.is_slow = is_slow

    async def notify(self, _method: str, params: dict[str, Any]) -> None:
        while self.is_slow and self._chance.random() < 0.7:
            await checkpoint()
        self.sent.append(params)


@dataclass
class Person:
    """A client, with everything that it has been sent since its last load."""

    name: str
    node: Node | None = None
    line: Line | None = None
    queue: ClientQueue | None = None
    before: list[dict[str, Any]] = field(default_factory=list)
    start: str = ""
    """The cursor in the response to the request that opened the session."""
    first: int = 0
    """The place in the log at which the client began to look, without a load."""
    own: set[str] = field(default_factory=set)

    def updates(self) -> list[dict[str, Any]]:
        return [*self.before, *(self.line.sent if self.line is not None else ())]


class Node:
    """A process that has opened the session."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clients = SessionClients(SESSION, world.tasks, SharedWorkspace(DiskWorkspace("/")), wait_s=60)
        self.clients.feed.entry = world.newest
        for entry in world.log:
            if world.is_running and entry.turn == world.turn:
                self.clients.feed.put(EntryStored(entry=entry))
        self.follow_draft()

    def follow_draft(self) -> None:
        message_id, thought, text = self.world.saved
        if message_id and self is not self.world.runner:
            for item in self.clients.feed.growth(message_id, text=text, thought=thought):
                self.clients.put(item)


class World:
    """The session's log, the processes, and the clients."""

    def __init__(self, chance: random.Random, tasks: anyio.abc.TaskGroup) -> None:
        self.chance = chance
        self.tasks = tasks
        self.log: list[Entry] = []
        self.saved = ("", "", "")
        self.prompt = ""
        self.newest = self.turn = self.messages = 0
        self.is_running = False
        self.runner: Node | None = None
        for text in ("before", "the fork"):  # a fork begins with entries of another session
            self.turn += 1
            for body in (User(parts=(Text(text=text),), message_id=self.name()), TurnEnd(stop="end_turn")):
                self.append(body, session=ORIGINAL)
        self.nodes = [Node(self), Node(self)]
        self.people = [Person(name=f"p{number}") for number in range(4)]

    def name(self) -> str:
        self.messages += 1
        return f"msg_{self.messages}"

    def append(self, body: Body, *, session: str = SESSION) -> Entry:
        self.newest += self.chance.choice((1, 1, 3))
        parent = self.log[-1].id if self.log else None
        entry = Entry(id=self.newest, conversation=1, session=session, parent=parent, turn=self.turn, body=body)
        self.log.append(entry)
        return entry

    def store(self, body: Body) -> Entry:
        """Stores an entry, and tells all processes."""
        entry = self.append(body)
        for node in self.nodes:
            if isinstance(body, User):
                self.begin(node, body, entry)
            else:
                node.clients.put(EntryStored(entry=entry))
        return entry

    def begin(self, node: Node, body: User, entry: Entry) -> None:
        sender = next((each for each in self.people if body.message_id in each.own), None)
        if sender is not None and sender.queue is not None and sender.node is node:
            node.clients.note_sender(body.message_id, sender.queue)
        node.clients.put(TurnBegan(message_id=body.message_id, stored=entry))

    def show(self, event: Event) -> None:
        """Shows something that is not stored: only the process that runs the turn knows it."""
        assert self.runner is not None
        self.runner.clients.put(event)

    # The turns.

    async def run_turn(self) -> None:
        """Runs a turn until it ends, is cancelled, or its process dies."""
        self.turn, self.is_running = self.turn + 1, True
        self.runner = self.chance.choice(self.nodes)
        message_id = self.name()
        sender = self.chance.choice([None, *(each for each in self.people if each.node is self.runner)])
        if sender is not None:
            sender.own.add(message_id)
        self.prompt = message_id
        self.store(User(parts=(Text(text="go "), Text(text="on")), message_id=message_id))
        stop: str | None = None
        for step in range(self.chance.randint(1, 3)):
            stop = await self.run_step(is_last=step == 2)
            if stop is not None:
                break
        if stop == "taken over":
            self.end_turn("interrupted")
        elif stop == "cancelled":
            self.end_turn("cancelled")
        else:
            self.end_turn("end_turn")

    def end_turn(self, stop: str) -> None:
        self.saved = ("", "", "")
        self.is_running = False
        self.store(TurnEnd(stop=cast(Any, stop)))
        for node in self.nodes:
            node.clients.put(TurnEnded(message_id=self.prompt))

    async def run_step(self, *, is_last: bool) -> str | None:
        """Streams an answer and runs its calls. Returns how the turn was broken off, or None."""
        chance, message_id = self.chance, self.name()
        thought = chance.choice(("", "hm "))
        pieces = [f"{message_id}{chance.choice('abc')} " for _ in range(chance.randint(0, 5))]
        if thought:
            self.show(ThoughtShown(message_id=message_id, offset=0, text=thought))
        text = ""
        for piece in pieces:
            self.show(TextShown(message_id=message_id, offset=len(text), text=piece))
            text += piece
            if chance.random() < 0.5:
                self.saved = (message_id, thought, text)
                for node in self.nodes:
                    node.follow_draft()
            await self.pause()
            if (stop := self.break_off()) is not None:
                self.keep(message_id, thought, text, stop)
                return stop
        calls = tuple(
            ToolCall(id=f"c{index}", name="shell", arguments="{}")
            for index in range(0 if is_last else chance.randint(0, 3))
        )
        announcements = tuple(Announcement(title=f"make {index}", kind="execute") for index in range(len(calls)))
        answer = Assistant(text=text, thought=thought, message_id=message_id, calls=calls, announcements=announcements)
        self.saved = ("", "", "")
        entry = self.store(answer)
        await self.pause()
        refs = [CallRef(assistant=entry.id, index=index) for index in range(len(calls))]
        chance.shuffle(refs)
        for ref in refs:
            if (stop := self.break_off()) is not None:
                return stop
            await self.run_call(ref, announcements[ref.index])
        if chance.random() < 0.2:
            self.store(Remark(text="A server is slow.", message_id=self.name()))
        if chance.random() < 0.2:
            self.store(Checkpoint(compaction_id=self.name(), summary="s", first_kept=None, reason="threshold"))
        return self.break_off()

    async def run_call(self, ref: CallRef, announcement: Announcement) -> None:
        self.store(Started(call=ref, why="allowed"))
        if self.chance.random() < 0.3:
            await self.run_hidden_subagent()
        output = ""
        for _ in range(self.chance.randint(0, 2)):
            output += "line\n"
            self.show(CallProgressed(call=ref, text=output))
            await self.pause()
        if self.chance.random() < 0.8:
            self.store(
                ToolResult(call=ref, name="shell", text=output, announcement=announcement, raw_output={"exit_code": 0})
            )
        await self.pause()

    async def run_hidden_subagent(self) -> None:
        """Shows a call of a subagent without a session of its own: its entries are not in this session's log."""
        self.newest += 1
        ref, announcement = CallRef(assistant=self.newest, index=0), Announcement(title="look", kind="read")
        self.show(CallAnnounced(call=ref, name="read_file", arguments="{}", announcement=announcement))
        await self.pause()
        if self.chance.random() < 0.5:
            self.show(CallEnded(call=ref, text="Cancelled."))
            return
        self.newest += 1
        body = ToolResult(call=ref, name="read_file", text="x", announcement=announcement)
        stored = Entry(id=self.newest, conversation=2, session=HIDDEN, parent=None, turn=1, body=body)
        self.show(EntryStored(entry=stored))

    def break_off(self) -> str | None:
        drawn = self.chance.random()
        if drawn < 0.03:
            return "cancelled"
        if drawn < 0.06:  # the process lost its lease, but lives
            return "taken over"
        if drawn < 0.09:
            self.kill(self.runner)
            return "taken over"
        return None

    def keep(self, message_id: str, thought: str, text: str, stop: str) -> None:
        """Stores the answer that was broken off: after a cancellation all of it, else what was saved."""
        if stop != "cancelled":
            message_id, thought, text = self.saved
        self.saved = ("", "", "")
        if message_id:
            self.store(Assistant(text=text, thought=thought, message_id=message_id, finish="interrupted"))

    def kill(self, node: Node | None) -> None:
        for person in self.people:
            if person.node is node and node is not None:
                self.cut(person)
        self.nodes = [each for each in self.nodes if each is not node]
        self.nodes.append(Node(self))

    # The clients.

    async def pause(self) -> None:
        """Lets queues go on, and clients come and go."""
        for _ in range(self.chance.choice((0, 0, 1, 3))):
            await checkpoint()
        if self.chance.random() < 0.3:
            await self.act(self.chance.choice(self.people))

    async def act(self, person: Person) -> None:
        if person.node is None:
            choices: list[Callable[[], Any]] = [lambda: self.load(person), lambda: self.join(person)]
            if person.start or person.before:
                choices += [lambda: self.come_back(person)] * 3
            await self.chance.choice(choices)()
        elif self.chance.random() < 0.6:
            self.cut(person)
        else:
            await self.load(person)

    def attach(self, person: Person) -> SessionClient:
        person.node = node = self.chance.choice(self.nodes)
        person.line = Line(self.chance, is_slow=self.chance.random() < 0.4)
        client = SessionClient(
            SESSION,
            cast(ClientConnection, person.line),
            CAPS,
            cwd="/",
            feed=node.clients.feed,
            options=list,
            commands=list,
            dialogs=Dialogs(answer_s=60),
        )
        person.queue = node.clients.attach(
            client, origin=person.name, may_write=True, is_patient=False, drop=lambda _reason: None
        )
        return client

    def cut(self, person: Person) -> None:
        """Breaks a connection. The client may not even have got everything that was sent."""
        assert person.node is not None
        assert person.line is not None
        assert person.queue is not None
        got = person.line.sent
        got = got[: self.chance.randint(0, len(got))] if self.chance.random() < 0.5 else list(got)
        person.before += got
        person.node.clients.detach(person.queue)
        person.node = person.line = person.queue = None

    async def load(self, person: Person) -> None:
        client = self.attach(person) if person.queue is None else person.queue.client
        assert person.line is not None
        client.hold()
        line = person.line

        async def history() -> AsyncIterator[Sequence[Entry]]:
            line.sent.clear()  # the client shows only what comes with the history, and later
            person.before, person.first, person.start = [], 0, str(Cursor())
            at = 0
            while at < len(self.log):
                batch = self.log[at : at + self.chance.randint(1, 8)]
                yield batch
                at += len(batch)
                await checkpoint()

        await client.load(history(), is_running=lambda: self.is_running)
        client.open()

    async def join(self, person: Person) -> None:
        """Opens the session without its history."""
        person.before = []
        client = self.attach(person)
        person.first, person.start = self.newest, str(client.view.cursor)
        client.open()

    async def come_back(self, person: Person) -> None:
        """Opens the session with the cursor of the last update that has arrived."""
        at = person.before[-1]["_meta"]["acp/cursor"] if person.before else person.start
        cursor = Cursor.parse(at)
        client = self.attach(person)

        async def read() -> Missed:
            await checkpoint()
            answers = {call.assistant for call in cursor.calls}
            answers |= {
                entry.id for entry in self.log if isinstance(entry.body, Assistant) and entry.id <= cursor.entry
            }
            start = max((each for each in answers if each <= cursor.entry), default=0)
            found = [entry for entry in self.log if start and entry.id >= start]
            return Missed(
                cursor=cursor,
                before=tuple(entry for entry in found if entry.id <= cursor.entry),
                entries=tuple(entry for entry in self.log if entry.id > cursor.entry),
            )

        try:
            await client.resume(
                read, is_running=lambda: self.is_running, is_own=lambda body: body.message_id in person.own
            )
        except CursorGap:  # the whole message was lost with its process
            await self.load(person)
            return
        client.open()

    async def check(self) -> None:
        """Lets every client read to the end, and compares it with one that loads the session now."""
        for person in self.people:
            if person.node is None and (person.start or person.before):
                await self.come_back(person)
            if person.queue is not None and person.line is not None:
                person.line.is_slow = False
                await person.queue.flushed()
        fresh = Person(name="fresh")
        await self.load(fresh)
        everything = shown(fresh.updates())
        for person in self.people:
            if person.start:
                self.compare(person, everything)

    def compare(self, person: Person, everything: Transcript) -> None:
        updates = person.updates()
        lost = any(each["update"].get("messageId", "").startswith("lost_") for each in updates)
        seen = [each for each in shown(updates) if each[1] not in person.own]
        since = {
            name
            for entry in self.log
            if entry.id > person.first
            for name in (getattr(entry.body, "message_id", ""), getattr(entry.body, "compaction_id", ""))
        }
        own_calls = {entry.id for entry in self.log if isinstance(entry.body, Assistant)}

        def is_expected(kind: str, name: str) -> bool:
            if name in person.own:
                return False
            if kind != "call":
                return name.removesuffix("_thought") in since
            ref = CallRef.parse(name)
            return ref is not None and ref.assistant in own_calls

        calls = {name for kind, name, _ in seen if kind == "call"}
        expected = [
            each
            for each in everything
            if is_expected(each[0], each[1]) and (each[0] != "call" or each[1] in calls or not person.first)
        ]
        statuses = {name: status for kind, name, status in seen if kind == "call"}
        assert not {"pending", "in_progress"} & set(statuses.values()), (person.name, statuses)
        seen = [each for each in seen if each[0] != "call" or is_expected(each[0], each[1])]
        if lost:
            texts = {(kind, name): text for kind, name, text in expected}
            seen = [
                (kind, name, texts[kind, name] if text.startswith(texts.get((kind, name), "\0")) else text)
                for kind, name, text in seen
                if (kind, name) in texts
            ]
        wrong = [(have, want) for have, want in zip_longest(seen, expected) if have != want]
        assert not wrong, (person.name, person.first, wrong[:3])


def shown(updates: Sequence[dict[str, Any]]) -> Transcript:
    """The transcript, without what only a load or only a live client is told in words."""
    return [
        (kind, name, text.removesuffix(INTERRUPTED).removesuffix("\n\n") if kind == "agent_message_chunk" else text)
        for kind, name, text in transcript(updates)
        if not name.startswith(("turn_end_", "lost_"))
        and (kind != "agent_message_chunk" or text.removesuffix(INTERRUPTED))
    ]


async def check_order(seed: int) -> None:
    """Runs one random order, and checks what every client shows. :raises AssertionError: a client shows something
    else."""
    chance = random.Random(seed)
    async with anyio.create_task_group() as tasks:
        world = World(chance, tasks)
        for _ in range(chance.randint(1, 4)):
            await world.act(chance.choice(world.people))
            await world.run_turn()
        await world.check()
        tasks.cancel_scope.cancel()
