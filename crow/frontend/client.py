"""The interface of a connection to a client, and the object through which a session talks to its client."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import anyio

from crow.agent import PermissionAnswer, PermissionQuestion
from crow.agent.pending import PendingPrompt
from crow.domain import events
from crow.domain.entries import Assistant, CallRef, Command, Entry, Started, ToolResult, TurnEnd, User
from crow.domain.events import Elicitation, ElicitationAnswer, ElicitationKind, Event
from crow.domain.rendering import safe, title_line
from crow.domain.replay import Replay
from crow.frontend.cursors import CURSOR_KEY, PIECEMEAL, Cursor, CursorGap, CursorTracker, Missed
from crow.frontend.frames import RequestError, RequestId
from crow.frontend.params import ClientCapabilities
from crow.frontend.questions import (
    elicitation_answer,
    elicitation_params,
    permission_answer,
    permission_params,
)
from crow.frontend.subagents import MAX_REPLAYED, Family, merged_state
from crow.frontend.tool_calls import PART_BYTES, json_bytes, limit_text
from crow.frontend.updates import (
    LiveUpdates,
    ReplayLimits,
    ReplayUpdates,
    Update,
    command_updates,
    prompt_updates,
)
from crow.store import Store
from crow.tools.limits import FairLimiter

logger = logging.getLogger(__name__)

SendRequest: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""A function that sends a request to the editor and returns the result. It raises RequestError if the editor answers
with an error, and ConnectionError if the editor is gone."""


Handler: TypeAlias = Callable[[str, Any, bool], Awaitable[Any]]
"""A function that handles a message. Its arguments are the method, the parameters, and whether the message is a
notification. It raises RequestError to send an error response."""

MESSAGE_BYTES = 8_000
MAX_WAITING_QUESTIONS = 16
"""The maximum number of questions from MCP servers that may wait while the user answers another question."""

MAX_REMEMBERED = 1_000
"""Crow remembers this many of the newest messages that a replay sent, and this many of the newest calls."""


class RequestParams(dict[str, Any]):
    """The parameters of a request, and the request's id. The client may use that id later to cancel the request."""

    __slots__ = ("request_id",)

    def __init__(self, params: dict[str, Any], request_id: RequestId) -> None:
        super().__init__(params)
        self.request_id = request_id


class ClientConnection(Protocol):
    """The connection to one client. For an editor, this is :class:`crow.frontend.connection.EditorConnection`."""

    async def run(self, handle: Handler) -> None:
        """Calls `handle` for each request and notification, until the client is gone. Each call runs in a task of its
        own.

        For a request, the parameters are passed to `handle` as `RequestParams`.
        """
        ...

    async def end(self) -> None:
        """Sends the pending messages, closes the connection and cancels the remaining handlers."""
        ...

    def stop(self, reason: str = "") -> None:
        """Acts as if the client were gone. Sends `reason` to the client if the transport can do so."""
        ...

    def after_response(self, action: Callable[[], object]) -> None:
        """Calls `action` right after the response to the current task's request has been sent."""
        ...

    async def request(self, method: str, params: dict[str, Any]) -> Any:
        """See `SendRequest`. If cancelled, the request is withdrawn."""
        ...

    async def notify(self, method: str, params: dict[str, Any]) -> None:
        """Sends a notification. This works even after `run` has ended, because running turns still send updates."""
        ...


def request_error(code: int, message: str, **data: object) -> RequestError:
    """Returns an error with the text in both `message` and `data.details`, because some clients show only one of the
    two."""
    message = limit_text(safe(message), MESSAGE_BYTES)
    return RequestError(code, message, {**data, "details": message})


class SessionClient:
    """The client of one session. It implements :class:`crow.agent.Client` over a connection.

    `options` returns the session's current config options, and `commands` its current slash commands. `has_network`
    means that confined commands with the access `write` may use the network.

    The user sees at most one permission request and one question from an MCP server at a time. Otherwise, a new dialog
    might replace the one that the user is answering.
    """

    def __init__(
        self,
        session_id: str,
        connection: ClientConnection,
        caps: ClientCapabilities,
        *,
        cwd: str,
        options: Callable[[], list[dict[str, Any]]],
        commands: Callable[[], list[dict[str, Any]]],
        user_timeout_s: float,
        has_network: bool = False,
    ) -> None:
        self._session_id = session_id
        self._connection = connection
        self._caps = caps
        self._cwd = cwd
        self._live = LiveUpdates(caps, cwd=cwd, session_id=session_id)
        self._options = options
        self._commands = commands
        self._user_timeout_s = user_timeout_s
        self._has_network = has_network
        self._asking = anyio.Lock()
        self._eliciting = FairLimiter(1)
        self._has_declined = False
        self._page_ids: set[str] = set()
        self._is_known = asyncio.Event()
        self._updating = asyncio.Lock()
        self._replayed_to = 0
        self._replayed_messages: frozenset[str] = frozenset()
        self._replayed_calls: frozenset[CallRef] = frozenset()
        self.has_learned = False
        """Whether the client joined a running turn and must still be sent the turn's unfinished message and calls."""
        self._unsent: tuple[Update, ...] = ()
        """The unfinished message and calls that the client joined with, while no turn seemed to run. They are sent only
        if the turn goes on, or if they are stored later: otherwise, they are not part of the session's log."""
        self.place = CursorTracker(is_used=caps.cursors)
        """The place in the session's log up to which the client has been sent everything."""
        self.sent_at = 0.0
        """The monotonic time in seconds when the last update was sent."""
        self.is_closed = False
        self._parent: SessionClient | None = None
        self.subagents: dict[str, SessionClient] = {}
        """The clients that show running sub-agents as sessions of their own, by the ids of these sessions."""
        self._states: dict[str, events.SubagentChanged] = {}
        self._replayed: dict[str, events.SubagentChanged] = {}

    def open(self) -> None:
        """Starts to send updates. Must be called when the editor knows the session's id."""
        self._is_known.set()

    def close(self) -> None:
        """Stops sending updates, since the session is closed."""
        self.is_closed = True
        self._is_known.set()

    def hold(self) -> None:
        """Makes new updates and questions wait until `open`."""
        self._is_known = asyncio.Event()

    def learn(self, running: Sequence[Event], place: CursorTracker | None = None) -> None:
        """Prepares a client that joins a running turn. `running` contains the turn's events so far, which the other
        clients already got; see `crow.domain.replay.RunningTurn`. `place` is the place in the log that the other
        clients have reached."""
        if place is not None and self._caps.cursors:
            self.place = place
        for event in running:
            self._live.updates(event)
        self.has_learned = True

    async def catch_up(self) -> None:
        """Sends the unfinished message and calls of the running turn. Does nothing if the client did not join a running
        turn, or if a replay has already sent them."""
        if self.has_learned:
            self.has_learned = False
            async with self._updating:
                await self._send_all(self._live.catch_up())

    def has_call(self, call: CallRef | None) -> bool:
        """Whether the call was announced here and has not ended."""
        return self._live.knows(call)

    def _subagent_with(self, call: CallRef | None) -> SessionClient | None:
        """Returns the client of the sub-agent that made the call, or None if no sub-agent of this session made the
        call."""
        return next((subagent for subagent in self.subagents.values() if subagent.has_call(call)), None)

    @property
    def shows_subagents(self) -> bool:
        """See :class:`crow.agent.Client`."""
        return self._caps.subagents

    def open_subagent(self, session_id: str) -> SessionClient:
        """See :class:`crow.agent.Client`. The user sees one question at a time, even from several sub-agents."""
        client = self.subagent(session_id)
        client.open()
        self.subagents[session_id] = client
        return client

    def close_subagent(self, session_id: str) -> None:
        """See :class:`crow.agent.Client`."""
        client = self.subagents.pop(session_id, None)
        if client is not None:
            client.open()

    def note_state(self, event: events.SubagentChanged) -> None:
        """Remembers the state of a sub-agent."""
        self._states[event.session_id] = merged_state(self._states.get(event.session_id), event)

    async def replay_subagents(self, store: Store, family: Family, limits: ReplayLimits) -> None:
        """Announces the session's sub-agents and sends their stored histories. Must be called before the history of the
        session is sent.

        New updates of running sub-agents wait until `tell_subagents` is called. The editor treats everything that it
        gets before that as history.
        """
        rows = [row for row in await store.subagents(self._session_id) if row.has_prompt]
        for index, row in enumerate(rows):
            running, state = self.subagents.get(row.id), row.state
            if running is not None:
                running.hold()
            elif state == "running":  # the process of the sub-agent may have died
                state = (await store.open_session(row.id)).row.state
            title = title_line(row.title or "")
            await self.send({"sessionUpdate": "subagent_update", "sessionId": row.id, "title": title})
            family.known.add(row.id)
            # A sub-agent that runs in another process cannot be observed here.
            shown = events.SubagentChanged(
                session_id=row.id, title=row.title or "", state="unknown" if state == "running" else "idle"
            )
            self._replayed[row.id] = shown
            if index < len(rows) - MAX_REPLAYED:
                continue
            client, own = running or self.subagent(row.id), Family(session_id=row.id, parent_id=self._session_id)
            await client.replay_subagents(store, own, limits)
            history = store.history(row.id, result_bytes=limits.result_bytes)
            updates = await client.replay(history, is_running=running is not None, limits=limits, family=own)
            family.tasks |= own.tasks
            family.answers |= own.answers
            self._replayed[row.id] = replace(shown, stop=updates.stop, detail=updates.detail)

    async def tell_subagents(self) -> None:
        """Sends the state of each sub-agent. Must be called right after the response to the request that opened the
        session."""
        known, self._replayed = self._replayed, {}
        for session_id in dict.fromkeys([*known, *self.subagents]):
            state = self._states.get(session_id) or known[session_id]
            await self._send_all(self._live.updates(replace(state, title=state.title or "")))
            if (running := self.subagents.get(session_id)) is not None:
                await running.catch_up()
                running.open()

    def release_subagents(self) -> None:
        """Lets the sub-agents send updates again, after a replay failed."""
        self._replayed = {}
        for running in self.subagents.values():
            running.open()

    def subagent(self, session_id: str) -> SessionClient:
        """Returns a client for a sub-agent of this session."""
        client = SessionClient(
            session_id,
            self._connection,
            self._caps,
            cwd=self._cwd,
            options=list,
            commands=list,
            user_timeout_s=self._user_timeout_s,
            has_network=self._has_network,
        )
        client._parent, client._asking, client._eliciting = self, self._asking, self._eliciting
        client._page_ids = self._page_ids
        return client

    async def publish(self, event: Event) -> None:
        """See :class:`crow.agent.Client`. Waits while a replay runs, and skips events that the replay already sent."""
        if isinstance(event, events.CallProgressed) and (subagent := self._subagent_with(event.call)) is not None:
            await subagent.publish(event)
            return
        if isinstance(event, events.SubagentChanged) and self._caps.subagents:
            self.note_state(event)
        await self._is_known.wait()
        async with self._updating:
            if self._is_replayed(event):
                return
            if self._unsent:
                await self._send_unsent(event)
            extra: list[Update] = []
            match event:
                case events.ModeChanged() | events.OptionsChanged():
                    extra = [{"sessionUpdate": "config_option_update", "configOptions": self._options()}]
                case events.CommandsChanged():
                    extra = [{"sessionUpdate": "available_commands_update", "availableCommands": self._commands()}]
            await self._send_event(event, self._live.updates(event))
            await self._send_all(extra)

    def _is_replayed(self, event: Event) -> bool:
        match event:
            case events.EntryStored(entry=Entry(body=Started(call=call))):
                # A replay does not show that a call has started.
                return call in self._replayed_calls
            case events.EntryStored(entry=entry):
                return entry.id <= self._replayed_to
            case events.CallAnnounced(call=call):
                return call in self._replayed_calls
            case events.TextShown(message_id=message_id) | events.ThoughtShown(message_id=message_id):
                return message_id in self._replayed_messages
            case _:
                return False

    async def publish_shared(self, event: Event, *, is_own: bool) -> None:
        """Sends an event of a session that may have several clients. If the event is the newly stored prompt of another
        client, sends the prompt first."""
        match event:
            case events.EntryStored(entry=Entry(body=User(message_id=message_id, parts=parts))) if not is_own:
                await self._show_prompt_of_other(message_id, prompt_updates(message_id, parts))
        await self.publish(event)

    async def show_turn(self, prompt: PendingPrompt, entry: int | None, *, is_own: bool) -> None:
        """Tells the client that a turn begins, and sends the turn's prompt. Does neither for the client that sent the
        prompt.

        `entry` is the id of the prompt's entry. If the prompt is a slash command, or still needs content from an MCP
        server, `entry` is the id of the last entry before the turn, or None if there is no earlier entry.
        """
        updates: Sequence[Update] = ()
        if prompt.command is not None:
            updates = command_updates(prompt.message_id, prompt.text)
        elif not prompt.needs_servers:
            updates = prompt_updates(prompt.message_id, prompt.parts)
        if not is_own:
            await self._show_prompt_of_other(prompt.message_id, updates)
        await self._is_known.wait()
        async with self._updating:
            self._pass_prompt(prompt, entry)
            if not is_own:
                await self.send(turn_state_update({"state": "running"}))

    def _pass_prompt(self, prompt: PendingPrompt, entry: int | None) -> None:
        """Moves the cursor to the beginning of a turn. Does nothing if a replay or a resume has already sent `entry`,
        because the cursor may be at a later place by then."""
        if (entry or 0) > self._replayed_to:
            self.place.pass_prompt(entry=entry, command=prompt.message_id if prompt.command is not None else "")

    async def show_turn_end(self, prompt: PendingPrompt, state: Mapping[str, Any], *, is_own: bool) -> None:  # noqa: ARG002
        """Sends the `state` in which a turn ended. Sends nothing to the client that sent the prompt, because that
        client learns the state from the response."""
        if not is_own:
            await self._is_known.wait()
            async with self._updating:
                await self.send(turn_state_update(state))

    async def _show_prompt_of_other(self, message_id: str, updates: Sequence[Update]) -> None:
        await self._is_known.wait()
        async with self._updating:
            if message_id not in self._replayed_messages:
                for update in updates:
                    self.place.pass_piece(User(parts=(), message_id=message_id))
                    await self.send(update)

    async def replay(
        self,
        history: AsyncIterator[Sequence[Entry]],
        *,
        is_running: bool,
        limits: ReplayLimits | None = None,
        family: Family | None = None,
    ) -> ReplayUpdates:
        """Sends a stored history, shortened to `limits`. For `family`, see `ReplayUpdates`.

        If a turn is running, its unfinished message and calls are sent after the history. New events of the turn wait
        until this method has sent everything.
        """
        async with self._updating:
            self.has_learned, self.place.cursor = False, Cursor()
            replay, updates = Replay(), ReplayUpdates(self._caps, limits, family)
            messages: deque[str] = deque(maxlen=MAX_REMEMBERED)
            calls: deque[CallRef] = deque(maxlen=MAX_REMEMBERED)
            async for batch in history:
                for entry in batch:
                    body = entry.body
                    if isinstance(body, ToolResult):
                        calls.append(body.call)
                    elif isinstance(body, Assistant | User | Command):
                        messages.append(body.message_id)
                    await self._send_entry(entry, replay, updates)
                    self._replayed_to = max(self._replayed_to, entry.id)
            self._replayed_messages, self._replayed_calls = frozenset(messages), frozenset(calls)
            for event in replay.pause() if is_running else replay.end():
                await self._send_all(updates.updates(event))
            await self._send_unfinished(
                self._live.catch_up(ended=calls, shown=self._replayed_messages), is_running=is_running
            )
        return updates

    async def resume(self, missed: Missed, *, is_running: bool, is_own: Callable[[str], bool]) -> None:
        """Sends the updates that the client missed, except the prompts that the client itself sent.

        If a turn is running, also sends the parts of the turn's unfinished message and calls that the client does not
        have yet.

        :raises CursorGap: the client has a part of a message that is not in the history.
        """
        async with self._updating:
            self.has_learned = False
            cursor = missed.cursor
            self._check(missed)
            replay, updates = Replay(), ReplayUpdates(self._caps, ReplayLimits(is_full=True))
            self.place.cursor = cursor
            for entry in missed.before:
                for event in replay.feed(entry):
                    updates.updates(event)
                self.place.note_answer(entry)
            skipped = cursor.pieces
            for entry in missed.entries:
                is_known = isinstance(entry.body, User) and is_own(entry.body.message_id)
                left = await self._send_entry(
                    entry, replay, updates, cursor=cursor, skipped=10**9 if is_known else skipped
                )
                skipped = skipped if is_known else left
                self._replayed_to = max(self._replayed_to, entry.id)
            bodies = [entry.body for entry in (*missed.before, *missed.entries)]
            self._replayed_messages = frozenset(
                body.message_id for body in bodies if isinstance(body, Assistant | User | Command)
            )
            self._replayed_calls = frozenset(body.call for body in bodies if isinstance(body, ToolResult))
            for event in replay.pause() if is_running else replay.end():
                await self._send_all(updates.updates(event))
            unfinished = self._live.catch_up(ended=self._replayed_calls, shown=self._replayed_messages, cursor=cursor)
            await self._send_unfinished(unfinished, is_running=is_running)
            await self._resume_subagents(missed)
            own = {entry.id for entry in (*missed.before, *missed.entries)}
            for call in cursor.calls:
                if call.assistant not in own and call not in self._replayed_calls and not self._live.knows(call):
                    result = missed.results.get(call)
                    body = result.body if result is not None and isinstance(result.body, ToolResult) else None
                    await self._send_all(self._live.ended_elsewhere(call, body))

    async def _send_unfinished(self, unfinished: tuple[Update, ...], *, is_running: bool) -> None:
        if is_running:
            await self._send_all(unfinished)
        self._unsent = () if is_running else unfinished

    async def _send_unsent(self, event: Event) -> None:
        """Sends the unfinished message and calls if `event` belongs to one of them. Forgets them if `event` belongs to
        another turn."""
        match event:
            case (
                events.TextShown(message_id=message_id)
                | events.ThoughtShown(message_id=message_id)
                | events.EntryStored(entry=Entry(body=Assistant(message_id=message_id)))
            ):
                is_next = message_id == self._live.message[0]
            case (
                events.CallProgressed(call=call)
                | events.CallEnded(call=call)
                | events.EntryStored(entry=Entry(body=Started(call=call) | ToolResult(call=call)))
            ):
                is_next = self._live.knows(call)
            case events.EntryStored(entry=Entry(body=User() | Command() | TurnEnd())):
                is_next = False
            case _:
                return
        unsent, self._unsent = self._unsent, ()
        if is_next:
            await self._send_all(unsent)

    async def _resume_subagents(self, missed: Missed) -> None:
        """Warns the user if updates of sub-agents may be missing. The sessions of sub-agents have no cursors, so crow
        cannot send those updates again."""
        for subagent in self.subagents.values():
            subagent.has_learned = False  # the client may already have a part of the unfinished message
        results = (entry.body for entry in missed.entries if isinstance(entry.body, ToolResult))
        if self._caps.subagents and (self.subagents or any(result.name == "task" for result in results)):
            title = "Updates of sub-agents were missed. Load the session to see all of them."
            await self._send_all(self._live.updates(events.NoticeShown(severity="warning", title=title)))

    def _check(self, missed: Missed) -> None:
        """Checks that the history contains the message that the cursor names, with at least as much text as the client
        already has.

        :raises CursorGap: the history does not contain this message, or contains less of its text.
        """
        cursor = missed.cursor
        if not (cursor.text or cursor.thought):
            return
        answer = next((each.body for each in missed.entries if isinstance(each.body, Assistant)), None)
        message_id, thought, text = (
            self._live.message if answer is None else (answer.message_id, answer.thought, answer.text)
        )
        if message_id != cursor.message:
            raise CursorGap(f"the message {cursor.message} is not in the current history of this session.")
        if len(thought) < cursor.thought or len(text) < cursor.text:
            raise CursorGap(f"the message {cursor.message} is shorter than the part of it that the client already has.")

    async def _send_entry(
        self,
        entry: Entry,
        replay: Replay,
        updates: ReplayUpdates,
        *,
        cursor: Cursor | None = None,
        skipped: int = 0,
    ) -> int:
        """Sends the updates of an entry. With `cursor`, leaves out what the client got before the cursor. If the
        entry's kind is in `PIECEMEAL`, also leaves out the first `skipped` of the remaining updates.

        Returns how many updates of later entries must still be skipped.
        """
        found: list[tuple[Event, Update]] = []
        for event in replay.feed(entry):
            shown = event if cursor is None else _after(event, cursor)
            if shown is None:
                updates.note_sent()
                continue
            found += [(event, update) for update in updates.updates(shown)]
        if cursor is not None and isinstance(entry.body, Command) and entry.body.message_id == cursor.message:
            found = [each for each in found if each[1]["sessionUpdate"] != "user_message_chunk"]
        if isinstance(entry.body, PIECEMEAL):
            found, skipped = found[skipped:], skipped if not found else 0
        is_settled = not replay.holds_results
        for index, (event, update) in enumerate(found, 1):
            self.place.pass_update(event, update)
            if index < len(found):
                self.place.pass_piece(entry.body)
            elif is_settled:
                self.place.pass_entry(entry)
            await self.send(update)
        if not found and is_settled:
            self.place.pass_entry(entry)
        await self._after_sending()
        return skipped

    async def _send_event(self, event: Event, updates: Sequence[Update]) -> None:
        """Sends the updates of an event. The cursor in the last update is the place right after the event's entry."""
        entry = event.entry if isinstance(event, events.EntryStored) else None
        for index, update in enumerate(updates, 1):
            self.place.pass_update(event, update)
            if entry is not None and index < len(updates):
                self.place.pass_piece(entry.body)
            elif entry is not None:
                self.place.pass_entry(entry)
            await self.send(update)
        if entry is not None and not updates:
            self.place.pass_entry(entry)
        await self._after_sending()

    async def _after_sending(self) -> None:
        """Does nothing. A subclass can act here after the updates of an event have been sent."""

    async def send(self, update: Update, *, has_place: bool = True) -> None:
        """Sends one update. Does nothing if the editor is gone or the session is closed. With `has_place=False`, the
        update carries no cursor, because it has no place in the log."""
        if not (self.is_closed or (self._parent is not None and self._parent.is_closed)):
            params = {"sessionId": self._session_id, "update": update}
            if self._caps.cursors and has_place and self._parent is None:
                params["_meta"] = {CURSOR_KEY: str(self.place.cursor)}
            await self._connection.notify("session/update", params)
            self.sent_at = time.monotonic()

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
        """See :class:`crow.agent.Client`."""
        try:
            return await self.ask_shared(question)
        except ConnectionError:
            return "cancelled"

    async def ask_shared(self, question: PermissionQuestion) -> PermissionAnswer:
        """See `ask`. A question about the call of a sub-agent is asked in the sub-agent's session.

        :raises ConnectionError: the client is gone.
        """
        if (subagent := self._subagent_with(question.call)) is not None:
            return await subagent.ask_shared(question)
        if not self.has_call(question.call):
            return "cannot_ask"  # the call belongs to a sub-agent that the editor cannot show
        await self._is_known.wait()
        params = permission_params(self._session_id, question, has_network=self._has_network)
        async with self._asking:
            return await self._ask(question, params)

    async def _ask(self, question: PermissionQuestion, params: dict[str, Any]) -> PermissionAnswer:
        call = params["toolCall"]
        content = self._live.question_content(question.call, call.pop("content", []))
        call |= {"content": content} if content else {}
        offered = [option["optionId"] for option in params["options"]]
        try:
            with anyio.fail_after(self._user_timeout_s):
                return permission_answer(await self._request("session/request_permission", params), offered)
        except TimeoutError:
            return "unanswered"
        except RequestError as error:
            logger.warning("The editor could not ask for permission: %s", error)
            return "cannot_ask"

    @property
    def takes_notices(self) -> bool:
        """See :class:`crow.agent.Client`."""
        return self._caps.notices

    @property
    def question_kinds(self) -> frozenset[ElicitationKind]:
        """See :class:`crow.agent.Client`."""
        return self._caps.question_kinds

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """See :class:`crow.agent.Client`."""
        try:
            return await self.elicit_shared(question)
        except (RequestError, ConnectionError, TimeoutError) as error:
            logger.warning("The editor could not ask the user: %s", error)
            return ElicitationAnswer(action="cancel")

    async def elicit_shared(self, question: Elicitation) -> ElicitationAnswer:
        """See `elicit`. A question during the call of a sub-agent is asked in the sub-agent's session.

        :raises ConnectionError: the client is gone.
        :raises RequestError: the client cannot ask its user.
        :raises TimeoutError: the user did not answer.
        """
        if (subagent := self._subagent_with(question.call)) is not None:
            return await subagent.elicit_shared(question)
        if question.call is not None and not self.has_call(question.call):
            return ElicitationAnswer(action="cancel")  # the call belongs to a sub-agent that the editor cannot show
        params = elicitation_params(self._session_id, question)
        if params["mode"] not in self.question_kinds or json_bytes(params) > PART_BYTES:
            return ElicitationAnswer(action="cancel")
        await self._is_known.wait()
        if self._eliciting.waiting >= MAX_WAITING_QUESTIONS:
            await self._decline(params["message"])
            return ElicitationAnswer(action="decline")
        async with self._eliciting.slot():
            if not self._eliciting.waiting:
                self._has_declined = False
            return await self._elicit(params)

    async def _decline(self, message: str) -> None:
        """Tells the user that a question was declined. After that, crow declines further questions without a notice,
        until no more questions are waiting."""
        if not self._has_declined:
            self._has_declined = True
            title = f"MCP servers ask too many questions: {MAX_WAITING_QUESTIONS} already wait for your answer."
            described = f"Until you answer, crow declines all new questions, such as this one: {title_line(message)}"
            await self.publish(events.NoticeShown(severity="warning", title=title, description=described))

    async def _elicit(self, params: dict[str, Any]) -> ElicitationAnswer:
        if params["mode"] == "url":
            self._page_ids.add(params["elicitationId"])
        with anyio.fail_after(self._user_timeout_s):
            return elicitation_answer(await self._request("elicitation/create", params))

    async def finish_question(self, question_id: str) -> None:
        """See :class:`crow.agent.Client`."""
        if question_id in self._page_ids:
            self._page_ids.discard(question_id)
            await self._connection.notify("elicitation/complete", {"elicitationId": question_id})

    async def _request(self, method: str, params: dict[str, Any]) -> Any:
        return await self._connection.request(method, params)

    async def _send_all(self, updates: Sequence[Update]) -> None:
        """Sends updates that show the current state and belong to no event."""
        for update in updates:
            self.place.pass_update(None, update)
            await self.send(update)
        await self._after_sending()


def turn_state_update(state: Mapping[str, Any]) -> Update:
    """Returns an update with the state of a turn that another client started. A client of version 1 learns the state of
    its own turns from the responses to its prompts."""
    return {"sessionUpdate": "session_info_update", "_meta": {"acp/turnState": dict(state)}}


def _after(event: Event, cursor: Cursor) -> Event | None:
    """Returns the part of `event` that comes after `cursor`, or None if there is no such part."""
    match event:
        case events.TextShown(message_id=message_id, text=text) if message_id == cursor.message:
            return replace(event, text=text[cursor.text :]) if len(text) > cursor.text else None
        case events.ThoughtShown(message_id=message_id, text=text) if message_id == cursor.message:
            return replace(event, text=text[cursor.thought :]) if len(text) > cursor.thought else None
        case _:
            return event


def refusal_text(error: RequestError) -> str:
    """Returns the editor's explanation of an error. Some editors put the explanation into `data`, and send a useless
    `message`."""
    match error.data:
        case {"details": str(text)} | {"error": str(text)} | str(text) if text:
            return text
        case _:
            return str(error)
