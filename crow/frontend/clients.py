"""The clients of one session. Every client gets each item of the session's feed. Each question goes to all clients that
may answer it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import anyio.abc

from crow.agent import PermissionAnswer, PermissionQuestion
from crow.agent.feed import Feed
from crow.domain.entries import Command, Entry, User
from crow.domain.events import (
    Elicitation,
    ElicitationAnswer,
    ElicitationKind,
    EntryStored,
    Event,
    FormQuestion,
    SessionListChanged,
    SubagentChanged,
    TitleChanged,
    TurnBegan,
    TurnEnded,
)
from crow.frontend.client import SessionClient
from crow.frontend.queue import ClientQueue, Origin
from crow.frontend.subagents import merged_state
from crow.frontend.workspace import ClientEditor, SharedWorkspace
from crow.protocol.frames import RequestError

logger = logging.getLogger(__name__)

_MAX_ORIGINS = 200
"""For this many of a session's newest prompts, crow remembers which client sent them."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class _Failure(Generic[_Answer]):
    """The result of a question that one client could not ask its user."""

    answer: _Answer
    """The answer if no client can ask its user."""


class _OpenQuestion(Generic[_Answer]):
    """A question that is sent to every client that may answer it. The first answer counts.

    A refusal counts at once only if it comes from the client whose prompt runs. A refusal by any other client, which
    may have no user, counts only once no client is still being asked.

    `ask` sends the question to one client. It returns a `_Failure` if that client could not ask its user. `refuses`
    returns whether an answer is a refusal. `no_answer` is the answer if crow fails to ask a client.
    """

    def __init__(
        self,
        group: _ClientGroup,
        ask: Callable[[SessionClient], Awaitable[_Answer | _Failure[_Answer]]],
        can_ask: Callable[[SessionClient], bool],
        refuses: Callable[[_Answer], bool],
        no_answer: _Answer,
    ) -> None:
        self.group = group
        self._no_answer = no_answer
        self._ask = ask
        self._can_ask = can_ask
        self._refuses = refuses
        self._answers: list[_Answer] = []
        self._refusals: dict[ClientQueue, _Answer] = {}
        self._failures: dict[ClientQueue, _Answer] = {}
        self._asked: dict[ClientQueue, anyio.CancelScope] = {}
        self._changed = anyio.Event()

    def ask(self, queue: ClientQueue, tasks: anyio.abc.TaskGroup) -> None:
        """Ask a client, after all events that wait for the client have been sent. Do nothing if the client may not
        answer, or if it was already asked."""
        if self._is_candidate(queue) and queue not in self._asked:
            self._asked[queue] = anyio.CancelScope()
            queue.put(partial(self._start, queue, tasks))
            self._note_change()

    def _note_change(self) -> None:
        """Wake `answer`. Must be called when a client has answered or failed, and when the set of clients that may
        answer changes."""
        self._changed.set()

    def forget(self, queue: ClientQueue) -> None:
        """Treat a client that is gone as if it had never been asked."""
        if (scope := self._asked.pop(queue, None)) is not None:
            scope.cancel()
        self._failures.pop(queue, None)
        self._refusals.pop(queue, None)
        self._note_change()

    async def answer(self, wait_s: float) -> _Answer | None:
        """Wait for the first answer that counts, and return it. If every client that may answer fails to ask its
        user, return the `answer` of a `_Failure`. Return None if for `wait_s` seconds there is no client that may
        answer."""
        while not self._answers:
            candidates = [each for each in self.group.root.queues if self._is_candidate(each)]
            if candidates and all(each in self._failures or each in self._refusals for each in candidates):
                refusals = [self._refusals[each] for each in candidates if each in self._refusals]
                return refusals[0] if refusals else self._failures[candidates[-1]]
            with anyio.move_on_after(None if candidates else wait_s) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                return None
            self._changed = anyio.Event()
        return self._answers[0]

    def withdraw(self) -> None:
        """Withdraw the question from all clients that have not answered."""
        for scope in self._asked.values():
            scope.cancel()

    def _is_candidate(self, queue: ClientQueue) -> bool:
        client = self.group.client_of(queue)
        return queue.may_write and client is not None and self._can_ask(client)

    async def _start(self, queue: ClientQueue, tasks: anyio.abc.TaskGroup) -> None:
        tasks.start_soon(self._ask_one, queue)

    async def _ask_one(self, queue: ClientQueue) -> None:
        client, scope = self.group.client_of(queue), self._asked.get(queue)
        if client is None or scope is None:
            return
        with scope:
            try:
                answer = await self._ask(client)
                may_answer = await queue.has_access("write")
            except ConnectionError:
                return  # the end of the connection detaches the client
            except Exception:
                logger.exception("A client could not be asked, or its answer could not be accepted")
                answer, may_answer = _Failure(self._no_answer), True
            if not may_answer:
                self._note_change()
                return
            if isinstance(answer, _Failure):
                self._failures[queue] = answer.answer
            elif self._refuses(answer) and not self.group.root.senders.has_sent_running(queue):
                self._refusals[queue] = answer
            else:
                self._answers.append(answer)
            self._note_change()


class _ClientGroup:
    """A :class:`crow.agent.Client` that stands for all clients of a session, or of one of its subagents."""

    root: SessionClients

    def __init__(self, session_id: str, leaf: int | None = None) -> None:
        self.feed = Feed(session_id, leaf or 0)

    def client_of(self, queue: ClientQueue) -> SessionClient | None:
        """Return the object that shows this session or subagent to an attached client, or None if that client does
        not show it."""
        raise NotImplementedError

    def _pairs(self) -> Iterator[tuple[ClientQueue, SessionClient]]:
        """Yield all queues with their clients."""
        for queue in tuple(self.root.queues):
            if (client := self.client_of(queue)) is not None:
                yield queue, client

    async def publish(self, event: Event) -> None:
        """See :class:`crow.agent.Client`. Wait only for clients with a patient connection."""
        self.put(event)
        for queue in tuple(self.root.queues):
            await queue.room()

    def put(self, event: Event) -> None:
        """Add an event to the feed, and so to the queue of each client."""
        event = self.feed.put(event)
        for queue, client in self._pairs():
            queue.publish(client, event, is_own=self.root.senders.is_own(queue, event))

    def publish_unfinished(self, queue: ClientQueue) -> None:
        """Add the items that are not in the log yet to the queue of a new client. If the client then loads or resumes
        the session, they add nothing."""
        client = self.client_of(queue)
        assert client is not None
        for item in self.feed.open_items():
            queue.publish(client, item, is_own=False)

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
        """See :class:`crow.agent.Client`."""

        async def ask(client: SessionClient) -> PermissionAnswer | _Failure[PermissionAnswer]:
            answer = await client.ask(question)
            return _Failure(answer) if answer in ("cannot_ask", "unanswered") else answer

        def refuses(answer: PermissionAnswer) -> bool:
            return not answer.startswith("allow")

        asked = _OpenQuestion[PermissionAnswer](self, ask, lambda _client: True, refuses, "cannot_ask")
        return await self._ask(asked) or "unanswered"

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """See :class:`crow.agent.Client`."""
        dismissed = ElicitationAnswer(action="cancel")
        kind: ElicitationKind = "form" if isinstance(question, FormQuestion) else "url"

        async def ask(client: SessionClient) -> ElicitationAnswer | _Failure[ElicitationAnswer]:
            try:
                return await client.elicit(question)
            except (RequestError, TimeoutError):
                return _Failure(dismissed)

        def can_ask(client: SessionClient) -> bool:
            return kind in client.caps.question_kinds

        asked = _OpenQuestion(self, ask, can_ask, lambda answer: answer.action != "accept", dismissed)
        return await self._ask(asked) or dismissed

    async def _ask(self, question: _OpenQuestion[_Answer]) -> _Answer | None:
        self.root.questions.append(question)
        try:
            for queue, _client in self._pairs():
                question.ask(queue, self.root.tasks)
            return await question.answer(self.root.wait_s)
        finally:
            self.root.questions.remove(question)
            question.withdraw()

    @property
    def takes_notices(self) -> bool:
        """See :class:`crow.agent.Client`. False if no client is attached, because crow must store the notices in that
        case."""
        notices = [client.caps.notices for _, client in self._pairs()]
        return bool(notices) and all(notices)

    @property
    def question_kinds(self) -> frozenset[ElicitationKind]:
        """See :class:`crow.agent.Client`. If no client is attached now, returns the kinds that the last attached
        clients supported, because a client may connect again."""
        return self.root.known_kinds

    async def finish_question(self, question_id: str) -> None:
        """See :class:`crow.agent.Client`."""
        for queue, client in self._pairs():
            queue.put(partial(client.finish_question, question_id))

    @property
    def shows_subagents(self) -> bool:
        """See :class:`crow.agent.Client`. True only if at least one client is attached and all attached clients show
        subagents."""
        shown = [client.caps.subagents for _, client in self._pairs()]
        return bool(shown) and all(shown)

    def open_subagent(self, session_id: str) -> _ClientGroup:
        """See :class:`crow.agent.Client`."""
        group = _SubagentGroup(self.root, session_id)
        for queue, client in self._pairs():
            if client.caps.subagents:
                group.clients[queue] = client.subagents.open(session_id, group.feed)
        self.root.subagents[session_id] = group
        return group

    def close_subagent(self, session_id: str) -> None:
        """See :class:`crow.agent.Client`."""
        self.root.subagents.pop(session_id, None)
        for queue, client in self._pairs():
            queue.put(partial(_close_subagent, client, session_id))


class _SubagentGroup(_ClientGroup):
    """The clients of a session that show one of its subagents."""

    def __init__(self, root: SessionClients, session_id: str) -> None:
        super().__init__(session_id)
        self.root = root
        self.clients: dict[ClientQueue, SessionClient] = {}

    def client_of(self, queue: ClientQueue) -> SessionClient | None:
        """See `_ClientGroup`."""
        return self.clients.get(queue)


class _PromptSenders:
    """Remembers which client sent which of a session's newest prompts, and which prompt's turn is running."""

    def __init__(self) -> None:
        self.turn = ""
        """The message id of the prompt whose turn runs. Empty if no turn runs."""
        self._turn_origin: Origin | None = None
        self._origins: dict[str, Origin] = {}
        self._waiting: dict[str, ClientQueue] = {}
        """The clients that wait for the responses to their prompts."""

    def note(self, message_id: str, queue: ClientQueue) -> None:
        """Remember that a client has sent a prompt, and that it waits for the response."""
        self._origins[message_id] = queue.origin
        self._waiting[message_id] = queue
        for known in (self._origins, self._waiting):
            while len(known) > _MAX_ORIGINS:
                del known[next(iter(known))]

    def begin_turn(self, message_id: str) -> ClientQueue | None:
        """Note that the turn of a prompt begins. Return the client that waits for the response, or None."""
        self.turn, self._turn_origin = message_id, self._origins.get(message_id)
        return self._waiting.get(message_id)

    def end_turn(self, message_id: str) -> None:
        """Note that the turn of a prompt has ended."""
        self.drop(message_id)
        self.turn, self._turn_origin = "", None

    def drop(self, message_id: str) -> None:
        """Note that no client waits for the response to a prompt any longer."""
        self._waiting.pop(message_id, None)

    def has_sent(self, origin: Origin, message_id: str) -> bool:
        """Whether crow remembers that this client has sent the prompt."""
        return self._origins.get(message_id) == origin

    def has_sent_running(self, queue: ClientQueue) -> bool:
        """Whether this client has sent the prompt whose turn runs."""
        return queue.origin == self._turn_origin

    def is_own(self, queue: ClientQueue, event: Event) -> bool:
        """Whether the event shows a prompt that this client has sent, or the state of its turn."""
        match event:
            case (
                EntryStored(entry=Entry(body=User(message_id=message_id) | Command(message_id=message_id)))
                | TurnBegan(message_id=message_id)
            ):
                return self._origins.get(message_id, self._turn_origin) == queue.origin
            case TurnEnded(message_id=message_id):
                return queue is self._waiting.get(message_id)
            case _:
                return False


class SessionClients(_ClientGroup):
    """All clients that are attached to a session. Clients may be attached and detached while the session works.

    While a client's prompt runs, `workspace` uses that client's editor. The clients' tasks run in `tasks`. If no client
    can answer a question, the question waits `wait_s` seconds for a client that can. `leaf` is the newest entry of the
    session.
    """

    def __init__(
        self,
        session_id: str,
        tasks: anyio.abc.TaskGroup,
        workspace: SharedWorkspace,
        *,
        wait_s: float,
        leaf: int | None = None,
    ) -> None:
        super().__init__(session_id, leaf)
        self._session_id = session_id
        self.workspace = workspace
        self.root = self
        self.tasks = tasks
        self.wait_s = wait_s
        self.queues: list[ClientQueue] = []
        self.questions: list[_OpenQuestion[Any]] = []
        """The questions that wait for an answer. A client that is attached later is asked too."""
        self.subagents: dict[str, _SubagentGroup] = {}
        """The running subagents, by the ids of their sessions."""
        self.known_kinds: frozenset[ElicitationKind] = frozenset()
        """The kinds of questions that are supported by the clients that may write. If no client is attached, these are
        the kinds that the last attached clients supported."""
        self._states: dict[str, SubagentChanged] = {}
        """The newest state of each subagent. A client that is attached later starts with these states."""
        self.senders = _PromptSenders()
        self.announce: Callable[[SessionListChanged], object] | None = None
        """Tells every client of the session's owner about a change of the list of sessions."""

    def client_of(self, queue: ClientQueue) -> SessionClient | None:
        """See `_ClientGroup`."""
        return queue.client

    def attach(
        self,
        client: SessionClient,
        *,
        origin: Origin,
        may_write: bool,
        is_patient: bool,
        drop: Callable[[str], None],
    ) -> ClientQueue:
        """Add a client. It gets the unfinished message and calls first, and then all new items."""
        queue = ClientQueue(
            client, origin=origin, may_write=may_write, is_patient=is_patient, drop=drop, leave=self.detach
        )
        for state in self._states.values():
            client.subagents.note(state)
        self.queues.append(queue)
        self.publish_unfinished(queue)
        for session_id, group in self.subagents.items():
            if client.caps.subagents:
                group.clients[queue] = client.subagents.open(session_id, group.feed)
                group.publish_unfinished(queue)
        self._note_kinds()
        self.tasks.start_soon(queue.run)
        for question in self.questions:
            question.ask(queue, self.tasks)
        return queue

    def detach(self, queue: ClientQueue) -> None:
        """Remove a client. Open questions then treat this client as if it had never been asked."""
        if queue in self.queues:
            self.queues.remove(queue)
        if queue.editor is not None and queue.editor is self.workspace.editor:
            self.workspace.use(None)
        queue.detach()
        for group in self.subagents.values():
            group.clients.pop(queue, None)
        for question in tuple(self.questions):
            question.forget(queue)
        self._note_kinds()

    async def flushed(self) -> None:
        """Wait until all items have been sent."""
        for queue in tuple(self.queues):
            await queue.flushed()

    def close(self) -> None:
        """Detach all clients, because the session has been closed."""
        for queue in tuple(self.queues):
            self.detach(queue)

    def note_sender(self, message_id: str, queue: ClientQueue) -> None:
        """Remember which client sent a prompt. That client already shows the prompt, and waits for the response."""
        self.senders.note(message_id, queue)
        if message_id == self.senders.turn:  # the client has repeated its prompt after connecting again
            self.workspace.use(queue.editor)

    async def publish(self, event: Event) -> None:
        """See `_ClientGroup`."""
        match event:
            case SessionListChanged() if self.announce is not None:
                self.announce(event)  # this also tells the clients of this session
                return
            case TitleChanged(title=title) if self.announce is not None:
                self.announce(SessionListChanged(session_id=self._session_id, change="renamed", title=title))
            case SubagentChanged():
                self._states[event.session_id] = merged_state(self._states.get(event.session_id), event)
        await super().publish(event)

    def put(self, event: Event) -> None:
        """See `_ClientGroup`. If another process has taken over the session and already runs a new turn, do not show
        the end of the old turn."""
        if isinstance(event, TurnEnded) and self.senders.turn not in ("", event.message_id):
            self.senders.drop(event.message_id)
            return
        if isinstance(event, TurnBegan):
            self.workspace.use(self._editor_for(self.senders.begin_turn(event.message_id)))
            if event.stored is not None:
                super().put(EntryStored(entry=event.stored))
        super().put(event)
        if isinstance(event, TurnEnded):
            self.senders.end_turn(event.message_id)

    def _editor_for(self, sender: ClientQueue | None) -> ClientEditor | None:
        """Return the editor of the client whose prompt runs. If no client has asked for the turn and only one client is
        attached, return the editor of that client."""
        if sender is None and len(self.queues) == 1:
            sender = self.queues[0]
        return None if sender is None or sender.is_detached else sender.editor

    def _note_kinds(self) -> None:
        if self.queues:
            writers = [each.client.caps.question_kinds for each in self.queues if each.may_write]
            self.known_kinds = frozenset().union(*writers)


async def _close_subagent(client: SessionClient, session_id: str) -> None:
    client.subagents.close(session_id)
