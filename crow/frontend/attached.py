"""The clients of one shared session. Every client gets each event. Each question goes to all clients that may answer
it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import anyio.abc

from crow.agent import PermissionAnswer, PermissionQuestion
from crow.agent.pending import PendingPrompt
from crow.agent.session import Session
from crow.domain.entries import Assistant, CallRef, Entry, ToolResult, User
from crow.domain.errors import ArgumentError, NoSuchSession
from crow.domain.events import (
    CallEnded,
    CallProgressed,
    Elicitation,
    ElicitationAnswer,
    ElicitationKind,
    EntryStored,
    Event,
    FormQuestion,
    SubagentChanged,
    SummaryShown,
    TextShown,
    ThoughtShown,
)
from crow.domain.replay import RunningTurn
from crow.domain.trace_context import use_trace_context
from crow.frontend.client import SessionClient
from crow.frontend.cursors import CursorTracker
from crow.frontend.frames import RequestError
from crow.frontend.subagents import merged_state
from crow.frontend.workspace import EditorWorkspace, SharedWorkspace
from crow.store import Access

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""If about this many bytes wait to be sent to a client, crow disconnects the client."""

STALLED_S = 60.0
"""If updates wait for a client and the client has read nothing for this many seconds, crow disconnects the client."""

EVENT_BYTES = 500
"""The estimated memory that a waiting event takes in addition to its text, in bytes."""

MAX_ORIGINS = 200
"""Crow remembers which client sent a prompt for this many of a session's newest prompts."""

Answer = TypeVar("Answer")
Origin = object
"""The identity of a client. This is the connection id, which stays the same when the client connects again. A client
without a connection id is identified by its connection object."""


@dataclass(slots=True, eq=False)
class WaitingItem:
    """An event that waits to be sent to a client. Calling `send` sends the event. `size` is the approximate memory that
    the event takes, in bytes."""

    send: Callable[[], Awaitable[object]]
    size: int
    is_begun: bool = False


class AttachedClient:
    """One client of a shared session, with the queue of events that are still to be sent to the client. `run` sends
    these events.

    A client that does not read delays neither the session nor other clients. If its queue grows too large, or if it
    reads nothing for too long, the client is disconnected. `may_write` means that the client may send prompts and
    answer questions.
    """

    def __init__(
        self,
        client: SessionClient,
        *,
        origin: Origin,
        may_write: bool,
        drop: Callable[[str], None],
        leave: Callable[[AttachedClient], None],
    ) -> None:
        self.client = client
        self.origin = origin
        self.may_write = may_write
        self.is_detached = False
        self.check: Callable[[Access], Awaitable[None]] | None = None
        """Checks that the client's user has the given access to the session. Raises NoSuchSession if the user may no
        longer see the session, and ArgumentError if the user has less than the given access."""
        self.editor: EditorWorkspace | None = None
        """The workspace in which this client's editor serves files and terminals, or None."""
        self._drop = drop
        self._leave = partial(leave, self)
        self._items: deque[WaitingItem] = deque()
        self._bytes = 0
        self._progress: dict[CallRef, tuple[WaitingItem, list[CallProgressed]]] = {}
        self._moved_at = 0.0
        self._wake = asyncio.Event()
        self._scope = anyio.CancelScope()
        self._flushes: set[asyncio.Future[None]] = set()

    async def run(self) -> None:
        """Sends the waiting events in order. Ends after `detach`."""
        use_trace_context({})  # the client outlives the request that attached it
        with self._scope:
            while True:
                while self._items:
                    item = self._items[0]
                    item.is_begun = True
                    try:
                        await item.send()
                    except Exception:
                        logger.exception("An update could not be sent")
                        self._end("Internal error: an update could not be sent.")
                        return
                    if self.is_detached:
                        return
                    self._items.popleft()
                    self._bytes -= item.size
                    self._moved_at = time.monotonic()
                self._wake.clear()
                await self._wake.wait()

    def put(self, send: Callable[[], Awaitable[object]], size: int = EVENT_BYTES) -> WaitingItem | None:
        """Adds `send` to the end of the queue. It is called after everything that is already in the queue. Returns the
        new item of the queue.

        If too much waits for the client, disconnects the client instead and returns None.
        """
        if self.is_detached:
            return None
        now = time.monotonic()
        if not self._items:
            self._moved_at = now
        if self._bytes + size > MAX_WAITING_BYTES and self._items:
            self._end(f"This client read too slowly: {self._bytes // 2**20} MiB waited for it.")
            return None
        if now - max(self._moved_at, self.client.sent_at) > STALLED_S:
            self._end(f"This client read nothing for {STALLED_S:.0f} s.")
            return None
        item = WaitingItem(send, size)
        self._items.append(item)
        self._bytes += size
        self._wake.set()
        return item

    def publish(self, client: SessionClient, event: Event, *, is_own: bool) -> None:
        """Adds an event to the queue. `client` is the object that will send the event: either this client's own
        `SessionClient`, or the one that shows a sub-agent to this client."""
        if isinstance(event, CallProgressed):
            # Each progress event holds the whole output so far, so a newer one replaces one that still waits.
            waiting = self._progress.get(event.call)
            if waiting is not None and not waiting[0].is_begun:
                waiting[1][0] = event
                return
            holder = [event]
            item = self.put(lambda: client.publish(holder[0]), _size(event))
            if item is not None:
                self._progress[event.call] = (item, holder)
            return
        if isinstance(event, EntryStored) and isinstance(event.entry.body, Assistant):
            self.check_access()
        match event:
            case EntryStored(entry=Entry(body=ToolResult(call=call))) | CallEnded(call=call):
                self._progress.pop(call, None)
        self.put(partial(client.publish_shared, event, is_own=is_own), _size(event))

    def check_access(self) -> None:
        """Adds a check to the queue. Before any later event is sent, the check finds out whether the client may still
        see the session."""
        if self.check is not None:
            self.put(partial(self.has_access, "read"))

    async def has_access(self, access: Access) -> bool:
        """Returns whether the client's user still has `access` to the session. If the user may no longer see the
        session, detaches the client. If the user has less access than `access`, the client may no longer write."""
        try:
            if self.check is not None:
                await self.check(access)
        except NoSuchSession:
            self._leave()
        except ArgumentError:
            self.may_write = False
        else:
            return True
        return False

    async def flushed(self) -> None:
        """Waits until all events that are in the queue now have been sent, or until the client is detached."""
        if self.is_detached or not self._items:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flushes.add(done)
        self.put(partial(self._finish, done), 0)
        try:
            await done
        finally:
            self._flushes.discard(done)

    def detach(self) -> None:
        """Discards the waiting events, and ends `run`."""
        self.is_detached = True
        self.client.close()
        self._scope.cancel()
        self._items.clear()
        self._progress.clear()
        for done in self._flushes:
            if not done.done():
                done.set_result(None)

    def _end(self, reason: str) -> None:
        if not self.is_detached:
            self.detach()
            self._drop(reason)

    async def _finish(self, done: asyncio.Future[None]) -> None:
        if not done.done():
            done.set_result(None)


@dataclass(frozen=True, slots=True)
class Failure(Generic[Answer]):
    """The result of a question that one client could not ask its user. If none of the clients can ask its user,
    `answer` is used as the answer to the question."""

    answer: Answer


class OpenQuestion(Generic[Answer]):
    """A question that is sent to every client that may answer it. The first answer counts.

    `ask` sends the question to one client. It returns a `Failure` if that client could not ask its user.
    """

    def __init__(
        self,
        group: ClientGroup,
        ask: Callable[[SessionClient], Awaitable[Answer | Failure[Answer]]],
        can_ask: Callable[[SessionClient], bool],
    ) -> None:
        self.group = group
        self._ask = ask
        self._can_ask = can_ask
        self._answers: list[Answer] = []
        self._failures: dict[AttachedClient, Answer] = {}
        self._asked: dict[AttachedClient, anyio.CancelScope] = {}
        self._changed = anyio.Event()

    def ask(self, attachment: AttachedClient, tasks: anyio.abc.TaskGroup) -> None:
        """Asks a client, after all events that wait for the client have been sent. Does nothing if the client may not
        answer, or if it was already asked."""
        if self._is_candidate(attachment) and attachment not in self._asked:
            self._asked[attachment] = anyio.CancelScope()
            attachment.put(partial(self._start, attachment, tasks))
            self.note_change()

    def note_change(self) -> None:
        """Wakes `answer`. Must be called when a client has answered or failed, and when the set of clients that may
        answer changes."""
        self._changed.set()

    def forget(self, attachment: AttachedClient) -> None:
        """Treats a client that is gone as if it had never been asked."""
        if (scope := self._asked.pop(attachment, None)) is not None:
            scope.cancel()
        self._failures.pop(attachment, None)
        self.note_change()

    async def answer(self, wait_s: float) -> Answer | None:
        """Waits for the first answer and returns it. If every client that may answer fails to ask its user, returns the
        `answer` of a `Failure`. Returns None if for `wait_s` seconds there is no client that may answer."""
        while not self._answers:
            candidates = [each for each in self.group.root.attachments if self._is_candidate(each)]
            if candidates and all(each in self._failures for each in candidates):
                return self._failures[candidates[-1]]
            with anyio.move_on_after(None if candidates else wait_s) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                return None
            self._changed = anyio.Event()
        return self._answers[0]

    def withdraw(self) -> None:
        """Withdraws the question from all clients that have not answered."""
        for scope in self._asked.values():
            scope.cancel()

    def _is_candidate(self, attachment: AttachedClient) -> bool:
        client = self.group.client_of(attachment)
        return attachment.may_write and client is not None and self._can_ask(client)

    async def _start(self, attachment: AttachedClient, tasks: anyio.abc.TaskGroup) -> None:
        tasks.start_soon(self._ask_one, attachment)

    async def _ask_one(self, attachment: AttachedClient) -> None:
        client, scope = self.group.client_of(attachment), self._asked.get(attachment)
        if client is None or scope is None:
            return
        with scope:
            try:
                answer = await self._ask(client)
            except ConnectionError:
                return  # the end of the connection detaches the client
            except Exception:
                logger.exception("A client could not be asked")
                return
            if not await attachment.has_access("write"):
                self.note_change()
                return
            if isinstance(answer, Failure):
                self._failures[attachment] = answer.answer
            else:
                self._answers.append(answer)
            self.note_change()


class ClientGroup:
    """A :class:`crow.agent.Client` that stands for all clients of a session, or of one of its sub-agents."""

    root: AttachedClients

    def __init__(self) -> None:
        self.running = RunningTurn()

    def client_of(self, attachment: AttachedClient) -> SessionClient | None:
        """Returns the object that shows this session or sub-agent to an attached client, or None if that client does
        not show it."""
        raise NotImplementedError

    def pairs(self) -> Iterator[tuple[AttachedClient, SessionClient]]:
        """Yields all attachments with their clients."""
        for attachment in tuple(self.root.attachments):
            if (client := self.client_of(attachment)) is not None:
                yield attachment, client

    async def publish(self, event: Event) -> None:
        """See :class:`crow.agent.Client`. Never waits for a client."""
        self.running.feed(event)
        for attachment, client in self.pairs():
            attachment.publish(client, event, is_own=self.root.is_own(attachment, event))

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
        """See :class:`crow.agent.Client`."""

        async def ask(client: SessionClient) -> PermissionAnswer | Failure[PermissionAnswer]:
            answer = await client.ask_shared(question)
            return Failure(answer) if answer in ("cannot_ask", "unanswered") else answer

        return await self._ask(OpenQuestion(self, ask, lambda _client: True)) or "unanswered"

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """See :class:`crow.agent.Client`."""
        dismissed = ElicitationAnswer(action="cancel")
        kind: ElicitationKind = "form" if isinstance(question, FormQuestion) else "url"

        async def ask(client: SessionClient) -> ElicitationAnswer | Failure[ElicitationAnswer]:
            try:
                return await client.elicit_shared(question)
            except (RequestError, TimeoutError):
                return Failure(dismissed)

        return await self._ask(OpenQuestion(self, ask, lambda client: kind in client.question_kinds)) or dismissed

    async def _ask(self, question: OpenQuestion[Answer]) -> Answer | None:
        self.root.questions.append(question)
        try:
            for attachment, _client in self.pairs():
                question.ask(attachment, self.root.tasks)
            return await question.answer(self.root.wait_s)
        finally:
            self.root.questions.remove(question)
            question.withdraw()

    @property
    def takes_notices(self) -> bool:
        """See :class:`crow.agent.Client`. False if no client is attached, because crow must store the notices in that
        case."""
        notices = [client.takes_notices for _, client in self.pairs()]
        return bool(notices) and all(notices)

    @property
    def question_kinds(self) -> frozenset[ElicitationKind]:
        """See :class:`crow.agent.Client`. If no client is attached now, returns the kinds that the last attached
        clients supported, because a client may connect again."""
        return self.root.known_kinds

    async def finish_question(self, question_id: str) -> None:
        """See :class:`crow.agent.Client`."""
        for attachment, client in self.pairs():
            attachment.put(partial(client.finish_question, question_id))

    @property
    def shows_subagents(self) -> bool:
        """See :class:`crow.agent.Client`. True only if at least one client is attached and all attached clients show
        sub-agents."""
        shown = [client.shows_subagents for _, client in self.pairs()]
        return bool(shown) and all(shown)

    def open_subagent(self, session_id: str) -> ClientGroup:
        """See :class:`crow.agent.Client`."""
        group = SubagentClients(self.root, session_id)
        for attachment, client in self.pairs():
            if client.shows_subagents:
                group.clients[attachment] = client.open_subagent(session_id)
        self.root.subagents[session_id] = group
        return group

    def close_subagent(self, session_id: str) -> None:
        """See :class:`crow.agent.Client`."""
        self.root.subagents.pop(session_id, None)
        for attachment, client in self.pairs():
            attachment.put(partial(_close_subagent, client, session_id))


class SubagentClients(ClientGroup):
    """The clients of a session that show one of its sub-agents."""

    def __init__(self, root: AttachedClients, session_id: str) -> None:
        super().__init__()
        self.root = root
        self.session_id = session_id
        self.clients: dict[AttachedClient, SessionClient] = {}

    def client_of(self, attachment: AttachedClient) -> SessionClient | None:
        """See `ClientGroup`."""
        return self.clients.get(attachment)


class AttachedClients(ClientGroup):
    """All clients that are attached to a session. Clients may be attached and detached while the session works.

    This object is also the session's :class:`crow.agent.session.TurnListener`. While a client's prompt runs, this
    object makes `workspace` use that client's editor. The clients' tasks run in `tasks`. If no client can answer a
    question, the question waits `wait_s` seconds for a client that can.
    """

    def __init__(self, tasks: anyio.abc.TaskGroup, workspace: SharedWorkspace, *, wait_s: float) -> None:
        super().__init__()
        self.workspace = workspace
        self.root = self
        self.tasks = tasks
        self.wait_s = wait_s
        self.attachments: list[AttachedClient] = []
        self.questions: list[OpenQuestion[Any]] = []
        self.subagents: dict[str, SubagentClients] = {}
        self.known_kinds: frozenset[ElicitationKind] = frozenset()
        self.last_turn: dict[str, Any] = {"state": "idle"}
        """The state of the last turn, as clients get it in `_meta["acp/turnState"]`."""
        self._states: dict[str, SubagentChanged] = {}
        self._origins: dict[str, Origin] = {}
        self._senders: dict[str, AttachedClient] = {}
        self._turn_origin: Origin | None = None
        self._turn_id = ""
        self.leaf: Callable[[], int | None] = lambda: None
        self.runs_elsewhere: Callable[[], bool] = lambda: False
        self.on_publish: Callable[[Event], object] = lambda _event: None
        """Called with each event of the session before it is sent."""
        self.place = CursorTracker()
        """The place in the session's log up to which all events have been published."""

    def client_of(self, attachment: AttachedClient) -> SessionClient | None:
        """See `ClientGroup`."""
        return attachment.client

    def follow(self, session: Session) -> None:
        """Connects the clients with their session, which is created after this object. Must be called before the
        session runs."""
        branch = session.branch
        self.leaf = lambda: branch.leaf
        self.runs_elsewhere = lambda: session.runs_elsewhere
        self.place.pass_prompt(entry=branch.leaf)

    def attach(
        self, client: SessionClient, *, origin: Origin, may_write: bool, drop: Callable[[str], None]
    ) -> AttachedClient:
        """Adds a client, which gets all events from now on. If a turn is running, `SessionClient.learn` tells the
        client about the turn's earlier events."""
        attachment = AttachedClient(client, origin=origin, may_write=may_write, drop=drop, leave=self.detach)
        client.learn(self.running.events(), self.place.copy())
        for state in self._states.values():
            client.note_state(state)
        for session_id, group in self.subagents.items():
            if client.shows_subagents:
                group.clients[attachment] = subagent = client.open_subagent(session_id)
                subagent.hold()
                subagent.learn(group.running.events())
        self.attachments.append(attachment)
        self._note_kinds()
        self.tasks.start_soon(attachment.run)
        for question in self.questions:
            question.ask(attachment, self.tasks)
        return attachment

    def detach(self, attachment: AttachedClient) -> None:
        """Removes a client. Open questions then count this client as never asked."""
        if attachment in self.attachments:
            self.attachments.remove(attachment)
        if attachment.editor is not None and attachment.editor is self.workspace.editor:
            self.workspace.use(None)
        attachment.detach()
        for group in self.subagents.values():
            group.clients.pop(attachment, None)
        for question in tuple(self.questions):
            question.forget(attachment)
        self._note_kinds()

    def close(self) -> None:
        """Detaches all clients, because the session has been closed."""
        for attachment in tuple(self.attachments):
            self.detach(attachment)

    def note_sender(self, message_id: str, attachment: AttachedClient) -> None:
        """Remembers which client sent a prompt. That client already shows the prompt, and waits for the response."""
        self._origins[message_id] = attachment.origin
        self._senders[message_id] = attachment
        if message_id == self._turn_id:  # the client has repeated its prompt after connecting again
            self.workspace.use(attachment.editor)
        for known in (self._origins, self._senders):
            while len(known) > MAX_ORIGINS:
                del known[next(iter(known))]

    def has_sent(self, origin: Origin, message_id: str) -> bool:
        """Whether crow remembers that this client has sent the prompt."""
        return self._origins.get(message_id) == origin

    def has_begun(self, prompt: PendingPrompt) -> bool:
        """Whether the prompt's turn is running and the prompt was sent to the clients."""
        return self._turn_id == prompt.message_id and not prompt.needs_servers

    def is_own_prompt(self, attachment: AttachedClient, message_id: str) -> bool:
        """Whether this client has sent the prompt."""
        return self._origins.get(message_id, self._turn_origin) == attachment.origin

    def is_own(self, attachment: AttachedClient, event: Event) -> bool:
        """Whether the event is a prompt that this client has sent."""
        match event:
            case EntryStored(entry=entry) if isinstance(entry.body, User):
                return self.is_own_prompt(attachment, entry.body.message_id)
            case _:
                return False

    async def publish(self, event: Event) -> None:
        """See `ClientGroup`."""
        self.on_publish(event)
        if isinstance(event, EntryStored):
            self.place.pass_entry(event.entry)
        if isinstance(event, SubagentChanged):
            self._states[event.session_id] = merged_state(self._states.get(event.session_id), event)
        await super().publish(event)

    async def turn_began(self, prompt: PendingPrompt) -> None:
        """See :class:`crow.agent.session.TurnListener`."""
        self.show_turn(prompt, self.leaf())

    def show_turn(self, prompt: PendingPrompt, leaf: int | None) -> None:
        """Tells the clients that a turn began, here or in another process. `leaf` is the id of the session's newest
        entry. If the prompt is already stored, the newest entry is the prompt's entry."""
        self.place.pass_prompt(entry=leaf)
        self._turn_id, self._turn_origin = prompt.message_id, self._origins.get(prompt.message_id)
        sender = self._senders.get(prompt.message_id)
        self.workspace.use(None if sender is None or sender.is_detached else sender.editor)
        self.last_turn = {"state": "running"}
        for attachment in tuple(self.attachments):
            is_own = self.is_own_prompt(attachment, prompt.message_id)
            attachment.check_access()
            attachment.put(partial(attachment.client.show_turn, prompt, leaf, is_own=is_own))

    async def turn_ended(self, prompt: PendingPrompt) -> None:
        """See :class:`crow.agent.session.TurnListener`."""
        if self.runs_elsewhere() and prompt.message_id != self._turn_id:  # it was cancelled while it waited
            self._senders.pop(prompt.message_id, None)
        else:
            await self.show_turn_end(prompt)

    async def show_turn_end(self, prompt: PendingPrompt) -> None:
        """Shows that a turn has ended, here or in another process."""
        sender = self._senders.pop(prompt.message_id, None)
        stop = {"stopReason": prompt.stop} if prompt.error is None else {"stopReason": "error"}
        self.last_turn = {"state": "idle", **stop}
        for attachment in tuple(self.attachments):
            is_own = attachment is sender
            attachment.put(partial(attachment.client.show_turn_end, prompt, self.last_turn, is_own=is_own))
        self._turn_id, self._turn_origin = "", None

    def _note_kinds(self) -> None:
        if self.attachments:
            writers = [each.client.question_kinds for each in self.attachments if each.may_write]
            self.known_kinds = frozenset().union(*writers)


async def _close_subagent(client: SessionClient, session_id: str) -> None:
    client.close_subagent(session_id)


def _size(event: Event) -> int:
    match event:
        case TextShown(text=text) | ThoughtShown(text=text) | CallProgressed(text=text) | SummaryShown(text=text):
            return EVENT_BYTES + len(text)
        case EntryStored(entry=Entry(body=ToolResult(text=text))):
            return EVENT_BYTES + len(text)
        case _:
            return EVENT_BYTES
