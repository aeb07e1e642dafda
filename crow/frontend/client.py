"""One client of one session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from crow.agent import PermissionAnswer, PermissionQuestion
from crow.agent.feed import Feed
from crow.domain import events
from crow.domain.entries import Assistant, CallRef, Command, Entry, ToolResult, User
from crow.domain.events import Elicitation, ElicitationAnswer
from crow.domain.text import title_line
from crow.frontend.calls import ViewLimits
from crow.frontend.cursors import CURSOR_KEY, PIECEMEAL, Cursor, CursorGap
from crow.frontend.missed import Missed
from crow.frontend.questions import Dialogs
from crow.frontend.subagents import MAX_REPLAYED, Family, merged_state
from crow.frontend.view import Shown, View
from crow.protocol import Outlet
from crow.protocol.params import ClientCapabilities
from crow.protocol.updates import Update
from crow.store import Store

HISTORY = {"history": True}
"""The mark in the `_meta` of each update that a load sends. `Translation` in `crow.frontend.v2` needs it."""

_MAX_DEPTH = 16
"""A load shows subagents of subagents down to this depth. Sessions in an imported file may be their own ancestors."""


class SessionClient:
    """One client of one session. It sends the updates that the client's view makes of the feed, and asks the client's
    user questions.

    `options` returns the session's current config options, and `commands` its current slash commands. For a subagent,
    `parent` is the client of the session that the subagent works for.
    """

    def __init__(
        self,
        session_id: str,
        outlet: Outlet,
        caps: ClientCapabilities,
        *,
        cwd: str,
        feed: Feed,
        options: Callable[[], list[dict[str, Any]]],
        commands: Callable[[], list[dict[str, Any]]],
        dialogs: Dialogs,
        parent: SessionClient | None = None,
    ) -> None:
        self.session_id = session_id
        self._outlet = outlet
        self.caps = caps
        self._cwd = cwd
        self._feed = feed
        self._options = options
        self._commands = commands
        self._dialogs = dialogs
        self.view = self._view(entry=feed.entry)
        self.is_open = asyncio.Event()
        """Set while updates may be sent: not before the client has the response to the request that opens the
        session."""
        self._sending = asyncio.Lock()
        self._is_closed = False
        self._parent = parent
        self.subagents = _ShownSubagents(self)

    def open(self) -> None:
        """Let waiting items be sent."""
        self.is_open.set()

    def hold(self) -> None:
        """Make items wait until `open`. A client treats everything that it gets before a response as history."""
        self.is_open.clear()

    def close(self) -> None:
        """Send nothing more, because the client was detached from the session."""
        self._is_closed = True
        self.is_open.set()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, here or for the parent session."""
        return self._is_closed or (self._parent is not None and self._parent.is_closed)

    async def show(self, item: events.Event, *, is_own: bool = False) -> None:
        """Send the updates for the next item. `is_own` means that this client sent the prompt that the item shows."""
        if isinstance(item, events.CallProgressed) and (subagent := self.subagents.with_call(item.call)) is not None:
            await subagent.show(item)
            return
        async with self._sending:
            await self._send_shown(self.view.apply(item, is_own=is_own))
            match item:
                case events.ModeChanged() | events.OptionsChanged():
                    await self.send({"sessionUpdate": "config_option_update", "configOptions": self._options()})
                case events.CommandsChanged():
                    commands = self._commands()
                    await self.send({"sessionUpdate": "available_commands_update", "availableCommands": commands})
                case events.SubagentChanged():
                    self.subagents.note(item)

    async def load(
        self,
        history: AsyncIterator[Sequence[Entry]],
        *,
        is_running: Callable[[], bool],
        limits: ViewLimits | None = None,
        family: Family | None = None,
    ) -> View:
        """Send a whole log, shortened to `limits`, and the unfinished part of a running turn. Return the new view.

        `is_running` returns whether a turn is running. Later items wait until everything is sent.
        """
        async with self._replacing_view():
            was_running, items = is_running(), self._feed.open_items()
            self.view = view = self._view(is_reading=True, limits=limits, family=family)
            async for batch in history:
                for entry in batch:
                    await self._send_shown(view.apply(events.EntryStored(entry=entry)), is_history=True)
            await self._send_shown(view.end_reading(is_running=was_running or is_running()), is_history=True)
            for item in items:
                await self._send_shown(view.apply(item), is_history=True)
        return view

    async def resume(
        self,
        read: Callable[[], Awaitable[Missed]],
        *,
        is_running: Callable[[], bool],
        is_own: Callable[[User | Command], bool],
    ) -> Missed:
        """Send the updates that the client has missed since its cursor, except the prompts for which `is_own` is true.
        `read` reads the missed part of the log. Return the result of `read`.

        :raises CursorGap: the client has a part of a message that is not in the log.
        """
        async with self._replacing_view():
            was_running, items = is_running(), self._feed.open_items()
            missed = await read()
            self._check(missed, items)
            cursor = self._start_of(missed)
            self.view = view = View.at(cursor, missed.before, self.caps, session_id=self.session_id, cwd=self._cwd)
            own = {entry.id for entry in (*missed.before, *missed.entries)}
            going = {item.call for item in items if isinstance(item, events.CallAnnounced)}
            for call in cursor.calls.keys() - going:
                if call.assistant not in own:  # a subagent made this call, and it ended meanwhile
                    result = missed.results.get(call)
                    body = result.body if result is not None and isinstance(result.body, ToolResult) else None
                    await self._send_shown(view.end_missed(call, body))
            for entry in missed.entries:
                is_known = isinstance(entry.body, User | Command) and is_own(entry.body)
                await self._send_shown(view.apply(events.EntryStored(entry=entry), is_own=is_known))
            await self._send_shown(view.end_reading(is_running=was_running or is_running()))
            for item in items:
                shown = view.apply(item)
                # A client without this capability already has a remark about the compaction; do not send it twice.
                if self.caps.compaction or not isinstance(item, events.CompactionChanged):
                    await self._send_shown(shown)
            await self._tell_missed_subagents(missed)
        return missed

    @asynccontextmanager
    async def _replacing_view(self) -> AsyncIterator[None]:
        """Send nothing else during the block, which replaces the view. If the block fails or is cancelled, restore the
        old view: a view that has stopped halfway through the log would show no call before its result."""
        async with self._sending:
            before = self.view
            try:
                yield
            except BaseException:
                self.view = before
                raise

    def _start_of(self, missed: Missed) -> Cursor:
        """Return the cursor after which to send updates. A client of version 2 that has only a part of a prompt gets
        the prompt again from its beginning, because in version 2 the first piece replaces what the client has."""
        first = next((entry.body for entry in missed.entries if isinstance(entry.body, PIECEMEAL)), None)
        if self.caps.is_translated and isinstance(first, User):
            return replace(missed.cursor, pieces=0)
        return missed.cursor

    def _check(self, missed: Missed, items: Sequence[events.Event]) -> None:
        """Check that the cursor's message, if there is one, is in the log or in the feed.

        :raises CursorGap: the message is in neither.
        """
        cursor = missed.cursor
        if not (cursor.text or cursor.thought):
            return
        stored = {entry.body.message_id for entry in missed.entries if isinstance(entry.body, Assistant)}
        growing = {item.message_id for item in items if isinstance(item, events.TextShown | events.ThoughtShown)}
        if cursor.message not in stored | growing:
            raise CursorGap(f"the message {cursor.message} is not in the current history of this session.")

    async def _tell_missed_subagents(self, missed: Missed) -> None:
        """Warn the user if updates of subagents may be missing. The sessions of subagents have no cursors, so crow
        cannot send those updates again."""
        results = (entry.body for entry in missed.entries if isinstance(entry.body, ToolResult))
        if self.caps.subagents and (self.subagents.running or any(result.name == "task" for result in results)):
            title = "Updates of subagents were missed. Load the session to see all of them."
            await self._send_shown(self.view.apply(events.NoticeShown(severity="warning", title=title)))

    def _view(self, **options: Any) -> View:
        return View(self.caps, session_id=self.session_id, cwd=self._cwd, **options)

    async def _send_shown(self, shown: Sequence[Shown], *, is_history: bool = False) -> None:
        for update, cursor in shown:
            await self.send(update, cursor, is_history=is_history)

    async def send(self, update: Update, cursor: Cursor | None = None, *, is_history: bool = False) -> None:
        """Send one update. Do nothing if the editor is gone or the session is closed. `cursor` is the place in the
        session after the update; by default, it is the place of the view. `is_history` means that a load sends the
        update."""
        if not self.is_closed:
            meta = self.place(cursor) | (HISTORY if is_history and self.caps.is_translated else {})
            params = {"sessionId": self.session_id, "update": update} | ({"_meta": meta} if meta else {})
            await self._outlet.notify("session/update", params)

    def place(self, cursor: Cursor | None = None) -> dict[str, Any]:
        """Return a `_meta` with `cursor`, or with the view's cursor. Return an empty dict if the client uses none."""
        return {CURSOR_KEY: str(cursor or self.view.cursor)} if self.caps.cursors else {}

    def for_subagent(self, session_id: str, feed: Feed) -> SessionClient:
        """Return a client that shows a subagent's session."""
        return SessionClient(
            session_id,
            self._outlet,
            replace(self.caps, cursors=False),
            cwd=self._cwd,
            feed=feed,
            options=list,
            commands=list,
            dialogs=self._dialogs,
            parent=self,
        )

    # Questions for the user.

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
        """Ask the user for a permission. A question about the call of a subagent is asked in the subagent's session.

        :raises ConnectionError: the client is gone.
        """
        if (subagent := self.subagents.with_call(question.call)) is not None:
            return await subagent.ask(question)
        if not self.view.calls.knows(question.call):
            return "cannot_ask"  # the call belongs to a subagent that the editor cannot show
        return await self._dialogs.ask(self.session_id, question, self.view.calls, self._outlet.request)

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """Ask the user a question of an MCP server. A question during the call of a subagent is asked in the
        subagent's session.

        :raises ConnectionError: the client is gone.
        :raises RequestError: the client cannot ask its user.
        :raises TimeoutError: the user did not answer.
        """
        if (subagent := self.subagents.with_call(question.call)) is not None:
            return await subagent.elicit(question)
        if question.call is not None and not self.view.calls.knows(question.call):
            return ElicitationAnswer(action="cancel")  # the call belongs to a subagent that the editor cannot show
        return await self._dialogs.elicit(
            self.session_id, question, self._outlet.request, self.caps.question_kinds, self.show
        )

    async def finish_question(self, question_id: str) -> None:
        """See :class:`crow.agent.Client`."""
        if self._dialogs.finish(question_id):
            await self._outlet.notify("elicitation/complete", {"elicitationId": question_id})


class _ShownSubagents:
    """The subagents of one client's session, each shown as a session of its own by a client of its own."""

    def __init__(self, client: SessionClient) -> None:
        self._client = client
        self.running: dict[str, SessionClient] = {}
        """The clients of running subagents, by the ids of their sessions."""
        self._states: dict[str, events.SubagentChanged] = {}
        """The newest state of each subagent that has worked since the client was attached."""
        self._loaded: dict[str, events.SubagentChanged] = {}
        """The states that `load` has read, until `tell` sends them."""

    def open(self, session_id: str, feed: Feed) -> SessionClient:
        """Return the client that shows a running subagent of this session. `feed` is the subagent's feed."""
        client = self.running[session_id] = self._client.for_subagent(session_id, feed)
        return client

    def close(self, session_id: str) -> None:
        """Forget a subagent whose work has ended."""
        self.running.pop(session_id, None)

    def note(self, event: events.SubagentChanged) -> None:
        """Remember the state of a subagent."""
        self._states[event.session_id] = merged_state(self._states.get(event.session_id), event)

    def with_call(self, call: CallRef | None) -> SessionClient | None:
        """Return the client of the subagent that made the call, or None if no subagent of this session made it."""
        return next((subagent for subagent in self.running.values() if subagent.view.calls.knows(call)), None)

    async def load(self, store: Store, family: Family, limits: ViewLimits, *, depth: int = _MAX_DEPTH) -> None:
        """Announce the session's subagents and send their logs. Do the same for their own subagents, down to `depth`
        levels. Must be called before the session itself is loaded."""
        rows = [row for row in await store.subagents(self._client.session_id) if row.has_prompt and depth]
        for index, row in enumerate(rows):
            running, state = self.running.get(row.id), row.state
            if running is None and state == "running":  # the process of the subagent may have died
                state = (await store.open_session(row.id)).row.state
            title = title_line(row.title or "")
            await self._client.send({"sessionUpdate": "subagent_update", "sessionId": row.id, "title": title})
            family.known.add(row.id)
            # A subagent that runs in another process cannot be observed here.
            shown = events.SubagentChanged(
                session_id=row.id, title=row.title or "", state="unknown" if state == "running" else "idle"
            )
            self._loaded[row.id] = shown
            if index < len(rows) - MAX_REPLAYED:
                continue
            client = running or self._client.for_subagent(row.id, Feed(row.id))
            own, is_running = Family(session_id=row.id, parent_id=self._client.session_id), running is not None
            await client.subagents.load(store, own, limits, depth=depth - 1)
            history = store.history(row.id, result_bytes=limits.result_bytes)
            view = await client.load(history, is_running=lambda: is_running, limits=limits, family=own)  # noqa: B023
            family.tasks |= own.tasks
            family.answers |= own.answers
            if (end := view.last_end) is not None:
                self._loaded[row.id] = replace(shown, stop=end.stop, detail=end.detail)

    async def tell(self) -> None:
        """Send the state of each subagent. Must be called right after the response to the request that opened the
        session."""
        known, self._loaded = self._loaded, {}
        for session_id in dict.fromkeys([*known, *self.running]):
            state = self._states.get(session_id) or known.get(session_id)
            if state is None:
                continue  # the subagent is newer than the load, and its announcement is in the queue
            await self._client.show(replace(state, title=state.title or ""))
